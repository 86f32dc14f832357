/*
 * py_explain.c: what a call would do: the facts of mha_*_explain as dicts.
 *
 * Each function takes the arguments of the call that it explains, checked by the same code, and gives the
 * core the same structs; where the call would allocate results, any address that is not NULL serves.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h" /* first: Python.h sets what system headers look at */

#include "mha_explain.h"

/* --- Facts as dicts -------------------------------------------------------------------------- */

#define COUNT(name) #name, (Py_ssize_t)facts->name
#define WORD(name) #name, facts->name
#define SECONDS(name) #name, facts->name
#define FLAG(name) #name, PyBool_FromLong(facts->name)
#define DICT(name, kind) #name, kind##_dict(&facts->name)

static PyObject *
kernel_dict(const mha_kernel_facts *facts)
{
    return Py_BuildValue("{sssnsnsnsn}", WORD(isa), COUNT(itemsize), COUNT(lanes), COUNT(tile_rows),
                         COUNT(tile_columns));
}

static PyObject *
share_dict(const mha_share_facts *facts)
{
    return Py_BuildValue("{snsnsnsssdsdsd}", COUNT(n_tasks), COUNT(n_threads), COUNT(most_threads), WORD(reason),
                         SECONDS(seconds), SECONDS(least_seconds), SECONDS(least_each));
}

static PyObject *
attention_dict(const mha_attention_facts *facts)
{
    return Py_BuildValue("{sNsNsnsnsnsnsnsnsnsnsnsnsnsnsnsNsNsnsnsn}", DICT(share, share), DICT(kernels, kernel),
                         COUNT(scratch_bytes), COUNT(batch), COUNT(heads), COUNT(kv_heads), COUNT(queries), COUNT(keys),
                         COUNT(head_dim), COUNT(value_dim), COUNT(key_block), COUNT(tile_queries), COUNT(task_queries),
                         COUNT(task_heads), COUNT(n_splits), FLAG(by_columns), FLAG(weights_again), COUNT(n_tiles),
                         COUNT(n_tiles_all), COUNT(most_blocks));
}

static PyObject *
linear_dict(const mha_linear_facts *facts)
{
    return Py_BuildValue("{snsnsnsnsnsN}", COUNT(rows), COUNT(rows_needed), COUNT(in_features), COUNT(out_features),
                         COUNT(task_rows), DICT(share, share));
}

/* The dict, unless the core refused. */
#define TOLD(call, status, dict) (mha_py_check(call, status, (call)->function), (call)->failed ? NULL : (dict))

/* --- The functions ---------------------------------------------------------------------------- */

PyObject *
py_explain_kernels(mha_py_call *Py_UNUSED(call), PyObject *const *Py_UNUSED(values))
{
    mha_core_facts of_all;
    const mha_core_facts *const facts = &of_all;

    mha_kernels_explain(&of_all);
    return Py_BuildValue("{sNsNsN}", DICT(float32, kernel), DICT(float64, kernel), DICT(share, share));
}

PyObject *
py_explain_attention(mha_py_call *call, PyObject *const *values)
{
    enum { WEIGHTS = MHA_PY_N_ATTENTION, LSE, TERMS };
    mha_py_attention attention = {0};
    mha_attention_facts facts;
    const int weights = mha_py_flag(call, values[WEIGHTS]), lse = mha_py_flag(call, values[LSE]);

    mha_py_take_attention(call, values, NULL, values[TERMS], &attention);
    attention.args.out.data = &attention;
    attention.args.weights = weights ? &attention : NULL;
    attention.args.lse = lse ? &attention : NULL;
    if (call->failed) {
        return NULL;
    }
    return TOLD(call, mha_attention_explain(&attention.args, &facts), attention_dict(&facts));
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

/* Of the projections that the layer has. */
static PyObject *
projections_dict(const mha_layer_args *args, const mha_linear_facts *facts)
{
    static const char *const names[MHA_PY_N_PROJECTIONS] = {"W_q", "W_k", "W_v", "W_o"};
    const mha_linear *const linears[] = {&args->inputs[MHA_QUERIES].W, &args->inputs[MHA_KEYS].W,
                                         &args->inputs[MHA_VALUES].W, &args->W_o};
    PyObject *dict = PyDict_New();

    for (int i = 0; dict != NULL && i < MHA_PY_N_PROJECTIONS; i++) {
        if (linears[i]->weight != NULL) {
            PyObject *const one = linear_dict(&facts[i]);

            if (one == NULL || PyDict_SetItemString(dict, names[i], one) < 0) {
                Py_CLEAR(dict);
            }
            Py_XDECREF(one);
        }
    }
    return dict;
}

static PyObject *
layer_dict(const mha_layer_args *args, const mha_layer_facts *facts, size_t kept_bytes)
{
    return Py_BuildValue("{snsnsnsNsNsnss}", COUNT(slice_items), COUNT(n_slices), COUNT(scratch_bytes),
                         DICT(attention, attention), "projections", projections_dict(args, facts->projections),
                         "kept_bytes", (Py_ssize_t)kept_bytes, "kept",
                         args->attention.weights != NULL ? "weights" : "queries and keys");
}

PyObject *
py_explain_layer(mha_py_call *call, PyObject *const *values)
{
    mha_py_layer layer = {0};
    mha_layer_facts facts;
    const int training = mha_py_flag(call, values[MHA_PY_N_LAYER]);

    mha_py_take_layer(call, values, values[MHA_PY_N_LAYER + 1], &layer);
    mha_py_place_layer(call, values, layer.keys.shape[1], &layer);
    if (call->failed) {
        return NULL;
    }
    const size_t kept_bytes = (size_t)want_kept(&layer, training);
    mha_py_limit_threads(call); /* as the call would */
    const mha_status status = mha_layer_explain(&layer.args, &facts);
    mha_threads_limit_own(0);
    return TOLD(call, status, layer_dict(&layer.args, &facts, kept_bytes));
}

PyObject *
py_explain_linear(mha_py_call *call, PyObject *const *values)
{
    mha_py_rows x = {.rank = 0};
    mha_py_projection projection = {.linear = {0}};
    mha_linear_facts facts;

    mha_py_take_rows(call, values[0], "x", NULL, &x);
    mha_py_take_projection(call, values[1], "projection", &x.rows, &projection);
    if (call->failed) {
        return NULL;
    }
    const mha_dtype dtype = mha_py_dtype(x.rows.type);
    const size_t rows = (size_t)x.rows.shape[0];
    return TOLD(call, mha_linear_explain(dtype, &projection.linear, rows, &facts), linear_dict(&facts));
}
