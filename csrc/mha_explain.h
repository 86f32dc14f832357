/*
 * mha_explain.h: what a call of mha.h will do, and why: kernels, tiles, tasks, threads and memory, as named facts.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef MHA_EXPLAIN_H
#define MHA_EXPLAIN_H

#include "mha.h"

/* --- What a call will do, and why ------------------------------------------------------------------ */

/* A flag is a count of 0 or 1.  Times are estimates.  A group has only a name; its facts follow it. */
typedef struct {
    enum { MHA_FACT_COUNT, MHA_FACT_FLAG, MHA_FACT_SECONDS, MHA_FACT_WORD, MHA_FACT_GROUP } kind;
    union {
        size_t count;
        double seconds;
        const char *word;
    };
} mha_fact;

/*
 * Called once for each fact; names and words are never freed.  For a group it returns the `to` with which it is called
 * for the group's facts.  layer/explain.c has the names, and says what they mean.
 */
typedef void *mha_emit_fn(void *to, const char *name, mha_fact fact);

/*
 * These functions read the plan that the call itself would follow, under the instruction set and thread
 * limit of this moment, and compute nothing.  Of all the arguments' pointers, they read only what valid_lens
 * points to; for the others it only matters whether they are NULL.  Facts emitted before an error mean nothing.
 */
void mha_kernels_explain(mha_emit_fn *emit, void *to); /* of both types; and from how much work on threads share it */
MHA_MUST_CHECK mha_status mha_attention_explain(const mha_attention_args *args, mha_emit_fn *emit, void *to);
MHA_MUST_CHECK mha_status mha_linear_explain(mha_dtype dtype, const mha_linear *linear, size_t rows, mha_emit_fn *emit,
                                             void *to);
MHA_MUST_CHECK mha_status mha_layer_explain(const mha_layer_args *args, mha_emit_fn *emit, void *to);

#endif /* MHA_EXPLAIN_H */
