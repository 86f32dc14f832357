/*
 * job.c: a call of attention before it runs: described, planned, and given its share of memory.
 */
#include "job.h"

#include "runtime/common.h"
#include "runtime/threads_interrupt.h"

/* Reserves room in the call's memory; returns its address, counted from 0 on. */
static char *
reserve(mha_scratch *scratch, size_t count, size_t size)
{
    return (char *)(uintptr_t)mha_scratch_add(scratch, count, size);
}

/* 1 if queries of an item see different keys, but those of all items see the same ones. */
static int
shares_row_keys(const mha_attention_job *job)
{
    return job->plan.n_tasks > 0 && !job->problem.same_visibility && job->problem.args->visible.valid_lens == NULL;
}

/* The second pass needs the statistics: if the caller did not ask for them, the job has its own. */
static int
has_own_statistics(const mha_attention_job *job)
{
    return job->plan.weights_later && job->plan.n_tasks > 0 && job->problem.args->row_max == NULL;
}

/* Memory for the results of tasks that are joined later. */
static void
reserve_partials(mha_attention_job *job, mha_scratch *scratch)
{
    const mha_plan *plan = &job->plan;
    const mha_attention_args *args = job->problem.args;
    const mha_kernels *k = job->problem.kernels;
    size_t numbers = args->batch * args->heads * args->queries * args->head_dim, n = plan->spans_abreast;

    if (job->problem.pass != MHA_PASS_BACKWARD) { /* for each row of the task: two statistics and an output */
        numbers = plan->task_queries * plan->task_heads * (mha_round_up(args->value_dim, k->lanes) + 2);
        n = plan->blocks_abreast > 1 ? plan->n_tasks * plan->blocks_abreast : 1;
    }
    job->partial_bytes = mha_round_up(numbers * k->itemsize, MHA_ALIGN);
    job->partials = reserve(scratch, n > 1 ? n : 0, job->partial_bytes);
    if (job->problem.pass == MHA_PASS_BACKWARD && args->additive_weights != NULL && plan->n_tasks > 0) {
        job->n_grad_w = args->batch * args->kv_heads * (plan->spans_abreast > 1 ? plan->n_spans : 1);
        job->grad_w_bytes = mha_round_up(args->head_dim * k->itemsize, MHA_ALIGN);
        job->grad_w = reserve(scratch, job->n_grad_w, job->grad_w_bytes);
    }
}

mha_status
mha_attention_init(mha_attention_job *job, const mha_kernels *kernels, const mha_attention_args *args, mha_pass pass,
                   mha_scratch *scratch)
{
    *job = (mha_attention_job){.row_max = args->row_max, .row_sum = args->row_sum};
    const mha_status status = mha_problem_describe(&job->problem, kernels, args, pass);

    if (status != MHA_OK) {
        return status;
    }
    (pass == MHA_PASS_BACKWARD ? mha_plan_backward : mha_plan_forward)(&job->plan, &job->problem);
    if (has_own_statistics(job)) {
        const size_t n_rows = args->batch * args->heads * args->queries;
        job->row_max = reserve(scratch, n_rows, job->problem.kernels->itemsize);
        job->row_sum = reserve(scratch, n_rows, job->problem.kernels->itemsize);
    }
    reserve_partials(job, scratch);
    job->room_bytes = mha_room_measure(&job->problem, &job->plan, &job->measured);
    job->rooms = (mha_room *)(void *)reserve(scratch, job->plan.n_workers, sizeof(mha_room));
    job->first_room = reserve(scratch, job->plan.n_workers, job->room_bytes);
    const size_t n_shared = shares_row_keys(job) ? args->queries : 0;
    job->row_keys_at = mha_scratch_add(scratch, n_shared, sizeof(mha_interval));
    return MHA_OK;
}

/* Adds the base to an address that was counted from 0 on. */
#define MOVE(address, base) ((address) = (void *)((base) + (uintptr_t)(address)))

void
mha_attention_place(mha_attention_job *job, const mha_scratch *scratch)
{
    const mha_attention_args *args = job->problem.args;
    char *base = scratch->base;

    MOVE(job->rooms, base);
    MOVE(job->first_room, base);
    for (unsigned i = 0; i < job->plan.n_workers; i++) {
        mha_room_place(&job->measured, job->first_room + i * job->room_bytes, &job->rooms[i]);
    }
    if (shares_row_keys(job)) {
        mha_interval *row_keys = (mha_interval *)(void *)(base + job->row_keys_at);
        (void)mha_visible_rows(&args->visible, args->queries, args->keys, 0, 0, args->queries, row_keys);
        job->row_keys = row_keys;
    }
    if (has_own_statistics(job)) {
        MOVE(job->row_max, base);
        MOVE(job->row_sum, base);
    }
    MOVE(job->partials, base);
    MOVE(job->grad_w, base);
}
