/*
 * values.h: what becomes of a tile's weights: dropout, and products with values (in the backward pass, with keys and
 * queries) that keep out what is hidden.
 */
#ifndef MHA_VALUES_H
#define MHA_VALUES_H

#include "scores.h"

/*
 * kernels->product, with one more promise: if a key is visible to one row of the tile and hidden from
 * another, a NaN or infinity of that key in b does not reach the row that may not see it.  Rows of the product
 * are the tile's rows and its depth the block's keys, or the other way round if rows_are_keys.
 */
void mha_guarded_product(const mha_walk *walk, const mha_product *product, int rows_are_keys);

/* Dropout factors for the tile's rows and these keys, into room->factors. */
void mha_draw_factors(const mha_walk *walk, mha_interval keys);

/*
 * Describes the product of `numbers`, laid out like scores, and the block's rows of values or keys, for the tile's
 * rows.  Values or keys are read in place, or from walk->dense_rows if they were copied there.  The caller adds where
 * the result goes (c, c_row) and, to scale it row by row, scale and scale_step.  (If it returned the struct, 10 queries
 * on 10 keys of 8 numbers took 1.13 of the time: its copy in vectors waits for words just stored.)
 */
void mha_describe_product(const mha_walk *walk, char *numbers, int of_values, mha_product *product);

/* With dropout, once the sums are taken: dropped weights become 0, the others are multiplied by 1 / (1 - p). */
void mha_drop_weights(const mha_walk *walk);

#endif
