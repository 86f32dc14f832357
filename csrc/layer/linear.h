/*
 * linear.h: projections over rows that may lie anywhere, for the layer driver; mha.h has the plain form.
 */
#ifndef MHA_LINEAR_H
#define MHA_LINEAR_H

#include "kernels/dispatch.h"
#include "mha.h"
#include "runtime/common.h"
#include "runtime/scratch.h"

/* Steps of a depth block: a panel of that many steps, 64 KiB, arrives from the second-level cache in time. */
#define MHA_LINEAR_DEPTH ((size_t)256)

/* With fewer rows than this, neither a copy of the right side nor a prefetch is worth while. */
#define MHA_LINEAR_FEW_ROWS ((size_t)48)

/*
 * y[r] = W x[r] + bias for the `rows` rows of x.  No allocation, no threads: the unit of work that callers run in
 * parallel. `panel` is aligned room of mha_linear_panel_bytes, which is 0 unless the weight lies in rows.
 */
typedef struct {
    size_t rows;
    const void *x;
    ptrdiff_t x_row_stride;
    void *y;
    ptrdiff_t y_row_stride;
    void *panel;
} mha_linear_rows;

/* MHA_OK, or why these kernels cannot take the weight, if there is one. */
MHA_INLINE mha_status
mha_linear_check(const mha_kernels *kernels, const mha_linear *linear)
{
    if (linear->weight == NULL || linear->layout == MHA_WEIGHT_ROWS) {
        return MHA_OK;
    }
    return linear->layout != MHA_WEIGHT_PACKED           ? MHA_ERR_ARG
           : linear->panel_width != kernels->panel_width ? MHA_ERR_ISA
                                                         : MHA_OK;
}

void mha_linear_apply(const mha_kernels *kernels, const mha_linear *linear, const mha_linear_rows *rows);
size_t mha_linear_panel_bytes(const mha_kernels *kernels, const mha_linear *linear);

/* How the rows of a projection are shared among threads. */
typedef struct {
    size_t task_rows, n_tasks;
    double work; /* multiply-adds */
    unsigned n_workers;
} mha_linear_plan;

mha_linear_plan mha_linear_plan_for(const mha_kernels *kernels, const mha_linear *linear, size_t rows);

/* mha_linear_apply, shared out by `plan`, which may be for more rows; rows->panel holds a panel for each of its
 * workers. */
void mha_linear_run(const mha_kernels *kernels, const mha_linear *linear, const mha_linear_rows *rows,
                    const mha_linear_plan *plan);

/* A whole projection as a call of its own: its threads and its memory. */
MHA_MUST_CHECK mha_status mha_linear_project(const mha_kernels *kernels, const mha_linear *linear,
                                             mha_linear_rows *rows);

/* The most rows, of in_features numbers, of a task: a packed panel serves many rows, which all stay in the cache. */
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

/* Plans the packing of *linear, which counts as packed from now on; mha_linear_packing_run packs its numbers. */
void mha_linear_pack_later(mha_linear_packing *packing, const mha_kernels *kernels, mha_linear *linear,
                           mha_scratch *scratch);
void mha_linear_packing_run(const mha_linear_packing *packing, const mha_kernels *kernels, const mha_scratch *scratch);

/* Memory, a part for each worker: products of gradients copy there what they would else read with long strides. */
typedef struct {
    size_t bytes; /* of one part */
    unsigned n_workers;
    char *memory;
} mha_linear_room;

/* Enlarges *room so that it suffices for these gradients too. */
void mha_linear_grads_plan(const mha_kernels *kernels, const mha_linear_grads *grads, mha_linear_room *room);

/* mha_linear_backward for arguments known to be right: allocates nothing, shares its work among threads. */
void mha_linear_grads_run(const mha_kernels *kernels, const mha_linear_grads *grads, const mha_linear_room *room);

#endif
