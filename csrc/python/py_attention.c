/*
 * py_attention.c: attention_forward, attention on q, k and v as given; attention_weights, masked_softmax and
 * dropout_factors.
 *
 * A call is one zeroed struct: whatever it came to own is released by one function, however
 * far it got.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

enum { WEIGHTS = MHA_PY_N_ATTENTION, LSE, STATS, ORIGIN, TERMS, N_ARGS };

typedef struct {
    mha_py_attention attention;
    PyArrayObject *out, *weights, *lse, *row_max, *row_sum;
    int want_weights, want_lse, want_stats;
} attention_call;

static void
end_call(attention_call *call)
{
    mha_py_drop_attention(&call->attention);
    Py_XDECREF((PyObject *)call->out);
    Py_XDECREF((PyObject *)call->weights);
    Py_XDECREF((PyObject *)call->lse);
    Py_XDECREF((PyObject *)call->row_max);
    Py_XDECREF((PyObject *)call->row_sum);
}

static int
take_wishes(attention_call *call, PyObject *const *values)
{
    return mha_py_flag(values[WEIGHTS], &call->want_weights) < 0 || mha_py_flag(values[LSE], &call->want_lse) < 0 ||
                   mha_py_flag(values[STATS], &call->want_stats) < 0 ||
                   mha_py_take_origin(values[ORIGIN], &call->attention.args) < 0
               ? -1
               : 0;
}

/* A (B, [H,] Q) output, if wanted. */
static int
make_per_row(const attention_call *call, int wanted, const char *name, PyArrayObject **array_ret, void **data_ret)
{
    const mha_py_attention *attention = &call->attention;

    if (!wanted) {
        return 0;
    }
    *array_ret = mha_py_new(name, attention->q.rank - 1, attention->scores, attention->q.type);
    if (*array_ret == NULL) {
        return -1;
    }
    *data_ret = PyArray_DATA(*array_ret);
    return 0;
}

static int
make_outputs(attention_call *call)
{
    mha_py_attention *attention = &call->attention;
    mha_attention_args *args = &attention->args;
    const int rank = attention->q.rank, type = attention->q.type;

    if (call->want_weights) {
        call->weights = mha_py_new("weights", rank, attention->scores, type);
        if (call->weights == NULL) {
            return -1;
        }
        args->weights = PyArray_DATA(call->weights);
    }
    if (make_per_row(call, call->want_lse, "lse", &call->lse, &args->lse) < 0 ||
        make_per_row(call, call->want_stats, "row_max", &call->row_max, &args->row_max) < 0 ||
        make_per_row(call, call->want_stats, "row_sum", &call->row_sum, &args->row_sum) < 0) {
        return -1;
    }
    call->out = mha_py_new("the output", rank, attention->out_shape, type);
    if (call->out == NULL) {
        return -1;
    }
    args->out = mha_py_result(call->out);
    return 0;
}

static int
run(attention_call *call)
{
    const mha_attention_args *args = &call->attention.args;
    PyThreadState *saved;
    mha_status status;

    if (args->heads == 0) {
        return 0; /* nothing to fill in; the core wants at least one head */
    }
    saved = mha_py_detach(mha_py_attention_work(&call->attention));
    status = mha_attention_forward(args);
    mha_py_attach(saved);
    return mha_py_check(status, "attention_forward");
}

/* Each result as the caller gets it; NULL becomes None. */
static PyObject *
make_result(PyObject *module, const attention_call *call, const mha_py_views *views)
{
    PyArrayObject *const arrays[] = {call->out, call->weights, call->lse, call->row_max, call->row_sum};
    PyObject *given[5] = {NULL}, *result = NULL;
    int n = 0;

    while (n < 5 && (given[n] = mha_py_answer(module, arrays[n], views)) != NULL) {
        n++;
    }
    if (n == 5 && call->want_stats) {
        result = Py_BuildValue("(OOO(OO))", given[0], given[1], given[2], given[3], given[4]);
    } else if (n == 5) {
        result = PyTuple_Pack(3, given[0], given[1], given[2]);
    }
    while (n > 0) {
        Py_DECREF(given[--n]);
    }
    return result;
}

PyObject *
py_attention_forward(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PyObject *values[N_ARGS];
    attention_call call = {0};
    mha_py_views views = {.n = 0};
    PyObject *result = NULL;

    if (mha_py_arguments("attention_forward", args, n_args, 3, N_ARGS, values) < 0) {
        return NULL;
    }
    if (mha_py_view_tensors(module, values, MHA_PY_N_ATTENTION, &views) == 0 &&
        mha_py_take_attention(module, values, &call.attention) == 0 && take_wishes(&call, values) == 0 &&
        mha_py_take_score_terms(module, values[TERMS], &call.attention) == 0 &&
        make_outputs(&call) == 0 && run(&call) == 0) {
        result = make_result(module, &call, &views);
    }
    end_call(&call);
    mha_py_drop_views(&views);
    return result;
}

/* --- Weights of an earlier call ------------------------------------------------------------------- */

typedef struct {
    mha_py_attention attention;
    mha_py_array row_max, row_sum;
    PyArrayObject *weights;
} weights_call;

static int
take_statistics(PyObject *module, weights_call *call, PyObject *row_max, PyObject *row_sum)
{
    mha_py_attention *attention = &call->attention;
    const mha_py_array *q = &attention->q;

    if (mha_py_take(&call->row_max, row_max, "row_max", MHA_PY_DENSE, q) < 0 ||
        mha_py_take(&call->row_sum, row_sum, "row_sum", MHA_PY_DENSE, q) < 0 ||
        mha_py_need_shape(module, &call->row_max, q->rank - 1, attention->scores) < 0 ||
        mha_py_need_shape(module, &call->row_sum, q->rank - 1, attention->scores) < 0) {
        return -1;
    }
    attention->args.row_max = (void *)call->row_max.data; /* read only, in this direction */
    attention->args.row_sum = (void *)call->row_sum.data;
    return 0;
}

static int
rebuild(weights_call *call)
{
    mha_attention_args *args = &call->attention.args;
    const mha_py_array *q = &call->attention.q;
    PyThreadState *saved;
    mha_status status;

    call->weights = mha_py_new("attention_weights", q->rank, call->attention.scores, q->type);
    if (call->weights == NULL || args->heads == 0) {
        return call->weights == NULL ? -1 : 0;
    }
    args->weights = PyArray_DATA(call->weights);
    saved = mha_py_detach(mha_py_attention_work(&call->attention));
    status = mha_attention_weights(args);
    mha_py_attach(saved);
    return mha_py_check(status, "attention_weights");
}

PyObject *
py_attention_weights(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    enum { Q, K, W_V, LENS, ROW_MAX, ROW_SUM, EMPTY, N };
    PyObject *v[N];
    weights_call call = {.weights = NULL};
    PyObject *result = NULL;

    if (mha_py_arguments("attention_weights", args, n_args, N, N, v) < 0) {
        return NULL;
    }
    PyObject *const values[MHA_PY_N_ATTENTION] = {v[Q], v[K], v[K], v[W_V], v[LENS],
                                                  [MHA_PY_N_ATTENTION - 1] = v[EMPTY]};
    if (mha_py_take_attention(module, values, &call.attention) == 0 &&
        take_statistics(module, &call, v[ROW_MAX], v[ROW_SUM]) == 0 && rebuild(&call) == 0) {
        result = (PyObject *)call.weights;
        Py_INCREF(result);
    }
    mha_py_drop_attention(&call.attention);
    mha_py_drop(&call.row_max);
    mha_py_drop(&call.row_sum);
    Py_XDECREF((PyObject *)call.weights);
    return result;
}

/* --- Masked softmax ------------------------------------------------------------------------------ */

PyObject *
py_masked_softmax(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PyObject *values[3];
    mha_py_array x = {0};
    mha_py_lengths lengths = {0};
    mha_empty empty_rows;
    PyArrayObject *out = NULL;

    if (mha_py_arguments("masked_softmax", args, n_args, 3, 3, values) < 0) {
        return NULL;
    }
    if (mha_py_take(&x, values[0], "X", MHA_PY_DENSE, NULL) < 0 || mha_py_need_rank(module, &x, 3, "(B, Q, K)") < 0 ||
        mha_py_take_lengths(module, values[1], x.shape[0], x.shape[1], &lengths) < 0 ||
        mha_py_empty_rows(values[2], &empty_rows) < 0) {
        goto done;
    }
    out = mha_py_new("the output", 3, x.shape, x.type);
    if (out != NULL) {
        const mha_visibility visible = mha_py_visibility(&lengths);
        PyThreadState *saved = mha_py_detach(8 * (double)PyArray_SIZE(out));
        const mha_status status =
            mha_masked_softmax(mha_py_dtype(&x), (size_t)x.shape[0], (size_t)x.shape[1], (size_t)x.shape[2], x.data,
                               &visible, empty_rows, PyArray_DATA(out));

        mha_py_attach(saved);
        if (mha_py_check(status, "masked_softmax") < 0) {
            Py_DECREF((PyObject *)out);
            out = NULL;
        }
    }
done:
    mha_py_drop_lengths(&lengths);
    mha_py_drop(&x);
    return (PyObject *)out;
}

/* --- Dropout ------------------------------------------------------------------------------------- */

PyObject *
py_dropout_factors(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PyObject *values[3];
    mha_py_array weights = {0};
    double dropout;
    uint64_t seed;
    PyArrayObject *factors = NULL;

    if (mha_py_arguments("dropout_factors", args, n_args, 3, 3, values) < 0) {
        return NULL;
    }
    if (mha_py_take(&weights, values[0], "weights", MHA_PY_LOOSE, NULL) < 0 ||
        mha_py_need_rank(module, &weights, 4, "(B, H, Q, K)") < 0 ||
        mha_py_probability(values[1], "dropout", &dropout) < 0 || mha_py_seed(values[2], &seed) < 0) {
        goto done;
    }
    factors = mha_py_new("the factors", 4, weights.shape, weights.type);
    if (factors != NULL) {
        const npy_intp *shape = weights.shape;
        PyThreadState *saved = mha_py_detach(8 * (double)PyArray_SIZE(factors));
        const mha_status status =
            mha_dropout_factors(mha_py_dtype(&weights), (size_t)shape[0], (size_t)shape[1], (size_t)shape[2],
                                (size_t)shape[3], dropout, seed, PyArray_DATA(factors));

        mha_py_attach(saved);
        if (mha_py_check(status, "dropout_factors") < 0) {
            Py_DECREF((PyObject *)factors);
            factors = NULL;
        }
    }
done:
    mha_py_drop(&weights);
    return (PyObject *)factors;
}
