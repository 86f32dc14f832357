/*
 * unchanged.c: first_changed: whether what a reader's lines read is as it was, before the core computes for them.
 * For 130 names it takes 9 us where Python takes 60 us, of 100 us in all for a small layer.
 *
 * A thing is the same if it has the same address.  Who asks keeps the things of the checks alive: an address that was
 * read is only compared, never followed.  Whether another thing is as good, mha_c.torch says (settings.py).
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "python/args.h"

enum { OWNER, NAME, VALUE, N_OF_CHECK };

static int
has_attribute(PyObject *owner, PyObject *name, PyObject *value, PyObject *missing)
{
    PyObject *now = PyObject_GetAttr(owner, name);
    const int same = now == value;

    if (now == NULL) { /* an attribute that is gone */
        PyErr_Clear();
        return value == missing;
    }
    Py_DECREF(now);
    return same;
}

static int
has_value(PyObject *dict, PyObject *name, PyObject *value, PyObject *missing)
{
    PyObject *now = PyDict_GetItemWithError(dict, name);

    if (now != NULL) {
        return now == value;
    }
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return value == missing;
}

/* Whether a dictionary has the keys and values at these addresses, (key, value, key, value, ...), in their order.  The
 * names of torch's own classes are 150: read out of a tuple they would take longer than all other checks. */
static int
has_items(PyObject *dict, PyObject *addresses)
{
    const char *next = PyBytes_AsString(addresses);
    PyObject *key, *value, *item[2];
    Py_ssize_t place = 0;
    int same = PyDict_Size(dict) * (Py_ssize_t)sizeof item == PyBytes_Size(addresses);

    while (same && PyDict_Next(dict, &place, &key, &value)) {
        memcpy(item, next, sizeof item);
        same = key == item[0] && value == item[1];
        next += sizeof item;
    }
    return same;
}

static int
has_contents(PyObject *owner, PyObject *items)
{
    int same;

    if (PyDict_Check(owner)) {
#ifdef Py_GIL_DISABLED /* another thread may change it on the way */
        PyObject *copy = PyDict_Copy(owner);

        same = copy != NULL && PyBytes_Check(items) && has_items(copy, items);
        Py_XDECREF(copy);
        return same;
#else
        return PyBytes_Check(items) && has_items(owner, items);
#endif
    }
    same = PyTuple_Check(items) && PyObject_Size(owner) == PyTuple_Size(items);
    for (Py_ssize_t i = 0; same && i < PyTuple_Size(items); i++) {
        same = PyList_Check(owner) && PyList_GetItem(owner, i) == PyTuple_GetItem(items, i);
    }
    return same;
}

/* first_changed(checks, missing, start) -> the number of the first check, from `start` on, that does not hold; or -1 */
PyObject *
py_first_changed(mha_py_call *call, PyObject *const *values)
{
    PyObject *const checks = values[0], *const missing = values[1];
    const Py_ssize_t n = PyTuple_Check(checks) ? PyTuple_Size(checks) / N_OF_CHECK : -1;
    Py_ssize_t i;
    int holds = 1;

    if (n < 0 || !PyLong_Check(values[2])) {
        mha_py_type_error(call, checks, "checks", "a tuple of owners, names and values, and the number of the first");
        return NULL;
    }
    for (i = PyLong_AsSsize_t(values[2]); i >= 0 && i < n; i++) {
        PyObject *const owner = PyTuple_GetItem(checks, i * N_OF_CHECK + OWNER);
        PyObject *const name = PyTuple_GetItem(checks, i * N_OF_CHECK + NAME);
        PyObject *const value = PyTuple_GetItem(checks, i * N_OF_CHECK + VALUE);

        if (name == Py_None) {
            holds = has_contents(owner, value);
            PyErr_Clear(); /* of what has no size, or no memory for a copy */
        } else if (PyDict_Check(owner)) {
            holds = has_value(owner, name, value, missing);
        } else {
            holds = has_attribute(owner, name, value, missing);
        }
        if (!holds) {
            return PyLong_FromSsize_t(i);
        }
    }
    PyErr_Clear(); /* a number that is too large */
    return PyLong_FromLong(-1);
}
