/*
 * linear_backward.c: gradients of y = x W^T + bias: grad_x = G W, grad_W = G^T x, grad_bias = column sums
 * of G, where G is the gradient of y.  Both products read their right side as it lies in memory.
 */
#include "runtime/common.h"
#include "linear.h"
#include "runtime/threads.h"
#include "runtime/threads_interrupt.h"

#define DEPTH_BLOCK ((size_t)256)   /* as in linear.c */
#define WEIGHT_ROWS ((size_t)96)    /* rows of grad_W per task */

typedef struct {
    const mha_linear_grads *grads;
    const mha_kernels *kernels;
    void *const *grad_x_rows;
    size_t block;                   /* rows of grad_x per task */
    size_t n_input_tasks;
    mha_scalar one;
} grads_job;

static mha_product
plain_product(const grads_job *job)
{
    return (mha_product){.depth_block = DEPTH_BLOCK,
                         .b_group = (ptrdiff_t)job->kernels->panel_width,
                         .scale = &job->one};
}

/* Rows of grad_x = G W. */
static void
input_grads(const grads_job *job, size_t first, size_t rows)
{
    const mha_linear_grads *g = job->grads;
    const ptrdiff_t itemsize = (ptrdiff_t)job->kernels->itemsize;
    mha_product product = plain_product(job);

    product.rows = rows;
    product.cols = g->in_features;
    product.depth = g->out_features;
    product.a = (const char *)g->grad_y + (ptrdiff_t)first * g->grad_y_row_stride * itemsize;
    product.a_row = g->grad_y_row_stride;
    product.a_step = 1;
    product.b = g->weight;
    product.b_step = (ptrdiff_t)g->in_features;
    product.c = job->grad_x_rows != NULL ? NULL : (char *)g->grad_x + first * g->in_features * (size_t)itemsize;
    product.c_row = (ptrdiff_t)g->in_features;
    product.c_rows = job->grad_x_rows != NULL ? job->grad_x_rows + first : NULL;
    product.accumulate = g->add_to_grad_x;
    job->kernels->product(&product);
}

/* Rows of grad_W = G^T x, and the elements of grad_bias that belong to them. */
static void
weight_grads(const grads_job *job, size_t first, size_t rows)
{
    const mha_linear_grads *g = job->grads;
    const size_t itemsize = job->kernels->itemsize;
    const char *grad_y = (const char *)g->grad_y + first * itemsize;
    mha_product product = plain_product(job);

    if (g->grad_bias != NULL) {
        job->kernels->column_sums(g->rows, rows, grad_y, g->grad_y_row_stride, (char *)g->grad_bias + first * itemsize);
    }
    if (g->grad_weight == NULL) {
        return;
    }
    product.rows = rows;
    product.cols = g->in_features;
    product.depth = g->rows;
    product.a = grad_y;
    product.a_row = 1;
    product.a_step = g->grad_y_row_stride;
    product.b = g->x;
    product.b_step = g->x_row_stride;
    product.c = (char *)g->grad_weight + first * g->in_features * itemsize;
    product.c_row = (ptrdiff_t)g->in_features;
    job->kernels->product(&product);
}

static void
run_task(void *context, size_t task, unsigned worker)
{
    const grads_job *job = context;
    const mha_linear_grads *g = job->grads;

    (void)worker;
    if (task < job->n_input_tasks) {
        const size_t first = task * job->block;
        input_grads(job, first, mha_min(job->block, g->rows - first));
    } else {
        const size_t first = (task - job->n_input_tasks) * WEIGHT_ROWS;
        weight_grads(job, first, mha_min(WEIGHT_ROWS, g->out_features - first));
    }
}

void
mha_linear_grads_run(const mha_linear_grads *grads, void *const *grad_x_rows)
{
    grads_job job = {.grads = grads, .kernels = mha_kernels_for(grads->dtype), .grad_x_rows = grad_x_rows};
    const double work = (double)grads->rows * (double)grads->in_features * (double)grads->out_features;
    const int wants_weight = grads->grad_weight != NULL || grads->grad_bias != NULL;
    size_t n_tasks;

    job.one = mha_scalar_from(job.kernels, 1);
    job.block = mha_linear_block(job.kernels, grads->out_features);
    if (grads->grad_x != NULL && grads->in_features > 0) {
        job.n_input_tasks = mha_ceil_div(grads->rows, job.block);
    }
    n_tasks = job.n_input_tasks + (wants_weight ? mha_ceil_div(grads->out_features, WEIGHT_ROWS) : 0);
    mha_parallel_for(n_tasks, mha_threads_for(n_tasks, 2 * work), run_task, &job);
}

mha_status
mha_linear_backward(const mha_linear_grads *grads)
{
    if (mha_kernels_for(grads->dtype) == NULL || grads->grad_y == NULL || grads->x == NULL || grads->weight == NULL) {
        return MHA_ERR_ARG;
    }
    mha_linear_grads_run(grads, NULL);
    return mha_interrupt_status();
}
