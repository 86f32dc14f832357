/*
 * layer.c: a whole attention layer: project queries, keys and values, attend, project back.  A call of the
 * layer is one such job, or one for each slice of the batch (slices.c).
 *
 * Nothing is transposed: a projection writes (B, rows, H*D) and head h is its columns h*D .. (h+1)*D,
 * which attention reads and writes through strides.  Rows of keys and values that no query sees are
 * left out of the projections altogether: that is where padding saves time, and why what stands in
 * it has no influence.
 */
#include "layer.h"

#include "runtime/common.h"
#include "linear.h"
#include "runtime/threads.h"

#include <math.h>
#include <string.h>

/* Sizes of the three inputs, and who holds their projected rows; 0 if the sizes do not fit together. */
static int
describe_inputs(mha_layer_job *job)
{
    const mha_layer_args *a = job->args;
    const mha_linear *linear[MHA_N_INPUTS] = {&a->W_q, &a->W_k, &a->W_v};
    const mha_operand *rows[MHA_N_INPUTS] = {&a->query_rows, &a->key_rows, &a->value_rows};
    const size_t n_rows[MHA_N_INPUTS] = {a->queries, a->keys, a->keys};
    const size_t features[MHA_N_INPUTS] = {a->query_size, a->key_size, a->value_size};
    void *kept[MHA_N_INPUTS] = {a->q_projected, a->k_projected, a->v_projected};

    for (int i = 0; i < MHA_N_INPUTS; i++) {
        mha_layer_input *in = &job->inputs[i];
        in->linear = linear[i];
        in->input = rows[i];
        in->rows = n_rows[i];
        in->features = linear[i]->weight != NULL ? linear[i]->out_features : features[i];
        in->projected = kept[i];
        in->task_rows = mha_linear_task_rows(job->kernels, features[i], a->batch * in->rows);
        if (linear[i]->weight != NULL) {
            in->n_tasks = mha_ceil_div(a->batch * in->rows, in->task_rows);
        }
        if (linear[i]->weight != NULL && linear[i]->in_features != features[i]) {
            return 0;
        }
    }
    return job->inputs[MHA_QUERIES].features == job->inputs[MHA_KEYS].features &&
           (a->W_o.weight == NULL || a->W_o.in_features == job->inputs[MHA_VALUES].features);
}

/* The attention problem between the projections; addresses follow once there is memory.  0 as above. */
static int
describe_attention(mha_layer_job *job)
{
    const mha_layer_args *a = job->args;
    const size_t qk_features = job->inputs[MHA_QUERIES].features, v_features = job->inputs[MHA_VALUES].features;
    const size_t head_dim = qk_features / a->num_heads, value_dim = v_features / a->num_heads;

    job->attention = (mha_attention_args){
        .dtype = a->dtype,
        .batch = a->batch,
        .heads = a->num_heads,
        .kv_heads = a->num_heads,
        .queries = a->queries,
        .keys = a->keys,
        .head_dim = head_dim,
        .value_dim = value_dim,
        .additive_weights = a->additive_weights,
        .scale = a->additive_weights != NULL || head_dim == 0 ? 1.0 : 1.0 / sqrt((double)head_dim),
        .visible = a->visible,
        .empty_rows = a->empty_rows,
        .dropout = a->dropout,
        .seed = a->seed,
        .weights = a->weights,
        .row_max = a->row_max,
        .row_sum = a->row_sum,
    };
    return head_dim * a->num_heads == qk_features && value_dim * a->num_heads == v_features;
}

static void
plan_memory(mha_layer_job *job)
{
    const mha_layer_args *a = job->args;
    const size_t itemsize = job->kernels->itemsize;
    size_t widest = 0, most_rows = 0;

    for (int i = 0; i < MHA_N_INPUTS; i++) {
        mha_layer_input *in = &job->inputs[i];
        if (in->linear->weight == NULL) {
            continue;
        }
        if (in->projected == NULL) {
            in->at = mha_scratch_add(&job->scratch, a->batch * in->rows, in->features * itemsize);
        }
        widest = mha_max(widest, in->linear->in_features);
        /* Of any smaller call, too: a slice uses the memory of the largest one. */
        most_rows = mha_max(most_rows, mha_linear_block(job->kernels, in->linear->in_features));
        job->panel_bytes = mha_max(job->panel_bytes, mha_linear_panel_bytes(job->kernels, in->linear));
        job->work += mha_linear_work(in->linear, a->batch, in->rows);
        job->n_tasks += in->n_tasks;
    }
    job->panel_bytes = mha_max(job->panel_bytes, mha_linear_panel_bytes(job->kernels, &a->W_o));
    job->n_workers = job->pass == MHA_PASS_IN_TASK ? 1 : mha_threads_for(job->n_tasks, job->work);
    job->needed_at = mha_scratch_add(&job->scratch, a->batch, 2 * sizeof(mha_interval));
    if (a->W_o.weight != NULL && a->context == NULL) {
        const size_t row_bytes = job->inputs[MHA_VALUES].features * itemsize;
        job->context_at = mha_scratch_add(&job->scratch, a->batch * a->queries, row_bytes);
    }
    /* A row is copied in whole vectors. */
    job->gather_bytes = mha_round_up((most_rows * widest + job->kernels->lanes) * itemsize, MHA_ALIGN);
    job->pointers_bytes = mha_round_up(most_rows * sizeof(void *), MHA_ALIGN);
    job->gather_at = mha_scratch_add(&job->scratch, job->n_workers, job->gather_bytes);
    job->pointers_at = mha_scratch_add(&job->scratch, job->n_workers, job->pointers_bytes);
    job->panel_at = mha_scratch_add(&job->scratch, mha_max(job->n_workers, MHA_LINEAR_READS), job->panel_bytes);
}

mha_interval
mha_layer_needed(const mha_layer_job *job, int input, size_t item)
{
    const mha_layer_args *a = job->args;
    const mha_interval all = {0, job->inputs[input].rows};
    size_t n_empty;

    if (input == MHA_QUERIES || mha_sees_all_keys(&a->visible)) {
        return all;
    }
    const mha_interval seen = mha_visible_item(&a->visible, a->queries, a->keys, item, &n_empty);
    /* An empty row is the mean of all values. */
    return input == MHA_VALUES && n_empty > 0 && a->empty_rows == MHA_EMPTY_UNIFORM ? all : seen;
}

/* The projected rows of an input (or the input itself), with heads as column slices. */
static mha_operand
by_heads(const mha_layer_job *job, const mha_layer_input *in)
{
    const ptrdiff_t features = (ptrdiff_t)in->features;
    mha_operand x = *in->input;

    if (in->linear->weight != NULL) {
        x = (mha_operand){in->projected, (ptrdiff_t)in->rows * features, 0, features};
    }
    x.head_stride = features / (ptrdiff_t)job->args->num_heads;
    return x;
}

void
mha_layer_place_inputs(mha_layer_job *job, void *room)
{
    mha_interval *needed = room;

    for (int i = MHA_KEYS; i < MHA_N_INPUTS && !mha_sees_all_keys(&job->args->visible); i++) {
        job->inputs[i].needed = needed;
        for (size_t b = 0; b < job->args->batch; b++) {
            *needed++ = mha_layer_needed(job, i, b);
        }
    }
    job->attention.q = by_heads(job, &job->inputs[MHA_QUERIES]);
    job->attention.k = by_heads(job, &job->inputs[MHA_KEYS]);
    job->attention.v = by_heads(job, &job->inputs[MHA_VALUES]);
}

static void
place_memory(mha_layer_job *job)
{
    const mha_layer_args *a = job->args;
    mha_attention_args *attention = &job->attention;
    const ptrdiff_t features = (ptrdiff_t)job->inputs[MHA_VALUES].features;

    for (int i = 0; i < MHA_N_INPUTS; i++) {
        mha_layer_input *in = &job->inputs[i];
        if (in->linear->weight != NULL && in->projected == NULL) {
            in->projected = job->scratch.base + in->at;
        }
    }
    mha_layer_place_inputs(job, job->scratch.base + job->needed_at);
    attention->out = (mha_result){
        .data = a->W_o.weight == NULL ? a->out
                : a->context != NULL  ? a->context
                                      : (void *)(job->scratch.base + job->context_at),
        .batch_stride = (ptrdiff_t)a->queries * features,
        .head_stride = features / (ptrdiff_t)a->num_heads,
        .row_stride = features,
    };
    mha_attention_place(&job->attention_job, &job->scratch);
}

static void *
panel_of(const mha_layer_job *job, unsigned worker)
{
    return job->scratch.base + job->panel_at + worker * job->panel_bytes;
}

/* Rows first .. last-1 of all items' rows: the needed ones copied side by side, so that tiles are full. */
static void
project_gathered(const mha_layer_job *job, const mha_layer_input *in, size_t first, size_t last, unsigned worker)
{
    const size_t itemsize = job->kernels->itemsize, in_features = in->linear->in_features;
    char *x = job->scratch.base + job->gather_at + worker * job->gather_bytes;
    void **y = (void **)(void *)(job->scratch.base + job->pointers_at + worker * job->pointers_bytes);
    size_t n = 0;

    for (size_t r = first; r < last;) { /* item by item */
        const size_t item = r / in->rows, start = item * in->rows, end = mha_min(start + in->rows, last);
        const mha_interval all = {0, in->rows}, needed = in->needed != NULL ? in->needed[item] : all;
        const size_t from = mha_max(r, start + needed.first), to = mha_min(end, start + needed.last);
        if (from < to) {
            job->kernels->copy_rows(to - from, in_features,
                                    mha_operand_at(job->kernels, in->input, item, 0, from - start),
                                    in->input->row_stride, x + n * in_features * itemsize, (ptrdiff_t)in_features);
        }
        for (size_t row = from; row < to; row++) {
            y[n++] = in->projected + row * in->features * itemsize;
        }
        r = end;
    }
    const mha_linear_rows rows = {
        .rows = n,
        .x = x,
        .x_row_stride = (ptrdiff_t)in_features,
        .y_rows = y,
        .panel = panel_of(job, worker),
    };
    mha_linear_apply(job->kernels, in->linear, &rows);
}

/* 1 if all of the rows first .. last-1 are needed. */
static int
needs_all(const mha_layer_input *in, size_t first, size_t last)
{
    for (size_t r = first; in->needed != NULL && r < last;) { /* item by item */
        const size_t item = r / in->rows, start = item * in->rows, end = mha_min(start + in->rows, last);
        if (start + in->needed[item].first > r || start + in->needed[item].last < end) {
            return 0;
        }
        r = end;
    }
    return 1;
}

static void
project_rows(const mha_layer_job *job, const mha_layer_input *in, size_t task, unsigned worker)
{
    const size_t first = task * in->task_rows;
    const size_t last = mha_min(first + in->task_rows, job->args->batch * in->rows);

    if (!needs_all(in, first, last) ||
        !mha_layer_is_even(job, in, in->input->batch_stride, in->input->row_stride)) {
        project_gathered(job, in, first, last, worker);
        return;
    }
    const mha_linear_rows rows = {
        .rows = last - first,
        .x = mha_operand_at(job->kernels, in->input, 0, 0, first),
        .x_row_stride = in->input->row_stride,
        .y = in->projected + first * in->features * job->kernels->itemsize,
        .y_row_stride = (ptrdiff_t)in->features,
        .panel = panel_of(job, worker),
    };
    mha_linear_apply(job->kernels, in->linear, &rows);
}

/* Tasks go through the inputs side by side: where all three are one array, its rows are still in cache. */
static void
project_task(void *context, size_t task, unsigned worker)
{
    const mha_layer_job *job = context;
    const mha_layer_input *in = &job->inputs[task % MHA_N_INPUTS];

    if (task / MHA_N_INPUTS < in->n_tasks) {
        project_rows(job, in, task / MHA_N_INPUTS, worker);
    }
}

void
mha_layer_run(mha_layer_job *job)
{
    const mha_layer_args *a = job->args;
    size_t most_tasks = 0;

    place_memory(job);
    for (int i = 0; i < MHA_N_INPUTS; i++) {
        most_tasks = mha_max(most_tasks, job->inputs[i].n_tasks);
    }
    mha_parallel_for(most_tasks * MHA_N_INPUTS, job->n_workers, project_task, job);
    mha_attention_run(&job->attention_job);
    if (a->W_o.weight != NULL) {
        const mha_linear_rows rows = {
            .rows = a->batch * a->queries,
            .x = job->attention.out.data,
            .x_row_stride = (ptrdiff_t)job->inputs[MHA_VALUES].features,
            .y = a->out,
            .y_row_stride = (ptrdiff_t)a->W_o.out_features,
            .panel = panel_of(job, 0),
        };
        mha_linear_run(job->kernels, &a->W_o, &rows);
    }
}

double
mha_layer_work(const mha_layer_args *a)
{
    const size_t features = a->W_q.weight != NULL ? a->W_q.out_features : a->query_size;
    const size_t values = a->W_v.weight != NULL ? a->W_v.out_features : a->value_size;
    const size_t heads = mha_max(a->num_heads, 1); /* none is refused later */
    const mha_attention_args attention = {
        .batch = a->batch,
        .heads = heads,
        .queries = a->queries,
        .keys = a->keys,
        .head_dim = features / heads,
        .value_dim = values / heads,
        .additive_weights = a->additive_weights,
    };
    return mha_linear_work(&a->W_q, a->batch, a->queries) + mha_linear_work(&a->W_k, a->batch, a->keys) +
           mha_linear_work(&a->W_v, a->batch, a->keys) + mha_linear_work(&a->W_o, a->batch, a->queries) +
           mha_attention_work(&attention);
}

mha_status
mha_layer_describe(mha_layer_job *job, const mha_layer_args *args)
{
    size_t rows = args->keys;

    *job = (mha_layer_job){.args = args, .kernels = mha_kernels_for(args->dtype), .scratch = MHA_SCRATCH_EMPTY};
    if (job->kernels == NULL || args->num_heads == 0 || !describe_inputs(job) || !describe_attention(job)) {
        return MHA_ERR_ARG;
    }
    return mha_mul_size(&rows, args->batch) < 0 ? MHA_ERR_SIZE : MHA_OK;
}

mha_status
mha_layer_plan(mha_layer_job *job, const mha_layer_args *args, mha_pass pass)
{
    mha_status status = mha_layer_describe(job, args);

    job->pass = pass;
    if (status == MHA_OK) {
        status = mha_attention_init(&job->attention_job, &job->attention, pass, &job->scratch);
    }
    if (status == MHA_OK) {
        plan_memory(job);
    }
    return status;
}
