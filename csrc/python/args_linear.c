/*
 * args_linear.c: the arguments of projections: a weight, packed or in rows, with its bias; and inputs as rows.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

/* --- A projection ------------------------------------------------------------------------------ */

static size_t
take_size(mha_py_call *call, PyObject *sizes, Py_ssize_t i, const char *name)
{
    PyObject *const value = PyTuple_GetItem(sizes, i);
    const int64_t size = mha_py_whole(call, value, name, 0);

    if (!call->failed && !PyLong_CheckExact(value)) { /* its methods have run, and arrays were taken before */
        mha_py_refuse(call, "projection", "(s)", name);
    }
    if (!call->failed && (uint64_t)size > (uint64_t)NPY_MAX_INTP) {
        mha_py_refuse(call, "size", "(sO)", name, sizes);
    }
    return (size_t)size;
}

void
mha_py_packed_shape(mha_py_call *call, mha_dtype dtype, const mha_linear *linear, npy_intp shape[2])
{
    size_t width = 1, size = 0;

    mha_py_check(call, mha_linear_packed_size(dtype, linear->out_features, linear->in_features, &size, &width),
                 call->function);
    shape[0] = (npy_intp)(size / width);
    shape[1] = (npy_intp)width;
}

/*
 * Takes a packed weight and (out_features, in_features).  It must have the shape that pack_linear of this binary gives
 * these sizes under this ISA: the width tells layouts apart that take as many numbers.
 */
static void
take_packed(mha_py_call *call, PyObject *value, PyObject *sizes, const char *name, const mha_py_array *like,
            mha_py_projection *projection)
{
    mha_linear *linear = &projection->linear;
    mha_py_array *packed = &projection->weight;
    npy_intp shape[2];

    if (!PyTuple_CheckExact(sizes) || PyTuple_Size(sizes) != 2) {
        mha_py_refuse(call, "projection", "(s)", name);
        return;
    }
    linear->out_features = take_size(call, sizes, 0, name);
    linear->in_features = take_size(call, sizes, 1, name);
    mha_py_take(call, value, name, MHA_PY_DENSE, like, packed);
    if (call->failed) {
        return;
    }
    mha_py_packed_shape(call, mha_py_dtype(packed->type), linear, shape);
    if (!call->failed && (packed->rank != 2 || packed->shape[0] != shape[0] || packed->shape[1] != shape[1])) {
        mha_py_refuse(call, "packed", "(sON)", name, sizes, mha_py_shape(2, shape));
    }
    linear->weight = packed->data;
    linear->panel_width = (size_t)shape[1];
}

static void
take_bias(mha_py_call *call, PyObject *value, const char *name, const mha_py_array *like, mha_linear *linear)
{
    mha_py_array bias = {0};

    if (value == Py_None) {
        return;
    }
    mha_py_take(call, value, name, MHA_PY_DENSE, like, &bias);
    if (!call->failed && (bias.rank != 1 || (size_t)bias.shape[0] != linear->out_features)) {
        mha_py_refuse(call, "bias", "(Osn)", bias.array, name, (Py_ssize_t)linear->out_features);
    }
    linear->bias = bias.data;
}

void
mha_py_take_in_rows(mha_py_call *call, PyObject *weight, PyObject *bias, const char *name, const mha_py_array *like,
                    mha_py_projection *projection)
{
    mha_py_array *rows = &projection->weight;

    mha_py_take(call, weight, name, MHA_PY_DENSE, like, rows);
    mha_py_need_rank(call, rows, 2, "(out_features, in_features)");
    projection->linear = (mha_linear){.weight = rows->data,
                                      .out_features = (size_t)rows->shape[0],
                                      .in_features = (size_t)rows->shape[1],
                                      .layout = MHA_WEIGHT_ROWS,
                                      .row_stride = rows->stride[0]};
    take_bias(call, bias, name, like, &projection->linear);
}

void
mha_py_take_projection(mha_py_call *call, PyObject *value, const char *name, const mha_py_array *like,
                       mha_py_projection *projection)
{
    const Py_ssize_t n_parts = PyTuple_CheckExact(value) ? PyTuple_Size(value) : 0;
    PyObject *parts[3];

    if (!call->failed && n_parts != 2 && n_parts != 3) {
        mha_py_refuse(call, "projection", "(s)", name);
    }
    if (call->failed) {
        return;
    }
    for (int i = 0; i < n_parts; i++) {
        parts[i] = PyTuple_GetItem(value, i);
    }
    if (n_parts == 2) {
        mha_py_take_in_rows(call, parts[0], parts[1], name, like, projection);
    } else {
        take_packed(call, parts[0], parts[2], name, like, projection);
        take_bias(call, parts[1], name, like, &projection->linear);
    }
}

/* --- Rows ---------------------------------------------------------------------------------------- */

void
mha_py_take_rows(mha_py_call *call, PyObject *value, const char *name, const mha_py_array *like, mha_py_rows *rows)
{
    PyArrayObject *x = mha_py_floats(call, value, name, like);
    npy_intp dims[2] = {1, 0};
    PyArray_Dims merged = {dims, 2};

    rows->rank = x == NULL ? 0 : PyArray_NDIM(x);
    if (x != NULL && (rows->rank == 0 || rows->rank > MHA_PY_MAX_AXES)) {
        mha_py_refuse(call, "no_features", "(Os)", x, name);
    }
    if (call->failed) {
        return;
    }
    for (int i = 0; i < rows->rank; i++) {
        rows->dims[i] = PyArray_DIM(x, i);
        dims[0] *= i < rows->rank - 1 ? rows->dims[i] : 1;
    }
    dims[1] = rows->dims[rows->rank - 1];
    if (rows->rank != 2) {
        x = (PyArrayObject *)mha_py_own(call, PyArray_Newshape(x, &merged, NPY_CORDER));
    }
    mha_py_lay_out(call, x, name, MHA_PY_ROWS, &rows->rows);
}
