/*
 * args.c: positional arguments, scalars, error texts, the status translator and the decision when to let
 * other threads run.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

/* --- Calls --------------------------------------------------------------------------- */

int
mha_py_arguments(const char *function, PyObject *const *args, Py_ssize_t n_args, int least, int most, PyObject **values)
{
    if (n_args < least || n_args > most) {
        PyErr_Format(PyExc_TypeError, "%s() takes %d to %d arguments, got %zd", function, least, most, n_args);
        return -1;
    }
    for (int i = 0; i < most; i++) {
        values[i] = i < n_args ? args[i] : NULL;
    }
    return 0;
}

/* --- Scalars --------------------------------------------------------------------------- */

int
mha_py_type_error(PyObject *value, const char *name, const char *expected)
{
    PyObject *type_name = PyObject_GetAttrString((PyObject *)Py_TYPE(value), "__name__");

    if (type_name != NULL) {
        PyErr_Format(PyExc_TypeError, "%s must be %s, got %S", name, expected, type_name);
        Py_DECREF(type_name);
    }
    return -1;
}

/* True for Python's and NumPy's bool: a truth value where a number belongs is a mistake. */
static int
is_bool(PyObject *value)
{
    return PyBool_Check(value) || PyArray_IsScalar(value, Bool);
}

int
mha_py_real(PyObject *value, const char *name, double *number_ret)
{
    double number;

    if (PyFloat_CheckExact(value)) {
        number = PyFloat_AsDouble(value);
    } else if (is_bool(value) || PyUnicode_Check(value) || PyBytes_Check(value) ||
               PyArray_IsScalar(value, ComplexFloating) ||
               (PyArray_Check(value) && PyArray_NDIM((PyArrayObject *)value) > 0)) {
        /* float() takes some of these, silently dropping what they mean. */
        return mha_py_type_error(value, name, "a real number");
    } else {
        number = PyFloat_AsDouble(value);
    }
    if (number == -1.0 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            return mha_py_type_error(value, name, "a real number");
        }
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Format(PyExc_ValueError, "%s is too large for a float", name);
        }
        return -1;
    }
    if (number != number) {
        PyErr_Format(PyExc_ValueError, "%s must not be NaN", name);
        return -1;
    }
    *number_ret = number;
    return 0;
}

/* An exact int (new reference) from anything with __index__ that is no bool. */
static PyObject *
whole_object(PyObject *value, const char *name)
{
    PyObject *whole;

    if (PyLong_CheckExact(value)) {
        Py_INCREF(value);
        return value;
    }
    if (is_bool(value) || PyArray_Check(value)) {
        mha_py_type_error(value, name, "a whole number");
        return NULL;
    }
    whole = PyNumber_Index(value);
    if (whole == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        mha_py_type_error(value, name, "a whole number");
    }
    return whole;
}

int
mha_py_whole(PyObject *value, const char *name, int64_t least, int64_t *number_ret)
{
    PyObject *whole = whole_object(value, name);
    int overflow = 0;
    long long number;

    if (whole == NULL) {
        return -1;
    }
    number = PyLong_AsLongLongAndOverflow(whole, &overflow);
    Py_DECREF(whole);
    if (overflow > 0) {
        number = INT64_MAX;
    }
    if (overflow < 0 || number < least) {
        PyErr_Format(PyExc_ValueError, "%s must be at least %lld, got %.100R", name, (long long)least, value);
        return -1;
    }
    *number_ret = number;
    return 0;
}

int
mha_py_choice(PyObject *value, const char *name, const char *const *choices, int *choice_ret)
{
    PyObject *list;

    if (!PyUnicode_Check(value)) {
        return mha_py_type_error(value, name, "a string");
    }
    for (int i = 0; choices[i] != NULL; i++) {
        if (PyUnicode_CompareWithASCIIString(value, choices[i]) == 0) {
            *choice_ret = i;
            return 0;
        }
    }
    list = PyUnicode_FromFormat("'%s'", choices[0]);
    for (int i = 1; choices[i] != NULL && list != NULL; i++) {
        PyObject *longer = PyUnicode_FromFormat("%U or '%s'", list, choices[i]);

        Py_DECREF(list);
        list = longer;
    }
    if (list != NULL) {
        PyErr_Format(PyExc_ValueError, "%s must be %U, got %.100R", name, list, value);
        Py_DECREF(list);
    }
    return -1;
}

int
mha_py_empty_rows(PyObject *value, mha_empty *empty_ret)
{
    static const char *const choices[] = {"zero", "uniform", NULL};
    int choice;

    if (mha_py_choice(value, "empty_rows", choices, &choice) < 0) {
        return -1;
    }
    *empty_ret = choice == 0 ? MHA_EMPTY_ZERO : MHA_EMPTY_UNIFORM;
    return 0;
}

int
mha_py_probability(PyObject *value, const char *name, double *number_ret)
{
    double number;

    if (mha_py_real(value, name, &number) < 0) {
        return -1;
    }
    if (number < 0 || number > 1) {
        PyErr_Format(PyExc_ValueError, "%s must lie in 0..1, got %.100R", name, value);
        return -1;
    }
    *number_ret = number;
    return 0;
}

int
mha_py_seed(PyObject *value, uint64_t *seed_ret)
{
    PyObject *whole = whole_object(value, "seed");
    unsigned long long seed;

    if (whole == NULL) {
        return -1;
    }
    seed = PyLong_AsUnsignedLongLong(whole);
    Py_DECREF(whole);
    if (seed == (unsigned long long)-1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Format(PyExc_ValueError, "seed must lie in 0 .. 2**64 - 1, got %.100R", value);
        }
        return -1;
    }
    *seed_ret = seed;
    return 0;
}

int
mha_py_flag(PyObject *value, int *flag_ret)
{
    *flag_ret = value == NULL ? 0 : PyObject_IsTrue(value);
    return *flag_ret < 0 ? -1 : 0;
}

/* --- Errors and calls ---------------------------------------------------------------------- */

int
mha_py_shape_error(PyObject *module, const char *format, ...)
{
    const mha_py_state *state = PyModule_GetState(module);
    va_list parts;

    if (state == NULL || state->shape_error == NULL) {
        PyErr_SetString(PyExc_SystemError, "mha_c._core has been cleared");
        return -1;
    }
    va_start(parts, format);
    PyErr_FormatV(state->shape_error, format, parts);
    va_end(parts);
    return -1;
}

int
mha_py_check(mha_status status, const char *function)
{
    PyObject *kind = PyExc_SystemError; /* MHA_ERR_ARG: this folder has a bug */

    switch (status) {
    case MHA_OK:
        return 0;
    case MHA_ERR_NOMEM:
        kind = PyExc_MemoryError;
        break;
    case MHA_ERR_ISA:
    case MHA_ERR_SIZE:
        kind = PyExc_ValueError;
        break;
    case MHA_ERR_INTERRUPTED: /* signal_came has what the handler raised */
        return -1;
    case MHA_ERR_ARG:
        break;
    }
    PyErr_Format(kind, "%s: %s%s", function, status == MHA_ERR_SIZE ? "too large: " : "", mha_status_text(status));
    return -1;
}

/* About 3 microseconds of arithmetic. */
#define DETACH_FROM_WORK 1e4

/* A few milliseconds: calls as short as that are over before anybody could have asked. */
#define WATCH_FROM_WORK 1e8

/* Signal handlers run in the main thread alone: a call of another one has nobody to ask. */
static int
is_main_thread(void)
{
    PyObject *threading = PyImport_ImportModule("threading");
    PyObject *thread = threading == NULL ? NULL : PyObject_CallMethod(threading, "main_thread", NULL);
    PyObject *ident = thread == NULL ? NULL : PyObject_GetAttrString(thread, "ident");
    const int is_main = ident != NULL && PyLong_AsUnsignedLong(ident) == PyThread_get_thread_ident();

    PyErr_Clear();
    Py_XDECREF(ident);
    Py_XDECREF(thread);
    Py_XDECREF(threading);
    return is_main;
}

static int
signal_came(void *saved)
{
    PyEval_RestoreThread(saved);
    const int came = PyErr_CheckSignals() != 0;

    (void)PyEval_SaveThread();
    return came;
}

PyThreadState *
mha_py_detach(double work)
{
    if (work < DETACH_FROM_WORK) {
        return NULL;
    }
    const int watch = work >= WATCH_FROM_WORK && is_main_thread();
    PyThreadState *saved = PyEval_SaveThread();

    if (watch) {
        mha_interrupt_watch(signal_came, saved);
    }
    return saved;
}

void
mha_py_attach(PyThreadState *saved)
{
    if (saved != NULL) {
        mha_interrupt_watch(NULL, NULL);
        PyEval_RestoreThread(saved);
    }
}
