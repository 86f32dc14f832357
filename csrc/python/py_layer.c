/*
 * py_layer.c: layer_forward, one whole attention layer per call.
 *
 * What is kept for `attention_weights`: the weights themselves where they are no more numbers than q and k; else q and
 * k (projected by the core, or copied from the inputs) with the row statistics, from which kept_weights.py rebuilds the
 * weights on demand.  In training the projected q and k are kept anyway: so if both are projected, the weights never
 * are kept, and the call pays nothing for a later look at them.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h"

#include <string.h>

/* --- What is kept ------------------------------------------------------------------------------------ */

/* Makes memory for what is kept; arrays[i] is NULL if a call like this keeps no numbers there. */
static void
make_kept(mha_py_call *call, mha_py_layer *layer, int training, PyArrayObject *arrays[MHA_PY_N_KEPT])
{
    mha_py_kept_array kept[MHA_PY_N_KEPT];

    mha_py_list_kept(layer, training, kept);
    for (int i = 0; i < MHA_PY_N_KEPT; i++) {
        arrays[i] = NULL;
        if (!kept[i].wanted) {
            continue; /* its place is still NULL */
        }
        arrays[i] = mha_py_new(call, kept[i].name, kept[i].rank, kept[i].dims, layer->queries.type);
        if (kept[i].place != NULL) {
            *kept[i].place = mha_py_data(arrays[i]);
        }
    }
}

/* Uses a copy of w_v, which an optimizer may change in place later.  (Of inputs that nothing projects the core itself
 * makes copies.) */
static void
use_copy_of_w_v(const mha_py_call *call, mha_py_layer *layer, PyArrayObject *copy)
{
    if (!call->failed && copy != NULL) {
        layer->args.attention.additive_weights =
            memcpy(PyArray_DATA(copy), layer->w_v.data, (size_t)PyArray_NBYTES(copy));
    }
}

/*
 * The options that the weights depend on, as the call used them: with copies of the masks, which it will use, too.
 * None without such options, and if the weights themselves are kept.  Borrowed.
 */
static PyObject *
kept_options(mha_py_call *call, mha_py_layer *layer, int keeps_weights)
{
    const mha_py_score_values *given = &layer->options.scores;
    mha_attention_args *attention = &layer->args.attention;
    const mha_py_scores *scores = &layer->scores;
    PyObject *const all[] = {given->causal,      given->keep_mask,    given->bias, given->scale,
                             given->window_left, given->window_right, given->terms};
    int any = 0;

    if (call->failed || keeps_weights || !layer->options.any) {
        return Py_None;
    }
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        any = any || mha_py_given(all[i]);
    }
    if (!any) {
        return Py_None;
    }
    PyArrayObject *const keep_mask = mha_py_copy_mask(call, scores, NPY_BOOL, &attention->keep_mask);
    PyArrayObject *const bias = mha_py_copy_mask(call, scores, layer->queries.type, &attention->bias);
    PyObject *const parts[] = {given->causal,      mha_py_or_none(keep_mask), mha_py_or_none(bias), NULL,        NULL,
                               given->window_left, given->window_right,       given->scale,         given->terms};
    PyObject *const tuple = mha_py_own(call, PyTuple_New(MHA_PY_N_OPTIONS));

    for (Py_ssize_t i = 0; i < MHA_PY_N_OPTIONS && tuple != NULL; i++) {
        PyObject *const part = mha_py_or_none(parts[i]);

        Py_INCREF(part);
        (void)PyTuple_SetItem(tuple, i, part);
    }
    return call->failed ? Py_None : tuple;
}

/* Read back by kept_weights.py and py_layer_backward.c. */
static PyObject *
tuple_of_kept(mha_py_call *call, const mha_py_layer *layer, PyObject *const *values, PyArrayObject *const *kept,
              PyObject *options, int training)
{
    const Py_ssize_t n = training || options != Py_None ? MHA_PY_N_KEPT : MHA_PY_N_KEPT_FOR_WEIGHTS;
    PyObject *const seed = training ? mha_py_own(call, PyLong_FromUnsignedLongLong(layer->args.attention.seed)) : NULL;

    return PyTuple_Pack(n, mha_py_active_isa(call), mha_py_or_none(kept[MHA_PY_KEPT_WEIGHTS]),
                        mha_py_or_none(kept[MHA_PY_KEPT_Q]), mha_py_or_none(kept[MHA_PY_KEPT_K]),
                        mha_py_or_none(kept[MHA_PY_KEPT_W_V]), mha_py_or_none(kept[MHA_PY_KEPT_ROW_MAX]),
                        mha_py_or_none(kept[MHA_PY_KEPT_ROW_SUM]), mha_py_or_none(layer->scores.lengths.array),
                        values[MHA_PY_HEADS], values[MHA_PY_EMPTY], mha_py_or_none(kept[MHA_PY_KEPT_V]),
                        mha_py_or_none(kept[MHA_PY_KEPT_CONTEXT]), mha_py_or_none(seed), options);
}

PyObject *
mha_py_run_layer(mha_py_call *call, mha_py_layer *layer, PyObject *const *values, int training)
{
    const npy_intp dims[] = {layer->queries.shape[0], layer->queries.shape[1], layer->out_features};
    PyArrayObject *kept[MHA_PY_N_KEPT];
    mha_py_array out = {0};
    PyObject *tuple;

    make_kept(call, layer, training, kept);
    use_copy_of_w_v(call, layer, kept[MHA_PY_KEPT_W_V]);
    PyObject *const options = kept_options(call, layer, kept[MHA_PY_KEPT_WEIGHTS] != NULL && !training);
    mha_py_new_result(call, "the output", 3, dims, layer->queries.type, &out);
    if (call->failed) {
        return NULL;
    }
    layer->args.out = mha_py_numbers(&out);
    mha_py_detach(call, layer->work);
    mha_py_attach(call, mha_layer_forward(&layer->args));
    if (!call->failed && layer->args.context == NULL && kept[MHA_PY_KEPT_CONTEXT] != NULL) {
        /* Without W_o: a copy, as the user may change the output. */
        memcpy(PyArray_DATA(kept[MHA_PY_KEPT_CONTEXT]), out.data, (size_t)PyArray_NBYTES(kept[MHA_PY_KEPT_CONTEXT]));
    }
    tuple = mha_py_own(call, tuple_of_kept(call, layer, values, kept, options, training));
    return call->failed ? NULL : PyTuple_Pack(2, out.array, tuple);
}

PyObject *
py_layer_forward(mha_py_call *call, PyObject *const *values)
{
    mha_py_layer layer = {0};
    const int training = mha_py_flag(call, values[MHA_PY_N_LAYER]);

    mha_py_take_layer(call, values, values[MHA_PY_N_LAYER + 1], &layer);
    mha_py_place_layer(call, values, layer.keys.shape[1], &layer);
    return mha_py_run_layer(call, &layer, values, training);
}
