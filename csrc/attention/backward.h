/*
 * backward.h: what the gradients of attention (backward.c) and of its bias
 * (backward_bias.c) share: the plan, a worker's memory, and one tile on its way back.
 */
#ifndef MHA_ATTENTION_BWD_H
#define MHA_ATTENTION_BWD_H

#include "walk.h"

#define MHA_SPAN_BLOCKS ((size_t)2) /* key blocks that share a gradient of q, see backward.c */

typedef struct {
    mha_plan plan; /* first: it carries what a tile of scores needs */
    const mha_attention_grads *grads;
    size_t n_spans;       /* of the keys */
    size_t spans_abreast; /* spans of one head that are tasks at the same time; 1: a task goes through all of them */
    size_t first_span;    /* of this round of tasks */
    size_t partial_at, partial_bytes;   /* gradients of q, one set per span of a round */
    size_t weights_at, weights_bytes, n_weights; /* gradients of the additive weights, one set per task */
    size_t tables_at, table_bytes; /* sums of the gradients of a head's relative biases, one set per worker */
    char *memory;
} mha_backward_plan;

/* Sizes and scratch memory of a backward pass, then the pass itself: as for mha_plan in attention.h. */
MHA_MUST_CHECK mha_status mha_backward_plan_init(mha_backward_plan *b, const mha_attention_args *args,
                                                 mha_scratch *scratch);
void mha_backward_plan_run(mha_backward_plan *b, const mha_attention_grads *grads, const mha_scratch *scratch);

/* Statistics, 1/sum and delta of some queries of one head, to their places in the arena. */
void mha_backward_rows(const mha_backward_plan *b, const mha_rows *rows, const mha_arena *arena);

/* P (times F) in arena->scores and dS * scale in arena->grads, for one tile and block. */
void mha_backward_tile(const mha_backward_plan *b, const mha_rows *tile, const mha_arena *arena,
                       mha_key_block *block, double scale);

/* The gradients of what each head has of its own, its relative biases and its sink (backward_heads.c). */
void mha_backward_heads(mha_backward_plan *b);

/* The gradient of the bias: a pass of its own (backward_bias.c). */
void mha_backward_bias(mha_backward_plan *b);

#endif
