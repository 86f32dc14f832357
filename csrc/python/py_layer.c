/*
 * py_layer.c: layer_forward and layer_forward_training, one whole attention layer per call.
 *
 * What is kept for `attention_weights` is decided here: the weights themselves where they are
 * no more numbers than q and k; else q and k (projected by the core, or copied from the
 * inputs) with the row statistics, from which _saved.py rebuilds the weights on demand.
 * In training the projected q and k are kept anyway, so there the weights never are if both
 * are projected: the call then pays nothing for a later look at them.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h"

#include <string.h>

typedef struct {
    mha_py_layer layer;
    int training;
    PyArrayObject *out;
    PyArrayObject *weights;                    /* kept for attention_weights: either this, */
    PyArrayObject *kept_q, *kept_k, *kept_w_v; /* or these and */
    PyArrayObject *row_max, *row_sum;          /* these */
    PyArrayObject *v_projected, *context;      /* kept for the backward call, as are q, k and the statistics */
} layer_call;

static void
end_call(layer_call *call)
{
    mha_py_drop_layer(&call->layer);
    Py_XDECREF((PyObject *)call->out);
    Py_XDECREF((PyObject *)call->weights);
    Py_XDECREF((PyObject *)call->kept_q);
    Py_XDECREF((PyObject *)call->kept_k);
    Py_XDECREF((PyObject *)call->kept_w_v);
    Py_XDECREF((PyObject *)call->row_max);
    Py_XDECREF((PyObject *)call->row_sum);
    Py_XDECREF((PyObject *)call->v_projected);
    Py_XDECREF((PyObject *)call->context);
}

static int
is_projected(const layer_call *call, int which)
{
    return call->layer.W[which].linear.weight != NULL;
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

mha_py_kept
mha_py_what_is_kept(const mha_py_layer *layer, int training)
{
    const int has_W_q = layer->W[MHA_PY_W_Q].linear.weight != NULL;
    const int has_W_k = layer->W[MHA_PY_W_K].linear.weight != NULL;
    const int rebuild = (training && has_W_q && has_W_k) || !weights_are_smaller(layer);
    const mha_py_kept kept = {
        .weights = !rebuild,
        .queries = rebuild || (training && has_W_q),
        .keys = rebuild || (training && has_W_k),
        .statistics = rebuild || training,
    };
    return kept;
}

/* One array to be kept, or NULL with an exception. */
static PyArrayObject *
keep(const mha_py_layer *layer, const char *name, npy_intp rows, npy_intp features, void **data_ret)
{
    const npy_intp dims[] = {layer->queries.shape[0], rows, features};
    /* Rows beyond the lengths are never written, and a pickle must not hold garbage. */
    PyArrayObject *kept = layer->lengths.array != NULL ? mha_py_zeros(name, 3, dims, layer->queries.type)
                                                       : mha_py_new(name, 3, dims, layer->queries.type);

    if (kept != NULL && data_ret != NULL) {
        *data_ret = PyArray_DATA(kept);
    }
    return kept;
}

/* New private copy of w_v: an optimizer may change the layer's own in place. */
static int
keep_w_v(layer_call *call)
{
    const mha_py_array *w_v = &call->layer.w_v;

    if (w_v->array == NULL) {
        return 0;
    }
    call->kept_w_v = mha_py_new("w_v", 1, w_v->shape, w_v->type);
    if (call->kept_w_v == NULL) {
        return -1;
    }
    memcpy(PyArray_DATA(call->kept_w_v), w_v->data, (size_t)w_v->shape[0] * mha_py_itemsize(w_v->type));
    call->layer.args.additive_weights = PyArray_DATA(call->kept_w_v);
    return 0;
}

/* Memory for what `attention_weights` and the backward call will want. */
static int
make_kept(layer_call *call)
{
    mha_py_layer *layer = &call->layer;
    const npy_intp queries = layer->queries.shape[1], keys = layer->keys.shape[1];
    const npy_intp weights[] = {layer->queries.shape[0], layer->heads, queries, keys};
    const int type = layer->queries.type;
    const mha_py_kept kept = mha_py_what_is_kept(layer, call->training);

    if (kept.weights) {
        call->weights = mha_py_new("attention_weights", 4, weights, type);
        if (call->weights == NULL) {
            return -1;
        }
        layer->args.weights = PyArray_DATA(call->weights);
    }
    if (kept.queries) {
        call->kept_q = keep(layer, "the projected queries", queries, layer->qk_features, NULL);
    }
    if (kept.keys && !PyErr_Occurred()) {
        call->kept_k = keep(layer, "the projected keys", keys, layer->qk_features, NULL);
    }
    if (kept.statistics && !PyErr_Occurred()) {
        call->row_max = mha_py_new("the row statistics", 3, weights, type);
        call->row_sum = call->row_max == NULL ? NULL : mha_py_new("the row statistics", 3, weights, type);
    }
    if (PyErr_Occurred()) {
        return -1;
    }
    if (call->row_sum != NULL) {
        layer->args.row_max = PyArray_DATA(call->row_max);
        layer->args.row_sum = PyArray_DATA(call->row_sum);
    }
    return kept.weights ? 0 : keep_w_v(call);
}

static int
make_outputs(layer_call *call)
{
    mha_py_layer *layer = &call->layer;
    const npy_intp queries = layer->queries.shape[1], keys = layer->keys.shape[1];
    const npy_intp out[] = {layer->queries.shape[0], queries, layer->out_features};

    call->out = mha_py_new("the output", 3, out, layer->queries.type);
    if (call->out == NULL) {
        return -1;
    }
    layer->args.out = PyArray_DATA(call->out);
    if (call->training && is_projected(call, MHA_PY_W_V)) {
        call->v_projected = keep(layer, "the projected values", keys, layer->value_features, &layer->args.v_projected);
        if (call->v_projected == NULL) {
            return -1;
        }
    }
    if (call->training) {
        call->context = keep(layer, "the attended values", queries, layer->value_features,
                             is_projected(call, MHA_PY_W_O) ? &layer->args.context : NULL);
        if (call->context == NULL) {
            return -1;
        }
    }
    return make_kept(call);
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

static void
point_at(mha_operand *operand, const mha_py_array *shape, void *dense)
{
    operand->data = dense;
    operand->row_stride = (ptrdiff_t)shape->shape[2];
    operand->batch_stride = (ptrdiff_t)(shape->shape[1] * shape->shape[2]);
}

/*
 * Where to keep q and k.  A side without projection is copied before the call and the core is
 * given the copy, so that what is kept is what was used even if another thread is writing.
 * Runs without the interpreter: no Python here.
 */
static void
keep_q_and_k(mha_py_layer *layer, void *kept_q, void *kept_k)
{
    mha_layer_args *args = &layer->args;

    if (args->W_q.weight != NULL) {
        args->q_projected = kept_q;
    } else if (kept_q != NULL) {
        for (size_t b = 0; b < args->batch; b++) {
            copy_rows(&layer->queries, b, args->queries, kept_q);
        }
        point_at(&args->query_rows, &layer->queries, kept_q);
    }
    if (args->W_k.weight != NULL) {
        args->k_projected = kept_k;
    } else if (kept_k != NULL) {
        for (size_t b = 0; b < args->batch; b++) {
            copy_rows(&layer->keys, b, visible_keys(layer, b), kept_k);
        }
        point_at(&args->key_rows, &layer->keys, kept_k);
    }
}

/* --- Running ------------------------------------------------------------------------------------------- */

static int
run(layer_call *call, const char *function)
{
    void *kept_q = call->kept_q == NULL ? NULL : PyArray_DATA(call->kept_q);
    void *kept_k = call->kept_k == NULL ? NULL : PyArray_DATA(call->kept_k);
    PyThreadState *saved = mha_py_detach(mha_py_layer_work(&call->layer));
    mha_status status;

    keep_q_and_k(&call->layer, kept_q, kept_k);
    status = mha_layer_forward(&call->layer.args);
    if (call->context != NULL && call->layer.args.context == NULL) { /* without W_o: a copy, the user may change out */
        memcpy(PyArray_DATA(call->context), PyArray_DATA(call->out), (size_t)PyArray_NBYTES(call->out));
    }
    mha_py_attach(saved);
    return mha_py_check(status, function);
}

/* The layout of `saved` is read back by _saved.py alone. */
static PyObject *
make_saved(const layer_call *call)
{
    const mha_py_layer *layer = &call->layer;

    if (call->weights != NULL) {
        return Py_BuildValue("(sO)", "weights", call->weights);
    }
    return Py_BuildValue("(ssOOOOOOns)", "recompute", mha_isa_name(mha_isa_active()), call->kept_q, call->kept_k,
                         mha_py_borrow(call->kept_w_v), call->row_max, call->row_sum,
                         mha_py_borrow(layer->lengths.array), (Py_ssize_t)layer->heads,
                         layer->args.empty_rows == MHA_EMPTY_ZERO ? "zero" : "uniform");
}

/* In the order of layer_call.h; read back by py_layer_backward.c alone. */
static PyObject *
make_tape(const layer_call *call)
{
    PyArrayObject *q = is_projected(call, MHA_PY_W_Q) ? call->kept_q : NULL;
    PyArrayObject *k = is_projected(call, MHA_PY_W_K) ? call->kept_k : NULL;

    return PyTuple_Pack(MHA_PY_N_TAPE, mha_py_borrow(q), mha_py_borrow(k), mha_py_borrow(call->v_projected),
                        mha_py_borrow(call->context), (PyObject *)call->row_max, (PyObject *)call->row_sum,
                        mha_py_borrow(call->layer.lengths.array));
}

static PyObject *
forward(PyObject *module, PyObject **values, int training)
{
    layer_call call = {.training = training};
    mha_py_views views = {.n = 0};
    PyObject *result = NULL, *out = NULL, *saved = NULL, *tape = NULL;

    if (mha_py_view_tensors(module, values, MHA_PY_N_LAYER, &views) == 0 &&
        mha_py_take_layer(module, values, MHA_PY_PROJECTIONS, &views, &call.layer) == 0 && make_outputs(&call) == 0 &&
        run(&call, training ? "layer_forward_training" : "layer_forward") == 0) {
        out = mha_py_answer(module, call.out, &views);
        saved = out == NULL ? NULL : make_saved(&call);
    }
    if (saved != NULL && training) {
        tape = make_tape(&call);
    }
    if (tape != NULL) {
        result = PyTuple_Pack(3, out, saved, tape);
    } else if (saved != NULL && !training) {
        result = PyTuple_Pack(2, out, saved);
    }
    Py_XDECREF(tape);
    Py_XDECREF(saved);
    Py_XDECREF(out);
    end_call(&call);
    mha_py_drop_views(&views);
    return result;
}

PyObject *
py_layer_forward(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PyObject *values[MHA_PY_N_LAYER];

    if (mha_py_arguments("layer_forward", args, n_args, MHA_PY_N_LAYER, MHA_PY_N_LAYER, values) < 0) {
        return NULL;
    }
    return forward(module, values, 0);
}

PyObject *
py_layer_forward_training(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PyObject *values[MHA_PY_N_LAYER];

    if (mha_py_arguments("layer_forward_training", args, n_args, MHA_PY_N_LAYER, MHA_PY_N_LAYER, values) < 0) {
        return NULL;
    }
    return forward(module, values, 1);
}
