/*
 * check.h: what the test programs share: checks and their count, the instruction sets that a program goes through,
 * numbers of both types, and calls by their sizes.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <string.h>

#include "mha.h"

/* --- Checks ---------------------------------------------------------------------------------- */

static int n_failed;

#define CHECK(ok, ...) \
    do { \
        if (!(ok) && n_failed++ < 20) { \
            printf("failed: " __VA_ARGS__); \
            putchar('\n'); \
        } \
    } while (0)

/* For programs of a few checks: each says a line, held or not. */
static inline void
check(int ok, const char *name)
{
    printf("%s  %s\n", ok ? "ok  " : "FAIL", name);
    fflush(stdout);
    n_failed += !ok;
}

/* What main ends with: its exit status. */
static inline int
report(void)
{
    printf("%d checks failed\n", n_failed);
    return n_failed != 0;
}

static inline int
is_quick(int argc, char **argv)
{
    return argc > 1 && strcmp(argv[1], "quick") == 0;
}

/* --- Instruction sets ------------------------------------------------------------------------- */

/* The first one of FOR_EACH_ISA.  All that the CPU has, but under emulation (-DFIRST_ISA=...), where scalar would take
 * half of the time for what the native build asks of the same text. */
#ifndef FIRST_ISA
#define FIRST_ISA MHA_ISA_SCALAR
#endif

/* The first set from `isa` on that this CPU has, selected; MHA_N_ISAS: there is none. */
static inline mha_isa
select_from(mha_isa isa)
{
    while (isa < MHA_N_ISAS && !mha_isa_available(isa)) {
        isa++;
    }
    CHECK(isa == MHA_N_ISAS || mha_isa_select(isa) == MHA_OK, "select %s", mha_isa_name(isa));
    return isa;
}

#define FOR_EACH_ISA(isa) for (mha_isa isa = select_from(FIRST_ISA); isa < MHA_N_ISAS; isa = select_from(isa + 1))

/* --- Numbers of both types ------------------------------------------------------------------------ */

static inline size_t
size_of(mha_dtype dtype)
{
    return dtype == MHA_F64 ? sizeof(double) : sizeof(float);
}

static inline double
get(mha_dtype dtype, const void *x, size_t i)
{
    return dtype == MHA_F64 ? ((const double *)x)[i] : ((const float *)x)[i];
}

static inline void
set(mha_dtype dtype, void *x, size_t i, double value)
{
    if (dtype == MHA_F64) {
        ((double *)x)[i] = value;
    } else {
        ((float *)x)[i] = (float)value;
    }
}

/* --- Calls by their sizes --------------------------------------------------------------------- */

/* Attention of these sizes, as zeros have it: no operands, no masks, the usual scale. */
static inline mha_attention_args
attention_sizes(mha_dtype dtype, size_t batch, size_t heads, size_t kv_heads, size_t queries, size_t keys,
                size_t head_dim, size_t value_dim)
{
    return (mha_attention_args){.dtype = dtype,
                                .batch = batch,
                                .heads = heads,
                                .kv_heads = kv_heads,
                                .queries = queries,
                                .keys = keys,
                                .head_dim = head_dim,
                                .value_dim = value_dim};
}

/* Dense attention of one head; place() gives it operands. */
static inline mha_attention_args
one_head(mha_dtype dtype, size_t queries, size_t keys, size_t head_dim, size_t value_dim)
{
    mha_attention_args a = attention_sizes(dtype, 1, 1, 1, queries, keys, head_dim, value_dim);

    a.q.row_stride = a.k.row_stride = (ptrdiff_t)head_dim;
    a.v.row_stride = a.out.row_stride = (ptrdiff_t)value_dim;
    return a;
}

static inline void
place(mha_attention_args *a, const void *q, const void *k, const void *v, void *out)
{
    a->q.data = q;
    a->k.data = k;
    a->v.data = v;
    a->out.data = out;
}

/* A layer of these sizes, without projections; its inputs lie dense. */
static inline mha_layer_args
layer_sizes(mha_dtype dtype, size_t batch, size_t queries, size_t keys, size_t num_heads, const size_t input_sizes[3])
{
    mha_layer_args layer = {.attention = {.dtype = dtype,
                                          .batch = batch,
                                          .heads = num_heads,
                                          .kv_heads = num_heads,
                                          .queries = queries,
                                          .keys = keys}};

    for (int i = 0; i < MHA_N_INPUTS; i++) {
        const ptrdiff_t size = (ptrdiff_t)input_sizes[i], rows = (ptrdiff_t)(i == MHA_QUERIES ? queries : keys);

        layer.inputs[i].size = input_sizes[i];
        layer.inputs[i].rows = (mha_operand){NULL, rows * size, 0, size};
    }
    return layer;
}

/* Gradients of a projection; read: x, weight, grad_y; written: of x, weight, bias. */
static inline mha_linear_grads
linear_grads(mha_dtype dtype, size_t rows, size_t out_features, size_t in_features, const void *const read[3],
             size_t x_row_stride, size_t grad_y_row_stride, void *const written[3])
{
    return (mha_linear_grads){.dtype = dtype,
                              .rows = rows,
                              .out_features = out_features,
                              .in_features = in_features,
                              .x = read[0],
                              .weight = read[1],
                              .grad_y = read[2],
                              .x_row_stride = (ptrdiff_t)x_row_stride,
                              .grad_y_row_stride = (ptrdiff_t)grad_y_row_stride,
                              .grad_x = written[0],
                              .grad_weight = written[1],
                              .grad_bias = written[2]};
}

/* `rows` dense rows of each item for a cache; before and counts: one number for each item. */
static inline mha_append
append_of(mha_dtype dtype, const mha_linear *linear, size_t batch, size_t rows, const void *x, void *cache, size_t room,
          const int64_t *before, const int64_t *counts)
{
    const ptrdiff_t in = (ptrdiff_t)linear->in_features;

    return (mha_append){.dtype = dtype,
                        .linear = *linear,
                        .batch = batch,
                        .rows = rows,
                        .in_features = linear->in_features,
                        .x = {x, (ptrdiff_t)rows * in, 0, in},
                        .cache = cache,
                        .room = room,
                        .before = before,
                        .counts = counts,
                        .before_step = 1,
                        .counts_step = 1};
}

#endif
