/*
 * args_attention.c: the arguments that attention_forward, attention_backward and explain_attention share: arrays,
 * shapes, masks, numbers.  q, k, v are (B, ., .) or (B, H, ., .): axes are counted from the end.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <math.h>

enum { Q, K, V, W_V, LENS, KEEP, BIAS, CAUSAL, LEFT, RIGHT, SCALE, DROPOUT, SEED, EMPTY };

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

static int
take_arrays(mha_py_call *call, PyObject *const *values, mha_py_attention *attention)
{
    mha_py_array *q = &attention->q, *k = &attention->k, *v = &attention->v, *w_v = &attention->w_v;

    if (mha_py_take(call, values[Q], "q", MHA_PY_ROWS, NULL, q) < 0 ||
        mha_py_take(call, values[K], "k", MHA_PY_ROWS, q, k) < 0 ||
        mha_py_take(call, values[V], "v", MHA_PY_ROWS, q, v) < 0 ||
        (mha_py_given(values[W_V]) && mha_py_take(call, values[W_V], "w_v", MHA_PY_DENSE, q, w_v) < 0) ||
        mha_py_take_mask(call, values[KEEP], "keep_mask", NULL, &attention->keep_mask) < 0 ||
        mha_py_take_mask(call, values[BIAS], "bias", q, &attention->bias) < 0) {
        return -1;
    }
    return shapes_fit(q, k, v, w_v)
               ? 0
               : mha_py_refuse("attention", "(OOOO)", q->array, k->array, v->array, mha_py_or_none(w_v->array));
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

/* --- Options ------------------------------------------------------------------------------ */

/* No index reaches 2**61, so wider windows are cut to it and i + window cannot wrap. */
static int
take_window(PyObject *value, const char *name, int64_t *window_ret)
{
    if (value != NULL && mha_py_whole(value, name, -1, window_ret) < 0) {
        return -1;
    }
    *window_ret = *window_ret > INT64_MAX / 4 ? INT64_MAX / 4 : *window_ret;
    return 0;
}

static int
take_visibility(mha_py_call *call, mha_py_attention *attention, PyObject *const *values)
{
    mha_attention_args *args = &attention->args;
    mha_visibility *visible = &args->visible;
    const mha_py_array *q = &attention->q;
    int causal;

    if (mha_py_take_lengths(call, values[LENS], q->shape[0], q->shape[q->rank - 2], &attention->lengths) < 0) {
        return -1;
    }
    *visible = mha_py_visibility(&attention->lengths);
    if (mha_py_given(values[CAUSAL])) {
        if (mha_py_choice(values[CAUSAL], "causal", "top_left", "bottom_right", &causal) < 0) {
            return -1;
        }
        visible->causal = causal == 0 ? MHA_CAUSAL_TOP_LEFT : MHA_CAUSAL_BOTTOM_RIGHT;
    }
    return take_window(values[LEFT], "window_left", &visible->window_left) < 0 ||
                   take_window(values[RIGHT], "window_right", &visible->window_right) < 0 ||
                   mha_py_broadcast(&attention->keep_mask, q->rank, attention->scores, &args->keep_mask) < 0 ||
                   mha_py_broadcast(&attention->bias, q->rank, attention->scores, &args->bias) < 0
               ? -1
               : 0;
}

static int
take_numbers(mha_py_attention *attention, PyObject *const *values)
{
    mha_attention_args *args = &attention->args;

    args->scale = attention->w_v.array == NULL && args->head_dim > 0 ? 1 / sqrt((double)args->head_dim) : 1;
    return (mha_py_given(values[SCALE]) && mha_py_real(values[SCALE], "scale", &args->scale) < 0) ||
                   (values[DROPOUT] != NULL && mha_py_probability(values[DROPOUT], &args->dropout) < 0) ||
                   (values[SEED] != NULL && mha_py_seed(values[SEED], &args->seed) < 0) ||
                   (values[EMPTY] != NULL && mha_py_empty_rows(values[EMPTY], &args->empty_rows) < 0)
               ? -1
               : 0;
}

static int
take_origin(PyObject *value, mha_attention_args *args)
{
    size_t *const places[4] = {&args->first_item, &args->first_head, &args->visible.first_query,
                               &args->visible.first_key};

    if (!PyTuple_Check(value) || PyTuple_Size(value) != 4) {
        return mha_py_type_error(value, "origin", "None or a tuple (item, head, query, key)");
    }
    if (args->visible.causal == MHA_CAUSAL_BOTTOM_RIGHT) {
        return mha_py_refuse("corner_with_origin", "()");
    }
    for (int i = 0; i < 4; i++) {
        int64_t place;

        if (mha_py_whole(PyTuple_GetItem(value, i), "origin", 0, &place) < 0) {
            return -1;
        }
        if ((uint64_t)place > MHA_LAST_PLACE) {
            return mha_py_refuse("far_origin", "(On)", value, (Py_ssize_t)MHA_LAST_PLACE);
        }
        *places[i] = (size_t)place;
    }
    return 0;
}

/* --- Terms of the score --------------------------------------------------------------------- */

static int
take_relative_bias(mha_py_call *call, PyObject *value, mha_py_attention *attention)
{
    mha_py_array *table = &attention->relative_bias;

    if (mha_py_take(call, value, "relative_bias", MHA_PY_DENSE, &attention->q, table) < 0) {
        return -1;
    }
    if (table->rank != 2 || (size_t)table->shape[0] != attention->args.heads || table->shape[1] % 2 == 0) {
        return mha_py_refuse("relative_bias", "(On)", table->array, (Py_ssize_t)attention->args.heads);
    }
    attention->args.relative_bias = table->data;
    attention->args.relative_reach = (size_t)table->shape[1] / 2;
    return 0;
}

static int
take_sinks(mha_py_call *call, PyObject *value, mha_py_attention *attention)
{
    const npy_intp heads = (npy_intp)attention->args.heads;

    if (mha_py_take(call, value, "sinks", MHA_PY_DENSE, &attention->q, &attention->sinks) < 0 ||
        mha_py_need_rank(&attention->sinks, 1, "(H,)") < 0 || mha_py_need_shape(&attention->sinks, 1, &heads) < 0) {
        return -1;
    }
    attention->args.sinks = attention->sinks.data;
    return 0;
}

static int
take_terms(mha_py_call *call, PyObject *value, mha_py_attention *attention)
{
    double *softcap = &attention->args.softcap;

    if (!PyTuple_Check(value) || PyTuple_Size(value) != 3) {
        return mha_py_type_error(value, "score_terms", "None or a tuple (relative_bias, softcap, sinks)");
    }
    PyObject *const table = PyTuple_GetItem(value, 0), *const cap = PyTuple_GetItem(value, 1);
    PyObject *const sinks = PyTuple_GetItem(value, 2);
    if (mha_py_given(cap) && mha_py_real(cap, "softcap", softcap) < 0) {
        return -1;
    }
    if (!(*softcap >= 0 && *softcap < HUGE_VAL)) {
        return mha_py_refuse("softcap", "(O)", cap);
    }
    return (mha_py_given(table) && take_relative_bias(call, table, attention) < 0) ||
                   (mha_py_given(sinks) && take_sinks(call, sinks, attention) < 0)
               ? -1
               : 0;
}

/* --- The whole ----------------------------------------------------------------------------- */

int
mha_py_take_attention(mha_py_call *call, PyObject *const *values, PyObject *origin, PyObject *terms,
                      mha_py_attention *attention)
{
    if (take_arrays(call, values, attention) < 0) {
        return -1;
    }
    note_sizes(attention);
    return take_visibility(call, attention, values) < 0 || take_numbers(attention, values) < 0 ||
                   (mha_py_given(origin) && take_origin(origin, &attention->args) < 0) ||
                   (mha_py_given(terms) && take_terms(call, terms, attention) < 0)
               ? -1
               : 0;
}

int
mha_py_take_statistics(mha_py_call *call, PyObject *row_max, PyObject *row_sum, mha_py_attention *attention)
{
    const mha_py_array *q = &attention->q;
    const npy_intp *scores = attention->scores;
    mha_attention_args *args = &attention->args;

    return mha_py_take_numbers(call, row_max, "row_max", q->rank - 1, scores, q, &args->row_max) < 0 ||
                   mha_py_take_numbers(call, row_sum, "row_sum", q->rank - 1, scores, q, &args->row_sum) < 0
               ? -1
               : 0;
}
