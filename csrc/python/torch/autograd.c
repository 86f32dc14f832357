/*
 * autograd.c: autograd_parts, 0.4 us in the place of 3.3 us of Python in each call with gradients: which tensors of a
 * layer's call autograd is given, in whose order layer_backward gives their gradients.
 *
 * Of inputs those at the end that are the one before them are left out; of parameters none are given, three of additive
 * attention, four without biases, or all nine.  Every place costs autograd a quarter of a microsecond.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "python/layer_call.h"

enum { W_V = MHA_PY_N_PARAMETERS - 1, MOST_TENSORS = MHA_PY_N_INPUTS + MHA_PY_N_PARAMETERS };

/* --- Which tensors ----------------------------------------------------------------------------------- */

typedef struct {
    int n_inputs, n_parameters;
    const int *place; /* of the parameters among the nine */
} given;

static const int every_place[] = {0, 1, 2, 3, 4, 5, 6, 7, 8}, additive_places[] = {0, 1, W_V};

static int
is_none(PyObject *const *parameters, int first, int end)
{
    while (first < end && parameters[first] == Py_None) {
        first++;
    }
    return first == end;
}

static given
choose(PyObject *const *inputs, PyObject *const *parameters)
{
    const int has_biases = !is_none(parameters, MHA_PY_N_PROJECTIONS, W_V), has_w_v = parameters[W_V] != Py_None;
    given of = {3, MHA_PY_N_PARAMETERS, every_place};

    of.n_inputs = inputs[2] != inputs[1] ? 3 : inputs[1] != inputs[0] ? 2 : 1;
    if (!has_biases && !has_w_v) {
        of.n_parameters = is_none(parameters, 0, MHA_PY_N_PROJECTIONS) ? 0 : MHA_PY_N_PROJECTIONS;
    } else if (!has_biases && is_none(parameters, MHA_PY_W_V, MHA_PY_N_PROJECTIONS)) {
        of.n_parameters = 3;
        of.place = additive_places;
    }
    return of;
}

/* Owned by the call. */
static PyObject *
tuple_of(mha_py_call *call, PyObject *const *items, int n)
{
    PyObject *tuple = mha_py_own(call, PyTuple_New(n));

    for (int i = 0; i < n && tuple != NULL; i++) {
        Py_INCREF(items[i]);
        tuple = PyTuple_SetItem(tuple, i, items[i]) < 0 ? NULL : tuple;
    }
    return tuple;
}

/* Whether any of them wants a gradient. */
static int
learns(const mha_py_call *call, PyObject *const *tensors, int n)
{
    int found = 0;

    for (int i = 0; i < n && found == 0; i++) {
        if (tensors[i] != Py_None) {
            PyObject *answer = PyObject_GetAttr(tensors[i], call->state->objects[MHA_PY_WORD_REQUIRES_GRAD]);
            found = answer == NULL ? -1 : PyObject_IsTrue(answer);
            Py_XDECREF(answer);
        }
    }
    return found;
}

/* How often those have been changed in place of which the attention weights are a function; a new reference. */
static PyObject *
versions(const mha_py_call *call, PyObject *const *inputs, PyObject *const *parameters)
{
    PyObject *const of[] = {inputs[0],
                            inputs[1],
                            parameters[MHA_PY_W_Q],
                            parameters[MHA_PY_W_K],
                            parameters[MHA_PY_N_PROJECTIONS + MHA_PY_W_Q],
                            parameters[MHA_PY_N_PROJECTIONS + MHA_PY_W_K],
                            parameters[W_V]};
    const int n = (int)(sizeof(of) / sizeof(of[0]));
    PyObject *found = PyTuple_New(n);

    for (int i = 0; i < n && found != NULL; i++) {
        PyObject *const word = call->state->objects[MHA_PY_WORD_VERSION];
        PyObject *version = of[i] == Py_None ? NULL : PyObject_GetAttr(of[i], word);

        if (version == NULL) { /* none, or a tensor of inference mode, which autograd refuses in its own words */
            PyErr_Clear();
            version = Py_None;
            Py_INCREF(version);
        }
        if (PyTuple_SetItem(found, i, version) < 0) {
            Py_CLEAR(found);
        }
    }
    return found;
}

/* autograd_parts(queries, keys, values, parameters) -> (whether there is a gradient, tensors, n_inputs, versions) */
PyObject *
py_autograd_parts(mha_py_call *call, PyObject *const *values)
{
    enum { PARAMETERS = MHA_PY_N_INPUTS };
    PyObject *parameters[MHA_PY_N_PARAMETERS], *tensors[MOST_TENSORS], *tuple;
    int wanted;

    if (!PyTuple_Check(values[PARAMETERS]) || PyTuple_Size(values[PARAMETERS]) != MHA_PY_N_PARAMETERS) {
        mha_py_type_error(values[PARAMETERS], "parameters", "a tuple of nine");
        return NULL;
    }
    for (int i = 0; i < MHA_PY_N_PARAMETERS; i++) {
        parameters[i] = PyTuple_GetItem(values[PARAMETERS], i);
    }
    const given of = choose(values, parameters);
    for (int i = 0; i < of.n_inputs; i++) {
        tensors[i] = values[i];
    }
    for (int i = 0; i < of.n_parameters; i++) {
        tensors[of.n_inputs + i] = parameters[of.place[i]];
    }
    tuple = tuple_of(call, tensors, of.n_inputs + of.n_parameters);
    wanted = tuple == NULL ? -1 : learns(call, parameters, MHA_PY_N_PARAMETERS);
    wanted = wanted == 0 ? learns(call, values, MHA_PY_N_INPUTS) : wanted;
    return wanted < 0 ? NULL
                      : Py_BuildValue("(NOiN)", PyBool_FromLong(wanted), tuple, of.n_inputs,
                                      versions(call, values, parameters));
}
