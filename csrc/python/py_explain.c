/*
 * py_explain.c: what a call would do, as dicts: the facts of mha_*_explain under their names in mha.h.
 *
 * Each function takes the arguments of the call that it explains, checked by the same code, and gives the
 * core the same structs; where the call would allocate results, any address that is not NULL serves.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h"

/* --- Facts as dicts ------------------------------------------------------------------------- */

static PyObject *
kernels_dict(const mha_kernel_facts *facts)
{
    return Py_BuildValue("{s:s,s:n,s:n,s:n,s:n}", "isa", mha_isa_name(facts->isa), "itemsize",
                         (Py_ssize_t)facts->itemsize, "lanes", (Py_ssize_t)facts->lanes, "tile_rows",
                         (Py_ssize_t)facts->tile_rows, "tile_columns", (Py_ssize_t)facts->tile_columns);
}

static PyObject *
share_dict(const mha_share_facts *facts)
{
    static const char *const reasons[] = {"one task", "little work", "work", "tasks", "all"};

    return Py_BuildValue("{s:n,s:I,s:I,s:s,s:d,s:d,s:d}", "n_tasks", (Py_ssize_t)facts->n_tasks, "n_threads",
                         facts->n_threads, "most_threads", facts->most_threads, "reason", reasons[facts->reason],
                         "seconds", facts->seconds, "least_seconds", facts->least_seconds, "least_each",
                         facts->least_each);
}

static PyObject *
linear_dict(const mha_linear_facts *facts)
{
    return Py_BuildValue("{s:n,s:n,s:n,s:n,s:n,s:N}", "rows", (Py_ssize_t)facts->rows, "rows_needed",
                         (Py_ssize_t)facts->rows_needed, "in_features", (Py_ssize_t)facts->in_features, "out_features",
                         (Py_ssize_t)facts->out_features, "task_rows", (Py_ssize_t)facts->task_rows, "share",
                         share_dict(&facts->share));
}

static PyObject *
attention_dict(const mha_attention_facts *facts)
{
    return Py_BuildValue(
        "{s:N,s:N,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:N,s:N,s:n}", "kernels",
        kernels_dict(&facts->kernels), "share", share_dict(&facts->share), "batch", (Py_ssize_t)facts->batch, "heads",
        (Py_ssize_t)facts->heads, "kv_heads", (Py_ssize_t)facts->kv_heads, "queries", (Py_ssize_t)facts->queries,
        "keys", (Py_ssize_t)facts->keys, "head_dim", (Py_ssize_t)facts->head_dim, "value_dim",
        (Py_ssize_t)facts->value_dim, "key_block", (Py_ssize_t)facts->key_block, "most_blocks",
        (Py_ssize_t)facts->most_blocks, "tile_queries", (Py_ssize_t)facts->tile_queries, "task_queries",
        (Py_ssize_t)facts->task_queries, "n_splits", (Py_ssize_t)facts->n_splits, "n_tiles",
        (Py_ssize_t)facts->n_tiles, "n_tiles_all", (Py_ssize_t)facts->n_tiles_all, "by_columns",
        PyBool_FromLong(facts->by_columns), "weights_again",
        PyBool_FromLong(facts->weights_again), "scratch_bytes", (Py_ssize_t)facts->scratch_bytes);
}

/* --- Kernels ------------------------------------------------------------------------------------ */

static PyObject *
kernels_of(mha_dtype dtype)
{
    mha_kernel_facts facts;

    return mha_py_check(mha_kernels_explain(dtype, &facts), "explain_kernels") < 0 ? NULL : kernels_dict(&facts);
}

PyObject *
py_explain_kernels(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{    const mha_share_facts share = mha_threads_explain();

    return Py_BuildValue("{s:N,s:N,s:N}", "float32", kernels_of(MHA_F32), "float64", kernels_of(MHA_F64), "share",
                         share_dict(&share));
}

/* --- Attention ------------------------------------------------------------------------------------- */

enum { WEIGHTS = MHA_PY_N_ATTENTION, LSE, TERMS, N_ARGS };

PyObject *
py_explain_attention(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PyObject *values[N_ARGS];
    PyObject *result = NULL;
    mha_py_attention attention = {0};
    mha_attention_facts facts;
    int want_weights, want_lse;

    if (mha_py_arguments("explain_attention", args, n_args, 3, N_ARGS, values) < 0) {
        return NULL;
    }
    if (mha_py_take_attention(module, values, &attention) == 0 && mha_py_flag(values[WEIGHTS], &want_weights) == 0 &&
        mha_py_flag(values[LSE], &want_lse) == 0 &&
        mha_py_take_score_terms(module, values[TERMS], &attention) == 0) {
        attention.args.out.data = &facts;
        attention.args.weights = want_weights ? &facts : NULL;
        attention.args.lse = want_lse ? &facts : NULL;
        if (mha_py_check(mha_attention_explain(&attention.args, &facts), "explain_linear") == 0) {
            result = attention_dict(&facts);
        }
    }
    mha_py_drop_attention(&attention);
    return result;
}

/* --- Layers ------------------------------------------------------------------------------------------ */

/* Bytes that the layer keeps of the call, until the next one. */
static double
kept_bytes(const mha_py_layer *layer, const mha_py_kept *kept, int training)
{
    const mha_layer_args *args = &layer->args;
    const double q_rows = (double)args->batch * (double)args->queries;
    const double k_rows = (double)args->batch * (double)args->keys;
    const double heads = (double)layer->heads, features = (double)layer->qk_features;
    double numbers = kept->weights ? heads * q_rows * (double)args->keys : 0;

    numbers += (kept->queries ? q_rows * features : 0) + (kept->keys ? k_rows * features : 0);
    numbers += kept->statistics ? 2 * heads * q_rows : 0;
    numbers += training && args->W_v.weight != NULL ? k_rows * (double)layer->value_features : 0;
    numbers += training && args->W_o.weight != NULL ? q_rows * (double)layer->value_features : 0;
    return numbers * (double)mha_py_itemsize(layer->queries.type);
}

/* The outputs that the call would ask for, see make_outputs in py_layer.c. */
static void
want_kept(mha_py_layer *layer, const mha_py_kept *kept, int training, void *somewhere)
{
    mha_layer_args *args = &layer->args;

    args->out = somewhere;
    args->weights = kept->weights ? somewhere : NULL;
    args->q_projected = kept->queries && args->W_q.weight != NULL ? somewhere : NULL;
    args->k_projected = kept->keys && args->W_k.weight != NULL ? somewhere : NULL;
    args->v_projected = training && args->W_v.weight != NULL ? somewhere : NULL;
    args->context = training && args->W_o.weight != NULL ? somewhere : NULL;
    args->row_max = args->row_sum = kept->statistics ? somewhere : NULL;
}

static PyObject *
layer_dict(const mha_py_layer *layer, const mha_py_kept *kept, double n_bytes, const mha_layer_facts *facts)
{
    PyObject *projections = PyDict_New();
    const mha_linear *linears[] = {&layer->args.W_q, &layer->args.W_k, &layer->args.W_v, &layer->args.W_o};

    for (int i = 0; i < MHA_PY_N_PROJECTIONS && projections != NULL; i++) {
        PyObject *dict = linears[i]->weight == NULL ? NULL : linear_dict(&facts->projections[i]);

        if (PyErr_Occurred() ||
            (dict != NULL && PyDict_SetItemString(projections, mha_py_projection_names[i], dict) < 0)) {
            Py_DECREF(projections);
            projections = NULL;
        }
        Py_XDECREF(dict);
    }
    return Py_BuildValue("{s:N,s:N,s:n,s:n,s:n,s:s,s:d}", "projections", projections, "attention",
                         attention_dict(&facts->attention), "slice_items", (Py_ssize_t)facts->slice_items, "n_slices",
                         (Py_ssize_t)facts->n_slices, "scratch_bytes", (Py_ssize_t)facts->scratch_bytes, "kept",
                         kept->weights ? "weights" : "queries and keys", "kept_bytes", n_bytes);
}

PyObject *
py_explain_layer(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{    PyObject *values[MHA_PY_N_LAYER + 1];
    PyObject *result = NULL;
    mha_py_layer layer = {0};
    mha_py_views views = {.n = 0};
    mha_layer_facts facts;
    int training;

    if (mha_py_arguments("explain_layer", args, n_args, MHA_PY_N_LAYER, MHA_PY_N_LAYER + 1, values) < 0) {
        return NULL;
    }
    if (mha_py_view_tensors(module, values, MHA_PY_N_LAYER, &views) == 0 &&
        mha_py_take_layer(module, values, MHA_PY_PROJECTIONS, &views, &layer) == 0 &&
        mha_py_flag(values[MHA_PY_N_LAYER], &training) == 0) {
        const mha_py_kept kept = mha_py_what_is_kept(&layer, training);

        want_kept(&layer, &kept, training, &facts);
        if (mha_py_check(mha_layer_explain(&layer.args, &facts), "explain_linear") == 0) {
            result = layer_dict(&layer, &kept, kept_bytes(&layer, &kept, training), &facts);
        }
    }
    mha_py_drop_layer(&layer);
    mha_py_drop_views(&views);
    return result;
}

/* --- One projection ----------------------------------------------------------------------------------- */

PyObject *
py_explain_linear(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{    PyObject *values[2];
    PyObject *result = NULL;
    mha_py_rows x = {0};
    mha_py_views views = {.n = 0};
    mha_py_projection projection = {.name = "projection"};
    mha_linear_facts facts;

    if (mha_py_arguments("explain_linear", args, n_args, 2, 2, values) < 0) {
        return NULL;
    }
    if (mha_py_take_rows(module, values[0], "x", NULL, &x) == 0 &&
        mha_py_take_projection(module, values[1], "projection", &x.rows, &views, &projection) == 0 &&
        mha_py_check(mha_linear_explain(mha_py_dtype(&x.rows), &projection.linear, (size_t)x.rows.shape[0], &facts),
                     "explain_linear") == 0) {
        result = linear_dict(&facts);
    }
    mha_py_drop(&x.rows);
    mha_py_drop_projection(&projection);
    mha_py_drop_views(&views);
    return result;
}
