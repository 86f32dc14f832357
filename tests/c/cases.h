/*
 * cases.h: calls of every entry point for given sizes, with operands in guarded memory: for test_guards.c and
 * test_failures.c.  Which masks and options a case has follows from its sizes.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef CASES_H
#define CASES_H

#include "check.h"
#include "mha.h"

#include "guarded.h"

#include <math.h>

enum { MOST = 130 }; /* sizes go up to this */

static const double QUARTER = 0.25; /* a scale */

static mha_dtype dtype; /* of all operands of this round */

/* An operand whose address is reckoned from a row that is not its first; the rows before need not exist. */
static const void *
rows_before(const void *x, size_t n)
{
    return (const void *)((uintptr_t)x - n * size_of(dtype));
}

/* --- Attention ----------------------------------------------------------------------------------- */

typedef struct {
    mha_attention_args args;
    mha_attention_grads grads;
    size_t n_q, n_k, n_v, n_out, n_scores, n_rows;
} attention_case;

/* A mask, one for each head or item, whose keys lie side by side, or else its queries. */
static mha_mask
mask_of(const void *data, const mha_attention_args *a, int per_head, int by_keys)
{
    const ptrdiff_t q = (ptrdiff_t)a->queries, k = (ptrdiff_t)a->keys;

    return (mha_mask){data, per_head ? 0 : q * k, per_head ? q * k : 0, by_keys ? 1 : k, by_keys ? q : 1};
}

static void
place_masks(attention_case *c, size_t variant)
{
    mha_attention_args *a = &c->args;
    const size_t B = a->batch, Q = a->queries, K = a->keys;
    const ptrdiff_t q = (ptrdiff_t)Q, k = (ptrdiff_t)K;

    a->visible = (mha_visibility){NULL, 0, MHA_CAUSAL_NONE, MHA_NO_LIMIT, MHA_NO_LIMIT, 0, 0};
    if (variant & 1) {
        const size_t per_batch = variant & 2 ? Q : 1;
        int64_t *lens = guarded(B * per_batch * sizeof *lens);
        for (size_t i = 0; i < B * per_batch; i++) {
            lens[i] = (int64_t)((i * 31 + variant) % (K + 3)) - 1;
        }
        a->visible.valid_lens = lens;
        a->visible.lens_per_batch = per_batch;
    }
    if (variant & 4) {
        a->visible.causal = variant & 1 ? MHA_CAUSAL_TOP_LEFT : MHA_CAUSAL_BOTTOM_RIGHT;
    }
    if (variant % 3 == 1) {
        uint8_t *keep = guarded(B * Q * K);
        for (size_t i = 0; i < B * Q * K; i++) {
            keep[i] = i % 5 != 0;
        }
        a->keep_mask = mask_of(keep, a, 0, variant & 8);
    }
    if (variant % 3 == 2) {
        a->bias = mask_of(numbers(dtype, a->heads * Q * K), a, 1, variant & 8);
        c->grads.grad_bias = (mha_mask_result){room(dtype, a->heads * Q * K), 0, q * k, k, 1};
    }
    a->dropout = variant % 5 == 0 ? 0.3 : 0.0;
    a->empty_rows = variant % 7 < 3 ? MHA_EMPTY_UNIFORM : MHA_EMPTY_ZERO;
}

static attention_case
attention_of(size_t D, size_t K, int additive)
{
    const size_t variant = D * 7 + K * 3 + (size_t)additive;
    attention_case c = {
        .args = attention_sizes(dtype, 2, 2, 1 + variant % 2, 1 + variant % 19, K, D, MOST + 1 - D),
    };
    mha_attention_args *a = &c.args;
    const ptrdiff_t d = (ptrdiff_t)D, dv = (ptrdiff_t)a->value_dim, q = (ptrdiff_t)a->queries, k = (ptrdiff_t)K;
    const ptrdiff_t h = 2, kv = (ptrdiff_t)a->kv_heads;

    a->scale = &QUARTER;
    a->seed = 7;
    c.n_rows = 4 * a->queries;
    c.n_q = c.n_rows * D;
    c.n_k = 2 * a->kv_heads * K * D;
    c.n_v = 2 * a->kv_heads * K * a->value_dim;
    c.n_out = c.n_rows * a->value_dim;
    c.n_scores = c.n_rows * K;
    a->q = (mha_operand){numbers(dtype, c.n_q), h * q * d, q * d, d};
    a->k = (mha_operand){numbers(dtype, c.n_k), kv * k * d, k * d, d};
    a->v = (mha_operand){numbers(dtype, c.n_v), kv * k * dv, k * dv, dv};
    a->out = (mha_result){room(dtype, c.n_out), h * q * dv, q * dv, dv};
    a->additive_weights = additive ? numbers(dtype, D) : NULL;
    a->weights = room(dtype, c.n_scores);
    a->row_max = room(dtype, c.n_rows);
    a->row_sum = room(dtype, c.n_rows);
    a->lse = room(dtype, c.n_rows);
    place_masks(&c, variant);
    c.grads.out = (mha_operand){a->out.data, h * q * dv, q * dv, dv};
    c.grads.grad_out = (mha_operand){numbers(dtype, c.n_out), h * q * dv, q * dv, dv};
    c.grads.grad_q = (mha_result){room(dtype, c.n_q), h * q * d, q * d, d};
    c.grads.grad_k = (mha_result){room(dtype, c.n_k), kv * k * d, k * d, d};
    c.grads.grad_v = (mha_result){room(dtype, c.n_v), kv * k * dv, k * dv, dv};
    c.grads.grad_additive_weights = additive ? room(dtype, D) : NULL;
    return c;
}

/*
 * K keys count, and as many more do not: those lie behind the end, by their length, or before the start, by a window.
 * Two heads side by side in each row, so that the visible rows are one piece of memory.
 */
static void
hide_keys(mha_visibility *visible, size_t queries, size_t K)
{
    if (guard.at_end) {
        int64_t *lens = guarded(sizeof *lens);
        *lens = (int64_t)K;
        *visible = (mha_visibility){lens, 1, MHA_CAUSAL_NONE, MHA_NO_LIMIT, MHA_NO_LIMIT, 0, 0};
    } else { /* the first query is query 0 of 2K keys counted from the lower right: it sees K - queries back */
        const int64_t left = (int64_t)K - (int64_t)queries + 1;
        *visible = (mha_visibility){NULL, 0, MHA_CAUSAL_BOTTOM_RIGHT, left, MHA_NO_LIMIT, 0, 0};
    }
}

/* --- Projections and layers ------------------------------------------------------------------------- */

/* Weights as torch draws them: with larger ones scores may differ by more than 80, and a value times the weight of such
 * a key is subnormal by right. */
static mha_linear
projection(size_t out_features, size_t in_features, const void **weight_ret)
{
    const void *weight = numbers_up_to(1 / sqrt((double)in_features), dtype, out_features * in_features);
    size_t n = 0, width = 0;

    CHECK(mha_linear_packed_size(dtype, out_features, in_features, &n, &width) == MHA_OK, "%s: size", guard.doing);
    void *packed = room(dtype, n);
    CHECK(mha_linear_pack(dtype, out_features, in_features, weight, (ptrdiff_t)in_features, packed) == MHA_OK,
          "%s: pack", guard.doing);
    *weight_ret = weight;
    return (mha_linear){packed, numbers(dtype, out_features), out_features, in_features, MHA_WEIGHT_PACKED, 0, width};
}

typedef struct {
    mha_layer_args args;
    mha_layer_grads grads; /* `forward` is set by whoever runs it: the struct may move until then */
    size_t n_queries, n_keys, n_out;
} layer_case;

/* Room for the gradient of an input: dense (batch, rows, size). */
static mha_result
gradient_room(mha_dtype type, size_t batch, size_t rows, size_t size)
{
    return (mha_result){room(type, batch * rows * size), (ptrdiff_t)(rows * size), 0, (ptrdiff_t)size};
}

static void
place_layer_results(layer_case *c, size_t hiddens)
{
    mha_layer_args *a = &c->args;
    mha_layer_grads *g = &c->grads;
    const mha_linear *linears[4] = {&a->inputs[0].W, &a->inputs[1].W, &a->inputs[2].W, &a->W_o};

    a->inputs[0].projected = room(dtype, c->n_queries * hiddens);
    a->inputs[1].projected = room(dtype, c->n_keys * hiddens);
    a->attention.row_max = room(dtype, c->n_queries * a->attention.heads);
    a->attention.row_sum = room(dtype, c->n_queries * a->attention.heads);
    a->attention.weights = room(dtype, c->n_queries * a->attention.heads * a->attention.keys);
    a->out = room(dtype, c->n_out);
    g->grad_out = numbers(dtype, c->n_out);
    g->grad_inputs[0] = gradient_room(dtype, a->attention.batch, a->attention.queries, a->inputs[0].size);
    g->grad_inputs[1] = gradient_room(dtype, a->attention.batch, a->attention.keys, a->inputs[1].size);
    g->grad_inputs[2] = gradient_room(dtype, a->attention.batch, a->attention.keys, a->inputs[2].size);
    for (int i = 0; i < 4; i++) {
        if (linears[i]->weight != NULL) {
            g->grad_weight[i] = room(dtype, linears[i]->out_features * linears[i]->in_features);
            g->grad_bias[i] = room(dtype, linears[i]->out_features);
        }
    }
}

/* Two items of K keys; or, if `hides`, one whose further keys lie on the forbidden page. */
static layer_case
layer_of(size_t D, size_t K, int is_additive, int hides)
{
    const size_t batch = hides ? 1 : 2, Q = 1 + (D + K) % (K < 5 ? K : 5), hidden = hides && !guard.at_end ? K : 0;
    const size_t key_size = MOST + 1 - D, value_size = 1 + K % 37;
    const size_t hiddens = 2 * (1 + (D + K) % 33), outputs = 1 + K % 21;
    const void *k = numbers(dtype, batch * K * key_size), *v = numbers(dtype, batch * K * value_size);
    layer_case c = {.n_queries = batch * Q, .n_keys = batch * (hides ? 2 * K : K)};

    c.args =
        layer_sizes(dtype, batch, Q, c.n_keys / batch, is_additive ? 1 : 2, (const size_t[]){D, key_size, value_size});
    c.args.inputs[0].rows.data = numbers(dtype, c.n_queries * D);
    c.args.inputs[1].rows.data = rows_before(k, hidden * key_size);
    c.args.inputs[2].rows.data = rows_before(v, hidden * value_size);
    c.args.inputs[0].W = projection(hiddens, D, &c.grads.weight[0]);
    c.args.inputs[1].W = projection(hiddens, key_size, &c.grads.weight[1]);
    if (is_additive) {
        c.args.attention.additive_weights = numbers(dtype, hiddens);
        c.grads.attention.grad_additive_weights = room(dtype, hiddens);
        c.n_out = c.n_queries * value_size;
    } else {
        c.args.inputs[2].W = projection(hiddens, value_size, &c.grads.weight[2]);
        c.args.W_o = projection(outputs, hiddens, &c.grads.weight[3]);
        c.args.inputs[2].projected = room(dtype, c.n_keys * hiddens);
        c.args.context = room(dtype, c.n_queries * hiddens);
        c.n_out = c.n_queries * outputs;
    }
    if (hides) {
        hide_keys(&c.args.attention.visible, Q, K);
    } else if (D % 2 == 0) {
        int64_t *lens = guarded(2 * sizeof *lens);
        lens[0] = (int64_t)(D % (K + 2));
        lens[1] = (int64_t)(D * 3 % (K + 2));
        c.args.attention.visible = (mha_visibility){lens, 1, MHA_CAUSAL_NONE, MHA_NO_LIMIT, MHA_NO_LIMIT, 0, 0};
        c.args.attention.empty_rows = D % 4 == 0 ? MHA_EMPTY_UNIFORM : MHA_EMPTY_ZERO;
    }
    place_layer_results(&c, hiddens);
    return c;
}

/* --- One of each, alone in its memory: refused only for what a test changes --------------------- */

static inline attention_case
good_attention(int additive)
{
    guarded_reset(1);
    random_state = 1;
    return attention_of(8, 12, additive);
}

static inline layer_case
good_layer(int additive)
{
    guarded_reset(1);
    random_state = 2;
    return layer_of(9, 12, additive, 0);
}

#endif
