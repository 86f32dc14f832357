/*
 * py_compare.c: whether two arrays hold the same numbers, bit by bit: then what was computed from one may stand for
 * what would be computed from the other (caches of a decoder: mha_c/_decoder/caches.py, mha_c/torch/_decoder/).
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <string.h>

/* Of the last n_axes axes; rows of the last one lie one number after another. */
static int
same_rows(const mha_py_array *a, const mha_py_array *b, int n_axes, const char *from_a, const char *from_b)
{
    const ptrdiff_t itemsize = (ptrdiff_t)mha_py_itemsize(a->type);
    const int axis = a->rank - n_axes;
    int same = 1;

    if (n_axes == 1) {
        return from_a == from_b || memcmp(from_a, from_b, (size_t)(a->shape[axis] * itemsize)) == 0;
    }
    for (npy_intp i = 0; i < a->shape[axis] && same; i++) {
        same = same_rows(a, b, n_axes - 1, from_a + i * a->stride[axis] * itemsize,
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

PyObject *
py_same_array(mha_py_call *call, PyObject *const *values)
{
    mha_py_array a = {0}, b = {0};
    double count = 1;
    int same;

    if (values[0] == values[1] || values[0] == Py_None || values[1] == Py_None) {
        return PyBool_FromLong(values[0] == values[1]);
    }
    take(call, values[0], "first", &a);
    take(call, values[1], "second", &b);
    same = !call->failed && a.type == b.type && a.rank == b.rank;
    for (int i = 0; i < a.rank && same; i++) {
        same = a.shape[i] == b.shape[i];
        count *= (double)a.shape[i];
    }
    if (same) {
        mha_py_detach(call, count);
        same = same_rows(&a, &b, a.rank, a.data, b.data);
        mha_py_attach(call, MHA_OK);
    }
    return PyBool_FromLong(same);
}
