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
    static void name(const number *cos, const number *sin, size_t pairs, size_t features, number *row) \
    { \
        for (size_t head = 0; head < features; head += 2 * pairs) { \
            for (size_t i = 0; i < pairs; i++) { \
                number *pair = row + head + 2 * i; \
                const number first = pair[0], second = pair[1]; \
                pair[0] = first * cos[i] - second * sin[i]; \
                pair[1] = second * cos[i] + first * sin[i]; \
            } \
        } \
    }

DEFINE_TURN(turn_f32, float)
DEFINE_TURN(turn_f64, double)

void
mha_turn_row(mha_dtype dtype, const mha_turn *turn, size_t item, size_t t, size_t features, void *row)
{
    const ptrdiff_t at = (ptrdiff_t)item * turn->batch_stride + (ptrdiff_t)(t * turn->pairs);

    if (turn->cos == NULL) {
        return;
    }
    if (dtype == MHA_F32) {
        turn_f32((const float *)turn->cos + at, (const float *)turn->sin + at, turn->pairs, features, row);
    } else {
        turn_f64((const double *)turn->cos + at, (const double *)turn->sin + at, turn->pairs, features, row);
    }
}
