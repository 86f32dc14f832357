/*
 * results.c: what a call gives: arrays of its own, results as arrays or tensors, and the answer made of them.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <stdint.h>
#include <string.h>

/* The bytes of an array; the call fails if they are more than any memory has. */
static size_t
count_bytes(mha_py_call *call, const char *name, int rank, const npy_intp *dims, int type)
{
    double most = (double)mha_py_itemsize(type); /* if no axis were empty; does not wrap, and needs no division */
    size_t bytes = mha_py_itemsize(type);

    for (int i = 0; i < rank && !call->failed; i++) {
        most *= dims[i] > 0 ? (double)dims[i] : 1;
        bytes *= (size_t)dims[i];
    }
    if (!call->failed && most > (double)NPY_MAX_INTP) {
        mha_py_refuse(call, "size", "(sN)", name, mha_py_shape(rank, dims));
    }
    return bytes;
}

PyArrayObject *
mha_py_new(mha_py_call *call, const char *name, int rank, const npy_intp *dims, int type)
{
    const size_t bytes = count_bytes(call, name, rank, dims, type);

    if (call->failed) {
        return NULL;
    }
    return (PyArrayObject *)mha_py_own(call, call->has_tensors && mha_py_is_large(bytes)
                                                 ? mha_py_new_on_line(rank, dims, NULL, type, bytes)
                                                 : PyArray_EMPTY(rank, (npy_intp *)dims, type, 0));
}

void *
mha_py_data(PyArrayObject *array)
{
    return array == NULL ? NULL : PyArray_DATA(array);
}

void
mha_py_new_strided(mha_py_call *call, const char *name, int rank, const npy_intp *dims, const npy_intp *strides,
                   int type, mha_py_array *result)
{
    const size_t bytes = count_bytes(call, name, rank, dims, type);

    if (call->failed) {
        return;
    }
    *result = (mha_py_array){.name = name, .type = type, .rank = rank};
    for (int i = 0; i < rank && rank <= MHA_PY_MAX_RANK; i++) {
        result->shape[i] = dims[i];
        result->stride[i] = strides[i];
    }
    if (call->has_tensors) {
        result->array = mha_py_own(call, mha_py_new_tensor(call, dims, strides, bytes, result));
    } else { /* strides that are not dense are for tensors */
        result->array = mha_py_own(call, PyArray_EMPTY(rank, (npy_intp *)dims, type, 0));
        result->data = mha_py_data((PyArrayObject *)result->array);
    }
}

void
mha_py_new_result(mha_py_call *call, const char *name, int rank, const npy_intp *dims, int type, mha_py_array *result)
{
    npy_intp strides[MHA_PY_MAX_AXES];
    size_t dense = 1; /* unsigned: may wrap, if the size is refused */

    for (int i = rank - 1; i >= 0; i--) {
        strides[i] = (npy_intp)dense;
        dense *= dims[i] > 0 ? (size_t)dims[i] : 1;
    }
    mha_py_new_strided(call, name, rank, dims, strides, type, result);
}

void *
mha_py_numbers(const mha_py_array *result)
{
    return (void *)(uintptr_t)result->data;
}

double
mha_py_count(const mha_py_array *result)
{
    double count = 1;

    for (int i = 0; i < result->rank; i++) {
        count *= (double)result->shape[i];
    }
    return count;
}

void
mha_py_clear(const mha_py_array *result)
{
    if (result->array != NULL) {
        memset(mha_py_numbers(result), 0, (size_t)mha_py_count(result) * mha_py_itemsize(result->type));
    }
}

mha_result
mha_py_result(const mha_py_array *result)
{
    const mha_operand as = result->array == NULL ? (mha_operand){NULL, 0, 0, 0} : mha_py_operand(result);

    return (mha_result){mha_py_numbers(result), as.batch_stride, as.head_stride, as.row_stride};
}

PyObject *
mha_py_answer(const mha_py_call *call, const mha_py_array *result)
{
    if (call->failed) {
        return NULL;
    }
    Py_INCREF(mha_py_or_none(result->array));
    return mha_py_or_none(result->array);
}

PyObject *
mha_py_answers(const mha_py_call *call, const mha_py_array *results, int n)
{
    PyObject *tuple = call->failed ? NULL : PyTuple_New(n);

    for (int i = 0; i < n && tuple != NULL; i++) {
        if (PyTuple_SetItem(tuple, i, mha_py_answer(call, &results[i])) < 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

PyObject *
mha_py_finish(mha_py_call *call, mha_status status, const mha_py_array *result)
{
    mha_py_attach(call, status);
    return mha_py_answer(call, result);
}
