/*
 * forward.c: attention forward, dot-product and additive, without a Q x K buffer.
 *
 * For each block of keys: scores of a tile of queries, softmax with running max and sum, times the
 * block's values; blocks are joined by rescaling.  A tile whose keys lie in one block needs no
 * rescaling and goes straight to the output.  Dao et al. 2022, arXiv 2205.14135.
 *
 * Order of additions, which fixes the bits: values in key order within parts of 64 keys, parts
 * in order within a block, blocks in order with a compensation.  All borders are multiples counted from
 * key 0, and hidden keys add exact zeros, so a row does not depend on its neighbours.  Summing small blocks
 * first is also 4 to 12 times more accurate on long rows than one long sum.
 */
#include "forward.h"

#include "blocks.h"
#include "empty_rows.h"
#include "runtime/common.h"
#include "runtime/threads.h"

#include <string.h>

/* The weights of a tile whose keys all lie in this block: what softmax left in the scores, divided by the sum. */
static void
write_weights(const mha_walk *walk, const char *inverse)
{
    const mha_kernels *k = walk->problem->kernels;

    for (size_t i = 0; i < walk->tile.rows; i++) {
        char *row = mha_weights_at(walk->problem, &walk->tile, i);
        const mha_interval seen = mha_row_keys(&walk->tile, i);
        /* An empty row has {0, 0}; it is filled later. */
        const size_t first = seen.first < seen.last ? seen.first : walk->block.first_key;
        memset(row, 0, seen.first * k->itemsize);
        k->scale_row(seen.last - seen.first, mha_score_at(walk, walk->room->scores, i, first),
                     inverse + i * k->itemsize, walk->problem->args->keys - seen.first, row + seen.first * k->itemsize);
    }
}

/* Leaves the scores of the keys that the rows see in the place of their weights: see mha_weights_task. */
static void
keep_scores(const mha_walk *walk)
{
    const mha_kernels *k = walk->problem->kernels;

    for (size_t i = 0; i < walk->tile.rows; i++) {
        const mha_interval seen = mha_row_keys_here(walk, i);

        if (seen.first < seen.last) {
            memcpy(mha_weights_at(walk->problem, &walk->tile, i) + seen.first * k->itemsize,
                   mha_score_at(walk, walk->room->scores, i, seen.first), (seen.last - seen.first) * k->itemsize);
        }
    }
}

/* Scores of the tile against the block, and their softmax relative to the block's own max. */
static void
softmax_block(const mha_walk *walk, char *max, char *sum)
{
    const mha_kernels *k = walk->problem->kernels;
    const mha_score_columns columns = mha_score_tile(walk);

    if (walk->plan->weights_later) {
        keep_scores(walk);
    }
    const mha_softmax softmax = {
        .rows = walk->tile.rows,
        .visible = columns.visible,
        .phase = columns.from / k->lanes,
        .scores = walk->room->scores + columns.from * k->itemsize,
        .scores_row = (ptrdiff_t)walk->plan->score_stride,
        .max = max,
        .sum = sum,
    };
    k->softmax_rows(&softmax);
}

/* Writes weights times values to `out`, times `inverse` (1 / sum, one per row) unless that is NULL. */
static void
average_values(const mha_walk *walk, void *out, ptrdiff_t out_row, const char *inverse)
{
    mha_product product;

    mha_drop_weights(walk);
    mha_describe_product(walk, walk->room->scores, 1, &product);
    product.c = out;
    product.c_row = out_row;
    if (inverse != NULL) {
        product.scale = inverse;
        product.scale_step = 1;
    }
    mha_guarded_product(walk, &product, 0);
}

/* Where the output of the tile's rows goes. */
static char *
output_at(const mha_walk *walk)
{
    const mha_rows *tile = &walk->tile;

    return mha_result_at(walk->problem->kernels, &walk->problem->args->out, tile->item, tile->head, tile->query);
}

/* A tile all of whose keys lie in this block: a plain softmax, straight to the output.  Returns 1 if a row is empty. */
static int
attend_whole(const mha_walk *walk)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_room *room = walk->room;
    const mha_rows *tile = &walk->tile;
    char *max = mha_statistics_at(walk, tile, room->max), *sum = mha_statistics_at(walk, tile, room->sum);
    char *inverse = mha_statistics_at(walk, tile, room->inverse);

    softmax_block(walk, max, sum);
    mha_add_sinks(walk, tile, max, sum);
    const int has_empty = walk->problem->kernels->invert_sums(tile->rows, max, sum, inverse);
    if (args->weights != NULL && !walk->plan->weights_later) {
        write_weights(walk, inverse);
    }
    average_values(walk, output_at(walk), args->out.row_stride, inverse);
    return has_empty;
}

/* What a tile gets from one of several blocks, relative to the block's own max. */
typedef struct {
    char *max, *sum, *out; /* rows of out are padded to whole vectors */
} block_result;

static size_t
block_row(const mha_walk *walk)
{
    return mha_round_up(walk->problem->args->value_dim, walk->problem->kernels->lanes);
}

static void
attend_block(const mha_walk *walk, const block_result *result)
{
    softmax_block(walk, result->max, result->sum);
    average_values(walk, result->out, (ptrdiff_t)block_row(walk), NULL);
}

/*
 * Adds the block's result to those of the blocks before it.  After the last block, the sums divide the output; returns
 * 1 if a row is empty then.
 */
static int
join_block(const mha_walk *walk, const block_result *result)
{
    const mha_rows *tile = &walk->tile;
    const mha_room *room = walk->room;
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const size_t first_key = walk->block.first_key, n_bytes = tile->rows * k->itemsize;
    char *max = mha_statistics_at(walk, tile, room->max), *sum = mha_statistics_at(walk, tile, room->sum);
    char *compensation = mha_statistics_at(walk, tile, room->sum_compensation);
    char *inverse = mha_statistics_at(walk, tile, room->inverse);
    const int is_last = tile->keys.last <= first_key + walk->plan->key_block;
    int has_empty = 0;
    const mha_merge merge = {
        .rows = tile->rows,
        .cols = args->value_dim,
        .first = tile->keys.first >= first_key,
        .out = output_at(walk),
        .out_row = args->out.row_stride,
        .block = result->out,
        .block_row = (ptrdiff_t)block_row(walk),
        .compensation = room->out_compensation + walk->tile.place * block_row(walk) * k->itemsize,
        .rescale = room->rescale,
        .factor = room->factor,
        .inverse = is_last ? inverse : NULL,
    };

    if (merge.first) {
        memcpy(max, result->max, n_bytes);
        memcpy(sum, result->sum, n_bytes);
        memset(compensation, 0, n_bytes);
    } else {
        k->join_statistics(tile->rows, max, sum, compensation, result->max, result->sum, room->rescale, room->factor);
    }
    if (is_last) {
        mha_add_sinks(walk, tile, max, sum);
        has_empty = k->invert_sums(tile->rows, max, sum, inverse);
    }
    k->merge_rows(&merge);
    return has_empty;
}

/*
 * With few queries on many keys, each block is a split: a task of its own (mha_split_task); all are joined when they
 * are done.  Returns where this block leaves the results of the tile's rows.
 */
static block_result
partial_result(const mha_walk *walk, size_t task)
{
    const mha_plan *plan = walk->plan;
    const size_t rows = plan->task_heads * plan->task_queries, itemsize = walk->problem->kernels->itemsize;
    const size_t row = walk->tile.place, number = walk->block.first_key / plan->key_block;
    char *base = walk->job->partials + (task * plan->n_splits + number) * walk->job->partial_bytes;

    return (block_result){
        .max = base + row * itemsize,
        .sum = base + (rows + row) * itemsize,
        .out = base + (2 * rows + row * block_row(walk)) * itemsize,
    };
}

void
mha_split_task(void *context, size_t number, unsigned worker)
{
    const mha_attention_job *job = context;
    const size_t task = number / job->plan.n_splits;
    const size_t first = number % job->plan.n_splits * job->plan.key_block;
    mha_walk walk;

    mha_walk_task(&walk, job, task, worker);
    mha_walk_start(&walk, job->problem.group, (mha_interval){first, first + job->plan.key_block});
    while (mha_next_prepared(&walk)) {
        const block_result result = partial_result(&walk, task);
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

/* Statistics of rows whose keys all have score 0, without a walk over the keys, of which there may be any number. */
static void
count_keys(const mha_walk *walk)
{
    const mha_kernels *k = walk->problem->kernels;

    for (size_t g = 0; g < walk->problem->group; g++) {
        mha_rows rows;

        mha_describe_head(walk, g, &rows);
        k->fill(rows.rows, 0, mha_statistics_at(walk, &rows, walk->room->max));
        for (size_t i = 0; i < rows.rows; i++) {
            const mha_interval seen = mha_row_keys(&rows, i);

            k->fill(1, (double)(seen.last - seen.first),
                    mha_statistics_at(walk, &rows, walk->room->sum) + i * k->itemsize);
        }
    }
}

void
mha_forward_task(void *context, size_t task, unsigned worker)
{
    const mha_attention_job *job = context;
    const mha_room *room = &job->rooms[worker];
    const block_result own = {room->block_max, room->block_sum, room->block_out};
    const size_t rows = job->problem.group * job->plan.task_queries;
    const int joins = job->plan.n_splits > 1;
    mha_walk walk;

    mha_walk_task(&walk, job, task, worker);
    if (job->problem.counts_keys) {
        count_keys(&walk);
        mha_finish_task(&walk, 0); /* an empty row has no numbers that would have to be filled */
        return;
    }
    int has_empty = some_see_nothing(&walk.task); /* else every row meets a block */
    if (has_empty) {                              /* rows that no block will touch are empty rows */
        job->problem.kernels->fill(rows, 0, room->max);
        job->problem.kernels->fill(rows, 0, room->sum);
    }
    mha_walk_start(&walk, job->problem.group, walk.task.keys);
    while (joins ? mha_walk_next(&walk) : mha_next_prepared(&walk)) {
        const mha_interval here = walk.block.keys, all = walk.tile.keys;
        if (joins) {
            const block_result result = partial_result(&walk, task);
            has_empty |= join_block(&walk, &result);
        } else if (here.first == all.first && here.last == all.last) {
            has_empty |= attend_whole(&walk);
        } else {
            attend_block(&walk, &own);
            has_empty |= join_block(&walk, &own);
        }
    }
    mha_finish_task(&walk, has_empty);
}
