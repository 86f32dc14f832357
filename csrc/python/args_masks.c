/*
 * args_masks.c: what restricts the keys: keep_mask and bias, which broadcast over the scores, and valid_lens.
 *
 * A mask of rank 2 means (Q, K), the rank of the scores means all axes; any other rank is refused, because guessing
 * between "one per batch item" and "one per head" gives silently wrong answers.  Lengths are int64, as a private
 * snapshot: the copy is what the core reads and clamps, so neither another thread nor a lying array can move a loop
 * bound during the call.  Python decides what may be given for lengths (to_lengths in _arguments/).
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <string.h>

/* --- Masks --------------------------------------------------------------------------------- */

void
mha_py_take_mask(mha_py_call *call, PyObject *value, const char *name, const mha_py_array *like, mha_py_array *array)
{
    PyObject *const mask = !call->failed && mha_py_given(value) ? mha_py_viewed(call, value) : NULL;
    int is_bool;

    if (mask == NULL) {
        return; /* the caller zeroed the struct */
    }
    is_bool = PyArray_Check(mask) && PyArray_TYPE((PyArrayObject *)mask) == NPY_BOOL;
    if (is_bool && like != NULL) {
        mha_py_refuse(call, "bool_bias", "(s)", name);
    } else if (!is_bool && like == NULL) {
        mha_py_refuse(call, "mask_kind", "(Os)", mask, name);
    } else if (is_bool) {
        mha_py_lay_out(call, (PyArrayObject *)mask, name, MHA_PY_LOOSE, array);
    } else {
        mha_py_take(call, mask, name, MHA_PY_LOOSE, like, array);
    }
}

mha_mask
mha_py_broadcast(mha_py_call *call, const mha_py_array *array, int rank, const npy_intp *scores)
{
    ptrdiff_t stride[4] = {0, 0, 0, 0}; /* batch, head, query, key */
    int fits = array->rank == 2 || array->rank == rank;

    if (call->failed || array->array == NULL) {
        return (mha_mask){.data = NULL};
    }
    for (int i = 0; i < array->rank && fits; i++) {
        /* Without a heads axis, axis 0 of a rank-3 mask is the batch. */
        const int where = array->rank == 3 && i == 0 ? 0 : 4 - array->rank + i;

        fits = array->shape[i] == 1 || array->shape[i] == scores[rank - array->rank + i];
        stride[where] = array->shape[i] == 1 ? 0 : array->stride[i];
    }
    if (!fits) {
        mha_py_refuse(call, "mask", "(OsN)", array->array, array->name, mha_py_shape(rank, scores));
    }
    return (mha_mask){array->data, stride[0], stride[1], stride[2], stride[3]};
}

/* So many queries at a time: NumPy's own copy of a transposed array takes as long as several calls. */
#define COPY_QUERIES ((npy_intp)32)
#define COPY_MATRIX(type) \
    static void copy_##type(const void *from, ptrdiff_t query_stride, ptrdiff_t key_stride, npy_intp queries, \
                            npy_intp keys, void *to) \
    { \
        for (npy_intp first = 0; first < queries; first += COPY_QUERIES) { \
            for (npy_intp j = 0; j < keys; j++) { \
                for (npy_intp i = first; i < first + COPY_QUERIES && i < queries; i++) { \
                    ((type *)to)[i * keys + j] = ((const type *)from)[j * key_stride + i * query_stride]; \
                } \
            } \
        } \
    }
COPY_MATRIX(uint8_t)
COPY_MATRIX(float)
COPY_MATRIX(double)

PyArrayObject *
mha_py_copy_mask(mha_py_call *call, const mha_py_scores *scores, int type, mha_mask *mask)
{
    const npy_intp *shape = scores->shape, *matrix_shape = shape + scores->rank - 2;
    const npy_intp dims[4] = {mask->batch_stride != 0 ? shape[0] : 1, mask->head_stride != 0 ? shape[1] : 1,
                              mask->query_stride != 0 ? matrix_shape[0] : 1,
                              mask->key_stride != 0 ? matrix_shape[1] : 1};
    const ptrdiff_t itemsize = (ptrdiff_t)mha_py_itemsize(type), matrix = dims[2] * dims[3];

    if (call->failed || mask->data == NULL) {
        return NULL;
    }
    PyArrayObject *const copy = mha_py_new(call, "a copy of a mask", 4, dims, type);
    char *const to = mha_py_data(copy);
    for (npy_intp i = 0; i < dims[0] * dims[1] && matrix > 0 && to != NULL; i++) {
        const ptrdiff_t at = i / dims[1] * mask->batch_stride + i % dims[1] * mask->head_stride;
        const char *from = (const char *)mask->data + at * itemsize;

        if (mask->key_stride == 1 || dims[3] == 1) {
            mha_py_copy_rows(to + i * matrix * itemsize, from, dims[2], dims[3] * itemsize,
                             mask->query_stride * itemsize);
            continue;
        }
        (itemsize == 1 ? copy_uint8_t
         : itemsize == 4
             ? copy_float
             : copy_double)(from, mask->query_stride, mask->key_stride, dims[2], dims[3], to + i * matrix * itemsize);
    }
    *mask = (mha_mask){to, dims[0] > 1 ? dims[1] * matrix : 0, dims[1] > 1 ? matrix : 0, dims[2] > 1 ? dims[3] : 0,
                       dims[3] > 1 ? 1 : 0};
    return copy;
}

mha_mask
mha_py_place_mask(mha_py_call *call, const mha_py_array *array, const mha_py_scores *scores)
{
    const npy_intp *matrix = scores->shape + scores->rank - 2;
    mha_mask mask = mha_py_broadcast(call, array, scores->rank, scores->shape);

    if (mask.data != NULL && mask.query_stride == 1 && mask.key_stride != 0 && matrix[0] > 0 && matrix[1] > 0) {
        (void)mha_py_copy_mask(call, scores, array->type, &mask);
    }
    return mask;
}

mha_mask_result
mha_py_mask_gradient(mha_py_call *call, const mha_py_array *gradient, const mha_py_scores *scores)
{
    const mha_mask strides = mha_py_broadcast(call, gradient, scores->rank, scores->shape);

    return (mha_mask_result){mha_py_numbers(gradient), strides.batch_stride, strides.head_stride, strides.query_stride,
                             strides.key_stride};
}

/* --- Lengths --------------------------------------------------------------------------------- */

static PyArrayObject *
snapshot(mha_py_call *call, PyArrayObject *array)
{
    const int flags = NPY_ARRAY_CARRAY | NPY_ARRAY_ENSURECOPY | NPY_ARRAY_ENSUREARRAY;
    PyArray_Descr *native;
    PyObject *lengths;

    if (PyArray_ISCARRAY_RO(array)) { /* what nearly every caller passes, so without the casting machinery */
        lengths = PyArray_EMPTY(PyArray_NDIM(array), PyArray_DIMS(array), NPY_INT64, 0);
        if (lengths != NULL) {
            memcpy(PyArray_DATA((PyArrayObject *)lengths), PyArray_DATA(array),
                   (size_t)PyArray_SIZE((PyArrayObject *)lengths) * sizeof(int64_t));
        }
    } else {
        native = PyArray_DescrFromType(NPY_INT64);
        lengths = native == NULL ? NULL : PyArray_FromArray(array, native, flags);
    }
    return (PyArrayObject *)mha_py_own(call, lengths);
}

/*
 * Lengths that are allowed, and most often a mistake: one below 0, which counts as 0; and a mask of 0 and 1 for each
 * key, as tokenizers give it, where there are as many queries as keys.  core_refusals.py warns, once a process.
 */
static void
warn_of_odd(mha_py_call *call, const int64_t *lengths, npy_intp n, int may_be_mask)
{
    static int warned_of_negative, warned_of_mask; /* a race warns twice */
    int64_t least = 0, most = 0;

    for (npy_intp i = 0; i < n; i++) {
        least = lengths[i] < least ? lengths[i] : least;
        most = lengths[i] > most ? lengths[i] : most;
    }
    if (least < 0 && !warned_of_negative) {
        warned_of_negative = 1;
        Py_XDECREF(mha_py_ask(call, "negative_length", "(L)", (long long)least));
    }
    if (may_be_mask && least == 0 && most == 1 && !warned_of_mask) {
        warned_of_mask = 1;
        Py_XDECREF(mha_py_ask(call, "mask_as_lengths", "()"));
    }
}

void
mha_py_take_lengths(mha_py_call *call, PyObject *value, npy_intp batch, npy_intp queries, npy_intp keys,
                    mha_py_lengths *lengths)
{
    PyArrayObject *array = (PyArrayObject *)(!call->failed && mha_py_given(value) ? mha_py_viewed(call, value) : NULL);
    int rank;

    if (array == NULL) {
        return; /* all keys; the caller zeroed the struct */
    }
    if (!PyArray_Check((PyObject *)array) || !PyArray_EquivTypenums(PyArray_TYPE(array), NPY_INT64)) {
        mha_py_type_error(call, value, "valid_lens", "an array of int64");
        return;
    }
    array = snapshot(call, array);
    if (array == NULL) {
        return;
    }
    rank = PyArray_NDIM(array);
    if ((rank != 1 && rank != 2) || PyArray_DIM(array, 0) != batch || (rank == 2 && PyArray_DIM(array, 1) != queries)) {
        mha_py_refuse(call, "lengths", "(Onn)", array, (Py_ssize_t)batch, (Py_ssize_t)queries);
        return;
    }
    lengths->array = array;
    lengths->data = PyArray_DATA(array);
    lengths->per_batch = rank == 1 ? 1 : (size_t)queries;
    warn_of_odd(call, lengths->data, PyArray_SIZE(array), rank == 2 && queries == keys && keys > 1);
}

void
mha_py_see_lengths(const mha_py_lengths *lengths, mha_visibility *visible)
{
    visible->valid_lens = lengths->data;
    visible->lens_per_batch = lengths->per_batch;
}
