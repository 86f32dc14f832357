/*
 * linear.h: projections over rows that may lie anywhere, for the layer driver; mha.h has the plain form.
 */
#ifndef MHA_LINEAR_H
#define MHA_LINEAR_H

#include "kernels/dispatch.h"
#include "mha.h"

/*
 * y[r] = W x[r] + bias for the `rows` rows of x, y_rows[r] saying where each result goes (NULL:
 * y + r*y_row_stride).  No allocation, no threads: the unit of work that callers run in parallel.
 */
typedef struct {
    size_t rows;
    const void *x;
    ptrdiff_t x_row_stride;
    void *y;
    ptrdiff_t y_row_stride;
    void *const *y_rows;
} mha_linear_rows;

void mha_linear_apply(const mha_kernels *kernels, const mha_linear *linear, const mha_linear_rows *rows);

/* How mha_linear_forward goes about so many rows: rows per task, tasks, multiply-adds. */
typedef struct {
    size_t block, n_tasks;
    double work;
} mha_linear_plan;

mha_linear_plan mha_linear_plan_for(const mha_kernels *kernels, const mha_linear *linear, size_t rows);

/* Rows per unit of work: enough to use a packed panel many times while they stay in cache. */
size_t mha_linear_block(const mha_kernels *kernels, size_t in_features);

/*
 * mha_linear_backward for arguments known to be right: allocates nothing, splits its work over threads.
 * grad_x_rows[r], if given, says where row r of grad_x goes.
 */
void mha_linear_grads_run(const mha_linear_grads *grads, void *const *grad_x_rows);

#endif
