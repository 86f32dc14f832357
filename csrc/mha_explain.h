/*
 * mha_explain.h: what a call of mha.h will do, and why: kernels, tiles, tasks, threads and memory (layer/explain.c).
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef MHA_EXPLAIN_H
#define MHA_EXPLAIN_H

#include "mha.h"

/* --- What a call will do, and why ------------------------------------------------------------------ */

/*
 * These functions read the plan that the call itself would follow, under the instruction set and thread
 * limit of this moment, and compute nothing.  Of the arguments' addresses only valid_lens is read; of the
 * others it counts whether they are NULL.
 */

/* The kernels in use for a type: vectors of `lanes` numbers, products in register tiles of rows x columns. */
typedef struct {
    mha_isa isa;
    size_t itemsize, lanes, tile_rows, tile_columns;
} mha_kernel_facts;

MHA_MUST_CHECK mha_status mha_kernels_explain(mha_dtype dtype, mha_kernel_facts *facts);

typedef enum {
    MHA_SHARE_ONE_TASK, /* one thread: there is nothing to share out */
    MHA_SHARE_LITTLE,   /* one thread: less work than waking another is worth */
    MHA_SHARE_WORK,     /* a further thread would get too little of it */
    MHA_SHARE_TASKS,    /* there are no more tasks */
    MHA_SHARE_ALL       /* as many as mha_threads_get allows */
} mha_share_reason;

/* How many threads share some work.  Times are estimates of one thread's, by the rule that decides. */
typedef struct {
    size_t n_tasks;
    unsigned n_threads, most_threads;
    mha_share_reason reason;
    double seconds;       /* the work */
    double least_seconds; /* from so much on it is shared, */
    double least_each;    /* so that each thread gets at least so much */
} mha_share_facts;

mha_share_facts mha_threads_explain(void); /* of no work: the limits */

typedef struct {
    mha_kernel_facts kernels;
    mha_share_facts share;
    size_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
    size_t key_block;    /* keys that are packed, scored and summed together */
    size_t most_blocks;  /* key blocks that a query walks through, at most; > 1: their softmaxes are joined */
    size_t tile_queries; /* queries that meet a block together */
    size_t task_queries; /* queries of a task, for each of the heads that share a key head */
    size_t task_heads;   /* those heads, or, where items with one query each go side by side, so many times as many */
    size_t n_splits;     /* > 1: few queries on many keys; so many blocks of each task are tasks of their own */
    size_t n_tiles, n_tiles_all; /* pairs (queries, key block): computed, and if every query saw every key */
    int by_columns;      /* few keys: scores stand transposed, so that the softmax crosses no lanes */
    int weights_again;   /* the weights asked for are computed by a second pass */
    size_t scratch_bytes; /* of the whole call */
} mha_attention_facts;

MHA_MUST_CHECK mha_status mha_attention_explain(const mha_attention_args *args, mha_attention_facts *facts);

/* A projection; rows_needed are those that somebody sees, the others are left out. */
typedef struct {
    size_t rows, rows_needed, in_features, out_features, task_rows;
    mha_share_facts share;
} mha_linear_facts;

MHA_MUST_CHECK mha_status mha_linear_explain(mha_dtype dtype, const mha_linear *linear, size_t rows,
                                             mha_linear_facts *facts);

/*
 * projections: W_q, W_k, W_v, which share their threads, and W_o; all 0 where there is none.  If n_slices > 1,
 * slice_items items at a time take all steps: then every step's share is that of the slices.
 */
typedef struct {
    mha_linear_facts projections[4];
    mha_attention_facts attention;
    size_t slice_items, n_slices;
    size_t scratch_bytes;
} mha_layer_facts;

MHA_MUST_CHECK mha_status mha_layer_explain(const mha_layer_args *args, mha_layer_facts *facts);

#endif /* MHA_EXPLAIN_H */
