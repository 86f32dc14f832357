/*
 * args_joint.c: W_q, W_k and W_v as rows of one weight: read in place where they lie one after the other, else
 * gathered; and the gradient of that weight. SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h"

#include <string.h>

/* --- Which rows ----------------------------------------------------------------------------- */

/* Takes (first, number) or an array of row numbers; returns how many. */
static npy_intp
take_rows(mha_py_call *call, PyObject *value, int which, mha_py_joint *joint)
{
    const npy_intp most = joint->whole.weight.shape[0];
    PyArrayObject *const array = (PyArrayObject *)value;

    if (call->failed) {
        return 0;
    }
    if (PyTuple_Check(value) && PyTuple_Size(value) == 2) {
        const int64_t first = mha_py_whole(call, PyTuple_GetItem(value, 0), "rows", 0);
        const int64_t n = mha_py_whole(call, PyTuple_GetItem(value, 1), "rows", 0);

        if (!call->failed && (first > most || n > most - first)) {
            mha_py_refuse(call, "joint_rows", "(On)", value, (Py_ssize_t)most);
        }
        joint->first[which] = (npy_intp)first;
        return call->failed ? 0 : (npy_intp)n;
    }
    if (!PyArray_Check(value) || !PyArray_EquivTypenums(PyArray_TYPE(array), NPY_INT64) || PyArray_NDIM(array) != 1) {
        mha_py_type_error(call, value, "rows", "(first, number) or an array of int64");
        return 0;
    }
    /* A copy: another thread may write into the array while its numbers are used. */
    PyArrayObject *const copy = (PyArrayObject *)mha_py_own(call, PyArray_NewCopy(array, NPY_CORDER));
    if (call->failed) {
        return 0;
    }
    const npy_intp n = PyArray_DIM(copy, 0);
    joint->numbers[which] = PyArray_DATA(copy);
    for (npy_intp i = 0; i < n; i++) {
        if (joint->numbers[which][i] < 0 || joint->numbers[which][i] >= most) {
            mha_py_refuse(call, "joint_rows", "(On)", value, (Py_ssize_t)most);
            return 0;
        }
    }
    return n;
}

/* 1 if gradients cannot be written to the rows where they lie. */
static int
overlaps(const mha_py_joint *joint, const mha_py_projection *W)
{
    for (int i = 0; i < MHA_PY_N_INPUTS; i++) {
        if (joint->numbers[i] != NULL) {
            return 1;
        }
        for (int j = 0; j < i; j++) {
            if (joint->first[i] < joint->first[j] + W[j].weight.shape[0] &&
                joint->first[j] < joint->first[i] + W[i].weight.shape[0]) {
                return 1;
            }
        }
    }
    return 0;
}

static npy_intp
row_of(const mha_py_joint *joint, int which, npy_intp i)
{
    return joint->numbers[which] != NULL ? (npy_intp)joint->numbers[which][i] : joint->first[which] + i;
}

/* The rows of the weight, and their biases, side by side. */
static void
gather(mha_py_call *call, const mha_py_joint *joint, int which, mha_py_projection *W)
{
    const mha_py_array *whole = &joint->whole.weight;
    const npy_intp *dims = W->weight.shape, itemsize = (npy_intp)mha_py_itemsize(whole->type);
    const size_t row_bytes = (size_t)(dims[1] * itemsize);
    const char *bias = joint->whole.linear.bias;
    char *rows = mha_py_data(mha_py_new(call, whole->name, 2, dims, whole->type));
    char *biases = bias == NULL ? NULL : mha_py_data(mha_py_new(call, whole->name, 1, dims, whole->type));

    for (npy_intp i = 0; i < dims[0] && !call->failed; i++) {
        const npy_intp row = row_of(joint, which, i);

        memcpy(rows + (size_t)i * row_bytes, (const char *)whole->data + (size_t)row * row_bytes, row_bytes);
        if (bias != NULL) {
            memcpy(biases + i * itemsize, bias + row * itemsize, (size_t)itemsize);
        }
    }
    W->weight.data = W->linear.weight = rows;
    W->linear.bias = biases;
}

void
mha_py_take_joint(mha_py_call *call, PyObject *parameters, mha_py_layer *layer)
{
    PyObject *const rows = layer->options.rows;
    mha_py_joint *joint = &layer->joint;
    mha_py_array *whole = &joint->whole.weight;

    if (!call->failed && (!PyTuple_Check(rows) || PyTuple_Size(rows) != MHA_PY_N_INPUTS)) {
        mha_py_type_error(call, rows, "rows", "a tuple (of W_q, of W_k, of W_v)");
    }
    while (joint->place < MHA_PY_N_INPUTS && PyTuple_GetItem(parameters, joint->place) == Py_None) {
        joint->place++;
    }
    if (call->failed || joint->place == MHA_PY_N_INPUTS) {
        return; /* a layer without any of the three */
    }
    mha_py_take_in_rows(call, PyTuple_GetItem(parameters, joint->place),
                        PyTuple_GetItem(parameters, joint->place + MHA_PY_N_PROJECTIONS), "the joint weight",
                        &layer->queries, &joint->whole);
    for (int i = 0; i < MHA_PY_N_INPUTS && !call->failed; i++) {
        mha_py_projection *W = &layer->W[i];
        const npy_intp n = take_rows(call, PyTuple_GetItem(rows, i), i, joint);
        const size_t itemsize = mha_py_itemsize(whole->type), first = (size_t)joint->first[i];

        *W = joint->whole;
        W->linear.out_features = (size_t)n;
        W->weight.shape[0] = n;
        if (joint->numbers[i] != NULL) {
            gather(call, joint, i, W);
            continue;
        }
        W->weight.data = W->linear.weight = (const char *)whole->data + first * W->linear.in_features * itemsize;
        W->linear.bias = W->linear.bias == NULL ? NULL : (const char *)W->linear.bias + first * itemsize;
    }
    joint->overlaps = !call->failed && overlaps(joint, layer->W);
}

/* --- The gradient ------------------------------------------------------------------------------- */

void
mha_py_point_joint(mha_py_call *call, const mha_py_layer *layer, const mha_py_array *weight, const mha_py_array *bias,
                   mha_layer_grads *grads)
{
    const mha_py_joint *joint = &layer->joint;
    const int type = layer->queries.type;
    const size_t itemsize = mha_py_itemsize(type);
    npy_intp covered = 0;

    for (int i = 0; i < MHA_PY_N_INPUTS; i++) {
        const mha_py_array *rows = &layer->W[i].weight;
        const size_t first = (size_t)joint->first[i];

        covered += rows->shape[0];
        grads->weight[i] = rows->data;
        if (joint->overlaps) { /* memory of its own, added up later */
            grads->grad_weight[i] =
                weight->array == NULL ? NULL : mha_py_data(mha_py_new(call, rows->name, 2, rows->shape, type));
            grads->grad_bias[i] =
                bias->array == NULL ? NULL : mha_py_data(mha_py_new(call, rows->name, 1, rows->shape, type));
        } else {
            grads->grad_weight[i] = weight->array == NULL
                                        ? NULL
                                        : (char *)mha_py_numbers(weight) + first * (size_t)rows->shape[1] * itemsize;
            grads->grad_bias[i] = bias->array == NULL ? NULL : (char *)mha_py_numbers(bias) + first * itemsize;
        }
    }
    if (!call->failed && (joint->overlaps || covered != joint->whole.weight.shape[0])) { /* rows that nobody has: 0 */
        mha_py_clear(weight);
        mha_py_clear(bias);
    }
}

static void
add(int type, npy_intp n, const void *from, void *to)
{
    for (npy_intp i = 0; i < n; i++) {
        if (type == NPY_FLOAT64) {
            ((double *)to)[i] += ((const double *)from)[i];
        } else {
            ((float *)to)[i] += ((const float *)from)[i];
        }
    }
}

void
mha_py_join_gradients(const mha_py_layer *layer, const mha_layer_grads *grads, const mha_py_array *weight,
                      const mha_py_array *bias)
{
    const mha_py_joint *joint = &layer->joint;
    const npy_intp in_features = joint->whole.weight.shape[1];
    const npy_intp itemsize = (npy_intp)mha_py_itemsize(layer->queries.type);

    for (int i = 0; i < MHA_PY_N_INPUTS && joint->overlaps; i++) {
        const char *of_weight = grads->grad_weight[i], *of_bias = grads->grad_bias[i];

        for (npy_intp j = 0; j < layer->W[i].weight.shape[0]; j++) {
            const npy_intp row = row_of(joint, i, j);

            if (of_weight != NULL) {
                add(layer->queries.type, in_features, of_weight + j * in_features * itemsize,
                    (char *)mha_py_numbers(weight) + row * in_features * itemsize);
            }
            if (of_bias != NULL) {
                add(layer->queries.type, 1, of_bias + j * itemsize, (char *)mha_py_numbers(bias) + row * itemsize);
            }
        }
    }
}
