/*
 * linear_pack.c: packs weights into the panels that the product reads: once for many calls (mha_linear_pack), or once
 * in a call, for weights that lie in rows and meet many rows of x.
 */
#include "linear.h"

#include "runtime/common.h"
#include "runtime/threads.h"

/* Packing one number of a weight, which is read and written once, costs about as much as so many multiply-adds. */
#define WORK_PER_NUMBER 16.0

static mha_status
packed_size(const mha_kernels *k, size_t out_features, size_t in_features, size_t *size_ret)
{
    size_t size = in_features;

    if (k == NULL || size_ret == NULL) {
        return MHA_ERR_ARG;
    }
    if (out_features > SIZE_MAX - k->panel_width ||
        mha_mul_size(&size, mha_round_up(out_features, k->panel_width)) < 0 || size > SIZE_MAX / 2 / sizeof(double)) {
        return MHA_ERR_SIZE;
    }
    *size_ret = size;
    return MHA_OK;
}

mha_status
mha_linear_packed_size(mha_dtype dtype, size_t out_features, size_t in_features, size_t *size_ret, size_t *width_ret)
{
    const mha_kernels *k = mha_kernels_for(dtype);
    const mha_status status = width_ret == NULL ? MHA_ERR_ARG : packed_size(k, out_features, in_features, size_ret);

    if (status == MHA_OK) {
        *width_ret = k->panel_width;
    }
    return status;
}

/* Packs one panel.  Of a last panel that is not full, pack_panels writes only the whole vectors that hold rows. */
static void
pack_panel(const mha_kernels *k, const mha_linear *linear, size_t panel, char *packed)
{
    const size_t width = k->panel_width, first = panel * width, columns = mha_min(linear->out_features - first, width);
    const char *source = (const char *)linear->weight + (ptrdiff_t)first * linear->row_stride * (ptrdiff_t)k->itemsize;
    char *to = packed + first * linear->in_features * k->itemsize;

    if (columns + k->lanes <= width) { /* clears the rest, so that equal weights give equal bytes */
        k->fill(width * linear->in_features, 0, to);
    }
    k->pack_panels(source, linear->row_stride, 0, columns, linear->in_features, to);
}

mha_status
mha_linear_pack(mha_dtype dtype, size_t out_features, size_t in_features, const void *weight, ptrdiff_t row_stride,
                void *packed)
{
    const mha_kernels *k = mha_kernels_for(dtype);
    const mha_linear linear = {weight, NULL, out_features, in_features, MHA_WEIGHT_ROWS, row_stride, 0};
    size_t size;
    mha_status status = packed_size(k, out_features, in_features, &size);

    if (status == MHA_OK && size > 0 && (weight == NULL || packed == NULL)) {
        status = MHA_ERR_ARG;
    }
    for (size_t first = 0; status == MHA_OK && size > 0 && first < out_features; first += k->panel_width) {
        pack_panel(k, &linear, first / k->panel_width, packed);
    }
    return status;
}

/* --- For one call ------------------------------------------------------------------------------ */

void
mha_linear_pack_later(mha_linear_packing *packing, const mha_kernels *kernels, mha_linear *linear, mha_scratch *scratch)
{
    const size_t n_panels = mha_ceil_div(linear->out_features, kernels->panel_width);
    size_t panel_bytes = kernels->panel_width * kernels->itemsize;

    if (mha_mul_size(&panel_bytes, linear->in_features) < 0) {
        panel_bytes = SIZE_MAX; /* opening the memory will report it */
    }
    linear->layout = MHA_WEIGHT_PACKED;
    linear->panel_width = kernels->panel_width;
    packing->linears[packing->n] = linear;
    packing->at[packing->n++] = mha_scratch_add(scratch, n_panels, panel_bytes);
    packing->n_panels += n_panels;
}

typedef struct {
    const mha_linear_packing *packing;
    const mha_kernels *kernels;
    char *base;
} pack_job;

static void
pack_task(void *context, size_t panel, unsigned worker)
{
    const pack_job *job = context;
    const mha_linear_packing *packing = job->packing;
    size_t i = 0;

    (void)worker;
    for (size_t n; panel >= (n = mha_ceil_div(packing->linears[i]->out_features, job->kernels->panel_width)); i++) {
        panel -= n;
    }
    pack_panel(job->kernels, packing->linears[i], panel, job->base + packing->at[i]);
}

void
mha_linear_packing_run(const mha_linear_packing *packing, const mha_kernels *kernels, const mha_scratch *scratch)
{
    pack_job job = {packing, kernels, scratch->base};
    double numbers = 0;

    for (size_t i = 0; i < packing->n; i++) {
        numbers += (double)packing->linears[i]->out_features * (double)packing->linears[i]->in_features;
    }
    mha_parallel_for(packing->n_panels, mha_threads_for(packing->n_panels, WORK_PER_NUMBER * numbers), pack_task, &job);
    for (size_t i = 0; i < packing->n; i++) {
        packing->linears[i]->weight = scratch->base + packing->at[i];
    }
}
