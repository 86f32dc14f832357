/*
 * autograd.c: autograd_parts, 0.4 us in the place of 3.3 us of Python in each call with gradients: whether a tensor of
 * a layer's call wants a gradient, and how often tensors have been changed in place.
 */
#include "python/layer_call.h"

enum { W_V = MHA_PY_PARAMETER_W_V };

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

/* autograd_parts(queries, keys, values, parameters) -> (whether there is a gradient, versions) */
PyObject *
py_autograd_parts(mha_py_call *call, PyObject *const *values)
{
    PyObject *const nine = values[MHA_PY_N_INPUTS], *all[MHA_PY_N_TENSORS];

    if (!PyTuple_Check(nine) || PyTuple_Size(nine) != MHA_PY_N_PARAMETERS) {
        mha_py_type_error(call, nine, "parameters", "a tuple of nine");
        return NULL;
    }
    for (int i = 0; i < MHA_PY_N_TENSORS; i++) {
        all[i] = i < MHA_PY_N_INPUTS ? values[i] : PyTuple_GetItem(nine, i - MHA_PY_N_INPUTS);
    }
    const int wanted = learns(call, all);
    return call->failed ? NULL : Py_BuildValue("(NN)", PyBool_FromLong(wanted), versions(call, all));
}
