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
    const int weights = mha_py_flag(call, values[WEIGHTS]), lse = mha_py_flag(call, values[LSE]);
    const int stats = mha_py_flag(call, values[STATS]);

    mha_py_take_attention(call, values, values[ORIGIN], values[TERMS], &attention);
    const int rank = attention.q.rank, type = attention.q.type;
    const npy_intp *scores = attention.scores;
    PyArrayObject *results[] = {
        mha_py_new(call, "the output", rank, attention.out_shape, type),
        weights ? mha_py_new(call, "weights", rank, scores, type) : NULL,
        lse ? mha_py_new(call, "lse", rank - 1, scores, type) : NULL,
        NULL, /* the place of the statistics' tuple */
        stats ? mha_py_new(call, "row_max", rank - 1, scores, type) : NULL,
        stats ? mha_py_new(call, "row_sum", rank - 1, scores, type) : NULL,
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
        mha_py_attach(call, mha_attention_forward(args));
    }
    answer = mha_py_answers(call, results, stats ? 4 : 3);
    statistics = stats && answer != NULL ? mha_py_answers(call, results + 4, 2) : NULL;
    if (stats && (statistics == NULL || PyTuple_SetItem(answer, 3, statistics) < 0)) {
        Py_CLEAR(answer);
    }
    return answer;
}

/* --- Backward -------------------------------------------------------------------------------- */

enum { GRAD_OUT, OUT, ROW_STATS, FORWARD, BIAS_GRAD = FORWARD + MHA_PY_N_ATTENTION, ORIGIN, TERMS };
enum { GRAD_Q, GRAD_K, GRAD_V, GRAD_W_V, GRAD_BIAS, N_GRADS, GRAD_TABLE = N_GRADS, GRAD_SINKS, N_GRADS_WITH_TERMS };

static void
take_results(mha_py_call *call, PyObject *const *values, mha_py_attention *attention, mha_attention_grads *grads)
{
    const mha_py_array *q = &attention->q;
    PyObject *const stats = values[ROW_STATS];
    mha_py_array grad_out = {0}, out = {0};

    if (!call->failed && (!PyTuple_Check(stats) || PyTuple_Size(stats) != 2)) {
        mha_py_type_error(call, stats, "row_stats", "(row_max, row_sum)");
    }
    mha_py_take(call, values[GRAD_OUT], "grad_out", MHA_PY_ROWS, q, &grad_out);
    mha_py_take(call, values[OUT], "out", MHA_PY_ROWS, q, &out);
    mha_py_need_shape(call, &grad_out, q->rank, attention->out_shape);
    mha_py_need_shape(call, &out, q->rank, attention->out_shape);
    if (!call->failed) {
        grads->out = mha_py_operand(&out);
        grads->grad_out = mha_py_operand(&grad_out);
        mha_py_take_statistics(call, PyTuple_GetItem(stats, 0), PyTuple_GetItem(stats, 1), attention);
    }
}

/* Dense, zeroed, of the operand's shape; nothing where there is no operand. */
static PyArrayObject *
zeros_like(mha_py_call *call, const char *name, const mha_py_array *operand)
{
    return operand->array == NULL ? NULL : mha_py_zeros(call, name, operand->rank, operand->shape, operand->type);
}

/* The gradient of a bias has the bias's shape: it is summed over the axes along which the bias broadcasts.  Without
 * numbers NumPy's strides are 0, and the core would take that for one number that all scores share. */
static mha_mask_result
bias_gradient(mha_py_call *call, const mha_py_attention *attention, PyArrayObject *grad_bias)
{
    mha_py_array written = {0};

    if (grad_bias == NULL || PyArray_SIZE(grad_bias) == 0) {
        return (mha_mask_result){.data = NULL};
    }
    mha_py_lay_out(call, grad_bias, "grad_bias", MHA_PY_LOOSE, &written);
    const mha_mask strides = mha_py_broadcast(call, &written, attention->q.rank, attention->scores);
    return (mha_mask_result){PyArray_DATA(grad_bias), strides.batch_stride, strides.head_stride, strides.query_stride,
                             strides.key_stride};
}

PyObject *
py_attention_backward(mha_py_call *call, PyObject *const *values)
{
    mha_py_attention attention = {0};
    const mha_py_array *q = &attention.q, *k = &attention.k, *v = &attention.v;
    mha_attention_grads grads = {0};
    const int with_bias = mha_py_flag(call, values[BIAS_GRAD]);

    mha_py_take_attention(call, values + FORWARD, values[ORIGIN], values[TERMS], &attention);
    take_results(call, values, &attention, &grads);
    const int has_heads = attention.args.heads > 0;
    /* Without heads the core, which would write all of them, is not called. */
    PyArrayObject *(*const make)(mha_py_call *, const char *, int, const npy_intp *, int) =
        has_heads ? mha_py_new : mha_py_zeros;
    PyArrayObject *results[] = {
        [GRAD_Q] = make(call, "grad_q", q->rank, q->shape, q->type),
        [GRAD_K] = make(call, "grad_k", k->rank, k->shape, k->type),
        [GRAD_V] = make(call, "grad_v", v->rank, v->shape, v->type),
        [GRAD_W_V] = zeros_like(call, "grad_w_v", &attention.w_v),
        [GRAD_BIAS] = with_bias ? zeros_like(call, "grad_bias", &attention.bias) : NULL,
        [GRAD_TABLE] = zeros_like(call, "grad_relative_bias", &attention.relative_bias),
        [GRAD_SINKS] = zeros_like(call, "grad_sinks", &attention.sinks),
    };
    grads.grad_q = mha_py_result(results[GRAD_Q]);
    grads.grad_k = mha_py_result(results[GRAD_K]);
    grads.grad_v = mha_py_result(results[GRAD_V]);
    grads.grad_additive_weights = mha_py_data(results[GRAD_W_V]);
    grads.grad_bias = bias_gradient(call, &attention, results[GRAD_BIAS]);
    grads.grad_relative_bias = mha_py_data(results[GRAD_TABLE]);
    grads.grad_sinks = mha_py_data(results[GRAD_SINKS]);
    if (!call->failed && has_heads) {
        mha_py_detach(call, 3 * attention.work);
        mha_py_attach(call, mha_attention_backward(&attention.args, &grads));
    }
    return mha_py_answers(call, results, mha_py_given(values[TERMS]) ? N_GRADS_WITH_TERMS : N_GRADS);
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

    mha_py_take_attention(call, values, NULL, NULL, &attention);
    mha_py_take_statistics(call, given[ROW_MAX], given[ROW_SUM], &attention);
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
    PyArrayObject *out;

    mha_py_take(call, values[0], "X", MHA_PY_DENSE, NULL, &x);
    mha_py_need_rank(call, &x, 3, "(B, Q, K)");
    mha_py_take_lengths(call, values[1], x.shape[0], x.shape[1], &lengths);
    const mha_empty empty_rows = mha_py_empty_rows(call, values[2]);
    out = mha_py_new(call, "the output", 3, x.shape, x.type);
    if (out == NULL) {
        return NULL;
    }
    const mha_masked_softmax_args args = {
        .dtype = mha_py_dtype(x.type),
        .batch = (size_t)x.shape[0],
        .queries = (size_t)x.shape[1],
        .keys = (size_t)x.shape[2],
        .scores = x.data,
        .visible = mha_py_visibility(&lengths),
        .empty_rows = empty_rows,
        .out = PyArray_DATA(out),
    };
    mha_py_detach(call, 8 * (double)PyArray_SIZE(out));
    return mha_py_finish(call, mha_masked_softmax(&args), out);
}

PyObject *
py_dropout_factors(mha_py_call *call, PyObject *const *values)
{
    mha_py_array weights = {0};
    PyArrayObject *factors;

    mha_py_take(call, values[0], "weights", MHA_PY_LOOSE, NULL, &weights);
    mha_py_need_rank(call, &weights, 4, "(B, H, Q, K)");
    const double dropout = mha_py_probability(call, values[1]);
    const uint64_t seed = mha_py_seed(call, values[2]);
    factors = mha_py_new(call, "the factors", 4, weights.shape, weights.type);
    if (factors == NULL) {
        return NULL;
    }
    const mha_attention_args args = {
        .dtype = mha_py_dtype(weights.type),
        .batch = (size_t)weights.shape[0],
        .heads = (size_t)weights.shape[1],
        .queries = (size_t)weights.shape[2],
        .keys = (size_t)weights.shape[3],
        .dropout = dropout,
        .seed = seed,
        .weights = PyArray_DATA(factors),
    };
    mha_py_detach(call, 8 * (double)PyArray_SIZE(factors));
    return mha_py_finish(call, mha_dropout_factors(&args), factors);
}
