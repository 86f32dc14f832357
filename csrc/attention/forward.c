/*
 * forward.c: attention forward, dot-product and additive, without a Q x K buffer.
 *
 * For each block of keys: scores of a tile of queries, softmax with running max and sum, times the
 * block's values; blocks are joined by rescaling.  A tile whose keys lie in one block needs no
 * rescaling and goes straight to the output.  Dao et al. 2022, arXiv 2205.14135.
 *
 * Order of additions, which fixes the bits: values in key order within parts of 64 keys, parts
 * in order within a block, blocks in order (from block 16 on with what rounding loses,
 * mha_compensate_merge).  All borders are multiples counted from key 0, and hidden keys add exact zeros,
 * so a row does not depend on its neighbours.  Summing small blocks first is also 4 to 12 times
 * more accurate on long rows than one long sum.
 */
#include "attention.h"

#include "runtime/common.h"
#include "runtime/threads.h"

#include <string.h>

/* The weights of a tile whose keys all lie in this block: what softmax left in the scores, divided by the sum. */
static void
write_weights(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena, const mha_key_block *block,
              const char *inverse)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;

    for (size_t i = 0; i < tile->rows; i++) {
        char *row = (char *)args->weights + (mha_row_index(plan, tile) + i) * args->keys * k->itemsize;
        const mha_interval seen = mha_row_keys(tile, i);
        /* An empty row has {0, 0}; it is filled later. */
        const size_t at = i * plan->score_stride + (seen.first < seen.last ? seen.first - block->first_key : 0);
        memset(row, 0, seen.first * k->itemsize);
        k->scale_row(seen.last - seen.first, arena->scores + at * k->itemsize, inverse + i * k->itemsize,
                     args->keys - seen.first, row + seen.first * k->itemsize);
    }
}

/* Scores of a tile against a block, and their softmax relative to the block's own max. */
static void
softmax_block(const mha_plan *plan, const mha_rows *tile, mha_arena *arena, mha_key_block *block, char *max, char *sum)
{
    mha_score_tile(plan, tile, arena, block);
    const mha_softmax softmax = {
        .rows = tile->rows,
        .visible = block->visible,
        .phase = block->from / plan->kernels->lanes,
        .scores = arena->scores + block->from * plan->kernels->itemsize,
        .scores_row = (ptrdiff_t)plan->score_stride,
        .max = max,
        .sum = sum,
    };
    plan->kernels->softmax_rows(&softmax);
}

/* A tile all of whose keys lie in this block: a plain softmax, straight to the output. */
static void
attend_whole(const mha_plan *plan, const mha_rows *task, const mha_rows *tile, mha_arena *arena,
             mha_key_block *block)
{
    const mha_attention_args *args = plan->args;
    char *max = mha_state_at(plan, task, tile, arena->max), *sum = mha_state_at(plan, task, tile, arena->sum);
    char *inverse = mha_state_at(plan, task, tile, arena->inverse);
    mha_product product;

    softmax_block(plan, tile, arena, block, max, sum);
    plan->kernels->invert_sums(tile->rows, max, sum, inverse);
    if (args->weights != NULL && !plan->weights_later) {
        write_weights(plan, tile, arena, block, inverse);
    }
    if (args->dropout > 0) {
        mha_drop_weights(plan, tile, arena, block);
    }
    mha_describe_value_product(plan, tile, arena, block, &product);
    product.c = mha_result_at(plan->kernels, &args->out, tile->item, tile->head, tile->query);
    product.c_row = args->out.row_stride;
    product.scale = inverse;
    product.scale_step = 1;
    mha_guarded_product(plan, tile, arena, block, &product, 0);
}

/* What a tile gets from one of several blocks, relative to the block's own max. */
typedef struct {
    char *max, *sum, *out; /* rows of out are padded to whole vectors */
} block_result;

static ptrdiff_t
block_row(const mha_plan *plan)
{
    return (ptrdiff_t)mha_round_up(plan->args->value_dim, plan->kernels->lanes);
}

static void
attend_block(const mha_plan *plan, const mha_rows *tile, mha_arena *arena, mha_key_block *block,
             const block_result *result)
{
    mha_product product;

    softmax_block(plan, tile, arena, block, result->max, result->sum);
    if (plan->args->dropout > 0) {
        mha_drop_weights(plan, tile, arena, block);
    }
    mha_describe_value_product(plan, tile, arena, block, &product);
    product.c = result->out;
    product.c_row = block_row(plan);
    mha_guarded_product(plan, tile, arena, block, &product, 0);
}

/* Adds the block's result to those of the blocks before it; the last one's sums divide the output. */
static void
join_block(const mha_plan *plan, const mha_rows *task, const mha_rows *tile, const mha_arena *arena,
           size_t first_key, const block_result *result)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    char *max = mha_state_at(plan, task, tile, arena->max), *sum = mha_state_at(plan, task, tile, arena->sum);
    char *compensation = mha_state_at(plan, task, tile, arena->sum_compensation);
    char *inverse = mha_state_at(plan, task, tile, arena->inverse);
    const int is_last = tile->keys.last <= first_key + plan->key_block;
    mha_merge merge = {
        .rows = tile->rows,
        .cols = args->value_dim,
        .first = tile->keys.first >= first_key,
        .out = mha_result_at(k, &args->out, tile->item, tile->head, tile->query),
        .out_row = args->out.row_stride,
        .block = result->out,
        .block_row = block_row(plan),
        .rescale = arena->rescale,
        .factor = arena->factor,
        .inverse = is_last ? inverse : NULL,
    };

    if (merge.first) {
        memcpy(max, result->max, tile->rows * k->itemsize);
        memcpy(sum, result->sum, tile->rows * k->itemsize);
        memset(compensation, 0, tile->rows * k->itemsize);
    } else {
        k->join_statistics(tile->rows, max, sum, compensation, result->max, result->sum, arena->rescale, arena->factor);
    }
    if (is_last) {
        k->invert_sums(tile->rows, max, sum, inverse);
    }
    const size_t at = mha_task_row(plan, task, tile) * (size_t)merge.block_row * k->itemsize;
    mha_compensate_merge(plan, first_key, arena->out_compensation + at, &merge);
    k->merge_rows(&merge);
}

/* Some queries of all heads that share a key head. */
static void
run_task(void *context, size_t task_number, unsigned worker)
{
    const mha_plan *plan = context;
    mha_arena arena = mha_plan_arena(plan, worker);
    mha_rows task;
    mha_task_rows(plan, task_number, &arena, &task);
    const block_result result = {arena.block_max, arena.block_sum, arena.block_out};

    if (!plan->same_visibility || task.keys.last == 0) { /* else every row meets a block */
        mha_clear_statistics(plan, &arena);
    }
    for (size_t first = task.keys.first / plan->key_block * plan->key_block; first < task.keys.last;
         first += plan->key_block) {
        const mha_interval keys = mha_pack_block(plan, &task, &arena, first);
        for (size_t g = 0; g < plan->group; g++) {
            for (size_t row = 0; row < task.rows; row += plan->tile_rows) {
                mha_rows tile;
                mha_task_tile(plan, &task, &arena, g, row, &tile);
                mha_key_block block = {.first_key = first, .keys = mha_interval_meet(tile.keys, keys)};
                if (block.keys.first >= block.keys.last) {
                    continue;
                }
                if (block.keys.first == tile.keys.first && block.keys.last == tile.keys.last) {
                    attend_whole(plan, &task, &tile, &arena, &block);
                } else {
                    attend_block(plan, &tile, &arena, &block, &result);
                    join_block(plan, &task, &tile, &arena, first, &result);
                }
            }
        }
    }
    mha_finish_task(plan, &task, &arena);
}

/*
 * --- Few queries on many keys: blocks of one head on several threads, joined in order ------------------
 * A task is one tile of each head here: with so few queries and heads, choose_tasks cuts tasks as small as they get.
 */

/* Where block number `block` of a task leaves the results of the tile's rows. */
static block_result
partial_result(const mha_plan *plan, const mha_rows *task, const mha_rows *tile, size_t task_number, size_t block)
{
    const size_t rows = plan->group * plan->task_queries, itemsize = plan->kernels->itemsize;
    const size_t row = mha_task_row(plan, task, tile);
    char *base = (char *)(uintptr_t)plan->memory + plan->partial_at +
                 (task_number * plan->n_splits + block) * plan->partial_bytes;
    const block_result result = {
        .max = base + row * itemsize,
        .sum = base + (rows + row) * itemsize,
        .out = base + (2 * rows + row * (size_t)block_row(plan)) * itemsize,
    };
    return result;
}

static void
run_split(void *context, size_t split, unsigned worker)
{
    const mha_plan *plan = context;
    const size_t task_number = split / plan->n_splits, number = split % plan->n_splits;
    const size_t first = number * plan->key_block;
    mha_arena arena = mha_plan_arena(plan, worker);
    mha_rows task;
    mha_task_rows(plan, task_number, &arena, &task);
    const mha_interval keys = mha_pack_block(plan, &task, &arena, first);

    MHA_ASSERT(task.rows <= plan->tile_rows);
    for (size_t g = 0; g < plan->group; g++) {
        mha_rows tile;
        mha_task_tile(plan, &task, &arena, g, 0, &tile);
        mha_key_block block = {.first_key = first, .keys = mha_interval_meet(tile.keys, keys)};
        const block_result result = partial_result(plan, &task, &tile, task_number, number);
        if (block.keys.first < block.keys.last) {
            attend_block(plan, &tile, &arena, &block, &result);
        }
    }
}

static void
join_task(void *context, size_t task_number, unsigned worker)
{
    const mha_plan *plan = context;
    mha_arena arena = mha_plan_arena(plan, worker);
    mha_rows task;
    mha_task_rows(plan, task_number, &arena, &task);

    mha_clear_statistics(plan, &arena);
    for (size_t g = 0; g < plan->group; g++) {
        mha_rows tile;
        mha_task_tile(plan, &task, &arena, g, 0, &tile);
        const size_t block = plan->key_block;
        for (size_t number = tile.keys.first / block; number * block < tile.keys.last; number++) {
            const block_result result = partial_result(plan, &task, &tile, task_number, number);
            join_block(plan, &task, &tile, &arena, number * block, &result);
        }
    }
    mha_finish_task(plan, &task, &arena);
}

void
mha_attention_run(const mha_plan *plan)
{
    void *context = (void *)(uintptr_t)plan;

    if (plan->n_splits > 1) {
        mha_parallel_for(plan->n_tasks * plan->n_splits, plan->n_workers, run_split, context);
        mha_parallel_for(plan->n_tasks, plan->n_workers, join_task, context);
    } else {
        mha_parallel_for(plan->n_tasks, plan->n_workers, plan->by_columns ? mha_short_task : run_task, context);
    }
    if (plan->weights_later) {
        mha_parallel_for(plan->n_tasks, plan->n_workers, mha_weights_task, context);
    }
}

mha_status
mha_attention_forward(const mha_attention_args *args)
{
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    mha_plan plan;
    mha_status status = mha_plan_init(&plan, args, MHA_PLAN_FORWARD, &scratch);

    if (status == MHA_OK) {
        status = mha_scratch_open(&scratch);
    }
    if (status != MHA_OK) {
        return status;
    }
    mha_plan_place(&plan, &scratch);
    mha_attention_run(&plan);
    mha_scratch_close(&scratch);
    return MHA_OK;
}
