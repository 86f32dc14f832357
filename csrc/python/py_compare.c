/*
 * py_compare.c: whether two arrays hold the same numbers, bit by bit.  If so, what was computed from one may be used
 * for the other (caches of a decoder: mha_c/_decoder/caches.py, mha_c/torch/_decoder/).
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <string.h>

/* Compares arrays of one shape, in pieces: a piece is the last axes, as far as neither array has gaps. */
static int
same_numbers(const mha_py_array *a, const mha_py_array *b)
{
    const ptrdiff_t itemsize = (ptrdiff_t)mha_py_itemsize(a->type);
    npy_intp count = a->shape[a->rank - 1], n_pieces = 1;
    const char *const from_a = a->data, *const from_b = b->data;
    int n_walked = a->rank - 1, same = 1;

    while (n_walked > 0 && a->stride[n_walked - 1] == count && b->stride[n_walked - 1] == count) {
        count *= a->shape[--n_walked];
    }
    for (int axis = 0; axis < n_walked; axis++) {
        n_pieces *= a->shape[axis];
    }
    for (npy_intp piece = 0; piece < n_pieces && same; piece++) {
        ptrdiff_t at_a = 0, at_b = 0;

        for (npy_intp axis = n_walked, rest = piece; axis-- > 0; rest /= a->shape[axis]) {
            at_a += rest % a->shape[axis] * a->stride[axis] * itemsize;
            at_b += rest % a->shape[axis] * b->stride[axis] * itemsize;
        }
        same = from_a + at_a == from_b + at_b || memcmp(from_a + at_a, from_b + at_b, (size_t)(count * itemsize)) == 0;
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
    if (same && count > 0) {
        mha_py_detach(call, count);
        same = same_numbers(&a, &b);
        mha_py_attach(call, MHA_OK);
    }
    return PyBool_FromLong(same);
}
