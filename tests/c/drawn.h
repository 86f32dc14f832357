/*
 * drawn.h: attention calls with drawn sizes, strides and masks, and comparisons: for test_attention.c, test_backward.c
 * and the fuzz targets (tests/fuzz).  With CHOICES_FROM_BYTES sizes and options come from a fuzzer's bytes.
 *
 * Every operand lies in memory of exactly its own size, so that a build with AddressSanitizer sees any number read or
 * written beside it.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef DRAWN_H
#define DRAWN_H

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "mha.h"

/* --- Drawing ------------------------------------------------------------------------------- */

static uint64_t state;

static uint32_t
draw_bits(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

static double
uniform(void)
{
    return (double)(draw_bits() % (1 << 24)) / (1 << 23) - 1.0;
}

#if defined(CHOICES_FROM_BYTES)
/* A fuzzer's choices: two bytes each, and always the first when they have run out.  Numbers are drawn all the same. */
static const uint8_t *choices, *choices_end;

static size_t
below(size_t n)
{
    size_t choice = 0;

    for (int i = 0; i < 2 && choices < choices_end; i++) {
        choice = choice << 8 | *choices++;
    }
    return choice % n;
}
#else
static size_t
below(size_t n)
{
    return draw_bits() % n;
}
#endif

/* Memory of exactly this size, until free_all(). */
static struct {
    void **all;
    size_t n, room;
} blocks;

static void *
allocate(size_t n_bytes)
{
    if (blocks.n == blocks.room) {
        blocks.room = 2 * blocks.room + 64;
        blocks.all = realloc(blocks.all, blocks.room * sizeof *blocks.all);
    }
    void *memory = malloc(n_bytes ? n_bytes : 1);
    if (blocks.all == NULL || memory == NULL) {
        exit(EXIT_FAILURE);
    }
    return blocks.all[blocks.n++] = memory;
}

static inline void
free_all(void)
{
    while (blocks.n > 0) {
        free(blocks.all[--blocks.n]);
    }
}

static void *
numbers(mha_dtype dtype, size_t n, double scale)
{
    void *x = allocate(n * size_of(dtype));
    for (size_t i = 0; i < n; i++) {
        set(dtype, x, i, scale * uniform());
    }
    return x;
}

/* A projection whose weight, rows of in_features numbers `stride` apart, is packed. */
static inline mha_linear
packed_linear(mha_dtype dtype, size_t out_features, size_t in_features, const void *weight, size_t stride,
              const void *bias)
{
    mha_linear linear = {.out_features = out_features, .in_features = in_features, .bias = bias};
    size_t n = 0;

    CHECK(mha_linear_packed_size(dtype, out_features, in_features, &n, &linear.panel_width) == MHA_OK, "packed size");
    void *packed = allocate(n * size_of(dtype));
    CHECK(mha_linear_pack(dtype, out_features, in_features, weight, (ptrdiff_t)stride, packed) == MHA_OK, "pack");
    linear.weight = packed;
    return linear;
}

/* --- One drawn attention call ---------------------------------------------------------------- */

typedef struct {
    mha_attention_args args;
    void *q, *k, *v, *out, *weights, *lse, *w, *bias;
    uint8_t *keep;
    int64_t *lens;
    size_t n_out, n_weights, n_rows;
    double tolerance;
} attention_call;

/* A dense (B,H,rows,columns) operand, or one with the heads side by side in a row: a layer's projected features. */
static mha_operand
lay_out(const void *data, size_t heads, size_t rows, size_t columns, int heads_in_rows)
{
    const ptrdiff_t h = (ptrdiff_t)heads, r = (ptrdiff_t)rows, c = (ptrdiff_t)columns;
    if (heads_in_rows) {
        return (mha_operand){data, r * h * c, c, h * c};
    }
    return (mha_operand){data, h * r * c, r * c, c};
}

static void
draw_masks(attention_call *call)
{
    mha_attention_args *args = &call->args;
    const size_t B = args->batch, H = args->heads, Q = args->queries, K = args->keys;
    const ptrdiff_t k = (ptrdiff_t)K, q = (ptrdiff_t)Q;

    args->visible = (mha_visibility){NULL, 0, MHA_CAUSAL_NONE, MHA_NO_LIMIT, MHA_NO_LIMIT, 0, 0};
    if (below(2)) {
        args->visible.lens_per_batch = below(2) ? 1 : Q;
        call->lens = allocate(B * args->visible.lens_per_batch * sizeof *call->lens);
        for (size_t i = 0; i < B * args->visible.lens_per_batch; i++) {
            call->lens[i] = (int64_t)(draw_bits() % (K + 4)) - 1;
        }
        args->visible.valid_lens = call->lens;
    }
    args->visible.causal = (mha_causal)below(3);
    if (below(3) == 0) {
        args->visible.window_left = 1 + (int64_t)below(K + 1);
        args->visible.window_right = below(2) ? MHA_NO_LIMIT : 1 + (int64_t)below(K + 1);
    }
    if (below(3) == 0) {
        call->keep = allocate(B * Q * K);
        for (size_t i = 0; i < B * Q * K; i++) {
            call->keep[i] = draw_bits() % 5 != 0;
        }
        args->keep_mask =
            draw_bits() % 2 ? (mha_mask){call->keep, q * k, 0, k, 1} : (mha_mask){call->keep, q * k, 0, 1, q};
    }
    if (below(3) == 0) {
        call->bias = numbers(args->dtype, H * Q * K, 1.0);
        if (H * Q * K > 0) {
            set(args->dtype, call->bias, draw_bits() % (H * Q * K), -INFINITY);
        }
        args->bias = draw_bits() % 2 ? (mha_mask){call->bias, 0, q * k, k, 1} : (mha_mask){call->bias, 0, q * k, 1, q};
    }
    args->empty_rows = below(2) ? MHA_EMPTY_UNIFORM : MHA_EMPTY_ZERO;
}

/* Sizes around those of vectors, panels, tiles and blocks, and any small one; now and then none at all. */
static size_t
draw_size(size_t most)
{
    static const size_t around[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 512, 513};
    const size_t n = below(2) ? around[below(sizeof around / sizeof *around)] : 1 + below(40);
    return below(64) == 63 ? 0 : n < most ? n : most;
}

static const double third = 0.3; /* a scale */

static inline attention_call
draw_call(mha_dtype dtype, size_t most)
{
    attention_call call = {0};
    mha_attention_args *args = &call.args;
    const size_t groups = 1 + below(2), kv_heads = 1 + below(3);
    const int side_by_side = (int)below(2), additive = below(3) == 0;

    const size_t B = 1 + below(3), H = groups * kv_heads, Q = draw_size(most / 4), K = draw_size(most);
    const size_t D = draw_size(80), Dv = draw_size(80);
    *args = attention_sizes(dtype, B, H, kv_heads, Q, K, D, Dv);
    call.q = numbers(dtype, B * H * Q * D, 1.0);
    call.k = numbers(dtype, B * kv_heads * K * D, 1.0);
    call.v = numbers(dtype, B * kv_heads * K * Dv, 1.0);
    call.n_out = B * H * Q * Dv;
    call.n_weights = B * H * Q * K;
    call.n_rows = B * H * Q;
    call.out = numbers(dtype, call.n_out, 1.0);
    call.weights = numbers(dtype, call.n_weights, 1.0);
    call.lse = numbers(dtype, call.n_rows, 1.0);
    args->q = lay_out(call.q, H, Q, D, side_by_side);
    args->k = lay_out(call.k, kv_heads, K, D, side_by_side);
    args->v = lay_out(call.v, kv_heads, K, Dv, side_by_side);
    const mha_operand out = lay_out(call.out, H, Q, Dv, side_by_side);
    args->out = (mha_result){call.out, out.batch_stride, out.head_stride, out.row_stride};
    args->scale = below(2) && D > 0 ? NULL : &third; /* NULL: the usual one */
    if (additive) {
        args->additive_weights = call.w = numbers(dtype, D, 1.0);
    }
    draw_masks(&call);
    args->lse = call.lse;
    /* Both sides are right to a few units times the largest score (scale times D, plus a bias of at most 1), which a
     * wrong key, stride or mask misses by many orders. */
    const double unit = dtype == MHA_F64 ? DBL_EPSILON : FLT_EPSILON;
    const double scale = args->scale != NULL ? third : additive ? 1 : 1 / sqrt((double)D);
    call.tolerance = 16 * unit * (2 + scale * (double)D);
    return call;
}

static inline void *
copy_of(const void *x, size_t n_bytes)
{
    return memcpy(allocate(n_bytes), x, n_bytes);
}

static inline void
compare(mha_dtype dtype, const void *ours, const void *exact, size_t n, double tolerance, const char *what, size_t draw)
{
    for (size_t i = 0; i < n; i++) {
        const double a = get(dtype, ours, i), b = get(dtype, exact, i);
        if (!(a == b || fabs(a - b) <= tolerance)) {
            CHECK(0, "%s %s draw %zu, %s[%zu]: %.9g, should be %.9g", mha_isa_name(mha_isa_active()),
                  dtype == MHA_F64 ? "float64" : "float32", draw, what, i, a, b);
            return;
        }
    }
}

#endif
