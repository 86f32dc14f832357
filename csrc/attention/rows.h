/*
 * rows.h: rows of queries and what each of them has: its keys, its statistics, its sink.
 */
#ifndef MHA_ROWS_H
#define MHA_ROWS_H

#include "operands.h"

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

/* Where the tile's rows stand in the task's statistics. */
MHA_INLINE char *
mha_statistics_at(const mha_walk *walk, char *numbers)
{
    return numbers + walk->tile.place * walk->problem->kernels->itemsize;
}

/* Statistics of an earlier call for the tile's rows, into the room: max, sum, 1/sum. */
void mha_load_statistics(const mha_walk *walk);

/* After the last block: the sinks of the tile's rows join their sums. */
void mha_add_sinks(const mha_walk *walk, const char *max, char *sum);

/* The sink of the tile's head, or NULL. */
const char *mha_sink_of(const mha_walk *walk);

/* The statistics of the tile's rows, as far as they were asked for: from the room to the caller's arrays. */
void mha_write_statistics(const mha_walk *walk);

#endif
