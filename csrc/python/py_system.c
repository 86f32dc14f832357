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
each_number(PyObject *value, void (*fn)(mha_dtype, size_t, const void *, void *))
{
    PyArrayObject *x = mha_py_floats(value, "x");
    PyArrayObject *dense = NULL, *y = NULL;

    if (x == NULL) {
        return NULL;
    }
    dense = mha_py_dense(x, PyArray_TYPE(x));
    if (dense != NULL) {
        y = (PyArrayObject *)PyArray_EMPTY(PyArray_NDIM(dense), PyArray_DIMS(dense), PyArray_TYPE(dense), 0);
    }
    if (y != NULL) {
        const size_t n = (size_t)PyArray_SIZE(dense);
        const mha_dtype dtype = PyArray_TYPE(dense) == NPY_FLOAT64 ? MHA_F64 : MHA_F32;
        PyThreadState *saved = mha_py_detach(8 * (double)n);

        fn(dtype, n, PyArray_DATA(dense), PyArray_DATA(y));
        mha_py_attach(saved);
    }
    Py_XDECREF((PyObject *)dense);
    Py_DECREF((PyObject *)x);
    return (PyObject *)y;
}

PyObject *
py_exp(PyObject *Py_UNUSED(module), PyObject *value)
{
    return each_number(value, mha_exp);
}

PyObject *
py_tanh(PyObject *Py_UNUSED(module), PyObject *value)
{
    return each_number(value, mha_tanh);
}

/* --- Instruction sets ------------------------------------------------------------------------ */

PyObject *
py_isas(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{    PyObject *list, *result;

    list = PyList_New(0);
    for (int i = 0; i < MHA_N_ISAS && list != NULL; i++) {
        PyObject *pair;

        if (!mha_isa_compiled((mha_isa)i)) {
            continue;
        }
        pair = Py_BuildValue("(sO)", mha_isa_name((mha_isa)i), mha_isa_available((mha_isa)i) ? Py_True : Py_False);
        if (pair == NULL || PyList_Append(list, pair) < 0) {
            Py_DECREF(list);
            list = NULL;
        }
        Py_XDECREF(pair);
    }
    result = list == NULL ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return result;
}

PyObject *
py_isa(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{
    return PyUnicode_FromString(mha_isa_name(mha_isa_active()));
}

/* "scalar, avx2": those available here, or all that are compiled in. */
static PyObject *
isa_list(int only_available)
{
    PyObject *list = PyUnicode_FromString("");
    const char *comma = "";

    for (int i = 0; i < MHA_N_ISAS && list != NULL; i++) {
        if (mha_isa_compiled((mha_isa)i) && (!only_available || mha_isa_available((mha_isa)i))) {
            PyObject *longer = PyUnicode_FromFormat("%U%s%s", list, comma, mha_isa_name((mha_isa)i));

            Py_DECREF(list);
            list = longer;
            comma = ", ";
        }
    }
    return list;
}

static void
say_isa(PyObject *name)
{
    PyObject *available = isa_list(1);
    PyObject *compiled = isa_list(0);

    if (available != NULL && compiled != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "instruction set %.100R is not available: this CPU offers %U (this "
                     "build has %U)",
                     name, available, compiled);
    }
    Py_XDECREF(compiled);
    Py_XDECREF(available);
}

PyObject *
py_set_isa(PyObject *Py_UNUSED(module), PyObject *name)
{
    if (!PyUnicode_Check(name)) {
        mha_py_type_error(name, "name", "a string");
        return NULL;
    }
    for (int i = 0; i < MHA_N_ISAS; i++) {
        if (PyUnicode_CompareWithASCIIString(name, mha_isa_name((mha_isa)i)) != 0) {
            continue;
        }
        if (!mha_isa_available((mha_isa)i)) {
            break;
        }
        if (mha_py_check(mha_isa_select((mha_isa)i), "available_threads") < 0) {
            return NULL;
        }
        Py_RETURN_NONE;
    }
    say_isa(name);
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
{    int64_t n;

    if (mha_py_whole(value, "the number of threads", 1, &n) < 0) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) { /* one kind of error: api.md, 7 */
            PyErr_Format(PyExc_ValueError, "the number of threads must be a whole number >= 1, got %.100R", value);
        }
        return NULL;
    }
    if (n > INT_MAX) {
        PyErr_Format(PyExc_ValueError, "the number of threads is too large: %.100R", value);
        return NULL;
    }
    mha_threads_set((unsigned)n);
    Py_RETURN_NONE;
}

PyObject *
py_available_threads(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{
    return PyLong_FromUnsignedLong(mha_threads_available());
}
