/*
 * linear_append.c: new rows of a decoder's keys or values into their places in its cache, projected on the way.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "linear.h"

#include "attention/rows.h"
#include "runtime/threads_interrupt.h"

#include <string.h>

/* What all steps of one call share. */
typedef struct {
    const mha_append *append;
    const mha_kernels *kernels;
    size_t in_bytes, out_bytes; /* of a row */
    size_t n_rows;
} append_job;

static char *
place_of(const append_job *job, size_t item, size_t row)
{
    const mha_append *a = job->append;
    const size_t before = (size_t)a->before[item * a->before_step];

    return (char *)a->cache + (item * a->room + before + row) * job->out_bytes;
}

/* To their places, those that count: rows that lie side by side, or, where that is NULL, those of x. */
static void
copy_rows(const append_job *job, const char *made)
{
    const mha_append *a = job->append;

    for (size_t b = 0; b < a->batch; b++) {
        for (size_t t = 0; t < (size_t)a->counts[b * a->counts_step]; t++) {
            const char *row = made == NULL ? mha_operand_at(job->kernels, &a->x, b, 0, t)
                                           : made + (b * a->rows + t) * job->out_bytes;
            memcpy(place_of(job, b, t), row, job->out_bytes);
        }
    }
}

/* One new row of each item, behind as many, or rows of one item: both sides lie evenly, and nothing is copied. */
static mha_status
project_in_place(const append_job *job)
{
    const mha_append *a = job->append;
    const int one_item = a->batch == 1;
    const ptrdiff_t apart = (ptrdiff_t)a->linear.out_features * (ptrdiff_t)(one_item ? 1 : a->room);

    return mha_linear_forward(a->dtype, &a->linear, job->n_rows, a->x.data,
                              one_item ? a->x.row_stride : a->x.batch_stride, place_of(job, 0, 0), apart);
}

static mha_status
project_and_copy(const append_job *job)
{
    const mha_append *a = job->append;
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    mha_linear_call call;
    mha_linear_call_plan(&call, job->kernels, &a->linear, job->n_rows, &scratch);
    const size_t x_at = mha_scratch_add(&scratch, job->n_rows, job->in_bytes);
    const size_t y_at = mha_scratch_add(&scratch, job->n_rows, job->out_bytes);
    const mha_status status = mha_scratch_open(&scratch);

    if (status != MHA_OK) {
        return status;
    }
    const mha_linear_rows rows = {job->n_rows, scratch.base + x_at, (ptrdiff_t)a->in_features, scratch.base + y_at,
                                  (ptrdiff_t)a->linear.out_features, NULL, NULL};
    for (size_t r = 0; r < job->n_rows; r++) {
        const char *row = mha_operand_at(job->kernels, &a->x, r / a->rows, 0, r % a->rows);
        memcpy(scratch.base + x_at + r * job->in_bytes, row, job->in_bytes);
    }
    mha_linear_call_run(&call, rows, &scratch);
    copy_rows(job, scratch.base + y_at);
    mha_scratch_close(&scratch);
    return mha_interrupt_status();
}

mha_status
mha_linear_append(const mha_append *append)
{
    const mha_kernels *kernels = mha_kernels_for(append->dtype);
    const int projects = append->linear.weight != NULL;
    size_t n_rows = append->batch;

    if (kernels == NULL || (projects && append->linear.in_features != append->in_features)) {
        return MHA_ERR_ARG;
    }
    if (mha_mul_size(&n_rows, append->rows) < 0) {
        return MHA_ERR_SIZE;
    }
    const append_job job = {
        .append = append,
        .kernels = kernels,
        .in_bytes = append->in_features * kernels->itemsize,
        .out_bytes = (projects ? append->linear.out_features : append->in_features) * kernels->itemsize,
        .n_rows = n_rows,
    };
    if (!projects) {
        copy_rows(&job, NULL);
        return MHA_OK;
    }
    const int same = (append->before_step == 0 || append->batch == 1) && append->counts_step == 0 &&
                     (size_t)append->counts[0] == append->rows;
    return same && (append->rows == 1 || append->batch == 1) ? project_in_place(&job) : project_and_copy(&job);
}
