/*
 * textbook.h: attention in textbook loops, one query at a time, every sum in double.
 *
 * The text to read first if you want to know what the fast code computes, and what the C tests hold it against.  Same
 * arguments as mha_attention_forward; four passes per query: scores, largest score, exponentials and their sum,
 * weighted values.  Dropout and thread counts have no part here.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef TEXTBOOK_H
#define TEXTBOOK_H

#include <math.h>
#include <stdlib.h>

#include "attention/visible.h"
#include "mha.h"

/* Number i of an array of the call's type, as a double. */
static double
read_number(const mha_attention_args *a, const void *numbers, ptrdiff_t i)
{
    return a->dtype == MHA_F64 ? ((const double *)numbers)[i] : (double)((const float *)numbers)[i];
}

static void
write_number(const mha_attention_args *a, void *numbers, ptrdiff_t i, double value)
{
    if (a->dtype == MHA_F64) {
        ((double *)numbers)[i] = value;
    } else {
        ((float *)numbers)[i] = (float)value;
    }
}

/* Number (item, head, row, column) of an operand. */
static double
element(const mha_attention_args *a, const mha_operand *x, size_t item, size_t head, size_t row, size_t column)
{
    const ptrdiff_t at = (ptrdiff_t)item * x->batch_stride + (ptrdiff_t)head * x->head_stride +
                         (ptrdiff_t)row * x->row_stride + (ptrdiff_t)column;
    return read_number(a, x->data, at);
}

static ptrdiff_t
mask_index(const mha_mask *mask, size_t item, size_t head, size_t query, size_t key)
{
    return (ptrdiff_t)item * mask->batch_stride + (ptrdiff_t)head * mask->head_stride +
           (ptrdiff_t)query * mask->query_stride + (ptrdiff_t)key * mask->key_stride;
}

static inline double
scale_of(const mha_attention_args *a)
{
    const double usual = a->additive_weights != NULL || a->head_dim == 0 ? 1 : 1 / sqrt((double)a->head_dim);

    return a->scale != NULL ? *a->scale : usual;
}

/* Pass 1: how well key j fits query i.  -inf where the query may not see the key. */
static double
score(const mha_attention_args *a, size_t b, size_t h, size_t i, size_t j)
{
    const size_t key_head = h / (a->heads / a->kv_heads);
    const mha_interval seen = mha_visible_keys(&a->visible, a->queries, a->keys, b, i);
    double sum = 0;

    if (j < seen.first || j >= seen.last) {
        return -HUGE_VAL;
    }
    if (a->keep_mask.data != NULL && ((const uint8_t *)a->keep_mask.data)[mask_index(&a->keep_mask, b, h, i, j)] == 0) {
        return -HUGE_VAL;
    }
    for (size_t d = 0; d < a->head_dim; d++) {
        const double q = element(a, &a->q, b, h, i, d), key = element(a, &a->k, b, key_head, j, d);
        sum +=
            a->additive_weights == NULL ? q * key : read_number(a, a->additive_weights, (ptrdiff_t)d) * tanh(q + key);
    }
    sum *= scale_of(a);
    if (a->softcap > 0) {
        sum = a->softcap * tanh(sum / a->softcap);
    }
    if (a->relative_bias != NULL) {
        const int64_t reach = (int64_t)a->relative_reach;
        const int64_t distance = (int64_t)j - mha_diagonal(&a->visible, a->queries, a->keys, i);
        const int64_t clipped = distance < -reach ? -reach : distance > reach ? reach : distance;
        sum += read_number(a, a->relative_bias, (ptrdiff_t)(h * (size_t)(2 * reach + 1) + (size_t)(clipped + reach)));
    }
    if (a->bias.data != NULL) {
        sum += read_number(a, a->bias.data, mask_index(&a->bias, b, h, i, j));
    }
    return sum;
}

/* Passes 2 and 3: weights[j] = exp(score - max); returns their sum and the sink's, 0 if there is neither. */
static double
exponentials(double *weights, size_t keys, double sink, double *max_ret)
{
    double max = -HUGE_VAL, sum = 0;

    for (size_t j = 0; j < keys; j++) {
        max = weights[j] > max ? weights[j] : max;
    }
    max = max == -HUGE_VAL ? sink : max;
    max = max == -HUGE_VAL ? 0 : max;
    for (size_t j = 0; j < keys; j++) {
        weights[j] = exp(weights[j] - max);
        sum += weights[j];
    }
    *max_ret = max;
    return sum + exp(sink - max);
}

/* Pass 4: the values, averaged with the weights; hidden ones are left out, not multiplied by 0. */
static void
average_values(const mha_attention_args *a, size_t b, size_t h, size_t i, const double *weights, const double *scores)
{
    const size_t key_head = h / (a->heads / a->kv_heads);
    const ptrdiff_t at =
        (ptrdiff_t)b * a->out.batch_stride + (ptrdiff_t)h * a->out.head_stride + (ptrdiff_t)i * a->out.row_stride;

    for (size_t c = 0; c < a->value_dim; c++) {
        double sum = 0;
        for (size_t j = 0; j < a->keys; j++) {
            if (scores[j] != -HUGE_VAL) {
                sum += weights[j] * element(a, &a->v, b, key_head, j, c);
            }
        }
        write_number(a, a->out.data, at + (ptrdiff_t)c, sum);
    }
}

/* One query: `scores` and `weights` are room for K doubles each. */
static void
attend_query(const mha_attention_args *a, size_t b, size_t h, size_t i, double *scores, double *weights)
{
    const ptrdiff_t row = (ptrdiff_t)((b * a->heads + h) * a->queries + i);
    const mha_interval seen = mha_visible_keys(&a->visible, a->queries, a->keys, b, i);
    /* Visible keys whose scores overflowed to -inf are shared alone; a row that sees none gets all. */
    const int overflowed =
        seen.first < seen.last && a->keep_mask.data == NULL && a->bias.data == NULL && a->relative_bias == NULL;
    const mha_interval mean = {overflowed ? seen.first : 0, overflowed ? seen.last : a->keys};
    double max = 0, sum;

    for (size_t j = 0; j < a->keys; j++) {
        scores[j] = weights[j] = score(a, b, h, i, j);
    }
    sum = exponentials(weights, a->keys, a->sinks == NULL ? -HUGE_VAL : read_number(a, a->sinks, (ptrdiff_t)h), &max);
    for (size_t j = 0; j < a->keys; j++) {
        if (sum != 0) { /* a NaN among the visible keys makes their weights NaN, and no others */
            weights[j] = j >= seen.first && j < seen.last && weights[j] != 0 ? weights[j] / sum : 0;
        } else if (a->empty_rows == MHA_EMPTY_UNIFORM && j >= mean.first && j < mean.last) {
            weights[j] = 1.0 / (double)(mean.last - mean.first);
            scores[j] = 0; /* d2l: every key counts, also the hidden ones */
        }
        if (a->weights != NULL) {
            write_number(a, a->weights, row * (ptrdiff_t)a->keys + (ptrdiff_t)j, weights[j]);
        }
    }
    average_values(a, b, h, i, weights, scores);
    if (a->lse != NULL) {
        write_number(a, a->lse, row, max + log(sum));
    }
    if (a->row_max != NULL) {
        write_number(a, a->row_max, row, max);
        write_number(a, a->row_sum, row, sum);
    }
}

/* The whole call; MHA_ERR_NOMEM or MHA_OK. */
static mha_status
textbook_attention(const mha_attention_args *args)
{
    double *scores = malloc((2 * args->keys + 1) * sizeof *scores);

    if (scores == NULL) {
        return MHA_ERR_NOMEM;
    }
    for (size_t b = 0; b < args->batch; b++) {
        for (size_t h = 0; h < args->heads; h++) {
            for (size_t i = 0; i < args->queries; i++) {
                attend_query(args, b, h, i, scores, scores + args->keys);
            }
        }
    }
    free(scores);
    return MHA_OK;
}

#endif
