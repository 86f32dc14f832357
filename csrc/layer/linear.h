/*
 * linear.h: projections over rows that may lie anywhere, for the layer driver; mha.h has the plain form.
 */
#ifndef MHA_LINEAR_H
#define MHA_LINEAR_H

#include "kernels/dispatch.h"
#include "mha.h"
#include "runtime/common.h"
#include "runtime/scratch.h"

/* Steps of the depth multiplied at a time: a panel of so many, 64 KiB, comes from the second-level cache in time. */
#define MHA_LINEAR_DEPTH ((size_t)256)

/* So few rows are not worth a copy of a right side, or a prefetch. */
#define MHA_LINEAR_FEW_ROWS ((size_t)48)

/*
 * y[r] = W x[r] + bias for the `rows` rows of x, y_rows[r] saying where each result goes (NULL:
 * y + r*y_row_stride).  No allocation, no threads: the unit of work that callers run in parallel.
 * `panel` is aligned room for mha_linear_panel_bytes, which are 0 but for a weight in rows.
 */
typedef struct {
    size_t rows;
    const void *x;
    ptrdiff_t x_row_stride;
    void *y;
    ptrdiff_t y_row_stride;
    void *const *y_rows;
    void *panel;
} mha_linear_rows;

void mha_linear_apply(const mha_kernels *kernels, const mha_linear *linear, const mha_linear_rows *rows);
size_t mha_linear_panel_bytes(const mha_kernels *kernels, const mha_linear *linear);

/* How so many rows are split over threads. */
typedef struct {
    size_t task_rows, n_tasks;
    double work; /* multiply-adds */
    unsigned n_workers;
} mha_linear_plan;

mha_linear_plan mha_linear_plan_for(const mha_kernels *kernels, const mha_linear *linear, size_t rows);

/* mha_linear_apply so split, of at most as many rows; at rows->panel are the panels of all workers of the plan. */
void mha_linear_run(const mha_kernels *kernels, const mha_linear *linear, const mha_linear_rows *rows,
                    const mha_linear_plan *plan);

/* The most rows of a task, of so many numbers: a packed panel serves many, and they stay in cache meanwhile. */
size_t mha_linear_most_rows(const mha_kernels *kernels, size_t in_features);

MHA_INLINE int
mha_linear_in_rows(const mha_linear *linear)
{
    return linear->weight != NULL && linear->layout == MHA_WEIGHT_ROWS;
}

/* Weights in rows, up to four, that a call packs for itself: planned together, then packed by all threads. */
typedef struct {
    mha_linear *linears[4];
    size_t at[4], n, n_panels;
} mha_linear_packing;

/* From now on *linear counts as packed, but has its numbers only after mha_linear_packing_run. */
void mha_linear_pack_later(mha_linear_packing *packing, const mha_kernels *kernels, mha_linear *linear,
                           mha_scratch *scratch);
void mha_linear_packing_run(const mha_linear_packing *packing, const mha_kernels *kernels, const mha_scratch *scratch);

/* Memory in which products of gradients pack what they would walk with long strides: a part for each worker. */
typedef struct {
    size_t bytes; /* of one part */
    unsigned n_workers;
    char *memory;
} mha_linear_room;

/* Makes room for these gradients too. */
void mha_linear_grads_plan(const mha_kernels *kernels, const mha_linear_grads *grads, mha_linear_room *room);

/*
 * mha_linear_backward for arguments known to be right: allocates nothing, splits its work over threads.
 * grad_x_rows[r], if given, says where row r of grad_x goes.
 */
void mha_linear_grads_run(const mha_linear_grads *grads, void *const *grad_x_rows, const mha_linear_room *room);

#endif
