/*
 * rows.h: rows of queries and what each of them has: its keys, its statistics, what it gets if it saw no key.
 */
#ifndef MHA_ROWS_H
#define MHA_ROWS_H

#include "walk.h"

/* Address of element (item, head, row, 0) of an operand, and of a result. */
const char *mha_operand_at(const mha_kernels *kernels, const mha_operand *x, size_t item, size_t head, size_t row);
char *mha_result_at(const mha_kernels *kernels, const mha_result *x, size_t item, size_t head, size_t row);

/* Number of the tile's first row in dense (B,H,Q) arrays. */
MHA_INLINE size_t
mha_row_index(const mha_walk *walk)
{
    const mha_attention_args *args = walk->problem->args;

    return (walk->tile.item * args->heads + walk->tile.head) * args->queries + walk->tile.query;
}

/* Row `row` of the tile in args->weights. */
MHA_INLINE char *
mha_weights_at(const mha_walk *walk, size_t row)
{
    const mha_attention_args *args = walk->problem->args;

    return (char *)args->weights + (mha_row_index(walk) + row) * args->keys * walk->problem->kernels->itemsize;
}

/* The keys that row `row` of the tile sees; and those of them that lie in its block. */
MHA_INLINE mha_interval
mha_row_keys(const mha_walk *walk, size_t row)
{
    return walk->tile.row_keys != NULL ? walk->tile.row_keys[row] : walk->tile.keys;
}

MHA_INLINE mha_interval
mha_row_keys_here(const mha_walk *walk, size_t row)
{
    return mha_interval_meet(mha_row_keys(walk, row), walk->block.keys);
}

/*
 * The keys over whose values a row without weights takes the mean under MHA_EMPTY_UNIFORM: all K.  But if the row does
 * see keys, and no mask or bias hid them, their scores overflowed to -inf: then only those; the rest need not exist.
 */
mha_interval mha_mean_keys(const mha_walk *walk, size_t row);

/* Writes the weights of such a row: 1/n for each of those n keys, or zeros. */
void mha_fill_empty_weights(const mha_walk *walk, size_t row);

/* Number of the tile's first row in its task: row r of head g is number g * task_queries + r. */
MHA_INLINE size_t
mha_row_in_task(const mha_walk *walk)
{
    const mha_rows *task = &walk->task, *tile = &walk->tile;

    return (tile->head - task->head) * walk->plan->task_queries + tile->query - task->query;
}

/* Where the tile's rows stand in the task's statistics. */
MHA_INLINE char *
mha_statistics_at(const mha_walk *walk, char *numbers)
{
    return numbers + mha_row_in_task(walk) * walk->problem->kernels->itemsize;
}

/* Statistics of an earlier call for the tile's rows, into the room: max, sum, 1/sum. */
void mha_load_statistics(const mha_walk *walk);

/* After the last block: the sinks of the tile's rows join their sums. */
void mha_add_sinks(const mha_walk *walk, const char *max, char *sum);

/* After the last block: fills empty rows, if there may be any, and writes the statistics that were asked for. */
void mha_finish_task(mha_walk *walk, int has_empty);

#endif
