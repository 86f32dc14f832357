/*
 * py_layer_backward.c: layer_backward, the gradients of a whole layer from what layer_forward kept in training.
 *
 * What was kept may come from anywhere: type, shape and layout of everything in it are checked as if it were a user's
 * argument.  Its numbers are only computed with.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h"

enum { GRAD_OUT, KEPT, TENSORS, N_INPUTS, OPTIONS, NEEDS, JOIN };
enum { W_V = MHA_PY_N_PARAMETERS - 1, MOST_TENSORS = MHA_PY_N_INPUTS + MHA_PY_N_PARAMETERS };

/*
 * What the call was given: n_inputs inputs, the last one also in the place of those that are missing, and parameters:
 * of none, three (W_q, W_k, w_v), four weights, or nine.
 */
typedef struct {
    int n_inputs, n_parameters;
    const int *place; /* of the parameters among the nine */
    PyObject *inputs[MHA_PY_N_INPUTS], *parameters[MHA_PY_N_PARAMETERS];
    int needs[MOST_TENSORS]; /* of each of the tensors */
    int join;                /* gradients of inputs that are one object are added up in the first one's place */
} given;

typedef struct {
    PyArrayObject *inputs[MHA_PY_N_INPUTS], *parameters[MHA_PY_N_PARAMETERS];
} gradients;

/* --- Tensors ------------------------------------------------------------------------------------ */

static int
take_tensors(PyObject *const *values, given *of)
{
    static const int every_place[] = {0, 1, 2, 3, 4, 5, 6, 7, 8}, additive_places[] = {0, 1, W_V};
    PyObject *const tensors = values[TENSORS];
    int64_t n_inputs;

    if (mha_py_whole(values[N_INPUTS], "n_inputs", 1, &n_inputs) < 0) {
        return -1;
    }
    if (!PyTuple_Check(tensors) || n_inputs > MHA_PY_N_INPUTS || PyTuple_Size(tensors) < n_inputs) {
        return mha_py_type_error(tensors, "tensors", "a tuple of n_inputs inputs and of parameters");
    }
    const Py_ssize_t n = PyTuple_Size(tensors) - n_inputs;
    if (n != 0 && n != 3 && n != MHA_PY_N_PROJECTIONS && n != MHA_PY_N_PARAMETERS) {
        return mha_py_type_error(tensors, "parameters", "none, three, four or nine tensors");
    }
    of->n_inputs = (int)n_inputs;
    of->n_parameters = (int)n;
    of->place = n == 3 ? additive_places : every_place;
    for (int i = 0; i < MHA_PY_N_INPUTS; i++) {
        of->inputs[i] = PyTuple_GetItem(tensors, i < of->n_inputs ? i : of->n_inputs - 1);
    }
    for (int i = 0; i < MHA_PY_N_PARAMETERS; i++) {
        of->parameters[i] = Py_None;
    }
    for (int i = 0; i < of->n_parameters; i++) {
        of->parameters[of->place[i]] = PyTuple_GetItem(tensors, of->n_inputs + i);
    }
    return 0;
}

static int
take_needs(PyObject *value, given *of)
{
    const int n = of->n_inputs + of->n_parameters;

    if (!PyTuple_Check(value) || PyTuple_Size(value) != n) {
        return mha_py_type_error(value, "needs", "a tuple of bools, one for each tensor");
    }
    for (int i = 0; i < n; i++) {
        of->needs[i] = PyObject_IsTrue(PyTuple_GetItem(value, i));
        if (of->needs[i] < 0) {
            return -1;
        }
    }
    return 0;
}

/* Where `parameter` stands among the tensors; -1 if it is not one of them. */
static int
tensor_of(const given *of, int parameter)
{
    for (int i = 0; i < of->n_parameters; i++) {
        if (of->place[i] == parameter) {
            return of->n_inputs + i;
        }
    }
    return -1;
}

static int
parameter_is_needed(const given *of, int parameter)
{
    const int tensor = tensor_of(of, parameter);

    return tensor >= 0 && of->needs[tensor];
}

/* --- The forward call ------------------------------------------------------------------------------- */

/* The lengths are those that were kept. */
static int
take_layer(mha_py_call *call, PyObject *const *values, const given *of, mha_py_layer *layer)
{
    PyObject *const kept = values[KEPT], *const options = values[OPTIONS];
    PyObject *forward[MHA_PY_N_LAYER] = {of->inputs[0], of->inputs[1], of->inputs[2]};

    if (!PyTuple_Check(kept) || PyTuple_Size(kept) != MHA_PY_N_KEPT) {
        return mha_py_type_error(kept, "kept", "the tuple that layer_forward returned in training");
    }
    if (!PyTuple_Check(options) || PyTuple_Size(options) != MHA_PY_N_OPTIONS) {
        return mha_py_type_error(options, "options", "a tuple (num_heads, empty_rows, dropout, seed)");
    }
    forward[MHA_PY_LENS] = PyTuple_GetItem(kept, MHA_PY_KEPT_LENS);
    forward[MHA_PY_SCORER] = of->parameters[W_V];
    for (int i = 0; i < MHA_PY_N_OPTIONS; i++) {
        forward[MHA_PY_HEADS + i] = PyTuple_GetItem(options, i);
    }
    return mha_py_take_layer(call, forward, of->parameters, layer);
}

static int
take_kept(mha_py_call *call, PyObject *tuple, mha_py_layer *layer)
{
    mha_py_kept_array kept[MHA_PY_N_KEPT];

    mha_py_list_kept(layer, 1, kept);
    if (kept[MHA_PY_KEPT_CONTEXT].place == NULL) {
        kept[MHA_PY_KEPT_CONTEXT].place = &layer->args.out;
    }
    for (int i = 0; i < MHA_PY_N_KEPT; i++) {
        if (kept[i].wanted && kept[i].rank == 3 && kept[i].place != NULL &&
            mha_py_take_numbers(call, PyTuple_GetItem(tuple, i), kept[i].name, 3, kept[i].dims, &layer->queries,
                                kept[i].place) < 0) {
            return -1;
        }
    }
    return 0;
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
    array = array == NULL ? NULL : (PyArrayObject *)mha_py_own(call, PyArray_SwapAxes(array, 0, 1));
    call->failed = array == NULL;
    return array;
}

/* Which of the given inputs gets the gradient of input i: itself, the last one where it is missing, or an equal one. */
static int
receiver_of(const given *of, int i)
{
    const int own = i < of->n_inputs ? i : of->n_inputs - 1;

    for (int j = 0; j < own && of->join; j++) {
        if (of->inputs[j] == of->inputs[own]) {
            return j;
        }
    }
    return own;
}

static void
make_input_gradients(mha_py_call *call, const mha_py_layer *layer, const given *of, gradients *made,
                     mha_layer_grads *grads)
{
    static const char *const names[] = {"grad_queries", "grad_keys", "grad_values"};
    const mha_py_array *inputs[] = {&layer->queries, &layer->keys, &layer->values};

    for (int i = 0; i < MHA_PY_N_INPUTS && !call->failed; i++) {
        const int receiver = receiver_of(of, i);
        PyArrayObject **const with = &made->inputs[receiver];

        if (!of->needs[receiver]) {
            continue;
        }
        *with = *with != NULL ? *with : new_like(call, inputs[i], names[i]);
        if (*with != NULL) {
            grads->grad_inputs[i].data = PyArray_DATA(*with);
            grads->grad_inputs[i].batch_stride = PyArray_STRIDE(*with, 0) / PyArray_ITEMSIZE(*with);
            grads->grad_inputs[i].row_stride = PyArray_STRIDE(*with, 1) / PyArray_ITEMSIZE(*with);
        }
    }
}

static void
make_parameter_gradients(mha_py_call *call, const mha_py_layer *layer, const given *of, gradients *made,
                         mha_layer_grads *grads)
{
    const int type = layer->queries.type;

    for (int i = 0; i < MHA_PY_N_PROJECTIONS; i++) {
        const mha_py_array *weight = &layer->W[i].weight;
        const int bias = i + MHA_PY_N_PROJECTIONS;

        if (weight->array == NULL) {
            continue;
        }
        if (parameter_is_needed(of, i)) {
            made->parameters[i] = mha_py_new(call, "the gradient of a weight", 2, weight->shape, type);
        }
        if (parameter_is_needed(of, bias)) {
            made->parameters[bias] = mha_py_new(call, "the gradient of a bias", 1, weight->shape, type);
        }
        grads->weight[i] = weight->data;
        grads->grad_weight[i] = mha_py_data(made->parameters[i]);
        grads->grad_bias[i] = mha_py_data(made->parameters[bias]);
    }
    if (layer->w_v.array != NULL) {
        const npy_intp dims[] = {1, layer->w_v.shape[0]};
        const int rank = layer->w_v_is_weight ? 2 : 1;

        made->parameters[W_V] = mha_py_new(call, "grad_w_v", rank, dims + 2 - rank, type);
        grads->grad_additive_weights = mha_py_data(made->parameters[W_V]);
    }
}

/* --- Running --------------------------------------------------------------------------------------- */

static int
run(mha_py_call *call, PyObject *const *values, const given *of, gradients *made)
{
    mha_py_layer layer = {0};
    mha_layer_grads grads = {.forward = &layer.args};
    void *grad_out;

    if (take_layer(call, values, of, &layer) < 0 || take_kept(call, values[KEPT], &layer) < 0) {
        return -1;
    }
    const npy_intp dims[] = {layer.queries.shape[0], layer.queries.shape[1], layer.out_features};
    if (mha_py_take_numbers(call, values[GRAD_OUT], "grad_out", 3, dims, &layer.queries, &grad_out) < 0) {
        return -1;
    }
    make_input_gradients(call, &layer, of, made, &grads);
    make_parameter_gradients(call, &layer, of, made, &grads);
    if (call->failed) {
        return -1;
    }
    grads.grad_out = grad_out;
    mha_py_detach(call, 2.5 * layer.work);
    return mha_py_attach(call, mha_layer_backward(&grads));
}

PyObject *
py_layer_backward(mha_py_call *call, PyObject *const *values)
{
    PyArrayObject *answers[MOST_TENSORS];
    gradients made = {{NULL}, {NULL}};
    given of = {0};

    if (take_tensors(values, &of) < 0 || take_needs(values[NEEDS], &of) < 0 ||
        mha_py_flag(values[JOIN], &of.join) < 0 || run(call, values, &of, &made) < 0) {
        return NULL;
    }
    for (int i = 0; i < of.n_inputs; i++) {
        answers[i] = made.inputs[i];
    }
    for (int i = 0; i < of.n_parameters; i++) {
        answers[of.n_inputs + i] = made.parameters[of.place[i]];
    }
    return mha_py_answers(call, answers, of.n_inputs + of.n_parameters);
}
