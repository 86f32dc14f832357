/*
 * args_arrays.c: borrows ndarrays as (pointer, shape, strides in numbers), copying only what
 * the core cannot read in place; compares shapes in the caller's words; makes outputs.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <stdint.h>

size_t
mha_py_itemsize(int type)
{
    return type == NPY_FLOAT64 ? 8 : type == NPY_FLOAT32 ? 4 : 1;
}

mha_dtype
mha_py_dtype(const mha_py_array *array)
{
    return array->type == NPY_FLOAT64 ? MHA_F64 : MHA_F32;
}

/* --- Taking arrays ------------------------------------------------------------------- */

PyArrayObject *
mha_py_floats(PyObject *value, const char *name)
{
    PyArrayObject *array = (PyArrayObject *)value;

    if (!PyArray_Check(value)) {
        mha_py_type_error(value, name, "a NumPy array");
        return NULL;
    }
    if (PyArray_TYPE(array) != NPY_FLOAT32 && PyArray_TYPE(array) != NPY_FLOAT64) {
        PyErr_Format(PyExc_TypeError,
                     "%s has dtype %S, expected float32 or float64: convert it, "
                     "for example %s.astype(np.float32)",
                     name, PyArray_DESCR(array), name);
        return NULL;
    }
    Py_INCREF(value);
    return array;
}

/* May the core read it in place? */
static int
fits(PyArrayObject *array, npy_intp itemsize, mha_py_layout layout)
{
    const int rank = PyArray_NDIM(array);

    if (!PyArray_ISALIGNED(array) || !PyArray_ISNOTSWAPPED(array)) {
        return 0;
    }
    if (layout == MHA_PY_DENSE) {
        return PyArray_IS_C_CONTIGUOUS(array);
    }
    for (int i = 0; i < rank; i++) {
        const npy_intp stride = PyArray_STRIDE(array, i);

        /* The stride of an axis of length 0 or 1 means nothing. */
        if (PyArray_DIM(array, i) > 1 &&
            (stride % itemsize != 0 || (layout == MHA_PY_ROWS && i == rank - 1 && stride != itemsize))) {
            return 0;
        }
    }
    return 1;
}

PyArrayObject *
mha_py_dense(PyArrayObject *array, int type)
{
    PyArray_Descr *native = PyArray_DescrFromType(type);

    if (native == NULL) {
        return NULL;
    }
    return (PyArrayObject *)PyArray_FromArray(array, native,
                                              NPY_ARRAY_CARRAY_RO | NPY_ARRAY_NOTSWAPPED | NPY_ARRAY_ENSUREARRAY);
}

/* Note pointer, shape and strides; from here on only these are looked at. */
static void
note_layout(mha_py_array *array)
{
    const npy_intp itemsize = (npy_intp)mha_py_itemsize(array->type);
    size_t dense = 1; /* unsigned: may wrap for arrays without elements, harmlessly */

    array->rank = PyArray_NDIM(array->array);
    array->data = PyArray_DATA(array->array);
    for (int i = array->rank - 1; i >= 0; i--) {
        const npy_intp length = PyArray_DIM(array->array, i);

        array->shape[i] = length;
        array->stride[i] = length > 1 ? PyArray_STRIDE(array->array, i) / itemsize : (ptrdiff_t)dense;
        dense = (size_t)array->stride[i] * (size_t)length;
    }
}

int
mha_py_take_as(mha_py_array *array, PyArrayObject *value, const char *name, int type, mha_py_layout layout)
{
    array->name = name;
    array->type = type;
    if (PyArray_NDIM(value) < 1 || PyArray_NDIM(value) > MHA_PY_MAX_RANK) {
        /* No caller wants such a rank: keep it for the message of mha_py_need_rank. */
        Py_INCREF((PyObject *)value);
        array->array = value;
        array->rank = PyArray_NDIM(value);
        return 0;
    }
    if (fits(value, (npy_intp)mha_py_itemsize(type), layout)) {
        Py_INCREF((PyObject *)value);
        array->array = value;
    } else {
        array->array = mha_py_dense(value, type);
        if (array->array == NULL) {
            return -1;
        }
    }
    note_layout(array);
    return 0;
}

PyArrayObject *
mha_py_floats_like(PyObject *value, const char *name, const mha_py_array *like)
{
    PyArrayObject *floats = mha_py_floats(value, name);

    if (floats != NULL && like != NULL && PyArray_TYPE(floats) != like->type) {
        PyErr_Format(PyExc_TypeError, "%s has dtype %S, but %s has dtype %s: all arrays of a call need the same", name,
                     PyArray_DESCR(floats), like->name, like->type == NPY_FLOAT64 ? "float64" : "float32");
        Py_DECREF((PyObject *)floats);
        return NULL;
    }
    return floats;
}

int
mha_py_take(mha_py_array *array, PyObject *value, const char *name, mha_py_layout layout, const mha_py_array *like)
{
    PyArrayObject *floats = mha_py_floats_like(value, name, like);
    int failed;

    if (floats == NULL) {
        return -1;
    }
    failed = mha_py_take_as(array, floats, name, PyArray_TYPE(floats), layout);
    Py_DECREF((PyObject *)floats);
    return failed;
}

void
mha_py_drop(mha_py_array *array)
{
    Py_XDECREF((PyObject *)array->array);
    array->array = NULL;
}

mha_operand
mha_py_operand(const mha_py_array *array)
{
    mha_operand operand = {array->data, 0, 0, 0};

    operand.batch_stride = array->stride[0];
    operand.row_stride = array->stride[array->rank - 2];
    /* Rank 3 has one head: a head stride as if the axis were there. */
    operand.head_stride = array->rank == 4
                              ? array->stride[1]
                              : (ptrdiff_t)((size_t)operand.row_stride * (size_t)array->shape[array->rank - 2]);
    return operand;
}

/* --- Shapes in words ------------------------------------------------------------------------ */

PyObject *
mha_py_shape(int rank, const npy_intp *dims)
{
    PyObject *shape = PyTuple_New(rank);

    for (int i = 0; i < rank && shape != NULL; i++) {
        PyObject *length = PyLong_FromSsize_t(dims[i]);

        if (length == NULL || PyTuple_SetItem(shape, i, length) < 0) {
            Py_DECREF(shape);
            return NULL;
        }
    }
    return shape;
}

int
mha_py_need_rank(PyObject *module, const mha_py_array *array, int rank, const char *expected)
{
    PyObject *shape;

    if (array->rank == rank) {
        return 0;
    }
    shape = mha_py_shape(array->rank, PyArray_DIMS(array->array));
    if (shape != NULL) {
        mha_py_shape_error(module, "%s has shape %S (rank %d), expected rank %d: %s", array->name, shape, array->rank,
                           rank, expected);
        Py_DECREF(shape);
    }
    return -1;
}

int
mha_py_need_shape(PyObject *module, const mha_py_array *array, int rank, const npy_intp *dims)
{
    int same = array->rank == rank;
    PyObject *got, *expected;

    for (int i = 0; i < rank && same; i++) {
        same = array->shape[i] == dims[i];
    }
    if (same) {
        return 0;
    }
    got = mha_py_shape(array->rank, PyArray_DIMS(array->array));
    expected = mha_py_shape(rank, dims);
    if (got != NULL && expected != NULL) {
        mha_py_shape_error(module, "%s has shape %S, expected %S", array->name, got, expected);
    }
    Py_XDECREF(expected);
    Py_XDECREF(got);
    return -1;
}

int
mha_py_need_same(PyObject *module, const char *what, const mha_py_array *a, int axis_a, const mha_py_array *b,
                 int axis_b)
{
    PyObject *clash, *shape_a, *shape_b;

    if (a->shape[axis_a] == b->shape[axis_b]) {
        return 0;
    }
    clash = PyUnicode_FromFormat(what, (Py_ssize_t)a->shape[axis_a]);
    shape_a = mha_py_shape(a->rank, a->shape);
    shape_b = mha_py_shape(b->rank, b->shape);
    if (clash != NULL && shape_a != NULL && shape_b != NULL) {
        mha_py_shape_error(module, "%s has %U, but %s has %zd: %s.shape = %S, %s.shape = %S", a->name, clash, b->name,
                           (Py_ssize_t)b->shape[axis_b], a->name, shape_a, b->name, shape_b);
    }
    Py_XDECREF(shape_b);
    Py_XDECREF(shape_a);
    Py_XDECREF(clash);
    return -1;
}

/* --- Outputs ---------------------------------------------------------------------------------- */

static PyArrayObject *
new_array(const char *name, int rank, const npy_intp *dims, int type, int zeroed)
{
    npy_intp room = NPY_MAX_INTP / (npy_intp)mha_py_itemsize(type);

    for (int i = 0; i < rank; i++) {
        if (dims[i] > 0 && dims[i] > room) {
            PyObject *shape = mha_py_shape(rank, dims);

            if (shape != NULL) {
                PyErr_Format(PyExc_ValueError, "%s of shape %S would be too large", name, shape);
                Py_DECREF(shape);
            }
            return NULL;
        }
        room = dims[i] > 0 ? room / dims[i] : room;
    }
    return (PyArrayObject *)(zeroed ? PyArray_ZEROS(rank, (npy_intp *)dims, type, 0)
                                    : PyArray_EMPTY(rank, (npy_intp *)dims, type, 0));
}

PyArrayObject *
mha_py_new(const char *name, int rank, const npy_intp *dims, int type)
{
    return new_array(name, rank, dims, type, 0);
}

PyArrayObject *
mha_py_zeros(const char *name, int rank, const npy_intp *dims, int type)
{
    return new_array(name, rank, dims, type, 1);
}

PyObject *
mha_py_borrow(PyArrayObject *array)
{
    return array == NULL ? Py_None : (PyObject *)array;
}

mha_result
mha_py_result(PyArrayObject *array)
{
    const int rank = PyArray_NDIM(array);
    const npy_intp rows = PyArray_DIM(array, rank - 2), columns = PyArray_DIM(array, rank - 1);
    mha_result result = {PyArray_DATA(array), 0, 0, columns};

    result.head_stride = rows * columns;
    result.batch_stride = rank == 4 ? PyArray_DIM(array, 1) * result.head_stride : result.head_stride;
    return result;
}
