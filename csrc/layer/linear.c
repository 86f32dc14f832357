/*
 * linear.c: y = x W^T + bias with W packed (linear_pack.c) into the panels that the product reads, or in rows, from
 * which each task packs a panel at a time.
 *
 * Blocking: the product walks the depth in blocks of MHA_LINEAR_DEPTH.  So the depth block of one panel
 * and that of a task's rows of x stay in the first or second cache while all these rows meet the panel.
 * Van Zee & van de Geijn 2015 (BLIS) explain the scheme.
 */
#include "linear.h"

#include "runtime/common.h"
#include "runtime/threads.h"
#include "runtime/threads_interrupt.h"

/*
 * Limits of a task's rows.  Their bytes in one depth block stay in the second cache beside a panel: 288 KiB of the 512
 * KiB or more that processors have.  Tasks of ROWS_MOST took 0.97 to 0.98 of the time of ROWS_USUAL (512 rows of 768
 * features, 16 x 37 of 512; AMD EPYC, family 25, model 17), but are made only where all threads have one.
 */
#define BLOCK_BYTES ((size_t)288 * 1024)
#define ROWS_USUAL ((size_t)192)
#define ROWS_MOST ((size_t)288)
/* A weight larger than this is rarely in the second cache: other data has been there since the last call. */
#define NEAR_BYTES ((size_t)512 * 1024)

/* As many rows, in whole register tiles, as fit, but not more than `most`. */
static size_t
rows_within(const mha_kernels *kernels, size_t in_features, size_t most)
{
    const size_t row_bytes = mha_max(mha_min(in_features, MHA_LINEAR_DEPTH), 1) * kernels->itemsize;
    const size_t rows = mha_min(BLOCK_BYTES / row_bytes, most) / kernels->tile_rows * kernels->tile_rows;

    return mha_max(rows, kernels->tile_rows);
}

size_t
mha_linear_most_rows(const mha_kernels *kernels, size_t in_features)
{
    return rows_within(kernels, in_features, ROWS_MOST);
}

/* Rows per task, for nearly equal tasks: a short last task would read the whole weight for its few rows. */
static size_t
task_rows(const mha_kernels *kernels, size_t in_features, size_t rows)
{
    const size_t for_all = mha_max(mha_ceil_div(rows, mha_threads_get()), ROWS_USUAL);
    const size_t block = rows_within(kernels, in_features, mha_min(for_all, ROWS_MOST));
    const size_t in_task = rows <= block ? rows : mha_ceil_div(rows, mha_ceil_div(rows, block));

    return mha_max(mha_round_up(in_task, kernels->tile_rows), kernels->tile_rows);
}

/* Unless rows are few, each panel of a weight that is not near is prefetched while rows meet the panel before it. */
static int
is_far(const mha_kernels *kernels, const mha_linear *linear, size_t rows)
{
    return rows >= MHA_LINEAR_FEW_ROWS &&
           linear->in_features > NEAR_BYTES / kernels->itemsize / mha_max(linear->out_features, 1);
}

void
mha_linear_apply(const mha_kernels *kernels, const mha_linear *linear, const mha_linear_rows *rows)
{
    const mha_scalar one = mha_scalar_from(kernels, 1);
    const int in_rows = linear->layout == MHA_WEIGHT_ROWS;
    const mha_right right = {
        .data = linear->weight,
        .layout = in_rows ? MHA_COLUMNS : MHA_PANELS,
        .stride = linear->row_stride,
        .far = !in_rows && is_far(kernels, linear, rows->rows),
        .panel = in_rows ? rows->panel : NULL,
    };
    const mha_product product = {
        .rows = rows->rows,
        .cols = linear->out_features,
        .depth = linear->in_features,
        .depth_block = MHA_LINEAR_DEPTH,
        .a = rows->x,
        .a_row = rows->x_row_stride,
        .a_step = 1,
        .b = right,
        .c = rows->y,
        .c_row = rows->y_row_stride,
        .scale = &one,
        .bias = linear->bias,
    };
    if (rows->rows > 0 && linear->out_features > 0) {
        kernels->product(&product);
    }
}

size_t
mha_linear_panel_bytes(const mha_kernels *kernels, const mha_linear *linear)
{
    const size_t bytes = kernels->panel_width * mha_min(linear->in_features, MHA_LINEAR_DEPTH) * kernels->itemsize;

    return linear->layout == MHA_WEIGHT_ROWS ? mha_round_up(bytes, MHA_ALIGN) : 0;
}

/* Evenly spaced rows of x, shared among threads by blocks of them. */
typedef struct {
    const mha_kernels *kernels;
    const mha_linear *linear;
    const mha_linear_rows *all;
    size_t task_rows;
} linear_job;

static void
run_task(void *context, size_t task, unsigned worker)
{
    const linear_job *job = context;
    const ptrdiff_t first = (ptrdiff_t)(task * job->task_rows), itemsize = (ptrdiff_t)job->kernels->itemsize;
    mha_linear_rows rows = *job->all;

    rows.rows = mha_min(job->task_rows, rows.rows - (size_t)first);
    rows.x = (const char *)rows.x + first * rows.x_row_stride * itemsize;
    rows.y = (char *)rows.y + first * rows.y_row_stride * itemsize;
    if (rows.panel != NULL) {
        rows.panel = (char *)rows.panel + worker * mha_linear_panel_bytes(job->kernels, job->linear);
    }
    mha_linear_apply(job->kernels, job->linear, &rows);
}

double
mha_linear_work(const mha_linear *linear, size_t batch, size_t rows)
{
    const double weight = (double)linear->in_features * (double)linear->out_features;

    return linear->weight == NULL ? 0 : (double)batch * (double)rows * weight;
}

mha_linear_plan
mha_linear_plan_for(const mha_kernels *kernels, const mha_linear *linear, size_t rows)
{
    mha_linear_plan plan = {.task_rows = 1, .n_workers = 1};

    if (linear->weight != NULL && linear->out_features > 0) { /* rows without numbers may have any count */
        plan.task_rows = task_rows(kernels, linear->in_features, rows);
        plan.n_tasks = mha_ceil_div(rows, plan.task_rows);
        plan.work = mha_linear_work(linear, 1, rows);
        plan.n_workers = mha_threads_for(plan.n_tasks, plan.work);
    }
    return plan;
}

void
mha_linear_run(const mha_kernels *kernels, const mha_linear *linear, const mha_linear_rows *rows,
               const mha_linear_plan *plan)
{
    linear_job job = {kernels, linear, rows, plan->task_rows};
    const size_t n_tasks = mha_min(plan->n_tasks, mha_ceil_div(rows->rows, plan->task_rows));

    mha_parallel_for(n_tasks, plan->n_workers, run_task, &job);
}

mha_status
mha_linear_project(const mha_kernels *kernels, const mha_linear *linear, mha_linear_rows *rows)
{
    const mha_linear_plan plan = mha_linear_plan_for(kernels, linear, rows->rows);
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    mha_status status = MHA_OK;

    (void)mha_scratch_add(&scratch, plan.n_workers, mha_linear_panel_bytes(kernels, linear));
    if (scratch.total_bytes > 0) { /* a packed weight needs no memory */
        status = mha_scratch_open(&scratch);
        rows->panel = scratch.base;
    }
    if (status == MHA_OK) {
        mha_linear_run(kernels, linear, rows, &plan);
        mha_scratch_close(&scratch);
        status = mha_interrupt_status();
    }
    return status;
}

mha_status
mha_linear_forward(mha_dtype dtype, const mha_linear *linear, size_t rows, const void *x, ptrdiff_t x_row_stride,
                   void *y, ptrdiff_t y_row_stride)
{
    const mha_kernels *kernels = mha_kernels_for(dtype);
    mha_linear_rows all = {rows, x, x_row_stride, y, y_row_stride, NULL};

    if (kernels == NULL || linear == NULL || linear->weight == NULL || /* no rows, or rows without numbers, need none */
        (x == NULL && rows > 0 && linear->in_features > 0) || (y == NULL && rows > 0 && linear->out_features > 0)) {
        return MHA_ERR_ARG;
    }
    const mha_status status = mha_linear_check(kernels, linear);
    return status == MHA_OK ? mha_linear_project(kernels, linear, &all) : status;
}
