/*
 * dropout.c: the factors of one call's dropout as an array, for whoever computes attention another way.
 * The tiles of a call ask for theirs one by one (tile.c) and get the same.
 */
#include "runtime/common.h"
#include "runtime/threads.h"
#include "runtime/threads_interrupt.h"
#include "kernels/dispatch.h"

typedef struct {
    const mha_kernels *kernels;
    size_t heads, queries, keys;
    double p;
    uint64_t seed;
    char *factors;
} dropout_job;

/* One task is one head of one item. */
static void
run_head(void *context, size_t task, unsigned worker)
{
    const dropout_job *job = context;
    const mha_dropout tile = {
        .rows = job->queries,
        .keys = job->keys,
        .seed = job->seed,
        .item = task / job->heads,
        .head = task % job->heads,
        .p = job->p,
        .factors = job->factors + task * job->queries * job->keys * job->kernels->itemsize,
        .factors_row = (ptrdiff_t)job->keys,
    };

    (void)worker;
    job->kernels->dropout_factors(&tile);
}

mha_status
mha_dropout_factors(mha_dtype dtype, size_t batch, size_t heads, size_t queries, size_t keys, double dropout,
                    uint64_t seed, void *factors)
{
    const dropout_job job = {mha_kernels_for(dtype), heads, queries, keys, dropout, seed, factors};
    const double n = (double)batch * (double)heads * (double)queries * (double)keys;

    if (job.kernels == NULL || !(dropout >= 0 && dropout <= 1)) {
        return MHA_ERR_ARG;
    }
    mha_parallel_for(batch * heads, mha_threads_for(batch * heads, 10.0 * n), run_head, (void *)&job);
    return mha_interrupt_status();
}
