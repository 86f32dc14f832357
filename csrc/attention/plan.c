/*
 * plan.c: how a forward call of attention is gone about: its way, tiles, blocks and tasks, and its scratch memory.
 */
#include "plan.h"

#include "runtime/common.h"
#include "runtime/threads.h"

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
/* The most queries of a task: its row statistics.  (2048 took 0.99 to 1.00 of the time, 4096 0.99 to 1.03.) */
#define TASK_QUERIES_MOST ((size_t)1536)
/* The most rows of a task whose key blocks may be shared out: their partial results are small. */
#define SPLIT_ROWS ((size_t)64)
/* Tasks for each thread, which even out their different lengths. */
#define TASKS_PER_WORKER ((size_t)4)

static size_t
choose_key_block(const mha_attention_args *args, size_t itemsize)
{
    const size_t row_bytes = (args->head_dim + args->value_dim + 1) * itemsize;
    const size_t fit = BLOCK_BYTES / row_bytes / BLOCK_STEP * BLOCK_STEP;

    return mha_min(mha_max(fit, BLOCK_STEP), BLOCK_MOST);
}

double
mha_attention_work(const mha_attention_args *args)
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
static mha_way
choose_way(const mha_plan *plan)
{
    const mha_attention_args *args = plan->args;
    const size_t lanes = plan->kernels->lanes;
    const size_t by_columns = mha_ceil_div(args->queries, lanes) * args->keys;
    const size_t by_rows = args->queries * (mha_ceil_div(args->keys, lanes) + 4);
    const int may = plan->pass != MHA_PASS_WEIGHTS && can_go_by_columns(args);

    if (args->additive_weights != NULL) {
        return may && args->queries == 1 && args->keys > 0 && args->batch * args->heads > 1 &&
                       plan->group <= MHA_SHORT_ITEMS
                   ? MHA_WAY_ITEMS
                   : MHA_WAY_ADDITIVE;
    }
    if (may && by_columns <= by_rows) {
        return MHA_WAY_COLUMNS;
    }
    return plan->group == 1 && args->queries <= plan->kernels->tile_rows ? MHA_WAY_IN_PLACE : MHA_WAY_PACKED;
}

/* Rows whose ends differ go in low tiles: a tile reaches as far as its furthest row. */
static size_t
choose_tile_rows(const mha_plan *plan)
{
    const size_t tile = plan->kernels->tile_rows, low = mha_by_columns(plan) ? LOW_COLUMNS : tile;

    return mha_min(plan->same_visibility ? TILES_HIGH * tile : low, mha_max(plan->args->queries, 1));
}

/* Queries per task: all of them, unless there are too few heads to go round. */
static void
choose_tasks(mha_plan *plan)
{
    const mha_attention_args *args = plan->args;
    const size_t heads = args->batch * args->kv_heads;
    plan->work = mha_attention_work(args);
    const size_t most = plan->pass == MHA_PASS_IN_TASK ? 1 : mha_threads_for(SIZE_MAX, plan->work);
    const size_t wanted = most > 1 ? mha_ceil_div(most * TASKS_PER_WORKER, heads) : 1;
    size_t queries = mha_ceil_div(args->queries, wanted);

    queries = mha_round_up(mha_max(queries, 1), plan->tile_rows);
    queries = mha_min(queries, mha_round_up(TASK_QUERIES_MOST, plan->tile_rows));
    plan->task_queries = mha_min(queries, mha_max(args->queries, 1));
    plan->tasks_per_head = mha_ceil_div(args->queries, plan->task_queries);
    plan->task_heads = plan->group;
    if (plan->way == MHA_WAY_ITEMS) {
        const size_t n_tasks = most > 1 ? most * TASKS_PER_WORKER : 1;
        plan->task_heads *= mha_min(MHA_SHORT_ITEMS / plan->group, mha_max(heads / n_tasks, 1));
    }
    const size_t n_tasks = mha_ceil_div(args->batch * args->heads, plan->task_heads) * plan->tasks_per_head;
    plan->n_tasks = writes_nothing(args) ? 0 : n_tasks;
    plan->blocks_abreast = 1;
    if (plan->n_tasks < most && args->queries * plan->group <= SPLIT_ROWS) {
        plan->blocks_abreast = mha_max(mha_ceil_div(args->keys, plan->key_block), 1);
    }
    plan->n_workers = most == 1 ? 1 : mha_threads_for(plan->n_tasks * plan->blocks_abreast, plan->work);
}

size_t
mha_factor_rows(const mha_plan *plan)
{
    const size_t fit = mha_caches_active().first / 3 / (plan->score_stride * plan->kernels->itemsize);

    return mha_min(mha_max(fit, 1), plan->tile_rows);
}

/* Whole vectors of queries by columns; else of keys, and one more: rows a power of two apart would share cache sets. */
static size_t
choose_score_stride(const mha_plan *plan)
{
    const mha_kernels *k = plan->kernels;

    if (mha_by_columns(plan)) {
        return mha_round_up(plan->way == MHA_WAY_ITEMS ? plan->task_heads : plan->tile_rows, k->lanes);
    }
    return mha_round_up(mha_min(plan->key_block, plan->args->keys), k->panel_width) + k->lanes;
}

/* Do queries see different keys, but those of all items the same? */
static int
shares_row_keys(const mha_plan *plan)
{
    return !plan->same_visibility && plan->args->visible.valid_lens == NULL;
}

void
mha_plan_rooms(mha_plan *plan, mha_scratch *scratch)
{
    plan->room_bytes = mha_room_measure(plan, &plan->room);
    plan->rooms_at = mha_scratch_add(scratch, plan->n_workers, sizeof(mha_room));
    plan->first_room = mha_scratch_add(scratch, plan->n_workers, plan->room_bytes);
    plan->row_keys_at = mha_scratch_add(scratch, shares_row_keys(plan) ? plan->args->queries : 0, sizeof(mha_interval));
}

/* What blocks abreast leave behind, each for all rows of its task: two statistics and an output. */
static void
plan_partials(mha_plan *plan, mha_scratch *scratch)
{
    const mha_kernels *k = plan->kernels;
    const size_t row = mha_round_up(plan->args->value_dim, k->lanes) + 2;
    const size_t n = plan->blocks_abreast > 1 ? plan->n_tasks * plan->blocks_abreast : 0;

    plan->partial_bytes = mha_round_up(plan->task_queries * plan->task_heads * row * k->itemsize, MHA_ALIGN);
    plan->partial_at = mha_scratch_add(scratch, n, plan->partial_bytes);
}

mha_status
mha_plan_init(mha_plan *plan, const mha_attention_args *args, mha_pass pass, mha_scratch *scratch)
{
    const mha_status status = mha_plan_describe(plan, args, pass);

    if (status != MHA_OK) {
        return status;
    }
    const mha_kernels *k = plan->kernels;
    plan->key_block = choose_key_block(args, k->itemsize);
    plan->way = choose_way(plan);
    plan->tile_rows = choose_tile_rows(plan);
    plan->copies_rows = pass != MHA_PASS_WEIGHTS && args->queries >= MHA_COPY_QUERIES &&
                        (plan->way == MHA_WAY_PACKED || plan->way == MHA_WAY_ADDITIVE);
    plan->weights_later = args->weights != NULL && args->keys > plan->key_block;
    choose_tasks(plan);
    plan->score_stride = choose_score_stride(plan);
    plan->factor_rows = args->dropout > 0 ? mha_factor_rows(plan) : 0;

    /* The second pass works from the statistics; where the caller did not ask for them, they are ours. */
    const int own_stats = plan->weights_later && args->row_max == NULL;
    const size_t n_rows = own_stats ? args->batch * args->heads * args->queries : 0;
    plan->stats_at[0] = mha_scratch_add(scratch, n_rows, k->itemsize);
    plan->stats_at[1] = mha_scratch_add(scratch, n_rows, k->itemsize);
    plan_partials(plan, scratch);
    mha_plan_rooms(plan, scratch);
    return MHA_OK;
}

void
mha_plan_place(mha_plan *plan, const mha_scratch *scratch)
{
    const mha_attention_args *args = plan->args;

    plan->rooms = (mha_room *)(void *)(scratch->base + plan->rooms_at);
    for (unsigned i = 0; i < plan->n_workers; i++) {
        mha_room_place(&plan->room, scratch->base + plan->first_room + i * plan->room_bytes, &plan->rooms[i]);
    }
    if (shares_row_keys(plan)) {
        mha_interval *row_keys = (mha_interval *)(void *)(scratch->base + plan->row_keys_at);
        (void)mha_visible_rows(&args->visible, args->queries, args->keys, 0, 0, args->queries, row_keys);
        plan->row_keys = row_keys;
    }
    if (plan->weights_later && plan->row_max == NULL) {
        plan->row_max = scratch->base + plan->stats_at[0];
        plan->row_sum = scratch->base + plan->stats_at[1];
    }
    plan->partials = scratch->base + plan->partial_at;
    plan->grad_w = scratch->base + plan->grad_w_at;
}
