/*
 * job.c: a call of attention before it runs: described, planned, and given its share of memory.
 */
#include "job.h"

#include "runtime/common.h"
#include "runtime/threads_interrupt.h"

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

/* Memory for the results of splits, which are joined later. */
static void
take_partials(mha_attention_job *job, mha_scratch *scratch)
{
    const mha_plan *plan = &job->plan;
    const mha_attention_args *args = job->problem.args;
    const mha_kernels *k = job->problem.kernels;
    size_t numbers = args->batch * args->heads * args->queries * args->head_dim, n = plan->splits_abreast;

    if (job->problem.pass != MHA_PASS_BACKWARD) { /* for each row of the task: two statistics and an output */
        numbers = plan->task_queries * plan->task_heads * (mha_round_up(args->value_dim, k->lanes) + 2);
        n *= plan->n_tasks;
    }
    job->partial_bytes = mha_round_up(numbers * k->itemsize, MHA_ALIGN);
    job->partials = mha_scratch_take(scratch, plan->n_splits > 1 ? n : 0, job->partial_bytes);
    if (job->problem.pass == MHA_PASS_BACKWARD && args->additive_weights != NULL && plan->n_tasks > 0) {
        job->n_grad_w = args->batch * args->kv_heads * plan->n_splits;
        job->grad_w_bytes = mha_round_up(args->head_dim * k->itemsize, MHA_ALIGN);
        job->grad_w = mha_scratch_take(scratch, job->n_grad_w, job->grad_w_bytes);
    }
}

/* Lays out the job's memory: called once to measure it, and once more when it has an address. */
static void
lay_out(mha_attention_job *job, mha_scratch *scratch)
{
    const mha_attention_args *args = job->problem.args;

    if (has_own_statistics(job)) {
        const size_t n_rows = args->batch * args->heads * args->queries;
        job->row_max = mha_scratch_take(scratch, n_rows, job->problem.kernels->itemsize);
        job->row_sum = mha_scratch_take(scratch, n_rows, job->problem.kernels->itemsize);
    }
    take_partials(job, scratch);
    job->rooms = mha_scratch_take(scratch, job->plan.n_workers, sizeof(mha_room));
    char *base = mha_scratch_take(scratch, job->plan.n_workers, job->room_bytes);
    for (unsigned i = 0; i < job->plan.n_workers && base != NULL; i++) {
        mha_room_place(&job->room_layout, base + i * job->room_bytes, &job->rooms[i]);
    }
    if (shares_row_keys(job)) {
        job->row_keys = mha_scratch_take(scratch, args->queries, sizeof(mha_interval));
    }
}

mha_status
mha_attention_init(mha_attention_job *job, const mha_kernels *kernels, const mha_attention_args *args, mha_pass pass,
                   mha_scratch *scratch)
{
    *job = (mha_attention_job){.row_max = args->row_max, .row_sum = args->row_sum, .scratch_at = scratch->total_bytes};
    const mha_status status = mha_problem_describe(&job->problem, kernels, args, pass);

    if (status == MHA_OK) {
        (pass == MHA_PASS_BACKWARD ? mha_plan_backward : mha_plan_forward)(&job->plan, &job->problem);
        job->room_bytes = mha_room_lay_out(&job->problem, &job->plan, &job->room_layout);
        lay_out(job, scratch);
    }
    return status;
}

void
mha_attention_place(mha_attention_job *job, const mha_scratch *scratch)
{
    const mha_attention_args *args = job->problem.args;
    mha_scratch own = {.total_bytes = job->scratch_at, .base = scratch->base};

    lay_out(job, &own);
    if (shares_row_keys(job)) {
        (void)mha_visible_rows(&args->visible, args->queries, args->keys, 0, 0, args->queries, job->row_keys);
    }
}
