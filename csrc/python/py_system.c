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

const char py_exp_doc[] = "exp(x)\n--\n\nexp of each number, by the active kernels.";

PyObject *
py_exp(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args, PyObject *keywords)
{
    static const mha_py_signature signature = {"exp", 1, {"x", NULL}};
    PyObject *value;

    if (mha_py_parse(&signature, args, n_args, keywords, &value) < 0) {
        return NULL;
    }
    return each_number(value, mha_exp);
}

const char py_tanh_doc[] = "tanh(x)\n--\n\ntanh of each number, by the active kernels.";

PyObject *
py_tanh(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args, PyObject *keywords)
{
    static const mha_py_signature signature = {"tanh", 1, {"x", NULL}};
    PyObject *value;

    if (mha_py_parse(&signature, args, n_args, keywords, &value) < 0) {
        return NULL;
    }
    return each_number(value, mha_tanh);
}

/* --- Instruction sets ------------------------------------------------------------------------ */

const char py_isas_doc[] = "isas()\n--\n\n"
                           "((name, available), ...) of every compiled instruction set, plainest first.";

PyObject *
py_isas(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args, PyObject *keywords)
{
    static const mha_py_signature signature = {"isas", 0, {NULL}};
    PyObject *list, *result;

    if (mha_py_parse(&signature, args, n_args, keywords, NULL) < 0) {
        return NULL;
    }
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

const char py_isa_doc[] = "isa()\n--\n\nThe name of the active instruction set.";

PyObject *
py_isa(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args, PyObject *keywords)
{
    static const mha_py_signature signature = {"isa", 0, {NULL}};

    if (mha_py_parse(&signature, args, n_args, keywords, NULL) < 0) {
        return NULL;
    }
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

const char py_set_isa_doc[] = "set_isa(name)\n--\n\n"
                              "Use the kernels of this instruction set from now on.  For start-up and tests: no other\n"
                              "call may be running, and packed weights must be packed again.";

PyObject *
py_set_isa(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args, PyObject *keywords)
{
    static const mha_py_signature signature = {"set_isa", 1, {"name", NULL}};
    PyObject *name;

    if (mha_py_parse(&signature, args, n_args, keywords, &name) < 0) {
        return NULL;
    }
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
        if (mha_py_check(mha_isa_select((mha_isa)i), signature.function) < 0) {
            return NULL;
        }
        Py_RETURN_NONE;
    }
    say_isa(name);
    return NULL;
}

/* --- Threads ------------------------------------------------------------------------------------- */

const char py_get_num_threads_doc[] = "get_num_threads()\n--\n\nHow many threads a call may use.";

PyObject *
py_get_num_threads(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args, PyObject *keywords)
{
    static const mha_py_signature signature = {"get_num_threads", 0, {NULL}};

    if (mha_py_parse(&signature, args, n_args, keywords, NULL) < 0) {
        return NULL;
    }
    return PyLong_FromUnsignedLong(mha_threads_get());
}

const char py_set_num_threads_doc[] = "set_num_threads(n)\n--\n\n"
                                      "Let each call use up to n >= 1 threads; ValueError for anything else.";

PyObject *
py_set_num_threads(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args, PyObject *keywords)
{
    static const mha_py_signature signature = {"set_num_threads", 1, {"n", NULL}};
    PyObject *value;
    int64_t n;

    if (mha_py_parse(&signature, args, n_args, keywords, &value) < 0) {
        return NULL;
    }
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

const char py_available_threads_doc[] = "available_threads()\n--\n\nHow many CPUs this process may use.";

PyObject *
py_available_threads(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n_args, PyObject *keywords)
{
    static const mha_py_signature signature = {"available_threads", 0, {NULL}};

    if (mha_py_parse(&signature, args, n_args, keywords, NULL) < 0) {
        return NULL;
    }
    return PyLong_FromUnsignedLong(mha_threads_available());
}
