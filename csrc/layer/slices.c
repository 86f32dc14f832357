/*
 * slices.c: mha_layer_forward: the layer's job (layer.c) for the batch as a whole, or for slices of it.
 *
 * The projected queries, keys and values of a large batch fill memory that is read again only when the last
 * item is done.  So one thread takes a few items at a time through all steps: their rows stay in its cache,
 * threads need not wait for each other between the steps, and a larger batch takes no more memory.  Rows do
 * not depend on their neighbours, so the results do not depend on how the batch is cut.
 */
#include "layer.h"

#include "runtime/common.h"
#include "runtime/threads.h"
#include "runtime/threads_interrupt.h"

/*
 * The bytes that the steps hand each other for one slice: as many as the smallest second-level caches hold.  (Larger
 * caches gain nothing: with 2 MiB, slices of 1 MiB took 1.00 to 1.03 of the time, 2 MiB 1.00 to 1.15, 256 KiB as long.)
 */
#define SLICE_BYTES ((size_t)512 * 1024)
/* The least rows of a slice: as many as one pass over the weights projects together in any case. */
#define SLICE_ROWS ((size_t)192)
/* Slices for each thread: with fewer, a long one at the end would leave the other threads waiting. */
#define SLICES_PER_WORKER ((size_t)4)

/* Numbers that one item leaves behind between the steps. */
static size_t
numbers_per_item(const mha_layer_job *job)
{
    const mha_layer_args *a = job->args;
    size_t n = a->W_o.weight != NULL ? a->attention.queries * a->W_o.in_features : 0;

    for (int i = 0; i < MHA_N_INPUTS; i++) {
        n += job->inputs[i].moves ? job->inputs[i].rows * job->inputs[i].features : 0;
    }
    return n;
}

static void
cut(mha_layer_call *call)
{
    const mha_layer_job *whole = &call->whole;
    const mha_attention_args *a = &whole->args->attention;
    const size_t bytes = numbers_per_item(whole) * whole->kernels->itemsize;

    call->slice_items = a->batch;
    call->n_slices = call->n_workers = 1;
    /* The same as mha_layer_work, from what is known here. */
    call->work =
        whole->work + whole->attention_job.problem.work + mha_linear_work(&whole->args->W_o, a->batch, a->queries);
    if (whole->attention_job.plan.n_tasks == 0 || whole->scratch.total_bytes == SIZE_MAX || bytes == 0 ||
        a->batch * bytes < 2 * SLICE_BYTES) {
        return; /* SIZE_MAX: the sizes overflowed, which opening the memory will report */
    }
    const size_t workers = mha_threads_for(a->batch, call->work);
    const size_t least = mha_ceil_div(SLICE_ROWS, a->queries);
    size_t items = mha_max(SLICE_BYTES / bytes, least);
    if (workers > 1) {
        items = mha_min(items, a->batch / (workers * SLICES_PER_WORKER));
    }
    if (items >= least && 2 * items <= a->batch) {
        call->slice_items = items;
        call->n_slices = mha_ceil_div(a->batch, items);
        call->n_workers = mha_threads_for(call->n_slices, call->work);
    }
}

/* The address `numbers` numbers behind `data`; NULL stays NULL. */
static void *
advanced(const mha_layer_job *job, const void *data, ptrdiff_t numbers)
{
    return data == NULL ? NULL : (char *)(uintptr_t)data + numbers * (ptrdiff_t)job->kernels->itemsize;
}

/* The mask from item `first` on. */
static mha_mask
mask_from(mha_mask mask, size_t first, size_t itemsize)
{
    if (mask.data != NULL) {
        mask.data = (const char *)mask.data + (ptrdiff_t)first * mask.batch_stride * (ptrdiff_t)itemsize;
    }
    return mask;
}

/* Attention of at most `most` items of the batch, from item `first` on. */
static void
attention_of(const mha_layer_job *whole, size_t first, size_t most, mha_attention_args *part)
{
    const mha_attention_args *a = &whole->args->attention;
    const ptrdiff_t stats = (ptrdiff_t)(first * a->queries * a->heads);

    part->batch = mha_min(most, a->batch - first);
    part->first_item = a->first_item + first;
    if (a->visible.valid_lens != NULL) {
        part->visible.valid_lens += first * a->visible.lens_per_batch;
    }
    part->keep_mask = mask_from(a->keep_mask, first, 1);
    part->bias = mask_from(a->bias, first, whole->kernels->itemsize);
    part->row_max = advanced(whole, a->row_max, stats);
    part->row_sum = advanced(whole, a->row_sum, stats);
    part->lse = advanced(whole, a->lse, stats);
    part->weights = advanced(whole, a->weights, stats * (ptrdiff_t)a->keys);
}

/* Arguments of a call for these items. */
static mha_layer_args
items_of(const mha_layer_job *whole, size_t first, size_t most)
{
    const mha_layer_args *a = whole->args;
    const size_t q_rows = first * a->attention.queries;
    const size_t context = mha_layer_context_features(a, whole->inputs[MHA_VALUES].features);
    const size_t out_features = a->W_o.weight != NULL ? a->W_o.out_features : context;
    mha_layer_args part = *a;

    attention_of(whole, first, most, &part.attention);
    for (int i = 0; i < MHA_N_INPUTS; i++) {
        const mha_layer_path *in = &whole->inputs[i];
        mha_layer_input *of = &part.inputs[i];
        const ptrdiff_t angles = (ptrdiff_t)first * of->turn.batch_stride;

        of->rows.data = advanced(whole, of->rows.data, (ptrdiff_t)first * of->rows.batch_stride);
        of->turn.cos = advanced(whole, of->turn.cos, angles);
        of->turn.sin = advanced(whole, of->turn.sin, angles);
        of->projected = advanced(whole, of->projected, (ptrdiff_t)(first * in->rows * in->features));
    }
    part.out = advanced(whole, a->out, (ptrdiff_t)(q_rows * out_features));
    part.context = advanced(whole, a->context, (ptrdiff_t)(q_rows * context));
    return part;
}

mha_status
mha_layer_slice_plan(const mha_layer_call *call, size_t slice, mha_layer_args *args, mha_layer_job *job)
{
    const size_t first = slice * call->slice_items;

    *args = items_of(&call->whole, first, call->slice_items);
    return mha_layer_plan(job, call->whole.kernels, args, MHA_PASS_IN_TASK);
}

/* Bytes that suffice for any slice; SIZE_MAX if they overflow. */
static size_t
slice_bytes(const mha_layer_call *call)
{
    size_t most = call->n_slices == 1 ? call->whole.scratch.total_bytes : 0;

    /* Only the last slice differs: it is smaller, and so may go another way and need more of some memory. */
    for (size_t slice = 0; call->n_slices > 1 && slice < call->n_slices; slice += call->n_slices - 1) {
        mha_layer_args args;
        mha_layer_job job;
        const mha_status status = mha_layer_slice_plan(call, slice, &args, &job);

        most = mha_max(most, status == MHA_OK ? job.scratch.total_bytes : SIZE_MAX);
    }
    return most;
}

static void
run_slice(void *context, size_t slice, unsigned worker)
{
    const mha_layer_call *call = context;
    mha_layer_args args;
    mha_layer_job job;
    const mha_status status = mha_layer_slice_plan(call, slice, &args, &job);

    (void)status; /* cannot fail: slice_bytes has planned these sizes */
    MHA_ASSERT(status == MHA_OK && job.scratch.total_bytes <= call->slice_bytes);
    job.scratch.base = call->scratch.base + call->slices_at + worker * call->slice_bytes;
    mha_layer_run(&job);
}

/*
 * The most tasks that may each read a weight in rows.  (In slices, whose tasks take turns at the weights, a layer of
 * 64 x 128 rows of 256 features took 1.06 of the time when each task read its weights in rows.)
 */
#define MOST_READS ((size_t)3)

/* Each task would read a weight in rows: if too many tasks read one of them, the call packs all weights in rows. */
static void
pack_later(mha_layer_call *call)
{
    mha_layer_args *a = &call->args;
    size_t most = 0;

    for (int i = 0; i < 4; i++) {
        const mha_linear_plan *plan = i < MHA_N_INPUTS ? &call->whole.inputs[i].plan : &call->whole.output;
        most = mha_linear_in_rows(mha_layer_linear(a, i)) ? mha_max(most, plan->n_tasks) : most;
    }
    call->packing = (mha_linear_packing){.n = 0};
    for (int i = 0; i < 4 && most > MOST_READS; i++) {
        mha_linear *linear = i < MHA_N_INPUTS ? &a->inputs[i].W : &a->W_o;

        if (mha_linear_in_rows(linear)) {
            mha_linear_pack_later(&call->packing, call->whole.kernels, linear, &call->scratch);
        }
    }
}

mha_status
mha_layer_call_plan(mha_layer_call *call, const mha_layer_args *args)
{
    const mha_kernels *kernels = args == NULL ? NULL : mha_kernels_for(args->attention.dtype);

    if (kernels == NULL) {
        return MHA_ERR_ARG;
    }
    call->args = *args;
    mha_status status = mha_layer_plan(&call->whole, kernels, &call->args, MHA_PASS_FORWARD);

    for (int i = 0; i < 4 && status == MHA_OK; i++) {
        status = mha_linear_check(kernels, mha_layer_linear(args, i));
    }
    if (status == MHA_OK) {
        call->scratch = (mha_scratch)MHA_SCRATCH_EMPTY;
        pack_later(call);
        cut(call);
        call->slice_bytes = slice_bytes(call);
        call->slices_at = mha_scratch_add(&call->scratch, call->n_workers, call->slice_bytes);
    }
    return status;
}

static int
has_result(const mha_layer_args *a)
{
    const mha_linear *W_v = &a->inputs[MHA_VALUES].W;
    const size_t values = W_v->weight != NULL ? W_v->out_features : a->inputs[MHA_VALUES].size;
    const size_t features = a->W_o.weight != NULL ? a->W_o.out_features : values;

    return a->out != NULL || a->attention.batch == 0 || a->attention.queries == 0 || features == 0;
}

mha_status
mha_layer_forward(const mha_layer_args *args)
{
    mha_layer_call call;

    if (args == NULL || !mha_layer_has_inputs(args) || !has_result(args)) {
        return MHA_ERR_ARG;
    }
    mha_status status = mha_layer_call_plan(&call, args);
    if (status == MHA_OK) {
        status = mha_scratch_open(&call.scratch);
    }
    if (status != MHA_OK) {
        return status;
    }
    mha_linear_packing_run(&call.packing, call.whole.kernels, &call.scratch);
    if (call.n_slices > 1) {
        mha_parallel_for(call.n_slices, call.n_workers, run_slice, &call);
    } else { /* one slice, planned already, whose steps share the threads */
        call.whole.scratch.base = call.scratch.base + call.slices_at;
        mha_layer_run(&call.whole);
    }
    mha_scratch_close(&call.scratch);
    return mha_interrupt_status();
}
