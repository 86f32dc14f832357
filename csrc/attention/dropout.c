/*
 * dropout.c: the factors of one call's dropout as an array, for whoever computes attention another way.
 * The tiles of a call ask for theirs one by one (values.c) and get the same.
 */
#include "runtime/common.h"
#include "runtime/threads.h"
#include "runtime/threads_interrupt.h"
#include "kernels/dispatch.h"

/* One task is one head of one item. */
static void
run_head(void *context, size_t task, unsigned worker)
{
    const mha_attention_args *args = context;
    const mha_kernels *kernels = mha_kernels_for(args->dtype);
    const mha_dropout tile = {
        .rows = args->queries,
        .keys = args->keys,
        .seed = args->seed,
        .item = task / args->heads,
        .head = task % args->heads,
        .p = args->dropout,
        .factors = (char *)args->weights + task * args->queries * args->keys * kernels->itemsize,
        .factors_row = (ptrdiff_t)args->keys,
    };

    (void)worker;
    kernels->dropout_factors(&tile);
}

mha_status
mha_dropout_factors(const mha_attention_args *args)
{
    const size_t n_tasks = args->batch * args->heads;
    const double n = (double)n_tasks * (double)args->queries * (double)args->keys;

    if (mha_kernels_for(args->dtype) == NULL || !(args->dropout >= 0 && args->dropout <= 1)) {
        return MHA_ERR_ARG;
    }
    mha_parallel_for(n_tasks, mha_threads_for(n_tasks, 10.0 * n), run_head, (void *)(uintptr_t)args);
    return mha_interrupt_status();
}
