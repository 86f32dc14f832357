/*
 * args_arrays.c: borrows ndarrays as (pointer, shape, strides in numbers), copying only what the core cannot read in
 * place.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <stdint.h>
#include <string.h>

size_t
mha_py_itemsize(int type)
{
    return type == NPY_FLOAT64 || type == NPY_INT64   ? 8
           : type == NPY_FLOAT32 || type == NPY_INT32 ? 4
           : type == NPY_FLOAT16 || type == NPY_INT16 ? 2
                                                      : 1;
}

mha_dtype
mha_py_dtype(int type)
{
    return type == NPY_FLOAT64 ? MHA_F64 : MHA_F32;
}

/* --- Taking arrays ------------------------------------------------------------------- */

/* 1 for NPY_FLOAT32 and NPY_FLOAT64, or, with `like`, for exactly its type. */
int
mha_py_is_float(int type, const mha_py_array *like)
{
    return like != NULL ? type == like->type : type == NPY_FLOAT32 || type == NPY_FLOAT64;
}

PyArrayObject *
mha_py_floats(mha_py_call *call, PyObject *value, const char *name, const mha_py_array *like)
{
    PyArrayObject *array;

    if (call->failed) {
        return NULL;
    }
    array = (PyArrayObject *)(PyArray_CheckExact(value) ? value : mha_py_viewed(call, value));
    if (array != NULL && !PyArray_Check((PyObject *)array)) {
        mha_py_type_error(call, value, name, "a NumPy array");
    } else if (array != NULL && !mha_py_is_float(PyArray_TYPE(array), like)) {
        mha_py_refuse(call, "dtype", "(OsOz)", array, name, like == NULL ? Py_None : mha_py_viewed(call, like->array),
                      like == NULL ? NULL : like->name);
    }
    return call->failed ? NULL : array;
}

int
mha_py_fits(mha_py_array *array, mha_py_layout layout)
{
    size_t dense = 1; /* unsigned: may wrap for arrays without elements, harmlessly */

    for (int i = array->rank - 1; i >= 0; i--) {
        const int must_be_dense = layout == MHA_PY_DENSE || (layout == MHA_PY_ROWS && i == array->rank - 1);

        array->stride[i] = array->shape[i] > 1 ? array->stride[i] : (ptrdiff_t)dense;
        if (must_be_dense && array->stride[i] != (ptrdiff_t)dense) {
            return 0;
        }
        dense = (size_t)array->stride[i] * (size_t)array->shape[i];
    }
    return 1;
}

/* Notes where the numbers are; returns 1 if the core may read them there. */
static int
note(PyArrayObject *value, mha_py_layout layout, mha_py_array *array)
{
    const npy_intp itemsize = (npy_intp)mha_py_itemsize(array->type);
    int whole = PyArray_ISALIGNED(value) && PyArray_ISNOTSWAPPED(value);

    array->array = (PyObject *)value;
    array->data = PyArray_DATA(value);
    for (int i = 0; i < array->rank; i++) {
        const npy_intp bytes = PyArray_STRIDE(value, i);
        /* Divides by constants: a division by a variable would take longer than all the rest. */
        const npy_intp stride = itemsize == 4 ? bytes / 4 : itemsize == 8 ? bytes / 8 : bytes;

        array->shape[i] = PyArray_DIM(value, i);
        array->stride[i] = stride;
        whole = whole && (stride * itemsize == bytes || array->shape[i] <= 1);
    }
    return whole && mha_py_fits(array, layout);
}

void
mha_py_lay_out(mha_py_call *call, PyArrayObject *value, const char *name, mha_py_layout layout, mha_py_array *array)
{
    const int flags = NPY_ARRAY_CARRAY_RO | NPY_ARRAY_NOTSWAPPED | NPY_ARRAY_ENSUREARRAY;

    if (call->failed) {
        return;
    }
    array->name = name;
    array->type = PyArray_TYPE(value);
    array->rank = PyArray_NDIM(value);
    if (array->rank > MHA_PY_MAX_RANK) {
        array->array = (PyObject *)value;
    } else if (!note(value, layout, array)) { /* the same numbers, dense, aligned and native */
        PyArray_Descr *native = PyArray_DescrFromType(array->type);

        value = (PyArrayObject *)mha_py_own(call, native == NULL ? NULL : PyArray_FromArray(value, native, flags));
        if (value != NULL) {
            (void)note(value, layout, array); /* without numbers, any strides are harmless */
        }
    }
}

void
mha_py_take(mha_py_call *call, PyObject *value, const char *name, mha_py_layout layout, const mha_py_array *like,
            mha_py_array *array)
{
    if (!call->failed && (PyArray_CheckExact(value) || !mha_py_take_tensor(call, value, name, layout, like, array))) {
        mha_py_lay_out(call, mha_py_floats(call, value, name, like), name, layout, array);
    }
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

void
mha_py_copy_rows(char *to, const char *from, npy_intp rows, npy_intp row_bytes, ptrdiff_t stride)
{
    const npy_intp at_once = stride == row_bytes ? rows : 1;

    for (npy_intp row = 0; row < rows && row_bytes > 0; row += at_once) {
        memcpy(to + row * row_bytes, from + row * stride, (size_t)(at_once * row_bytes));
    }
}

/* --- Shapes ------------------------------------------------------------------------------------ */

void
mha_py_need_rank(mha_py_call *call, const mha_py_array *array, int rank, const char *expected)
{
    if (!call->failed && array->rank != rank) {
        mha_py_refuse(call, "rank", "(Osis)", array->array, array->name, rank, expected);
    }
}

PyObject *
mha_py_shape(int rank, const npy_intp *dims)
{
    PyObject *tuple = PyTuple_New(rank);

    for (int i = 0; i < rank && tuple != NULL; i++) {
        PyObject *length = PyLong_FromSsize_t(dims[i]);

        if (length == NULL || PyTuple_SetItem(tuple, i, length) < 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

void
mha_py_need_shape(mha_py_call *call, const mha_py_array *array, int rank, const npy_intp *dims)
{
    int same = array->rank == rank;

    for (int i = 0; i < rank && same; i++) {
        same = array->shape[i] == dims[i];
    }
    if (!call->failed && !same) {
        mha_py_refuse(call, "shape", "(OsN)", array->array, array->name, mha_py_shape(rank, dims));
    }
}

void *
mha_py_take_numbers(mha_py_call *call, PyObject *value, const char *name, int rank, const npy_intp *dims,
                    const mha_py_array *like)
{
    mha_py_array array = {0};

    mha_py_take(call, value, name, MHA_PY_DENSE, like, &array);
    mha_py_need_shape(call, &array, rank, dims);
    return (void *)(uintptr_t)array.data; /* only read, even if the caller's place for it is not const */
}

/* --- Names ------------------------------------------------------------------------------------ */

PyObject *
mha_py_active_isa(const mha_py_call *call)
{
    return call->state->objects[MHA_PY_ISA_NAMES + mha_isa_active()];
}

PyObject *
mha_py_or_none(const void *array)
{
    return array == NULL ? Py_None : (PyObject *)array;
}
