/*
 * values.h: what becomes of a tile's weights: dropout, and products with values (in the backward pass, with keys and
 * queries) that keep out what is hidden.
 */
#ifndef MHA_VALUES_H
#define MHA_VALUES_H

#include "scores.h"

/*
 * kernels->product, but where a key is visible to one row of the tile and hidden from another, and b holds
 * NaN or infinity, no row is touched by what it may not see.  Rows of the product are the tile's rows
 * and its depth the block's keys, or the other way round if rows_are_keys.
 */
void mha_guarded_product(const mha_walk *walk, const mha_product *product, int rows_are_keys);

/* Dropout factors for the tile's rows and these keys, into room->factors. */
void mha_draw_factors(const mha_walk *walk, mha_interval keys);

/*
 * Describes: numbers for the block's keys, laid out like scores, times rows of its values or keys: for the tile's
 * rows.  They are read where they lie, or from the walk's dense_rows, if they were copied there.  The caller adds where
 * to (c, c_row) and, if the sums are to be scaled row by row, scale and scale_step.  (Returned as a struct, whose copy
 * in vectors waits for words just stored, it took 1.13 of the time of 10 queries on 10 keys of 8 numbers.)
 */
void mha_describe_product(const mha_walk *walk, char *numbers, int of_values, mha_product *product);

/* Where there is dropout, once the sums are taken: dropped weights become 0, the others grow by 1 / (1 - p). */
void mha_drop_weights(const mha_walk *walk);

#endif
