/*
 * py_system.c: instruction sets, threads, and exp and tanh as the active kernels compute them
 * (hooks for tests).
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <limits.h>

/* --- exp, tanh -------------------------------------------------------------------------- */

/* fn over all numbers of an array of any shape. */
static PyObject *
each_number(PyObject *module, PyObject *value, void (*fn)(mha_dtype, size_t, const void *, void *))
{
    npy_intp all[] = {-1};
    PyArray_Dims flat = {all, 1};
    PyArrayObject *x, *y = NULL;
    mha_py_array numbers = {0};
    PyObject *result = NULL;
    mha_py_call call;

    mha_py_begin(&call, module, "exp and tanh");
    x = mha_py_floats(&call, value, "x", NULL);
    if (x != NULL) {
        PyArrayObject *row = (PyArrayObject *)mha_py_own(&call, PyArray_Newshape(x, &flat, NPY_CORDER));

        if (row != NULL && mha_py_lay_out(&call, row, "x", MHA_PY_DENSE, &numbers) == 0) {
            y = mha_py_new(&call, "the output", PyArray_NDIM(x), PyArray_DIMS(x), numbers.type);
        }
    }
    if (y != NULL) {
        const size_t n = (size_t)numbers.shape[0];

        mha_py_detach(&call, 8 * (double)n);
        fn(mha_py_dtype(numbers.type), n, numbers.data, PyArray_DATA(y));
        result = mha_py_finish(&call, MHA_OK, y);
    }
    return mha_py_end(&call, result);
}

PyObject *
py_exp(PyObject *module, PyObject *value)
{
    return each_number(module, value, mha_exp);
}

PyObject *
py_tanh(PyObject *module, PyObject *value)
{
    return each_number(module, value, mha_tanh);
}

/* --- Instruction sets ------------------------------------------------------------------------ */

PyObject *
py_isas(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{
    PyObject *list = PyList_New(0), *result;

    for (int i = 0; i < MHA_N_ISAS && list != NULL; i++) {
        PyObject *pair;

        if (!mha_isa_compiled((mha_isa)i)) {
            continue;
        }
        pair = Py_BuildValue("(sO)", mha_isa_name((mha_isa)i), mha_isa_available((mha_isa)i) ? Py_True : Py_False);
        if (pair == NULL || PyList_Append(list, pair) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(pair);
    }
    result = list == NULL ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return result;
}

PyObject *
py_isa(PyObject *module, PyObject *Py_UNUSED(nothing))
{
    const mha_py_state *state = PyModule_GetState(module);

    Py_INCREF(state->kept[MHA_PY_WORD_ISA]);
    return state->kept[MHA_PY_WORD_ISA];
}

int
mha_py_select_isa(mha_py_state *state, mha_isa isa)
{
    PyObject *name = PyUnicode_InternFromString(mha_isa_name(isa)), *before = state->kept[MHA_PY_WORD_ISA];

    if (name == NULL || mha_py_check(mha_isa_select(isa), "set_isa") < 0) {
        Py_XDECREF(name);
        return -1;
    }
    state->kept[MHA_PY_WORD_ISA] = name;
    Py_XDECREF(before);
    return 0;
}

PyObject *
py_set_isa(PyObject *module, PyObject *name)
{
    for (int i = 0; i < MHA_N_ISAS && PyUnicode_Check(name); i++) {
        if (PyUnicode_CompareWithASCIIString(name, mha_isa_name((mha_isa)i)) == 0 && mha_isa_available((mha_isa)i)) {
            if (mha_py_select_isa(PyModule_GetState(module), (mha_isa)i) < 0) {
                return NULL;
            }
            Py_RETURN_NONE;
        }
    }
    mha_py_refuse("isa", "(O)", name);
    return NULL;
}

/* --- Threads ------------------------------------------------------------------------------------- */

PyObject *
py_get_num_threads(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{
    return PyLong_FromUnsignedLong(mha_threads_get());
}

PyObject *
py_set_num_threads(PyObject *Py_UNUSED(module), PyObject *value)
{
    PyObject *n = mha_py_ask("threads", "(Oi)", value, INT_MAX);

    if (n == NULL) {
        return NULL;
    }
    mha_threads_set((unsigned)PyLong_AsUnsignedLong(n));
    Py_DECREF(n);
    Py_RETURN_NONE;
}

PyObject *
py_available_threads(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{
    return PyLong_FromUnsignedLong(mha_threads_available());
}
