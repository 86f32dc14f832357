/*
 * args_layer.c: the arguments of a whole layer, for the forward and the backward call: inputs, projections, options,
 * whether the feature sizes fit together; and what such a call keeps.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h"

#include <string.h>

static int
is_projected(const mha_py_layer *layer, int which)
{
    return layer->W[which].linear.weight != NULL;
}

/* --- Inputs ---------------------------------------------------------------------------------- */

/* Takes keys, or values.  Often they are the same array as the one before, and reading a tensor takes some calls. */
static void
take_another(mha_py_call *call, PyObject *const *value, const char *name, const mha_py_array *before,
             const mha_py_array *like, mha_py_array *array)
{
    if (value[0] == value[-1]) {
        *array = *before;
        array->name = name;
    } else {
        mha_py_take(call, value[0], name, MHA_PY_ROWS, like, array);
    }
}

static void
take_inputs(mha_py_call *call, PyObject *const *values, mha_py_layer *layer)
{
    mha_py_array *queries = &layer->queries, *keys = &layer->keys, *items = &layer->values, *w_v = &layer->w_v;

    mha_py_take(call, values[MHA_PY_QUERIES], "queries", MHA_PY_ROWS, NULL, queries);
    take_another(call, values + MHA_PY_KEYS, "keys", queries, queries, keys);
    take_another(call, values + MHA_PY_VALUES, "values", keys, queries, items);
    if (!call->failed &&
        (queries->rank != 3 || keys->rank != 3 || items->rank != 3 || keys->shape[0] != queries->shape[0] ||
         items->shape[0] != queries->shape[0] || items->shape[1] != keys->shape[1])) {
        mha_py_refuse(call, "inputs", "(OOO)", queries->array, keys->array, items->array);
    }
    if (mha_py_given(values[MHA_PY_SCORER])) {
        mha_py_take(call, values[MHA_PY_SCORER], "w_v", MHA_PY_DENSE, queries, w_v);
    }
    if (w_v->rank == 2 && w_v->shape[0] == 1) { /* the weight of an nn.Linear with one output */
        w_v->rank = 1;
        w_v->shape[0] = w_v->shape[1];
        w_v->stride[0] = w_v->stride[1];
        layer->w_v_is_weight = 1;
    }
    mha_py_take_lengths(call, values[MHA_PY_LENS], queries->shape[0], queries->shape[1],
                        layer->counts_lengths ? 0 : keys->shape[1], &layer->scores.lengths);
}

static const char *const projection_names[] = {"W_q", "W_k", "W_v", "W_o"};

/* Takes four projections, or nine parameters, among which a bias stands four places behind its weight. */
static void
take_projections(mha_py_call *call, PyObject *tuple, mha_py_layer *layer)
{
    const Py_ssize_t n = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : 0;
    const int is_joint = n == MHA_PY_N_PARAMETERS && mha_py_given(layer->options.rows);

    if (!call->failed && n != MHA_PY_N_PROJECTIONS && n != MHA_PY_N_PARAMETERS) {
        mha_py_type_error(call, tuple, "projections", "a tuple (W_q, W_k, W_v, W_o)");
    }
    if (is_joint) {
        mha_py_take_joint(call, tuple, layer);
    }
    for (int i = is_joint ? MHA_PY_W_O : 0; i < MHA_PY_N_PROJECTIONS && !call->failed; i++) {
        PyObject *const one = PyTuple_GetItem(tuple, i);

        if (one != Py_None && n == MHA_PY_N_PARAMETERS) { /* None: the caller zeroed the struct */
            mha_py_take_in_rows(call, one, PyTuple_GetItem(tuple, i + MHA_PY_N_PROJECTIONS), projection_names[i],
                                &layer->queries, &layer->W[i]);
        } else if (one != Py_None) {
            mha_py_take_projection(call, one, projection_names[i], &layer->queries, &layer->W[i]);
        }
    }
}

/* --- Feature sizes ------------------------------------------------------------------------------ */

/* How many features come out of a projection of `features`; *fits becomes 0 if it does not take so many. */
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

/* The feature sizes of a projection, or None; a new reference. */
static PyObject *
sizes_of(const mha_py_layer *layer, int which)
{
    const mha_linear *linear = &layer->W[which].linear;

    return is_projected(layer, which)
               ? Py_BuildValue("(nn)", (Py_ssize_t)linear->out_features, (Py_ssize_t)linear->in_features)
               : Py_BuildValue("");
}

static void
check_features(mha_py_call *call, mha_py_layer *layer)
{
    const mha_py_array *w_v = &layer->w_v;
    const npy_intp heads = layer->heads, kv_heads = layer->kv_heads;
    int fit = 1;

    layer->qk_features = projected(layer, MHA_PY_W_Q, layer->queries.shape[2], &fit);
    layer->key_features = projected(layer, MHA_PY_W_K, layer->keys.shape[2], &fit);
    layer->value_features = projected(layer, MHA_PY_W_V, layer->values.shape[2], &fit);
    layer->context_features = layer->value_features / kv_heads * heads;
    layer->out_features = projected(layer, MHA_PY_W_O, layer->context_features, &fit);
    fit = fit && heads % kv_heads == 0 && layer->qk_features % heads == 0 && layer->key_features % kv_heads == 0;
    fit = fit && layer->qk_features / heads == layer->key_features / kv_heads && layer->value_features % kv_heads == 0;
    fit = fit && (w_v->array == NULL || (w_v->rank == 1 && w_v->shape[0] == layer->qk_features / heads));
    if (!fit) {
        mha_py_refuse(call, "features", "(OOO(NNNN)Onn)", layer->queries.array, layer->keys.array, layer->values.array,
                      sizes_of(layer, MHA_PY_W_Q), sizes_of(layer, MHA_PY_W_K), sizes_of(layer, MHA_PY_W_V),
                      sizes_of(layer, MHA_PY_W_O), mha_py_or_none(w_v->array), (Py_ssize_t)heads, (Py_ssize_t)kv_heads);
    }
}

/* --- Options and sizes -------------------------------------------------------------------------------------- */

static npy_intp
take_heads(mha_py_call *call, PyObject *value, const char *name)
{
    const int64_t heads = mha_py_whole(call, value, name, 1);

    return call->failed ? 1 : heads > NPY_MAX_INTP ? NPY_MAX_INTP : (npy_intp)heads;
}

static void
take_options(mha_py_call *call, PyObject *const *values, mha_py_layer *layer)
{
    PyObject *const heads = values[MHA_PY_HEADS];

    if (PyTuple_CheckExact(heads) && PyTuple_Size(heads) == 2) {
        layer->heads = take_heads(call, PyTuple_GetItem(heads, 0), "num_heads");
        layer->kv_heads = take_heads(call, PyTuple_GetItem(heads, 1), "num_kv_heads");
    } else {
        layer->heads = layer->kv_heads = take_heads(call, heads, "num_heads");
    }
    layer->args.attention.empty_rows = mha_py_empty_rows(call, values[MHA_PY_EMPTY]);
    layer->args.attention.dropout = mha_py_probability(call, values[MHA_PY_DROPOUT]);
    layer->args.attention.seed = mha_py_seed(call, values[MHA_PY_SEED]);
    if (layer->options.any) {
        mha_py_take_score_numbers(call, &layer->options.scores, &layer->scores, &layer->args.attention);
    }
}

static mha_layer_input
input_of(const mha_py_layer *layer, int which, const mha_py_array *rows)
{
    mha_layer_input input = layer->args.inputs[which]; /* what turns it, and where it is kept */

    input.rows = mha_py_operand(rows);
    input.size = (size_t)rows->shape[2];
    input.W = layer->W[which].linear;
    return input;
}

void
mha_py_note_sizes(mha_py_layer *layer)
{
    mha_layer_args *args = &layer->args;
    mha_attention_args *attention = &args->attention;

    attention->dtype = mha_py_dtype(layer->queries.type);
    attention->batch = (size_t)layer->queries.shape[0];
    attention->queries = (size_t)layer->queries.shape[1];
    attention->keys = (size_t)layer->keys.shape[1];
    attention->heads = (size_t)layer->heads;
    attention->kv_heads = (size_t)layer->kv_heads;
    attention->additive_weights = layer->w_v.data;
    args->inputs[MHA_QUERIES] = input_of(layer, MHA_PY_W_Q, &layer->queries);
    args->inputs[MHA_KEYS] = input_of(layer, MHA_PY_W_K, &layer->keys);
    args->inputs[MHA_VALUES] = input_of(layer, MHA_PY_W_V, &layer->values);
    args->W_o = layer->W[MHA_PY_W_O].linear;
    mha_py_see_lengths(&layer->scores.lengths, &attention->visible);
    layer->work = mha_layer_work(args);
}

/* --- Turns and masks -------------------------------------------------------------------------------- */

mha_turn
mha_py_take_turn(mha_py_call *call, PyObject *value, npy_intp rows, const mha_py_layer *layer)
{
    npy_intp shape[] = {layer->queries.shape[0], rows, layer->qk_features / layer->heads / 2};
    mha_turn turn = {.pairs = (size_t)shape[2]};

    if (call->failed || !mha_py_given(value)) {
        return (mha_turn){.cos = NULL};
    }
    if (!PyTuple_Check(value) || PyTuple_Size(value) != 2) {
        mha_py_type_error(call, value, "turn", "None or (cosines, sines)");
    }
    for (int i = 0, rank = 2; i < 2 && !call->failed; i++) {
        mha_py_array table = {0};

        mha_py_take(call, PyTuple_GetItem(value, i), i == 0 ? "cosines" : "sines", MHA_PY_DENSE, &layer->queries,
                    &table);
        if (i == 0 && !call->failed && (table.rank == 2 || table.rank == 3)) { /* the sines are like the cosines */
            rank = table.rank;
            shape[1] = table.shape[rank - 2] > rows ? table.shape[rank - 2] : rows;
        }
        mha_py_need_shape(call, &table, rank, shape + 3 - rank);
        *(i == 0 ? &turn.cos : &turn.sin) = table.data;
        turn.batch_stride = rank == 3 ? shape[1] * shape[2] : 0;
    }
    return turn;
}

/* Inserts an axis of one head into a mask (B, Q, K) of a layer that has one. */
static void
add_head_axis(mha_py_array *mask)
{
    if (mask->rank == 3) {
        for (int i = 3; i > 1; i--) {
            mask->shape[i] = mask->shape[i - 1];
            mask->stride[i] = mask->stride[i - 1];
        }
        mask->shape[1] = 1;
        mask->stride[1] = 0;
        mask->rank = 4;
    }
}

static void
place_masks(mha_py_call *call, npy_intp n_keys, mha_py_layer *layer)
{
    mha_py_scores *scores = &layer->scores;
    const npy_intp shape[4] = {layer->queries.shape[0], layer->heads, layer->queries.shape[1], n_keys};

    scores->rank = 4;
    memcpy(scores->shape, shape, sizeof(shape));
    layer->bias_rank = scores->bias.rank;
    if (layer->heads == 1) {
        add_head_axis(&scores->keep_mask);
        add_head_axis(&scores->bias);
    }
    mha_py_place_scores(call, &layer->options.scores, &layer->queries, scores, &layer->args.attention);
}

void
mha_py_place_layer(mha_py_call *call, PyObject *const *values, npy_intp n_keys, mha_py_layer *layer)
{
    if (layer->options.any) {
        place_masks(call, n_keys, layer);
    }
    mha_py_draw_seed(call, values[MHA_PY_SEED], &layer->args.attention.seed);
}

/* --- The whole ------------------------------------------------------------------------------------- */

mha_py_options
mha_py_layer_options(mha_py_call *call, PyObject *tuple)
{
    PyObject *at[MHA_PY_N_OPTIONS] = {NULL};
    const int any = mha_py_given(tuple);
    const Py_ssize_t n = !any ? 0 : PyTuple_Check(tuple) ? PyTuple_Size(tuple) : MHA_PY_N_OPTIONS + 1;

    if (!call->failed && n > MHA_PY_N_OPTIONS) {
        mha_py_type_error(call, tuple, "options",
                          "None or a tuple (causal, keep_mask, bias, turn, rows, window_left, window_right, scale, "
                          "score_terms)");
    }
    for (Py_ssize_t i = 0; i < n && !call->failed; i++) {
        at[i] = PyTuple_GetItem(tuple, i);
    }
    for (int i = MHA_PY_LEFT; i <= MHA_PY_RIGHT; i++) {
        at[i] = at[i] == Py_None ? NULL : at[i];
    }
    return (mha_py_options){
        .any = any,
        .scores = {.causal = at[MHA_PY_CAUSAL],
                   .keep_mask = at[MHA_PY_KEEP_MASK],
                   .bias = at[MHA_PY_BIAS],
                   .window_left = at[MHA_PY_LEFT],
                   .window_right = at[MHA_PY_RIGHT],
                   .scale = at[MHA_PY_SCALE],
                   .terms = at[MHA_PY_TERMS]},
        .turn = at[MHA_PY_TURN],
        .rows = at[MHA_PY_ROWS_OF],
    };
}

void
mha_py_take_layer(mha_py_call *call, PyObject *const *values, PyObject *options, mha_py_layer *layer)
{
    mha_layer_args *args = &layer->args;

    layer->options = mha_py_layer_options(call, options);
    take_options(call, values, layer); /* first: a number may be an object whose methods run */
    take_inputs(call, values, layer);
    take_projections(call, values[MHA_PY_FOUR], layer);
    if (layer->options.any) {
        mha_py_take_mask(call, layer->options.scores.keep_mask, "keep_mask", NULL, &layer->scores.keep_mask);
        mha_py_take_mask(call, layer->options.scores.bias, "bias", &layer->queries, &layer->scores.bias);
    }
    if (call->failed) {
        return;
    }
    check_features(call, layer);
    if (mha_py_given(layer->options.turn)) {
        const int turns_keys = is_projected(layer, MHA_PY_W_K);
        const npy_intp queries = layer->queries.shape[1], keys = turns_keys ? layer->keys.shape[1] : 0;
        const mha_turn turn = mha_py_take_turn(call, layer->options.turn, queries > keys ? queries : keys, layer);

        args->inputs[MHA_QUERIES].turn = turn;
        args->inputs[MHA_KEYS].turn = turns_keys ? turn : (mha_turn){.cos = NULL};
    }
    if (!call->failed) {
        mha_py_note_sizes(layer);
    }
}

void
mha_py_use_projected(mha_py_layer *layer, npy_intp n_keys)
{
    layer->keys.shape[1] = layer->values.shape[1] = n_keys;
    layer->W[MHA_PY_W_K].linear = layer->W[MHA_PY_W_V].linear = (mha_linear){.weight = NULL};
    layer->args.inputs[MHA_KEYS].turn = (mha_turn){.cos = NULL};
    layer->args.inputs[MHA_KEYS].reads_hidden = layer->args.inputs[MHA_VALUES].reads_hidden = 1; /* rows of a cache */
    mha_py_note_sizes(layer);
}

/* --- What is kept ------------------------------------------------------------------------------------ */

/* In doubles, which do not wrap around; their rounding does not matter here. */
static int
weights_are_smaller(const mha_py_layer *layer)
{
    const double batch = (double)layer->args.attention.batch;
    const double queries = (double)layer->args.attention.queries, keys = (double)layer->args.attention.keys;

    return batch * (double)layer->heads * queries * keys <=
           batch * (queries * (double)layer->qk_features + keys * (double)layer->key_features);
}

void
mha_py_list_kept(mha_py_layer *layer, int training, mha_py_kept_array kept[MHA_PY_N_KEPT])
{
    mha_layer_args *args = &layer->args;
    mha_layer_input *inputs = args->inputs;
    mha_attention_args *attention = &args->attention;
    const npy_intp batch = layer->queries.shape[0], queries = layer->queries.shape[1], keys = layer->keys.shape[1];
    const npy_intp heads = layer->heads, context = layer->context_features;
    const int has_W_q = is_projected(layer, MHA_PY_W_Q), has_W_k = is_projected(layer, MHA_PY_W_K);
    const int has_W_v = is_projected(layer, MHA_PY_W_V), has_W_o = is_projected(layer, MHA_PY_W_O);
    const int again = (training && has_W_q && has_W_k) || !weights_are_smaller(layer); /* weights, when read */

    for (int i = 0; i < MHA_PY_N_KEPT; i++) {
        kept[i].wanted = 0; /* most of the others are no arrays of numbers */
    }
    kept[MHA_PY_KEPT_WEIGHTS] =
        (mha_py_kept_array){"attention_weights", 4, !again, {batch, heads, queries, keys}, &attention->weights};
    kept[MHA_PY_KEPT_Q] = (mha_py_kept_array){"the projected queries",
                                              3,
                                              again || (training && has_W_q),
                                              {batch, queries, layer->qk_features},
                                              &inputs[MHA_QUERIES].projected};
    kept[MHA_PY_KEPT_K] = (mha_py_kept_array){"the projected keys",
                                              3,
                                              again || (training && has_W_k),
                                              {batch, keys, layer->key_features},
                                              &inputs[MHA_KEYS].projected};
    kept[MHA_PY_KEPT_W_V] =
        (mha_py_kept_array){"w_v", 1, again && layer->w_v.array != NULL, {layer->w_v.shape[0]}, NULL};
    kept[MHA_PY_KEPT_ROW_MAX] =
        (mha_py_kept_array){"the row statistics", 3, again || training, {batch, heads, queries}, &attention->row_max};
    kept[MHA_PY_KEPT_ROW_SUM] = kept[MHA_PY_KEPT_ROW_MAX];
    kept[MHA_PY_KEPT_ROW_SUM].place = &attention->row_sum;
    kept[MHA_PY_KEPT_V] = (mha_py_kept_array){"the projected values",
                                              3,
                                              training && has_W_v,
                                              {batch, keys, layer->value_features},
                                              &inputs[MHA_VALUES].projected};
    kept[MHA_PY_KEPT_CONTEXT] = (mha_py_kept_array){
        "the attended values", 3, training, {batch, queries, context}, has_W_o ? &args->context : NULL};
}
