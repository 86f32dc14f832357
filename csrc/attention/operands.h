/*
 * operands.h: where numbers lie: those of operands and results, of masks, and of rows in dense (B,H,Q) arrays.
 */
#ifndef MHA_OPERANDS_H
#define MHA_OPERANDS_H

#include "walk.h"

/* Address of element (item, head, row, 0) of a result, and of an operand. */
MHA_INLINE char *
mha_result_at(const mha_kernels *kernels, const mha_result *x, size_t item, size_t head, size_t row)
{
    const ptrdiff_t offset =
        (ptrdiff_t)item * x->batch_stride + (ptrdiff_t)head * x->head_stride + (ptrdiff_t)row * x->row_stride;
    return (char *)x->data + offset * (ptrdiff_t)kernels->itemsize;
}

MHA_INLINE const char *
mha_operand_at(const mha_kernels *kernels, const mha_operand *x, size_t item, size_t head, size_t row)
{
    const mha_result same = {(void *)(uintptr_t)x->data, x->batch_stride, x->head_stride, x->row_stride};

    return mha_result_at(kernels, &same, item, head, row);
}

/* Address of the mask's element for (row of the tile, key). */
MHA_INLINE const char *
mha_mask_at(const mha_mask *mask, size_t itemsize, const mha_rows *tile, size_t row, size_t key)
{
    const ptrdiff_t offset = (ptrdiff_t)tile->item * mask->batch_stride + (ptrdiff_t)tile->head * mask->head_stride +
                             (ptrdiff_t)(tile->query + row) * mask->query_stride + (ptrdiff_t)key * mask->key_stride;
    return (const char *)mask->data + offset * (ptrdiff_t)itemsize;
}

/* Number of the first of these rows in dense (B,H,Q) arrays. */
MHA_INLINE size_t
mha_row_index(const mha_problem *problem, const mha_rows *rows)
{
    return (rows->item * problem->args->heads + rows->head) * problem->args->queries + rows->query;
}

/* Row `row` of these rows in args->weights. */
MHA_INLINE char *
mha_weights_at(const mha_problem *problem, const mha_rows *rows, size_t row)
{
    const size_t row_bytes = problem->args->keys * problem->kernels->itemsize;

    return (char *)problem->args->weights + (mha_row_index(problem, rows) + row) * row_bytes;
}

#endif
