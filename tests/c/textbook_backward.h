/*
 * textbook_backward.h: gradients of attention as the textbook has them, one query at a time, every sum in double; from
 * the weights of textbook.h.  Dropout has no part here.  For test_backward.c and the fuzz targets.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef TEXTBOOK_BACKWARD_H
#define TEXTBOOK_BACKWARD_H

#include "drawn.h"
#include "flags.h"
#include "textbook.h"

/* A drawn call with what its backward reads and writes. */
typedef struct {
    attention_call call;
    mha_attention_grads grads;
    void *grad_out, *stats[2];
    void *got[5]; /* gradients of q, k, v, additive weights, bias as the core gives them */
    double *exact[5];
    size_t n[5]; /* how many numbers each has; 0: not wanted */
} backward_call;

enum { OF_Q, OF_K, OF_V, OF_W, OF_BIAS, N_GRADS };

static const char *const grad_names[N_GRADS] = {"grad_q", "grad_k", "grad_v", "grad_w", "grad_bias"};

static mha_result
result_like(void *data, const mha_operand *x)
{
    return (mha_result){data, x->batch_stride, x->head_stride, x->row_stride};
}

static backward_call
with_backward(attention_call call)
{
    backward_call b = {.call = call};
    mha_attention_args *a = &b.call.args;
    const size_t item = size_of(a->dtype), kv_rows = a->batch * a->kv_heads * a->keys;
    const mha_operand out = {a->out.data, a->out.batch_stride, a->out.head_stride, a->out.row_stride};

    b.n[OF_Q] = b.call.n_rows * a->head_dim;
    b.n[OF_K] = kv_rows * a->head_dim;
    b.n[OF_V] = kv_rows * a->value_dim;
    b.n[OF_W] = a->additive_weights != NULL ? a->head_dim : 0;
    b.n[OF_BIAS] = a->bias.data != NULL ? a->heads * a->queries * a->keys : 0;
    for (int i = 0; i < N_GRADS; i++) {
        b.got[i] = memset(allocate(b.n[i] * item), 0xff, b.n[i] * item);
        b.exact[i] = allocate(b.n[i] * sizeof(double));
        memset(b.exact[i], 0, b.n[i] * sizeof(double));
    }
    for (int i = 0; i < 2; i++) {
        b.stats[i] = allocate(b.call.n_rows * item);
    }
    b.grad_out = numbers(a->dtype, b.call.n_out, 1.0);
    a->weights = b.call.weights;
    a->row_max = b.stats[0];
    a->row_sum = b.stats[1];
    b.grads = (mha_attention_grads){
        .out = out,
        .grad_out = {b.grad_out, out.batch_stride, out.head_stride, out.row_stride},
        .grad_q = result_like(b.got[OF_Q], &a->q),
        .grad_k = result_like(b.got[OF_K], &a->k),
        .grad_v = result_like(b.got[OF_V], &a->v),
        .grad_additive_weights = b.n[OF_W] > 0 ? b.got[OF_W] : NULL,
    };
    if (b.n[OF_BIAS] > 0) {
        b.grads.grad_bias =
            (mha_mask_result){b.got[OF_BIAS], 0, (ptrdiff_t)(a->queries * a->keys), (ptrdiff_t)a->keys, 1};
    }
    return b;
}

/* Where row (item, head, row) of an operand begins, as a count of numbers. */
static size_t
row_of(const mha_operand *x, size_t item, size_t head, size_t row)
{
    return (size_t)((ptrdiff_t)item * x->batch_stride + (ptrdiff_t)head * x->head_stride +
                    (ptrdiff_t)row * x->row_stride);
}

/* What key j of the row adds, given dL/dscore = ds. */
static void
add_score_grads(backward_call *b, size_t q, size_t k, double ds)
{
    const mha_attention_args *a = &b->call.args;

    ds *= scale_of(a);
    for (size_t d = 0; d < a->head_dim; d++) {
        const double x = get(a->dtype, a->q.data, q + d), y = get(a->dtype, a->k.data, k + d);
        if (a->additive_weights == NULL) {
            b->exact[OF_Q][q + d] += ds * y;
            b->exact[OF_K][k + d] += ds * x;
            continue;
        }
        const double t = tanh(x + y), g = ds * get(a->dtype, a->additive_weights, d) * (1 - t * t);
        b->exact[OF_Q][q + d] += g;
        b->exact[OF_K][k + d] += g;
        b->exact[OF_W][d] += ds * t;
    }
}

static void
textbook_row(backward_call *b, size_t item, size_t head, size_t i)
{
    const mha_attention_args *a = &b->call.args;
    const size_t row = (item * a->heads + head) * a->queries + i, kv_head = head / (a->heads / a->kv_heads);
    const size_t g = row_of(&b->grads.grad_out, item, head, i), q = row_of(&a->q, item, head, i);
    const int is_empty = isinf(get(a->dtype, a->lse, row)) != 0;
    double mean = 0;

    for (int pass = 0; pass < 2; pass++) { /* the mean of dP first, which every dS needs */
        for (size_t j = 0; j < a->keys; j++) {
            const size_t v = row_of(&a->v, item, kv_head, j), k = row_of(&a->k, item, kv_head, j);
            const double p = get(a->dtype, a->weights, row * a->keys + j);
            double dp = 0;
            if (p == 0) {
                continue; /* a hidden key, or as good as hidden */
            }
            for (size_t c = 0; c < a->value_dim; c++) {
                const double grad = get(a->dtype, b->grad_out, g + c);
                dp += grad * get(a->dtype, a->v.data, v + c);
                b->exact[OF_V][v + c] += pass == 0 ? p * grad : 0;
            }
            mean += pass == 0 ? p * dp : 0;
            if (pass == 1 && !is_empty) {
                add_score_grads(b, q, k, p * (dp - mean));
                if (b->n[OF_BIAS] > 0) {
                    b->exact[OF_BIAS][(head * a->queries + i) * a->keys + j] += p * (dp - mean);
                }
            }
        }
    }
}

/* Fills exact[] by the textbook, got[] by the core; the status of what went wrong first. */
static mha_status
run_both(backward_call *b)
{
    const mha_attention_args *a = &b->call.args;
    mha_status status = textbook_attention(a);

    for (size_t row = 0; status == MHA_OK && row < b->call.n_rows; row++) {
        textbook_row(b, row / a->queries / a->heads, row / a->queries % a->heads, row % a->queries);
    }
    if (status == MHA_OK) {
        forget_subnormals();
        status = mha_attention_forward(a);
    }
    return status == MHA_OK ? mha_attention_backward(a, &b->grads) : status;
}

/*
 * Numbers are at most 1: dP is at most value_dim, a score off by its rounding moves a weight by as much of itself, and
 * a gradient is a sum over so many of either.  In float64 this is some 1e-11, and no slip is as small.
 */
static double
backward_tolerance(const backward_call *b)
{
    const mha_attention_args *a = &b->call.args;

    return 8 * b->call.tolerance * (2 + (double)a->value_dim) * sqrt(2 + (double)(a->queries * a->heads * a->batch));
}

#endif
