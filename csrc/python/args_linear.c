/*
 * args_linear.c: the arguments of projections: a weight, packed or in rows, with its bias; and inputs as rows.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

/* --- A projection ------------------------------------------------------------------------------ */

static int
take_size(PyObject *sizes, Py_ssize_t i, const char *name, size_t *size_ret)
{
    int64_t size;

    if (mha_py_whole(PyTuple_GetItem(sizes, i), name, 0, &size) < 0) {
        return -1;
    }
    *size_ret = (size_t)size;
    return (uint64_t)size > (uint64_t)NPY_MAX_INTP ? mha_py_refuse("size", "(sO)", name, sizes) : 0;
}

/*
 * (packed, ., (out_features, in_features)): must be what this binary would have made for these sizes and this ISA, as
 * pack_linear shapes it: the width tells layouts apart that take as many numbers.
 */
static int
take_packed(mha_py_call *call, PyObject *value, const char *name, const mha_py_array *like,
            mha_py_projection *projection)
{
    mha_linear *linear = &projection->linear;
    mha_py_array *packed = &projection->weight;
    PyObject *sizes = PyTuple_GetItem(value, 2);
    size_t size;

    if (!PyTuple_CheckExact(sizes) || PyTuple_Size(sizes) != 2) {
        return mha_py_refuse("projection", "(s)", name);
    }
    if (take_size(sizes, 0, name, &linear->out_features) < 0 || take_size(sizes, 1, name, &linear->in_features) < 0 ||
        mha_py_take(call, PyTuple_GetItem(value, 0), name, MHA_PY_DENSE, like, packed) < 0 ||
        mha_py_check(mha_linear_packed_size(mha_py_dtype(packed->type), linear->out_features, linear->in_features,
                                            &size),
                     name) < 0) {
        return -1;
    }
    const size_t width = call->state->panel_width[mha_py_dtype(packed->type)];
    return packed->rank == 2 && (size_t)packed->shape[1] == width && (size_t)packed->shape[0] * width == size
               ? 0
               : mha_py_refuse("packed", "(sO(nn))", name, sizes, (Py_ssize_t)(size / width), (Py_ssize_t)width);
}

int
mha_py_take_weight(mha_py_call *call, PyObject *value, const char *name, mha_py_layout layout, const mha_py_array *like,
                   mha_py_projection *projection)
{
    mha_py_array *weight = &projection->weight;

    if (mha_py_take(call, value, name, layout, like, weight) < 0 ||
        mha_py_need_rank(weight, 2, "(out_features, in_features)") < 0) {
        return -1;
    }
    projection->linear = (mha_linear){.weight = weight->data,
                                      .out_features = (size_t)weight->shape[0],
                                      .in_features = (size_t)weight->shape[1],
                                      .layout = MHA_WEIGHT_ROWS,
                                      .row_stride = weight->stride[0]};
    return 0;
}

static int
take_bias(mha_py_call *call, PyObject *value, const char *name, const mha_py_array *like, mha_linear *linear)
{
    mha_py_array bias = {0};

    if (value == Py_None) {
        return 0;
    }
    if (mha_py_take(call, value, name, MHA_PY_DENSE, like, &bias) < 0) {
        return -1;
    }
    linear->bias = bias.data;
    return bias.rank == 1 && (size_t)bias.shape[0] == linear->out_features
               ? 0
               : mha_py_refuse("bias", "(Osn)", bias.array, name, (Py_ssize_t)linear->out_features);
}

int
mha_py_take_in_rows(mha_py_call *call, PyObject *weight, PyObject *bias, const char *name, const mha_py_array *like,
                    mha_py_projection *projection)
{
    return mha_py_take_weight(call, weight, name, MHA_PY_ROWS, like, projection) < 0
               ? -1
               : take_bias(call, bias, name, like, &projection->linear);
}

int
mha_py_take_projection(mha_py_call *call, PyObject *value, const char *name, const mha_py_array *like,
                       mha_py_projection *projection)
{
    const Py_ssize_t n_parts = PyTuple_CheckExact(value) ? PyTuple_Size(value) : 0;

    if (n_parts == 2) {
        return mha_py_take_in_rows(call, PyTuple_GetItem(value, 0), PyTuple_GetItem(value, 1), name, like, projection);
    }
    if (n_parts != 3) {
        return mha_py_refuse("projection", "(s)", name);
    }
    if (take_packed(call, value, name, like, projection) < 0) {
        return -1;
    }
    projection->linear.weight = projection->weight.data;
    return take_bias(call, PyTuple_GetItem(value, 1), name, like, &projection->linear);
}

/* --- Rows ---------------------------------------------------------------------------------------- */

int
mha_py_take_rows(mha_py_call *call, PyObject *value, const char *name, const mha_py_array *like, mha_py_rows *rows)
{
    PyArrayObject *x = mha_py_floats(call, value, name, like);
    npy_intp dims[2] = {1, 0};
    PyArray_Dims merged = {dims, 2};

    if (x == NULL) {
        return -1;
    }
    rows->rank = PyArray_NDIM(x);
    if (rows->rank == 0 || rows->rank > MHA_PY_MAX_AXES) {
        return mha_py_refuse("no_features", "(Os)", x, name);
    }
    for (int i = 0; i < rows->rank; i++) {
        rows->dims[i] = PyArray_DIM(x, i);
        dims[0] *= i < rows->rank - 1 ? rows->dims[i] : 1;
    }
    dims[1] = rows->dims[rows->rank - 1];
    if (rows->rank != 2) {
        x = (PyArrayObject *)mha_py_own(call, PyArray_Newshape(x, &merged, NPY_CORDER));
    }
    return x == NULL ? -1 : mha_py_lay_out(call, x, name, MHA_PY_ROWS, &rows->rows);
}
