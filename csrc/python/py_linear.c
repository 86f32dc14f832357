/*
 * py_linear.c: pack_linear, which packs a weight for the active ISA, and y = x W^T + b on its own: linear and its
 * gradients, linear_backward.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

/* --- Packing ---------------------------------------------------------------------------- */

PyObject *
py_pack_linear(mha_py_call *call, PyObject *const *values)
{
    mha_py_projection projection = {.linear = {0}};
    const mha_linear *linear = &projection.linear;
    PyArrayObject *packed;
    npy_intp shape[2];

    mha_py_take_in_rows(call, values[0], Py_None, "weight", NULL, &projection);
    const int type = projection.weight.type;
    const mha_dtype dtype = mha_py_dtype(type);
    mha_py_packed_shape(call, dtype, linear, shape);
    if (call->failed) {
        return NULL;
    }
    const size_t bytes = (size_t)shape[0] * (size_t)shape[1] * mha_py_itemsize(type);
    packed = (PyArrayObject *)mha_py_own(call, mha_py_new_on_line(2, shape, NULL, type, bytes));
    if (packed == NULL) {
        return NULL;
    }
    PyArray_CLEARFLAGS(packed, NPY_ARRAY_WRITEABLE); /* the core alone knows what stands where */
    const mha_py_array result = {.array = (PyObject *)packed};
    mha_py_detach(call, (double)PyArray_SIZE(packed));
    return mha_py_finish(call,
                         mha_linear_pack(dtype, linear->out_features, linear->in_features, linear->weight,
                                         linear->row_stride, PyArray_DATA(packed)),
                         &result);
}

/* --- linear -------------------------------------------------------------------------------------- */

PyObject *
py_linear(mha_py_call *call, PyObject *const *values)
{
    mha_py_rows x = {.rank = 0};
    mha_py_projection projection = {.linear = {0}};
    const mha_linear *linear = &projection.linear;
    mha_py_array y = {0};

    mha_py_take_rows(call, values[0], "x", NULL, &x);
    mha_py_take_projection(call, values[1], "projection", &x.rows, &projection);
    if (!call->failed && (size_t)x.rows.shape[1] != linear->in_features) {
        mha_py_refuse(call, "x_features", "(On)", x.rows.array, (Py_ssize_t)linear->in_features);
    }
    if (call->failed) {
        return NULL;
    }
    const size_t rows = (size_t)x.rows.shape[0];
    x.dims[x.rank - 1] = (npy_intp)linear->out_features;
    mha_py_new_result(call, "the output", x.rank, x.dims, x.rows.type, &y);
    if (call->failed) {
        return NULL;
    }
    mha_py_detach(call, mha_linear_work(linear, 1, rows));
    return mha_py_finish(call,
                         mha_linear_forward(mha_py_dtype(x.rows.type), linear, rows, x.rows.data, x.rows.stride[0],
                                            mha_py_numbers(&y), (ptrdiff_t)linear->out_features),
                         &y);
}

/* --- linear_backward ------------------------------------------------------------------------------- */

/* grad_y has x's leading axes, then out_features; the weight (out_features, in_features). */
static void
check_shapes(mha_py_call *call, const mha_py_rows *x, const mha_py_rows *grad_y, const mha_py_array *weight,
             PyObject *const *values)
{
    const npy_intp expected[] = {grad_y->rows.shape[1], x->rows.shape[1]};
    int same = x->rank == grad_y->rank;

    for (int i = 0; i < x->rank - 1 && same; i++) {
        same = x->dims[i] == grad_y->dims[i];
    }
    if (!call->failed && !same) {
        mha_py_refuse(call, "leading_axes", "(OO)", values[0], values[1]);
    }
    mha_py_need_shape(call, weight, 2, expected);
}

PyObject *
py_linear_backward(mha_py_call *call, PyObject *const *values)
{
    mha_py_rows grad_y = {.rank = 0}, x = {.rank = 0};
    mha_py_projection projection = {.linear = {0}};
    const mha_py_array *weight = &projection.weight;
    const int with_bias = mha_py_flag(call, values[3]);

    mha_py_take_rows(call, values[1], "x", NULL, &x);
    mha_py_take_rows(call, values[0], "grad_y", &x.rows, &grad_y);
    mha_py_take_in_rows(call, values[2], Py_None, "weight", &x.rows, &projection);
    check_shapes(call, &x, &grad_y, weight, values);
    const int type = x.rows.type;
    mha_py_array made[3] = {{0}};
    mha_py_new_result(call, "grad_x", x.rank, x.dims, type, &made[0]);
    mha_py_new_result(call, "grad_weight", 2, weight->shape, type, &made[1]);
    if (with_bias) {
        mha_py_new_result(call, "grad_bias", 1, weight->shape, type, &made[2]);
    }
    const mha_linear_grads grads = {
        .dtype = mha_py_dtype(type),
        .rows = (size_t)x.rows.shape[0],
        .in_features = projection.linear.in_features,
        .out_features = projection.linear.out_features,
        .x = x.rows.data,
        .weight = weight->data,
        .grad_y = grad_y.rows.data,
        .x_row_stride = x.rows.stride[0],
        .grad_y_row_stride = grad_y.rows.stride[0],
        .grad_x = mha_py_numbers(&made[0]),
        .grad_weight = mha_py_numbers(&made[1]),
        .grad_bias = mha_py_numbers(&made[2]),
    };
    if (call->failed) {
        return NULL;
    }
    mha_py_detach(call, 2 * mha_linear_work(&projection.linear, 1, grads.rows));
    mha_py_attach(call, mha_linear_backward(&grads));
    return mha_py_answers(call, made, 3);
}
