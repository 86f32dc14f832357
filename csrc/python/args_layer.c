/*
 * args_layer.c: the arguments of a whole layer, for the forward and the backward call: inputs,
 * projections, options, and whether the feature sizes fit together.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h"

enum { QUERIES, KEYS, VALUES, LENS, PROJECTIONS, W_V, HEADS, EMPTY, DROPOUT, SEED };

const char *const mha_py_projection_names[] = {"W_q", "W_k", "W_v", "W_o"};

void
mha_py_drop_layer(mha_py_layer *layer)
{
    mha_py_drop(&layer->queries);
    mha_py_drop(&layer->keys);
    mha_py_drop(&layer->values);
    mha_py_drop(&layer->w_v);
    for (int i = 0; i < MHA_PY_N_PROJECTIONS; i++) {
        mha_py_drop_projection(&layer->W[i]);
    }
    mha_py_drop_lengths(&layer->lengths);
}

/* --- Inputs ---------------------------------------------------------------------------------- */

static int
take_inputs(PyObject *module, mha_py_layer *layer, PyObject *const *values)
{
    const mha_py_array *queries = &layer->queries;

    if (mha_py_take(&layer->queries, values[QUERIES], "queries", MHA_PY_ROWS, NULL) < 0 ||
        mha_py_take(&layer->keys, values[KEYS], "keys", MHA_PY_ROWS, queries) < 0 ||
        mha_py_take(&layer->values, values[VALUES], "values", MHA_PY_ROWS, queries) < 0 ||
        mha_py_need_rank(module, queries, 3, "(B, Q, features)") < 0 ||
        mha_py_need_rank(module, &layer->keys, 3, "(B, K, features)") < 0 ||
        mha_py_need_rank(module, &layer->values, 3, "(B, K, features)") < 0) {
        return -1;
    }
    if (mha_py_need_same(module, "batch size %zd", &layer->keys, 0, queries, 0) < 0 ||
        mha_py_need_same(module, "batch size %zd", &layer->values, 0, queries, 0) < 0 ||
        mha_py_need_same(module, "%zd keys", &layer->values, 1, &layer->keys, 1) < 0) {
        return -1;
    }
    if (values[W_V] != Py_None && mha_py_take(&layer->w_v, values[W_V], "w_v", MHA_PY_DENSE, queries) < 0) {
        return -1;
    }
    if (layer->w_v.rank == 2 && layer->w_v.shape[0] == 1) { /* the weight of an nn.Linear with one output */
        layer->w_v.rank = 1;
        layer->w_v.shape[0] = layer->w_v.shape[1];
    }
    return mha_py_take_lengths(module, values[LENS], queries->shape[0], queries->shape[1], &layer->lengths);
}

/* A row-major weight in the place of a packed one: read as mha_layer_grads wants it. */
static int
take_weight(PyObject *module, PyObject *value, const mha_py_array *like, mha_py_views *views,
            mha_py_projection *projection)
{
    mha_py_array *weight = &projection->weight;

    if (value == Py_None) {
        return 0; /* no projection; the caller zeroed the struct */
    }
    value = mha_py_view_tensor(module, value, views);
    if (value == NULL || mha_py_take(weight, value, projection->name, MHA_PY_DENSE, like) < 0 ||
        mha_py_need_rank(module, weight, 2, "(out_features, in_features)") < 0) {
        return -1;
    }
    projection->linear.weight = weight->data;
    projection->linear.out_features = (size_t)weight->shape[0];
    projection->linear.in_features = (size_t)weight->shape[1];
    return 0;
}

static int
take_projections(PyObject *module, mha_py_layer *layer, mha_py_projection_kind kind, PyObject *value,
                 mha_py_views *views)
{
    if (!PyTuple_Check(value) || PyTuple_Size(value) != MHA_PY_N_PROJECTIONS) {
        return mha_py_type_error(value, kind == MHA_PY_PROJECTIONS ? "projections" : "weights",
                                 "a tuple (W_q, W_k, W_v, W_o)");
    }
    for (int i = 0; i < MHA_PY_N_PROJECTIONS; i++) {
        mha_py_projection *projection = &layer->W[i];
        PyObject *item = PyTuple_GetItem(value, i);

        projection->name = mha_py_projection_names[i];
        if (kind == MHA_PY_PROJECTIONS
                ? mha_py_take_projection(module, item, projection->name, &layer->queries, views, projection) < 0
                : take_weight(module, item, &layer->queries, views, projection) < 0) {
            return -1;
        }
    }
    return 0;
}

/* --- Feature sizes ------------------------------------------------------------------------------ */

/* What comes out of `projection` given `rows`: checks that they fit. */
static int
projected_features(PyObject *module, const mha_py_array *rows, const mha_py_projection *projection,
                   npy_intp *features_ret)
{
    const mha_linear *linear = &projection->linear;
    PyObject *shape;

    *features_ret = rows->shape[2];
    if (linear->weight == NULL) {
        return 0;
    }
    *features_ret = (npy_intp)linear->out_features;
    if ((size_t)rows->shape[2] == linear->in_features) {
        return 0;
    }
    shape = mha_py_shape(rows->rank, rows->shape);
    if (shape != NULL) {
        mha_py_shape_error(module, "%s has %zd features (shape %S), but %s expects %zu", rows->name,
                           (Py_ssize_t)rows->shape[2], shape, projection->name, linear->in_features);
        Py_DECREF(shape);
    }
    return -1;
}

/* Queries and keys meet feature by feature, projected or not. */
static int
check_scored_features(PyObject *module, const mha_py_layer *layer, npy_intp key_features)
{
    const int q_projected = layer->W[MHA_PY_W_Q].linear.weight != NULL;
    const int k_projected = layer->W[MHA_PY_W_K].linear.weight != NULL;

    if (key_features == layer->qk_features) {
        return 0;
    }
    if (!q_projected && !k_projected) {
        return mha_py_need_same(module, "%zd features", &layer->keys, 2, &layer->queries, 2);
    }
    return mha_py_shape_error(module,
                              "%s %s %zd features, but %s %s %zd: they are scored against "
                              "each other",
                              k_projected ? "W_k" : "keys", k_projected ? "gives" : "has", (Py_ssize_t)key_features,
                              q_projected ? "W_q" : "queries", q_projected ? "gives" : "has",
                              (Py_ssize_t)layer->qk_features);
}

static int
check_heads(const mha_py_layer *layer)
{
    const npy_intp features[] = {layer->qk_features, layer->value_features};
    const char *const names[] = {"queries and keys", "values"};

    for (int i = 0; i < 2; i++) {
        if (features[i] % layer->heads != 0) {
            PyErr_Format(PyExc_ValueError, "num_heads = %zd does not divide the %zd projected features of %s",
                         (Py_ssize_t)layer->heads, (Py_ssize_t)features[i], names[i]);
            return -1;
        }
    }
    return 0;
}

static int
check_features(PyObject *module, mha_py_layer *layer)
{
    npy_intp key_features;

    if (projected_features(module, &layer->queries, &layer->W[MHA_PY_W_Q], &layer->qk_features) < 0 ||
        projected_features(module, &layer->keys, &layer->W[MHA_PY_W_K], &key_features) < 0 ||
        projected_features(module, &layer->values, &layer->W[MHA_PY_W_V], &layer->value_features) < 0 ||
        check_scored_features(module, layer, key_features) < 0 || check_heads(layer) < 0) {
        return -1;
    }
    layer->out_features = layer->value_features;
    if (layer->W[MHA_PY_W_O].linear.weight != NULL) {
        layer->out_features = (npy_intp)layer->W[MHA_PY_W_O].linear.out_features;
        if ((size_t)layer->value_features != layer->W[MHA_PY_W_O].linear.in_features) {
            return mha_py_shape_error(module, "W_o expects %zu features, but the attended values have %zd",
                                      layer->W[MHA_PY_W_O].linear.in_features, (Py_ssize_t)layer->value_features);
        }
    }
    if (layer->w_v.array != NULL) {
        if (mha_py_need_rank(module, &layer->w_v, 1, "(features of a head,)") < 0) {
            return -1;
        }
        if (layer->w_v.shape[0] != layer->qk_features / layer->heads) {
            return mha_py_shape_error(module, "w_v has shape (%zd,), expected (%zd,)", (Py_ssize_t)layer->w_v.shape[0],
                                      (Py_ssize_t)(layer->qk_features / layer->heads));
        }
    }
    return 0;
}

/* --- Options and sizes -------------------------------------------------------------------------------------- */

static int
take_options(mha_py_layer *layer, PyObject *const *values)
{
    mha_layer_args *args = &layer->args;
    int64_t heads;

    if (mha_py_whole(values[HEADS], "num_heads", 1, &heads) < 0 ||
        mha_py_empty_rows(values[EMPTY], &args->empty_rows) < 0 ||
        mha_py_probability(values[DROPOUT], "dropout", &args->dropout) < 0 ||
        mha_py_seed(values[SEED], &args->seed) < 0) {
        return -1;
    }
    layer->heads = heads > NPY_MAX_INTP ? NPY_MAX_INTP : (npy_intp)heads;
    return 0;
}

static void
note_sizes(mha_py_layer *layer)
{
    mha_layer_args *args = &layer->args;

    args->dtype = mha_py_dtype(&layer->queries);
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
    args->additive_weights = layer->w_v.array == NULL ? NULL : layer->w_v.data;
    args->visible = mha_py_visibility(&layer->lengths);
}

/* --- The whole ------------------------------------------------------------------------------------- */

int
mha_py_take_layer(PyObject *module, PyObject *const *values, mha_py_projection_kind kind, mha_py_views *views,
                  mha_py_layer *layer)
{
    if (take_inputs(module, layer, values) < 0 || take_options(layer, values) < 0 ||
        take_projections(module, layer, kind, values[PROJECTIONS], views) < 0 || check_features(module, layer) < 0) {
        return -1;
    }
    note_sizes(layer);
    return 0;
}

double
mha_py_layer_work(const mha_py_layer *layer)
{
    const mha_layer_args *args = &layer->args;
    const double q_rows = (double)args->batch * (double)args->queries;
    const double k_rows = (double)args->batch * (double)args->keys;
    const double qk = (double)layer->qk_features, v = (double)layer->value_features;

    return q_rows * (double)args->W_q.in_features * (double)args->W_q.out_features +
           k_rows * (double)args->W_k.in_features * (double)args->W_k.out_features +
           k_rows * (double)args->W_v.in_features * (double)args->W_v.out_features +
           q_rows * (double)args->W_o.in_features * (double)args->W_o.out_features +
           q_rows * (double)args->keys * (v + qk * (layer->w_v.array != NULL ? 8 : 1) + 8 * (double)layer->heads);
}
