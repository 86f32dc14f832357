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
    const mha_masked_softmax_args *args;
    const mha_kernels *kernels;
} softmax_job;

/* One task is one item of the batch. */
static void
run_item(void *context, size_t item, unsigned worker)
{
    const softmax_job *job = context;
    const mha_masked_softmax_args *args = job->args;
    const size_t row_bytes = args->keys * job->kernels->itemsize;
    const double empty = args->empty_rows == MHA_EMPTY_UNIFORM ? 1.0 / (double)args->keys : 0.0;

    (void)worker;
    for (size_t i = 0; i < args->queries && (i % 64 != 0 || !mha_interrupted()); i++) {
        const size_t at = (item * args->queries + i) * row_bytes;
        const mha_interval seen = mha_visible_keys(&args->visible, args->queries, args->keys, item, i);
        memmove((char *)args->out + at, (const char *)args->scores + at, row_bytes);
        job->kernels->softmax_row((char *)args->out + at, args->keys, seen.last, empty);
    }
}

mha_status
mha_masked_softmax(const mha_masked_softmax_args *args)
{
    softmax_job job = {args, args == NULL ? NULL : mha_kernels_for(args->dtype)};

    if (job.kernels == NULL || !mha_visibility_is_sane(&args->visible, args->queries)) {
        return MHA_ERR_ARG;
    }
    if (args->batch > 0 && args->queries > 0 && args->keys > 0) {
        const double n = (double)args->batch * (double)args->queries * (double)args->keys;

        if (args->scores == NULL || args->out == NULL) {
            return MHA_ERR_ARG;
        }
        mha_parallel_for(args->batch, mha_threads_for(args->batch, 20.0 * n), run_item, &job);
    }
    return mha_interrupt_status();
}
