/*
 * empty_rows.h: rows of queries that saw no key, and the end of a task, when such rows are filled.
 */
#ifndef MHA_EMPTY_ROWS_H
#define MHA_EMPTY_ROWS_H

#include "walk.h"

/*
 * The keys over whose values a row without weights takes the mean under MHA_EMPTY_UNIFORM: all K.  But if the row does
 * see keys, and no mask or bias hid them, their scores overflowed to -inf: then only those; the rest need not exist.
 */
mha_interval mha_mean_keys(const mha_walk *walk, const mha_rows *rows, size_t row);

/* Writes the weights of such a row: 1/n for each of those n keys, or zeros. */
void mha_fill_empty_weights(const mha_walk *walk, const mha_rows *rows, size_t row);

/* After the last block: fills empty rows, if there may be any, and writes the statistics that were asked for. */
void mha_finish_rows(const mha_walk *walk, const mha_rows *rows, int has_empty);
void mha_finish_task(const mha_walk *walk, int has_empty);

#endif
