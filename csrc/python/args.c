/*
 * args.c: arguments that are no arrays: numbers, choices, switches.  What nearly every caller passes is read here; for
 * anything else Python is asked, which makes such a number of it or says why not.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <math.h>

int
mha_py_given(PyObject *value)
{
    return value != NULL && value != Py_None;
}

double
mha_py_real(mha_py_call *call, PyObject *value, const char *name)
{
    double number;

    if (call->failed) {
        return 0;
    }
    number = PyFloat_CheckExact(value) || PyLong_CheckExact(value) ? PyFloat_AsDouble(value) : NAN;
    if (number != number || (number == -1 && PyErr_Occurred())) {
        PyErr_Clear();
        PyObject *const exact = mha_py_ask(call, "real", "(Os)", value, name);

        number = exact == NULL ? 0 : PyFloat_AsDouble(exact);
        Py_XDECREF(exact);
    }
    return number;
}

double
mha_py_probability(mha_py_call *call, PyObject *value)
{
    const double number = mha_py_real(call, value, "dropout");

    if (!call->failed && !(number >= 0 && number <= 1)) {
        mha_py_refuse(call, "probability", "(Os)", value, "dropout");
    }
    return number;
}

int64_t
mha_py_whole(mha_py_call *call, PyObject *value, const char *name, int64_t least)
{
    int overflow = 0;
    long long number;

    if (call->failed) {
        return least;
    }
    number = PyLong_CheckExact(value) ? PyLong_AsLongLongAndOverflow(value, &overflow) : least - 1;
    if (overflow < 0 || (overflow == 0 && number < least)) {
        PyObject *const exact = mha_py_ask(call, "whole", "(OsL)", value, name, (long long)least);

        number = exact == NULL ? least : PyLong_AsLongLongAndOverflow(exact, &overflow);
        Py_XDECREF(exact);
    }
    return overflow > 0 ? INT64_MAX : number;
}

uint64_t
mha_py_seed(mha_py_call *call, PyObject *value)
{
    const unsigned long long none = (unsigned long long)-1; /* also a seed */
    unsigned long long seed;

    if (call->failed || PyCallable_Check(value)) {
        return 0;
    }
    seed = PyLong_CheckExact(value) ? PyLong_AsUnsignedLongLong(value) : none;
    if (seed == none) {
        PyErr_Clear();
        PyObject *const exact = mha_py_ask(call, "seed", "(Os)", value, "seed");

        seed = exact == NULL ? 0 : PyLong_AsUnsignedLongLong(exact);
        Py_XDECREF(exact);
    }
    return seed;
}

void
mha_py_draw_seed(mha_py_call *call, PyObject *value, uint64_t *seed)
{
    if (!call->failed && PyCallable_Check(value)) {
        PyObject *const drawn = mha_py_own(call, PyObject_CallObject(value, NULL));

        *seed = drawn == NULL ? 0 : mha_py_seed(call, drawn);
    }
}

int
mha_py_choice(mha_py_call *call, PyObject *value, const char *name, const char *first, const char *second)
{
    const int is_text = PyUnicode_Check(value);
    const int is_second = is_text && PyUnicode_CompareWithASCIIString(value, second) == 0;

    if (!call->failed && !is_second && !(is_text && PyUnicode_CompareWithASCIIString(value, first) == 0)) {
        mha_py_refuse(call, "choice", "(Osss)", value, name, first, second);
    }
    return is_second;
}

mha_empty
mha_py_empty_rows(mha_py_call *call, PyObject *value)
{
    return mha_py_choice(call, value, "empty_rows", "zero", "uniform") ? MHA_EMPTY_UNIFORM : MHA_EMPTY_ZERO;
}

int
mha_py_flag(mha_py_call *call, PyObject *value)
{
    const int flag = value == NULL || call->failed ? 0 : PyObject_IsTrue(value);

    call->failed = call->failed || flag < 0;
    return flag > 0;
}
