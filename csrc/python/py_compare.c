/*
 * py_compare.c: whether arrays hold the same numbers, bit by bit: then what was computed from the ones may stand for
 * what would be computed from the others (caches of a decoder: mha_c/_decoder/caches.py, mha_c/torch/_decoder/).
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <string.h>

/* From `axis` on; rows of the last axis lie one number after another. */
static int
same_rows(const mha_py_array *a, const mha_py_array *b, int axis, const char *from_a, const char *from_b)
{
    const ptrdiff_t itemsize = (ptrdiff_t)mha_py_itemsize(a->type);
    int same = 1;

    if (axis == a->rank - 1) {
        return from_a == from_b || memcmp(from_a, from_b, (size_t)(a->shape[axis] * itemsize)) == 0;
    }
    for (npy_intp i = 0; i < a->shape[axis] && same; i++) {
        same = same_rows(a, b, axis + 1, from_a + i * a->stride[axis] * itemsize,
                         from_b + i * b->stride[axis] * itemsize);
    }
    return same;
}

static void
take(mha_py_call *call, PyObject *value, const char *name, mha_py_array *array)
{
    mha_py_take(call, value, name, MHA_PY_ROWS, NULL, array);
    if (!call->failed && (array->rank < 1 || array->rank > MHA_PY_MAX_RANK)) {
        mha_py_refuse(call, "axes", "(Osi)", array->array, name, MHA_PY_MAX_RANK);
    }
}

static int
same_pair(mha_py_call *call, PyObject *first, PyObject *second)
{
    const int n_owned = call->n_owned;
    mha_py_array a = {0}, b = {0};
    double count = 1;
    int same;

    if (first == second || first == Py_None || second == Py_None) {
        return first == second;
    }
    take(call, first, "first", &a);
    take(call, second, "second", &b);
    same = !call->failed && a.type == b.type && a.rank == b.rank;
    for (int i = 0; i < a.rank && same; i++) {
        same = a.shape[i] == b.shape[i];
        count *= (double)a.shape[i];
    }
    if (same) {
        mha_py_detach(call, count);
        same = same_rows(&a, &b, 0, a.data, b.data);
        mha_py_attach(call, MHA_OK);
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
            mha_py_type_error(call, values[i], i == 0 ? "first" : "second", "a tuple of arrays");
            return NULL;
        }
    }
    same = PyTuple_Size(values[0]) == PyTuple_Size(values[1]);
    for (Py_ssize_t i = 0; same && i < PyTuple_Size(values[0]); i++) {
        same = same_pair(call, PyTuple_GetItem(values[0], i), PyTuple_GetItem(values[1], i));
    }
    return PyBool_FromLong(same);
}
