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

/* Of n_tasks tasks of `work` multiply-adds in all. */
static mha_share_facts
share_of(size_t n_tasks, double work)
{
    mha_share_facts facts = {
        .n_tasks = n_tasks,
        .most_threads = mha_threads_get(),
        .seconds = work / MHA_WORK_PER_SECOND,
        .least_seconds = MHA_WORTH_SHARING / MHA_WORK_PER_SECOND,
        .least_each = MHA_WORK_PER_THREAD / MHA_WORK_PER_SECOND,
    };

    facts.n_threads = mha_threads_decide(n_tasks, work, &facts.reason);
    return facts;
}

static mha_kernel_facts
kernels_of(const mha_kernels *k)
{
    return (mha_kernel_facts){
        .isa = k->isa,
        .itemsize = k->itemsize,
        .lanes = k->lanes,
        .tile_rows = k->tile_sums / (k->panel_width / k->lanes),
        .tile_columns = k->panel_width,
    };
}

void
mha_kernels_explain(mha_core_facts *facts)
{
    facts->float32 = kernels_of(mha_kernels_for(MHA_F32));
    facts->float64 = kernels_of(mha_kernels_for(MHA_F64));
    facts->share = share_of(0, 0);
}

/* --- Attention ------------------------------------------------------------------------------- */

/*
 * Counts tiles that meet a key block.  Of what is alike one is counted: the heads of an item; without lengths, its
 * items; where all queries see the same keys, all tasks but the last, which may be shorter.
 */
static mha_status
count_tiles(const mha_attention_job *job, mha_attention_facts *facts)
{
    const mha_plan *plan = &job->plan;
    const mha_attention_args *args = job->problem.args;
    const size_t n_tasks = plan->n_tasks > 0 ? plan->tasks_per_head : 0;
    const size_t heads = plan->way == MHA_WAY_COLUMNS ? args->heads : args->kv_heads;
    const size_t all_blocks = mha_ceil_div(args->keys, plan->key_block);
    const size_t items_alike = args->visible.valid_lens == NULL ? mha_max(args->batch, 1) : 1;
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
                mha_rows tile;

                mha_describe_tile(&walk, 0, row, &tile);
                const size_t n_blocks =
                    mha_ceil_div(tile.keys.last, plan->key_block) - tile.keys.first / plan->key_block;
                facts->n_tiles += n_blocks * alike * items_alike * args->heads;
                facts->n_tiles_all += all_blocks * alike * items_alike * args->heads;
                facts->most_blocks = mha_max(facts->most_blocks, n_blocks);
            }
        }
    }
    mha_scratch_close(&scratch);
    return MHA_OK;
}

static mha_share_facts
share_of_job(const mha_attention_job *job)
{
    return share_of(job->plan.n_tasks * job->plan.n_splits, job->problem.work);
}

/* `args` are the caller's; `at_a_time` is the plan of what runs at a time: of the call, or of a slice of it. */
static mha_status
explain_job(const mha_attention_job *job, const mha_attention_args *args, const mha_plan *at_a_time,
            mha_attention_facts *facts)
{
    const mha_plan *plan = &job->plan;
    const size_t queries = mha_max(args->queries, 1);

    *facts = (mha_attention_facts){
        .kernels = kernels_of(job->problem.kernels),
        .batch = args->batch,
        .heads = args->heads,
        .kv_heads = args->kv_heads,
        .queries = args->queries,
        .keys = args->keys,
        .head_dim = args->head_dim,
        .value_dim = args->value_dim,
        .key_block = plan->key_block,
        .tile_queries = mha_min(plan->tile_rows, queries),
        .task_queries = mha_min(at_a_time->task_queries, queries),
        .task_heads = at_a_time->task_heads * (args->heads / job->problem.args->heads),
        .n_splits = at_a_time->n_splits,
        .by_columns = plan->way == MHA_WAY_COLUMNS,
        .weights_again = plan->weights_later,
    };
    return count_tiles(job, facts);
}

mha_status
mha_attention_explain(const mha_attention_args *args, mha_attention_facts *facts)
{
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    mha_attention_args folded;
    mha_attention_job job;

    if (args == NULL || facts == NULL) {
        return MHA_ERR_ARG;
    }
    mha_fold_heads(args, &folded);
    mha_status status = mha_attention_init(&job, mha_kernels_for(args->dtype), &folded, MHA_PASS_FORWARD, &scratch);
    if (status == MHA_OK) {
        status = explain_job(&job, args, &job.plan, facts);
        facts->share = share_of_job(&job);
        facts->scratch_bytes = scratch.total_bytes;
    }
    return status;
}

/* --- Projections and layers ---------------------------------------------------------------------- */

static mha_linear_facts
explain_linear(const mha_linear *linear, size_t rows, size_t task_rows, mha_share_facts share)
{
    return (mha_linear_facts){rows, rows, linear->in_features, linear->out_features, task_rows, share};
}

mha_status
mha_linear_explain(mha_dtype dtype, const mha_linear *linear, size_t rows, mha_linear_facts *facts)
{
    const mha_kernels *k = mha_kernels_for(dtype);

    if (k == NULL || linear == NULL || linear->weight == NULL || facts == NULL) {
        return MHA_ERR_ARG;
    }
    const mha_status status = mha_linear_check(k, linear);
    if (status == MHA_OK) {
        const mha_linear_plan plan = mha_linear_plan_for(k, linear, rows);
        *facts = explain_linear(linear, rows, plan.task_rows, share_of(plan.n_tasks, plan.work));
    }
    return status;
}

/* How many rows of each input the items need in all. */
static void
count_needed(const mha_layer_job *job, size_t n_needed[MHA_N_INPUTS])
{
    const mha_attention_args *a = &job->args->attention;
    const size_t n_alike = a->visible.valid_lens == NULL ? a->batch : 1; /* without lengths all items are */

    for (size_t b = 0; b < a->batch; b += n_alike) {
        mha_needed needed[MHA_N_INPUTS];

        mha_layer_needed(job, b, NULL, needed); /* masks are not read */
        for (int i = 0; i < MHA_N_INPUTS; i++) {
            n_needed[i] += (needed[i].rows.last - needed[i].rows.first) * n_alike;
        }
    }
}

/* W_q, W_k and W_v are one pass over the inputs: each has its own tasks, and all share the threads. */
static void
explain_projections(const mha_layer_job *job, mha_layer_facts *facts)
{
    const mha_layer_args *a = job->args;
    const mha_share_facts inputs = share_of(job->n_tasks, job->work);
    const mha_share_facts output = share_of(job->output.n_tasks, job->output.work);
    size_t n_needed[MHA_N_INPUTS] = {0};

    count_needed(job, n_needed);
    for (int i = 0; i < MHA_N_INPUTS; i++) {
        const mha_layer_path *in = &job->inputs[i];

        if (in->given->W.weight != NULL) {
            facts->projections[i] =
                explain_linear(&in->given->W, a->attention.batch * in->rows, in->plan.task_rows, inputs);
            facts->projections[i].rows_needed = n_needed[i];
        }
    }
    if (a->W_o.weight != NULL) {
        facts->projections[MHA_N_INPUTS] =
            explain_linear(&a->W_o, a->attention.batch * a->attention.queries, job->output.task_rows, output);
    }
}

/* Every step of a cut batch is shared out by slices. */
static void
share_by_slices(const mha_layer_call *call, mha_layer_facts *facts)
{
    const mha_share_facts slices = share_of(call->n_slices, call->work);

    for (int i = 0; i <= MHA_N_INPUTS; i++) {
        facts->projections[i].share = slices;
    }
    facts->attention.share = slices;
}

mha_status
mha_layer_explain(const mha_layer_args *args, mha_layer_facts *facts)
{
    mha_layer_call call;
    mha_layer_job slice;
    mha_layer_args items;
    mha_status status = facts == NULL ? MHA_ERR_ARG : mha_layer_call_plan(&call, args);

    if (status == MHA_OK && call.n_slices > 1) {
        status = mha_layer_slice_plan(&call, 0, &items, &slice);
    }
    if (status != MHA_OK) {
        return status;
    }
    const mha_attention_job *job = &call.whole.attention_job;
    const mha_plan *at_a_time = call.n_slices > 1 ? &slice.attention_job.plan : &job->plan;
    *facts = (mha_layer_facts){
        .slice_items = call.slice_items,
        .n_slices = call.n_slices,
        .scratch_bytes = call.scratch.total_bytes,
    };
    status = explain_job(job, job->problem.args, at_a_time, &facts->attention);
    explain_projections(&call.whole, facts);
    facts->attention.scratch_bytes = call.scratch.total_bytes;
    facts->attention.share = share_of_job(job);
    if (call.n_slices > 1) {
        share_by_slices(&call, facts);
    }
    return status;
}
