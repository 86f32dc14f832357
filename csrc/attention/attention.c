/*
 * attention.c: the calls of attention, from their arguments to their status: described, planned, given memory, run.
 */
#include "attention.h"

#include "backward.h"
#include "forward.h"
#include "runtime/common.h"
#include "runtime/threads.h"
#include "runtime/threads_interrupt.h"

void
mha_attention_run(const mha_attention_job *job)
{
    const mha_plan *plan = &job->plan;
    const mha_task_fn run = job->problem.pass == MHA_PASS_WEIGHTS ? mha_weights_task
                            : plan->way == MHA_WAY_COLUMNS        ? mha_columns_task
                                                                  : mha_forward_task;
    void *context = (void *)(uintptr_t)job;

    if (plan->n_splits > 1) {
        mha_parallel_for(plan->n_tasks * plan->n_splits, plan->n_workers, mha_split_task, context);
    }
    mha_parallel_for(plan->n_tasks, plan->n_workers, run, context);
    if (plan->weights_later) {
        mha_parallel_for(plan->n_tasks, plan->n_workers, mha_weights_task, context);
    }
}

static mha_status
call(const mha_attention_args *args, mha_pass pass, const mha_attention_grads *grads)
{
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    mha_attention_job job;
    mha_status status = mha_attention_init(&job, mha_kernels_for(args->dtype), args, pass, &scratch);

    if (status == MHA_OK) {
        status = mha_scratch_open(&scratch);
    }
    if (status != MHA_OK) {
        return status;
    }
    mha_attention_place(&job, &scratch);
    if (pass == MHA_PASS_BACKWARD) {
        mha_backward_run(&job, grads);
    } else {
        mha_attention_run(&job);
    }
    mha_scratch_close(&scratch);
    return mha_interrupt_status();
}

mha_status
mha_attention_forward(const mha_attention_args *args)
{
    mha_attention_args folded;

    if (args == NULL || !mha_has_operands(args, MHA_PASS_FORWARD)) {
        return MHA_ERR_ARG;
    }
    mha_fold_heads(args, &folded);
    return call(&folded, MHA_PASS_FORWARD, NULL);
}

mha_status
mha_attention_weights(const mha_attention_args *args)
{
    mha_attention_args folded;

    if (args == NULL || args->weights == NULL || args->row_max == NULL || args->row_sum == NULL ||
        !mha_has_operands(args, MHA_PASS_WEIGHTS)) {
        return MHA_ERR_ARG;
    }
    mha_fold_heads(args, &folded);
    return call(&folded, MHA_PASS_WEIGHTS, NULL);
}

/* 1 if what the backward pass reads and writes has addresses, and no gradient is wanted of what is not there. */
static int
has_gradients(const mha_attention_args *args, const mha_attention_grads *grads)
{
    const size_t q = args->batch * args->heads * args->queries, k = args->batch * args->kv_heads * args->keys;
    const int has_q = q * args->head_dim > 0, has_k = k * args->head_dim > 0;
    const int has_v = k * args->value_dim > 0, has_out = q * args->value_dim > 0;

    return (!has_q || grads->grad_q.data != NULL) && (!has_k || grads->grad_k.data != NULL) &&
           (!has_v || grads->grad_v.data != NULL) &&
           (!has_out || (grads->out.data != NULL && grads->grad_out.data != NULL)) &&
           (grads->grad_additive_weights == NULL || args->additive_weights != NULL) &&
           (grads->grad_bias.data == NULL || args->bias.data != NULL) &&
           (grads->grad_relative_bias == NULL || args->relative_bias != NULL) &&
           (grads->grad_sinks == NULL || args->sinks != NULL);
}

mha_status
mha_attention_backward(const mha_attention_args *args, const mha_attention_grads *grads)
{
    if (args == NULL || grads == NULL || args->row_max == NULL || args->row_sum == NULL ||
        !mha_has_operands(args, MHA_PASS_BACKWARD) || !has_gradients(args, grads)) {
        return MHA_ERR_ARG;
    }
    return call(args, MHA_PASS_BACKWARD, grads);
}
