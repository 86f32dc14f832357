/*
 * backward.h: what the gradients of queries, keys and values (backward.c) and those of what is added to scores
 * (score_grads.c) share: the plan, and one tile in the backward pass.
 */
#ifndef MHA_BACKWARD_H
#define MHA_BACKWARD_H

#include "walk.h"

#define MHA_SPAN_BLOCKS ((size_t)2) /* key blocks that share a gradient of q, see backward.c */

typedef struct {
    mha_plan plan; /* first: it carries what a tile of scores needs */
    const mha_attention_grads *grads;
    size_t first_span;    /* of this round of tasks */
    size_t partial_at, partial_bytes;   /* gradients of q, one set per span of a round */
    size_t weights_at, weights_bytes, n_weights; /* gradients of the additive weights, one set per task */
    char *memory;
} mha_backward_plan;

/* Sizes and scratch memory of a backward pass, then the pass itself: as for mha_plan in plan.h. */
MHA_MUST_CHECK mha_status mha_backward_plan_init(mha_backward_plan *b, const mha_attention_args *args,
                                                 mha_scratch *scratch);
void mha_backward_plan_run(mha_backward_plan *b, const mha_attention_grads *grads, const mha_scratch *scratch);

/* Statistics, 1/sum and delta of some queries of one head, to their places in the room. */
void mha_backward_rows(const mha_backward_plan *b, const mha_rows *rows, const mha_room *room);

/* P (times F) in room->scores and dS * scale in room->grads, for one tile and block. */
void mha_backward_tile(const mha_backward_plan *b, const mha_rows *tile, const mha_room *room,
                       mha_key_block *block, double scale);

/* The gradients of bias, relative bias and sinks, as far as they are wanted (score_grads.c). */
void mha_score_grads_run(const mha_backward_plan *b);

#endif
