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
    BEFORE,  /* rows that each item has: a number, or (B,) */
    COUNTS,  /* new rows of each that count: likewise */
    LONGEST, /* rows of the longest afterwards */
    TURN,    /* None, or (cosines, sines): (n, D / 2) or (B, n, D / 2) */
    OPTIONS
};

/* A number for all items, or one for each. */
typedef struct {
    int64_t number;
    const int64_t *numbers;
    size_t step;
} counts;

static void
take_counts(mha_py_call *call, PyObject *value, const char *name, npy_intp batch, counts *to)
{
    mha_py_lengths each = {NULL, NULL, 0};

    if (PyLong_CheckExact(value)) {
        to->number = mha_py_whole(call, value, name, 0);
        to->numbers = &to->number;
        return;
    }
    mha_py_take_lengths(call, value, batch, 1, 0, &each);
    if (!call->failed && each.data == NULL) {
        mha_py_type_error(call, value, name, "a whole number or an array of int64");
    }
    to->numbers = each.data;
    to->step = 1;
}

/* 1 if nothing will be written behind the room, and nothing read that was never written. */
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

/* Makes `array`, which has the new rows, the cache, to whose rows the queries attend. */
static void
take_cached(mha_py_call *call, PyObject *value, const char *name, npy_intp features, mha_py_array *array)
{
    const npy_intp batch = array->shape[0];
    const mha_py_array like = *array;

    if (!call->failed && (!PyArray_Check(value) || !PyArray_ISCARRAY((PyArrayObject *)value))) {
        mha_py_type_error(call, value, name, "a dense array that can be written to");
    }
    mha_py_take(call, value, name, MHA_PY_DENSE, &like, array);
    const npy_intp shape[] = {batch, array->rank == 3 ? array->shape[1] : 0, features};
    mha_py_need_shape(call, array, 3, shape);
}

static mha_append
append_of(const mha_py_layer *layer, int which, const mha_py_array *x, const counts *before, const counts *added)
{
    return (mha_append){
        .dtype = layer->args.attention.dtype,
        .linear = layer->W[which].linear,
        .batch = layer->args.attention.batch,
        .rows = layer->args.attention.keys,
        .in_features = (size_t)x->shape[2],
        .x = mha_py_operand(x),
        .before = before->numbers,
        .counts = added->numbers,
        .before_step = before->step,
        .counts_step = added->step,
    };
}

static void
append(mha_py_call *call, mha_append *job, const mha_py_array *cached)
{
    if (!call->failed) {
        job->cache = (void *)(uintptr_t)cached->data;
        job->room = (size_t)cached->shape[1];
        mha_py_detach(call, mha_linear_work(&job->linear, job->batch, job->rows));
        mha_py_attach(call, mha_linear_append(job));
    }
}

PyObject *
py_layer_step(mha_py_call *call, PyObject *const *values)
{
    mha_py_layer layer = {.counts_lengths = 1};
    counts before = {0}, added = {0};
    const int64_t longest = mha_py_whole(call, values[LONGEST], "longest", 0);

    mha_py_take_layer(call, values, values[OPTIONS], &layer);
    const npy_intp batch = layer.queries.shape[0], rows = layer.keys.shape[1];
    const mha_turn turn = mha_py_take_turn(call, values[TURN], rows, &layer);
    if (!call->failed && mha_py_given(values[TURN]) && layer.queries.shape[1] != rows) {
        mha_py_type_error(call, values[TURN], "turn", "None, unless there are as many queries as new rows");
    }
    layer.args.inputs[MHA_QUERIES].turn = turn;
    take_counts(call, values[BEFORE], "before", batch, &before);
    take_counts(call, values[COUNTS], "counts", batch, &added);
    if (call->failed) {
        return NULL; /* new rows are read as they were taken */
    }
    mha_append keys = append_of(&layer, MHA_PY_W_K, &layer.keys, &before, &added);
    keys.turn = turn;
    mha_append items = append_of(&layer, MHA_PY_W_V, &layer.values, &before, &added);
    take_cached(call, values[CACHED_KEYS], "the cache of keys", layer.key_features, &layer.keys);
    take_cached(call, values[CACHED_VALUES], "the cache of values", layer.value_features, &layer.values);
    const npy_intp room = layer.keys.shape[1];
    if (!call->failed && (layer.values.shape[1] != room || !counts_fit(&before, &added, batch, rows, room, longest))) {
        mha_py_refuse(call, "cache_counts", "(OOOn)", values[BEFORE], values[COUNTS], values[LONGEST],
                      (Py_ssize_t)room);
    }
    if (!call->failed && (mha_py_given(layer.options.scores.causal) || mha_py_given(layer.options.turn))) {
        mha_py_type_error(call, values[OPTIONS], "options", "without a corner and a turn");
    }
    mha_py_place_layer(call, values, (npy_intp)longest, &layer);
    append(call, &keys, &layer.keys);
    append(call, &items, &layer.values);
    if (call->failed) {
        return NULL;
    }
    mha_py_use_projected(&layer, (npy_intp)longest);
    return mha_py_run_layer(call, &layer, values, 0);
}
