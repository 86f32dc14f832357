/*
 * dropout.c: the factors of one call's dropout as an array, for whoever computes attention another way.
 * The tiles of a call ask for theirs one by one (values.c) and get the same.
 */
#include "runtime/common.h"
#include "runtime/threads.h"
#include "runtime/threads_interrupt.h"
#include "kernels/dispatch.h"

typedef struct {
    const mha_attention_args *args;
    const mha_kernels *kernels;
} factors_job;

/* One task is one head of one item. */
static void
run_head(void *context, size_t task, unsigned worker)
{
    const factors_job *job = context;
    const mha_attention_args *args = job->args;
    const mha_dropout tile = {
        .rows = args->queries,
        .keys = args->keys,
        .seed = args->seed,
        .item = task / args->heads,
        .head = task % args->heads,
        .p = args->dropout,
        .factors = (char *)args->weights + task * args->queries * args->keys * job->kernels->itemsize,
        .factors_row = (ptrdiff_t)args->keys,
    };

    (void)worker;
    job->kernels->dropout_factors(&tile);
}

mha_status
mha_dropout_factors(const mha_attention_args *args)
{
    factors_job job = {args, args == NULL ? NULL : mha_kernels_for(args->dtype)};
    size_t n = 1;

    if (job.kernels == NULL || !(args->dropout >= 0 && args->dropout <= 1)) {
        return MHA_ERR_ARG;
    }
    if (mha_mul_size(&n, args->batch) < 0 || mha_mul_size(&n, args->heads) < 0 || mha_mul_size(&n, args->queries) < 0 ||
        mha_mul_size(&n, args->keys) < 0 || n > PTRDIFF_MAX / sizeof(double)) {
        return MHA_ERR_SIZE;
    }
    if (n > 0) { /* else heads without weights may have any count */
        const size_t n_tasks = args->batch * args->heads;

        if (args->weights == NULL) {
            return MHA_ERR_ARG;
        }
        mha_parallel_for(n_tasks, mha_threads_for(n_tasks, 10.0 * (double)n), run_head, &job);
    }
    return mha_interrupt_status();
}
