/*
 * plan.c: the plan of an attention call: its sizes checked, its tiles, blocks and tasks
 * chosen, its scratch memory laid out.  Decided once per call, from sizes alone.
 */
#include "attention.h"

#include "runtime/common.h"
#include "runtime/threads.h"
#include "runtime/threads_interrupt.h"

/*
 * A block of keys and values should stay in the second-level cache, of which the smallest in use have 512 KiB, beside
 * a tile of scores.  A little over half of it, so that 512 keys of 64 floats fit, and 256 of 128.  Whole parts of both
 * products, which a key block's borders must not cut.  Never by the size of this machine's caches: it decides about the
 * order of sums, which is the same on every machine.
 */
#define BLOCK_BYTES ((size_t)272 * 1024)
#define BLOCK_STEP ((size_t)128)
#define BLOCK_MOST ((size_t)512)
_Static_assert(BLOCK_STEP % MHA_VALUE_PART == 0 && BLOCK_MOST % BLOCK_STEP == 0, "a key block cuts a part");
/*
 * Rows of a tile in register tiles: enough to use a packed panel several times while it is in the first cache.  (With
 * 48 KiB and 2 MiB, 6 and 8 took 0.99 to 1.01 of the time of 4 at 512, 2048 and 4096 keys, so no cache is asked.)
 */
#define TILES_HIGH ((size_t)4)
/* Rows of a low tile whose scores stand by columns: whole vectors of them, whatever the instruction set. */
#define LOW_COLUMNS ((size_t)16)
/* A task has at most so many queries: its row statistics.  (2048 took 0.99 to 1.00 of the time, 4096 0.99 to 1.03.) */
#define TASK_QUERIES_MOST ((size_t)1536)
/* Up to so many rows of a task, its key blocks may be shared out: their partial results are small. */
#define SPLIT_ROWS ((size_t)64)
/* So many tasks per thread even out their different lengths. */
#define TASKS_PER_WORKER ((size_t)4)

static size_t
choose_key_block(const mha_attention_args *args, size_t itemsize)
{
    const size_t row_bytes = (args->head_dim + args->value_dim + 1) * itemsize;
    const size_t fit = BLOCK_BYTES / row_bytes / BLOCK_STEP * BLOCK_STEP;

    return mha_min(mha_max(fit, BLOCK_STEP), BLOCK_MOST);
}

/* Multiply-adds of the whole call, roughly: what decides about threads. */
static double
estimate_work(const mha_attention_args *args)
{
    const double scores = (double)args->batch * (double)args->heads * (double)args->queries * (double)args->keys;
    /* A tanh costs about eight multiply-adds, an exponential with its passes twenty. */
    const double per_score = (args->additive_weights != NULL ? 8.0 : 1.0) * (double)args->head_dim;

    return scores * (per_score + (double)args->value_dim + 20.0);
}

/* 1 if no result has any number: there may be any count of rows then, and no memory behind it. */
static int
writes_nothing(const mha_attention_args *args)
{
    const int has_stats = args->row_max != NULL || args->lse != NULL;

    return args->queries == 0 ||
           (args->value_dim == 0 && (args->weights == NULL || args->keys == 0) && !has_stats);
}

/* Queries per task: all of them, unless there are too few heads to go round. */
static void
choose_tasks(mha_plan *plan)
{
    const mha_attention_args *args = plan->args;
    const size_t heads = args->batch * args->kv_heads;
    plan->work = estimate_work(args);
    const size_t most = plan->use == MHA_PLAN_IN_TASK ? 1 : mha_threads_for(SIZE_MAX, plan->work);
    const size_t wanted = most > 1 ? mha_ceil_div(most * TASKS_PER_WORKER, heads) : 1;
    size_t queries = mha_ceil_div(args->queries, wanted);

    queries = mha_round_up(mha_max(queries, 1), plan->tile_rows);
    queries = mha_min(queries, mha_round_up(TASK_QUERIES_MOST, plan->tile_rows));
    plan->task_queries = mha_min(queries, mha_max(args->queries, 1));
    plan->tasks_per_head = mha_ceil_div(args->queries, plan->task_queries);
    plan->heads_at_once = 1;
    if (plan->by_items) {
        const size_t n_tasks = most > 1 ? most * TASKS_PER_WORKER : 1;
        plan->heads_at_once = mha_min(MHA_SHORT_ITEMS / plan->group, mha_max(heads / n_tasks, 1));
    }
    plan->n_tasks = writes_nothing(args) ? 0 : mha_ceil_div(heads, plan->heads_at_once) * plan->tasks_per_head;
    plan->n_splits = 1;
    if (plan->n_tasks < most && args->queries * plan->group <= SPLIT_ROWS) {
        plan->n_splits = mha_max(mha_ceil_div(args->keys, plan->key_block), 1);
    }
    plan->n_workers = most == 1 ? 1 : mha_threads_for(plan->n_tasks * plan->n_splits, plan->work);
}

/*
 * May scores stand by columns?  Rows must be short, with nothing between scores and softmax, and begin with key 0:
 * those before a window's left edge nobody promised to have.
 */
static int
can_go_by_columns(const mha_attention_args *args)
{
    return args->keys <= MHA_SHORT_KEYS && args->visible.window_left < 0 && args->keep_mask.data == NULL &&
           args->bias.data == NULL && args->relative_bias == NULL && args->softcap == 0 && args->sinks == NULL &&
           args->dropout == 0;
}

/*
 * And is it worth while?  They take no sum or maximum across the lanes of a vector, which costs about as much as four
 * exponentials; but they fill their lanes with queries, of which there may be too few, unless those of
 * several items go side by side.
 */
static void
choose_by_columns(mha_plan *plan)
{
    const mha_attention_args *args = plan->args;
    const size_t lanes = plan->kernels->lanes;
    const size_t by_columns = mha_ceil_div(args->queries, lanes) * args->keys;
    const size_t by_rows = args->queries * (mha_ceil_div(args->keys, lanes) + 4);

    if (plan->use == MHA_PLAN_WEIGHTS || !can_go_by_columns(args)) {
        return;
    }
    plan->by_items = args->additive_weights != NULL && args->queries == 1 && args->keys > 0 &&
                     args->batch * args->heads > 1 && plan->group <= MHA_SHORT_ITEMS;
    plan->by_columns = plan->by_items || (args->additive_weights == NULL && by_columns <= by_rows);
}

/* Rows whose ends differ go in low tiles: a tile reaches as far as its furthest row. */
static size_t
choose_tile_rows(const mha_plan *plan)
{
    const size_t tile = plan->kernels->tile_rows, low = plan->by_columns ? LOW_COLUMNS : tile;

    return mha_min(plan->same_visibility ? TILES_HIGH * tile : low, mha_max(plan->args->queries, 1));
}

/* Do queries see different keys, but those of all items the same? */
static int
shares_row_keys(const mha_plan *plan)
{
    return !plan->same_visibility && plan->args->visible.valid_lens == NULL;
}

void
mha_plan_arenas(mha_plan *plan, const mha_arena_sizes *sizes, mha_scratch *scratch)
{
    mha_scratch worker = MHA_SCRATCH_EMPTY;

    /* What is declared as char holds numbers. */
#define ADD(type, name) \
    plan->arena_at.name = \
        mha_scratch_add(&worker, sizes->name, sizeof(type) == 1 ? plan->kernels->itemsize : sizeof(type));
    MHA_ARENA(ADD)
#undef ADD
    plan->worker_bytes = worker.total_bytes;
    plan->first_worker = mha_scratch_add(scratch, plan->n_workers, worker.total_bytes);
    plan->row_keys_at = mha_scratch_add(scratch, shares_row_keys(plan) ? plan->args->queries : 0, sizeof(mha_interval));
}

void
mha_plan_arena(const mha_plan *plan, unsigned worker, mha_arena *arena)
{
    char *base = (char *)(uintptr_t)plan->memory + plan->first_worker + worker * plan->worker_bytes;

#define PLACE(type, name) arena->name = (type *)(void *)(base + plan->arena_at.name);
    MHA_ARENA(PLACE)
#undef PLACE
}

static void
plan_scratch(mha_plan *plan, mha_scratch *scratch)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const size_t rows = plan->task_queries * plan->group * plan->heads_at_once;
    const size_t keys = mha_round_up(mha_min(plan->key_block, args->keys), k->panel_width);
    const size_t values = mha_round_up(args->value_dim, k->lanes);
    const size_t columns = mha_round_up(plan->by_items ? rows : plan->tile_rows, k->lanes);

    /* One vector more than the keys: rows a power of two apart would share a few sets of the cache. */
    plan->score_stride = plan->by_columns ? columns : keys + k->lanes;
    /* Of queries, of edges alone, or of a block of keys. */
    const size_t panels = plan->by_columns     ? mha_round_up(plan->tile_rows, k->panel_width)
                          : plan->keys_in_rows ? k->panel_width
                                               : keys;
    plan->factor_rows = args->dropout > 0 ? mha_factor_rows(plan) : 0;
    const mha_arena_sizes sizes = {
        .packed_keys = args->additive_weights == NULL ? panels * args->head_dim : 0,
        .scores = (plan->by_columns ? args->keys : plan->tile_rows) * plan->score_stride,
        .factors = plan->factor_rows * plan->score_stride,
        .block_out = plan->tile_rows * values,
        .dense_rows = plan->copies_rows != MHA_COPY_NEVER ? keys * values : 0,
        .masked_values = mha_hides_single_keys(plan) ? keys * values : 0,
        .max = rows,
        .sum = rows,
        .sum_compensation = rows,
        .inverse = rows,
        .out_compensation = mha_compensates(plan) ? rows * values : 0,
        .rescale = plan->tile_rows,
        .factor = plan->tile_rows,
        .block_max = plan->tile_rows,
        .block_sum = plan->tile_rows,
        .mean = values,
        .mean_compensation = mha_compensates(plan) ? values : 0,
        .row_keys = plan->task_queries,
        .ends = plan->by_items || (plan->by_columns && !plan->same_visibility) ? columns : 0,
    };
    mha_plan_arenas(plan, &sizes, scratch);
    if (plan->n_splits > 1) {
        plan->partial_bytes = mha_round_up(rows * (values + 2) * k->itemsize, MHA_ALIGN);
        plan->partial_at = mha_scratch_add(scratch, plan->n_tasks * plan->n_splits, plan->partial_bytes);
    }
}

static int
sizes_overflow(const mha_attention_args *args, size_t itemsize)
{
    const size_t widest = mha_max(args->head_dim, args->value_dim);
    size_t scores = args->batch, out = widest, keys = args->head_dim;

    return mha_mul_size(&scores, args->heads) < 0 || mha_mul_size(&scores, args->queries) < 0 ||
           mha_mul_size(&scores, itemsize * 4) < 0 || mha_mul_size(&out, scores) < 0 ||
           mha_mul_size(&keys, args->keys) < 0 || mha_mul_size(&keys, itemsize * 4) < 0 ||
           args->relative_reach > PTRDIFF_MAX / 64 / mha_max(args->heads, 1) ||
           mha_max(mha_max(args->keys, args->queries), widest) > PTRDIFF_MAX / 64;
}

/* Where a part stands in a larger call: no further than may be, and with no corner that it cannot know. */
static int
origin_is_sane(const mha_attention_args *args)
{
    const mha_visibility *v = &args->visible;
    const size_t furthest = mha_max(mha_max(v->first_query, v->first_key), mha_max(args->first_item, args->first_head));

    return furthest <= MHA_LAST_PLACE &&
           (v->causal != MHA_CAUSAL_BOTTOM_RIGHT || (v->first_query == 0 && v->first_key == 0));
}

/* A cheap second look: the binding has checked all this in the user's words. */
static int
is_sane(const mha_attention_args *args)
{
    return (args->row_max == NULL) == (args->row_sum == NULL) && args->heads > 0 && args->kv_heads > 0 &&
           args->heads % args->kv_heads == 0 &&
           (args->visible.valid_lens == NULL || args->visible.lens_per_batch == 1 ||
            args->visible.lens_per_batch == args->queries) &&
           args->dropout >= 0 && args->dropout <= 1 && args->softcap >= 0 && origin_is_sane(args);
}

/* Nothing that goes by the number of a head or by a query's place, but that a last query sees all keys. */
static int
can_fold_heads(const mha_attention_args *args)
{
    mha_visibility visible = args->visible;

    if (visible.causal == MHA_CAUSAL_BOTTOM_RIGHT) {
        visible.causal = MHA_CAUSAL_NONE;
    }
    return args->queries == 1 && args->kv_heads > 0 && args->heads > args->kv_heads && is_sane(args) &&
           mha_same_for_all_queries(&visible) && args->additive_weights == NULL && args->relative_bias == NULL &&
           args->sinks == NULL && args->dropout == 0;
}

static void
fold_mask(mha_mask *mask, ptrdiff_t group)
{
    mask->query_stride = mask->head_stride;
    mask->head_stride *= group;
}

void
mha_fold_heads(const mha_attention_args *args, mha_attention_args *folded)
{
    *folded = *args;
    if (!can_fold_heads(args)) {
        return;
    }
    const ptrdiff_t group = (ptrdiff_t)(args->heads / args->kv_heads);
    folded->heads = args->kv_heads;
    folded->queries = (size_t)group;
    folded->visible.causal = MHA_CAUSAL_NONE;
    folded->q.row_stride = args->q.head_stride;
    folded->q.head_stride *= group;
    folded->out.row_stride = args->out.head_stride;
    folded->out.head_stride *= group;
    fold_mask(&folded->keep_mask, group);
    fold_mask(&folded->bias, group);
}

mha_status
mha_plan_describe(mha_plan *plan, const mha_attention_args *args)
{
    const mha_kernels *k = mha_kernels_for(args->dtype);

    if (k == NULL || !is_sane(args)) {
        return MHA_ERR_ARG;
    }
    if (sizes_overflow(args, k->itemsize)) {
        return MHA_ERR_SIZE;
    }
    *plan = (mha_plan){.args = args, .kernels = k, .row_max = args->row_max, .row_sum = args->row_sum};
    plan->scale = mha_scalar_from(k, args->scale);
    plan->one = mha_scalar_from(k, 1);
    plan->same_visibility = mha_same_for_all_queries(&args->visible);
    plan->group = args->heads / args->kv_heads;
    plan->key_block = choose_key_block(args, k->itemsize);
    plan->watched = mha_interrupt_watched();
    return MHA_OK;
}

mha_status
mha_plan_init(mha_plan *plan, const mha_attention_args *args, mha_plan_use use, mha_scratch *scratch)
{
    const mha_status status = mha_plan_describe(plan, args);

    if (status != MHA_OK) {
        return status;
    }
    const mha_kernels *k = plan->kernels;
    plan->use = use;
    choose_by_columns(plan);
    plan->tile_rows = choose_tile_rows(plan);
    plan->keys_in_rows = args->additive_weights == NULL && !plan->by_columns && plan->group == 1 &&
                         args->queries <= k->tile_rows;
    plan->packs_keys = args->additive_weights == NULL && !plan->by_columns && !plan->keys_in_rows;
    plan->copies_rows = use == MHA_PLAN_WEIGHTS || plan->by_columns || plan->keys_in_rows
                            ? MHA_COPY_NEVER
                            : mha_copying_of(plan, &args->v, args->value_dim);
    plan->weights_later = args->weights != NULL && args->keys > plan->key_block;
    choose_tasks(plan);

    /* The second pass works from the statistics; where the caller did not ask for them, they are ours. */
    const int own_stats = plan->weights_later && args->row_max == NULL;
    const size_t n_rows = own_stats ? args->batch * args->heads * args->queries : 0;
    plan->stats_at[0] = mha_scratch_add(scratch, n_rows, k->itemsize);
    plan->stats_at[1] = mha_scratch_add(scratch, n_rows, k->itemsize);
    plan_scratch(plan, scratch);
    return MHA_OK;
}

void
mha_plan_place(mha_plan *plan, const mha_scratch *scratch)
{
    const mha_attention_args *args = plan->args;

    plan->memory = scratch->base;
    if (shares_row_keys(plan)) {
        mha_interval *row_keys = (mha_interval *)(void *)(scratch->base + plan->row_keys_at);
        (void)mha_visible_rows(&args->visible, args->queries, args->keys, 0, 0, args->queries, row_keys);
        plan->row_keys = row_keys;
    }
    if (plan->weights_later && plan->row_max == NULL) {
        plan->row_max = scratch->base + plan->stats_at[0];
        plan->row_sum = scratch->base + plan->stats_at[1];
    }
}
