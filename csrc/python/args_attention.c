/*
 * args_attention.c: the arguments that attention_forward, attention_backward and explain_attention share: arrays,
 * shapes, masks, numbers.  q, k, v are (B, ., .) or (B, H, ., .): axes are counted from the end.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <math.h>

enum { Q, K, V, W_V, LENS, KEEP, BIAS, CAUSAL, LEFT, RIGHT, SCALE, DROPOUT, SEED, EMPTY };

/* --- Options ------------------------------------------------------------------------------ */

/* How many keys to one side, its own place among them.  No index reaches 2**61: wider windows are cut to it. */
static int64_t
take_window(mha_py_call *call, PyObject *value, const char *name)
{
    const int64_t window = value == NULL ? -1 : mha_py_whole(call, value, name, -1);

    return window < 0 ? MHA_NO_LIMIT : 1 + (window > INT64_MAX / 4 ? INT64_MAX / 4 : window);
}

static void
take_origin(mha_py_call *call, PyObject *value, mha_attention_args *args)
{
    size_t *const places[4] = {&args->first_item, &args->first_head, &args->visible.first_query,
                               &args->visible.first_key};

    if (call->failed || !mha_py_given(value)) {
        return;
    }
    if (!PyTuple_Check(value) || PyTuple_Size(value) != 4) {
        mha_py_type_error(call, value, "origin", "None or a tuple (item, head, query, key)");
    } else if (args->visible.causal == MHA_CAUSAL_BOTTOM_RIGHT) {
        mha_py_refuse(call, "corner_with_origin", "()");
    }
    for (int i = 0; i < 4 && !call->failed; i++) {
        const int64_t place = mha_py_whole(call, PyTuple_GetItem(value, i), "origin", 0);

        *places[i] = (size_t)place;
        if (!call->failed && (uint64_t)place > MHA_LAST_PLACE) {
            mha_py_refuse(call, "far_origin", "(On)", value, (Py_ssize_t)MHA_LAST_PLACE);
        }
    }
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

/* All that is no array.  A number may be an object whose methods run: it is read before any array is. */
static void
take_options(mha_py_call *call, PyObject *const *values, mha_py_attention *attention)
{
    mha_attention_args *args = &attention->args;

    if (mha_py_given(values[CAUSAL])) {
        args->visible.causal = mha_py_choice(call, values[CAUSAL], "causal", "top_left", "bottom_right")
                                   ? MHA_CAUSAL_BOTTOM_RIGHT
                                   : MHA_CAUSAL_TOP_LEFT;
    }
    args->visible.window_left = take_window(call, values[LEFT], "window_left");
    args->visible.window_right = take_window(call, values[RIGHT], "window_right");
    if (mha_py_given(values[SCALE])) {
        attention->scale = mha_py_real(call, values[SCALE], "scale");
        args->scale = &attention->scale;
    }
    args->dropout = values[DROPOUT] == NULL ? 0 : mha_py_probability(call, values[DROPOUT]);
    args->seed = values[SEED] == NULL ? 0 : mha_py_seed(call, values[SEED]);
    args->empty_rows = values[EMPTY] == NULL ? MHA_EMPTY_ZERO : mha_py_empty_rows(call, values[EMPTY]);
}

/* --- Arrays ---------------------------------------------------------------------------- */

/* Query heads share key heads in equal groups. */
static int
shapes_fit(const mha_py_array *q, const mha_py_array *k, const mha_py_array *v, const mha_py_array *w_v)
{
    const int rank = q->rank;

    return (rank == 3 || rank == 4) && k->rank == rank && v->rank == rank && k->shape[0] == q->shape[0] &&
           v->shape[0] == q->shape[0] && k->shape[rank - 1] == q->shape[rank - 1] &&
           v->shape[rank - 2] == k->shape[rank - 2] &&
           (w_v->array == NULL || (w_v->rank == 1 && w_v->shape[0] == q->shape[rank - 1])) &&
           (rank == 3 || (v->shape[1] == k->shape[1] &&
                          (q->shape[1] == k->shape[1] || (k->shape[1] > 0 && q->shape[1] % k->shape[1] == 0))));
}

static void
take_arrays(mha_py_call *call, PyObject *const *values, mha_py_attention *attention)
{
    mha_py_array *q = &attention->q, *k = &attention->k, *v = &attention->v, *w_v = &attention->w_v;

    mha_py_take(call, values[Q], "q", MHA_PY_ROWS, NULL, q);
    mha_py_take(call, values[K], "k", MHA_PY_ROWS, q, k);
    mha_py_take(call, values[V], "v", MHA_PY_ROWS, q, v);
    if (mha_py_given(values[W_V])) {
        mha_py_take(call, values[W_V], "w_v", MHA_PY_DENSE, q, w_v);
    }
    mha_py_take_mask(call, values[KEEP], "keep_mask", NULL, &attention->keep_mask);
    mha_py_take_mask(call, values[BIAS], "bias", q, &attention->bias);
    if (!call->failed && !shapes_fit(q, k, v, w_v)) {
        mha_py_refuse(call, "attention", "(OOOO)", q->array, k->array, v->array, mha_py_or_none(w_v->array));
    }
}

static void
note_sizes(mha_py_attention *attention)
{
    mha_attention_args *args = &attention->args;
    const int rank = attention->q.rank;

    args->dtype = mha_py_dtype(attention->q.type);
    args->batch = (size_t)attention->q.shape[0];
    args->heads = rank == 4 ? (size_t)attention->q.shape[1] : 1;
    args->kv_heads = rank == 4 ? (size_t)attention->k.shape[1] : 1;
    args->queries = (size_t)attention->q.shape[rank - 2];
    args->keys = (size_t)attention->k.shape[rank - 2];
    args->head_dim = (size_t)attention->q.shape[rank - 1];
    args->value_dim = (size_t)attention->v.shape[rank - 1];
    args->q = mha_py_operand(&attention->q);
    args->k = mha_py_operand(&attention->k);
    args->v = mha_py_operand(&attention->v);
    args->additive_weights = attention->w_v.data;
    attention->work = mha_attention_work(args);

    for (int i = 0; i < rank; i++) {
        attention->scores[i] = i < rank - 1 ? attention->q.shape[i] : attention->k.shape[rank - 2];
        attention->out_shape[i] = i < rank - 1 ? attention->q.shape[i] : attention->v.shape[i];
    }
}

/* What restricts the keys of arrays that are taken. */
static void
take_restrictions(mha_py_call *call, PyObject *const *values, int is_part, mha_py_attention *attention)
{
    mha_attention_args *args = &attention->args;
    const mha_py_array *q = &attention->q;
    /* The lengths of a part were cut from a user's, so they are no mask by mistake. */
    const npy_intp keys = is_part ? 0 : attention->scores[q->rank - 1];

    mha_py_take_lengths(call, values[LENS], q->shape[0], q->shape[q->rank - 2], keys, &attention->lengths);
    args->visible.valid_lens = attention->lengths.data;
    args->visible.lens_per_batch = attention->lengths.per_batch;
    args->keep_mask = mha_py_broadcast(call, &attention->keep_mask, q->rank, attention->scores);
    args->bias = mha_py_broadcast(call, &attention->bias, q->rank, attention->scores);
    mha_py_turn_mask(call, args, NPY_BOOL, &args->keep_mask);
    mha_py_turn_mask(call, args, q->type, &args->bias);
}

/* --- Terms of the score --------------------------------------------------------------------- */

static void
take_relative_bias(mha_py_call *call, PyObject *value, mha_py_attention *attention)
{
    mha_py_array *table = &attention->relative_bias;
    const size_t heads = attention->args.heads;

    mha_py_take(call, value, "relative_bias", MHA_PY_DENSE, &attention->q, table);
    if (!call->failed && (table->rank != 2 || (size_t)table->shape[0] != heads || table->shape[1] % 2 == 0)) {
        mha_py_refuse(call, "relative_bias", "(On)", table->array, (Py_ssize_t)heads);
    }
    attention->args.relative_bias = table->data;
    attention->args.relative_reach = (size_t)table->shape[1] / 2;
}

static void
take_sinks(mha_py_call *call, PyObject *value, mha_py_attention *attention)
{
    const npy_intp heads = (npy_intp)attention->args.heads;

    mha_py_take(call, value, "sinks", MHA_PY_DENSE, &attention->q, &attention->sinks);
    mha_py_need_rank(call, &attention->sinks, 1, "(H,)");
    mha_py_need_shape(call, &attention->sinks, 1, &heads);
    attention->args.sinks = attention->sinks.data;
}

/* The arrays among the terms (relative_bias, softcap, sinks). */
static void
take_terms(mha_py_call *call, PyObject *terms, mha_py_attention *attention)
{
    if (call->failed || !mha_py_given(terms)) {
        return;
    }
    if (mha_py_given(PyTuple_GetItem(terms, 0))) {
        take_relative_bias(call, PyTuple_GetItem(terms, 0), attention);
    }
    if (mha_py_given(PyTuple_GetItem(terms, 2))) {
        take_sinks(call, PyTuple_GetItem(terms, 2), attention);
    }
}

/* --- The whole ----------------------------------------------------------------------------- */

void
mha_py_take_attention(mha_py_call *call, PyObject *const *values, PyObject *origin, PyObject *terms,
                      mha_py_attention *attention)
{
    take_options(call, values, attention);
    take_origin(call, origin, &attention->args);
    take_softcap(call, terms, &attention->args);
    take_arrays(call, values, attention);
    if (call->failed) {
        return; /* what follows reads their sizes */
    }
    note_sizes(attention);
    take_restrictions(call, values, mha_py_given(origin), attention);
    take_terms(call, terms, attention);
    if (values[SEED] != NULL) {
        mha_py_draw_seed(call, values[SEED], &attention->args.seed);
    }
}

void
mha_py_take_statistics(mha_py_call *call, PyObject *row_max, PyObject *row_sum, mha_py_attention *attention)
{
    const mha_py_array *q = &attention->q;

    attention->args.row_max = mha_py_take_numbers(call, row_max, "row_max", q->rank - 1, attention->scores, q);
    attention->args.row_sum = mha_py_take_numbers(call, row_sum, "row_sum", q->rank - 1, attention->scores, q);
}
