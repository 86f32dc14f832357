/*
 * py_saved.c: saved_weights, the attention weights of an earlier layer_forward, either as they
 * were kept or rebuilt to the bit from q, k and the row statistics.
 *
 * `saved` may come out of a pickle that somebody has tampered with: everything in it is checked
 * as if it were a user's argument.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <math.h>
#include <string.h>

/* ("weights", weights), or these: */
enum { KIND, ISA, KEPT_Q, KEPT_K, W_V, ROW_MAX, ROW_SUM, LENS, HEADS, EMPTY, N_PARTS };

typedef struct {
    mha_py_array q, k, w_v, row_max, row_sum;
    mha_py_lengths lengths;
    npy_intp heads;
    PyArrayObject *weights;
    mha_attention_args args;
} saved_call;

static void
end_call(saved_call *call)
{
    mha_py_drop(&call->q);
    mha_py_drop(&call->k);
    mha_py_drop(&call->w_v);
    mha_py_drop(&call->row_max);
    mha_py_drop(&call->row_sum);
    mha_py_drop_lengths(&call->lengths);
    Py_XDECREF((PyObject *)call->weights);
}

static int
say_corrupt(const char *what)
{
    PyErr_Format(PyExc_ValueError, "saved is not what layer_forward returned: %s", what);
    return -1;
}

/* A type error of a part says the same as a wrong shape: the state is not ours. */
static int
take_part(mha_py_array *array, PyObject *value, const char *name, int rank, const mha_py_array *like)
{
    if (mha_py_take(array, value, name, MHA_PY_DENSE, like) < 0) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            return say_corrupt(name);
        }
        return -1;
    }
    return array->rank == rank ? 0 : say_corrupt(name);
}

/* --- Kept weights -------------------------------------------------------------------------- */

static PyArrayObject *
copy_weights(PyObject *value)
{
    mha_py_array kept = {0};
    PyArrayObject *weights = NULL;

    if (take_part(&kept, value, "weights", 4, NULL) == 0) {
        weights = mha_py_new("attention_weights", 4, kept.shape, kept.type);
    }
    if (weights != NULL) {
        memcpy(PyArray_DATA(weights), kept.data, (size_t)PyArray_SIZE(weights) * mha_py_itemsize(kept.type));
    }
    mha_py_drop(&kept);
    return weights;
}

/* --- Weights to be rebuilt ------------------------------------------------------------------- */

static int
check_isa(PyObject *name)
{
    const char *active = mha_isa_name(mha_isa_active());

    if (!PyUnicode_Check(name)) {
        return say_corrupt("instruction set");
    }
    if (PyUnicode_CompareWithASCIIString(name, active) != 0) {
        PyErr_Format(PyExc_RuntimeError,
                     "attention_weights of a call computed with %.100R cannot be rebuilt to "
                     "the bit with %s: call the layer again",
                     name, active);
        return -1;
    }
    return 0;
}

static int
take_arrays(saved_call *call, PyObject *const *parts)
{
    if (take_part(&call->q, parts[KEPT_Q], "q", 3, NULL) < 0 ||
        take_part(&call->k, parts[KEPT_K], "k", 3, &call->q) < 0 ||
        take_part(&call->row_max, parts[ROW_MAX], "row_max", 3, &call->q) < 0 ||
        take_part(&call->row_sum, parts[ROW_SUM], "row_sum", 3, &call->q) < 0) {
        return -1;
    }
    if (parts[W_V] != Py_None && take_part(&call->w_v, parts[W_V], "w_v", 1, &call->q) < 0) {
        return -1;
    }
    return 0;
}

static int
take_rest(PyObject *module, saved_call *call, PyObject *const *parts)
{
    int64_t heads;

    if (parts[LENS] != Py_None && !PyArray_Check(parts[LENS])) {
        return say_corrupt("lengths");
    }
    if (mha_py_whole(parts[HEADS], "num_heads", 1, &heads) < 0 ||
        mha_py_empty_rows(parts[EMPTY], &call->args.empty_rows) < 0 ||
        mha_py_take_lengths(module, parts[LENS], call->q.shape[0], call->q.shape[1], &call->lengths) < 0) {
        if (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError)) {
            return say_corrupt("lengths, num_heads or empty_rows");
        }
        return -1;
    }
    if (heads > NPY_MAX_INTP || call->q.shape[2] % heads != 0) {
        return say_corrupt("num_heads does not divide the features");
    }
    call->heads = (npy_intp)heads;
    return 0;
}

static int
check_shapes(const saved_call *call)
{
    const npy_intp *q = call->q.shape, *k = call->k.shape;
    const npy_intp rows[] = {q[0], call->heads, q[1]};

    if (k[0] != q[0] || k[2] != q[2]) {
        return say_corrupt("q and k do not fit together");
    }
    for (int i = 0; i < 3; i++) {
        if (call->row_max.shape[i] != rows[i] || call->row_sum.shape[i] != rows[i]) {
            return say_corrupt("the row statistics do not fit q");
        }
    }
    if (call->w_v.array != NULL && call->w_v.shape[0] != q[2] / call->heads) {
        return say_corrupt("w_v does not fit q");
    }
    return 0;
}

static void
note_sizes(saved_call *call)
{
    mha_attention_args *args = &call->args;

    args->dtype = mha_py_dtype(&call->q);
    args->batch = (size_t)call->q.shape[0];
    args->heads = args->kv_heads = (size_t)call->heads;
    args->queries = (size_t)call->q.shape[1];
    args->keys = (size_t)call->k.shape[1];
    args->head_dim = (size_t)(call->q.shape[2] / call->heads);
    args->q = mha_py_operand(&call->q);
    args->k = mha_py_operand(&call->k);
    /* Heads are columns h*D .. (h+1)*D of the features. */
    args->q.head_stride = args->k.head_stride = (ptrdiff_t)args->head_dim;
    args->additive_weights = call->w_v.array == NULL ? NULL : call->w_v.data;
    /* The same scale as mha_layer_forward's, to the bit. */
    args->scale = call->w_v.array == NULL && args->head_dim > 0 ? 1 / sqrt((double)args->head_dim) : 1;
    args->visible = mha_py_visibility(&call->lengths);
    args->row_max = (void *)call->row_max.data;
    args->row_sum = (void *)call->row_sum.data;
}

static int
rebuild(saved_call *call)
{
    const npy_intp dims[] = {call->q.shape[0], call->heads, call->q.shape[1], call->k.shape[1]};
    PyThreadState *saved;
    mha_status status;

    call->weights = mha_py_new("attention_weights", 4, dims, call->q.type);
    if (call->weights == NULL) {
        return -1;
    }
    call->args.weights = PyArray_DATA(call->weights);
    saved = mha_py_detach((double)dims[0] * (double)dims[2] * (double)dims[3] * (double)call->q.shape[2]);
    status = mha_attention_weights(&call->args);
    mha_py_attach(saved);
    return mha_py_check(status, "saved_weights");
}

static PyArrayObject *
rebuild_weights(PyObject *module, PyObject *saved_tuple)
{
    PyObject *parts[N_PARTS];
    saved_call call = {0};
    PyArrayObject *weights = NULL;

    for (int i = 0; i < N_PARTS; i++) {
        parts[i] = PyTuple_GetItem(saved_tuple, i);
    }
    if (take_arrays(&call, parts) < 0 || take_rest(module, &call, parts) < 0 || check_shapes(&call) < 0 ||
        check_isa(parts[ISA]) < 0) {
        goto done;
    }
    note_sizes(&call);
    if (rebuild(&call) == 0) {
        weights = call.weights;
        call.weights = NULL; /* ownership moves to the caller */
    }
done:
    end_call(&call);
    return weights;
}

/* --- Entry --------------------------------------------------------------------------------------- */

static int
is_kind(PyObject *saved, const char *kind, Py_ssize_t n_parts)
{
    PyObject *first = PyTuple_Size(saved) == n_parts ? PyTuple_GetItem(saved, KIND) : NULL;

    return first != NULL && PyUnicode_Check(first) && PyUnicode_CompareWithASCIIString(first, kind) == 0;
}

PyObject *
py_saved_weights(PyObject *module, PyObject *saved)
{
    if (!PyTuple_Check(saved)) {
        mha_py_type_error(saved, "saved", "a tuple");
        return NULL;
    }
    if (is_kind(saved, "weights", 2)) {
        return (PyObject *)copy_weights(PyTuple_GetItem(saved, 1));
    }
    if (is_kind(saved, "recompute", N_PARTS)) {
        return (PyObject *)rebuild_weights(module, saved);
    }
    say_corrupt("unknown kind");
    return NULL;
}
