/*
 * explain.c: what a call will do, and why, without doing it: read off the plan that the call itself follows.
 *
 * Nothing is decided here.  What a plan does not contain, such as how many tiles its tasks meet, is
 * counted by walking over the tasks as the drivers do.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "mha_explain.h"

#include "attention/walk.h"
#include "runtime/common.h"
#include "layer.h"
#include "linear.h"
#include "runtime/threads.h"

#define COUNT(n) ((mha_fact){.kind = MHA_FACT_COUNT, .count = (n)})
#define FLAG(is_set) ((mha_fact){.kind = MHA_FACT_FLAG, .count = (is_set) != 0})
#define TIME_OF(work) ((mha_fact){.kind = MHA_FACT_SECONDS, .seconds = (work) / MHA_WORK_PER_SECOND})
#define WORD(text) ((mha_fact){.kind = MHA_FACT_WORD, .word = (text)})
#define GROUP ((mha_fact){.kind = MHA_FACT_GROUP})

/* What threads share: n_tasks tasks of `work` multiply-adds in all. */
typedef struct {
    size_t n_tasks;
    double work;
} sharing;

/* Times are those of one thread, by the rule that decides how many share the work. */
static void
explain_share(sharing shared, mha_emit_fn *emit, void *to)
{
    void *share = emit(to, "share", GROUP);
    const char *reason;
    const unsigned n_threads = mha_threads_decide(shared.n_tasks, shared.work, &reason);

    emit(share, "n_tasks", COUNT(shared.n_tasks));
    emit(share, "n_threads", COUNT(n_threads));
    emit(share, "most_threads", COUNT(mha_threads_get()));
    emit(share, "reason", WORD(reason)); /* see mha_threads_decide */
    emit(share, "seconds", TIME_OF(shared.work));
    emit(share, "least_seconds", TIME_OF(MHA_WORTH_SHARING)); /* work is shared from this much on */
    emit(share, "least_each", TIME_OF(MHA_WORK_PER_THREAD));  /* every thread gets at least this much */
}

/* Vectors of `lanes` numbers; products in register tiles of rows x columns. */
static void
explain_kernels(const mha_kernels *k, const char *name, mha_emit_fn *emit, void *to)
{
    void *kernels = emit(to, name, GROUP);

    emit(kernels, "isa", WORD(k->isa));
    emit(kernels, "itemsize", COUNT(k->itemsize));
    emit(kernels, "lanes", COUNT(k->lanes));
    emit(kernels, "tile_rows", COUNT(k->tile_sums / (k->panel_width / k->lanes)));
    emit(kernels, "tile_columns", COUNT(k->panel_width));
}

void
mha_kernels_explain(mha_emit_fn *emit, void *to)
{
    explain_kernels(mha_kernels_for(MHA_F32), "float32", emit, to);
    explain_kernels(mha_kernels_for(MHA_F64), "float64", emit, to);
    explain_share((sharing){0, 0}, emit, to);
}

/* --- Attention ------------------------------------------------------------------------------- */

/*
 * Counts tiles that meet a key block.  Of what is alike one is counted: the heads of an item; without lengths, its
 * items; where all queries see the same keys, all tasks but the last, which may be shorter.
 */
static mha_status
count_tiles(const mha_attention_job *job, mha_emit_fn *emit, void *to)
{
    const mha_plan *plan = &job->plan;
    const mha_attention_args *args = job->problem.args;
    const size_t n_tasks = plan->n_tasks > 0 ? plan->tasks_per_head : 0;
    const size_t heads = plan->way == MHA_WAY_COLUMNS ? args->heads : args->kv_heads;
    const size_t all_blocks = mha_ceil_div(args->keys, plan->key_block);
    const size_t items_alike = args->visible.valid_lens == NULL ? mha_max(args->batch, 1) : 1;
    size_t n_tiles = 0, n_tiles_all = 0, most_blocks = 0;
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    const size_t rows_at = mha_scratch_add(&scratch, plan->task_queries, sizeof(mha_interval));
    const mha_status status = mha_scratch_open(&scratch);
    mha_walk walk;

    if (status != MHA_OK) {
        return status;
    }
    const mha_room room = {.row_keys = (mha_interval *)(void *)(scratch.base + rows_at)};
    mha_walk_init(&walk, job, &room);
    for (size_t item = 0; item < args->batch; item += items_alike) {
        for (size_t task = 0, alike; task < n_tasks; task += alike) {
            alike = job->problem.same_visibility && task == 0 && n_tasks > 1 ? n_tasks - 1 : 1;
            mha_describe_rows(&walk, item * heads * n_tasks + task, 0, &walk.task);
            for (size_t row = 0; row < walk.task.rows; row += plan->tile_rows) {
                mha_walk_describe_tile(&walk, 0, row);
                const mha_interval keys = walk.tile.keys;
                const size_t n_blocks = mha_ceil_div(keys.last, plan->key_block) - keys.first / plan->key_block;
                n_tiles += n_blocks * alike * items_alike;
                n_tiles_all += all_blocks * alike * items_alike;
                most_blocks = mha_max(most_blocks, n_blocks);
            }
        }
    }
    mha_scratch_close(&scratch);
    /* Pairs (tile, key block): those computed; those if every query saw every key; the most blocks of one tile. */
    emit(to, "n_tiles", COUNT(n_tiles * args->heads));
    emit(to, "n_tiles_all", COUNT(n_tiles_all * args->heads));
    emit(to, "most_blocks", COUNT(most_blocks)); /* > 1: their softmaxes are joined */
    return MHA_OK;
}

/* `args` are the caller's; `at_a_time` is the plan of what runs at a time: of the call, or of a slice of it. */
static mha_status
explain_job(const mha_attention_job *job, const mha_attention_args *args, const mha_plan *at_a_time, mha_emit_fn *emit,
            void *to)
{
    const mha_plan *plan = &job->plan;
    const size_t queries = mha_max(args->queries, 1);

    explain_kernels(job->problem.kernels, "kernels", emit, to);
    emit(to, "batch", COUNT(args->batch));
    emit(to, "heads", COUNT(args->heads));
    emit(to, "kv_heads", COUNT(args->kv_heads));
    emit(to, "queries", COUNT(args->queries));
    emit(to, "keys", COUNT(args->keys));
    emit(to, "head_dim", COUNT(args->head_dim));
    emit(to, "value_dim", COUNT(args->value_dim));
    emit(to, "key_block", COUNT(plan->key_block)); /* keys that are packed, scored and summed together */
    emit(to, "tile_queries", COUNT(mha_min(plan->tile_rows, queries))); /* queries that meet a block together */
    /* Queries of a task, for each of its heads; and its heads: those that share a key head, or those, of several items
     * too, that go side by side by columns. */
    emit(to, "task_queries", COUNT(mha_min(at_a_time->task_queries, queries)));
    emit(to, "task_heads", COUNT(at_a_time->task_heads * (args->heads / job->problem.args->heads)));
    emit(to, "n_splits", COUNT(at_a_time->blocks_abreast));     /* > 1: a task's blocks that are tasks of their own */
    emit(to, "by_columns", FLAG(plan->way == MHA_WAY_COLUMNS)); /* scores stand transposed: see columns.c */
    emit(to, "weights_again", FLAG(plan->weights_later));       /* weights asked for are computed by a second pass */
    return count_tiles(job, emit, to);
}

static sharing
sharing_of(const mha_attention_job *job)
{
    return (sharing){job->plan.n_tasks * job->plan.blocks_abreast, job->problem.work};
}

mha_status
mha_attention_explain(const mha_attention_args *args, mha_emit_fn *emit, void *to)
{
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    mha_attention_args folded;
    mha_attention_job job;

    if (args == NULL) {
        return MHA_ERR_ARG;
    }
    mha_fold_heads(args, &folded);
    const mha_status status =
        mha_attention_init(&job, mha_kernels_for(args->dtype), &folded, MHA_PASS_FORWARD, &scratch);
    if (status != MHA_OK) {
        return status;
    }
    explain_share(sharing_of(&job), emit, to);
    emit(to, "scratch_bytes", COUNT(scratch.total_bytes)); /* of the whole call */
    return explain_job(&job, args, &job.plan, emit, to);
}

/* --- Projections and layers ---------------------------------------------------------------------- */

static void
explain_linear(const mha_linear *linear, size_t rows, size_t rows_needed, size_t task_rows, mha_emit_fn *emit, void *to)
{
    emit(to, "rows", COUNT(rows));
    emit(to, "rows_needed", COUNT(rows_needed)); /* rows that some query sees; the others are left out */
    emit(to, "in_features", COUNT(linear->in_features));
    emit(to, "out_features", COUNT(linear->out_features));
    emit(to, "task_rows", COUNT(task_rows));
}

mha_status
mha_linear_explain(mha_dtype dtype, const mha_linear *linear, size_t rows, mha_emit_fn *emit, void *to)
{
    const mha_kernels *k = mha_kernels_for(dtype);

    if (k == NULL || linear == NULL || linear->weight == NULL) {
        return MHA_ERR_ARG;
    }
    const mha_status status = mha_linear_check(k, linear);
    if (status != MHA_OK) {
        return status;
    }
    const mha_linear_plan plan = mha_linear_plan_for(k, linear, rows);
    explain_linear(linear, rows, rows, plan.task_rows, emit, to);
    explain_share((sharing){plan.n_tasks, plan.work}, emit, to);
    return MHA_OK;
}

/* W_q, W_k and W_v are one pass over the inputs: each has its own tasks, and all share the threads. */
static void
explain_projections(const mha_layer_job *job, const sharing *slices, mha_emit_fn *emit, void *to)
{
    static const char *const names[MHA_N_INPUTS] = {"W_q", "W_k", "W_v"};
    const mha_layer_args *a = job->args;
    const size_t rows = a->batch * a->queries;
    size_t n_needed[MHA_N_INPUTS] = {0};

    const size_t n_alike = a->visible.valid_lens == NULL ? a->batch : 1; /* without lengths all items are */

    for (size_t b = 0; b < a->batch; b += n_alike) {
        mha_interval needed[MHA_N_INPUTS];

        mha_layer_needed(job, b, needed);
        for (int i = 0; i < MHA_N_INPUTS; i++) {
            n_needed[i] += (needed[i].last - needed[i].first) * n_alike;
        }
    }
    for (int i = 0; i < MHA_N_INPUTS; i++) {
        const mha_layer_input *in = &job->inputs[i];

        if (in->linear->weight != NULL) {
            void *projection = emit(to, names[i], GROUP);
            explain_linear(in->linear, a->batch * in->rows, n_needed[i], in->plan.task_rows, emit, projection);
            explain_share(slices != NULL ? *slices : (sharing){job->n_tasks, job->work}, emit, projection);
        }
    }
    if (a->W_o.weight != NULL) {
        void *projection = emit(to, "W_o", GROUP);
        explain_linear(&a->W_o, rows, rows, job->output.task_rows, emit, projection);
        explain_share(slices != NULL ? *slices : (sharing){job->output.n_tasks, job->output.work}, emit, projection);
    }
}

mha_status
mha_layer_explain(const mha_layer_args *args, mha_emit_fn *emit, void *to)
{
    mha_layer_call call;
    mha_layer_job slice;
    mha_layer_args items;
    mha_status status = mha_layer_call_plan(&call, args);

    if (status == MHA_OK && call.n_slices > 1) {
        status = mha_layer_slice_plan(&call, 0, &items, &slice);
    }
    if (status != MHA_OK) {
        return status;
    }
    const mha_attention_job *job = &call.whole.attention_job;
    const sharing slices = {call.n_slices, call.work}; /* every step is shared out by slices */
    const int cut = call.n_slices > 1;
    emit(to, "slice_items", COUNT(call.slice_items)); /* items that take all steps together */
    emit(to, "n_slices", COUNT(call.n_slices));
    emit(to, "scratch_bytes", COUNT(call.scratch.total_bytes));
    explain_projections(&call.whole, cut ? &slices : NULL, emit, emit(to, "projections", GROUP));
    void *attention = emit(to, "attention", GROUP);
    explain_share(cut ? slices : sharing_of(job), emit, attention);
    emit(attention, "scratch_bytes", COUNT(call.scratch.total_bytes));
    return explain_job(job, job->problem.args, cut ? &slice.attention_job.plan : &job->plan, emit, attention);
}
