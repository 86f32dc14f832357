/*
 * args_attention.c: the arguments that attention_forward, attention_backward and explain_attention share: arrays,
 * shapes, masks, numbers.  q, k, v are (B, ., .) or (B, H, ., .): axes are counted from the end.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

enum { Q, K, V, W_V, LENS, KEEP, BIAS, CAUSAL, LEFT, RIGHT, SCALE, DROPOUT, SEED, EMPTY };

/* --- Options ------------------------------------------------------------------------------ */

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

static mha_py_score_values
score_values(PyObject *const *values, PyObject *terms)
{
    return (mha_py_score_values){.causal = values[CAUSAL],
                                 .keep_mask = values[KEEP],
                                 .bias = values[BIAS],
                                 .window_left = values[LEFT],
                                 .window_right = values[RIGHT],
                                 .scale = values[SCALE],
                                 .terms = terms};
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
    mha_py_take_mask(call, values[KEEP], "keep_mask", NULL, &attention->scores.keep_mask);
    mha_py_take_mask(call, values[BIAS], "bias", q, &attention->scores.bias);
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

    attention->scores.rank = rank;
    for (int i = 0; i < rank; i++) {
        attention->scores.shape[i] = i < rank - 1 ? attention->q.shape[i] : attention->k.shape[rank - 2];
        attention->out_shape[i] = i < rank - 1 ? attention->q.shape[i] : attention->v.shape[i];
    }
}

/* --- The whole ----------------------------------------------------------------------------- */

void
mha_py_take_attention(mha_py_call *call, PyObject *const *values, PyObject *origin, PyObject *terms,
                      mha_py_attention *attention)
{
    const mha_py_score_values of_scores = score_values(values, terms);
    mha_attention_args *args = &attention->args;
    mha_py_scores *scores = &attention->scores;

    mha_py_take_score_numbers(call, &of_scores, scores, args);
    args->dropout = values[DROPOUT] == NULL ? 0 : mha_py_probability(call, values[DROPOUT]);
    args->seed = values[SEED] == NULL ? 0 : mha_py_seed(call, values[SEED]);
    args->empty_rows = values[EMPTY] == NULL ? MHA_EMPTY_ZERO : mha_py_empty_rows(call, values[EMPTY]);
    take_origin(call, origin, args);
    take_arrays(call, values, attention);
    if (call->failed) {
        return; /* what follows reads their sizes */
    }
    note_sizes(attention);
    /* The lengths of a part were cut from a user's, so they are no mask by mistake. */
    mha_py_take_lengths(call, values[LENS], attention->q.shape[0], attention->q.shape[scores->rank - 2],
                        mha_py_given(origin) ? 0 : scores->shape[scores->rank - 1], &scores->lengths);
    mha_py_place_scores(call, &of_scores, &attention->q, scores, args);
    if (values[SEED] != NULL) {
        mha_py_draw_seed(call, values[SEED], &args->seed);
    }
}

void
mha_py_take_statistics(mha_py_call *call, PyObject *row_max, PyObject *row_sum, mha_py_attention *attention)
{
    const mha_py_array *q = &attention->q;
    const npy_intp *shape = attention->scores.shape;

    attention->args.row_max = mha_py_take_numbers(call, row_max, "row_max", q->rank - 1, shape, q);
    attention->args.row_sum = mha_py_take_numbers(call, row_sum, "row_sum", q->rank - 1, shape, q);
}
