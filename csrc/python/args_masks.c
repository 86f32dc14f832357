/*
 * args_masks.c: keep_mask and bias, which broadcast over the scores.  Rank 2 means (Q, K), the
 * rank of the scores means all axes; any other rank is refused, with the axis to add, because
 * guessing between "one per batch item" and "one per head" gives silently wrong answers.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

/* A bool keep_mask as it is; anything else is told how to become one. */
static int
take_bools(mha_py_array *array, PyObject *value, const char *name)
{
    PyArrayObject *bools = (PyArrayObject *)value;

    if (!PyArray_Check(value)) {
        return mha_py_type_error(value, name, "a NumPy array of bool");
    }
    if (PyArray_TYPE(bools) != NPY_BOOL) {
        PyErr_Format(PyExc_TypeError,
                     "%s has dtype %S, expected bool (True = may attend): use "
                     "%s.astype(bool), or pass numbers to be added to the scores as bias",
                     name, PyArray_DESCR(bools), name);
        return -1;
    }
    return mha_py_take_as(array, bools, name, NPY_BOOL, MHA_PY_LOOSE);
}

int
mha_py_take_mask(PyObject *value, const char *name, const mha_py_array *like, mha_py_array *array)
{
    if (like == NULL) {
        return take_bools(array, value, name);
    }
    if (PyArray_Check(value) && PyArray_TYPE((PyArrayObject *)value) == NPY_BOOL) {
        PyErr_Format(PyExc_TypeError,
                     "%s has dtype bool, but a bias is numbers added to the scores: pass a "
                     "mask (True = may attend) as keep_mask",
                     name);
        return -1;
    }
    return mha_py_take(array, value, name, MHA_PY_LOOSE, like);
}

/* What a user with a mask of the wrong rank most likely wants to write. */
static PyObject *
rank_hint(const char *name, int mask_rank, int score_rank)
{
    if (mask_rank == 1) {
        return PyUnicode_FromFormat("add the query axis: %s[None, :] for one value per key", name);
    }
    if (mask_rank == 3 && score_rank == 4) {
        return PyUnicode_FromFormat("add an axis: %s[:, None] for one per batch item, "
                                    "%s[None] for one per head",
                                    name, name);
    }
    if (mask_rank == 4 && score_rank == 3) {
        return PyUnicode_FromFormat("the inputs have no heads axis: drop it, %s[:, 0]", name);
    }
    return PyUnicode_FromString("no other rank is broadcast");
}

static int
say_rank(PyObject *module, const mha_py_array *array, int rank, const npy_intp *scores)
{
    PyObject *own = mha_py_shape(array->rank, PyArray_DIMS(array->array));
    PyObject *full = mha_py_shape(rank, scores);
    PyObject *hint = rank_hint(array->name, array->rank, rank);

    if (own != NULL && full != NULL && hint != NULL) {
        mha_py_shape_error(module,
                           "%s has shape %S (rank %d), expected rank 2 (Q, K) or rank %d, "
                           "that of the scores %s = %S: %U",
                           array->name, own, array->rank, rank, rank == 4 ? "(B, H, Q, K)" : "(B, Q, K)", full, hint);
    }
    Py_XDECREF(hint);
    Py_XDECREF(full);
    Py_XDECREF(own);
    return -1;
}

static int
say_axis(PyObject *module, const mha_py_array *array, int axis, int rank, const npy_intp *scores)
{
    const npy_intp expected = scores[rank - array->rank + axis];
    PyObject *own = mha_py_shape(array->rank, array->shape);
    PyObject *full = mha_py_shape(rank, scores);

    if (own != NULL && full != NULL) {
        mha_py_shape_error(module,
                           "%s has shape %S, which does not broadcast to the scores %s = %S: "
                           "axis %d is %zd, expected %zd%s",
                           array->name, own, rank == 4 ? "(B, H, Q, K)" : "(B, Q, K)", full, axis,
                           (Py_ssize_t)array->shape[axis], (Py_ssize_t)expected, expected == 1 ? "" : " or 1");
    }
    Py_XDECREF(full);
    Py_XDECREF(own);
    return -1;
}

int
mha_py_broadcast(PyObject *module, const mha_py_array *array, int rank, const npy_intp *scores, mha_mask *mask_ret)
{
    ptrdiff_t stride[4] = {0, 0, 0, 0}; /* batch, head, query, key */

    if (array->rank != 2 && array->rank != rank) {
        return say_rank(module, array, rank, scores);
    }
    for (int i = 0; i < array->rank; i++) {
        const npy_intp expected = scores[rank - array->rank + i];

        if (array->shape[i] != 1 && array->shape[i] != expected) {
            return say_axis(module, array, i, rank, scores);
        }
        /* Without a heads axis, axis 0 of a rank-3 mask is the batch. */
        const int where = array->rank == 3 && i == 0 ? 0 : 4 - array->rank + i;
        stride[where] = array->shape[i] == 1 ? 0 : array->stride[i];
    }
    mask_ret->data = array->data;
    mask_ret->batch_stride = stride[0];
    mask_ret->head_stride = stride[1];
    mask_ret->query_stride = stride[2];
    mask_ret->key_stride = stride[3];
    return 0;
}
