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
void mha_guarded_product(const mha_plan *plan, const mha_rows *tile, const mha_room *room,
                         const mha_key_block *block, const mha_product *product, int rows_are_keys);

/* Dropout factors of the tile's rows and these keys, rows score_stride apart. */
void mha_dropout_tile(const mha_plan *plan, const mha_rows *tile, mha_interval keys, char *factors);

/*
 * Describes: numbers for the block's keys, laid out like scores, times rows of the keys or values, for the tile's
 * rows.  The caller adds where to (c, c_row) and, if the sums are to be scaled row by row, scale and scale_step.
 */
void mha_describe_key_product(const mha_plan *plan, const mha_rows *tile, const mha_key_block *block,
                              const char *numbers, const mha_operand *rows, size_t cols, mha_product *product);

/* Where rows of the key block were copied to `dense_rows` (else NULL), the product reads them there. */
void mha_read_dense_rows(const mha_plan *plan, const char *dense_rows, const mha_key_block *block, size_t cols,
                         mha_product *product);

/* The same for weights and values. */
void mha_describe_value_product(const mha_plan *plan, const mha_rows *tile, const mha_room *room,
                                const mha_key_block *block, mha_product *product);

/* Once the sums are taken: dropped weights become 0, the others grow by 1 / (1 - p). */
void mha_drop_weights(const mha_plan *plan, const mha_rows *tile, const mha_room *room, const mha_key_block *block);

#endif
