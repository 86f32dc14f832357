/*
 * turn.c: rotary positions of projected rows, in place.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "turn.h"

int
mha_turn_is_sane(const mha_turn *turn, size_t features)
{
    return turn->cos == NULL || (turn->sin != NULL && turn->pairs > 0 && features % (2 * turn->pairs) == 0);
}

/* The same text for both types: a row has some hundred pairs, and its projection takes a thousand times as long. */
#define DEFINE_TURN(name, number) \
    static void name(const number *cos, const number *sin, number sign, size_t pairs, size_t features, number *row) \
    { \
        for (size_t head = 0; head < features; head += 2 * pairs) { \
            for (size_t i = 0; i < pairs; i++) { \
                number *pair = row + head + 2 * i; \
                const number first = pair[0], second = pair[1], s = sign * sin[i]; \
                pair[0] = first * cos[i] - second * s; \
                pair[1] = second * cos[i] + first * s; \
            } \
        } \
    }

DEFINE_TURN(turn_f32, float)
DEFINE_TURN(turn_f64, double)

static void
turn_row(mha_dtype dtype, const mha_turn *turn, int sign, ptrdiff_t at, size_t features, void *row)
{
    if (dtype == MHA_F32) {
        turn_f32((const float *)turn->cos + at, (const float *)turn->sin + at, (float)sign, turn->pairs, features, row);
    } else {
        turn_f64((const double *)turn->cos + at, (const double *)turn->sin + at, sign, turn->pairs, features, row);
    }
}

static ptrdiff_t
angles_at(const mha_turn *turn, size_t item, size_t t)
{
    return (ptrdiff_t)item * turn->batch_stride + (ptrdiff_t)(t * turn->pairs);
}

void
mha_turn_row(mha_dtype dtype, const mha_turn *turn, size_t item, size_t t, size_t features, void *row)
{
    if (turn->cos != NULL) {
        turn_row(dtype, turn, 1, angles_at(turn, item, t), features, row);
    }
}

static void
turn_rows(const mha_turn *turn, int sign, mha_dtype dtype, size_t item_rows, mha_interval rows, size_t features,
          char *x)
{
    const size_t row_bytes = features * (dtype == MHA_F64 ? sizeof(double) : sizeof(float));

    for (size_t row = rows.first; row < rows.last && turn->cos != NULL; row++) {
        turn_row(dtype, turn, sign, angles_at(turn, row / item_rows, row % item_rows), features, x + row * row_bytes);
    }
}

void
mha_turn_rows(const mha_turn *turn, mha_dtype dtype, size_t item_rows, mha_interval rows, size_t features, void *x)
{
    turn_rows(turn, 1, dtype, item_rows, rows, features, x);
}

void
mha_turn_back(const mha_turn *turn, mha_dtype dtype, size_t item_rows, mha_interval rows, size_t features, void *x)
{
    turn_rows(turn, -1, dtype, item_rows, rows, features, x);
}
