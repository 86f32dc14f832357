/*
 * args_attention.c: the arguments that attention_forward and attention_backward share: arrays, shapes,
 * masks, numbers.  q, k, v are (B, ., .) or (B, H, ., .): axes are counted from the end.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <math.h>

enum { Q, K, V, W_V, LENS, KEEP, BIAS, CAUSAL, LEFT, RIGHT, SCALE, DROPOUT, SEED, EMPTY };

void
mha_py_drop_attention(mha_py_attention *attention)
{
    mha_py_drop(&attention->q);
    mha_py_drop(&attention->k);
    mha_py_drop(&attention->v);
    mha_py_drop(&attention->w_v);
    mha_py_drop(&attention->keep_mask);
    mha_py_drop(&attention->bias);
    mha_py_drop(&attention->relative_bias);
    mha_py_drop(&attention->sinks);
    mha_py_drop_lengths(&attention->lengths);
}

static int
given(PyObject *value)
{
    return value != NULL && value != Py_None;
}

/* --- Arrays ---------------------------------------------------------------------------- */

static int
take_arrays(mha_py_attention *attention, PyObject *const *values)
{
    mha_py_array *q = &attention->q;

    if (mha_py_take(q, values[Q], "q", MHA_PY_ROWS, NULL) < 0 ||
        mha_py_take(&attention->k, values[K], "k", MHA_PY_ROWS, q) < 0 ||
        mha_py_take(&attention->v, values[V], "v", MHA_PY_ROWS, q) < 0) {
        return -1;
    }
    if (given(values[W_V]) && mha_py_take(&attention->w_v, values[W_V], "w_v", MHA_PY_DENSE, q) < 0) {
        return -1;
    }
    if (given(values[KEEP]) && mha_py_take_mask(values[KEEP], "keep_mask", NULL, &attention->keep_mask) < 0) {
        return -1;
    }
    if (given(values[BIAS]) && mha_py_take_mask(values[BIAS], "bias", q, &attention->bias) < 0) {
        return -1;
    }
    return 0;
}

/* Query heads share key heads in equal groups. */
static int
check_heads(PyObject *module, const mha_py_attention *attention)
{
    const npy_intp heads = attention->q.shape[1], kv_heads = attention->k.shape[1];

    if (mha_py_need_same(module, "%zd heads", &attention->v, 1, &attention->k, 1) < 0) {
        return -1;
    }
    if (heads != kv_heads && (kv_heads == 0 || heads % kv_heads != 0)) {
        return mha_py_shape_error(module, "k has %zd heads, expected a divisor of the %zd heads of q",
                                  (Py_ssize_t)kv_heads, (Py_ssize_t)heads);
    }
    return 0;
}

static int
check_shapes(PyObject *module, const mha_py_attention *attention)
{
    const mha_py_array *q = &attention->q, *k = &attention->k, *v = &attention->v;
    const int rank = q->rank;

    if (rank != 4 && mha_py_need_rank(module, q, 3, "(B, Q, D), or rank 4: (B, H, Q, D)") < 0) {
        return -1;
    }
    if (mha_py_need_rank(module, k, rank, rank == 3 ? "(B, K, D)" : "(B, H, K, D)") < 0 ||
        mha_py_need_rank(module, v, rank, rank == 3 ? "(B, K, Dv)" : "(B, H, K, Dv)") < 0 ||
        mha_py_need_same(module, "batch size %zd", k, 0, q, 0) < 0 ||
        mha_py_need_same(module, "batch size %zd", v, 0, q, 0) < 0 ||
        mha_py_need_same(module, "%zd features", k, rank - 1, q, rank - 1) < 0 ||
        mha_py_need_same(module, "%zd keys", v, rank - 2, k, rank - 2) < 0) {
        return -1;
    }
    if (attention->w_v.array != NULL && (mha_py_need_rank(module, &attention->w_v, 1, "(features of q,)") < 0 ||
                                    mha_py_need_same(module, "%zd features", &attention->w_v, 0, q, rank - 1) < 0)) {
        return -1;
    }
    return rank == 4 ? check_heads(module, attention) : 0;
}

static void
note_sizes(mha_py_attention *attention)
{
    mha_attention_args *args = &attention->args;
    const int rank = attention->q.rank;

    args->dtype = mha_py_dtype(&attention->q);
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
    args->additive_weights = attention->w_v.array == NULL ? NULL : attention->w_v.data;

    attention->scores[0] = attention->q.shape[0];
    attention->scores[1] = attention->q.shape[1];
    attention->scores[rank - 2] = attention->q.shape[rank - 2];
    attention->scores[rank - 1] = attention->k.shape[rank - 2];
    for (int i = 0; i < rank; i++) {
        attention->out_shape[i] = i < rank - 1 ? attention->scores[i] : attention->v.shape[i];
    }
}

/* --- Options ------------------------------------------------------------------------------ */

static int
take_causal(PyObject *value, mha_causal *causal_ret)
{
    static const char *const choices[] = {"top_left", "bottom_right", NULL};
    int choice;

    if (mha_py_choice(value, "causal", choices, &choice) < 0) {
        return -1;
    }
    *causal_ret = choice == 0 ? MHA_CAUSAL_TOP_LEFT : MHA_CAUSAL_BOTTOM_RIGHT;
    return 0;
}

/* No index reaches 2**61, so wider windows are cut to it and i + window cannot wrap. */
static int
take_window(PyObject *value, const char *name, int64_t *window_ret)
{
    if (mha_py_whole(value, name, -1, window_ret) < 0) {
        return -1;
    }
    if (*window_ret > INT64_MAX / 4) {
        *window_ret = INT64_MAX / 4;
    }
    return 0;
}

static int
take_visibility(PyObject *module, mha_py_attention *attention, PyObject *const *values)
{
    mha_visibility *visible = &attention->args.visible;

    const mha_py_array *q = &attention->q;

    if (mha_py_take_lengths(module, values[LENS], q->shape[0], q->shape[q->rank - 2], &attention->lengths) < 0) {
        return -1;
    }
    *visible = mha_py_visibility(&attention->lengths);
    if (given(values[CAUSAL]) && take_causal(values[CAUSAL], &visible->causal) < 0) {
        return -1;
    }
    if (values[LEFT] != NULL && take_window(values[LEFT], "window_left", &visible->window_left) < 0) {
        return -1;
    }
    if (values[RIGHT] != NULL && take_window(values[RIGHT], "window_right", &visible->window_right) < 0) {
        return -1;
    }
    if (attention->keep_mask.array != NULL &&
        mha_py_broadcast(module, &attention->keep_mask, q->rank, attention->scores, &attention->args.keep_mask) < 0) {
        return -1;
    }
    if (attention->bias.array != NULL &&
        mha_py_broadcast(module, &attention->bias, q->rank, attention->scores, &attention->args.bias) < 0) {
        return -1;
    }
    return 0;
}

static int
take_numbers(mha_py_attention *attention, PyObject *const *values)
{
    mha_attention_args *args = &attention->args;

    args->scale = 1;
    if (given(values[SCALE])) {
        if (mha_py_real(values[SCALE], "scale", &args->scale) < 0) {
            return -1;
        }
    } else if (attention->w_v.array == NULL && args->head_dim > 0) {
        args->scale = 1 / sqrt((double)args->head_dim);
    }
    if (values[DROPOUT] != NULL &&
        mha_py_probability(values[DROPOUT], "dropout", &args->dropout) < 0) {
        return -1;
    }
    if (values[SEED] != NULL && mha_py_seed(values[SEED], &args->seed) < 0) {
        return -1;
    }
    if (values[EMPTY] != NULL && mha_py_empty_rows(values[EMPTY], &args->empty_rows) < 0) {
        return -1;
    }
    return 0;
}

int
mha_py_take_origin(PyObject *value, mha_attention_args *args)
{
    size_t *const places[4] = {&args->first_item, &args->first_head, &args->visible.first_query,
                               &args->visible.first_key};

    if (!given(value)) {
        return 0;
    }
    if (!PyTuple_Check(value) || PyTuple_Size(value) != 4) {
        return mha_py_type_error(value, "origin", "None or a tuple (item, head, query, key)");
    }
    if (args->visible.causal == MHA_CAUSAL_BOTTOM_RIGHT) {
        PyErr_SetString(PyExc_ValueError,
                        "causal='bottom_right' needs the sizes of the whole call: it takes no origin");
        return -1;
    }
    for (int i = 0; i < 4; i++) {
        int64_t place;

        if (mha_py_whole(PyTuple_GetItem(value, i), "origin", 0, &place) < 0) {
            return -1;
        }
        if (place >= (int64_t)1 << 32) {
            PyErr_Format(PyExc_ValueError, "origin must lie below 2**32, as dropout counts, got %.100R", value);
            return -1;
        }
        *places[i] = (size_t)place;
    }
    return 0;
}

static int
take_relative_bias(PyObject *module, PyObject *value, mha_py_attention *attention)
{
    mha_py_array *table = &attention->relative_bias;
    const Py_ssize_t heads = (Py_ssize_t)attention->args.heads;

    if (mha_py_take(table, value, "relative_bias", MHA_PY_DENSE, &attention->q) < 0 ||
        mha_py_need_rank(module, table, 2, "(H, 2R + 1)") < 0) {
        return -1;
    }
    if (table->shape[0] != heads || table->shape[1] % 2 == 0) {
        return mha_py_shape_error(module, "relative_bias must have shape (H, 2R + 1) with H = %zd, got (%zd, %zd)",
                                  heads, (Py_ssize_t)table->shape[0], (Py_ssize_t)table->shape[1]);
    }
    attention->args.relative_bias = table->data;
    attention->args.relative_reach = (size_t)table->shape[1] / 2;
    return 0;
}

static int
take_sinks(PyObject *module, PyObject *value, mha_py_attention *attention)
{
    const npy_intp heads = (npy_intp)attention->args.heads;

    if (mha_py_take(&attention->sinks, value, "sinks", MHA_PY_DENSE, &attention->q) < 0 ||
        mha_py_need_rank(module, &attention->sinks, 1, "(H,)") < 0 ||
        mha_py_need_shape(module, &attention->sinks, 1, &heads) < 0) {
        return -1;
    }
    attention->args.sinks = attention->sinks.data;
    return 0;
}

int
mha_py_take_score_terms(PyObject *module, PyObject *value, mha_py_attention *attention)
{
    double *softcap = &attention->args.softcap;

    if (!given(value)) {
        return 0;
    }
    if (!PyTuple_Check(value) || PyTuple_Size(value) != 3) {
        return mha_py_type_error(value, "score_terms", "None or a tuple (relative_bias, softcap, sinks)");
    }
    PyObject *const table = PyTuple_GetItem(value, 0), *const cap = PyTuple_GetItem(value, 1);
    PyObject *const sinks = PyTuple_GetItem(value, 2);
    if (given(cap) && mha_py_real(cap, "softcap", softcap) < 0) {
        return -1;
    }
    if (!(*softcap >= 0 && *softcap < HUGE_VAL)) {
        PyErr_Format(PyExc_ValueError, "softcap must be above 0 and finite, got %.100R", cap);
        return -1;
    }
    return (given(table) && take_relative_bias(module, table, attention) < 0) ||
                   (given(sinks) && take_sinks(module, sinks, attention) < 0)
               ? -1
               : 0;
}

/* --- The whole ----------------------------------------------------------------------------- */

int
mha_py_take_attention(PyObject *module, PyObject *const *values, mha_py_attention *attention)
{
    if (take_arrays(attention, values) < 0 || check_shapes(module, attention) < 0) {
        return -1;
    }
    note_sizes(attention);
    return take_visibility(module, attention, values) < 0 ? -1 : take_numbers(attention, values);
}

double
mha_py_attention_work(const mha_py_attention *attention)
{
    const mha_attention_args *args = &attention->args;

    return (double)args->batch * (double)args->heads * (double)args->queries * (double)args->keys *
           (double)(args->head_dim + args->value_dim + 8);
}
