/*
 * py_layer.c: layer_forward and layer_forward_training, one whole attention layer per call.
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

/* Memory for it; arrays[i] is NULL where a call like this keeps nothing. */
static void
make_kept(mha_py_call *call, mha_py_layer *layer, int training, PyArrayObject *arrays[MHA_PY_N_KEPT_ARRAYS])
{
    mha_py_kept_array kept[MHA_PY_N_KEPT_ARRAYS];

    mha_py_list_kept(layer, training, kept);
    for (int i = 0; i < MHA_PY_N_KEPT_ARRAYS; i++) {
        /* Rows beyond the lengths are never written, and a pickle must not hold garbage. */
        const int zeroed = i <= MHA_PY_CONTEXT && layer->lengths.array != NULL;

        arrays[i] = !kept[i].wanted ? NULL
                                    : (zeroed ? mha_py_zeros : mha_py_new)(call, kept[i].name, kept[i].rank,
                                                                           kept[i].dims, layer->queries.type);
        if (kept[i].place != NULL) {
            *kept[i].place = mha_py_data(arrays[i]);
        }
    }
}

/* New private copy of w_v: an optimizer may change the layer's own in place. */
static PyArrayObject *
keep_w_v(mha_py_call *call, mha_py_layer *layer)
{
    const mha_py_array *w_v = &layer->w_v;
    PyArrayObject *copy = w_v->array == NULL ? NULL : mha_py_new(call, "w_v", 1, w_v->shape, w_v->type);

    if (copy != NULL) {
        memcpy(PyArray_DATA(copy), w_v->data, (size_t)w_v->shape[0] * mha_py_itemsize(w_v->type));
        layer->args.additive_weights = PyArray_DATA(copy);
    }
    return copy;
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

static int
run(mha_py_call *call, mha_py_layer *layer, PyArrayObject *out, PyArrayObject *const *kept)
{
    mha_layer_args *args = &layer->args;
    void *q = mha_py_data(kept[MHA_PY_Q]), *k = mha_py_data(kept[MHA_PY_K]);
    void *context = mha_py_data(kept[MHA_PY_CONTEXT]);
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
    return mha_py_attach(call, status);
}

/* The layout of `saved` is read back by kept_weights.py alone. */
static PyObject *
make_saved(const mha_py_call *call, const mha_py_layer *layer, PyObject *const *values, PyArrayObject *const *kept,
           PyArrayObject *w_v)
{
    PyObject *const *words = call->state->kept;

    if (kept[MHA_PY_KEPT_WEIGHTS] != NULL) {
        return PyTuple_Pack(2, words[MHA_PY_WORD_WEIGHTS], (PyObject *)kept[MHA_PY_KEPT_WEIGHTS]);
    }
    return PyTuple_Pack(10, words[MHA_PY_WORD_RECOMPUTE], words[MHA_PY_WORD_ISA], (PyObject *)kept[MHA_PY_Q],
                        (PyObject *)kept[MHA_PY_K], mha_py_or_none(w_v), (PyObject *)kept[MHA_PY_ROW_MAX],
                        (PyObject *)kept[MHA_PY_ROW_SUM], mha_py_or_none(layer->lengths.array), values[MHA_PY_HEADS],
                        values[MHA_PY_EMPTY]);
}

/* Read back by py_layer_backward.c alone; copies of inputs that nothing projects are no part of it. */
static PyObject *
make_tape(const mha_py_layer *layer, PyArrayObject *const *kept)
{
    const mha_layer_args *args = &layer->args;

    return PyTuple_Pack(MHA_PY_N_TAPE_ARRAYS + 1, mha_py_or_none(args->W_q.weight != NULL ? kept[MHA_PY_Q] : NULL),
                        mha_py_or_none(args->W_k.weight != NULL ? kept[MHA_PY_K] : NULL),
                        mha_py_or_none(kept[MHA_PY_V]), mha_py_or_none(kept[MHA_PY_CONTEXT]),
                        mha_py_or_none(kept[MHA_PY_ROW_MAX]), mha_py_or_none(kept[MHA_PY_ROW_SUM]),
                        mha_py_or_none(layer->lengths.array));
}

PyObject *
mha_py_run_layer(mha_py_call *call, mha_py_layer *layer, PyObject *const *values, int training)
{
    const npy_intp dims[] = {layer->queries.shape[0], layer->queries.shape[1], layer->out_features};
    PyArrayObject *kept[MHA_PY_N_KEPT_ARRAYS], *out, *w_v = NULL;
    PyObject *answer, *saved, *tape;

    make_kept(call, layer, training, kept);
    if (kept[MHA_PY_KEPT_WEIGHTS] == NULL) {
        w_v = keep_w_v(call, layer);
    }
    out = mha_py_new(call, "the output", 3, dims, layer->queries.type);
    if (call->failed || run(call, layer, out, kept) < 0) {
        return NULL;
    }
    answer = mha_py_own(call, mha_py_answer(call, out));
    saved = answer == NULL ? NULL : mha_py_own(call, make_saved(call, layer, values, kept, w_v));
    if (saved == NULL || !training) {
        return saved == NULL ? NULL : PyTuple_Pack(2, answer, saved);
    }
    tape = mha_py_own(call, make_tape(layer, kept));
    return tape == NULL ? NULL : PyTuple_Pack(3, answer, saved, tape);
}

static PyObject *
layer_forward(mha_py_call *call, PyObject *const *values, int training)
{
    mha_py_layer layer = {0};

    return mha_py_take_layer(call, values, MHA_PY_PROJECTIONS, &layer) < 0
               ? NULL
               : mha_py_run_layer(call, &layer, values, training);
}

PyObject *
py_layer_forward(mha_py_call *call, PyObject *const *values)
{
    return layer_forward(call, values, 0);
}

PyObject *
py_layer_forward_training(mha_py_call *call, PyObject *const *values)
{
    return layer_forward(call, values, 1);
}
