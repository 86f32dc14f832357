/*
 * args_lengths.c: valid_lens, anything array-like, as a private int64 snapshot.
 *
 * The type is discovered before anything is cast: a bool array is a mask passed by mistake, and
 * a float list must be rounded up, not cut off.  The copy is what the core reads and clamps, so
 * neither another thread nor a lying array can move a loop bound during the call.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <stdint.h>
#include <string.h>

/* Float lengths beyond this are the same as "all keys", and below minus this as "none". */
#define FAR_AWAY 4611686018427387904.0 /* 2**62, so that the cast is defined */

/* --- Numbers ------------------------------------------------------------------------- */

/* Rounded up: d2l's mask is arange(K) < length, so 2.5 shows keys 0, 1 and 2. */
static int64_t
round_up(double length)
{
    if (length >= FAR_AWAY) {
        return INT64_MAX;
    }
    if (length <= -FAR_AWAY) {
        return INT64_MIN;
    }
    const int64_t whole = (int64_t)length; /* towards zero */
    return whole + ((double)whole < length);
}

/* A dense, native copy of `array` as `type` (new reference). */
static PyArrayObject *
copy_as(PyArrayObject *array, int type)
{
    PyArray_Descr *native = PyArray_DescrFromType(type);

    if (native == NULL) {
        return NULL;
    }
    return (PyArrayObject *)PyArray_FromArray(
        array, native, NPY_ARRAY_CARRAY | NPY_ARRAY_ENSURECOPY | NPY_ARRAY_ENSUREARRAY | NPY_ARRAY_FORCECAST);
}

static PyArrayObject *
from_floats(PyArrayObject *array)
{
    PyArrayObject *floats = copy_as(array, NPY_FLOAT64);
    PyArrayObject *lengths = NULL;

    if (floats == NULL) {
        return NULL;
    }
    lengths = (PyArrayObject *)PyArray_EMPTY(PyArray_NDIM(floats), PyArray_DIMS(floats), NPY_INT64, 0);
    if (lengths != NULL) {
        const npy_intp n = PyArray_SIZE(floats);
        const double *from = PyArray_DATA(floats);
        int64_t *to = PyArray_DATA(lengths);

        for (npy_intp i = 0; i < n; i++) {
            if (from[i] - from[i] != 0) { /* NaN, inf, -inf */
                PyErr_Format(PyExc_ValueError,
                             "valid_lens must be finite, but has a NaN or infinity at "
                             "position %zd",
                             (Py_ssize_t)i);
                Py_DECREF((PyObject *)lengths);
                lengths = NULL;
                break;
            }
            to[i] = round_up(from[i]);
        }
    }
    Py_DECREF((PyObject *)floats);
    return lengths;
}

static PyArrayObject *
from_integers(PyArrayObject *array)
{
    PyArrayObject *lengths;

    if (PyArray_TYPE(array) == NPY_INT64 && PyArray_ISCARRAY_RO(array)) {
        /* What nearly every caller passes, so without the casting machinery. */
        lengths = (PyArrayObject *)PyArray_EMPTY(PyArray_NDIM(array), PyArray_DIMS(array), NPY_INT64, 0);
        if (lengths != NULL) {
            memcpy(PyArray_DATA(lengths), PyArray_DATA(array), (size_t)PyArray_SIZE(lengths) * sizeof(int64_t));
        }
        return lengths;
    }
    lengths = copy_as(array, NPY_INT64);
    if (lengths != NULL && PyTypeNum_ISUNSIGNED(PyArray_TYPE(array))) {
        const npy_intp n = PyArray_SIZE(lengths);
        int64_t *values = PyArray_DATA(lengths);

        for (npy_intp i = 0; i < n; i++) {
            values[i] = values[i] < 0 ? INT64_MAX : values[i]; /* 2**63 and up wrapped */
        }
    }
    return lengths;
}

/* --- Types ------------------------------------------------------------------------------ */

/* A list of Python ints, directly; NULL without an exception: it is something else. */
static PyArrayObject *
from_int_list(PyObject *list)
{
    npy_intp n = PyList_Size(list);
    PyArrayObject *lengths = (PyArrayObject *)PyArray_EMPTY(1, &n, NPY_INT64, 0);
    int64_t *values;

    if (lengths == NULL) {
        return NULL;
    }
    values = PyArray_DATA(lengths);
    for (npy_intp i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(list, i); /* owned: the list is not ours alone */
        int overflow = 0;

        if (item == NULL || !PyLong_CheckExact(item)) {
            PyErr_Clear();
            Py_XDECREF(item);
            Py_DECREF((PyObject *)lengths);
            return NULL;
        }
        values[i] = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (overflow != 0) {
            values[i] = overflow > 0 ? INT64_MAX : INT64_MIN;
        }
        Py_DECREF(item);
    }
    return lengths;
}

/* The array NumPy sees in `value`; what is wrong with a ragged list is said in our words. */
static PyArrayObject *
discover(PyObject *value)
{
    PyArrayObject *array = (PyArrayObject *)PyArray_FromAny(value, NULL, 0, 0, NPY_ARRAY_ENSUREARRAY, NULL);

    /* NumPy before 1.24 only warned, which is an exception where warnings are made errors. */
    if (array == NULL && (PyList_Check(value) || PyTuple_Check(value)) &&
        (PyErr_ExceptionMatches(PyExc_ValueError) || PyErr_ExceptionMatches(PyExc_UserWarning))) {
        PyErr_SetString(PyExc_ValueError, "valid_lens is a ragged list: expected B lengths, or B rows of Q");
    }
    return array;
}

static PyArrayObject *
from_any(PyObject *value)
{
    PyArrayObject *array = discover(value);
    PyArrayObject *lengths = NULL;

    if (array == NULL) {
        return NULL;
    }
    if (PyTypeNum_ISINTEGER(PyArray_TYPE(array))) {
        lengths = from_integers(array);
    } else if (PyTypeNum_ISFLOAT(PyArray_TYPE(array))) {
        lengths = from_floats(array);
    } else if (PyArray_TYPE(array) == NPY_BOOL) {
        PyErr_SetString(PyExc_TypeError, "valid_lens has dtype bool, which looks like a mask: expected "
                                         "lengths (how many keys each batch item or query may see); pass a "
                                         "mask to mha_c.functional as keep_mask");
    } else {
        PyErr_Format(PyExc_TypeError, "valid_lens has dtype %S, expected integers or floats (lengths)",
                     PyArray_DESCR(array));
    }
    Py_DECREF((PyObject *)array);
    return lengths;
}

/* --- Shapes ---------------------------------------------------------------------------------- */

static int
say_shape(PyObject *module, PyArrayObject *lengths, npy_intp batch, npy_intp queries)
{
    PyObject *shape = mha_py_shape(PyArray_NDIM(lengths), PyArray_DIMS(lengths));

    if (shape != NULL) {
        mha_py_shape_error(module,
                           "valid_lens has shape %S, expected (B,) = (%zd,) or (B, Q) = "
                           "(%zd, %zd)",
                           shape, (Py_ssize_t)batch, (Py_ssize_t)batch, (Py_ssize_t)queries);
        Py_DECREF(shape);
    }
    return -1;
}

int
mha_py_take_lengths(PyObject *module, PyObject *value, npy_intp batch, npy_intp queries, mha_py_lengths *lengths_ret)
{
    PyArrayObject *lengths = NULL;
    int rank;

    if (value == NULL || value == Py_None) {
        return 0; /* all keys; the caller zeroed the struct */
    }
    if (PyList_CheckExact(value) && PyList_Size(value) > 0) {
        lengths = from_int_list(value);
    }
    if (lengths == NULL && !PyErr_Occurred()) {
        lengths = from_any(value);
    }
    if (lengths == NULL) {
        return -1;
    }
    rank = PyArray_NDIM(lengths);
    if ((rank != 1 && rank != 2) || PyArray_DIM(lengths, 0) != batch ||
        (rank == 2 && PyArray_DIM(lengths, 1) != queries)) {
        say_shape(module, lengths, batch, queries);
        Py_DECREF((PyObject *)lengths);
        return -1;
    }
    lengths_ret->array = lengths;
    lengths_ret->data = PyArray_DATA(lengths);
    lengths_ret->per_batch = rank == 1 ? 1 : (size_t)queries;
    return 0;
}

void
mha_py_drop_lengths(mha_py_lengths *lengths)
{
    Py_XDECREF((PyObject *)lengths->array);
    lengths->array = NULL;
}

mha_visibility
mha_py_visibility(const mha_py_lengths *lengths)
{
    const mha_visibility visible = {lengths->data, lengths->per_batch, MHA_CAUSAL_NONE, MHA_NO_LIMIT, MHA_NO_LIMIT};

    return visible;
}
