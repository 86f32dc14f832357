/*
 * py_compare.c: whether arrays hold the same numbers, bit by bit: then what was computed from the ones may stand for
 * what would be computed from the others (caches of a decoder: mha_c/_decoder/caches.py, mha_c/torch/_decoder/).
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
take(mha_py_call *call, PyObject *value, const char *name, mha_py_array *array)
{
    if (mha_py_take(call, value, name, MHA_PY_ROWS, NULL, array) < 0) {
        return -1;
    }
    return array->rank >= 1 && array->rank <= MHA_PY_MAX_RANK
               ? 0
               : mha_py_refuse("axes", "(Osi)", array->array, name, MHA_PY_MAX_RANK);
}

static int
same_numbers(mha_py_call *call, const mha_py_array *a, const mha_py_array *b)
{
    double count = 1;
    int same = a->type == b->type && a->rank == b->rank;

    for (int i = 0; i < a->rank && same; i++) {
        same = a->shape[i] == b->shape[i];
        count *= (double)a->shape[i];
    }
    if (same && count > 0) {
        mha_py_detach(call, count);
        same = same_rows(a, b, 0, first_dense_axis(a, b), a->data, b->data);
        (void)mha_py_attach(call, MHA_OK);
    }
    return same;
}

/* 1 or 0; -1 with an exception. */
static int
same_pair(mha_py_call *call, PyObject *first, PyObject *second)
{
    const int n_owned = call->n_owned;
    mha_py_array a = {0}, b = {0};
    int same = -1;

    if (first == Py_None || second == Py_None) {
        return first == second;
    }
    if (take(call, first, "first", &a) == 0 && take(call, second, "second", &b) == 0) {
        same = same_numbers(call, &a, &b);
    }
    mha_py_release(call, n_owned);
    return same;
}

PyObject *
py_same_numbers(mha_py_call *call, PyObject *const *values)
{
    int same;

    for (int i = 0; i < 2; i++) {
        if (!PyTuple_Check(values[i])) {
            mha_py_type_error(values[i], i == 0 ? "first" : "second", "a tuple of arrays");
            return NULL;
        }
    }
    same = PyTuple_Size(values[0]) == PyTuple_Size(values[1]);
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_Size(values[0]); i++) {
        same = same_pair(call, PyTuple_GetItem(values[0], i), PyTuple_GetItem(values[1], i));
    }
    return same < 0 ? NULL : PyBool_FromLong(same);
}
