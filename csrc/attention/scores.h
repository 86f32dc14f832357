/*
 * scores.h: scores of one tile of queries against one block of keys.
 */
#ifndef MHA_SCORES_H
#define MHA_SCORES_H

#include "rows.h"

/* Where the number for a row of the tile and a key of the block is, among numbers that lie like scores. */
MHA_INLINE char *
mha_score_at(const mha_walk *walk, char *scores, size_t row, size_t key)
{
    const size_t at = row * walk->plan->score_stride + key - walk->block.first_key;

    return scores + at * walk->problem->kernels->itemsize;
}

/* Address of the mask's element for (row of the tile, key). */
MHA_INLINE const char *
mha_mask_at(const mha_mask *mask, size_t itemsize, const mha_rows *tile, size_t row, size_t key)
{
    const ptrdiff_t offset = (ptrdiff_t)tile->item * mask->batch_stride + (ptrdiff_t)tile->head * mask->head_stride +
                             (ptrdiff_t)(tile->query + row) * mask->query_stride + (ptrdiff_t)key * mask->key_stride;
    return (const char *)mask->data + offset * (ptrdiff_t)itemsize;
}

/*
 * How a row's keys lie to its table of relative biases: those before `near` take its first number, those from `far` on
 * its last, and the key `near` takes number `at` and so on.
 */
typedef struct {
    size_t near, far, at;
} mha_relative;

mha_relative mha_relative_keys(const mha_attention_args *args, size_t query, mha_interval keys);

/* Describes additive scores of these rows and keys; the caller adds where to. */
mha_additive mha_describe_additive(const mha_problem *problem, const mha_rows *rows, mha_interval keys);

/* Scores of the tile against its block, masks applied, into room->scores; walk->block says where. */
void mha_score_tile(mha_walk *walk);

#endif
