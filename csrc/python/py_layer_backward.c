/*
 * py_layer_backward.c: layer_backward, the gradients of a whole layer from what
 * layer_forward_training kept.
 *
 * The tape may come out of a pickle that somebody has tampered with: type, shape and layout of
 * everything in it are checked as if it were a user's argument.  Its numbers are only computed with.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h"

enum {
    GRAD_OUT,
    TAPE,
    QUERIES,
    KEYS,
    VALUES,
    WEIGHTS,
    W_V,
    HEADS,
    EMPTY,
    DROPOUT,
    SEED,
    NEEDS_INPUTS,
    NEEDS_WEIGHTS,
    NEEDS_BIASES,
    JOIN,
    N_ARGS
};
enum { N_INPUTS = 3 };

typedef struct {
    mha_py_layer layer;
    mha_py_views views;
    mha_py_array grad_out, tape[MHA_PY_TAPE_LENS]; /* the arrays of the tape, all but the lengths */
    PyArrayObject *grad_inputs[N_INPUTS], *grad_weights[MHA_PY_N_PROJECTIONS], *grad_biases[MHA_PY_N_PROJECTIONS];
    PyArrayObject *grad_w_v;
    mha_layer_grads grads;
} backward_call;

static void
drop_all(PyArrayObject *const *arrays, int n)
{
    for (int i = 0; i < n; i++) {
        Py_XDECREF((PyObject *)arrays[i]);
    }
}

static void
end_call(backward_call *call)
{
    mha_py_drop_layer(&call->layer);
    mha_py_drop(&call->grad_out);
    for (int i = 0; i < MHA_PY_TAPE_LENS; i++) {
        mha_py_drop(&call->tape[i]);
    }
    drop_all(call->grad_inputs, N_INPUTS);
    drop_all(call->grad_weights, MHA_PY_N_PROJECTIONS);
    drop_all(call->grad_biases, MHA_PY_N_PROJECTIONS);
    Py_XDECREF((PyObject *)call->grad_w_v);
    mha_py_drop_views(&call->views);
}

/* --- Inputs ------------------------------------------------------------------------------------- */

/* The arguments of the forward call, in its order; the lengths are the tape's. */
static int
take_layer(PyObject *module, backward_call *call, PyObject *const *values)
{
    PyObject *tape = values[TAPE];
    PyObject *forward[MHA_PY_N_LAYER] = {values[QUERIES], values[KEYS], values[VALUES], NULL,
                                         values[WEIGHTS], values[W_V],  values[HEADS],  values[EMPTY],
                                         values[DROPOUT], values[SEED]};

    if (!PyTuple_Check(tape) || PyTuple_Size(tape) != MHA_PY_N_TAPE) {
        return mha_py_type_error(tape, "tape", "the tuple that layer_forward_training returned");
    }
    forward[3] = PyTuple_GetItem(tape, MHA_PY_TAPE_LENS);
    return mha_py_take_layer(module, forward, MHA_PY_WEIGHTS, &call->views, &call->layer);
}

/* One dense array of this shape; None where the layer has no use for it. */
static int
take_part(PyObject *module, const backward_call *call, PyObject *value, const char *name, const npy_intp *dims,
          mha_py_array *part)
{
    if (mha_py_take(part, value, name, MHA_PY_DENSE, &call->layer.queries) < 0) {
        return -1;
    }
    return mha_py_need_shape(module, part, 3, dims);
}

static int
take_tape(PyObject *module, backward_call *call, PyObject *tape)
{
    static const char *const names[] = {"tape[0] (projected queries)", "tape[1] (projected keys)",
                                        "tape[2] (projected values)",  "tape[3] (context)",
                                        "tape[4] (row_max)",           "tape[5] (row_sum)"};
    mha_py_layer *layer = &call->layer;
    const npy_intp batch = layer->queries.shape[0], queries = layer->queries.shape[1], keys = layer->keys.shape[1];
    const npy_intp dims[MHA_PY_TAPE_LENS][3] = {
        {batch, queries, layer->qk_features}, {batch, keys, layer->qk_features},
        {batch, keys, layer->value_features}, {batch, queries, layer->value_features},
        {batch, layer->heads, queries},       {batch, layer->heads, queries},
    };
    const int has_W_o = layer->W[MHA_PY_W_O].linear.weight != NULL;
    void **const context = has_W_o ? &layer->args.context : &layer->args.out;
    void **const to[] = {&layer->args.q_projected, &layer->args.k_projected, &layer->args.v_projected, context,
                         &layer->args.row_max,     &layer->args.row_sum};

    for (int i = 0; i < MHA_PY_TAPE_LENS; i++) {
        if (i < MHA_PY_TAPE_CONTEXT && layer->W[i].linear.weight == NULL) {
            continue; /* no projection, nothing kept */
        }
        if (take_part(module, call, PyTuple_GetItem(tape, i), names[i], dims[i], &call->tape[i]) < 0) {
            return -1;
        }
        *to[i] = (void *)call->tape[i].data; /* the backward call only reads it */
    }
    return 0;
}

static int
take_grad_out(PyObject *module, backward_call *call, PyObject *value)
{
    const mha_py_layer *layer = &call->layer;
    const npy_intp dims[] = {layer->queries.shape[0], layer->queries.shape[1], layer->out_features};

    if (take_part(module, call, value, "grad_out", dims, &call->grad_out) < 0) {
        return -1;
    }
    call->grads.grad_out = call->grad_out.data;
    return 0;
}

/* --- Outputs -------------------------------------------------------------------------------------- */

/* `n` truth values; not given: each is `otherwise`. */
static int
take_needs(PyObject *value, const char *name, int n, int otherwise, int *needs)
{
    for (int i = 0; i < n; i++) {
        needs[i] = otherwise;
    }
    if (value == NULL) {
        return 0;
    }
    if (!PyTuple_Check(value) || PyTuple_Size(value) != n) {
        return mha_py_type_error(value, name, n == N_INPUTS ? "a tuple of 3 bools" : "a tuple of 4 bools");
    }
    for (int i = 0; i < n; i++) {
        needs[i] = PyObject_IsTrue(PyTuple_GetItem(value, i));
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
new_like(const backward_call *call, const mha_py_array *input, const char *name)
{
    const npy_intp *dims = input->shape;
    const npy_intp time_first[] = {dims[1], dims[0], dims[2]};
    PyArrayObject *array, *view;

    if (call->views.n == 0 || input->stride[2] != 1 || input->stride[0] != dims[2] ||
        input->stride[1] != dims[0] * dims[2] || dims[0] < 2 || dims[1] < 2) {
        return mha_py_new(name, 3, dims, input->type);
    }
    array = mha_py_new(name, 3, time_first, input->type);
    view = array == NULL ? NULL : (PyArrayObject *)PyArray_SwapAxes(array, 0, 1);
    Py_XDECREF((PyObject *)array);
    return view;
}

/* Where the gradient of input i is added to that of an input before it; i: it has one of its own. */
static int
joined_with(PyObject *const *values, int i, int join)
{
    for (int j = 0; j < i && join; j++) {
        if (values[QUERIES + j] == values[QUERIES + i]) {
            return j;
        }
    }
    return i;
}

static int
make_input_gradients(backward_call *call, PyObject *const *values)
{
    static const char *const names[] = {"grad_queries", "grad_keys", "grad_values"};
    const mha_py_array *inputs[] = {&call->layer.queries, &call->layer.keys, &call->layer.values};
    int needs[N_INPUTS], join;

    if (take_needs(values[NEEDS_INPUTS], "needs_inputs", N_INPUTS, 1, needs) < 0 ||
        mha_py_flag(values[JOIN], &join) < 0) {
        return -1;
    }
    for (int i = 0; i < N_INPUTS; i++) {
        const int with = joined_with(values, i, join);
        PyArrayObject *grad;

        if (!needs[i]) {
            continue;
        }
        if (call->grad_inputs[with] == NULL) {
            call->grad_inputs[with] = new_like(call, inputs[i], names[i]);
        }
        grad = call->grad_inputs[with];
        if (grad == NULL) {
            return -1;
        }
        call->grads.grad_inputs[i].data = PyArray_DATA(grad);
        call->grads.grad_inputs[i].batch_stride = PyArray_STRIDE(grad, 0) / PyArray_ITEMSIZE(grad);
        call->grads.grad_inputs[i].row_stride = PyArray_STRIDE(grad, 1) / PyArray_ITEMSIZE(grad);
    }
    return 0;
}

static int
make_parameter_gradients(backward_call *call, PyObject *weights, PyObject *biases)
{
    mha_py_layer *layer = &call->layer;
    const int type = layer->queries.type;
    int needs_weights[MHA_PY_N_PROJECTIONS], needs_biases[MHA_PY_N_PROJECTIONS];

    if (take_needs(weights, "needs_weights", MHA_PY_N_PROJECTIONS, 1, needs_weights) < 0 ||
        take_needs(biases, "needs_biases", MHA_PY_N_PROJECTIONS, 0, needs_biases) < 0) {
        return -1;
    }
    for (int i = 0; i < MHA_PY_N_PROJECTIONS; i++) {
        const mha_py_array *weight = &layer->W[i].weight;

        if (weight->array == NULL) {
            continue;
        }
        call->grads.weight[i] = weight->data;
        if (needs_weights[i]) {
            call->grad_weights[i] = mha_py_new("the gradient of a weight", 2, weight->shape, type);
            if (call->grad_weights[i] == NULL) {
                return -1;
            }
            call->grads.grad_weight[i] = PyArray_DATA(call->grad_weights[i]);
        }
        if (needs_biases[i]) {
            call->grad_biases[i] = mha_py_new("the gradient of a bias", 1, weight->shape, type);
            if (call->grad_biases[i] == NULL) {
                return -1;
            }
            call->grads.grad_bias[i] = PyArray_DATA(call->grad_biases[i]);
        }
    }
    if (layer->w_v.array != NULL) {
        const npy_intp dims[] = {1, layer->w_v.shape[0]};
        const int as_weight = call->views.n > 0; /* of an nn.Linear with one output */

        call->grad_w_v = mha_py_new("grad_w_v", as_weight ? 2 : 1, as_weight ? dims : dims + 1, type);
        if (call->grad_w_v == NULL) {
            return -1;
        }
        call->grads.grad_additive_weights = PyArray_DATA(call->grad_w_v);
    }
    return 0;
}

/* --- Running --------------------------------------------------------------------------------------- */

static int
run(backward_call *call)
{
    PyThreadState *saved = mha_py_detach(2.5 * mha_py_layer_work(&call->layer));
    mha_status status;

    call->grads.forward = &call->layer.args;
    status = mha_layer_backward(&call->grads);
    mha_py_attach(saved);
    return mha_py_check(status, "layer_backward");
}

static PyObject *
make_result(PyObject *module, const backward_call *call)
{
    const mha_py_views *views = &call->views;
    PyObject *inputs = mha_py_answers(module, call->grad_inputs, N_INPUTS, views);
    PyObject *weights = inputs == NULL ? NULL : mha_py_answers(module, call->grad_weights, MHA_PY_N_PROJECTIONS, views);
    PyObject *biases = weights == NULL ? NULL : mha_py_answers(module, call->grad_biases, MHA_PY_N_PROJECTIONS, views);
    PyObject *w_v = biases == NULL ? NULL : mha_py_answer(module, call->grad_w_v, views);
    PyObject *result = w_v == NULL ? NULL : PyTuple_Pack(4, inputs, weights, biases, w_v);

    Py_XDECREF(w_v);
    Py_XDECREF(biases);
    Py_XDECREF(weights);
    Py_XDECREF(inputs);
    return result;
}

PyObject *
py_layer_backward(PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PyObject *values[N_ARGS];
    backward_call call = {0};
    PyObject *result = NULL;

    if (mha_py_arguments("layer_backward", args, n_args, SEED + 1, N_ARGS, values) < 0) {
        return NULL;
    }
    if (mha_py_view_tensors(module, values, N_ARGS, &call.views) == 0 && take_layer(module, &call, values) == 0 &&
        take_tape(module, &call, values[TAPE]) == 0 && take_grad_out(module, &call, values[GRAD_OUT]) == 0 &&
        make_input_gradients(&call, values) == 0 &&
        make_parameter_gradients(&call, values[NEEDS_WEIGHTS], values[NEEDS_BIASES]) == 0 && run(&call) == 0) {
        result = make_result(module, &call);
    }
    end_call(&call);
    return result;
}
