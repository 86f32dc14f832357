/*
 * autograd.c: autograd_parts, 0.4 us in the place of 3.3 us of Python in each call with gradients: which tensors of a
 * layer's call autograd is given, in whose order layer_backward gives their gradients.
 *
 * Of inputs those at the end that are the one before them are left out; of parameters none are given, three of additive
 * attention, four without biases, or all nine.  Every place costs autograd a quarter of a microsecond.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "python/layer_call.h"

enum { W_V = MHA_PY_PARAMETER_W_V };

/* --- Which tensors ----------------------------------------------------------------------------------- */

static int
is_none(PyObject *const *parameters, int first, int end)
{
    while (first < end && parameters[first] == Py_None) {
        first++;
    }
    return first == end;
}

/* How many of the nine: see mha_py_place. */
static int
count_parameters(PyObject *const *parameters)
{
    if (!is_none(parameters, MHA_PY_N_PROJECTIONS, W_V)) {
        return MHA_PY_N_PARAMETERS;
    }
    if (parameters[W_V] == Py_None) {
        return is_none(parameters, 0, MHA_PY_N_PROJECTIONS) ? 0 : MHA_PY_N_PROJECTIONS;
    }
    return is_none(parameters, MHA_PY_W_V, MHA_PY_N_PROJECTIONS) ? 3 : MHA_PY_N_PARAMETERS;
}

/* Whether any of them wants a gradient: parameters first, which mostly do. */
static int
learns(mha_py_call *call, PyObject *const *all)
{
    int found = 0;

    for (int i = 0; i < MHA_PY_N_TENSORS && !found && !call->failed; i++) {
        PyObject *const tensor = all[(i + MHA_PY_N_INPUTS) % MHA_PY_N_TENSORS];

        if (tensor != Py_None) {
            PyObject *answer = PyObject_GetAttr(tensor, call->state->objects[MHA_PY_WORD_REQUIRES_GRAD]);
            found = answer == NULL ? -1 : PyObject_IsTrue(answer);
            Py_XDECREF(answer);
            call->failed = found < 0;
        }
    }
    return found;
}

/* How often those have been changed in place of which the attention weights are a function; a new reference. */
static PyObject *
versions(const mha_py_call *call, PyObject *const *all)
{
    enum { W = MHA_PY_N_INPUTS, BIAS = W + MHA_PY_N_PROJECTIONS };
    static const int of[] = {0, 1, W + MHA_PY_W_Q, W + MHA_PY_W_K, BIAS + MHA_PY_W_Q, BIAS + MHA_PY_W_K, W + W_V};
    const int n = (int)(sizeof(of) / sizeof(of[0]));
    PyObject *found = PyTuple_New(n);

    for (int i = 0; i < n && found != NULL; i++) {
        PyObject *const tensor = all[of[i]], *const word = call->state->objects[MHA_PY_WORD_VERSION];
        PyObject *version = tensor == Py_None ? NULL : PyObject_GetAttr(tensor, word);

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
    PyObject *const nine = values[MHA_PY_N_INPUTS], *all[MHA_PY_N_TENSORS], **const parameters = all + MHA_PY_N_INPUTS;
    PyObject *tensors;

    if (!PyTuple_Check(nine) || PyTuple_Size(nine) != MHA_PY_N_PARAMETERS) {
        mha_py_type_error(call, nine, "parameters", "a tuple of nine");
        return NULL;
    }
    for (int i = 0; i < MHA_PY_N_TENSORS; i++) {
        all[i] = i < MHA_PY_N_INPUTS ? values[i] : PyTuple_GetItem(nine, i - MHA_PY_N_INPUTS);
    }
    const int n_inputs = all[2] != all[1] ? 3 : all[1] != all[0] ? 2 : 1, n_parameters = count_parameters(parameters);
    tensors = mha_py_own(call, PyTuple_New(n_inputs + n_parameters));
    for (int i = 0; i < n_inputs + n_parameters && !call->failed; i++) {
        PyObject *const tensor = all[mha_py_place(n_inputs, n_parameters, i)];

        Py_INCREF(tensor);
        call->failed = PyTuple_SetItem(tensors, i, tensor) < 0;
    }
    const int wanted = learns(call, all);
    return call->failed ? NULL
                        : Py_BuildValue("(NOiN)", PyBool_FromLong(wanted), tensors, n_inputs, versions(call, all));
}
