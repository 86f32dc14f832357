/*
 * forward.c: attention forward, dot-product and additive, without a Q x K buffer.
 *
 * For each block of keys: scores of a tile of queries, softmax with running max and sum, times the
 * block's values; blocks are joined by rescaling.  A tile whose keys lie in one block needs no
 * rescaling and goes straight to the output.  Dao et al. 2022, arXiv 2205.14135.
 *
 * Order of additions, which fixes the bits: values in key order within parts of 64 keys, parts
 * in order within a block, blocks in order, with what rounding loses.  All borders are multiples counted from
 * key 0, and hidden keys add exact zeros, so a row does not depend on its neighbours.  Summing small blocks
 * first is also 4 to 12 times more accurate on long rows than one long sum.
 */
#include "forward.h"

#include "runtime/common.h"
#include "runtime/threads.h"

#include <string.h>

/* The weights of a tile whose keys all lie in this block: what softmax left in the scores, divided by the sum. */
static void
write_weights(const mha_walk *walk, const char *inverse)
{
    const mha_plan *plan = walk->plan;
    const mha_rows *tile = &walk->tile;
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;

    for (size_t i = 0; i < tile->rows; i++) {
        char *row = mha_weights_at(plan, tile, i);
        const mha_interval seen = mha_row_keys(tile, i);
        /* An empty row has {0, 0}; it is filled later. */
        const size_t first = seen.first < seen.last ? seen.first - walk->block.first_key : 0;
        memset(row, 0, seen.first * k->itemsize);
        k->scale_row(seen.last - seen.first, walk->room->scores + (i * plan->score_stride + first) * k->itemsize,
                     inverse + i * k->itemsize, args->keys - seen.first, row + seen.first * k->itemsize);
    }
}

/* Scores of the tile against the block, and their softmax relative to the block's own max. */
static void
softmax_block(mha_walk *walk, char *max, char *sum)
{
    const mha_kernels *k = walk->plan->kernels;
    const mha_key_block *block = &walk->block;

    mha_score_tile(walk->plan, &walk->tile, walk->room, &walk->block);
    const mha_softmax softmax = {
        .rows = walk->tile.rows,
        .visible = block->visible,
        .phase = block->from / k->lanes,
        .scores = walk->room->scores + block->from * k->itemsize,
        .scores_row = (ptrdiff_t)walk->plan->score_stride,
        .max = max,
        .sum = sum,
    };
    k->softmax_rows(&softmax);
}

/* Weights times values, to out; inverse, one per row, divides by their sums, or is NULL. */
static void
average_values(const mha_walk *walk, void *out, ptrdiff_t out_row, const char *inverse)
{
    const mha_plan *plan = walk->plan;

    if (plan->args->dropout > 0) {
        mha_drop_weights(plan, &walk->tile, walk->room, &walk->block);
    }
    mha_product product;
    mha_describe_product(plan, &walk->tile, &walk->block, walk->room->scores, walk->dense_rows, 1, &product);
    product.c = out;
    product.c_row = out_row;
    if (inverse != NULL) {
        product.scale = inverse;
        product.scale_step = 1;
    }
    mha_guarded_product(plan, &walk->tile, walk->room, &walk->block, &product, 0);
}

/* A tile all of whose keys lie in this block: a plain softmax, straight to the output.  Returns 1 if a row is empty. */
static int
attend_whole(mha_walk *walk)
{
    const mha_plan *plan = walk->plan;
    const mha_rows *task = walk->task, *tile = &walk->tile;
    const mha_room *room = walk->room;
    const mha_result *out = &plan->args->out;
    char *max = mha_statistics_at(plan, task, tile, room->max), *sum = mha_statistics_at(plan, task, tile, room->sum);
    char *inverse = mha_statistics_at(plan, task, tile, room->inverse);

    softmax_block(walk, max, sum);
    mha_add_sinks(plan, tile, max, sum);
    const int has_empty = plan->kernels->invert_sums(tile->rows, max, sum, inverse);
    if (plan->args->weights != NULL && !plan->weights_later) {
        write_weights(walk, inverse);
    }
    average_values(walk, mha_result_at(plan->kernels, out, tile->item, tile->head, tile->query), out->row_stride,
                   inverse);
    return has_empty;
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
attend_block(mha_walk *walk, const block_result *result)
{
    softmax_block(walk, result->max, result->sum);
    average_values(walk, result->out, block_row(walk->plan), NULL);
}

/*
 * Adds the block's result to those of the blocks before it; the last one's sums divide the output.  Returns 1 if then
 * a row is empty.
 */
static int
join_block(const mha_walk *walk, const block_result *result)
{
    const mha_plan *plan = walk->plan;
    const mha_rows *tile = &walk->tile;
    const mha_room *room = walk->room;
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const size_t row = mha_row_in_task(plan, walk->task, tile), first_key = walk->block.first_key;
    char *max = room->max + row * k->itemsize, *sum = room->sum + row * k->itemsize;
    char *compensation = room->sum_compensation + row * k->itemsize, *inverse = room->inverse + row * k->itemsize;
    const int is_last = tile->keys.last <= first_key + plan->key_block;
    int has_empty = 0;
    const mha_merge merge = {
        .rows = tile->rows,
        .cols = args->value_dim,
        .first = tile->keys.first >= first_key,
        .out = mha_result_at(k, &args->out, tile->item, tile->head, tile->query),
        .out_row = args->out.row_stride,
        .block = result->out,
        .block_row = block_row(plan),
        .compensation = room->out_compensation + row * (size_t)block_row(plan) * k->itemsize,
        .rescale = room->rescale,
        .factor = room->factor,
        .inverse = is_last ? inverse : NULL,
    };

    if (merge.first) {
        memcpy(max, result->max, tile->rows * k->itemsize);
        memcpy(sum, result->sum, tile->rows * k->itemsize);
        memset(compensation, 0, tile->rows * k->itemsize);
    } else {
        k->join_statistics(tile->rows, max, sum, compensation, result->max, result->sum, room->rescale, room->factor);
    }
    if (is_last) {
        mha_add_sinks(plan, tile, max, sum);
        has_empty = k->invert_sums(tile->rows, max, sum, inverse);
    }
    k->merge_rows(&merge);
    return has_empty;
}

/*
 * Few queries on many keys: the blocks of a task are tasks of their own (block_task), and are joined when all of them
 * are there.  Where block `number` leaves the results of the tile's rows:
 */
static block_result
partial_result(const mha_walk *walk, size_t task_number)
{
    const mha_plan *plan = walk->plan;
    const size_t rows = plan->task_heads * plan->task_queries, itemsize = plan->kernels->itemsize;
    const size_t row = mha_row_in_task(plan, walk->task, &walk->tile), number = walk->block.first_key / plan->key_block;
    char *base = plan->partials + (task_number * plan->blocks_abreast + number) * plan->partial_bytes;
    const block_result result = {
        .max = base + row * itemsize,
        .sum = base + (rows + row) * itemsize,
        .out = base + (2 * rows + row * (size_t)block_row(plan)) * itemsize,
    };
    return result;
}

static void
block_task(void *context, size_t number, unsigned worker)
{
    const mha_plan *plan = context;
    const mha_room *room = &plan->rooms[worker];
    const size_t task_number = number / plan->blocks_abreast;
    const size_t first = number % plan->blocks_abreast * plan->key_block;
    mha_rows task;
    mha_walk walk;

    mha_describe_task(plan, task_number, room, &task);
    mha_walk_start(&walk, plan, &task, room, plan->group, (mha_interval){first, first + plan->key_block});
    while (mha_walk_next(&walk)) {
        const block_result result = partial_result(&walk, task_number);
        attend_block(&walk, &result);
    }
}

static int
some_see_nothing(const mha_rows *rows)
{
    int found = rows->keys.last == 0;

    for (size_t i = 0; rows->row_keys != NULL && i < rows->rows; i++) {
        found |= rows->row_keys[i].last == 0;
    }
    return found;
}

static void
forward_task(void *context, size_t task_number, unsigned worker)
{
    const mha_plan *plan = context;
    const mha_room *room = &plan->rooms[worker];
    const block_result own = {room->block_max, room->block_sum, room->block_out};
    const int joins = plan->blocks_abreast > 1;
    mha_rows task;
    mha_walk walk;

    mha_describe_task(plan, task_number, room, &task);
    int has_empty = some_see_nothing(&task); /* else every row meets a block */
    if (has_empty) {
        mha_clear_statistics(plan, room);
    }
    mha_walk_start(&walk, plan, &task, room, plan->group, task.keys);
    walk.prepares = !joins;
    while (mha_walk_next(&walk)) {
        const mha_interval here = walk.block.keys, all = walk.tile.keys;
        if (joins) {
            const block_result result = partial_result(&walk, task_number);
            has_empty |= join_block(&walk, &result);
        } else if (plan->way == MHA_WAY_COLUMNS) {
            has_empty |= mha_attend_columns(plan, &task, &walk.tile, room);
        } else if (here.first == all.first && here.last == all.last) {
            has_empty |= attend_whole(&walk);
        } else {
            attend_block(&walk, &own);
            has_empty |= join_block(&walk, &own);
        }
    }
    mha_finish_task(plan, &task, room, has_empty);
}

void
mha_attention_run(const mha_plan *plan)
{
    const mha_task_fn run = plan->way == MHA_WAY_ITEMS ? mha_items_task : forward_task;
    const int weights_alone = plan->pass == MHA_PASS_WEIGHTS;
    void *context = (void *)(uintptr_t)plan;

    if (plan->blocks_abreast > 1 && !weights_alone) {
        mha_parallel_for(plan->n_tasks * plan->blocks_abreast, plan->n_workers, block_task, context);
    }
    if (!weights_alone) {
        mha_parallel_for(plan->n_tasks, plan->n_workers, run, context);
    }
    if (plan->weights_later || weights_alone) {
        mha_parallel_for(plan->n_tasks, plan->n_workers, mha_weights_task, context);
    }
}

static mha_status
call(const mha_attention_args *args, mha_pass pass)
{
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    mha_attention_args folded;
    mha_plan plan;

    mha_fold_heads(args, &folded);
    mha_status status = mha_plan_init(&plan, &folded, pass, &scratch);

    if (status == MHA_OK) {
        status = mha_scratch_open(&scratch);
    }
    if (status != MHA_OK) {
        return status;
    }
    mha_plan_place(&plan, &scratch);
    mha_attention_run(&plan);
    mha_scratch_close(&scratch);
    return mha_interrupt_status();
}

mha_status
mha_attention_forward(const mha_attention_args *args)
{
    return call(args, MHA_PASS_FORWARD);
}

mha_status
mha_attention_weights(const mha_attention_args *args)
{
    const int is_complete = args->weights != NULL && args->row_max != NULL && args->row_sum != NULL;

    return is_complete ? call(args, MHA_PASS_WEIGHTS) : MHA_ERR_ARG;
}
