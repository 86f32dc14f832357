/*
 * py_attention.c: attention_forward, attention on q, k and v as given, and attention_backward, its gradients;
 * attention_weights and copy_operands, masked_softmax and dropout_factors.
 *
 * The backward call takes what the forward call took and returned, and checks it all again.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h"

/* --- Forward --------------------------------------------------------------------------------- */

/* Where the heads of q, a tensor, are columns of its rows, so are those of the output: joining them copies nothing. */
static void
new_output(mha_py_call *call, const mha_py_attention *attention, mha_py_array *out)
{
    const mha_py_array *q = &attention->q;
    const npy_intp *dims = attention->out_shape;
    const size_t row = (size_t)dims[1] * (size_t)dims[3]; /* unsigned: may wrap, if the size is refused */
    const npy_intp heads_as_columns[] = {(npy_intp)(row * (size_t)dims[2]), dims[3], (npy_intp)row, 1};

    if (call->has_tensors && q->rank == 4 && q->stride[1] > 0 && q->stride[1] < q->stride[2]) {
        mha_py_new_strided(call, "the output", 4, dims, heads_as_columns, q->type, out);
    } else {
        mha_py_new_result(call, "the output", q->rank, dims, q->type, out);
    }
}

/* Each result as the caller gets it: (out, weights, lse[, (row_max, row_sum)]), None for what was not asked for. */
PyObject *
py_attention_forward(mha_py_call *call, PyObject *const *values)
{
    enum { WEIGHTS = MHA_PY_N_ATTENTION, LSE, STATS, ORIGIN, TERMS };
    enum { OF_OUT, OF_WEIGHTS, OF_LSE, OF_BOTH, OF_MAX, OF_SUM, N_RESULTS }; /* OF_BOTH: the statistics' tuple */
    mha_py_attention attention = {0};
    mha_attention_args *args = &attention.args;
    PyObject *answer, *statistics;
    const int weights = mha_py_flag(call, values[WEIGHTS]), lse = mha_py_flag(call, values[LSE]);
    const int stats = mha_py_flag(call, values[STATS]);

    mha_py_take_attention(call, values, values[ORIGIN], values[TERMS], &attention);
    const int rank = attention.q.rank, type = attention.q.type;
    const npy_intp *scores = attention.scores.shape;
    mha_py_array results[N_RESULTS] = {{0}};
    new_output(call, &attention, &results[OF_OUT]);
    if (weights) {
        mha_py_new_result(call, "weights", rank, scores, type, &results[OF_WEIGHTS]);
    }
    if (lse) {
        mha_py_new_result(call, "lse", rank - 1, scores, type, &results[OF_LSE]);
    }
    if (stats) {
        mha_py_new_result(call, "row_max", rank - 1, scores, type, &results[OF_MAX]);
        mha_py_new_result(call, "row_sum", rank - 1, scores, type, &results[OF_SUM]);
    }
    if (call->failed) {
        return NULL;
    }
    args->out = mha_py_result(&results[OF_OUT]);
    args->weights = mha_py_numbers(&results[OF_WEIGHTS]);
    args->lse = mha_py_numbers(&results[OF_LSE]);
    args->row_max = mha_py_numbers(&results[OF_MAX]);
    args->row_sum = mha_py_numbers(&results[OF_SUM]);
    if (args->heads > 0) { /* the core wants at least one head; without, there is nothing to fill in */
        mha_py_detach(call, attention.work);
        mha_py_attach(call, mha_attention_forward(args));
    }
    answer = mha_py_answers(call, results, stats ? OF_BOTH + 1 : OF_BOTH);
    statistics = stats && answer != NULL ? mha_py_answers(call, results + OF_MAX, 2) : NULL;
    if (stats && (statistics == NULL || PyTuple_SetItem(answer, OF_BOTH, statistics) < 0)) {
        Py_CLEAR(answer);
    }
    return answer;
}

/* --- Backward -------------------------------------------------------------------------------- */

enum { GRAD_OUT, OUT, ROW_STATS, FORWARD, BIAS_GRAD = FORWARD + MHA_PY_N_ATTENTION, ORIGIN, TERMS };
enum { GRAD_Q, GRAD_K, GRAD_V, GRAD_W_V, GRAD_BIAS, N_GRADS, GRAD_TABLE = N_GRADS, GRAD_SINKS, N_GRADS_WITH_TERMS };

static void
take_results(mha_py_call *call, PyObject *const *values, mha_py_attention *attention, mha_attention_grads *grads)
{
    const mha_py_array *q = &attention->q;
    PyObject *const stats = values[ROW_STATS];
    mha_py_array grad_out = {0}, out = {0};

    if (!call->failed && (!PyTuple_Check(stats) || PyTuple_Size(stats) != 2)) {
        mha_py_type_error(call, stats, "row_stats", "(row_max, row_sum)");
    }
    mha_py_take(call, values[GRAD_OUT], "grad_out", MHA_PY_ROWS, q, &grad_out);
    mha_py_take(call, values[OUT], "out", MHA_PY_ROWS, q, &out);
    mha_py_need_shape(call, &grad_out, q->rank, attention->out_shape);
    mha_py_need_shape(call, &out, q->rank, attention->out_shape);
    if (!call->failed) {
        grads->out = mha_py_operand(&out);
        grads->grad_out = mha_py_operand(&grad_out);
        mha_py_take_statistics(call, PyTuple_GetItem(stats, 0), PyTuple_GetItem(stats, 1), attention);
    }
}

/* A gradient of the operand's shape; nothing where there is no operand. */
static void
new_like(mha_py_call *call, const char *name, const mha_py_array *operand, mha_py_array *gradient)
{
    if (operand->array != NULL) {
        mha_py_new_result(call, name, operand->rank, operand->shape, operand->type, gradient);
    }
}

PyObject *
py_attention_backward(mha_py_call *call, PyObject *const *values)
{
    mha_py_attention attention = {0};
    mha_attention_grads grads = {0};
    const int with_bias = mha_py_flag(call, values[BIAS_GRAD]);

    mha_py_take_attention(call, values + FORWARD, values[ORIGIN], values[TERMS], &attention);
    take_results(call, values, &attention, &grads);
    mha_py_array results[N_GRADS_WITH_TERMS] = {{0}};
    new_like(call, "grad_q", &attention.q, &results[GRAD_Q]);
    new_like(call, "grad_k", &attention.k, &results[GRAD_K]);
    new_like(call, "grad_v", &attention.v, &results[GRAD_V]);
    new_like(call, "grad_w_v", &attention.w_v, &results[GRAD_W_V]);
    if (with_bias) {
        new_like(call, "grad_bias", &attention.scores.bias, &results[GRAD_BIAS]);
    }
    new_like(call, "grad_relative_bias", &attention.scores.relative_bias, &results[GRAD_TABLE]);
    new_like(call, "grad_sinks", &attention.scores.sinks, &results[GRAD_SINKS]);
    if (call->failed) {
        return NULL;
    }
    const int has_heads = attention.args.heads > 0;
    /* The core adds to those behind the first three; without heads it is not called, and writes none. */
    for (int i = has_heads ? GRAD_W_V : GRAD_Q; i < N_GRADS_WITH_TERMS; i++) {
        mha_py_clear(&results[i]);
    }
    grads.grad_q = mha_py_result(&results[GRAD_Q]);
    grads.grad_k = mha_py_result(&results[GRAD_K]);
    grads.grad_v = mha_py_result(&results[GRAD_V]);
    grads.grad_additive_weights = mha_py_numbers(&results[GRAD_W_V]);
    grads.grad_bias = mha_py_mask_gradient(call, &results[GRAD_BIAS], &attention.scores);
    grads.grad_relative_bias = mha_py_numbers(&results[GRAD_TABLE]);
    grads.grad_sinks = mha_py_numbers(&results[GRAD_SINKS]);
    if (has_heads) {
        mha_py_detach(call, 3 * attention.work);
        mha_py_attach(call, mha_attention_backward(&attention.args, &grads));
    }
    return mha_py_answers(call, results, mha_py_given(values[TERMS]) ? N_GRADS_WITH_TERMS : N_GRADS);
}

/* --- Weights of an earlier call ------------------------------------------------------------------- */

PyObject *
py_attention_weights(mha_py_call *call, PyObject *const *given)
{
    enum { Q, K, W_V, LENS, ROW_MAX, ROW_SUM, EMPTY, OPTIONS };
    const mha_py_score_values options = mha_py_layer_options(call, given[OPTIONS]).scores;
    PyObject *const values[MHA_PY_N_ATTENTION] = {given[Q],
                                                  given[K],
                                                  given[K],
                                                  given[W_V],
                                                  given[LENS],
                                                  options.keep_mask,
                                                  options.bias,
                                                  options.causal,
                                                  options.window_left,
                                                  options.window_right,
                                                  options.scale,
                                                  [MHA_PY_N_ATTENTION - 1] = given[EMPTY]};
    mha_py_attention attention = {0};
    mha_py_array weights = {0};

    mha_py_take_attention(call, values, NULL, options.terms, &attention);
    mha_py_take_statistics(call, given[ROW_MAX], given[ROW_SUM], &attention);
    mha_py_new_result(call, "attention_weights", attention.q.rank, attention.scores.shape, attention.q.type, &weights);
    if (call->failed) {
        return NULL;
    }
    attention.args.weights = mha_py_numbers(&weights);
    mha_py_detach(call, attention.work);
    return mha_py_finish(call, attention.args.heads == 0 ? MHA_OK : mha_attention_weights(&attention.args), &weights);
}

/* A dense copy of q, or k. */
static void
copy_operand(const mha_py_array *from, const mha_py_array *to)
{
    const npy_intp *shape = from->shape, itemsize = (npy_intp)mha_py_itemsize(from->type);
    char *copy = mha_py_numbers(to);

    for (npy_intp b = 0; b < shape[0] && mha_py_count(to) > 0; b++) {
        for (npy_intp h = 0; h < shape[1]; h++) {
            const char *rows = (const char *)from->data + (b * from->stride[0] + h * from->stride[1]) * itemsize;

            mha_py_copy_rows(copy, rows, shape[2], shape[3] * itemsize, from->stride[2] * itemsize);
            copy += shape[2] * shape[3] * itemsize;
        }
    }
}

PyObject *
py_copy_operands(mha_py_call *call, PyObject *const *values)
{
    enum { Q, K, N_COPIES };
    static const char *const names[N_COPIES] = {"q", "k"};
    mha_py_array given[N_COPIES] = {{0}}, copies[N_COPIES] = {{0}};
    double numbers = 0;

    for (int i = Q; i < N_COPIES; i++) {
        mha_py_take(call, values[i], names[i], MHA_PY_ROWS, i == Q ? NULL : &given[Q], &given[i]);
        mha_py_need_rank(call, &given[i], 4, "(B, H, rows, D)");
    }
    for (int i = Q; i < N_COPIES; i++) {
        mha_py_new_result(call, names[i], 4, given[i].shape, given[i].type, &copies[i]);
        numbers += call->failed ? 0 : mha_py_count(&copies[i]);
    }
    if (call->failed) {
        return NULL;
    }
    mha_py_detach(call, numbers);
    for (int i = Q; i < N_COPIES; i++) {
        copy_operand(&given[i], &copies[i]);
    }
    mha_py_attach(call, MHA_OK);
    return mha_py_answers(call, copies, N_COPIES);
}

/* --- The book's function, and dropout ------------------------------------------------------------ */

PyObject *
py_masked_softmax(mha_py_call *call, PyObject *const *values)
{
    mha_py_array x = {0};
    mha_py_lengths lengths = {0};
    mha_py_array out = {0};

    mha_py_take(call, values[0], "X", MHA_PY_DENSE, NULL, &x);
    mha_py_need_rank(call, &x, 3, "(B, Q, K)");
    mha_py_take_lengths(call, values[1], x.shape[0], x.shape[1], x.shape[2], &lengths);
    const mha_empty empty_rows = mha_py_empty_rows(call, values[2]);
    mha_py_new_result(call, "the output", 3, x.shape, x.type, &out);
    if (call->failed) {
        return NULL;
    }
    mha_masked_softmax_args args = {
        .dtype = mha_py_dtype(x.type),
        .batch = (size_t)x.shape[0],
        .queries = (size_t)x.shape[1],
        .keys = (size_t)x.shape[2],
        .scores = x.data,
        .empty_rows = empty_rows,
        .out = mha_py_numbers(&out),
    };
    mha_py_see_lengths(&lengths, &args.visible);
    mha_py_detach(call, 8 * mha_py_count(&out));
    return mha_py_finish(call, mha_masked_softmax(&args), &out);
}

PyObject *
py_dropout_factors(mha_py_call *call, PyObject *const *values)
{
    mha_py_array weights = {0};
    mha_py_array factors = {0};

    mha_py_take(call, values[0], "weights", MHA_PY_LOOSE, NULL, &weights);
    mha_py_need_rank(call, &weights, 4, "(B, H, Q, K)");
    const double dropout = mha_py_probability(call, values[1]);
    const uint64_t seed = mha_py_seed(call, values[2]);
    mha_py_new_result(call, "the factors", 4, weights.shape, weights.type, &factors);
    if (call->failed) {
        return NULL;
    }
    const mha_attention_args args = {
        .dtype = mha_py_dtype(weights.type),
        .batch = (size_t)weights.shape[0],
        .heads = (size_t)weights.shape[1],
        .queries = (size_t)weights.shape[2],
        .keys = (size_t)weights.shape[3],
        .dropout = dropout,
        .seed = seed,
        .weights = mha_py_numbers(&factors),
    };
    mha_py_detach(call, 8 * mha_py_count(&factors));
    return mha_py_finish(call, mha_dropout_factors(&args), &factors);
}
