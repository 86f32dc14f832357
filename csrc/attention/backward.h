/*
 * backward.h: what the gradients of queries, keys and values (backward.c) and those of what is added to scores
 * (score_grads.c) share: one tile in the backward pass.
 */
#ifndef MHA_BACKWARD_H
#define MHA_BACKWARD_H

#include "values.h"

/* Writes statistics, 1/sum and delta of the task's rows, which are of one head, to their places in the room. */
void mha_backward_rows(const mha_walk *walk);

/* Writes P (times F) to room->scores and dS * scale to room->grads, for the tile and its block; says which columns. */
mha_score_columns mha_backward_tile(const mha_walk *walk, double scale);

/* Runs a job of the backward pass whose memory is placed. */
void mha_backward_run(mha_attention_job *job, const mha_attention_grads *grads);

/* The gradients of bias, relative bias and sinks, as far as they are wanted (score_grads.c). */
void mha_score_grads_run(const mha_attention_job *job);

#endif
