/*
 * args.c: arguments that are no arrays: numbers, choices, switches.  What nearly every caller passes is read here; of
 * anything else Python makes such a number, or says why not.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <math.h>

int
mha_py_given(PyObject *value)
{
    return value != NULL && value != Py_None;
}

int
mha_py_real(PyObject *value, const char *name, double *number_ret)
{
    double number = PyFloat_CheckExact(value) || PyLong_CheckExact(value) ? PyFloat_AsDouble(value) : NAN;

    if (number != number || (number == -1 && PyErr_Occurred())) {
        PyObject *exact;

        PyErr_Clear();
        exact = mha_py_ask("real", "(Os)", value, name);
        if (exact == NULL) {
            return -1;
        }
        number = PyFloat_AsDouble(exact);
        Py_DECREF(exact);
    }
    *number_ret = number;
    return 0;
}

int
mha_py_probability(PyObject *value, double *number_ret)
{
    if (mha_py_real(value, "dropout", number_ret) < 0) {
        return -1;
    }
    return *number_ret >= 0 && *number_ret <= 1 ? 0 : mha_py_refuse("probability", "(Os)", value, "dropout");
}

int
mha_py_whole(PyObject *value, const char *name, int64_t least, int64_t *number_ret)
{
    int overflow = 0;
    long long number = PyLong_CheckExact(value) ? PyLong_AsLongLongAndOverflow(value, &overflow) : least - 1;

    if (overflow < 0 || (overflow == 0 && number < least)) {
        PyObject *exact = mha_py_ask("whole", "(OsL)", value, name, (long long)least);

        if (exact == NULL) {
            return -1;
        }
        number = PyLong_AsLongLongAndOverflow(exact, &overflow);
        Py_DECREF(exact);
    }
    *number_ret = overflow > 0 ? INT64_MAX : number;
    return 0;
}

int
mha_py_seed(PyObject *value, uint64_t *seed_ret)
{
    const unsigned long long none = (unsigned long long)-1; /* also a seed */
    unsigned long long seed = PyLong_CheckExact(value) ? PyLong_AsUnsignedLongLong(value) : none;

    if (seed == none) {
        PyObject *exact;

        PyErr_Clear();
        exact = mha_py_ask("seed", "(O)", value);
        if (exact == NULL) {
            return -1;
        }
        seed = PyLong_AsUnsignedLongLong(exact);
        Py_DECREF(exact);
    }
    *seed_ret = seed;
    return 0;
}

int
mha_py_choice(PyObject *value, const char *name, const char *first, const char *second, int *choice_ret)
{
    *choice_ret = !PyUnicode_Check(value)                                ? -1
                  : PyUnicode_CompareWithASCIIString(value, first) == 0  ? 0
                  : PyUnicode_CompareWithASCIIString(value, second) == 0 ? 1
                                                                         : -1;
    return *choice_ret < 0 ? mha_py_refuse("choice", "(Osss)", value, name, first, second) : 0;
}

int
mha_py_empty_rows(PyObject *value, mha_empty *empty_ret)
{
    int choice;

    if (mha_py_choice(value, "empty_rows", "zero", "uniform", &choice) < 0) {
        return -1;
    }
    *empty_ret = choice == 0 ? MHA_EMPTY_ZERO : MHA_EMPTY_UNIFORM;
    return 0;
}

int
mha_py_flag(PyObject *value, int *flag_ret)
{
    *flag_ret = value == NULL ? 0 : PyObject_IsTrue(value);
    return *flag_ret < 0 ? -1 : 0;
}
