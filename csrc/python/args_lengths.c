/*
 * args_lengths.c: valid_lens, int64, as a private snapshot.
 *
 * The copy is what the core reads and clamps, so neither another thread nor a lying array can move a loop bound
 * during the call.  What may be given for lengths is for Python to say (to_lengths in _arrays.py).
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <stdint.h>
#include <string.h>

static PyArrayObject *
copy(PyArrayObject *array)
{
    PyArray_Descr *native;

    if (PyArray_ISCARRAY_RO(array)) { /* what nearly every caller passes, so without the casting machinery */
        PyArrayObject *lengths = (PyArrayObject *)PyArray_EMPTY(PyArray_NDIM(array), PyArray_DIMS(array), NPY_INT64, 0);

        if (lengths != NULL) {
            memcpy(PyArray_DATA(lengths), PyArray_DATA(array), (size_t)PyArray_SIZE(lengths) * sizeof(int64_t));
        }
        return lengths;
    }
    native = PyArray_DescrFromType(NPY_INT64);
    return native == NULL ? NULL
                          : (PyArrayObject *)PyArray_FromArray(
                                array, native, NPY_ARRAY_CARRAY | NPY_ARRAY_ENSURECOPY | NPY_ARRAY_ENSUREARRAY);
}

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
    PyArrayObject *given = (PyArrayObject *)value, *lengths;
    int rank;

    if (value == NULL || value == Py_None) {
        return 0; /* all keys; the caller zeroed the struct */
    }
    if (!PyArray_Check(value) || !PyArray_EquivTypenums(PyArray_TYPE(given), NPY_INT64)) {
        return mha_py_type_error(value, "valid_lens", "an array of int64");
    }
    lengths = copy(given);
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
