/*
 * py_layer_backward.c: layer_backward, the gradients of a whole layer from what layer_forward kept in training.
 *
 * What was kept may come from anywhere: type, shape and layout of everything in it are checked as if it were a user's
 * argument.  Its numbers are used in computations alone.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h"

/* From FORWARD to NEEDS stand the arguments of layer_forward. */
enum { GRAD_OUT, KEPT, FORWARD, NEEDS = FORWARD + MHA_PY_N_LAYER, JOIN, OPTIONS };

/* Places of the tensors that have gradients: three inputs, four weights, their biases, w_v. */
enum { WEIGHTS = MHA_PY_N_INPUTS, BIASES = WEIGHTS + MHA_PY_N_PROJECTIONS, W_V = WEIGHTS + MHA_PY_PARAMETER_W_V };
enum { MASK_BIAS = MHA_PY_N_TENSORS, N_GRADIENTS }; /* the bias among the options comes last, if it is asked for */

typedef struct {
    int needs[N_GRADIENTS], n; /* n: without the last, or with it */
    int join;                  /* gradients of inputs that are one object are added up in the first one's place */
    mha_py_array made[N_GRADIENTS];
} gradients;

/* --- The forward call ------------------------------------------------------------------------------- */

/* Gradients are computed with the weights as they are, not packed. */
static void
take_forward(mha_py_call *call, PyObject *const *values, PyObject *options, mha_py_layer *layer)
{
    mha_py_take_layer(call, values, options, layer);
    mha_py_place_layer(call, values, layer->keys.shape[1], layer);
    for (int i = 0; i < MHA_PY_N_PROJECTIONS; i++) {
        if (!call->failed && layer->W[i].linear.weight != NULL && layer->W[i].linear.layout != MHA_WEIGHT_ROWS) {
            mha_py_type_error(call, values[MHA_PY_FOUR], "projections", "weights in rows");
        }
    }
}

static void
take_kept(mha_py_call *call, PyObject *tuple, mha_py_layer *layer)
{
    mha_py_kept_array kept[MHA_PY_N_KEPT];

    if (!call->failed && (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != MHA_PY_N_KEPT)) {
        mha_py_type_error(call, tuple, "kept", "the tuple that layer_forward returned in training");
    }
    mha_py_list_kept(layer, 1, kept);
    if (kept[MHA_PY_KEPT_CONTEXT].place == NULL) {
        kept[MHA_PY_KEPT_CONTEXT].place = &layer->args.out;
    }
    for (int i = 0; i < MHA_PY_N_KEPT && !call->failed; i++) {
        const mha_py_projection *W = i == MHA_PY_KEPT_Q   ? &layer->W[MHA_PY_W_Q]
                                     : i == MHA_PY_KEPT_K ? &layer->W[MHA_PY_W_K]
                                                          : NULL;
        const int is_copy = W != NULL && W->linear.weight == NULL; /* for attention_weights alone */

        if (kept[i].wanted && kept[i].rank == 3 && kept[i].place != NULL && !is_copy) {
            *kept[i].place =
                mha_py_take_numbers(call, PyTuple_GetItem(tuple, i), kept[i].name, 3, kept[i].dims, &layer->queries);
        }
    }
}

/* --- Outputs -------------------------------------------------------------------------------------- */

static void
take_needs(mha_py_call *call, PyObject *const *values, gradients *of)
{
    PyObject *const needs = values[NEEDS];

    of->n = PyTuple_Check(needs) && PyTuple_Size(needs) == N_GRADIENTS ? N_GRADIENTS : MHA_PY_N_TENSORS;
    if (!call->failed && (!PyTuple_Check(needs) || PyTuple_Size(needs) != of->n)) {
        mha_py_type_error(call, needs, "needs", "a tuple of twelve or thirteen bools");
    }
    for (int i = 0; i < of->n && !call->failed; i++) {
        of->needs[i] = mha_py_flag(call, PyTuple_GetItem(needs, i));
    }
    of->join = mha_py_flag(call, values[JOIN]);
}

/*
 * Makes a gradient like an input.  For a tensor whose batch is its second axis in memory (the outputs of a GRU,
 * permuted) the gradient has its batch there too: torch takes such a gradient as it is, and would copy another.
 */
static void
new_like(mha_py_call *call, const mha_py_array *input, const char *name, mha_py_array *gradient)
{
    const npy_intp *dims = input->shape;
    const npy_intp time_first[] = {dims[2], dims[0] * dims[2], 1};

    if (call->has_tensors && input->stride[2] == 1 && input->stride[0] == time_first[0] &&
        input->stride[1] == time_first[1] && dims[0] > 1 && dims[1] > 1) {
        mha_py_new_strided(call, name, 3, dims, time_first, input->type, gradient);
    } else {
        mha_py_new_result(call, name, 3, dims, input->type, gradient);
    }
}

static void
make_input_gradients(mha_py_call *call, const mha_py_layer *layer, PyObject *const *inputs, gradients *of,
                     mha_layer_grads *grads)
{
    static const char *const names[] = {"grad_queries", "grad_keys", "grad_values"};
    const mha_py_array *arrays[] = {&layer->queries, &layer->keys, &layer->values};

    for (int i = 0; i < MHA_PY_N_INPUTS; i++) {
        int receiver = i;

        for (int j = i - 1; j >= 0 && of->join; j--) {
            receiver = inputs[j] == inputs[i] ? j : receiver;
        }
        mha_py_array *const made = &of->made[receiver];
        if (of->needs[receiver] && made->array == NULL) {
            new_like(call, arrays[i], names[i], made);
        }
        grads->grad_inputs[i].data = mha_py_numbers(made);
        grads->grad_inputs[i].batch_stride = made->stride[0];
        grads->grad_inputs[i].row_stride = made->stride[1];
    }
}

static void
make_parameter_gradients(mha_py_call *call, const mha_py_layer *layer, gradients *of, mha_layer_grads *grads)
{
    const int type = layer->queries.type, is_joint = layer->joint.whole.weight.array != NULL;

    for (int i = 0; i < MHA_PY_N_PROJECTIONS; i++) {
        const int is_part = is_joint && i < MHA_PY_N_INPUTS;
        const mha_py_array *weight = is_part ? &layer->joint.whole.weight : &layer->W[i].weight;

        if (is_part && i != layer->joint.place) {
            continue;
        }

        if (weight->array != NULL && of->needs[WEIGHTS + i]) {
            mha_py_new_result(call, "the gradient of a weight", 2, weight->shape, type, &of->made[WEIGHTS + i]);
        }
        if (weight->array != NULL && of->needs[BIASES + i]) {
            mha_py_new_result(call, "the gradient of a bias", 1, weight->shape, type, &of->made[BIASES + i]);
        }
        if (is_part) {
            mha_py_point_joint(call, layer, &of->made[WEIGHTS + i], &of->made[BIASES + i], grads);
            continue;
        }
        grads->weight[i] = weight->data;
        grads->grad_weight[i] = mha_py_numbers(&of->made[WEIGHTS + i]);
        grads->grad_bias[i] = mha_py_numbers(&of->made[BIASES + i]);
    }
    if (layer->w_v.array != NULL) {
        const npy_intp dims[] = {1, layer->w_v.shape[0]};
        const int rank = layer->w_v_is_weight ? 2 : 1;

        mha_py_new_result(call, "grad_w_v", rank, dims + 2 - rank, type, &of->made[W_V]);
        grads->attention.grad_additive_weights = mha_py_numbers(&of->made[W_V]);
    }
}

/* Of the bias among the options, as it was given: without an axis for heads, if it had none. */
static void
make_bias_gradient(mha_py_call *call, const mha_py_layer *layer, gradients *of, mha_layer_grads *grads)
{
    const mha_py_array *bias = &layer->scores.bias;
    const npy_intp *shape = bias->shape, without_heads[] = {shape[0], shape[2], shape[3]};
    const int had_heads = layer->bias_rank == bias->rank;

    if (bias->array != NULL && of->needs[MASK_BIAS]) {
        mha_py_new_result(call, "grad_bias", layer->bias_rank, had_heads ? shape : without_heads, bias->type,
                          &of->made[MASK_BIAS]);
        mha_py_array by_heads = *bias; /* dense, as the result is */
        size_t dense = 1;
        by_heads.array = of->made[MASK_BIAS].array;
        by_heads.data = of->made[MASK_BIAS].data;
        for (int i = by_heads.rank - 1; i >= 0; i--) {
            by_heads.stride[i] = (ptrdiff_t)dense;
            dense *= (size_t)by_heads.shape[i];
        }
        grads->attention.grad_bias = mha_py_mask_gradient(call, &by_heads, &layer->scores);
    }
}

/* --- Running --------------------------------------------------------------------------------------- */

PyObject *
py_layer_backward(mha_py_call *call, PyObject *const *values)
{
    gradients of = {.join = 0};
    mha_py_layer layer = {0};
    mha_layer_grads grads = {.forward = &layer.args};

    take_needs(call, values, &of);
    take_forward(call, values + FORWARD, values[OPTIONS], &layer);
    take_kept(call, values[KEPT], &layer);
    const npy_intp dims[] = {layer.queries.shape[0], layer.queries.shape[1], layer.out_features};
    grads.grad_out = mha_py_take_numbers(call, values[GRAD_OUT], "grad_out", 3, dims, &layer.queries);
    if (call->failed) {
        return NULL; /* gradients have the sizes of what was taken */
    }
    make_input_gradients(call, &layer, values + FORWARD, &of, &grads);
    make_parameter_gradients(call, &layer, &of, &grads);
    make_bias_gradient(call, &layer, &of, &grads);
    if (call->failed) {
        return NULL;
    }
    mha_py_detach(call, 2.5 * layer.work);
    mha_py_attach(call, mha_layer_backward(&grads));
    if (!call->failed && layer.joint.whole.weight.array != NULL) {
        mha_py_join_gradients(&layer, &grads, &of.made[WEIGHTS + layer.joint.place],
                              &of.made[BIASES + layer.joint.place]);
    }
    return mha_py_answers(call, of.made, of.n);
}
