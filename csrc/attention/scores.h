/*
 * scores.h: scores of one tile of queries against one block of keys.
 */
#ifndef MHA_SCORES_H
#define MHA_SCORES_H

#include "rows.h"

/* Address of the number for (row of the tile, key of the block), in an array laid out like scores. */
MHA_INLINE char *
mha_score_at(const mha_walk *walk, char *scores, size_t row, size_t key)
{
    const size_t at = row * walk->plan->score_stride + key - walk->block.first_key;

    return scores + at * walk->problem->kernels->itemsize;
}

/*
 * Which relative bias each of a row's keys takes from the table: keys before `near` its first number, keys from `far`
 * on its last; the keys between take its numbers from `at` on, in order.
 */
typedef struct {
    size_t near, far, at;
} mha_relative;

mha_relative mha_relative_keys(const mha_attention_args *args, size_t query, mha_interval keys);

/* Describes additive scores of these rows and keys; the caller adds where they go. */
mha_additive mha_describe_additive(const mha_walk *walk, const mha_rows *rows, mha_interval keys);

/*
 * Which numbers of a tile's rows in room->scores are scores: columns [from, from + width), counted from the block's
 * first key.  The first `visible` of them reach to the last visible key, the rest only fill a vector.
 */
typedef struct {
    size_t from, width, visible;
} mha_score_columns;

/*
 * Writes the tile's scores against its block, masks applied, to room->scores (of capped ones, in the backward pass, the
 * slopes to room->slopes), and returns which columns they are.
 */
mha_score_columns mha_score_tile(const mha_walk *walk);

#endif
