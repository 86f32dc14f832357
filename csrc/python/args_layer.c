/*
 * args_layer.c: the arguments of a whole layer, for the forward and the backward call: inputs, projections, options,
 * whether the feature sizes fit together; and what such a call keeps.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h"

static int
is_projected(const mha_py_layer *layer, int which)
{
    return layer->W[which].linear.weight != NULL;
}

/* --- Inputs ---------------------------------------------------------------------------------- */

/* Keys, or values, which are often the array before: a tensor has to be asked a few things. */
static int
take_another(mha_py_call *call, PyObject *value, const char *name, PyObject *before, const mha_py_array *taken,
             mha_py_layer *layer, mha_py_array *array)
{
    if (value != before) {
        return mha_py_take(call, value, name, MHA_PY_ROWS, &layer->queries, array);
    }
    *array = *taken;
    array->name = name;
    return 0;
}

static int
take_inputs(mha_py_call *call, mha_py_layer *layer, PyObject *const *values)
{
    mha_py_array *queries = &layer->queries, *keys = &layer->keys, *items = &layer->values, *w_v = &layer->w_v;

    if (mha_py_take(call, values[MHA_PY_QUERIES], "queries", MHA_PY_ROWS, NULL, queries) < 0 ||
        take_another(call, values[MHA_PY_KEYS], "keys", values[MHA_PY_QUERIES], queries, layer, keys) < 0 ||
        take_another(call, values[MHA_PY_VALUES], "values", values[MHA_PY_KEYS], keys, layer, items) < 0) {
        return -1;
    }
    if (queries->rank != 3 || keys->rank != 3 || items->rank != 3 || keys->shape[0] != queries->shape[0] ||
        items->shape[0] != queries->shape[0] || items->shape[1] != keys->shape[1]) {
        return mha_py_refuse("inputs", "(OOO)", queries->array, keys->array, items->array);
    }
    if (mha_py_given(values[MHA_PY_SCORER]) &&
        mha_py_take(call, values[MHA_PY_SCORER], "w_v", MHA_PY_DENSE, queries, w_v) < 0) {
        return -1;
    }
    if (w_v->rank == 2 && w_v->shape[0] == 1) { /* the weight of an nn.Linear with one output */
        w_v->rank = 1;
        w_v->shape[0] = w_v->shape[1];
        layer->w_v_is_weight = 1;
    }
    return mha_py_take_lengths(call, values[MHA_PY_LENS], queries->shape[0], queries->shape[1], &layer->lengths);
}

static const char *const projection_names[] = {"W_q", "W_k", "W_v", "W_o"};

/* Four projections; or, of nine parameters, weights and their biases four places on. */
static int
take_projections(mha_py_call *call, mha_py_layer *layer, PyObject *tuple)
{
    const Py_ssize_t n = PyTuple_CheckExact(tuple) ? PyTuple_Size(tuple) : 0;
    int failed = 0;

    if (n != MHA_PY_N_PROJECTIONS && n != MHA_PY_N_PARAMETERS) {
        return mha_py_type_error(tuple, "projections", "a tuple (W_q, W_k, W_v, W_o)");
    }
    for (int i = 0; i < MHA_PY_N_PROJECTIONS && failed == 0; i++) {
        PyObject *item = PyTuple_GetItem(tuple, i);
        mha_py_projection *to = &layer->W[i];

        if (item == Py_None) {
            continue; /* the caller zeroed the struct */
        }
        failed = n == MHA_PY_N_PROJECTIONS
                     ? mha_py_take_projection(call, item, projection_names[i], &layer->queries, to)
                     : mha_py_take_in_rows(call, item, PyTuple_GetItem(tuple, i + MHA_PY_N_PROJECTIONS),
                                           projection_names[i], &layer->queries, to);
    }
    return failed;
}

static int
take_weights(mha_py_call *call, mha_py_layer *layer, PyObject *const *parameters)
{
    int failed = 0;

    for (int i = 0; i < MHA_PY_N_PROJECTIONS && failed == 0; i++) {
        if (parameters[i] != Py_None) {
            failed = mha_py_take_weight(call, parameters[i], projection_names[i], MHA_PY_DENSE, &layer->queries,
                                        &layer->W[i]);
        }
    }
    return failed;
}

/* --- Feature sizes ------------------------------------------------------------------------------ */

/* What comes out of a projection given `features`; *fits becomes 0 if they are not what it takes. */
static npy_intp
projected(const mha_py_layer *layer, int which, npy_intp features, int *fits)
{
    const mha_linear *linear = &layer->W[which].linear;

    if (!is_projected(layer, which)) {
        return features;
    }
    *fits = *fits && (size_t)features == linear->in_features;
    return (npy_intp)linear->out_features;
}

/* Those of a projection, or None; a new reference. */
static PyObject *
sizes_of(const mha_py_layer *layer, int which)
{
    const mha_linear *linear = &layer->W[which].linear;

    return is_projected(layer, which)
               ? Py_BuildValue("(nn)", (Py_ssize_t)linear->out_features, (Py_ssize_t)linear->in_features)
               : Py_BuildValue("");
}

static int
check_features(mha_py_layer *layer)
{
    const mha_py_array *w_v = &layer->w_v;
    const npy_intp heads = layer->heads;
    int fit = 1;

    layer->qk_features = projected(layer, MHA_PY_W_Q, layer->queries.shape[2], &fit);
    layer->value_features = projected(layer, MHA_PY_W_V, layer->values.shape[2], &fit);
    layer->out_features = projected(layer, MHA_PY_W_O, layer->value_features, &fit);
    fit = projected(layer, MHA_PY_W_K, layer->keys.shape[2], &fit) == layer->qk_features && fit;
    fit = fit && layer->qk_features % heads == 0 && layer->value_features % heads == 0;
    fit = fit && (w_v->array == NULL || (w_v->rank == 1 && w_v->shape[0] == layer->qk_features / heads));
    return fit ? 0
               : mha_py_refuse("features", "(OOO(NNNN)On)", layer->queries.array, layer->keys.array,
                               layer->values.array, sizes_of(layer, MHA_PY_W_Q), sizes_of(layer, MHA_PY_W_K),
                               sizes_of(layer, MHA_PY_W_V), sizes_of(layer, MHA_PY_W_O),
                               mha_py_or_none(w_v->array), (Py_ssize_t)heads);
}

/* --- Options and sizes -------------------------------------------------------------------------------------- */

static int
take_options(mha_py_layer *layer, PyObject *const *values)
{
    mha_layer_args *args = &layer->args;
    int64_t heads;

    if (mha_py_whole(values[MHA_PY_HEADS], "num_heads", 1, &heads) < 0 ||
        mha_py_empty_rows(values[MHA_PY_EMPTY], &args->empty_rows) < 0 ||
        mha_py_probability(values[MHA_PY_DROPOUT], &args->dropout) < 0 ||
        mha_py_seed(values[MHA_PY_SEED], &args->seed) < 0) {
        return -1;
    }
    layer->heads = heads > NPY_MAX_INTP ? NPY_MAX_INTP : (npy_intp)heads;
    return 0;
}

static void
note_sizes(mha_py_layer *layer)
{
    mha_layer_args *args = &layer->args;

    args->dtype = mha_py_dtype(layer->queries.type);
    args->batch = (size_t)layer->queries.shape[0];
    args->queries = (size_t)layer->queries.shape[1];
    args->keys = (size_t)layer->keys.shape[1];
    args->num_heads = (size_t)layer->heads;
    args->query_size = (size_t)layer->queries.shape[2];
    args->key_size = (size_t)layer->keys.shape[2];
    args->value_size = (size_t)layer->values.shape[2];
    args->query_rows = mha_py_operand(&layer->queries);
    args->key_rows = mha_py_operand(&layer->keys);
    args->value_rows = mha_py_operand(&layer->values);
    args->W_q = layer->W[MHA_PY_W_Q].linear;
    args->W_k = layer->W[MHA_PY_W_K].linear;
    args->W_v = layer->W[MHA_PY_W_V].linear;
    args->W_o = layer->W[MHA_PY_W_O].linear;
    args->additive_weights = layer->w_v.data;
    args->visible = mha_py_visibility(&layer->lengths);
    layer->work = mha_layer_work(args);
}

/* --- The whole ------------------------------------------------------------------------------------- */

int
mha_py_take_layer(mha_py_call *call, PyObject *const *values, PyObject *const *parameters, mha_py_layer *layer)
{
    if (take_inputs(call, layer, values) < 0 || take_options(layer, values) < 0 ||
        (parameters == NULL ? take_projections(call, layer, values[MHA_PY_FOUR])
                            : take_weights(call, layer, parameters)) < 0 ||
        check_features(layer) < 0) {
        return -1;
    }
    note_sizes(layer);
    return 0;
}

void
mha_py_use_projected(mha_py_layer *layer, npy_intp n_keys)
{
    layer->keys.shape[1] = layer->values.shape[1] = n_keys;
    layer->W[MHA_PY_W_K].linear = layer->W[MHA_PY_W_V].linear = (mha_linear){.weight = NULL};
    note_sizes(layer);
}

/* --- What is kept ------------------------------------------------------------------------------------ */

/* As doubles, which do not wrap; that they are rounded matters to nobody. */
static int
weights_are_smaller(const mha_py_layer *layer)
{
    const double batch = (double)layer->args.batch, queries = (double)layer->args.queries;
    const double keys = (double)layer->args.keys;

    return batch * (double)layer->heads * queries * keys <= batch * (queries + keys) * (double)layer->qk_features;
}

void
mha_py_list_kept(mha_py_layer *layer, int training, mha_py_kept_array kept[MHA_PY_N_KEPT])
{
    mha_layer_args *args = &layer->args;
    const npy_intp batch = layer->queries.shape[0], queries = layer->queries.shape[1], keys = layer->keys.shape[1];
    const npy_intp heads = layer->heads, scored = layer->qk_features, valued = layer->value_features;
    const int has_W_q = is_projected(layer, MHA_PY_W_Q), has_W_k = is_projected(layer, MHA_PY_W_K);
    const int has_W_v = is_projected(layer, MHA_PY_W_V), has_W_o = is_projected(layer, MHA_PY_W_O);
    const int again = (training && has_W_q && has_W_k) || !weights_are_smaller(layer); /* weights, when read */

    kept[MHA_PY_KEPT_ISA].wanted = kept[MHA_PY_KEPT_LENS].wanted = 0; /* these are none */
    kept[MHA_PY_KEPT_HEADS].wanted = kept[MHA_PY_KEPT_EMPTY].wanted = 0;
    kept[MHA_PY_KEPT_WEIGHTS] = (mha_py_kept_array){"attention_weights", 4, !again,
                                                    {batch, heads, queries, keys}, &args->weights};
    kept[MHA_PY_KEPT_Q] = (mha_py_kept_array){"the projected queries", 3, again || (training && has_W_q),
                                              {batch, queries, scored}, has_W_q ? &args->q_projected : NULL};
    kept[MHA_PY_KEPT_K] = (mha_py_kept_array){"the projected keys", 3, again || (training && has_W_k),
                                              {batch, keys, scored}, has_W_k ? &args->k_projected : NULL};
    kept[MHA_PY_KEPT_W_V] = (mha_py_kept_array){"w_v", 1, again && layer->w_v.array != NULL,
                                                {layer->w_v.shape[0]}, NULL};
    kept[MHA_PY_KEPT_ROW_MAX] = (mha_py_kept_array){"the row statistics", 3, again || training,
                                                    {batch, heads, queries}, &args->row_max};
    kept[MHA_PY_KEPT_ROW_SUM] = kept[MHA_PY_KEPT_ROW_MAX];
    kept[MHA_PY_KEPT_ROW_SUM].place = &args->row_sum;
    kept[MHA_PY_KEPT_V] = (mha_py_kept_array){"the projected values", 3, training && has_W_v,
                                              {batch, keys, valued}, has_W_v ? &args->v_projected : NULL};
    kept[MHA_PY_KEPT_CONTEXT] = (mha_py_kept_array){"the attended values", 3, training,
                                                    {batch, queries, valued}, has_W_o ? &args->context : NULL};
}
