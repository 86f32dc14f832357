/*
 * turn.h: rotary positions: pairs of features of a projected row are turned by angles, whose cosines are in a table.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef MHA_TURN_H
#define MHA_TURN_H

#include "attention/visible.h"
#include "mha.h"

/* 1 if there are sines for the cosines, and heads of so many features are pairs of them. */
int mha_turn_is_sane(const mha_turn *turn, size_t features);

/* Turns the heads that lie in `row`, row `t` of item `item`, of `features` numbers. */
void mha_turn_row(mha_dtype dtype, const mha_turn *turn, size_t item, size_t t, size_t features, void *row);

/* Turns rows of dense (items, item_rows, features), counted through all items. */
void mha_turn_rows(const mha_turn *turn, mha_dtype dtype, size_t item_rows, mha_interval rows, size_t features,
                   void *x);
/* The same the other way round, by which the gradients of turned rows become those of the rows. */
void mha_turn_back(const mha_turn *turn, mha_dtype dtype, size_t item_rows, mha_interval rows, size_t features,
                   void *x);

#endif
