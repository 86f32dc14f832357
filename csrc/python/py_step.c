/*
 * py_step.c: layer_step, one call of a decoder: new rows of keys and values go through their projections to their
 * places in a cache, and the queries attend to all rows that are there.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h"

/* The arguments behind those of layer_forward. */
enum {
    CACHED_KEYS = MHA_PY_N_LAYER, /* (B, room, features), written to */
    CACHED_VALUES,
    BEFORE, /* rows that each item has: a number, or (B,) */
    COUNTS, /* new rows of each that count: likewise */
    LONGEST /* rows of the longest afterwards */
};

/* A number for all items, or one for each. */
typedef struct {
    int64_t number;
    const int64_t *numbers;
    size_t step;
} counts;

static int
take_counts(mha_py_call *call, PyObject *value, const char *name, npy_intp batch, counts *to)
{
    mha_py_lengths each = {NULL, NULL, 0};

    if (PyLong_CheckExact(value)) {
        to->numbers = &to->number;
        to->step = 0;
        return mha_py_whole(value, name, 0, &to->number);
    }
    if (mha_py_take_lengths(call, value, batch, 1, &each) < 0) {
        return -1;
    }
    to->numbers = each.data;
    to->step = 1;
    return each.data != NULL ? 0 : mha_py_type_error(value, name, "a whole number or an array of int64");
}

/* Nothing is written behind the room, and nothing read that was never written. */
static int
counts_fit(const counts *before, const counts *added, npy_intp batch, npy_intp rows, npy_intp room, int64_t longest)
{
    int fit = longest <= room;

    for (npy_intp b = 0; b < batch && fit; b++) {
        const int64_t had = before->numbers[(size_t)b * before->step], more = added->numbers[(size_t)b * added->step];

        fit = had >= 0 && more >= 0 && more <= rows && had <= room && more <= room - had && had + more <= longest;
    }
    return fit;
}

/* The rows to be attended to in the place of new ones: `array` becomes the cache's. */
static int
take_cached(mha_py_call *call, PyObject *value, const char *name, npy_intp features, mha_py_array *array)
{
    const npy_intp batch = array->shape[0];
    const mha_py_array like = *array;

    if (!PyArray_Check(value) || !PyArray_ISCARRAY((PyArrayObject *)value)) {
        return mha_py_type_error(value, name, "a dense array that can be written to");
    }
    if (mha_py_take(call, value, name, MHA_PY_DENSE, &like, array) < 0) {
        return -1;
    }
    const npy_intp shape[] = {batch, array->rank == 3 ? array->shape[1] : 0, features};
    return mha_py_need_shape(array, 3, shape);
}

static mha_append
append_of(const mha_py_layer *layer, int which, const mha_py_array *x, const counts *before, const counts *added)
{
    return (mha_append){
        .dtype = layer->args.dtype,
        .linear = layer->W[which].linear,
        .batch = layer->args.batch,
        .rows = layer->args.keys,
        .in_features = (size_t)x->shape[2],
        .x = mha_py_operand(x),
        .before = before->numbers,
        .counts = added->numbers,
        .before_step = before->step,
        .counts_step = added->step,
    };
}

static int
append(mha_py_call *call, mha_append *job, const mha_py_array *cached)
{
    const double per_row = (double)job->linear.out_features * (double)job->linear.in_features;

    job->cache = (void *)(uintptr_t)cached->data;
    job->room = (size_t)cached->shape[1];
    mha_py_detach(call, (double)job->batch * (double)job->rows * per_row);
    return mha_py_attach(call, mha_linear_append(job));
}

static PyObject *
step(mha_py_call *call, PyObject *const *values, mha_py_layer *layer)
{
    const npy_intp batch = layer->queries.shape[0], rows = layer->keys.shape[1];
    const npy_intp scored = layer->qk_features, valued = layer->value_features;
    counts before, added;
    int64_t longest;

    if (take_counts(call, values[BEFORE], "before", batch, &before) < 0 ||
        take_counts(call, values[COUNTS], "counts", batch, &added) < 0 ||
        mha_py_whole(values[LONGEST], "longest", 0, &longest) < 0) {
        return NULL;
    }
    mha_append keys = append_of(layer, MHA_PY_W_K, &layer->keys, &before, &added);
    mha_append items = append_of(layer, MHA_PY_W_V, &layer->values, &before, &added);
    if (take_cached(call, values[CACHED_KEYS], "the cache of keys", scored, &layer->keys) < 0 ||
        take_cached(call, values[CACHED_VALUES], "the cache of values", valued, &layer->values) < 0) {
        return NULL;
    }
    if (layer->values.shape[1] != layer->keys.shape[1] ||
        !counts_fit(&before, &added, batch, rows, layer->keys.shape[1], longest)) {
        mha_py_refuse("cache_counts", "(OOOn)", values[BEFORE], values[COUNTS], values[LONGEST],
                      (Py_ssize_t)layer->keys.shape[1]);
        return NULL;
    }
    if (append(call, &keys, &layer->keys) < 0 || append(call, &items, &layer->values) < 0) {
        return NULL;
    }
    mha_py_use_projected(layer, (npy_intp)longest);
    return mha_py_run_layer(call, layer, values, 0);
}

PyObject *
py_layer_step(mha_py_call *call, PyObject *const *values)
{
    mha_py_layer layer = {0};

    return mha_py_take_layer(call, values, NULL, &layer) < 0 ? NULL : step(call, values, &layer);
}
