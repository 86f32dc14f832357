/*
 * explain.c: what a call will do, and why, without doing it: read off the plan that the call itself follows.
 *
 * Nothing is decided here.  What a plan does not say in so many words, such as how many tiles its
 * tasks meet, is counted by walking over the tasks as the drivers do.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "mha_explain.h"

#include "attention/walk.h"
#include "runtime/common.h"
#include "layer.h"
#include "linear.h"
#include "runtime/threads.h"

mha_status
mha_kernels_explain(mha_dtype dtype, mha_kernel_facts *facts)
{
    const mha_kernels *k = mha_kernels_for(dtype);

    if (k == NULL) {
        return MHA_ERR_ARG;
    }
    *facts = (mha_kernel_facts){
        .isa = mha_isa_active(),
        .itemsize = k->itemsize,
        .lanes = k->lanes,
        .tile_rows = k->tile_sums / (k->panel_width / k->lanes),
        .tile_columns = k->panel_width,
    };
    return MHA_OK;
}

mha_share_facts
mha_threads_explain(void)
{
    return mha_threads_share(0, 0);
}

/* --- Attention ------------------------------------------------------------------------------- */

/* Tiles of queries that meet a key block, for one head of the task; and the most blocks that one of them meets. */
static void
count_task(const mha_plan *plan, size_t task_number, const mha_room *room, mha_attention_facts *facts)
{
    mha_rows task;
    mha_describe_task(plan, task_number, room, &task);

    for (size_t row = 0; row < task.rows; row += plan->tile_rows) {
        mha_rows tile;
        mha_describe_tile(plan, &task, 0, row, &tile);
        const size_t n_blocks = mha_ceil_div(tile.keys.last, plan->key_block) - tile.keys.first / plan->key_block;
        facts->n_tiles += n_blocks;
        facts->most_blocks = mha_max(facts->most_blocks, n_blocks);
        facts->n_tiles_all += mha_ceil_div(plan->args->keys, plan->key_block);
    }
}

/* All heads of an item see the same keys: one of them is counted. */
static mha_status
count_tiles(const mha_plan *plan, mha_attention_facts *facts)
{
    const mha_attention_args *args = plan->args;
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    const size_t rows_at = mha_scratch_add(&scratch, plan->task_queries, sizeof(mha_interval));
    const mha_status status = mha_scratch_open(&scratch);

    if (status != MHA_OK) {
        return status;
    }
    const mha_room room = {.row_keys = (mha_interval *)(void *)(scratch.base + rows_at)};
    for (size_t item = 0; item < args->batch && plan->n_tasks > 0; item++) {
        for (size_t task = 0; task < plan->tasks_per_head; task++) {
            count_task(plan, item * args->kv_heads * plan->tasks_per_head + task, &room, facts);
        }
    }
    facts->n_tiles *= args->heads;
    facts->n_tiles_all *= args->heads;
    mha_scratch_close(&scratch);
    return MHA_OK;
}

static mha_status
explain_plan(const mha_plan *plan, const mha_attention_args *args, mha_attention_facts *facts)
{
    mha_status status;

    *facts = (mha_attention_facts){
        .share = mha_threads_share(plan->n_tasks * plan->blocks_abreast, plan->work),
        .batch = args->batch,
        .heads = args->heads,
        .kv_heads = args->kv_heads,
        .queries = args->queries,
        .keys = args->keys,
        .head_dim = args->head_dim,
        .value_dim = args->value_dim,
        .key_block = plan->key_block,
        .tile_queries = mha_min(plan->tile_rows, mha_max(args->queries, 1)),
        .task_queries = mha_min(plan->task_queries, mha_max(args->queries, 1)),
        .task_heads = plan->task_heads / plan->group * (args->heads / args->kv_heads),
        .n_splits = plan->blocks_abreast,
        .by_columns = mha_by_columns(plan),
        .weights_again = plan->weights_later,
    };
    MHA_ASSERT(facts->share.n_threads == plan->n_workers);
    status = mha_kernels_explain(args->dtype, &facts->kernels);
    return status != MHA_OK ? status : count_tiles(plan, facts);
}

mha_status
mha_attention_explain(const mha_attention_args *args, mha_attention_facts *facts)
{
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    mha_attention_args folded;
    mha_plan plan;

    mha_fold_heads(args, &folded);
    mha_status status = mha_plan_init(&plan, &folded, MHA_PASS_FORWARD, &scratch);

    if (status == MHA_OK) {
        status = explain_plan(&plan, args, facts);
        facts->scratch_bytes = scratch.total_bytes;
    }
    return status;
}

/* --- Projections and layers ---------------------------------------------------------------------- */

mha_status
mha_linear_explain(mha_dtype dtype, const mha_linear *linear, size_t rows, mha_linear_facts *facts)
{
    const mha_kernels *k = mha_kernels_for(dtype);

    if (k == NULL || linear->weight == NULL) {
        return MHA_ERR_ARG;
    }
    const mha_linear_plan plan = mha_linear_plan_for(k, linear, rows);
    *facts = (mha_linear_facts){
        .rows = rows,
        .rows_needed = rows,
        .in_features = linear->in_features,
        .out_features = linear->out_features,
        .task_rows = plan.block,
        .share = mha_threads_share(plan.n_tasks, plan.work),
    };
    return MHA_OK;
}

/* W_q, W_k, W_v are one pass over the inputs: each has its own tasks, and all share the threads. */
static void
explain_input(const mha_layer_job *job, const mha_layer_input *in, mha_linear_facts *facts)
{
    const size_t batch = job->args->batch;

    if (in->linear->weight == NULL) {
        return;
    }
    *facts = (mha_linear_facts){
        .rows = batch * in->rows,
        .rows_needed = in->needed == NULL ? batch * in->rows : 0,
        .in_features = in->linear->in_features,
        .out_features = in->features,
        .task_rows = in->task_rows,
        .share = mha_threads_share(job->n_tasks, job->work),
    };
    for (size_t b = 0; b < batch && in->needed != NULL; b++) {
        facts->rows_needed += in->needed[b].last - in->needed[b].first;
    }
}

static mha_status
explain_inputs(mha_layer_job *job, mha_layer_facts *facts)
{
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    const size_t needed_at = mha_scratch_add(&scratch, job->args->batch, 2 * sizeof(mha_interval));
    const mha_status status = mha_scratch_open(&scratch);

    if (status == MHA_OK) {
        mha_layer_place_inputs(job, scratch.base + needed_at);
        for (int i = 0; i < MHA_N_INPUTS; i++) {
            explain_input(job, &job->inputs[i], &facts->projections[i]);
        }
        mha_scratch_close(&scratch);
    }
    return status;
}

/* What is different where the batch goes through the layer in slices. */
static mha_status
explain_slices(const mha_layer_job *whole, mha_layer_slices slices, mha_layer_facts *facts)
{
    const mha_share_facts share = mha_threads_share(slices.n, slices.work);
    const mha_layer_args first = mha_layer_items(whole, 0, slices.items);
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    mha_layer_job job;
    const mha_status status = mha_layer_plan(&job, &first, MHA_PASS_IN_TASK);

    MHA_ASSERT(share.n_threads == slices.n_workers);
    if (status == MHA_OK) {
        (void)mha_scratch_add(&scratch, slices.n_workers, mha_layer_slice_bytes(whole, &slices));
        facts->scratch_bytes = scratch.total_bytes;
        facts->attention.task_queries = job.plan.task_queries;
        facts->attention.n_splits = job.plan.blocks_abreast;
        facts->attention.share = share;
        for (int i = 0; i <= MHA_N_INPUTS; i++) {
            facts->projections[i].share = share;
        }
    }
    return status;
}

mha_status
mha_layer_explain(const mha_layer_args *args, mha_layer_facts *facts)
{
    mha_scratch scratch = MHA_SCRATCH_EMPTY; /* of packed weights */
    mha_linear_packing packing = {.n = 0};
    mha_layer_args packed;
    mha_layer_job job;
    const int packs = mha_layer_packs(args, &packed, &packing);
    mha_status status = mha_layer_plan(&job, packs ? &packed : args, MHA_PASS_FORWARD);

    *facts = (mha_layer_facts){.scratch_bytes = 0};
    if (status == MHA_OK) {
        status = explain_plan(&job.plan, job.plan.args, &facts->attention);
    }
    if (status == MHA_OK) {
        status = explain_inputs(&job, facts);
    }
    if (status == MHA_OK && args->W_o.weight != NULL) {
        status = mha_linear_explain(args->dtype, &args->W_o, args->batch * args->queries,
                                    &facts->projections[MHA_N_INPUTS]);
    }
    if (status == MHA_OK) {
        const mha_layer_slices slices = mha_layer_slices_for(&job);
        facts->slice_items = slices.items;
        facts->n_slices = slices.n;
        facts->scratch_bytes = job.scratch.total_bytes;
        status = slices.n > 1 ? explain_slices(&job, slices, facts) : status;
    }
    if (status == MHA_OK && packs) {
        mha_linear_packing_plan(&packing, job.kernels, &scratch);
        facts->scratch_bytes += scratch.total_bytes;
    }
    facts->attention.scratch_bytes = facts->scratch_bytes;
    return status;
}
