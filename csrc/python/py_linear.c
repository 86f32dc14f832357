/*
 * py_linear.c: projections: packing a weight for the active ISA, checking a packed one before it
 * is used, and y = x W^T + b on its own.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <stdint.h>

#define ALIGNMENT 64 /* a cache line, and the widest vector */

/* --- Packing ---------------------------------------------------------------------------- */

/*
 * A 1-D array whose first number lies on a cache line: a view into a slightly larger array,
 * which it keeps alive.
 */
static PyArrayObject *
new_aligned(size_t n_numbers, int type)
{
    npy_intp n = (npy_intp)n_numbers;
    npy_intp room = n + ALIGNMENT / (npy_intp)mha_py_itemsize(type);
    PyArray_Descr *native;
    PyArrayObject *whole, *view;
    char *start;

    if (n_numbers > (size_t)NPY_MAX_INTP / 2) {
        PyErr_SetString(PyExc_ValueError, "the packed weight would be too large");
        return NULL;
    }
    whole = mha_py_new("the packed weight", 1, &room, type);
    native = whole == NULL ? NULL : PyArray_DescrFromType(type);
    if (native == NULL) {
        Py_XDECREF((PyObject *)whole);
        return NULL;
    }
    start = PyArray_DATA(whole);
    start += (ALIGNMENT - (uintptr_t)start % ALIGNMENT) % ALIGNMENT;
    view = (PyArrayObject *)PyArray_NewFromDescr(&PyArray_Type, native, 1, &n, NULL, start, NPY_ARRAY_CARRAY, NULL);
    if (view == NULL) {
        Py_DECREF((PyObject *)whole);
        return NULL;
    }
    if (PyArray_SetBaseObject(view, (PyObject *)whole) < 0) { /* steals whole, even then */
        Py_DECREF((PyObject *)view);
        return NULL;
    }
    return view;
}

PyObject *
py_pack_linear(PyObject *module, PyObject *value)
{
    mha_py_array weight = {0};
    PyArrayObject *packed = NULL;
    size_t size, out_features, in_features;

    if (mha_py_take(&weight, value, "weight", MHA_PY_ROWS, NULL) < 0 ||
        mha_py_need_rank(module, &weight, 2, "(out_features, in_features)") < 0) {
        goto done;
    }
    out_features = (size_t)weight.shape[0];
    in_features = (size_t)weight.shape[1];
    if (mha_py_check(mha_linear_packed_size(mha_py_dtype(&weight), out_features, in_features, &size),
                     "pack_linear") < 0) {
        goto done;
    }
    packed = new_aligned(size, weight.type);
    if (packed != NULL) {
        PyThreadState *saved = mha_py_detach((double)size);
        const mha_status status = mha_linear_pack(mha_py_dtype(&weight), out_features, in_features, weight.data,
                                                  weight.stride[0], PyArray_DATA(packed));

        mha_py_attach(saved);
        if (mha_py_check(status, "pack_linear") < 0) {
            Py_DECREF((PyObject *)packed);
            packed = NULL;
        } else {
            PyArray_CLEARFLAGS(packed, NPY_ARRAY_WRITEABLE);
        }
    }
done:
    mha_py_drop(&weight);
    return (PyObject *)packed;
}

/* --- Taking a projection --------------------------------------------------------------------- */

static int
say_projection(const char *name)
{
    PyErr_Format(PyExc_TypeError,
                 "%s must be (weight, bias or None) or (packed, bias or None, (out_features, in_features))", name);
    return -1;
}

static int
take_size(PyObject *sizes, Py_ssize_t i, const char *name, size_t *size_ret)
{
    PyObject *item = PyTuple_GetItem(sizes, i);
    int64_t size;

    if (item == NULL || mha_py_whole(item, name, 0, &size) < 0) {
        return -1;
    }
    if ((uint64_t)size > (uint64_t)NPY_MAX_INTP) {
        PyErr_Format(PyExc_ValueError, "%s: a size is too large", name);
        return -1;
    }
    *size_ret = (size_t)size;
    return 0;
}

/* The packed array must be what this binary would have made for these sizes and this ISA. */
static int
check_packed(const mha_py_projection *projection)
{
    const mha_linear *linear = &projection->linear;
    const mha_py_array *packed = &projection->weight;
    size_t size;

    if (mha_py_check(mha_linear_packed_size(mha_py_dtype(packed), linear->out_features, linear->in_features, &size),
                     projection->name) < 0) {
        return -1;
    }
    if (packed->rank != 1 || (size_t)packed->shape[0] != size) {
        PyErr_Format(PyExc_ValueError,
                     "%s: not a weight of %zu x %zu packed for the active instruction set "
                     "(%s), which takes %zu numbers: pack it again",
                     projection->name, linear->out_features, linear->in_features, mha_isa_name(mha_isa_active()), size);
        return -1;
    }
    return 0;
}

static int
take_bias(PyObject *module, PyObject *value, const mha_py_array *like, mha_py_projection *projection)
{
    mha_py_array *bias = &projection->bias;

    if (mha_py_take(bias, value, projection->name, MHA_PY_DENSE, like) < 0) {
        return -1;
    }
    if (bias->rank != 1 || (size_t)bias->shape[0] != projection->linear.out_features) {
        PyObject *shape = mha_py_shape(bias->rank, PyArray_DIMS(bias->array));

        if (shape != NULL) {
            mha_py_shape_error(module, "%s.bias has shape %S, expected (%zu,)", projection->name, shape,
                               projection->linear.out_features);
            Py_DECREF(shape);
        }
        return -1;
    }
    projection->linear.bias = bias->data;
    return 0;
}

/* (packed, ., (out_features, in_features)) */
static int
take_packed(PyObject *value, const mha_py_array *like, mha_py_projection *projection)
{
    const char *name = projection->name;
    PyObject *sizes = PyTuple_GetItem(value, 2);

    if (!PyTuple_Check(sizes) || PyTuple_Size(sizes) != 2) {
        return say_projection(name);
    }
    return take_size(sizes, 0, name, &projection->linear.out_features) < 0 ||
                   take_size(sizes, 1, name, &projection->linear.in_features) < 0 ||
                   mha_py_take(&projection->weight, PyTuple_GetItem(value, 0), name, MHA_PY_DENSE, like) < 0
               ? -1
               : check_packed(projection);
}

/* (weight, .) */
static int
take_rows(PyObject *module, PyObject *value, const mha_py_array *like, mha_py_projection *projection)
{
    mha_py_array *weight = &projection->weight;

    if (mha_py_take(weight, value, projection->name, MHA_PY_ROWS, like) < 0 ||
        mha_py_need_rank(module, weight, 2, "(out_features, in_features)") < 0) {
        return -1;
    }
    projection->linear.out_features = (size_t)weight->shape[0];
    projection->linear.in_features = (size_t)weight->shape[1];
    projection->linear.layout = MHA_WEIGHT_ROWS;
    projection->linear.row_stride = weight->stride[0];
    return 0;
}

int
mha_py_take_projection(PyObject *module, PyObject *value, const char *name, const mha_py_array *like,
                       mha_py_views *views, mha_py_projection *projection)
{
    const Py_ssize_t n_parts = PyTuple_Check(value) ? PyTuple_Size(value) : 0;
    PyObject *weight, *bias;

    projection->name = name;
    if (value == Py_None) {
        return 0; /* no projection; the caller zeroed the struct */
    }
    if (n_parts != 2 && n_parts != 3) {
        return say_projection(name);
    }
    weight = n_parts == 2 ? mha_py_view_tensor(module, PyTuple_GetItem(value, 0), views) : NULL;
    bias = mha_py_view_tensor(module, PyTuple_GetItem(value, 1), views);
    if (bias == NULL || (n_parts == 2 && weight == NULL) ||
        (n_parts == 2 ? take_rows(module, weight, like, projection) : take_packed(value, like, projection)) < 0) {
        return -1;
    }
    projection->linear.weight = projection->weight.data;
    return bias == Py_None ? 0 : take_bias(module, bias, like, projection);
}

void
mha_py_drop_projection(mha_py_projection *projection)
{
    mha_py_drop(&projection->weight);
    mha_py_drop(&projection->bias);
}

/* --- linear -------------------------------------------------------------------------------------- */

typedef struct {
    mha_py_rows x;
    mha_py_projection projection;
    mha_py_views views;
    PyArrayObject *y;
} linear_call;

static int
merge_rows(PyArrayObject *x, const char *name, mha_py_rows *rows)
{
    npy_intp dims[2] = {1, 0};
    PyArray_Dims shape = {dims, 2};
    PyArrayObject *merged;
    int failed;

    for (int i = 0; i < rows->rank; i++) {
        rows->dims[i] = PyArray_DIM(x, i);
        dims[0] *= i < rows->rank - 1 ? rows->dims[i] : 1;
    }
    dims[1] = rows->dims[rows->rank - 1];
    if (rows->rank == 2) {
        return mha_py_take_as(&rows->rows, x, name, PyArray_TYPE(x), MHA_PY_ROWS);
    }
    merged = (PyArrayObject *)PyArray_Newshape(x, &shape, NPY_CORDER);
    if (merged == NULL) {
        return -1;
    }
    failed = mha_py_take_as(&rows->rows, merged, name, PyArray_TYPE(merged), MHA_PY_ROWS);
    Py_DECREF((PyObject *)merged);
    return failed;
}

int
mha_py_take_rows(PyObject *module, PyObject *value, const char *name, const mha_py_array *like, mha_py_rows *rows)
{
    PyArrayObject *x = mha_py_floats_like(value, name, like);
    int failed = -1;

    if (x == NULL) {
        return -1;
    }
    rows->rank = PyArray_NDIM(x);
    if (rows->rank == 0 || rows->rank > MHA_PY_MAX_AXES) {
        mha_py_shape_error(module, "%s has rank %d, expected (..., features)", name, rows->rank);
    } else {
        failed = merge_rows(x, name, rows);
    }
    Py_DECREF((PyObject *)x);
    return failed;
}

static int
run_linear(linear_call *call)
{
    const mha_linear *linear = &call->projection.linear;
    const mha_py_array *x = &call->x.rows;
    const size_t rows = (size_t)x->shape[0];
    PyThreadState *saved = mha_py_detach((double)rows * (double)linear->out_features * (double)linear->in_features);
    const mha_status status = mha_linear_forward(mha_py_dtype(x), linear, rows, x->data, x->stride[0],
                                                 PyArray_DATA(call->y), (ptrdiff_t)linear->out_features);

    mha_py_attach(saved);
    return mha_py_check(status, "linear");
}

PyObject *
py_linear(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PyObject *values[2];
    linear_call call = {0};
    PyObject *result = NULL;

    if (mha_py_arguments("linear", args, n_args, 2, 2, values) < 0) {
        return NULL;
    }
    if (mha_py_take_rows(module, values[0], "x", NULL, &call.x) < 0) {
        goto done;
    }
    if (values[1] == Py_None) {
        say_projection("projection");
        goto done;
    }
    if (mha_py_take_projection(module, values[1], "projection", &call.x.rows, &call.views, &call.projection) < 0) {
        goto done;
    }
    if ((size_t)call.x.rows.shape[1] != call.projection.linear.in_features) {
        mha_py_shape_error(module, "x has %zd features, but the projection expects %zu",
                           (Py_ssize_t)call.x.rows.shape[1], call.projection.linear.in_features);
        goto done;
    }
    call.x.dims[call.x.rank - 1] = (npy_intp)call.projection.linear.out_features;
    call.y = mha_py_new("the output", call.x.rank, call.x.dims, call.x.rows.type);
    if (call.y != NULL && run_linear(&call) == 0) {
        result = (PyObject *)call.y;
        call.y = NULL; /* ownership moves to the caller */
    }
done:
    Py_XDECREF((PyObject *)call.y);
    mha_py_drop_projection(&call.projection);
    mha_py_drop(&call.x.rows);
    mha_py_drop_views(&call.views);
    return result;
}
