/*
 * linear_append.c: writes new rows of a decoder's keys or values into its cache, projected and turned on the way.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "linear.h"

#include "attention/operands.h"
#include "runtime/threads_interrupt.h"
#include "turn.h"

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

/* Copies the rows of x that count side by side to `dense`; how many. */
static size_t
gather(const append_job *job, char *dense)
{
    const mha_append *a = job->append;
    size_t n = 0;

    for (size_t b = 0; b < a->batch; b++) {
        for (size_t t = 0; t < (size_t)a->counts[b * a->counts_step]; t++, n++) {
            memcpy(dense + n * job->in_bytes, mha_operand_at(job->kernels, &a->x, b, 0, t), job->in_bytes);
        }
    }
    return n;
}

/* Copies rows to their places in the cache: those of `dense`, or, if it is NULL, those of x. */
static void
spread(const append_job *job, const char *dense)
{
    const mha_append *a = job->append;
    size_t n = 0;

    for (size_t b = 0; b < a->batch; b++) {
        for (size_t t = 0; t < (size_t)a->counts[b * a->counts_step]; t++, n++) {
            memcpy(place_of(job, b, t),
                   dense != NULL ? dense + n * job->out_bytes : mha_operand_at(job->kernels, &a->x, b, 0, t),
                   job->out_bytes);
        }
    }
}

/* Turns the new rows where they lie now. */
static void
turn_rows(const append_job *job, size_t features)
{
    const mha_append *a = job->append;

    for (size_t b = 0; b < a->batch && a->turn.cos != NULL; b++) {
        for (size_t t = 0; t < (size_t)a->counts[b * a->counts_step]; t++) {
            mha_turn_row(a->dtype, &a->turn, b, t, features, place_of(job, b, t));
        }
    }
}

/* For one row of each item, behind equally many, or rows of one item: x and y are evenly spaced, nothing is copied. */
static mha_status
project_in_place(const append_job *job)
{
    const mha_append *a = job->append;
    const int one_item = a->batch == 1;
    mha_linear_rows rows = {
        .rows = job->n_rows,
        .x = a->x.data,
        .x_row_stride = one_item ? a->x.row_stride : a->x.batch_stride,
        .y = place_of(job, 0, 0),
        .y_row_stride = (ptrdiff_t)a->linear.out_features * (ptrdiff_t)(one_item ? 1 : a->room),
    };

    return mha_linear_project(job->kernels, &a->linear, &rows);
}

static mha_status
project_gathered(const append_job *job)
{
    const mha_append *a = job->append;
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    const mha_linear_plan plan = mha_linear_plan_for(job->kernels, &a->linear, job->n_rows);
    const size_t panel_bytes = mha_linear_panel_bytes(job->kernels, &a->linear);
    const size_t panels_at = mha_scratch_add(&scratch, plan.n_workers, panel_bytes);
    const size_t x_at = mha_scratch_add(&scratch, job->n_rows, job->in_bytes);
    const size_t y_at = mha_scratch_add(&scratch, job->n_rows, job->out_bytes);
    const mha_status status = mha_scratch_open(&scratch);

    if (status != MHA_OK) {
        return status;
    }
    mha_linear_rows rows = {
        .x = scratch.base + x_at,
        .x_row_stride = (ptrdiff_t)a->in_features,
        .y = scratch.base + y_at,
        .y_row_stride = (ptrdiff_t)a->linear.out_features,
        .panel = scratch.base + panels_at,
    };
    rows.rows = gather(job, scratch.base + x_at);
    mha_linear_run(job->kernels, &a->linear, &rows, &plan);
    spread(job, scratch.base + y_at);
    mha_scratch_close(&scratch);
    return mha_interrupt_status();
}

/* 1 if no item gets more rows than it has, or than there is room for. */
static int
counts_fit(const mha_append *a)
{
    int fit = a->before != NULL && a->counts != NULL;

    for (size_t b = 0; b < a->batch && fit; b++) {
        const int64_t before = a->before[b * a->before_step], more = a->counts[b * a->counts_step];

        fit = before >= 0 && more >= 0 && (uint64_t)more <= a->rows && (uint64_t)before <= a->room &&
              (uint64_t)more <= a->room - (uint64_t)before;
        if (a->before_step == 0 && a->counts_step == 0) {
            break; /* the same for all */
        }
    }
    return fit || a->batch == 0;
}

static mha_status
write_rows(const append_job *job, size_t features)
{
    const mha_append *a = job->append;
    const int same = (a->before_step == 0 || a->batch == 1) && a->counts_step == 0 && (size_t)a->counts[0] == a->rows;
    mha_status status = MHA_OK;

    if (a->linear.weight == NULL) {
        spread(job, NULL);
    } else {
        status = same && (a->rows == 1 || a->batch == 1) ? project_in_place(job) : project_gathered(job);
    }
    if (status == MHA_OK) {
        turn_rows(job, features);
    }
    return status;
}

mha_status
mha_linear_append(const mha_append *append)
{
    const mha_kernels *kernels = append == NULL ? NULL : mha_kernels_for(append->dtype);

    if (kernels == NULL) {
        return MHA_ERR_ARG;
    }
    const int projects = append->linear.weight != NULL;
    const size_t out_features = projects ? append->linear.out_features : append->in_features;
    size_t n_rows = append->batch;
    const mha_status status = mha_linear_check(kernels, &append->linear);

    if (status != MHA_OK) {
        return status;
    }
    if (mha_mul_size(&n_rows, append->rows) < 0) {
        return MHA_ERR_SIZE;
    }
    if ((projects && append->linear.in_features != append->in_features) || !counts_fit(append) ||
        !mha_turn_is_sane(&append->turn, out_features) ||
        (n_rows > 0 && append->in_features > 0 && append->x.data == NULL) ||
        (n_rows > 0 && out_features > 0 && append->cache == NULL)) {
        return MHA_ERR_ARG;
    }
    if (n_rows == 0 || out_features == 0) {
        return MHA_OK; /* rows without numbers may have any count */
    }
    const append_job job = {
        .append = append,
        .kernels = kernels,
        .in_bytes = append->in_features * kernels->itemsize,
        .out_bytes = out_features * kernels->itemsize,
        .n_rows = n_rows,
    };
    return write_rows(&job, out_features);
}
