/*
 * args_scores.c: what calls of attention and of layers say of their scores: causal corner, window, scale, masks, and
 * terms.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <math.h>

/* --- Numbers -------------------------------------------------------------------------------- */

/* How many keys to one side, its own place among them.  No index reaches 2**61: wider windows are cut to it. */
static int64_t
take_window(mha_py_call *call, PyObject *value, const char *name)
{
    const int64_t window = value == NULL ? -1 : mha_py_whole(call, value, name, -1);

    return window < 0 ? MHA_NO_LIMIT : 1 + (window > INT64_MAX / 4 ? INT64_MAX / 4 : window);
}

/* The middle one of the terms (relative_bias, softcap, sinks). */
static void
take_softcap(mha_py_call *call, PyObject *terms, mha_attention_args *args)
{
    if (call->failed || !mha_py_given(terms)) {
        return;
    }
    if (!PyTuple_Check(terms) || PyTuple_Size(terms) != 3) {
        mha_py_type_error(call, terms, "score_terms", "None or a tuple (relative_bias, softcap, sinks)");
        return;
    }
    PyObject *const value = PyTuple_GetItem(terms, 1);
    const double softcap = mha_py_given(value) ? mha_py_real(call, value, "softcap") : 0;
    if (!call->failed && !(softcap >= 0 && softcap < HUGE_VAL)) {
        mha_py_refuse(call, "positive", "(Os)", value, "softcap");
    }
    args->softcap = softcap;
}

void
mha_py_take_score_numbers(mha_py_call *call, const mha_py_score_values *values, mha_py_scores *scores,
                          mha_attention_args *args)
{
    if (mha_py_given(values->causal)) {
        args->visible.causal = mha_py_choice(call, values->causal, "causal", "top_left", "bottom_right")
                                   ? MHA_CAUSAL_BOTTOM_RIGHT
                                   : MHA_CAUSAL_TOP_LEFT;
    }
    args->visible.window_left = take_window(call, values->window_left, "window_left");
    args->visible.window_right = take_window(call, values->window_right, "window_right");
    if (mha_py_given(values->scale)) {
        scores->scale = mha_py_real(call, values->scale, "scale");
        args->scale = &scores->scale;
    }
    take_softcap(call, values->terms, args);
}

/* --- Terms ----------------------------------------------------------------------------------- */

static void
take_relative_bias(mha_py_call *call, PyObject *value, const mha_py_array *like, mha_py_scores *scores,
                   mha_attention_args *args)
{
    mha_py_array *table = &scores->relative_bias;

    mha_py_take(call, value, "relative_bias", MHA_PY_DENSE, like, table);
    if (!call->failed && (table->rank != 2 || (size_t)table->shape[0] != args->heads || table->shape[1] % 2 == 0)) {
        mha_py_refuse(call, "relative_bias", "(On)", table->array, (Py_ssize_t)args->heads);
    }
    args->relative_bias = table->data;
    args->relative_reach = (size_t)table->shape[1] / 2;
}

static void
take_sinks(mha_py_call *call, PyObject *value, const mha_py_array *like, mha_py_scores *scores,
           mha_attention_args *args)
{
    const npy_intp heads = (npy_intp)args->heads;

    mha_py_take(call, value, "sinks", MHA_PY_DENSE, like, &scores->sinks);
    mha_py_need_rank(call, &scores->sinks, 1, "(H,)");
    mha_py_need_shape(call, &scores->sinks, 1, &heads);
    args->sinks = scores->sinks.data;
}

/* --- The whole --------------------------------------------------------------------------------- */

void
mha_py_place_scores(mha_py_call *call, const mha_py_score_values *values, const mha_py_array *like,
                    mha_py_scores *scores, mha_attention_args *args)
{
    mha_py_see_lengths(&scores->lengths, &args->visible);
    args->keep_mask = mha_py_place_mask(call, &scores->keep_mask, scores);
    args->bias = mha_py_place_mask(call, &scores->bias, scores);
    if (call->failed || !mha_py_given(values->terms)) {
        return;
    }
    if (mha_py_given(PyTuple_GetItem(values->terms, 0))) {
        take_relative_bias(call, PyTuple_GetItem(values->terms, 0), like, scores, args);
    }
    if (mha_py_given(PyTuple_GetItem(values->terms, 2))) {
        take_sinks(call, PyTuple_GetItem(values->terms, 2), like, scores, args);
    }
}
