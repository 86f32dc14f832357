/*
 * py_layer.c: layer_forward, one whole attention layer per call.
 *
 * What is kept for `attention_weights`: the weights themselves where they are no more numbers than q and k; else q and
 * k (projected by the core, or copied from the inputs) with the row statistics, from which kept_weights.py rebuilds the
 * weights on demand.  In training the projected q and k are kept anyway, so there the weights never are if both are
 * projected: the call then pays nothing for a later look at them.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h"

#include <string.h>

/* --- What is kept ------------------------------------------------------------------------------------ */

/* Memory for it; arrays[i] is NULL where a call like this keeps no numbers. */
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
        /* Rows beyond the lengths are never written, and a pickle must not hold garbage. */
        const int zeroed = kept[i].rank == 3 && layer->lengths.array != NULL;
        arrays[i] = (zeroed ? mha_py_zeros : mha_py_new)(call, kept[i].name, kept[i].rank, kept[i].dims,
                                                         layer->queries.type);
        if (kept[i].place != NULL) {
            *kept[i].place = mha_py_data(arrays[i]);
        }
    }
}

/* Computes with a private copy of w_v, if one is kept: an optimizer may change the layer's own in place. */
static void
use_copy_of_w_v(mha_py_layer *layer, void *copy)
{
    if (copy != NULL) {
        memcpy(copy, layer->w_v.data, (size_t)layer->w_v.shape[0] * mha_py_itemsize(layer->w_v.type));
        layer->args.additive_weights = copy;
    }
}

/* How many keys of a batch item any query may see. */
static size_t
visible_keys(const mha_py_layer *layer, size_t b)
{
    const mha_py_lengths *lengths = &layer->lengths;
    int64_t most = 0;

    if (lengths->array == NULL) {
        return layer->args.keys;
    }
    for (size_t i = 0; i < lengths->per_batch; i++) {
        const int64_t length = lengths->data[b * lengths->per_batch + i];

        most = length > most ? length : most;
    }
    return (uint64_t)most < layer->args.keys ? (size_t)most : layer->args.keys;
}

/* `n_rows` rows of batch item `b` into their place in a dense (B, rows, features) array. */
static void
copy_rows(const mha_py_array *from, size_t b, size_t n_rows, void *to)
{
    const size_t itemsize = mha_py_itemsize(from->type);
    const size_t row_bytes = (size_t)from->shape[2] * itemsize;
    const char *source = from->data;
    char *target = (char *)to + b * (size_t)from->shape[1] * row_bytes;

    source += (ptrdiff_t)b * from->stride[0] * (ptrdiff_t)itemsize;
    for (size_t r = 0; r < n_rows && row_bytes > 0; r++) {
        memcpy(target + r * row_bytes, source + (ptrdiff_t)r * from->stride[1] * (ptrdiff_t)itemsize, row_bytes);
    }
}

/*
 * Queries or keys without projection: copied before the call, and the core is given the copy, so that what is kept is
 * what was used even if another thread is writing.  Runs without the interpreter: no Python here.
 */
static void
use_copy(const mha_py_layer *layer, const mha_py_array *input, void *copy, mha_operand *operand)
{
    for (size_t b = 0; b < layer->args.batch; b++) {
        copy_rows(input, b, input == &layer->keys ? visible_keys(layer, b) : layer->args.queries, copy);
    }
    operand->data = copy;
    operand->row_stride = (ptrdiff_t)input->shape[2];
    operand->batch_stride = (ptrdiff_t)(input->shape[1] * input->shape[2]);
}

/* --- Running ------------------------------------------------------------------------------------------- */

static void
run(mha_py_call *call, mha_py_layer *layer, PyArrayObject *out, PyArrayObject *const *kept)
{
    mha_layer_args *args = &layer->args;
    void *q = mha_py_data(kept[MHA_PY_KEPT_Q]), *k = mha_py_data(kept[MHA_PY_KEPT_K]);
    void *context = mha_py_data(kept[MHA_PY_KEPT_CONTEXT]);
    const size_t out_bytes = (size_t)PyArray_NBYTES(out);
    mha_status status;

    args->out = PyArray_DATA(out);
    mha_py_detach(call, layer->work);
    if (q != args->q_projected) {
        use_copy(layer, &layer->queries, q, &args->query_rows);
    }
    if (k != args->k_projected) {
        use_copy(layer, &layer->keys, k, &args->key_rows);
    }
    status = mha_layer_forward(args);
    if (context != args->context) { /* without W_o: a copy, the user may change out */
        memcpy(context, args->out, out_bytes);
    }
    mha_py_attach(call, status);
}

/* Read back by kept_weights.py and py_layer_backward.c. */
static PyObject *
tuple_of_kept(mha_py_call *call, const mha_py_layer *layer, PyObject *const *values, PyArrayObject *const *kept,
              int training)
{
    PyObject *const isa = mha_py_own(call, PyUnicode_InternFromString(mha_isa_name(mha_isa_active())));

    return isa == NULL ? NULL : PyTuple_Pack(training ? MHA_PY_N_KEPT : MHA_PY_N_KEPT_FOR_WEIGHTS, isa,
                        mha_py_or_none(kept[MHA_PY_KEPT_WEIGHTS]), mha_py_or_none(kept[MHA_PY_KEPT_Q]),
                        mha_py_or_none(kept[MHA_PY_KEPT_K]), mha_py_or_none(kept[MHA_PY_KEPT_W_V]),
                        mha_py_or_none(kept[MHA_PY_KEPT_ROW_MAX]), mha_py_or_none(kept[MHA_PY_KEPT_ROW_SUM]),
                        mha_py_or_none(layer->lengths.array), values[MHA_PY_HEADS], values[MHA_PY_EMPTY],
                        mha_py_or_none(kept[MHA_PY_KEPT_V]), mha_py_or_none(kept[MHA_PY_KEPT_CONTEXT]));
}

PyObject *
mha_py_run_layer(mha_py_call *call, mha_py_layer *layer, PyObject *const *values, int training)
{
    const npy_intp dims[] = {layer->queries.shape[0], layer->queries.shape[1], layer->out_features};
    PyArrayObject *kept[MHA_PY_N_KEPT], *out;
    PyObject *answer, *tuple;

    make_kept(call, layer, training, kept);
    out = mha_py_new(call, "the output", 3, dims, layer->queries.type);
    if (call->failed) {
        return NULL;
    }
    use_copy_of_w_v(layer, mha_py_data(kept[MHA_PY_KEPT_W_V]));
    run(call, layer, out, kept);
    answer = mha_py_own(call, mha_py_answer(call, out));
    tuple = mha_py_own(call, tuple_of_kept(call, layer, values, kept, training));
    return call->failed ? NULL : PyTuple_Pack(2, answer, tuple);
}

PyObject *
py_layer_forward(mha_py_call *call, PyObject *const *values)
{
    mha_py_layer layer = {0};
    const int training = mha_py_flag(call, values[MHA_PY_N_LAYER]);

    mha_py_take_layer(call, values, &layer);
    return mha_py_run_layer(call, &layer, values, training);
}
