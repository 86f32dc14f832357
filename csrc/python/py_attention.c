/*
 * py_attention.c: attention_forward, attention on q, k and v as given, and attention_backward, its gradients;
 * attention_weights, masked_softmax and dropout_factors.
 *
 * The backward call takes what the forward call took and returned, and checks it all again.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

/* --- Forward --------------------------------------------------------------------------------- */

/* Each result as the caller gets it: (out, weights, lse[, (row_max, row_sum)]), None for what was not asked for. */
PyObject *
py_attention_forward(mha_py_call *call, PyObject *const *values)
{
    enum { WEIGHTS = MHA_PY_N_ATTENTION, LSE, STATS, ORIGIN, TERMS };
    mha_py_attention attention = {0};
    mha_attention_args *args = &attention.args;
    PyObject *answer, *statistics;
    int wanted[3];

    if (mha_py_take_attention(call, values, values[ORIGIN], values[TERMS], &attention) < 0 ||
        mha_py_flag(values[WEIGHTS], &wanted[0]) < 0 || mha_py_flag(values[LSE], &wanted[1]) < 0 ||
        mha_py_flag(values[STATS], &wanted[2]) < 0) {
        return NULL;
    }
    const int rank = attention.q.rank, type = attention.q.type;
    const npy_intp *scores = attention.scores;
    PyArrayObject *results[] = {
        mha_py_new(call, "the output", rank, attention.out_shape, type),
        wanted[0] ? mha_py_new(call, "weights", rank, scores, type) : NULL,
        wanted[1] ? mha_py_new(call, "lse", rank - 1, scores, type) : NULL,
        NULL, /* the place of the statistics' tuple */
        wanted[2] ? mha_py_new(call, "row_max", rank - 1, scores, type) : NULL,
        wanted[2] ? mha_py_new(call, "row_sum", rank - 1, scores, type) : NULL,
    };
    if (call->failed) {
        return NULL;
    }
    args->out = mha_py_result(results[0]);
    args->weights = mha_py_data(results[1]);
    args->lse = mha_py_data(results[2]);
    args->row_max = mha_py_data(results[4]);
    args->row_sum = mha_py_data(results[5]);
    if (args->heads > 0) { /* the core wants at least one head; without, there is nothing to fill in */
        mha_py_detach(call, attention.work);
        if (mha_py_attach(call, mha_attention_forward(args)) < 0) {
            return NULL;
        }
    }
    answer = mha_py_answers(call, results, wanted[2] ? 4 : 3);
    statistics = wanted[2] && answer != NULL ? mha_py_answers(call, results + 4, 2) : NULL;
    if (wanted[2] && (statistics == NULL || PyTuple_SetItem(answer, 3, statistics) < 0)) {
        Py_CLEAR(answer);
    }
    return answer;
}

/* --- Backward -------------------------------------------------------------------------------- */

enum { GRAD_OUT, OUT, ROW_STATS, FORWARD, BIAS_GRAD = FORWARD + MHA_PY_N_ATTENTION, ORIGIN, TERMS };
enum { GRAD_Q, GRAD_K, GRAD_V, GRAD_W_V, GRAD_BIAS, N_GRADS, GRAD_TABLE = N_GRADS, GRAD_SINKS, N_GRADS_WITH_TERMS };

static int
take_results(mha_py_call *call, PyObject *const *values, mha_py_attention *attention, mha_attention_grads *grads)
{
    const mha_py_array *q = &attention->q;
    PyObject *const stats = values[ROW_STATS];
    mha_py_array grad_out = {0}, out = {0};

    if (!PyTuple_Check(stats) || PyTuple_Size(stats) != 2) {
        return mha_py_type_error(stats, "row_stats", "(row_max, row_sum)");
    }
    if (mha_py_take(call, values[GRAD_OUT], "grad_out", MHA_PY_ROWS, q, &grad_out) < 0 ||
        mha_py_take(call, values[OUT], "out", MHA_PY_ROWS, q, &out) < 0 ||
        mha_py_need_shape(&grad_out, q->rank, attention->out_shape) < 0 ||
        mha_py_need_shape(&out, q->rank, attention->out_shape) < 0) {
        return -1;
    }
    grads->out = mha_py_operand(&out);
    grads->grad_out = mha_py_operand(&grad_out);
    return mha_py_take_statistics(call, PyTuple_GetItem(stats, 0), PyTuple_GetItem(stats, 1), attention);
}

/* Dense, zeroed, of the operand's shape; nothing where there is no operand. */
static PyArrayObject *
zeros_like(mha_py_call *call, const char *name, const mha_py_array *operand)
{
    return operand->array == NULL ? NULL : mha_py_zeros(call, name, operand->rank, operand->shape, operand->type);
}

/* The gradient of a bias has the bias's shape: what it repeats along is added up. */
static int
note_bias_gradient(mha_py_call *call, const mha_py_attention *attention, PyArrayObject *grad_bias,
                   mha_mask_result *grad_ret)
{
    mha_py_array written = {0};
    mha_mask strides;

    if (grad_bias == NULL) {
        return 0;
    }
    if (mha_py_lay_out(call, grad_bias, "grad_bias", MHA_PY_LOOSE, &written) < 0 ||
        mha_py_broadcast(&written, attention->q.rank, attention->scores, &strides) < 0) {
        return -1;
    }
    *grad_ret = (mha_mask_result){PyArray_DATA(grad_bias), strides.batch_stride, strides.head_stride,
                                  strides.query_stride, strides.key_stride};
    return 0;
}

static PyObject *
backward(mha_py_call *call, const mha_py_attention *attention, mha_attention_grads *grads, int with_bias,
         int with_terms)
{
    const mha_py_array *q = &attention->q, *k = &attention->k, *v = &attention->v;
    const int has_heads = attention->args.heads > 0;
    /* Without heads the core, which would write all of them, is not called. */
    PyArrayObject *(*const make)(mha_py_call *, const char *, int, const npy_intp *, int) =
        has_heads ? mha_py_new : mha_py_zeros;
    PyArrayObject *results[] = {
        [GRAD_Q] = make(call, "grad_q", q->rank, q->shape, q->type),
        [GRAD_K] = make(call, "grad_k", k->rank, k->shape, k->type),
        [GRAD_V] = make(call, "grad_v", v->rank, v->shape, v->type),
        [GRAD_W_V] = zeros_like(call, "grad_w_v", &attention->w_v),
        [GRAD_BIAS] = with_bias ? zeros_like(call, "grad_bias", &attention->bias) : NULL,
        [GRAD_TABLE] = zeros_like(call, "grad_relative_bias", &attention->relative_bias),
        [GRAD_SINKS] = zeros_like(call, "grad_sinks", &attention->sinks),
    };

    if (call->failed || note_bias_gradient(call, attention, results[GRAD_BIAS], &grads->grad_bias) < 0) {
        return NULL;
    }
    grads->grad_q = mha_py_result(results[GRAD_Q]);
    grads->grad_k = mha_py_result(results[GRAD_K]);
    grads->grad_v = mha_py_result(results[GRAD_V]);
    grads->grad_additive_weights = mha_py_data(results[GRAD_W_V]);
    grads->grad_relative_bias = mha_py_data(results[GRAD_TABLE]);
    grads->grad_sinks = mha_py_data(results[GRAD_SINKS]);
    if (has_heads) {
        mha_py_detach(call, 3 * attention->work);
        if (mha_py_attach(call, mha_attention_backward(&attention->args, grads)) < 0) {
            return NULL;
        }
    }
    return mha_py_answers(call, results, with_terms ? N_GRADS_WITH_TERMS : N_GRADS);
}

PyObject *
py_attention_backward(mha_py_call *call, PyObject *const *values)
{
    mha_py_attention attention = {0};
    mha_attention_grads grads = {0};
    int with_bias;

    if (mha_py_take_attention(call, values + FORWARD, values[ORIGIN], values[TERMS], &attention) < 0 ||
        take_results(call, values, &attention, &grads) < 0 || mha_py_flag(values[BIAS_GRAD], &with_bias) < 0) {
        return NULL;
    }
    return backward(call, &attention, &grads, with_bias, mha_py_given(values[TERMS]));
}

/* --- Weights of an earlier call ------------------------------------------------------------------- */

PyObject *
py_attention_weights(mha_py_call *call, PyObject *const *given)
{
    enum { Q, K, W_V, LENS, ROW_MAX, ROW_SUM, EMPTY };
    PyObject *const values[MHA_PY_N_ATTENTION] = {given[Q],   given[K],    given[K],
                                                  given[W_V], given[LENS], [MHA_PY_N_ATTENTION - 1] = given[EMPTY]};
    mha_py_attention attention = {0};
    PyArrayObject *weights;

    if (mha_py_take_attention(call, values, NULL, NULL, &attention) < 0 ||
        mha_py_take_statistics(call, given[ROW_MAX], given[ROW_SUM], &attention) < 0) {
        return NULL;
    }
    weights = mha_py_new(call, "attention_weights", attention.q.rank, attention.scores, attention.q.type);
    if (weights == NULL) {
        return NULL;
    }
    attention.args.weights = PyArray_DATA(weights);
    mha_py_detach(call, attention.work);
    return mha_py_finish(call, attention.args.heads == 0 ? MHA_OK : mha_attention_weights(&attention.args), weights);
}

/* --- The book's function, and dropout ------------------------------------------------------------ */

PyObject *
py_masked_softmax(mha_py_call *call, PyObject *const *values)
{
    mha_py_array x = {0};
    mha_py_lengths lengths = {0};
    mha_masked_softmax_args args;
    PyArrayObject *out;

    if (mha_py_take(call, values[0], "X", MHA_PY_DENSE, NULL, &x) < 0 || mha_py_need_rank(&x, 3, "(B, Q, K)") < 0 ||
        mha_py_take_lengths(call, values[1], x.shape[0], x.shape[1], &lengths) < 0 ||
        mha_py_empty_rows(values[2], &args.empty_rows) < 0) {
        return NULL;
    }
    out = mha_py_new(call, "the output", 3, x.shape, x.type);
    if (out == NULL) {
        return NULL;
    }
    args = (mha_masked_softmax_args){
        .dtype = mha_py_dtype(x.type),
        .batch = (size_t)x.shape[0],
        .queries = (size_t)x.shape[1],
        .keys = (size_t)x.shape[2],
        .scores = x.data,
        .visible = mha_py_visibility(&lengths),
        .empty_rows = args.empty_rows,
        .out = PyArray_DATA(out),
    };
    mha_py_detach(call, 8 * (double)PyArray_SIZE(out));
    return mha_py_finish(call, mha_masked_softmax(&args), out);
}

PyObject *
py_dropout_factors(mha_py_call *call, PyObject *const *values)
{
    mha_py_array weights = {0};
    mha_attention_args args = {0};
    PyArrayObject *factors;

    if (mha_py_take(call, values[0], "weights", MHA_PY_LOOSE, NULL, &weights) < 0 ||
        mha_py_need_rank(&weights, 4, "(B, H, Q, K)") < 0 || mha_py_probability(values[1], &args.dropout) < 0 ||
        mha_py_seed(values[2], &args.seed) < 0) {
        return NULL;
    }
    factors = mha_py_new(call, "the factors", 4, weights.shape, weights.type);
    if (factors == NULL) {
        return NULL;
    }
    args.dtype = mha_py_dtype(weights.type);
    args.batch = (size_t)weights.shape[0];
    args.heads = (size_t)weights.shape[1];
    args.queries = (size_t)weights.shape[2];
    args.keys = (size_t)weights.shape[3];
    args.weights = PyArray_DATA(factors);
    mha_py_detach(call, 8 * (double)PyArray_SIZE(factors));
    return mha_py_finish(call, mha_dropout_factors(&args), factors);
}
