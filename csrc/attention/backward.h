/*
 * backward.h: what the gradients of queries, keys and values (backward.c) and those of what is added to scores
 * (score_grads.c) share: the plan, and one tile in the backward pass.
 */
#ifndef MHA_BACKWARD_H
#define MHA_BACKWARD_H

#include "walk.h"

#define MHA_SPAN_BLOCKS ((size_t)2) /* key blocks that share a gradient of q, see backward.c */

/* A backward call's life, as that of a forward call in plan.h; running it includes mha_plan_place. */
MHA_MUST_CHECK mha_status mha_backward_plan_init(mha_plan *plan, const mha_attention_args *args, mha_scratch *scratch);
void mha_backward_run(mha_plan *plan, const mha_attention_grads *grads, const mha_scratch *scratch);

/* Statistics, 1/sum and delta of some queries of one head, to their places in the room. */
void mha_backward_rows(const mha_plan *plan, const mha_rows *rows, const mha_room *room);

/* P (times F) in room->scores and dS * scale in room->grads, for one tile and block. */
void mha_backward_tile(const mha_plan *plan, const mha_rows *tile, const mha_room *room,
                       mha_key_block *block, double scale);

/* The gradients of bias, relative bias and sinks, as far as they are wanted (score_grads.c). */
void mha_score_grads_run(const mha_plan *plan);

#endif
