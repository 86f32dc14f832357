/*
 * plan.c: makes the plan of a call of attention: its way, tiles, blocks and tasks.
 */
#include "plan.h"

#include "runtime/common.h"
#include "runtime/threads.h"

/*
 * A block of keys and values should stay in the second-level cache (the smallest in use have 512 KiB) beside a tile of
 * scores.  It takes a little over half of that, so that 512 keys of 64 floats fit, and 256 of 128.  It has whole parts
 * of both products: its borders must not cut a part.  It does not depend on this machine's caches, because it decides
 * about the order of sums, which is the same on every machine.
 */
#define BLOCK_BYTES ((size_t)272 * 1024)
#define BLOCK_STEP ((size_t)128)
#define BLOCK_MOST ((size_t)512)
_Static_assert(BLOCK_STEP % MHA_VALUE_PART == 0 && BLOCK_MOST % BLOCK_STEP == 0, "a key block cuts a part");
/*
 * Height of a tile in register tiles: enough to use a packed panel several times while it is in the first cache.  (With
 * 48 KiB and 2 MiB, 6 and 8 took 0.99 to 1.01 of the time of 4 at 512, 2048 and 4096 keys: it follows no cache size.)
 */
#define TILES_HIGH ((size_t)4)
/*
 * Register tiles of queries, no more, that read keys where they lie.  Beside packed panels, with two of them: keys that
 * no cache holds yet, as a decoder's, take 0.83 to 0.98 of the time, keys in the first caches 0.98 to 1.04.
 */
#define TILES_IN_PLACE ((size_t)2)
/* Rows of a low tile whose scores stand by columns: whole vectors of them, whatever the instruction set. */
#define LOW_COLUMNS ((size_t)16)
/* The most queries of a task, for its row statistics.  (2048 took 0.99 to 1.00 of the time, 4096 0.99 to 1.03.) */
#define TASK_QUERIES_MOST ((size_t)1536)
/* The most rows of a task whose key blocks may become tasks of their own: their partial results are small. */
#define SPLIT_ROWS ((size_t)64)
/* Tasks for each thread, which even out their different lengths. */
#define TASKS_PER_WORKER ((size_t)4)
/*
 * From so many queries on, tiles read the rows of a key block from a copy.  Without it vectors cross cache lines, and
 * rows that lie far apart, as those of one head among the features of all, share few sets of the first cache: 512
 * queries took 1.02 to 1.04 of the time, of such rows 1.06; fewer queries 0.98 to 1.01 (AMD EPYC, family 25, model 17).
 */
#define COPY_QUERIES ((size_t)256)

/* Backward: two sets of packed panels and two tiles of scores share the cache. */
#define BACKWARD_BLOCK ((size_t)256)
_Static_assert(BACKWARD_BLOCK % MHA_GRAD_PART == 0, "a key block cuts a part");
/* Register tiles in a tile of queries: the depth of the dK and dV products. */
#define BACKWARD_TILES_HIGH ((size_t)8)
/* With fewer key heads (of all items) than this, the backward pass cuts their keys into tasks as well. */
#define ENOUGH_TASKS ((size_t)8)

static size_t
choose_key_block(const mha_attention_args *args, size_t itemsize)
{
    const size_t row_bytes = (args->head_dim + args->value_dim + 1) * itemsize;
    const size_t fit = BLOCK_BYTES / row_bytes / BLOCK_STEP * BLOCK_STEP;

    return mha_min(mha_max(fit, BLOCK_STEP), BLOCK_MOST);
}

/* 1 if no result has any number: the count of rows may then be anything, with no memory behind it. */
static int
writes_nothing(const mha_attention_args *args)
{
    const int has_stats = args->row_max != NULL || args->lse != NULL;

    return args->queries == 0 || (args->value_dim == 0 && (args->weights == NULL || args->keys == 0) && !has_stats);
}

/*
 * 1 if scores may stand by columns.  Rows must be short, with nothing between scores and softmax, and must begin with
 * key 0: the caller need not have keys before a window's left edge.
 */
static int
can_go_by_columns(const mha_attention_args *args)
{
    return args->keys <= MHA_SHORT_KEYS && args->visible.window_left == 0 && args->keep_mask.data == NULL &&
           args->bias.data == NULL && args->relative_bias == NULL && args->softcap == 0 && args->sinks == NULL &&
           args->dropout == 0;
}

/*
 * Chooses the way.  By columns, no sum or maximum is taken across the lanes of a vector, which costs about as much as
 * four exponentials.  But queries must fill the lanes, and there may be too few of them, unless those of several items
 * go side by side.
 */
static mha_way
choose_way(const mha_problem *problem)
{
    const mha_attention_args *args = problem->args;
    const size_t lanes = problem->kernels->lanes;
    const size_t by_columns = mha_ceil_div(args->queries, lanes) * args->keys;
    const size_t by_rows = args->queries * (mha_ceil_div(args->keys, lanes) + 4);
    const size_t in_place = (problem->same_visibility ? TILES_IN_PLACE : 1) * problem->kernels->tile_rows;
    const int may = problem->pass != MHA_PASS_WEIGHTS && !problem->counts_keys && can_go_by_columns(args);

    if (args->additive_weights != NULL) {
        return may && args->queries == 1 && args->keys > 0 && args->batch * args->heads > 1 && problem->group == 1
                   ? MHA_WAY_COLUMNS
                   : MHA_WAY_ADDITIVE;
    }
    if (may && by_columns <= by_rows) {
        return MHA_WAY_COLUMNS;
    }
    return problem->group == 1 && args->queries <= in_place ? MHA_WAY_IN_PLACE : MHA_WAY_PACKED;
}

/* Rows whose ends differ go in low tiles: a tile reaches as far as its furthest row. */
static size_t
choose_tile_rows(const mha_problem *problem, const mha_plan *plan)
{
    const size_t tile = problem->kernels->tile_rows, low = plan->way == MHA_WAY_COLUMNS ? LOW_COLUMNS : tile;

    return mha_min(problem->same_visibility ? TILES_HIGH * tile : low, mha_max(problem->args->queries, 1));
}

/*
 * By columns: the runs of a task, as many as fit.  Where several queries of an item look at as many keys as its length
 * says, the runs are those of one item: a softmax goes to the furthest key of all of them.
 */
static size_t
choose_runs(const mha_plan *plan, const mha_problem *problem, size_t most_workers)
{
    const mha_attention_args *args = problem->args;
    const size_t n = args->batch * args->heads, n_tasks = most_workers > 1 ? most_workers * TASKS_PER_WORKER : 1;
    size_t fit = mha_min(MHA_GATHERED / plan->tile_rows, mha_max(n / n_tasks, 1));

    if (args->queries > plan->tile_rows || fit <= 1) {
        return 1;
    }
    if (args->queries > 1 && args->visible.valid_lens != NULL) {
        fit = mha_ceil_div(args->heads, mha_ceil_div(args->heads, fit));
    }
    return fit;
}

static void
choose_tasks(mha_plan *plan, const mha_problem *problem)
{
    const mha_attention_args *args = problem->args;
    const size_t heads = args->batch * args->kv_heads;
    const size_t most = problem->pass == MHA_PASS_IN_TASK ? 1 : mha_threads_for(SIZE_MAX, problem->work);
    const size_t wanted = most > 1 ? mha_ceil_div(most * TASKS_PER_WORKER, heads) : 1;
    size_t queries = mha_ceil_div(args->queries, wanted);

    queries = mha_round_up(mha_max(queries, 1), plan->tile_rows);
    queries = mha_min(queries, mha_round_up(TASK_QUERIES_MOST, plan->tile_rows));
    plan->task_queries = mha_min(queries, mha_max(args->queries, 1));
    plan->task_heads = problem->group;
    if (plan->way == MHA_WAY_COLUMNS) {
        plan->task_queries = plan->tile_rows;
        plan->task_heads = choose_runs(plan, problem, most);
    }
    plan->tasks_per_head = mha_ceil_div(args->queries, plan->task_queries);
    const size_t n_tasks = mha_ceil_div(args->batch * args->heads, plan->task_heads) * plan->tasks_per_head;
    plan->n_tasks = writes_nothing(args) ? 0 : n_tasks;
    plan->n_splits = 1;
    if (problem->pass != MHA_PASS_WEIGHTS && !problem->counts_keys && plan->n_tasks < most &&
        args->queries * problem->group <= SPLIT_ROWS) {
        plan->n_splits = mha_max(mha_ceil_div(args->keys, plan->key_block), 1);
    }
    plan->splits_abreast = plan->n_splits;
    plan->n_workers = most == 1 ? 1 : mha_threads_for(plan->n_tasks * plan->n_splits, problem->work);
}

/* By columns whole vectors of queries; else whole panels of keys and a vector: powers of two would share cache sets. */
static size_t
choose_score_stride(const mha_problem *problem, const mha_plan *plan)
{
    const mha_kernels *k = problem->kernels;

    if (plan->way == MHA_WAY_COLUMNS) { /* the last run's scores are whole vectors, wherever it begins */
        return mha_round_up((plan->task_heads - 1) * plan->tile_rows + mha_round_up(plan->tile_rows, k->lanes),
                            k->lanes);
    }
    return mha_round_up(mha_min(plan->key_block, problem->args->keys), k->panel_width) + k->lanes;
}

static int
copies_rows(const mha_problem *problem, const mha_plan *plan)
{
    return problem->args->queries >= COPY_QUERIES &&
           (plan->way == MHA_WAY_PACKED ||
            (plan->way == MHA_WAY_ADDITIVE && problem->pass != MHA_PASS_BACKWARD)); /* backward reads them once */
}

void
mha_plan_forward(mha_plan *plan, const mha_problem *problem)
{
    const mha_attention_args *args = problem->args;

    *plan = (mha_plan){.way = choose_way(problem), .key_block = choose_key_block(args, problem->kernels->itemsize)};
    plan->tile_rows = choose_tile_rows(problem, plan);
    if (problem->pass != MHA_PASS_WEIGHTS) {
        plan->copies_rows = copies_rows(problem, plan);
        plan->weights_later = args->weights != NULL && args->keys > plan->key_block;
    }
    choose_tasks(plan, problem);
    plan->score_stride = choose_score_stride(problem, plan);
}

void
mha_plan_backward(mha_plan *plan, const mha_problem *problem)
{
    const mha_attention_args *args = problem->args;
    const size_t heads = args->batch * args->kv_heads;
    const int has_key_grads = args->keys > 0 && args->head_dim + args->value_dim > 0;
    const int has_query_grads = args->queries > 0 && args->head_dim > 0;
    const int has_grads = has_query_grads || has_key_grads; /* else none has a number, whatever the count of keys */

    *plan = (mha_plan){
        .way = args->additive_weights == NULL ? MHA_WAY_PACKED : MHA_WAY_ADDITIVE,
        .key_block = BACKWARD_BLOCK,
        .tile_rows = BACKWARD_TILES_HIGH * problem->kernels->tile_rows,
        .task_queries = mha_max(args->queries, 1),
        .task_heads = 1,
        .tasks_per_head = 1,
        .n_splits = has_grads ? mha_max(mha_ceil_div(args->keys, BACKWARD_BLOCK * MHA_SPLIT_BLOCKS), 1) : 1,
        .splits_abreast = 1,
    };
    plan->copies_rows = copies_rows(problem, plan);
    plan->score_stride = choose_score_stride(problem, plan);
    if (heads > 0 && heads < ENOUGH_TASKS) {
        plan->splits_abreast = mha_min(mha_ceil_div(ENOUGH_TASKS, heads), plan->n_splits);
    }
    plan->n_tasks = has_grads ? heads : 0;
    plan->n_workers = mha_threads_for(mha_max(plan->n_tasks * plan->splits_abreast, args->queries), problem->work);
}
