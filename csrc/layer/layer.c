/*
 * layer.c: a whole attention layer: project queries, keys and values, attend, project back.  A call of the
 * layer is one such job, or one for each slice of the batch (slices.c).
 *
 * Nothing is transposed: a projection writes (B, rows, H*D) and head h is its columns h*D .. (h+1)*D,
 * which attention reads and writes through strides.  The projections leave out rows of keys and values
 * that no query sees.  That is how padding saves time, and why its contents have no influence.
 */
#include "layer.h"

#include "attention/attention.h"
#include "attention/operands.h"
#include "runtime/common.h"
#include "linear.h"
#include "runtime/threads.h"
#include "turn.h"

#include <string.h>

/* Fills in the three inputs' sizes, and where the caller keeps projected rows; 0 if the sizes do not fit together. */
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
        in->projected = in->kept = kept[i];
        if (linear[i]->weight != NULL && linear[i]->in_features != features[i]) {
            return 0;
        }
    }
    const size_t kv_heads = mha_layer_kv_heads(a), of_q = job->inputs[MHA_QUERIES].features;
    const size_t of_k = job->inputs[MHA_KEYS].features, of_v = job->inputs[MHA_VALUES].features;

    return a->num_heads % kv_heads == 0 && of_q % a->num_heads == 0 && of_k % kv_heads == 0 && of_v % kv_heads == 0 &&
           of_q / a->num_heads == of_k / kv_heads && (a->query_turn.cos == NULL || a->W_q.weight != NULL) &&
           mha_turn_is_sane(&a->query_turn, of_q) &&
           (a->W_o.weight == NULL || a->W_o.in_features == mha_layer_context_features(a, of_v));
}

/* Describes attention between the projections; its addresses follow once there is memory. */
static void
describe_attention(mha_layer_job *job)
{
    const mha_layer_args *a = job->args;
    const size_t kv_heads = mha_layer_kv_heads(a);

    job->attention = (mha_attention_args){
        .dtype = a->dtype,
        .batch = a->batch,
        .heads = a->num_heads,
        .kv_heads = kv_heads,
        .queries = a->queries,
        .keys = a->keys,
        .head_dim = job->inputs[MHA_QUERIES].features / a->num_heads,
        .value_dim = job->inputs[MHA_VALUES].features / kv_heads,
        .additive_weights = a->additive_weights,
        .visible = a->visible,
        .empty_rows = a->empty_rows,
        .dropout = a->dropout,
        .seed = a->seed,
        .weights = a->weights,
        .row_max = a->row_max,
        .row_sum = a->row_sum,
    };
}

/* The projections' tasks, and what workers need for them. */
static void
plan_projections(mha_layer_job *job, mha_pass pass)
{
    const mha_layer_args *a = job->args;
    size_t widest = 0, most_rows = 0;

    job->output = mha_linear_plan_for(job->kernels, &a->W_o, a->batch * a->queries);
    job->panel_bytes = mha_linear_panel_bytes(job->kernels, &a->W_o);
    for (int i = 0; i < MHA_N_INPUTS; i++) {
        mha_layer_input *in = &job->inputs[i];
        in->plan = mha_linear_plan_for(job->kernels, in->linear, a->batch * in->rows);
        job->n_tasks += in->plan.n_tasks;
        job->work += in->plan.work;
        if (in->linear->weight != NULL) {
            widest = mha_max(widest, in->linear->in_features);
            /* Enough for any smaller call, too: a slice uses memory that was measured for the largest slice. */
            most_rows = mha_max(most_rows, mha_linear_most_rows(job->kernels, in->linear->in_features));
            job->panel_bytes = mha_max(job->panel_bytes, mha_linear_panel_bytes(job->kernels, in->linear));
        }
    }
    job->n_workers = mha_threads_for(job->n_tasks, job->work);
    if (pass == MHA_PASS_IN_TASK) {
        job->n_workers = job->output.n_workers = 1;
    }
    /* A row is copied in whole vectors. */
    job->gathered_bytes = mha_round_up((most_rows * widest + job->kernels->lanes) * job->kernels->itemsize, MHA_ALIGN);
}

/* Lays out scratch memory: called once to measure it, and once more when it has an address. */
static void
lay_out(mha_layer_job *job, mha_scratch *scratch)
{
    const mha_layer_args *a = job->args;
    const size_t itemsize = job->kernels->itemsize;
    const size_t context_bytes = mha_layer_context_features(a, job->inputs[MHA_VALUES].features) * itemsize;

    for (int i = 0; i < MHA_N_INPUTS; i++) {
        mha_layer_input *in = &job->inputs[i];
        in->projected = in->kept;
        if (in->linear->weight != NULL && in->kept == NULL) {
            in->projected = mha_scratch_take(scratch, a->batch * in->rows, in->features * itemsize);
        }
    }
    job->context = a->W_o.weight == NULL ? a->out : a->context;
    if (job->context == NULL) {
        job->context = mha_scratch_take(scratch, a->batch * a->queries, context_bytes);
    }
    job->needed = mha_scratch_take(scratch, a->batch, 2 * sizeof(mha_interval));
    job->gathered = mha_scratch_take(scratch, job->n_workers, job->gathered_bytes);
    job->panels = mha_scratch_take(scratch, mha_max(job->n_workers, job->output.n_workers), job->panel_bytes);
}

void
mha_layer_needed(const mha_layer_job *job, size_t item, mha_interval needed[MHA_N_INPUTS])
{
    const mha_layer_args *a = job->args;
    size_t n_empty;

    needed[MHA_QUERIES] = (mha_interval){0, a->queries};
    needed[MHA_KEYS] = needed[MHA_VALUES] = (mha_interval){0, a->keys};
    if (!mha_sees_all_keys(&a->visible)) {
        needed[MHA_KEYS] = mha_visible_item(&a->visible, a->queries, a->keys, item, &n_empty);
        if (n_empty == 0 || a->empty_rows != MHA_EMPTY_UNIFORM) { /* an empty row is the mean of all values */
            needed[MHA_VALUES] = needed[MHA_KEYS];
        }
    }
}

/* The projected rows of an input (or the input itself), with heads as column slices. */
static mha_operand
by_heads(const mha_layer_input *in, size_t heads)
{
    const ptrdiff_t features = (ptrdiff_t)in->features;
    mha_operand x = *in->input;

    if (in->linear->weight != NULL) {
        x = (mha_operand){in->projected, (ptrdiff_t)in->rows * features, 0, features};
    }
    x.head_stride = features / (ptrdiff_t)heads;
    return x;
}

void
mha_layer_place_inputs(mha_layer_job *job)
{
    const size_t batch = job->args->batch, kv_heads = mha_layer_kv_heads(job->args);

    if (!mha_sees_all_keys(&job->args->visible)) {
        job->inputs[MHA_KEYS].needed = job->needed;
        job->inputs[MHA_VALUES].needed = job->needed + batch;
        for (size_t b = 0; b < batch; b++) {
            mha_interval needed[MHA_N_INPUTS];

            mha_layer_needed(job, b, needed);
            job->needed[b] = needed[MHA_KEYS];
            job->needed[batch + b] = needed[MHA_VALUES];
        }
    }
    job->attention.q = by_heads(&job->inputs[MHA_QUERIES], job->args->num_heads);
    job->attention.k = by_heads(&job->inputs[MHA_KEYS], kv_heads);
    job->attention.v = by_heads(&job->inputs[MHA_VALUES], kv_heads);
}

/* The attention that is computed; its addresses are those that there are so far. */
static const mha_attention_args *
computed(mha_layer_job *job)
{
    if (job->attention.kv_heads == job->attention.heads) {
        return &job->attention;
    }
    mha_fold_heads(&job->attention, &job->folded);
    return &job->folded;
}

static void
place_memory(mha_layer_job *job)
{
    const ptrdiff_t features = (ptrdiff_t)mha_layer_context_features(job->args, job->inputs[MHA_VALUES].features);
    mha_scratch own = {.total_bytes = job->own_at, .base = job->scratch.base};

    lay_out(job, &own);
    mha_layer_place_inputs(job);
    job->attention.out = (mha_result){
        .data = job->context,
        .batch_stride = (ptrdiff_t)job->args->queries * features,
        .head_stride = features / (ptrdiff_t)job->args->num_heads,
        .row_stride = features,
    };
    (void)computed(job);
    mha_attention_place(&job->attention_job, &job->scratch);
}

/* The needed rows from *row to the end of its item, or to `last`; *row moves there.  Rows count through all items. */
static mha_interval
next_needed(const mha_layer_input *in, size_t *row, size_t last)
{
    const size_t start = *row / in->rows * in->rows, end = mha_min(start + in->rows, last);
    const mha_interval all = {0, in->rows}, needed = in->needed != NULL ? in->needed[start / in->rows] : all;
    const size_t from = mha_min(mha_max(*row, start + needed.first), end), to = mha_min(end, start + needed.last);

    *row = end;
    return (mha_interval){from, mha_max(from, to)};
}

/* Copies the needed ones of rows first .. last-1 side by side to `x`, so that tiles are full; how many. */
static size_t
gather(const mha_layer_job *job, const mha_layer_input *in, size_t first, size_t last, char *x)
{
    const size_t itemsize = job->kernels->itemsize, in_features = in->linear->in_features;
    size_t n = 0;

    while (first < last) {
        const mha_interval needed = next_needed(in, &first, last);
        if (needed.first < needed.last) {
            const size_t item = needed.first / in->rows;
            const char *from = mha_operand_at(job->kernels, in->input, item, 0, needed.first - item * in->rows);
            job->kernels->copy_rows(needed.last - needed.first, in_features, from, in->input->row_stride,
                                    x + n * in_features * itemsize, (ptrdiff_t)in_features);
            n += needed.last - needed.first;
        }
    }
    return n;
}

/* Moves the projections of those rows, which stand at `from` side by side, to the rows' places; the others become 0. */
static void
spread(const mha_layer_job *job, const mha_layer_input *in, size_t first, size_t last, const char *from)
{
    const size_t row_bytes = in->features * job->kernels->itemsize;

    while (first < last) { /* nothing is written before it is read: a row has no more places behind it than rows */
        const size_t start = first;
        const mha_interval needed = next_needed(in, &first, last);
        const size_t n_bytes = (needed.last - needed.first) * row_bytes;

        memset(in->projected + start * row_bytes, 0, (needed.first - start) * row_bytes);
        memmove(in->projected + needed.first * row_bytes, from, n_bytes);
        from += n_bytes;
        memset(in->projected + needed.last * row_bytes, 0, (first - needed.last) * row_bytes);
    }
}

/* Whether the needed ones of rows first .. last-1 are one run, *run, and lie at one constant distance. */
static int
are_one_run(const mha_layer_job *job, const mha_layer_input *in, size_t first, size_t last, mha_interval *run)
{
    const int of_one_item = first / in->rows == (last - 1) / in->rows;
    size_t row = first;

    *run = in->needed != NULL ? next_needed(in, &row, last) : (mha_interval){first, last};
    while (in->needed != NULL && row < last) {
        const mha_interval more = next_needed(in, &row, last);
        if (more.first != run->last) {
            return 0;
        }
        run->last = more.last;
    }
    return of_one_item || mha_layer_is_even(job, in, in->input->batch_stride, in->input->row_stride);
}

/* Turns rows first .. last-1 of the projected queries, counted through all items. */
static void
turn_queries(const mha_layer_job *job, const mha_layer_input *in, size_t first, size_t last)
{
    const mha_layer_args *a = job->args;
    const size_t row_bytes = in->features * job->kernels->itemsize;

    for (size_t row = first; row < last && a->query_turn.cos != NULL; row++) {
        mha_turn_row(a->dtype, &a->query_turn, row / in->rows, row % in->rows, in->features,
                     in->projected + row * row_bytes);
    }
}

static void
project_rows(const mha_layer_job *job, const mha_layer_input *in, size_t task, unsigned worker)
{
    const size_t first = task * in->plan.task_rows;
    const size_t last = mha_min(first + in->plan.task_rows, job->args->batch * in->rows);
    char *gathered = job->gathered + worker * job->gathered_bytes;
    mha_interval run;
    const int in_place = are_one_run(job, in, first, last, &run);
    const size_t n = in_place ? run.last - run.first : gather(job, in, first, last, gathered);
    const size_t item = run.first / in->rows, to = in_place ? run.first : last - n;
    const mha_linear_rows rows = {
        .rows = n,
        .x = in_place ? mha_operand_at(job->kernels, in->input, item, 0, run.first - item * in->rows) : gathered,
        .x_row_stride = in_place ? in->input->row_stride : (ptrdiff_t)in->linear->in_features,
        .y = in->projected + to * in->features * job->kernels->itemsize,
        .y_row_stride = (ptrdiff_t)in->features,
        .panel = job->panels + worker * job->panel_bytes,
    };

    mha_linear_apply(job->kernels, in->linear, &rows);
    if (n < last - first) {
        spread(job, in, first, last, rows.y);
    }
    if (in == &job->inputs[MHA_QUERIES]) {
        turn_queries(job, in, first, last);
    }
}

/* Tasks take the three inputs in turn: if all are one array, its rows are still in the cache for the next input. */
static void
project_task(void *context, size_t task, unsigned worker)
{
    const mha_layer_job *job = context;
    const mha_layer_input *in = &job->inputs[task % MHA_N_INPUTS];

    if (task / MHA_N_INPUTS < in->plan.n_tasks) {
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
        most_tasks = mha_max(most_tasks, job->inputs[i].plan.n_tasks);
    }
    mha_parallel_for(most_tasks * MHA_N_INPUTS, job->n_workers, project_task, job);
    mha_attention_run(&job->attention_job);
    if (a->W_o.weight != NULL) {
        const mha_linear_rows rows = {
            .rows = a->batch * a->queries,
            .x = job->context,
            .x_row_stride = (ptrdiff_t)a->W_o.in_features,
            .y = a->out,
            .y_row_stride = (ptrdiff_t)a->W_o.out_features,
            .panel = job->panels,
        };
        mha_linear_run(job->kernels, &a->W_o, &rows, &job->output);
    }
}

double
mha_layer_work(const mha_layer_args *a)
{
    const size_t features = a->W_q.weight != NULL ? a->W_q.out_features : a->query_size;
    const size_t values = a->W_v.weight != NULL ? a->W_v.out_features : a->value_size;
    const size_t heads = mha_max(a->num_heads, 1); /* 0 heads are refused later */
    const size_t kv_heads = a->kv_heads != 0 ? a->kv_heads : heads;
    const mha_attention_args attention = {
        .batch = a->batch,
        .heads = heads,
        .queries = a->queries,
        .keys = a->keys,
        .head_dim = features / heads,
        .value_dim = values / kv_heads,
        .additive_weights = a->additive_weights,
    };
    return mha_linear_work(&a->W_q, a->batch, a->queries) + mha_linear_work(&a->W_k, a->batch, a->keys) +
           mha_linear_work(&a->W_v, a->batch, a->keys) + mha_linear_work(&a->W_o, a->batch, a->queries) +
           mha_attention_work(&attention);
}

int
mha_layer_has_inputs(const mha_layer_args *a)
{
    const int has_queries = a->batch > 0 && a->queries > 0, has_keys = a->batch > 0 && a->keys > 0;

    return (a->query_rows.data != NULL || !has_queries || a->query_size == 0) &&
           (a->key_rows.data != NULL || !has_keys || a->key_size == 0) &&
           (a->value_rows.data != NULL || !has_keys || a->value_size == 0);
}

mha_status
mha_layer_describe(mha_layer_job *job, const mha_kernels *kernels, const mha_layer_args *args)
{
    size_t rows = args->keys;

    *job = (mha_layer_job){.args = args, .kernels = kernels, .scratch = MHA_SCRATCH_EMPTY};
    if (kernels == NULL || args->num_heads == 0 || !describe_inputs(job)) {
        return MHA_ERR_ARG;
    }
    describe_attention(job);
    return mha_mul_size(&rows, args->batch) < 0 ? MHA_ERR_SIZE : MHA_OK;
}

mha_status
mha_layer_plan(mha_layer_job *job, const mha_kernels *kernels, const mha_layer_args *args, mha_pass pass)
{
    mha_status status = mha_layer_describe(job, kernels, args);

    if (status == MHA_OK) {
        status = mha_attention_init(&job->attention_job, kernels, computed(job), pass, &job->scratch);
    }
    if (status == MHA_OK) {
        plan_projections(job, pass);
        job->own_at = job->scratch.total_bytes;
        lay_out(job, &job->scratch);
    }
    return status;
}
