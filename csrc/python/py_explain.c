/*
 * py_explain.c: what a call would do: the facts of mha_*_explain as dicts.
 *
 * Each function takes the arguments of the call that it explains, checked by the same code, and gives the
 * core the same structs; where the call would allocate results, any address that is not NULL serves.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h" /* first: Python.h sets what system headers look at */

#include "mha_explain.h"

/* An mha_emit_fn: `to` is a dict, or NULL once an exception is set. */
static void *
add_fact(void *to, const char *name, mha_fact fact)
{
    PyObject *value = NULL;

    if (to == NULL || PyErr_Occurred() != NULL) {
        return NULL;
    }
    switch (fact.kind) {
    case MHA_FACT_COUNT: value = PyLong_FromSize_t(fact.count); break;
    case MHA_FACT_FLAG: value = PyBool_FromLong((long)fact.count); break;
    case MHA_FACT_SECONDS: value = PyFloat_FromDouble(fact.seconds); break;
    case MHA_FACT_WORD: value = PyUnicode_FromString(fact.word); break;
    case MHA_FACT_GROUP: value = PyDict_New(); break;
    }
    const int added = value != NULL && PyDict_SetItemString(to, name, value) == 0;
    Py_XDECREF(value);
    return added ? value : NULL; /* the dict owns it */
}

/* Returns the facts; if the call failed, mha_py_run drops them. */
static PyObject *
told(mha_py_call *call, mha_status status, PyObject *facts)
{
    mha_py_check(call, status, call->function);
    call->failed |= PyErr_Occurred() != NULL;
    return facts;
}

PyObject *
py_explain_kernels(mha_py_call *call, PyObject *const *Py_UNUSED(values))
{
    PyObject *facts = PyDict_New();

    mha_kernels_explain(add_fact, facts);
    return told(call, MHA_OK, facts);
}

PyObject *
py_explain_attention(mha_py_call *call, PyObject *const *values)
{
    enum { WEIGHTS = MHA_PY_N_ATTENTION, LSE, TERMS };
    mha_py_attention attention = {0};
    const int weights = mha_py_flag(call, values[WEIGHTS]), lse = mha_py_flag(call, values[LSE]);

    mha_py_take_attention(call, values, NULL, values[TERMS], &attention);
    attention.args.out.data = &attention;
    attention.args.weights = weights ? &attention : NULL;
    attention.args.lse = lse ? &attention : NULL;
    if (call->failed) {
        return NULL;
    }
    PyObject *facts = PyDict_New();
    return told(call, mha_attention_explain(&attention.args, add_fact, facts), facts);
}

/* Asks for the outputs that the call would ask for; returns how many bytes of them the layer keeps until the next. */
static double
want_kept(mha_py_layer *layer, int training)
{
    mha_py_kept_array kept[MHA_PY_N_KEPT];
    double bytes = 0;

    layer->args.out = layer;
    mha_py_list_kept(layer, training, kept);
    for (int i = 0; i < MHA_PY_N_KEPT; i++) {
        double size = (double)mha_py_itemsize(layer->queries.type);

        if (!kept[i].wanted) {
            continue;
        }
        for (int axis = 0; axis < kept[i].rank; axis++) {
            size *= (double)kept[i].dims[axis];
        }
        bytes += size;
        if (kept[i].place != NULL) {
            *kept[i].place = layer;
        }
    }
    return bytes;
}

PyObject *
py_explain_layer(mha_py_call *call, PyObject *const *values)
{
    mha_py_layer layer = {0};
    const int training = mha_py_flag(call, values[MHA_PY_N_LAYER]);

    mha_py_take_layer(call, values, &layer);
    if (call->failed) {
        return NULL;
    }
    mha_py_limit_threads(call); /* as the call would; first, for it clears exceptions */
    PyObject *facts = PyDict_New();
    const mha_fact bytes = {.kind = MHA_FACT_COUNT, .count = (size_t)want_kept(&layer, training)};
    const char *kept = layer.args.weights != NULL ? "weights" : "queries and keys";
    (void)add_fact(facts, "kept_bytes", bytes);
    (void)add_fact(facts, "kept", (mha_fact){.kind = MHA_FACT_WORD, .word = kept});
    const mha_status status = mha_layer_explain(&layer.args, add_fact, facts);
    mha_threads_limit_own(0);
    return told(call, status, facts);
}

PyObject *
py_explain_linear(mha_py_call *call, PyObject *const *values)
{
    mha_py_rows x = {.rank = 0};
    mha_py_projection projection = {.linear = {0}};

    mha_py_take_rows(call, values[0], "x", NULL, &x);
    mha_py_take_projection(call, values[1], "projection", &x.rows, &projection);
    if (call->failed) {
        return NULL;
    }
    PyObject *facts = PyDict_New();
    const mha_dtype dtype = mha_py_dtype(x.rows.type);
    const size_t rows = (size_t)x.rows.shape[0];
    return told(call, mha_linear_explain(dtype, &projection.linear, rows, add_fact, facts), facts);
}
