/*
 * weights.c: the attention weights themselves, from scores computed again and the row
 * statistics of the call: exp(score - max) / sum, to the bit what the forward pass used.
 *
 * Who asks: a layer's `attention_weights` when it is read, and a forward call that returns weights
 * of rows longer than one key block.
 */
#include "forward.h"

#include "runtime/common.h"

#include <string.h>

/* The statistics of the rows of one head of the task, into the room: max, sum, 1/sum. */
static void
load_statistics(const mha_plan *plan, const mha_rows *task, const mha_rows *rows, const mha_room *room)
{
    const mha_kernels *k = plan->kernels;
    const size_t at = mha_row_index(plan, rows) * k->itemsize, n_bytes = rows->rows * k->itemsize;
    char *max = mha_statistics_at(plan, task, rows, room->max), *sum = mha_statistics_at(plan, task, rows, room->sum);

    memcpy(max, (const char *)plan->row_max + at, n_bytes);
    memcpy(sum, (const char *)plan->row_sum + at, n_bytes);
    k->invert_sums(rows->rows, max, sum, mha_statistics_at(plan, task, rows, room->inverse));
}

static void
weigh_block(mha_walk *walk)
{
    const mha_plan *plan = walk->plan;
    const mha_room *room = walk->room;
    const mha_rows *tile = &walk->tile;
    const mha_key_block *block = &walk->block;
    const mha_kernels *k = plan->kernels;
    const size_t first_row = mha_row_in_task(plan, walk->task, tile);

    mha_score_tile(plan, tile, room, &walk->block);
    for (size_t i = 0; i < tile->rows; i++) {
        const size_t stat = (first_row + i) * k->itemsize;
        const mha_interval seen = mha_interval_meet(mha_row_keys(tile, i), block->keys);
        if (seen.first < seen.last) {
            k->weights_row(seen.last - seen.first, mha_score_at(plan, block, room->scores, i, seen.first),
                           room->max + stat, room->inverse + stat,
                           mha_weights_at(plan, tile, i) + seen.first * k->itemsize);
        }
    }
}

void
mha_fill_empty_weights(const mha_plan *plan, const mha_rows *tile, size_t row)
{
    const mha_kernels *k = plan->kernels;
    const mha_interval keys = mha_mean_keys(plan, tile, row);
    const size_t n = keys.last - keys.first;
    char *weights = mha_weights_at(plan, tile, row);

    k->fill(plan->args->keys, 0, weights);
    if (plan->args->empty_rows == MHA_EMPTY_UNIFORM && plan->args->sinks == NULL) {
        k->fill(n, 1.0 / (double)n, weights + keys.first * k->itemsize);
    }
}

/* Zeros outside each row's keys; and what empty rows get.  For one head of the task. */
static void
fill_outside(const mha_plan *plan, const mha_rows *task, const mha_rows *rows, const mha_room *room)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const char *sum = mha_statistics_at(plan, task, rows, room->sum);

    for (size_t i = 0; i < rows->rows; i++) {
        char *row = mha_weights_at(plan, rows, i);
        const mha_interval seen = mha_row_keys(rows, i);
        if (mha_read(k, sum, i) == 0) {
            mha_fill_empty_weights(plan, rows, i);
        } else {
            memset(row, 0, seen.first * k->itemsize);
            memset(row + seen.last * k->itemsize, 0, (args->keys - seen.last) * k->itemsize);
        }
    }
}

void
mha_weights_task(void *context, size_t task_number, unsigned worker)
{
    const mha_plan *plan = context;
    const mha_room *room = &plan->rooms[worker];
    mha_rows task, rows;
    mha_walk walk;

    mha_describe_task(plan, task_number, room, &task);
    for (size_t g = 0; g < plan->group; g++) {
        mha_describe_head(&task, g, &rows);
        load_statistics(plan, &task, &rows, room);
    }
    mha_walk_start(&walk, plan, &task, room, plan->group, task.keys);
    while (mha_walk_next(&walk)) {
        weigh_block(&walk);
    }
    for (size_t g = 0; g < plan->group; g++) {
        mha_describe_head(&task, g, &rows);
        fill_outside(plan, &task, &rows, room);
    }
}
