/*
 * unchanged.c: first_changed: whether what a reader's lines read is as it was, before the core computes for them.
 * For 130 names it takes 2 us where Python takes 60 us, of 40 us in all for a small layer.
 *
 * A thing is the same if it has the same address.  Who asks keeps the things of the checks alive: an address that was
 * read is only compared, never followed.  Whether another thing is as good, mha_c.torch says (settings.py).
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "python/args.h"

enum { OWNER, NAME, VALUE, N_OF_CHECK };

/* What a check asks, told once: at each call the types of 130 owners would take as long as the answers. */
typedef enum {
    HAS_NAME,      /* a dict has the value under the name */
    LACKS_NAME,    /* a dict has not the name */
    HAS_ATTRIBUTE, /* another object has the value under the name */
    LACKS_ATTRIBUTE,
    HAS_ITEMS,  /* a dict has the keys and values at the addresses of the value, in their order */
    HAS_PARTS,  /* a list has the items of a tuple */
    IS_EMPTY,   /* another container, or a dict without any */
    HAS_SIZES,  /* a tensor has the shape of a tuple */
    HAS_TYPE,   /* any object, without a name */
    HAS_NUMBERS /* each so many-th number of a dense tensor, the name, has the bytes of the value */
} asked;

static asked
asked_by(const mha_py_call *call, PyObject *owner, PyObject *name, PyObject *value, PyObject *missing)
{
    if (name == Py_None) {
        const int empty =
            PyBytes_Check(value) ? PyBytes_Size(value) == 0 : PyTuple_Check(value) && PyTuple_Size(value) == 0;

        return PyType_Check(value) ? HAS_TYPE : empty ? IS_EMPTY : PyDict_Check(owner) ? HAS_ITEMS : HAS_PARTS;
    }
    if (PyDict_Check(owner)) {
        return value == missing ? LACKS_NAME : HAS_NAME;
    }
    if (mha_py_is_tensor(call, owner) && (PyTuple_Check(value) || PyLong_Check(name))) {
        return PyLong_Check(name) ? HAS_NUMBERS : HAS_SIZES;
    }
    return value == missing ? LACKS_ATTRIBUTE : HAS_ATTRIBUTE;
}

/* what_is_asked(checks, missing) -> a byte for each check */
PyObject *
py_what_is_asked(mha_py_call *call, PyObject *const *values)
{
    PyObject *const checks = values[0];
    const Py_ssize_t n = PyTuple_Check(checks) ? PyTuple_Size(checks) / N_OF_CHECK : -1;
    PyObject *found;

    if (n < 0) {
        mha_py_type_error(call, checks, "checks", "a tuple of owners, names and values");
        return NULL;
    }
    found = PyBytes_FromStringAndSize(NULL, n);
    for (Py_ssize_t i = 0; found != NULL && i < n; i++) {
        PyObject *const owner = PyTuple_GetItem(checks, i * N_OF_CHECK + OWNER);
        PyObject *const name = PyTuple_GetItem(checks, i * N_OF_CHECK + NAME);
        PyObject *const value = PyTuple_GetItem(checks, i * N_OF_CHECK + VALUE);

        PyBytes_AsString(found)[i] = (char)asked_by(call, owner, name, value, values[1]);
    }
    return found;
}

/* --- The answers; an exception that one leaves says no, and is cleared by who asks ------------------------------- */

static int
has_attribute(PyObject *owner, PyObject *name, PyObject *value)
{
    PyObject *now = PyObject_GetAttr(owner, name);

    Py_XDECREF(now);
    return now != NULL && now == value;
}

static int
lacks_attribute(PyObject *owner, PyObject *name)
{
    PyObject *now = PyObject_GetAttr(owner, name);

    Py_XDECREF(now);
    PyErr_Clear(); /* an attribute that is gone */
    return now == NULL;
}

/* The names of torch's own classes are 150: read out of a tuple they would take longer than all other checks. */
static int
has_items(PyObject *dict, PyObject *addresses)
{
    const char *next = PyBytes_Check(addresses) ? PyBytes_AsString(addresses) : NULL;
    PyObject *key, *value, *item[2];
    Py_ssize_t place = 0;
    int same = next != NULL && PyDict_Size(dict) * (Py_ssize_t)sizeof item == PyBytes_Size(addresses);

    while (same && PyDict_Next(dict, &place, &key, &value)) {
        memcpy(item, next, sizeof item);
        same = key == item[0] && value == item[1];
        next += sizeof item;
    }
    return same;
}

static int
has_items_alone(PyObject *dict, PyObject *addresses)
{
#ifdef Py_GIL_DISABLED /* another thread may change it on the way */
    PyObject *copy = PyDict_Copy(dict);
    const int same = copy != NULL && has_items(copy, addresses);

    Py_XDECREF(copy);
    return same;
#else
    return has_items(dict, addresses);
#endif
}

static int
has_parts(PyObject *list, PyObject *items)
{
    int same = PyList_Check(list) && PyTuple_Check(items) && PyList_Size(list) == PyTuple_Size(items);

    for (Py_ssize_t i = 0; same && i < PyTuple_Size(items); i++) {
        same = PyList_GetItem(list, i) == PyTuple_GetItem(items, i);
    }
    return same;
}

/* Each asking makes another tuple. */
static int
has_sizes(PyObject *tensor, PyObject *name, PyObject *sizes)
{
    PyObject *now = PyObject_GetAttr(tensor, name);
    const int same = now != NULL && PyObject_RichCompareBool(now, sizes, Py_EQ) == 1;

    Py_XDECREF(now);
    return same;
}

/* Of a table all numbers, or the first of them, or some. */
static int
has_numbers(mha_py_call *call, PyObject *tensor, PyObject *each, PyObject *bytes)
{
    const Py_ssize_t step = PyLong_AsSsize_t(each), n = PyBytes_Check(bytes) ? PyBytes_Size(bytes) : 0;
    mha_py_array now;
    size_t size, count;

    if (step <= 0 || n == 0 || !mha_py_look_at(call, tensor, &now) || !mha_py_fits(&now, MHA_PY_DENSE)) {
        return 0;
    }
    size = mha_py_itemsize(now.type);
    count = (size_t)n / size;
    if ((size_t)n % size != 0 || (count - 1) * (size_t)step >= (size_t)mha_py_count(&now)) {
        return 0;
    }
    if (step == 1) {
        return memcmp(now.data, PyBytes_AsString(bytes), (size_t)n) == 0;
    }
    for (size_t i = 0; i < count; i++) {
        if (memcmp((const char *)now.data + i * (size_t)step * size, PyBytes_AsString(bytes) + i * size, size) != 0) {
            return 0;
        }
    }
    return 1;
}

static int
holds(mha_py_call *call, asked what, PyObject *const *check)
{
    PyObject *const owner = check[OWNER], *const name = check[NAME], *const value = check[VALUE];

    switch (what) {
    case HAS_NAME: return PyDict_GetItemWithError(owner, name) == value;
    case LACKS_NAME: return PyDict_GetItemWithError(owner, name) == NULL && !PyErr_Occurred();
    case HAS_ATTRIBUTE: return has_attribute(owner, name, value);
    case LACKS_ATTRIBUTE: return lacks_attribute(owner, name);
    case HAS_ITEMS: return has_items_alone(owner, value);
    case HAS_PARTS: return has_parts(owner, value);
    case IS_EMPTY: return PyObject_Size(owner) == 0;
    case HAS_TYPE: return (PyObject *)Py_TYPE(owner) == value;
    case HAS_SIZES: return has_sizes(owner, name, value);
    case HAS_NUMBERS: return has_numbers(call, owner, name, value);
    }
    return 0;
}

/* first_changed(checks, asked, start) -> the number of the first check, from `start` on, that does not hold; or -1 */
PyObject *
py_first_changed(mha_py_call *call, PyObject *const *values)
{
    PyObject *const checks = values[0], *const asked_of = values[1];
    const Py_ssize_t n = PyTuple_Check(checks) && PyBytes_Check(asked_of) ? PyBytes_Size(asked_of) : -1;
    const char *what;

    if (n < 0 || PyTuple_Size(checks) / N_OF_CHECK != n || !PyLong_Check(values[2])) {
        mha_py_type_error(call, checks, "checks", "a tuple of owners, names and values, what_is_asked of it, a number");
        return NULL;
    }
    what = PyBytes_AsString(asked_of);
    for (Py_ssize_t i = PyLong_AsSsize_t(values[2]); i >= 0 && i < n; i++) {
        PyObject *check[N_OF_CHECK];

        for (int part = 0; part < N_OF_CHECK; part++) {
            check[part] = PyTuple_GetItem(checks, i * N_OF_CHECK + part);
        }
        if (!holds(call, (asked)what[i], check)) {
            PyErr_Clear();
            return PyLong_FromSsize_t(i);
        }
    }
    PyErr_Clear(); /* a number that is too large */
    return PyLong_FromLong(-1);
}
