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

/* 1 if rows of keys or values may stand between others and not be read: attention would read them with their block. */
static int
hides_rows(const mha_layer_args *a, const mha_layer_input *given)
{
    return a->attention.keep_mask.data != NULL && !given->reads_hidden;
}

/* Fills in the three inputs' sizes; 0 if they do not fit together. */
static int
describe_inputs(mha_layer_job *job)
{
    const mha_layer_args *a = job->args;
    const mha_attention_args *attention = &a->attention;
    size_t head_dim[MHA_N_INPUTS];

    for (int i = 0; i < MHA_N_INPUTS; i++) {
        const mha_layer_input *given = &a->inputs[i];
        const int projects = given->W.weight != NULL;
        const size_t heads = mha_layer_heads(a, i), features = projects ? given->W.out_features : given->size;

        job->inputs[i] = (mha_layer_path){
            .given = given,
            .rows = i == MHA_QUERIES ? attention->queries : attention->keys,
            .features = features,
            .moves = projects || given->projected != NULL || (i != MHA_QUERIES && hides_rows(a, given)),
            .projected = given->projected,
        };
        head_dim[i] = features / heads;
        if ((projects && given->W.in_features != given->size) || features % heads != 0 ||
            (given->turn.cos != NULL && !projects) || !mha_turn_is_sane(&given->turn, features)) {
            return 0;
        }
    }
    job->attention = *attention;
    job->attention.head_dim = head_dim[MHA_QUERIES];
    job->attention.value_dim = head_dim[MHA_VALUES];
    return attention->heads % attention->kv_heads == 0 && head_dim[MHA_QUERIES] == head_dim[MHA_KEYS] &&
           (a->W_o.weight == NULL || a->W_o.in_features == head_dim[MHA_VALUES] * attention->heads);
}

/* How an input's rows are moved: by its projection, or copied. */
static mha_linear_plan
plan_of_path(const mha_layer_job *job, const mha_layer_path *in)
{
    const size_t rows = job->args->attention.batch * in->rows;
    mha_linear_plan plan = mha_linear_plan_for(job->kernels, &in->given->W, rows);

    if (in->given->W.weight == NULL && in->moves && in->features > 0) {
        plan.task_rows = mha_linear_most_rows(job->kernels, in->features);
        plan.n_tasks = mha_ceil_div(rows, plan.task_rows);
        plan.work = (double)rows * (double)in->features;
    }
    return plan;
}

/* The projections' tasks, and what workers need for them. */
static void
plan_projections(mha_layer_job *job, mha_pass pass)
{
    const mha_layer_args *a = job->args;
    size_t widest = 0, most_rows = 0;

    job->output = mha_linear_plan_for(job->kernels, &a->W_o, a->attention.batch * a->attention.queries);
    job->panel_bytes = mha_linear_panel_bytes(job->kernels, &a->W_o);
    for (int i = 0; i < MHA_N_INPUTS; i++) {
        mha_layer_path *in = &job->inputs[i];
        in->plan = plan_of_path(job, in);
        job->n_tasks += in->plan.n_tasks;
        job->work += in->plan.work;
        if (in->given->W.weight != NULL) {
            widest = mha_max(widest, in->given->size);
            /* Enough for any smaller call, too: a slice uses memory that was measured for the largest slice. */
            most_rows = mha_max(most_rows, mha_linear_most_rows(job->kernels, in->given->size));
            job->panel_bytes = mha_max(job->panel_bytes, mha_linear_panel_bytes(job->kernels, &in->given->W));
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
    const size_t itemsize = job->kernels->itemsize, batch = a->attention.batch;
    const size_t context_bytes = mha_layer_context_features(a, job->inputs[MHA_VALUES].features) * itemsize;

    for (int i = 0; i < MHA_N_INPUTS; i++) {
        mha_layer_path *in = &job->inputs[i];
        in->projected = in->given->projected;
        if (in->moves && in->projected == NULL) {
            in->projected = mha_scratch_take(scratch, batch * in->rows, in->features * itemsize);
        }
    }
    job->context = a->W_o.weight == NULL ? a->out : a->context;
    if (job->context == NULL) {
        job->context = mha_scratch_take(scratch, batch * a->attention.queries, context_bytes);
    }
    mha_layer_take_needed(job, scratch);
    job->gathered = mha_scratch_take(scratch, job->n_workers, job->gathered_bytes);
    job->panels = mha_scratch_take(scratch, mha_max(job->n_workers, job->output.n_workers), job->panel_bytes);
}

/* What attention reads of an input, with heads as column slices. */
static mha_operand
by_heads(const mha_layer_job *job, int i)
{
    const mha_layer_path *in = &job->inputs[i];
    const ptrdiff_t features = (ptrdiff_t)in->features;
    mha_operand x = in->given->rows;

    if (in->moves) {
        x = (mha_operand){in->projected, (ptrdiff_t)in->rows * features, 0, features};
    }
    x.head_stride = features / (ptrdiff_t)mha_layer_heads(job->args, i);
    return x;
}

void
mha_layer_place_inputs(mha_layer_job *job)
{
    mha_layer_find_needed(job);
    job->attention.q = by_heads(job, MHA_QUERIES);
    job->attention.k = by_heads(job, MHA_KEYS);
    job->attention.v = by_heads(job, MHA_VALUES);
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
        .batch_stride = (ptrdiff_t)job->args->attention.queries * features,
        .head_stride = features / (ptrdiff_t)job->args->attention.heads,
        .row_stride = features,
    };
    (void)computed(job);
    mha_attention_place(&job->attention_job, &job->scratch);
}

/*
 * The next run of needed rows from *row on, before `last` and in one item; *row moves behind it, or, if there is none,
 * to the end of the item.  Rows count through all items.
 */
static mha_interval
next_needed(const mha_layer_path *in, size_t *row, size_t last)
{
    const size_t start = *row / in->rows * in->rows, end = mha_min(start + in->rows, last);
    const mha_needed all = {{0, in->rows}, NULL}, needed = in->needed != NULL ? in->needed[start / in->rows] : all;
    const size_t stop = mha_min(end, start + needed.rows.last);
    size_t from = mha_min(mha_max(*row, start + needed.rows.first), end), to = mha_max(from, stop);

    if (needed.seen != NULL) {
        while (from < stop && !needed.seen[from - start]) {
            from++;
        }
        for (to = from; to < stop && needed.seen[to - start];) {
            to++;
        }
    }
    *row = to < stop ? to : end;
    return (mha_interval){from, to};
}

/* Copies the needed ones of rows first .. last-1 side by side to `x`, so that tiles are full; how many. */
static size_t
gather(const mha_layer_job *job, const mha_layer_path *in, size_t first, size_t last, char *x)
{
    const size_t itemsize = job->kernels->itemsize, size = in->given->size;
    size_t n = 0;

    while (first < last) {
        const mha_interval needed = next_needed(in, &first, last);
        if (needed.first < needed.last) {
            const size_t item = needed.first / in->rows;
            const char *from = mha_operand_at(job->kernels, &in->given->rows, item, 0, needed.first - item * in->rows);
            job->kernels->copy_rows(needed.last - needed.first, size, from, in->given->rows.row_stride,
                                    x + n * size * itemsize, (ptrdiff_t)size);
            n += needed.last - needed.first;
        }
    }
    return n;
}

/* Moves the projections of those rows, which stand at `from` side by side, to the rows' places; the others become 0. */
static void
spread(const mha_layer_job *job, const mha_layer_path *in, size_t first, size_t last, const char *from)
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
are_one_run(const mha_layer_job *job, const mha_layer_path *in, size_t first, size_t last, mha_interval *run)
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
    return of_one_item || mha_layer_is_even(job, in, in->given->rows.batch_stride, in->given->rows.row_stride);
}

void
mha_layer_copy_rows(const mha_layer_job *job, const mha_layer_path *in, size_t first, size_t last)
{
    const size_t row_bytes = in->features * job->kernels->itemsize;

    while (first < last) {
        const size_t start = first;
        const mha_interval needed = next_needed(in, &first, last);

        memset(in->projected + start * row_bytes, 0, (needed.first - start) * row_bytes);
        for (size_t row = needed.first; row < needed.last; row++) {
            memcpy(in->projected + row * row_bytes,
                   mha_operand_at(job->kernels, &in->given->rows, row / in->rows, 0, row % in->rows), row_bytes);
        }
        memset(in->projected + needed.last * row_bytes, 0, (first - needed.last) * row_bytes);
    }
}

static void
project_rows(const mha_layer_job *job, const mha_layer_path *in, size_t first, size_t last, unsigned worker)
{
    char *gathered = job->gathered + worker * job->gathered_bytes;
    mha_interval run;
    const int in_place = are_one_run(job, in, first, last, &run);
    const size_t n = in_place ? run.last - run.first : gather(job, in, first, last, gathered);
    const size_t item = run.first / in->rows, to = in_place ? run.first : last - n;
    const mha_operand *x = &in->given->rows;
    const mha_linear_rows rows = {
        .rows = n,
        .x = in_place ? mha_operand_at(job->kernels, x, item, 0, run.first - item * in->rows) : gathered,
        .x_row_stride = in_place ? x->row_stride : (ptrdiff_t)in->given->size,
        .y = in->projected + to * in->features * job->kernels->itemsize,
        .y_row_stride = (ptrdiff_t)in->features,
        .panel = job->panels + worker * job->panel_bytes,
    };

    mha_linear_apply(job->kernels, &in->given->W, &rows);
    if (n < last - first) {
        spread(job, in, first, last, rows.y);
    }
    mha_turn_rows(&in->given->turn, job->args->attention.dtype, in->rows, (mha_interval){first, last}, in->features,
                  in->projected);
}

/* Tasks take the three inputs in turn: if all are one array, its rows are still in the cache for the next input. */
static void
move_task(void *context, size_t task, unsigned worker)
{
    const mha_layer_job *job = context;
    const mha_layer_path *in = &job->inputs[task % MHA_N_INPUTS];
    const size_t first = task / MHA_N_INPUTS * in->plan.task_rows;
    const size_t last = mha_min(first + in->plan.task_rows, job->args->attention.batch * in->rows);

    if (task / MHA_N_INPUTS < in->plan.n_tasks) {
        if (in->given->W.weight != NULL) {
            project_rows(job, in, first, last, worker);
        } else {
            mha_layer_copy_rows(job, in, first, last);
        }
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
    mha_parallel_for(most_tasks * MHA_N_INPUTS, job->n_workers, move_task, job);
    mha_attention_run(&job->attention_job);
    if (a->W_o.weight != NULL) {
        const mha_linear_rows rows = {
            .rows = a->attention.batch * a->attention.queries,
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
    mha_attention_args attention = a->attention;
    size_t features[MHA_N_INPUTS];
    double work = mha_linear_work(&a->W_o, attention.batch, attention.queries);

    for (int i = 0; i < MHA_N_INPUTS; i++) {
        const mha_layer_input *in = &a->inputs[i];

        features[i] = (in->W.weight != NULL ? in->W.out_features : in->size) / mha_max(mha_layer_heads(a, i), 1);
        work += mha_linear_work(&in->W, attention.batch, i == MHA_QUERIES ? attention.queries : attention.keys);
    }
    attention.head_dim = features[MHA_QUERIES]; /* without heads a call is refused, but later */
    attention.value_dim = features[MHA_VALUES];
    return work + mha_attention_work(&attention);
}

int
mha_layer_has_inputs(const mha_layer_args *a)
{
    int has_all = 1;

    for (int i = 0; i < MHA_N_INPUTS; i++) {
        const size_t rows = i == MHA_QUERIES ? a->attention.queries : a->attention.keys;

        has_all = has_all &&
                  (a->inputs[i].rows.data != NULL || a->attention.batch == 0 || rows == 0 || a->inputs[i].size == 0);
    }
    return has_all;
}

mha_status
mha_layer_describe(mha_layer_job *job, const mha_kernels *kernels, const mha_layer_args *args)
{
    const mha_attention_args *attention = &args->attention;
    size_t rows = attention->keys;

    *job = (mha_layer_job){.args = args, .kernels = kernels, .scratch = MHA_SCRATCH_EMPTY};
    if (kernels == NULL || attention->heads == 0 || attention->kv_heads == 0 || !describe_inputs(job)) {
        return MHA_ERR_ARG;
    }
    return mha_mul_size(&rows, attention->batch) < 0 ? MHA_ERR_SIZE : MHA_OK;
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
