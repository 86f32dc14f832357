/*
 * mha_explain.h: what a call of mha.h will do, and why: kernels, tiles, tasks, threads and memory, as records of facts.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef MHA_EXPLAIN_H
#define MHA_EXPLAIN_H

#include "mha.h"

/* --- What a call will do, and why ------------------------------------------------------------------ */

/* Which kernels compute: vectors of `lanes` elements; products in register tiles of tile_rows x tile_columns. */
typedef struct {
    const char *isa;
    size_t itemsize, lanes, tile_rows, tile_columns;
} mha_kernel_facts;

/* How threads share work.  Times are estimates, for one thread, by the rule that decides how many share the work. */
typedef struct {
    size_t n_tasks, n_threads, most_threads;
    const char *reason;   /* see mha_threads_decide */
    double seconds;       /* of all the work */
    double least_seconds; /* work is shared from this much on */
    double least_each;    /* every thread gets at least this much */
} mha_share_facts;

typedef struct {
    mha_kernel_facts float32, float64;
    mha_share_facts share; /* of no work */
} mha_core_facts;

typedef struct {
    mha_share_facts share;
    size_t scratch_bytes; /* of the whole call */
    mha_kernel_facts kernels;
    size_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
    size_t key_block;    /* keys that are packed, scored and summed together */
    size_t tile_queries; /* queries that meet a block together */
    size_t task_queries; /* queries of a task, for each of its heads */
    size_t task_heads;   /* those that share a key head, or those, of several items too, side by side by columns */
    size_t n_splits;     /* > 1: the key blocks of a task are split into so many tasks */
    int by_columns;      /* scores stand transposed: see columns.c */
    int weights_again;   /* requested weights are computed by a second pass */
    /* Pairs (tile, key block): those computed; those if every query saw every key; the most blocks of one tile. */
    size_t n_tiles, n_tiles_all, most_blocks; /* most_blocks > 1: their softmaxes are joined */
} mha_attention_facts;

typedef struct {
    size_t rows, rows_needed; /* rows_needed: rows that some query sees; the others are left out */
    size_t in_features, out_features, task_rows;
    mha_share_facts share;
} mha_linear_facts;

typedef struct {
    size_t slice_items, n_slices; /* slice_items: items that take all steps together */
    size_t scratch_bytes;
    mha_linear_facts projections[4]; /* W_q, W_k, W_v, W_o; all 0: the layer has none */
    mha_attention_facts attention;
} mha_layer_facts;

/*
 * These functions read the plan that the call itself would follow, under the instruction set and thread
 * limit of this moment, and compute nothing.  Of all the arguments' pointers, they read only what valid_lens
 * points to; for the others it only matters whether they are NULL.  After an error *facts is undefined.
 */
void mha_kernels_explain(mha_core_facts *facts); /* of both types, and of threads: the least work that they share */
MHA_MUST_CHECK mha_status mha_attention_explain(const mha_attention_args *args, mha_attention_facts *facts);
MHA_MUST_CHECK mha_status mha_linear_explain(mha_dtype dtype, const mha_linear *linear, size_t rows,
                                             mha_linear_facts *facts);
MHA_MUST_CHECK mha_status mha_layer_explain(const mha_layer_args *args, mha_layer_facts *facts);

#endif /* MHA_EXPLAIN_H */
