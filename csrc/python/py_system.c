/*
 * py_system.c: instruction sets, caches, threads, and exp and tanh as the active kernels compute them
 * (hooks for tests).
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <limits.h>

/* --- exp, tanh -------------------------------------------------------------------------- */

/* fn over all numbers of an array of any shape. */
static PyObject *
each_number(mha_py_call *call, PyObject *value, void (*fn)(mha_dtype, size_t, const void *, void *))
{
    npy_intp all[] = {-1};
    PyArray_Dims flat = {all, 1};
    PyArrayObject *x = mha_py_floats(call, value, "x", NULL), *y, *row;
    mha_py_array numbers = {0};

    if (x == NULL) {
        return NULL;
    }
    row = (PyArrayObject *)mha_py_own(call, PyArray_Newshape(x, &flat, NPY_CORDER));
    mha_py_lay_out(call, row, "x", MHA_PY_DENSE, &numbers);
    y = mha_py_new(call, "the output", PyArray_NDIM(x), PyArray_DIMS(x), numbers.type);
    if (y == NULL) {
        return NULL;
    }
    mha_py_detach(call, 8 * (double)numbers.shape[0]);
    fn(mha_py_dtype(numbers.type), (size_t)numbers.shape[0], numbers.data, PyArray_DATA(y));
    return mha_py_finish(call, MHA_OK, y);
}

PyObject *
py_exp(mha_py_call *call, PyObject *const *values)
{
    return each_number(call, values[0], mha_exp);
}

PyObject *
py_tanh(mha_py_call *call, PyObject *const *values)
{
    return each_number(call, values[0], mha_tanh);
}

/* --- Instruction sets ------------------------------------------------------------------------ */

PyObject *
py_isas(mha_py_call *Py_UNUSED(call), PyObject *const *Py_UNUSED(values))
{
    PyObject *all = PyTuple_New(0);

    for (int i = 0; i < MHA_N_ISAS && all != NULL; i++) {
        if (mha_isa_compiled((mha_isa)i)) {
            PyObject *const before = all, *const available = mha_isa_available((mha_isa)i) ? Py_True : Py_False;
            PyObject *const one = Py_BuildValue("((sO))", mha_isa_name((mha_isa)i), available);

            all = one == NULL ? NULL : PySequence_Concat(before, one);
            Py_XDECREF(one);
            Py_DECREF(before);
        }
    }
    return all;
}

PyObject *
py_isa(mha_py_call *call, PyObject *const *Py_UNUSED(values))
{
    Py_INCREF(call->state->objects[MHA_PY_WORD_ISA]);
    return call->state->objects[MHA_PY_WORD_ISA];
}

void
mha_py_select_isa(mha_py_call *call, mha_isa isa)
{
    mha_py_state *const state = call->state;
    PyObject *name = mha_py_own(call, PyUnicode_InternFromString(mha_isa_name(isa)));
    PyObject *const before = state->objects[MHA_PY_WORD_ISA];

    if (name != NULL) {
        mha_py_check(call, mha_isa_select(isa), "set_isa");
        mha_py_check(call, mha_linear_packed_size(MHA_F32, 1, 1, &state->panel_width[MHA_F32]), "set_isa");
        mha_py_check(call, mha_linear_packed_size(MHA_F64, 1, 1, &state->panel_width[MHA_F64]), "set_isa");
    }
    if (!call->failed) {
        Py_INCREF(name);
        state->objects[MHA_PY_WORD_ISA] = name;
        Py_XDECREF(before);
    }
}

PyObject *
py_set_isa(mha_py_call *call, PyObject *const *values)
{
    PyObject *const name = values[0];

    for (int i = 0; i < MHA_N_ISAS && PyUnicode_Check(name); i++) {
        if (PyUnicode_CompareWithASCIIString(name, mha_isa_name((mha_isa)i)) == 0 && mha_isa_available((mha_isa)i)) {
            mha_py_select_isa(call, (mha_isa)i);
            Py_RETURN_NONE;
        }
    }
    mha_py_refuse(call, "isa", "(O)", name);
    return NULL;
}

/* --- Caches ---------------------------------------------------------------------------------- */

PyObject *
py_caches(mha_py_call *Py_UNUSED(call), PyObject *const *Py_UNUSED(values))
{
    const mha_cache_sizes sizes = mha_caches_active();

    return Py_BuildValue("(nn)", (Py_ssize_t)sizes.first, (Py_ssize_t)sizes.second);
}

PyObject *
py_set_caches(mha_py_call *Py_UNUSED(call), PyObject *const *values)
{
    const mha_cache_sizes sizes = {PyLong_AsSize_t(values[0]), PyLong_AsSize_t(values[1])};

    if (PyErr_Occurred()) {
        return NULL;
    }
    mha_caches_select(sizes);
    Py_RETURN_NONE;
}

/* --- Threads ------------------------------------------------------------------------------------- */

PyObject *
py_get_num_threads(mha_py_call *Py_UNUSED(call), PyObject *const *Py_UNUSED(values))
{
    return PyLong_FromUnsignedLong(mha_threads_get());
}

PyObject *
py_set_num_threads(mha_py_call *call, PyObject *const *values)
{
    PyObject *const n = mha_py_ask(call, "threads", "(Oi)", values[0], INT_MAX);

    if (n == NULL) {
        return NULL;
    }
    mha_threads_set((unsigned)PyLong_AsUnsignedLong(n));
    Py_DECREF(n);
    Py_RETURN_NONE;
}

PyObject *
py_limit_own_threads(mha_py_call *Py_UNUSED(call), PyObject *const *values)
{
    const unsigned long n = PyLong_AsUnsignedLong(values[0]);

    if (PyErr_Occurred()) {
        return NULL;
    }
    mha_threads_limit_own(n < INT_MAX ? (unsigned)n : INT_MAX);
    Py_RETURN_NONE;
}

PyObject *
py_available_threads(mha_py_call *Py_UNUSED(call), PyObject *const *Py_UNUSED(values))
{
    return PyLong_FromUnsignedLong(mha_threads_available());
}
