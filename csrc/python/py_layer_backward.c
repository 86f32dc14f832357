/*
 * py_layer_backward.c: layer_backward, the gradients of a whole layer from what
 * layer_forward_training kept.
 *
 * The tape may come from anywhere: type, shape and layout of everything in it are checked as if it were a user's
 * argument.  Its numbers are only computed with.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h"

enum { NEEDS_INPUTS = MHA_PY_N_BACKWARD, NEEDS_WEIGHTS, NEEDS_BIASES };

/* --- Inputs ------------------------------------------------------------------------------------- */

/* The arguments of the forward call, in its order; the lengths are the tape's. */
static int
take_layer(mha_py_call *call, PyObject *const *values, mha_py_layer *layer)
{
    PyObject *tape = values[MHA_PY_OF_TAPE];
    PyObject *forward[MHA_PY_N_LAYER];

    if (!PyTuple_Check(tape) || PyTuple_Size(tape) != MHA_PY_N_TAPE_ARRAYS + 1) {
        return mha_py_type_error(tape, "tape", "the tuple that layer_forward_training returned");
    }
    for (int i = 0; i < MHA_PY_N_INPUTS; i++) {
        forward[MHA_PY_QUERIES + i] = values[MHA_PY_OF_QUERIES + i];
    }
    forward[MHA_PY_LENS] = PyTuple_GetItem(tape, MHA_PY_N_TAPE_ARRAYS);
    for (int i = MHA_PY_FOUR; i < MHA_PY_N_LAYER; i++) { /* weights, w_v and the options */
        forward[i] = values[MHA_PY_OF_WEIGHTS + i - MHA_PY_FOUR];
    }
    return mha_py_take_layer(call, forward, MHA_PY_WEIGHTS, layer);
}

static int
take_tape(mha_py_call *call, PyObject *tape, mha_py_layer *layer)
{
    mha_py_kept_array kept[MHA_PY_N_KEPT_ARRAYS];

    mha_py_list_kept(layer, 1, kept);
    if (kept[MHA_PY_CONTEXT].place == NULL) {
        kept[MHA_PY_CONTEXT].place = &layer->args.out;
    }
    for (int i = 0; i < MHA_PY_N_TAPE_ARRAYS; i++) {
        if (kept[i].place != NULL && mha_py_take_numbers(call, PyTuple_GetItem(tape, i), kept[i].name, 3, kept[i].dims,
                                                         &layer->queries, kept[i].place) < 0) {
            return -1;
        }
    }
    return 0;
}

/* --- Outputs -------------------------------------------------------------------------------------- */

int
mha_py_take_needs(PyObject *value, const char *name, int n, int otherwise, int *needs)
{
    if (value != NULL && (!PyTuple_Check(value) || PyTuple_Size(value) != n)) {
        return mha_py_type_error(value, name,
                                 n == MHA_PY_N_INPUTS               ? "a tuple of 3 bools"
                                 : n == MHA_PY_N_PROJECTIONS ? "a tuple of 4 bools"
                                                             : "a tuple of bools, one for each tensor and one before");
    }
    for (int i = 0; i < n; i++) {
        needs[i] = value == NULL ? otherwise : PyObject_IsTrue(PyTuple_GetItem(value, i));
        if (needs[i] < 0) {
            return -1;
        }
    }
    return 0;
}

/*
 * An array like an input.  For a tensor whose batch is its second axis in memory (the outputs of a GRU, permuted)
 * the gradient has it there too: torch then takes it as it is, and copies it otherwise.
 */
static PyArrayObject *
new_like(mha_py_call *call, const mha_py_array *input, const char *name)
{
    const npy_intp *dims = input->shape;
    const npy_intp time_first[] = {dims[1], dims[0], dims[2]};
    PyArrayObject *array;

    if (!call->has_tensors || input->stride[2] != 1 || input->stride[0] != dims[2] ||
        input->stride[1] != dims[0] * dims[2] || dims[0] < 2 || dims[1] < 2) {
        return mha_py_new(call, name, 3, dims, input->type);
    }
    array = mha_py_new(call, name, 3, time_first, input->type);
    array = array == NULL ? NULL : (PyArrayObject *)mha_py_own(call, PyArray_SwapAxes(array, 0, 1));
    call->failed = array == NULL;
    return array;
}

/* Where the gradient of input i is added to that of an input before it; i: it has one of its own. */
static int
joined_with(PyObject *const *values, int i, int join)
{
    for (int j = 0; j < i && join; j++) {
        if (values[MHA_PY_OF_QUERIES + j] == values[MHA_PY_OF_QUERIES + i]) {
            return j;
        }
    }
    return i;
}

static int
make_input_gradients(mha_py_call *call, const mha_py_layer *layer, PyObject *const *values, const mha_py_needs *needs,
                     mha_py_layer_grads *made, mha_layer_grads *grads)
{
    static const char *const names[] = {"grad_queries", "grad_keys", "grad_values"};
    const mha_py_array *inputs[] = {&layer->queries, &layer->keys, &layer->values};

    for (int i = 0; i < MHA_PY_N_INPUTS; i++) {
        PyArrayObject **const with = &made->inputs[joined_with(values, i, needs->join)];

        if (!needs->inputs[i]) {
            continue;
        }
        *with = *with != NULL ? *with : new_like(call, inputs[i], names[i]);
        if (*with == NULL) {
            return -1;
        }
        grads->grad_inputs[i].data = PyArray_DATA(*with);
        grads->grad_inputs[i].batch_stride = PyArray_STRIDE(*with, 0) / PyArray_ITEMSIZE(*with);
        grads->grad_inputs[i].row_stride = PyArray_STRIDE(*with, 1) / PyArray_ITEMSIZE(*with);
    }
    return 0;
}

static int
make_parameter_gradients(mha_py_call *call, const mha_py_layer *layer, const mha_py_needs *needs,
                         mha_py_layer_grads *made, mha_layer_grads *grads)
{
    const int type = layer->queries.type;

    for (int i = 0; i < MHA_PY_N_PROJECTIONS; i++) {
        const mha_py_array *weight = &layer->W[i].weight;

        if (weight->array == NULL) {
            continue;
        }
        if (needs->weights[i]) {
            made->weights[i] = mha_py_new(call, "the gradient of a weight", 2, weight->shape, type);
        }
        if (needs->biases[i]) {
            made->biases[i] = mha_py_new(call, "the gradient of a bias", 1, weight->shape, type);
        }
        grads->weight[i] = weight->data;
        grads->grad_weight[i] = mha_py_data(made->weights[i]);
        grads->grad_bias[i] = mha_py_data(made->biases[i]);
    }
    if (layer->w_v.array != NULL) {
        const npy_intp dims[] = {1, layer->w_v.shape[0]};
        const int rank = needs->scorer_as_weight ? 2 : 1;

        made->w_v = mha_py_new(call, "grad_w_v", rank, dims + 2 - rank, type);
        grads->grad_additive_weights = mha_py_data(made->w_v);
    }
    return call->failed ? -1 : 0;
}

/* --- Running --------------------------------------------------------------------------------------- */

int
mha_py_run_backward(mha_py_call *call, PyObject *const *values, const mha_py_needs *needs, mha_py_layer_grads *made)
{
    mha_py_layer layer = {0};
    mha_layer_grads grads = {.forward = &layer.args};
    void *grad_out;

    if (take_layer(call, values, &layer) < 0 || take_tape(call, values[MHA_PY_OF_TAPE], &layer) < 0) {
        return -1;
    }
    const npy_intp dims[] = {layer.queries.shape[0], layer.queries.shape[1], layer.out_features};
    if (mha_py_take_numbers(call, values[MHA_PY_OF_GRAD_OUT], "grad_out", 3, dims, &layer.queries, &grad_out) < 0 ||
        make_input_gradients(call, &layer, values, needs, made, &grads) < 0 ||
        make_parameter_gradients(call, &layer, needs, made, &grads) < 0) {
        return -1;
    }
    grads.grad_out = grad_out;
    mha_py_detach(call, 2.5 * layer.work);
    return mha_py_attach(call, mha_layer_backward(&grads));
}

PyObject *
py_layer_backward(mha_py_call *call, PyObject *const *values)
{
    mha_py_needs needs = {.join = 0};
    mha_py_layer_grads made = {.w_v = NULL};
    PyObject *inputs, *weights, *biases, *w_v;

    if (mha_py_take_needs(values[NEEDS_INPUTS], "needs_inputs", MHA_PY_N_INPUTS, 1, needs.inputs) < 0 ||
        mha_py_take_needs(values[NEEDS_WEIGHTS], "needs_weights", MHA_PY_N_PROJECTIONS, 1, needs.weights) < 0 ||
        mha_py_take_needs(values[NEEDS_BIASES], "needs_biases", MHA_PY_N_PROJECTIONS, 0, needs.biases) < 0 ||
        mha_py_run_backward(call, values, &needs, &made) < 0) {
        return NULL;
    }
    inputs = mha_py_own(call, mha_py_answers(call, made.inputs, MHA_PY_N_INPUTS));
    weights = inputs == NULL ? NULL : mha_py_own(call, mha_py_answers(call, made.weights, MHA_PY_N_PROJECTIONS));
    biases = weights == NULL ? NULL : mha_py_own(call, mha_py_answers(call, made.biases, MHA_PY_N_PROJECTIONS));
    w_v = biases == NULL ? NULL : mha_py_own(call, mha_py_answer(call, made.w_v));
    return w_v == NULL ? NULL : PyTuple_Pack(4, inputs, weights, biases, w_v);
}
