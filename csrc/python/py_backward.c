/*
 * py_backward.c: attention_backward and linear_backward, the gradients of attention_forward and of
 * linear.  They take what the forward call took and returned, and check it all again.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

/* --- Attention ------------------------------------------------------------------------- */

enum { GRAD_OUT, OUT, ROW_STATS, FORWARD, BIAS_GRAD = FORWARD + MHA_PY_N_ATTENTION, ORIGIN, TERMS, N_ARGS };
enum { ROW_MAX = N_ARGS, ROW_SUM, N_VALUES }; /* out of row_stats */
_Static_assert((int)N_VALUES <= (int)MHA_PY_MAX_ARGS, "mha_py_views has room for so many");

typedef struct {
    mha_py_attention attention;
    mha_py_array grad_out, out, row_max, row_sum;
    PyArrayObject *grad_q, *grad_k, *grad_v, *grad_w_v, *grad_bias, *grad_relative_bias, *grad_sinks;
    int want_bias;
    mha_attention_grads grads;
} backward_call;

static void
end_call(backward_call *call)
{
    mha_py_drop_attention(&call->attention);
    mha_py_drop(&call->grad_out);
    mha_py_drop(&call->out);
    mha_py_drop(&call->row_max);
    mha_py_drop(&call->row_sum);
    Py_XDECREF((PyObject *)call->grad_q);
    Py_XDECREF((PyObject *)call->grad_k);
    Py_XDECREF((PyObject *)call->grad_v);
    Py_XDECREF((PyObject *)call->grad_w_v);
    Py_XDECREF((PyObject *)call->grad_bias);
    Py_XDECREF((PyObject *)call->grad_relative_bias);
    Py_XDECREF((PyObject *)call->grad_sinks);
}

static int
take_results(PyObject *module, backward_call *call, PyObject *const *values)
{
    mha_py_attention *attention = &call->attention;
    const mha_py_array *q = &attention->q;

    if (mha_py_take(&call->grad_out, values[GRAD_OUT], "grad_out", MHA_PY_ROWS, q) < 0 ||
        mha_py_take(&call->out, values[OUT], "out", MHA_PY_ROWS, q) < 0 ||
        mha_py_need_shape(module, &call->grad_out, q->rank, attention->out_shape) < 0 ||
        mha_py_need_shape(module, &call->out, q->rank, attention->out_shape) < 0) {
        return -1;
    }
    if (mha_py_take(&call->row_max, values[ROW_MAX], "row_max", MHA_PY_DENSE, q) < 0 ||
        mha_py_take(&call->row_sum, values[ROW_SUM], "row_sum", MHA_PY_DENSE, q) < 0 ||
        mha_py_need_shape(module, &call->row_max, q->rank - 1, attention->scores) < 0 ||
        mha_py_need_shape(module, &call->row_sum, q->rank - 1, attention->scores) < 0) {
        return -1;
    }
    call->grads.out = mha_py_operand(&call->out);
    call->grads.grad_out = mha_py_operand(&call->grad_out);
    attention->args.row_max = (void *)call->row_max.data; /* read only, in this direction */
    attention->args.row_sum = (void *)call->row_sum.data;
    return mha_py_flag(values[BIAS_GRAD], &call->want_bias) < 0 ? -1
                                                                : mha_py_take_origin(values[ORIGIN], &attention->args);
}

/* The gradient of a bias has the bias's shape: what it repeats along is added up. */
static int
make_bias(PyObject *module, backward_call *call)
{
    const mha_py_array *bias = &call->attention.bias;
    mha_py_array written = {0};
    mha_mask strides;
    int failed;

    if (!call->want_bias || bias->array == NULL) {
        return 0;
    }
    call->grad_bias = mha_py_zeros("grad_bias", bias->rank, bias->shape, bias->type);
    if (call->grad_bias == NULL ||
        mha_py_take_as(&written, call->grad_bias, "grad_bias", bias->type, MHA_PY_LOOSE) < 0) {
        return -1;
    }
    failed = mha_py_broadcast(module, &written, call->attention.q.rank, call->attention.scores, &strides);
    mha_py_drop(&written);
    if (failed == 0) {
        const mha_mask_result grad = {PyArray_DATA(call->grad_bias), strides.batch_stride, strides.head_stride,
                                      strides.query_stride, strides.key_stride};

        call->grads.grad_bias = grad;
    }
    return failed;
}

/* Dense, of the operand's shape; nothing where there is no operand. */
static int
make_like(const char *name, const mha_py_array *operand, PyArrayObject **array_ret, void **data_ret)
{
    if (operand->array == NULL) {
        return 0;
    }
    *array_ret = mha_py_zeros(name, operand->rank, operand->shape, operand->type);
    if (*array_ret == NULL) {
        return -1;
    }
    *data_ret = PyArray_DATA(*array_ret);
    return 0;
}

static int
make_gradients(PyObject *module, backward_call *call)
{
    const mha_py_attention *attention = &call->attention;
    const mha_py_array *q = &attention->q, *k = &attention->k, *v = &attention->v, *w_v = &attention->w_v;
    /* Without heads the core, which would write all of them, is not called. */
    PyArrayObject *(*const make)(const char *, int, const npy_intp *, int) =
        attention->args.heads > 0 ? mha_py_new : mha_py_zeros;

    call->grad_q = make("grad_q", q->rank, q->shape, q->type);
    call->grad_k = make("grad_k", k->rank, k->shape, k->type);
    call->grad_v = make("grad_v", v->rank, v->shape, v->type);
    if (call->grad_q == NULL || call->grad_k == NULL || call->grad_v == NULL) {
        return -1;
    }
    call->grads.grad_q = mha_py_result(call->grad_q);
    call->grads.grad_k = mha_py_result(call->grad_k);
    call->grads.grad_v = mha_py_result(call->grad_v);
    if (make_like("grad_w_v", w_v, &call->grad_w_v, &call->grads.grad_additive_weights) < 0 ||
        make_like("grad_relative_bias", &attention->relative_bias, &call->grad_relative_bias,
                  &call->grads.grad_relative_bias) < 0 ||
        make_like("grad_sinks", &attention->sinks, &call->grad_sinks, &call->grads.grad_sinks) < 0) {
        return -1;
    }
    return make_bias(module, call);
}

static int
run_attention(const backward_call *call)
{
    PyThreadState *saved;
    mha_status status;

    if (call->attention.args.heads == 0) {
        return 0;
    }
    saved = mha_py_detach(3 * mha_py_attention_work(&call->attention));
    status = mha_attention_backward(&call->attention.args, &call->grads);
    mha_py_attach(saved);
    return mha_py_check(status, "attention_backward");
}

PyObject *
py_attention_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PyObject *values[N_VALUES];
    backward_call call = {0};
    mha_py_views views = {.n = 0};
    PyObject *result = NULL;

    if (mha_py_arguments("attention_backward", args, n_args, 6, N_ARGS, values) < 0) {
        return NULL;
    }
    if (!PyTuple_Check(values[ROW_STATS]) || PyTuple_Size(values[ROW_STATS]) != 2) {
        mha_py_type_error(values[ROW_STATS], "row_stats", "(row_max, row_sum)");
        return NULL;
    }
    values[ROW_MAX] = PyTuple_GetItem(values[ROW_STATS], 0);
    values[ROW_SUM] = PyTuple_GetItem(values[ROW_STATS], 1);
    if (mha_py_view_tensors(module, values, N_VALUES, &views) == 0 &&
        mha_py_take_attention(module, values + FORWARD, &call.attention) == 0 &&
        mha_py_take_score_terms(module, values[TERMS], &call.attention) == 0 &&
        take_results(module, &call, values) == 0 && make_gradients(module, &call) == 0 && run_attention(&call) == 0) {
        PyArrayObject *const grads[] = {call.grad_q,    call.grad_k,    call.grad_v, call.grad_w_v,
                                        call.grad_bias, call.grad_relative_bias, call.grad_sinks};
        const int has_terms = values[TERMS] != NULL && values[TERMS] != Py_None;

        result = mha_py_answers(module, grads, has_terms ? 7 : 5, &views);
    }
    end_call(&call);
    mha_py_drop_views(&views);
    return result;
}

/* --- Linear -------------------------------------------------------------------------------- */

typedef struct {
    mha_py_rows grad_y, x;
    mha_py_array weight;
    PyArrayObject *grad_x, *grad_weight, *grad_bias;
    int want_bias;
    mha_linear_grads grads;
} linear_call;

static void
end_linear(linear_call *call)
{
    mha_py_drop(&call->grad_y.rows);
    mha_py_drop(&call->x.rows);
    mha_py_drop(&call->weight);
    Py_XDECREF((PyObject *)call->grad_x);
    Py_XDECREF((PyObject *)call->grad_weight);
    Py_XDECREF((PyObject *)call->grad_bias);
}

/* grad_y has x's leading axes, then out_features. */
static int
check_leading_axes(PyObject *module, const linear_call *call)
{
    const mha_py_rows *x = &call->x, *grad_y = &call->grad_y;
    int same = x->rank == grad_y->rank;
    PyObject *shape_x, *shape_y;

    for (int i = 0; i < x->rank - 1 && same; i++) {
        same = x->dims[i] == grad_y->dims[i];
    }
    if (same) {
        return 0;
    }
    shape_x = mha_py_shape(x->rank, x->dims);
    shape_y = mha_py_shape(grad_y->rank, grad_y->dims);
    if (shape_x != NULL && shape_y != NULL) {
        mha_py_shape_error(module, "grad_y has shape %S, expected the leading axes of x, which has shape %S", shape_y,
                           shape_x);
    }
    Py_XDECREF(shape_y);
    Py_XDECREF(shape_x);
    return -1;
}

static int
take_linear(PyObject *module, linear_call *call, PyObject *const *values)
{
    const mha_py_array *x = &call->x.rows;
    npy_intp expected[2];

    if (mha_py_take_rows(module, values[1], "x", NULL, &call->x) < 0 ||
        mha_py_take_rows(module, values[0], "grad_y", x, &call->grad_y) < 0 ||
        mha_py_take(&call->weight, values[2], "weight", MHA_PY_DENSE, x) < 0 || check_leading_axes(module, call) < 0) {
        return -1;
    }
    expected[0] = call->grad_y.rows.shape[1];
    expected[1] = x->shape[1];
    return mha_py_need_shape(module, &call->weight, 2, expected) < 0 ? -1 : mha_py_flag(values[3], &call->want_bias);
}

static int
make_linear_gradients(linear_call *call)
{
    const mha_py_array *x = &call->x.rows, *grad_y = &call->grad_y.rows;
    mha_linear_grads *grads = &call->grads;

    call->grad_x = mha_py_new("grad_x", call->x.rank, call->x.dims, x->type);
    call->grad_weight = mha_py_new("grad_weight", 2, call->weight.shape, x->type);
    if (call->grad_x == NULL || call->grad_weight == NULL) {
        return -1;
    }
    if (call->want_bias) {
        call->grad_bias = mha_py_new("grad_bias", 1, call->weight.shape, x->type);
        if (call->grad_bias == NULL) {
            return -1;
        }
        grads->grad_bias = PyArray_DATA(call->grad_bias);
    }
    grads->dtype = mha_py_dtype(x);
    grads->rows = (size_t)x->shape[0];
    grads->in_features = (size_t)x->shape[1];
    grads->out_features = (size_t)grad_y->shape[1];
    grads->x = x->data;
    grads->weight = call->weight.data;
    grads->grad_y = grad_y->data;
    grads->x_row_stride = x->stride[0];
    grads->grad_y_row_stride = grad_y->stride[0];
    grads->grad_x = PyArray_DATA(call->grad_x);
    grads->grad_weight = PyArray_DATA(call->grad_weight);
    return 0;
}

static int
run_linear(const linear_call *call)
{
    const mha_linear_grads *grads = &call->grads;
    PyThreadState *saved =
        mha_py_detach(2 * (double)grads->rows * (double)grads->in_features * (double)grads->out_features);
    const mha_status status = mha_linear_backward(grads);

    mha_py_attach(saved);
    return mha_py_check(status, "linear_backward");
}

PyObject *
py_linear_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PyObject *values[4];
    linear_call call = {0};
    PyObject *result = NULL;

    if (mha_py_arguments("linear_backward", args, n_args, 4, 4, values) < 0) {
        return NULL;
    }
    if (take_linear(module, &call, values) == 0 && make_linear_gradients(&call) == 0 && run_linear(&call) == 0) {
        result = PyTuple_Pack(3, (PyObject *)call.grad_x, (PyObject *)call.grad_weight, mha_py_borrow(call.grad_bias));
    }
    end_linear(&call);
    return result;
}
