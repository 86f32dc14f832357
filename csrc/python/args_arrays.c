/*
 * args_arrays.c: borrows ndarrays as (pointer, shape, strides in numbers), copying only what the core cannot read in
 * place; makes outputs.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

size_t
mha_py_itemsize(int type)
{
    return type == NPY_FLOAT64 ? 8 : type == NPY_FLOAT32 ? 4 : 1;
}

mha_dtype
mha_py_dtype(int type)
{
    return type == NPY_FLOAT64 ? MHA_F64 : MHA_F32;
}

/* --- Taking arrays ------------------------------------------------------------------- */

PyArrayObject *
mha_py_floats(mha_py_call *call, PyObject *value, const char *name, const mha_py_array *like)
{
    PyArrayObject *array = (PyArrayObject *)mha_py_viewed(call, value);

    if (array == NULL) {
        return NULL;
    }
    if (!PyArray_Check((PyObject *)array)) {
        mha_py_type_error(value, name, "a NumPy array");
        return NULL;
    }
    if (like != NULL ? PyArray_TYPE(array) != like->type
                     : PyArray_TYPE(array) != NPY_FLOAT32 && PyArray_TYPE(array) != NPY_FLOAT64) {
        mha_py_refuse("dtype", "(OsOz)", array, name, like == NULL ? Py_None : mha_py_viewed(call, like->array),
                      like == NULL ? NULL : like->name);
        return NULL;
    }
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

/* The same numbers, dense, aligned and native. */
static PyArrayObject *
dense(mha_py_call *call, PyArrayObject *array, int type)
{
    const int flags = NPY_ARRAY_CARRAY_RO | NPY_ARRAY_NOTSWAPPED | NPY_ARRAY_ENSUREARRAY;
    PyArray_Descr *native = PyArray_DescrFromType(type);

    return native == NULL ? NULL : (PyArrayObject *)mha_py_own(call, PyArray_FromArray(array, native, flags));
}

int
mha_py_lay_out(mha_py_call *call, PyArrayObject *value, const char *name, mha_py_layout layout, mha_py_array *array)
{
    const int type = PyArray_TYPE(value), rank = PyArray_NDIM(value);
    const npy_intp itemsize = (npy_intp)mha_py_itemsize(type);
    size_t stride = 1; /* of a dense array; unsigned: may wrap for arrays without elements, harmlessly */

    array->name = name;
    array->type = type;
    array->rank = rank;
    value = rank > MHA_PY_MAX_RANK || fits(value, itemsize, layout) ? value : dense(call, value, type);
    array->array = (PyObject *)value;
    if (value == NULL) {
        return -1;
    }
    array->data = PyArray_DATA(value);
    for (int i = rank <= MHA_PY_MAX_RANK ? rank - 1 : -1; i >= 0; i--) {
        const npy_intp length = PyArray_DIM(value, i);

        array->shape[i] = length;
        array->stride[i] = length > 1 ? PyArray_STRIDE(value, i) / itemsize : (ptrdiff_t)stride;
        stride = (size_t)array->stride[i] * (size_t)length;
    }
    return 0;
}

int
mha_py_take(mha_py_call *call, PyObject *value, const char *name, mha_py_layout layout, const mha_py_array *like,
            mha_py_array *array)
{
    PyArrayObject *floats;

    if (mha_py_take_tensor(call, value, name, layout, like, array)) {
        return 0;
    }
    floats = mha_py_floats(call, value, name, like);
    return floats == NULL ? -1 : mha_py_lay_out(call, floats, name, layout, array);
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

/* --- Shapes ------------------------------------------------------------------------------------ */

int
mha_py_need_rank(const mha_py_array *array, int rank, const char *expected)
{
    return array->rank == rank ? 0 : mha_py_refuse("rank", "(Osis)", array->array, array->name, rank, expected);
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

int
mha_py_need_shape(const mha_py_array *array, int rank, const npy_intp *dims)
{
    int same = array->rank == rank;

    for (int i = 0; i < rank && same; i++) {
        same = array->shape[i] == dims[i];
    }
    return same ? 0 : mha_py_refuse("shape", "(OsN)", array->array, array->name, mha_py_shape(rank, dims));
}

/* --- Outputs ---------------------------------------------------------------------------------- */

static PyArrayObject *
new_array(mha_py_call *call, const char *name, int rank, const npy_intp *dims, int type, int zeroed)
{
    npy_intp room = NPY_MAX_INTP / (npy_intp)mha_py_itemsize(type);
    PyObject *array = NULL;

    if (call->failed) {
        return NULL;
    }
    for (int i = 0; i < rank && room > 0; i++) {
        room = dims[i] == 0 ? room : room / dims[i];
    }
    if (room == 0) {
        mha_py_refuse("size", "(sN)", name, mha_py_shape(rank, dims));
    } else {
        array = zeroed ? PyArray_ZEROS(rank, (npy_intp *)dims, type, 0)
                       : PyArray_EMPTY(rank, (npy_intp *)dims, type, 0);
    }
    call->failed = array == NULL;
    return (PyArrayObject *)mha_py_own(call, array);
}

PyArrayObject *
mha_py_new(mha_py_call *call, const char *name, int rank, const npy_intp *dims, int type)
{
    return new_array(call, name, rank, dims, type, 0);
}

PyArrayObject *
mha_py_zeros(mha_py_call *call, const char *name, int rank, const npy_intp *dims, int type)
{
    return new_array(call, name, rank, dims, type, 1);
}

void *
mha_py_data(PyArrayObject *array)
{
    return array == NULL ? NULL : PyArray_DATA(array);
}

PyObject *
mha_py_or_none(const void *array)
{
    return array == NULL ? Py_None : (PyObject *)array;
}

mha_result
mha_py_result(PyArrayObject *array)
{
    mha_result result = {NULL, 0, 0, 0};

    if (array != NULL) {
        const int rank = PyArray_NDIM(array);

        result.data = PyArray_DATA(array);
        result.row_stride = PyArray_DIM(array, rank - 1);
        result.head_stride = PyArray_DIM(array, rank - 2) * result.row_stride;
        result.batch_stride = rank == 4 ? PyArray_DIM(array, 1) * result.head_stride : result.head_stride;
    }
    return result;
}
