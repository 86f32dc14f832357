/*
 * masked_softmax.c: softmax over the last axis of scores that already exist, looking only at the
 * first valid_lens keys of each row: the book's masked_softmax.
 */
#include "runtime/common.h"
#include "kernels/dispatch.h"
#include "runtime/threads.h"
#include "runtime/threads_interrupt.h"
#include "visible.h"

#include <string.h>

typedef struct {
    const mha_kernels *kernels;
    const mha_visibility *visible;
    size_t queries, keys;
    const char *scores;
    char *out;
    double empty;
} softmax_job;

/* One task is one item of the batch. */
static void
run_item(void *context, size_t item, unsigned worker)
{
    const softmax_job *job = context;
    const size_t row_bytes = job->keys * job->kernels->itemsize;

    (void)worker;
    for (size_t i = 0; i < job->queries && (i % 64 != 0 || !mha_interrupted()); i++) {
        const size_t at = (item * job->queries + i) * row_bytes;
        const mha_interval seen = mha_visible_keys(job->visible, job->queries, job->keys, item, i);
        memmove(job->out + at, job->scores + at, row_bytes);
        job->kernels->softmax_row(job->out + at, job->keys, seen.last, job->empty);
    }
}

mha_status
mha_masked_softmax(mha_dtype dtype, size_t batch, size_t queries, size_t keys, const void *scores,
                   const mha_visibility *visible, mha_empty empty_rows, void *out)
{
    softmax_job job = {mha_kernels_for(dtype), visible, queries, keys, scores, out, 0};

    if (job.kernels == NULL) {
        return MHA_ERR_ARG;
    }
    if (queries == 0 || keys == 0) {
        return MHA_OK;
    }
    job.empty = empty_rows == MHA_EMPTY_UNIFORM ? 1.0 / (double)keys : 0.0;
    mha_parallel_for(batch, mha_threads_for(batch, 20.0 * (double)batch * (double)queries * (double)keys),
                     run_item, &job);
    return mha_interrupt_status();
}
