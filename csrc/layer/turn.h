/*
 * turn.h: rotary positions: pairs of features of a projected row are turned by angles, whose cosines are in a table.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef MHA_TURN_H
#define MHA_TURN_H

#include "mha.h"

/* 1 if there are sines for the cosines, and heads of so many features are pairs of them. */
int mha_turn_is_sane(const mha_turn *turn, size_t features);

/* Turns the heads that lie in `row`, row `t` of item `item`, of `features` numbers. */
void mha_turn_row(mha_dtype dtype, const mha_turn *turn, size_t item, size_t t, size_t features, void *row);

#endif
