/*
 * py_explain.c: what a call would do: the facts of mha_*_explain as tuples, in the order of the structs in
 * mha_explain.h; mha_c/_facts.py gives them their names.
 *
 * Each function takes the arguments of the call that it explains, checked by the same code, and gives the
 * core the same structs; where the call would allocate results, any address that is not NULL serves.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h" /* first: Python.h sets what system headers look at */

#include "mha_explain.h"

/* --- Facts as tuples ------------------------------------------------------------------------- */

static PyObject *
kernel_facts(const mha_kernel_facts *facts)
{
    return Py_BuildValue("(snnnn)", mha_isa_name(facts->isa), (Py_ssize_t)facts->itemsize, (Py_ssize_t)facts->lanes,
                         (Py_ssize_t)facts->tile_rows, (Py_ssize_t)facts->tile_columns);
}

static PyObject *
share_facts(const mha_share_facts *facts)
{
    static const char *const reasons[] = {"one task", "little work", "work", "tasks", "all"};

    return Py_BuildValue("(nIIsddd)", (Py_ssize_t)facts->n_tasks, facts->n_threads, facts->most_threads,
                         reasons[facts->reason], facts->seconds, facts->least_seconds, facts->least_each);
}

static PyObject *
linear_facts(const mha_linear_facts *facts)
{
    return Py_BuildValue("(nnnnnN)", (Py_ssize_t)facts->rows, (Py_ssize_t)facts->rows_needed,
                         (Py_ssize_t)facts->in_features, (Py_ssize_t)facts->out_features,
                         (Py_ssize_t)facts->task_rows, share_facts(&facts->share));
}

static PyObject *
attention_facts(const mha_attention_facts *facts)
{
    return Py_BuildValue(
        "(NNnnnnnnnnnnnnnnnNNn)", kernel_facts(&facts->kernels), share_facts(&facts->share), (Py_ssize_t)facts->batch,
        (Py_ssize_t)facts->heads, (Py_ssize_t)facts->kv_heads, (Py_ssize_t)facts->queries, (Py_ssize_t)facts->keys,
        (Py_ssize_t)facts->head_dim, (Py_ssize_t)facts->value_dim, (Py_ssize_t)facts->key_block,
        (Py_ssize_t)facts->most_blocks, (Py_ssize_t)facts->tile_queries, (Py_ssize_t)facts->task_queries,
        (Py_ssize_t)facts->task_heads, (Py_ssize_t)facts->n_splits, (Py_ssize_t)facts->n_tiles,
        (Py_ssize_t)facts->n_tiles_all, PyBool_FromLong(facts->by_columns), PyBool_FromLong(facts->weights_again),
        (Py_ssize_t)facts->scratch_bytes);
}

/* --- Kernels and attention ------------------------------------------------------------------------- */

PyObject *
py_explain_kernels(mha_py_call *call, PyObject *const *Py_UNUSED(values))
{
    const mha_share_facts share = mha_threads_explain();
    mha_kernel_facts single, twice;

    mha_py_check(call, mha_kernels_explain(MHA_F32, &single), call->function);
    mha_py_check(call, mha_kernels_explain(MHA_F64, &twice), call->function);
    return call->failed ? NULL
                        : Py_BuildValue("(NNN)", kernel_facts(&single), kernel_facts(&twice), share_facts(&share));
}

PyObject *
py_explain_attention(mha_py_call *call, PyObject *const *values)
{
    enum { WEIGHTS = MHA_PY_N_ATTENTION, LSE, TERMS };
    mha_py_attention attention = {0};
    mha_attention_facts facts;

    mha_py_take_attention(call, values, NULL, values[TERMS], &attention);
    attention.args.out.data = &facts;
    attention.args.weights = mha_py_flag(call, values[WEIGHTS]) ? &facts : NULL;
    attention.args.lse = mha_py_flag(call, values[LSE]) ? &facts : NULL;
    if (call->failed) {
        return NULL;
    }
    mha_py_check(call, mha_attention_explain(&attention.args, &facts), call->function);
    return call->failed ? NULL : attention_facts(&facts);
}

/* --- Layers ------------------------------------------------------------------------------------------ */

/* The outputs that the call would ask for; how many bytes the layer keeps of them until the next call. */
static double
want_kept(mha_py_layer *layer, int training, void *somewhere)
{
    mha_py_kept_array kept[MHA_PY_N_KEPT];
    double bytes = 0;

    layer->args.out = somewhere;
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
            *kept[i].place = somewhere;
        }
    }
    return bytes;
}

static PyObject *
projection_facts(const mha_py_layer *layer, const mha_layer_facts *facts, int which)
{
    return layer->W[which].linear.weight == NULL ? Py_BuildValue("") : linear_facts(&facts->projections[which]);
}

static PyObject *
layer_facts(const mha_py_layer *layer, const mha_layer_facts *facts, double kept_bytes)
{
    return Py_BuildValue("((NNNN)Nnnnsd)", projection_facts(layer, facts, MHA_PY_W_Q),
                         projection_facts(layer, facts, MHA_PY_W_K), projection_facts(layer, facts, MHA_PY_W_V),
                         projection_facts(layer, facts, MHA_PY_W_O), attention_facts(&facts->attention),
                         (Py_ssize_t)facts->slice_items, (Py_ssize_t)facts->n_slices,
                         (Py_ssize_t)facts->scratch_bytes,
                         layer->args.weights != NULL ? "weights" : "queries and keys", kept_bytes);
}

PyObject *
py_explain_layer(mha_py_call *call, PyObject *const *values)
{
    mha_py_layer layer = {0};
    mha_layer_facts facts;
    const int training = mha_py_flag(call, values[MHA_PY_N_LAYER]);

    mha_py_take_layer(call, values, NULL, &layer);
    if (call->failed) {
        return NULL;
    }
    const double kept_bytes = want_kept(&layer, training, &facts);
    mha_py_check(call, mha_layer_explain(&layer.args, &facts), call->function);
    return call->failed ? NULL : layer_facts(&layer, &facts, kept_bytes);
}

/* --- One projection ----------------------------------------------------------------------------------- */

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
    mha_py_check(call,
                 mha_linear_explain(mha_py_dtype(x.rows.type), &projection.linear, (size_t)x.rows.shape[0], &facts),
                 call->function);
    return call->failed ? NULL : linear_facts(&facts);
}
