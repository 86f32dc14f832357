/*
 * py_compare.c: whether arrays hold the same numbers, bit by bit: then what was computed from the ones may stand for
 * what would be computed from the others (caches of a decoder: mha_c/_cache.py, mha_c/torch/memory.py).
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <string.h>

/* The first axis behind which the numbers of both lie one after another. */
static int
first_dense_axis(const mha_py_array *a, const mha_py_array *b)
{
    npy_intp count = 1;
    int axis = a->rank;

    while (axis > 0 && a->stride[axis - 1] == count && b->stride[axis - 1] == count) {
        axis--;
        count *= a->shape[axis];
    }
    return axis;
}

/* The rows from `axis` on; those from `dense` on are compared at once. */
static int
same_rows(const mha_py_array *a, const mha_py_array *b, int axis, int dense, const char *from_a, const char *from_b)
{
    const ptrdiff_t itemsize = (ptrdiff_t)mha_py_itemsize(a->type);

    if (axis == dense || axis == MHA_PY_MAX_RANK) {
        size_t size = (size_t)itemsize;

        for (int i = axis; i < a->rank; i++) {
            size *= (size_t)a->shape[i];
        }
        return from_a == from_b || memcmp(from_a, from_b, size) == 0;
    }
    for (npy_intp i = 0; i < a->shape[axis]; i++) {
        if (!same_rows(a, b, axis + 1, dense, from_a + i * a->stride[axis] * itemsize,
                       from_b + i * b->stride[axis] * itemsize)) {
            return 0;
        }
    }
    return 1;
}

static int
take(PyObject *module, mha_py_array *array, PyObject *value, const char *name)
{
    if (mha_py_take(array, value, name, MHA_PY_ROWS, NULL) < 0) {
        return -1;
    }
    if (array->rank < 1 || array->rank > MHA_PY_MAX_RANK) {
        return mha_py_shape_error(module, "%s has %d axes, expected 1 to %d", name, array->rank, MHA_PY_MAX_RANK);
    }
    return 0;
}

static int
same_numbers(const mha_py_array *a, const mha_py_array *b)
{
    double count = 1;
    PyThreadState *saved;
    int same;

    if (a->type != b->type || a->rank != b->rank) {
        return 0;
    }
    for (int i = 0; i < a->rank; i++) {
        if (a->shape[i] != b->shape[i]) {
            return 0;
        }
        count *= (double)a->shape[i];
    }
    if (count == 0) {
        return 1;
    }
    saved = mha_py_detach(count);
    same = same_rows(a, b, 0, first_dense_axis(a, b), a->data, b->data);
    mha_py_attach(saved);
    return same;
}

/* 1 or 0; -1 with an exception. */
static int
same_pair(PyObject *module, PyObject *first, PyObject *second)
{
    mha_py_views views = {0};
    mha_py_array a = {0}, b = {0};
    int same = -1;

    if (first == Py_None || second == Py_None) {
        return first == second;
    }
    first = mha_py_view_tensor(module, first, &views);
    second = first == NULL ? NULL : mha_py_view_tensor(module, second, &views);
    if (second != NULL && take(module, &a, first, "first") == 0 && take(module, &b, second, "second") == 0) {
        same = same_numbers(&a, &b);
    }
    mha_py_drop(&a);
    mha_py_drop(&b);
    mha_py_drop_views(&views);
    return same;
}

PyObject *
py_same_numbers(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PyObject *values[2];
    int same = 1;

    if (mha_py_arguments("same_numbers", args, n_args, 2, 2, values) < 0) {
        return NULL;
    }
    for (int i = 0; i < 2; i++) {
        if (!PyTuple_Check(values[i])) {
            mha_py_type_error(values[i], i == 0 ? "first" : "second", "a tuple of arrays");
            return NULL;
        }
    }
    if (PyTuple_Size(values[0]) != PyTuple_Size(values[1])) {
        Py_RETURN_FALSE;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(values[0]) && same == 1; i++) {
        same = same_pair(module, PyTuple_GetItem(values[0], i), PyTuple_GetItem(values[1], i));
    }
    return same < 0 ? NULL : PyBool_FromLong(same);
}
