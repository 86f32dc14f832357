/*
 * weights.c: the attention weights themselves, from scores computed again and the row
 * statistics of the call: exp(score - max) / sum, bit for bit what the forward pass used.
 *
 * Who asks: a layer's `attention_weights` when it is read, and a forward call that returns weights of rows longer than
 * one key block; it has left the scores in their place, so that no key is read twice.
 */
#include "forward.h"

#include "blocks.h"
#include "empty_rows.h"
#include "runtime/common.h"

#include <string.h>

/* The weights of the tile's rows for the keys of its block that they see. */
static void
weigh_block(const mha_walk *walk)
{
    const mha_kernels *k = walk->problem->kernels;
    const char *max = mha_statistics_at(walk, &walk->tile, walk->room->max);
    const char *inverse = mha_statistics_at(walk, &walk->tile, walk->room->inverse);

    const int again = walk->problem->pass == MHA_PASS_WEIGHTS;

    if (again) {
        (void)mha_score_tile(walk);
    }
    for (size_t i = 0; i < walk->tile.rows; i++) {
        const mha_interval seen = mha_row_keys_here(walk, i);
        if (seen.first < seen.last) {
            char *weights = mha_weights_at(walk->problem, &walk->tile, i) + seen.first * k->itemsize;
            k->weights_row(seen.last - seen.first,
                           again ? mha_score_at(walk, walk->room->scores, i, seen.first) : weights,
                           max + i * k->itemsize, inverse + i * k->itemsize, weights);
        }
    }
}

/* Writes zeros outside the keys of each of the rows, and the weights of empty ones. */
static void
fill_outside(const mha_walk *walk, const mha_rows *rows)
{
    const mha_kernels *k = walk->problem->kernels;
    const char *sum = mha_statistics_at(walk, rows, walk->room->sum);

    for (size_t i = 0; i < rows->rows; i++) {
        char *row = mha_weights_at(walk->problem, rows, i);
        const mha_interval seen = mha_row_keys(rows, i);
        if (mha_read(k, sum, i) == 0) {
            mha_fill_empty_weights(walk, rows, i);
        } else {
            memset(row, 0, seen.first * k->itemsize);
            memset(row + seen.last * k->itemsize, 0, (walk->problem->args->keys - seen.last) * k->itemsize);
        }
    }
}

void
mha_weights_task(void *job, size_t task, unsigned worker)
{
    mha_walk walk;
    mha_rows rows;

    mha_walk_task(&walk, job, task, worker);
    for (size_t g = 0; g < walk.problem->group; g++) {
        mha_describe_head(&walk, g, &rows);
        mha_load_statistics(&walk, &rows);
    }
    mha_walk_start(&walk, walk.problem->group, walk.task.keys);
    while (walk.problem->pass == MHA_PASS_WEIGHTS ? mha_next_prepared(&walk) : mha_walk_next(&walk)) {
        weigh_block(&walk);
    }
    for (size_t g = 0; g < walk.problem->group; g++) {
        mha_describe_head(&walk, g, &rows);
        fill_outside(&walk, &rows);
    }
}
