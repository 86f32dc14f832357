/*
 * mha_explain.h: what a call of mha.h will do, and why: kernels, tiles, tasks, threads and memory, as named facts.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef MHA_EXPLAIN_H
#define MHA_EXPLAIN_H

#include "mha.h"

/* --- What a call will do, and why ------------------------------------------------------------------ */

/* A flag is a count, 0 or 1; times are estimates; of a group, only its name is told: its facts follow. */
typedef struct {
    enum { MHA_FACT_COUNT, MHA_FACT_FLAG, MHA_FACT_SECONDS, MHA_FACT_WORD, MHA_FACT_GROUP } kind;
    union {
        size_t count;
        double seconds;
        const char *word;
    };
} mha_fact;

/*
 * Is told a fact; names and words are never freed.  Of a group it returns to whom the group's facts are told in the
 * place of `to`.  The names stand in layer/explain.c, with what they mean.
 */
typedef void *mha_emit_fn(void *to, const char *name, mha_fact fact);

/*
 * These functions read the plan that the call itself would follow, under the instruction set and thread
 * limit of this moment, and compute nothing.  Of the arguments' addresses only valid_lens is read; of the
 * others it counts whether they are NULL.  What was told before an error means nothing.
 */
void mha_kernels_explain(mha_emit_fn *emit, void *to); /* for both types; and when work is shared */
MHA_MUST_CHECK mha_status mha_attention_explain(const mha_attention_args *args, mha_emit_fn *emit, void *to);
MHA_MUST_CHECK mha_status mha_linear_explain(mha_dtype dtype, const mha_linear *linear, size_t rows,
                                             mha_emit_fn *emit, void *to);
MHA_MUST_CHECK mha_status mha_layer_explain(const mha_layer_args *args, mha_emit_fn *emit, void *to);

#endif /* MHA_EXPLAIN_H */
