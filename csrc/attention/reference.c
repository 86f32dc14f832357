/*
 * reference.c: attention in textbook loops, one query at a time, every sum in double.
 *
 * Two uses: the oracle that tests and the self-test hold the kernels against, and the text to read
 * first if you want to know what the fast code computes.  Same arguments as mha_attention_forward;
 * four passes per query: scores, largest score, exponentials and their sum, weighted values.
 * Dropout and thread counts have no part here.
 */
#include "attention.h"

#include "runtime/common.h"

#include <math.h>

/* Number (item, head, row, column) of an operand, as a double. */
static double
element(const mha_kernels *k, const mha_operand *x, size_t item, size_t head, size_t row, size_t column)
{
    return mha_read(k, mha_operand_at(k, x, item, head, row), column);
}

static ptrdiff_t
mask_index(const mha_mask *mask, size_t item, size_t head, size_t query, size_t key)
{
    return (ptrdiff_t)item * mask->batch_stride + (ptrdiff_t)head * mask->head_stride +
           (ptrdiff_t)query * mask->query_stride + (ptrdiff_t)key * mask->key_stride;
}

static void
write_number(const mha_kernels *k, void *numbers, size_t i, double value)
{
    if (k->itemsize == sizeof(double)) {
        ((double *)numbers)[i] = value;
    } else {
        ((float *)numbers)[i] = (float)value;
    }
}

/* Pass 1: how well key j fits query i.  -inf where the query may not see the key. */
static double
score(const mha_attention_args *a, const mha_kernels *k, size_t b, size_t h, size_t i, size_t j)
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
        const double q = element(k, &a->q, b, h, i, d), key = element(k, &a->k, b, key_head, j, d);
        sum += a->additive_weights == NULL ? q * key : mha_read(k, a->additive_weights, d) * tanh(q + key);
    }
    sum *= a->scale;
    if (a->softcap > 0) {
        sum = a->softcap * tanh(sum / a->softcap);
    }
    if (a->relative_bias != NULL) {
        const int64_t reach = (int64_t)a->relative_reach;
        const int64_t distance = (int64_t)j - mha_diagonal(&a->visible, a->queries, a->keys, i);
        const int64_t clipped = distance < -reach ? -reach : distance > reach ? reach : distance;
        sum += mha_read(k, a->relative_bias, h * (size_t)(2 * reach + 1) + (size_t)(clipped + reach));
    }
    if (a->bias.data != NULL) {
        const ptrdiff_t at = mask_index(&a->bias, b, h, i, j) * (ptrdiff_t)k->itemsize;
        sum += mha_read(k, (const char *)a->bias.data + at, 0);
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
average_values(const mha_attention_args *a, const mha_kernels *k, size_t b, size_t h, size_t i,
               const double *weights, const double *scores)
{
    const size_t key_head = h / (a->heads / a->kv_heads);
    const ptrdiff_t at = (ptrdiff_t)b * a->out.batch_stride + (ptrdiff_t)h * a->out.head_stride +
                         (ptrdiff_t)i * a->out.row_stride;
    char *out = (char *)a->out.data + at * (ptrdiff_t)k->itemsize;

    for (size_t c = 0; c < a->value_dim; c++) {
        double sum = 0;
        for (size_t j = 0; j < a->keys; j++) {
            if (scores[j] != -HUGE_VAL) {
                sum += weights[j] * element(k, &a->v, b, key_head, j, c);
            }
        }
        write_number(k, out, c, sum);
    }
}

/* One query: `scores` and `weights` are room for K doubles each. */
static void
attend_query(const mha_attention_args *a, const mha_kernels *k, size_t b, size_t h, size_t i, double *scores,
             double *weights)
{
    const size_t row = (b * a->heads + h) * a->queries + i;
    const mha_interval seen = mha_visible_keys(&a->visible, a->queries, a->keys, b, i);
    /* Visible keys whose scores overflowed to -inf are shared alone; a row that sees none gets all. */
    const int overflowed = seen.first < seen.last && a->keep_mask.data == NULL && a->bias.data == NULL &&
                           a->relative_bias == NULL;
    const mha_interval mean = {overflowed ? seen.first : 0, overflowed ? seen.last : a->keys};
    double max = 0, sum;

    for (size_t j = 0; j < a->keys; j++) {
        scores[j] = weights[j] = score(a, k, b, h, i, j);
    }
    sum = exponentials(weights, a->keys, a->sinks == NULL ? -HUGE_VAL : mha_read(k, a->sinks, h), &max);
    for (size_t j = 0; j < a->keys; j++) {
        if (sum != 0) { /* a NaN among the visible keys makes their weights NaN, and no others */
            weights[j] = j >= seen.first && j < seen.last && weights[j] != 0 ? weights[j] / sum : 0;
        } else if (a->empty_rows == MHA_EMPTY_UNIFORM && j >= mean.first && j < mean.last) {
            weights[j] = 1.0 / (double)(mean.last - mean.first);
            scores[j] = 0; /* d2l: every key counts, also the hidden ones */
        }
        if (a->weights != NULL) {
            write_number(k, a->weights, row * a->keys + j, weights[j]);
        }
    }
    average_values(a, k, b, h, i, weights, scores);
    if (a->lse != NULL) {
        write_number(k, a->lse, row, max + log(sum));
    }
    if (a->row_max != NULL) {
        write_number(k, a->row_max, row, max);
        write_number(k, a->row_sum, row, sum);
    }
}

mha_status
mha_reference_attention(const mha_attention_args *args)
{
    const mha_kernels *k = mha_kernels_for(args->dtype); /* only for the size of a number */
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    const size_t scores_at = mha_scratch_add(&scratch, args->keys, sizeof(double));
    const size_t weights_at = mha_scratch_add(&scratch, args->keys, sizeof(double));
    mha_status status;

    if (k == NULL || args->kv_heads == 0 || args->heads % args->kv_heads != 0 || args->dropout != 0) {
        return MHA_ERR_ARG;
    }
    status = mha_scratch_open(&scratch);
    if (status != MHA_OK) {
        return status;
    }
    for (size_t b = 0; b < args->batch; b++) {
        for (size_t h = 0; h < args->heads; h++) {
            for (size_t i = 0; i < args->queries; i++) {
                attend_query(args, k, b, h, i, (double *)(void *)(scratch.base + scores_at),
                             (double *)(void *)(scratch.base + weights_at));
            }
        }
    }
    mha_scratch_close(&scratch);
    return MHA_OK;
}
