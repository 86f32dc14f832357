/*
 * py_layer_backward.c: layer_backward, the gradients of a whole layer from what layer_forward kept in training.
 *
 * What was kept may come from anywhere: type, shape and layout of everything in it are checked as if it were a user's
 * argument.  Its numbers are only computed with.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h"

enum { GRAD_OUT, KEPT, TENSORS, N_INPUTS, OPTIONS, NEEDS, JOIN };
enum { WEIGHTS = MHA_PY_N_INPUTS, BIASES = WEIGHTS + MHA_PY_N_PROJECTIONS, W_V = WEIGHTS + MHA_PY_PARAMETER_W_V };

/* Tensors by their places (mha_py_place): missing inputs are the last one given, missing parameters None. */
typedef struct {
    int n_inputs, n_tensors;
    int place[MHA_PY_N_TENSORS]; /* of each tensor given */
    PyObject *tensors[MHA_PY_N_TENSORS];
    int needs[MHA_PY_N_TENSORS];
    int join; /* gradients of inputs that are one object are added up in the first one's place */
    PyArrayObject *made[MHA_PY_N_TENSORS];
} gradients;

/* --- Tensors ------------------------------------------------------------------------------------ */

static void
take_tensors(mha_py_call *call, PyObject *const *values, gradients *of)
{
    PyObject *const tuple = values[TENSORS], *const needs = values[NEEDS];
    const int64_t n_inputs = mha_py_whole(call, values[N_INPUTS], "n_inputs", 1);
    const int64_t n = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : 0, n_parameters = n - n_inputs;

    if (call->failed) {
        return;
    }
    if (n_inputs > MHA_PY_N_INPUTS || n_parameters < 0) {
        mha_py_type_error(call, tuple, "tensors", "a tuple of n_inputs inputs and of parameters");
    } else if (n_parameters != 0 && n_parameters != 3 && n_parameters != MHA_PY_N_PROJECTIONS &&
               n_parameters != MHA_PY_N_PARAMETERS) {
        mha_py_type_error(call, tuple, "parameters", "none, three, four or nine tensors");
    } else if (!PyTuple_Check(needs) || PyTuple_Size(needs) != n) {
        mha_py_type_error(call, needs, "needs", "a tuple of bools, one for each tensor");
    }
    if (call->failed) {
        return;
    }
    of->n_inputs = (int)n_inputs;
    for (int i = 0; i < MHA_PY_N_TENSORS; i++) {
        of->tensors[i] = Py_None;
    }
    for (; of->n_tensors < n && !call->failed; of->n_tensors++) {
        const int place = mha_py_place((int)n_inputs, (int)n_parameters, of->n_tensors);

        of->place[of->n_tensors] = place;
        of->tensors[place] = PyTuple_GetItem(tuple, of->n_tensors);
        of->needs[place] = mha_py_flag(call, PyTuple_GetItem(needs, of->n_tensors));
    }
    for (int i = of->n_inputs; i < MHA_PY_N_INPUTS; i++) {
        of->tensors[i] = of->tensors[i - 1];
    }
    of->join = mha_py_flag(call, values[JOIN]);
}

/* --- The forward call ------------------------------------------------------------------------------- */

/* The lengths are those that were kept; biases are not looked at. */
static void
take_layer(mha_py_call *call, PyObject *const *values, const gradients *of, mha_py_layer *layer)
{
    PyObject *const kept = values[KEPT], *const options = values[OPTIONS];
    PyObject *forward[MHA_PY_N_LAYER] = {of->tensors[0], of->tensors[1], of->tensors[2]};
    PyObject *parameters[MHA_PY_N_PARAMETERS];

    if (call->failed) {
        return;
    }
    if (!PyTuple_Check(kept) || PyTuple_Size(kept) != MHA_PY_N_KEPT) {
        mha_py_type_error(call, kept, "kept", "the tuple that layer_forward returned in training");
    } else if (!PyTuple_Check(options) || PyTuple_Size(options) != MHA_PY_N_OPTIONS) {
        mha_py_type_error(call, options, "options", "a tuple (num_heads, empty_rows, dropout, seed)");
    }
    if (call->failed) {
        return;
    }
    forward[MHA_PY_LENS] = PyTuple_GetItem(kept, MHA_PY_KEPT_LENS);
    forward[MHA_PY_SCORER] = of->tensors[W_V];
    for (int i = 0; i < MHA_PY_N_OPTIONS; i++) {
        forward[MHA_PY_HEADS + i] = PyTuple_GetItem(options, i);
    }
    for (int i = 0; i < MHA_PY_N_PARAMETERS; i++) {
        parameters[i] = i < MHA_PY_N_PROJECTIONS ? of->tensors[WEIGHTS + i] : Py_None;
    }
    mha_py_take_layer(call, forward, parameters, layer);
}

static void
take_kept(mha_py_call *call, PyObject *tuple, mha_py_layer *layer)
{
    mha_py_kept_array kept[MHA_PY_N_KEPT];

    mha_py_list_kept(layer, 1, kept);
    if (kept[MHA_PY_KEPT_CONTEXT].place == NULL) {
        kept[MHA_PY_KEPT_CONTEXT].place = &layer->args.out;
    }
    for (int i = 0; i < MHA_PY_N_KEPT && !call->failed; i++) {
        if (kept[i].wanted && kept[i].rank == 3 && kept[i].place != NULL) {
            *kept[i].place = mha_py_take_numbers(call, PyTuple_GetItem(tuple, i), kept[i].name, 3, kept[i].dims,
                                                 &layer->queries);
        }
    }
}

/* --- Outputs -------------------------------------------------------------------------------------- */

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
    return array == NULL ? NULL : (PyArrayObject *)mha_py_own(call, PyArray_SwapAxes(array, 0, 1));
}

/* Which of the given inputs gets the gradient of input i: itself, the last one where it is missing, or an equal one. */
static int
receiver_of(const gradients *of, int i)
{
    const int own = i < of->n_inputs ? i : of->n_inputs - 1;

    for (int j = 0; j < own && of->join; j++) {
        if (of->tensors[j] == of->tensors[own]) {
            return j;
        }
    }
    return own;
}

static void
make_input_gradients(mha_py_call *call, const mha_py_layer *layer, gradients *of, mha_layer_grads *grads)
{
    static const char *const names[] = {"grad_queries", "grad_keys", "grad_values"};
    const mha_py_array *inputs[] = {&layer->queries, &layer->keys, &layer->values};

    for (int i = 0; i < MHA_PY_N_INPUTS; i++) {
        const int receiver = receiver_of(of, i);
        PyArrayObject **const made = &of->made[receiver];

        if (of->needs[receiver] && *made == NULL) {
            *made = new_like(call, inputs[i], names[i]);
        }
        if (*made != NULL) {
            grads->grad_inputs[i].data = PyArray_DATA(*made);
            grads->grad_inputs[i].batch_stride = PyArray_STRIDE(*made, 0) / PyArray_ITEMSIZE(*made);
            grads->grad_inputs[i].row_stride = PyArray_STRIDE(*made, 1) / PyArray_ITEMSIZE(*made);
        }
    }
}

static void
make_parameter_gradients(mha_py_call *call, const mha_py_layer *layer, gradients *of, mha_layer_grads *grads)
{
    const int type = layer->queries.type;

    for (int i = 0; i < MHA_PY_N_PROJECTIONS; i++) {
        const mha_py_array *weight = &layer->W[i].weight;

        if (weight->array != NULL && of->needs[WEIGHTS + i]) {
            of->made[WEIGHTS + i] = mha_py_new(call, "the gradient of a weight", 2, weight->shape, type);
        }
        if (weight->array != NULL && of->needs[BIASES + i]) {
            of->made[BIASES + i] = mha_py_new(call, "the gradient of a bias", 1, weight->shape, type);
        }
        grads->weight[i] = weight->data;
        grads->grad_weight[i] = mha_py_data(of->made[WEIGHTS + i]);
        grads->grad_bias[i] = mha_py_data(of->made[BIASES + i]);
    }
    if (layer->w_v.array != NULL) {
        const npy_intp dims[] = {1, layer->w_v.shape[0]};
        const int rank = layer->w_v_is_weight ? 2 : 1;

        of->made[W_V] = mha_py_new(call, "grad_w_v", rank, dims + 2 - rank, type);
        grads->grad_additive_weights = mha_py_data(of->made[W_V]);
    }
}

/* --- Running --------------------------------------------------------------------------------------- */

PyObject *
py_layer_backward(mha_py_call *call, PyObject *const *values)
{
    PyArrayObject *answers[MHA_PY_N_TENSORS];
    gradients of = {.n_tensors = 0};
    mha_py_layer layer = {0};
    mha_layer_grads grads = {.forward = &layer.args};

    take_tensors(call, values, &of);
    take_layer(call, values, &of, &layer);
    take_kept(call, values[KEPT], &layer);
    const npy_intp dims[] = {layer.queries.shape[0], layer.queries.shape[1], layer.out_features};
    grads.grad_out = mha_py_take_numbers(call, values[GRAD_OUT], "grad_out", 3, dims, &layer.queries);
    if (call->failed) {
        return NULL; /* gradients are made by what was taken */
    }
    make_input_gradients(call, &layer, &of, &grads);
    make_parameter_gradients(call, &layer, &of, &grads);
    if (call->failed) {
        return NULL;
    }
    mha_py_detach(call, 2.5 * layer.work);
    mha_py_attach(call, mha_layer_backward(&grads));
    for (int i = 0; i < of.n_tensors; i++) {
        answers[i] = of.made[of.place[i]];
    }
    return mha_py_answers(call, answers, of.n_tensors);
}
