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

/* How many rows of keys the queries of the item see: from the first one on. */
static npy_intp
seen_rows(const mha_py_layer *layer, npy_intp item)
{
    const size_t n = layer->lengths.per_batch;
    int64_t most = layer->lengths.data == NULL ? layer->keys.shape[1] : 0;

    for (size_t i = (size_t)item * n; i < ((size_t)item + 1) * n; i++) {
        most = layer->lengths.data[i] > most ? layer->lengths.data[i] : most;
    }
    return most < layer->keys.shape[1] ? (npy_intp)most : layer->keys.shape[1];
}

/* Rows of keys and values that no query sees are read by nobody, and become 0: a pickle must not hold garbage. */
static void
clear_unseen(const mha_py_layer *layer, PyArrayObject *kept)
{
    const npy_intp rows = layer->keys.shape[1];
    size_t row_bytes;

    if (kept == NULL || layer->lengths.data == NULL) {
        return; /* nothing is kept, or every row is seen */
    }
    row_bytes = (size_t)(PyArray_DIM(kept, 2) * PyArray_ITEMSIZE(kept));
    for (npy_intp b = 0; b < layer->keys.shape[0] && row_bytes > 0; b++) {
        const npy_intp seen = seen_rows(layer, b);

        memset((char *)PyArray_DATA(kept) + (size_t)(b * rows + seen) * row_bytes, 0,
               (size_t)(rows - seen) * row_bytes);
    }
}

/*
 * Makes queries, or keys, their copy in `kept`, if there is one: so what is kept is what the core was given, even if
 * another thread is writing.  Keys that no query sees are not read.
 */
static void
use_copy(const mha_py_layer *layer, mha_py_array *array, PyArrayObject *kept)
{
    if (kept == NULL) {
        return;
    }
    const npy_intp batch = array->shape[0], rows = array->shape[1], features = array->shape[2];
    const ptrdiff_t itemsize = (ptrdiff_t)mha_py_itemsize(array->type);

    for (npy_intp b = 0; b < batch && features > 0; b++) {
        const char *from = (const char *)array->data + b * array->stride[0] * itemsize;
        char *to = (char *)PyArray_DATA(kept) + b * rows * features * itemsize;
        const npy_intp seen = array == &layer->keys ? seen_rows(layer, b) : rows;

        mha_py_copy_rows(to, from, seen, features * itemsize, array->stride[1] * itemsize);
    }
    array->data = PyArray_DATA(kept);
    array->stride[0] = rows * features;
    array->stride[1] = features;
}

/* Uses the copies of queries and keys that nothing projects, and of w_v, which an optimizer may change in place later.
 */
static void
use_copies(const mha_py_call *call, mha_py_layer *layer, PyArrayObject *const *kept)
{
    mha_layer_args *args = &layer->args;
    PyArrayObject *const w_v = kept[MHA_PY_KEPT_W_V];

    if (call->failed) {
        return;
    }
    if (w_v != NULL) {
        layer->w_v.data = memcpy(PyArray_DATA(w_v), layer->w_v.data, (size_t)PyArray_NBYTES(w_v));
    }
    use_copy(layer, &layer->queries, args->q_projected == NULL ? kept[MHA_PY_KEPT_Q] : NULL);
    use_copy(layer, &layer->keys, args->k_projected == NULL ? kept[MHA_PY_KEPT_K] : NULL);
    clear_unseen(layer, kept[MHA_PY_KEPT_K]);
    clear_unseen(layer, kept[MHA_PY_KEPT_V]);
    args->additive_weights = layer->w_v.data;
    args->query_rows = mha_py_operand(&layer->queries);
    args->key_rows = mha_py_operand(&layer->keys);
}

/* Read back by kept_weights.py and py_layer_backward.c. */
static PyObject *
tuple_of_kept(mha_py_call *call, const mha_py_layer *layer, PyObject *const *values, PyArrayObject *const *kept,
              int training)
{
    const Py_ssize_t n = training ? MHA_PY_N_KEPT : MHA_PY_N_KEPT_FOR_WEIGHTS;
    PyObject *const seed = training ? mha_py_own(call, PyLong_FromUnsignedLongLong(layer->args.seed)) : NULL;

    return PyTuple_Pack(n, mha_py_active_isa(call), mha_py_or_none(kept[MHA_PY_KEPT_WEIGHTS]),
                        mha_py_or_none(kept[MHA_PY_KEPT_Q]), mha_py_or_none(kept[MHA_PY_KEPT_K]),
                        mha_py_or_none(kept[MHA_PY_KEPT_W_V]), mha_py_or_none(kept[MHA_PY_KEPT_ROW_MAX]),
                        mha_py_or_none(kept[MHA_PY_KEPT_ROW_SUM]), mha_py_or_none(layer->lengths.array),
                        values[MHA_PY_HEADS], values[MHA_PY_EMPTY], mha_py_or_none(kept[MHA_PY_KEPT_V]),
                        mha_py_or_none(kept[MHA_PY_KEPT_CONTEXT]), seed == NULL ? Py_None : seed);
}

PyObject *
mha_py_run_layer(mha_py_call *call, mha_py_layer *layer, PyObject *const *values, int training)
{
    const npy_intp dims[] = {layer->queries.shape[0], layer->queries.shape[1], layer->out_features};
    PyArrayObject *kept[MHA_PY_N_KEPT];
    mha_py_array out = {0};
    PyObject *tuple;

    make_kept(call, layer, training, kept);
    use_copies(call, layer, kept);
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
    tuple = mha_py_own(call, tuple_of_kept(call, layer, values, kept, training));
    return call->failed ? NULL : PyTuple_Pack(2, out.array, tuple);
}

PyObject *
py_layer_forward(mha_py_call *call, PyObject *const *values)
{
    mha_py_layer layer = {0};
    const int training = mha_py_flag(call, values[MHA_PY_N_LAYER]);

    mha_py_take_layer(call, values, &layer);
    mha_py_no_options(call, values[MHA_PY_N_LAYER + 1]);
    return mha_py_run_layer(call, &layer, values, training);
}
