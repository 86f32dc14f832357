/*
 * rows.h: rows of queries and what each of them has: its keys, its statistics, its sink.
 */
#ifndef MHA_ROWS_H
#define MHA_ROWS_H

#include "operands.h"

/* The keys that row `row` of these rows sees; of the tile's rows, those of them that lie in its block. */
MHA_INLINE mha_interval
mha_row_keys(const mha_rows *rows, size_t row)
{
    return rows->row_keys != NULL ? rows->row_keys[row] : rows->keys;
}

MHA_INLINE mha_interval
mha_row_keys_here(const mha_walk *walk, size_t row)
{
    return mha_interval_meet(mha_row_keys(&walk->tile, row), walk->block.keys);
}

/* Where these rows stand among a statistic of the task's rows. */
MHA_INLINE char *
mha_statistics_at(const mha_walk *walk, const mha_rows *rows, char *numbers)
{
    return numbers + rows->place * walk->problem->kernels->itemsize;
}

/* Statistics of an earlier call for these rows, into the room: max, sum, 1/sum. */
void mha_load_statistics(const mha_walk *walk, const mha_rows *rows);

/* After the last block: the sinks of these rows join their sums. */
void mha_add_sinks(const mha_walk *walk, const mha_rows *rows, const char *max, char *sum);

/* The sink of the rows' head, or NULL. */
const char *mha_sink_of(const mha_walk *walk, const mha_rows *rows);

/* The statistics of these rows, as far as they were asked for: from the room to the caller's arrays. */
void mha_write_statistics(const mha_walk *walk, const mha_rows *rows);

#endif
