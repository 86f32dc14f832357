/*
 * slices.c: mha_layer_forward: the layer's job (layer.c) for the batch as a whole, or for slices of it.
 *
 * Projected queries, keys and values of a large batch fill memory that is read again only when the last
 * item is done.  A few items at a time, through all steps by one thread, leave them in its cache, need no
 * meeting of threads between the steps, and take no more memory for a larger batch.  Rows do not depend on
 * their neighbours, so neither do the results on how the batch is cut.
 */
#include "layer.h"

#include "runtime/common.h"
#include "runtime/threads.h"
#include "runtime/threads_interrupt.h"

/*
 * What the steps hand each other for one slice: what the smallest second-level caches hold.  (Larger ones do not ask
 * for more: with 2 MiB, slices of 1 MiB took 1.00 to 1.03 of the time, of 2 MiB 1.00 to 1.15, of 256 KiB as long.)
 */
#define SLICE_BYTES ((size_t)512 * 1024)
/* The least rows of a slice: as many as one pass over the weights projects together in any case. */
#define SLICE_ROWS ((size_t)192)
/* Slices for each thread, or a long one at the end leaves the others waiting. */
#define SLICES_PER_WORKER ((size_t)4)

/* Numbers that one item leaves behind between the steps. */
static size_t
numbers_per_item(const mha_layer_job *job)
{
    const mha_layer_args *a = job->args;
    size_t n = a->W_o.weight != NULL ? a->queries * a->W_o.in_features : 0;

    for (int i = 0; i < MHA_N_INPUTS; i++) {
        n += job->inputs[i].linear->weight != NULL ? job->inputs[i].rows * job->inputs[i].features : 0;
    }
    return n;
}

mha_layer_slices
mha_layer_slices_for(const mha_layer_job *whole)
{
    const mha_layer_args *a = whole->args;
    mha_layer_slices slices = {.items = a->batch, .n = 1, .n_workers = 1};
    const size_t bytes = numbers_per_item(whole) * whole->kernels->itemsize;

    /* What mha_layer_work says, from what is known here. */
    slices.work = whole->work + whole->plan.work + mha_linear_work(&a->W_o, a->batch, a->queries);
    if (whole->plan.n_tasks == 0 || whole->scratch.total_bytes == SIZE_MAX || bytes == 0 ||
        a->batch * bytes < 2 * SLICE_BYTES) {
        return slices; /* the second: sizes that overflow, which opening that memory will say */
    }
    const size_t workers = mha_threads_for(a->batch, slices.work);
    const size_t least = mha_ceil_div(SLICE_ROWS, a->queries);
    size_t items = mha_max(SLICE_BYTES / bytes, least);
    if (workers > 1) {
        items = mha_min(items, a->batch / (workers * SLICES_PER_WORKER));
    }
    if (items >= least && 2 * items <= a->batch) {
        slices.items = items;
        slices.n = mha_ceil_div(a->batch, items);
        slices.n_workers = mha_threads_for(slices.n, slices.work);
    }
    return slices;
}

/* `numbers` numbers further; NULL stays NULL. */
static void *
advanced(const mha_layer_job *job, const void *data, ptrdiff_t numbers)
{
    return data == NULL ? NULL : (char *)(uintptr_t)data + numbers * (ptrdiff_t)job->kernels->itemsize;
}

mha_layer_args
mha_layer_items(const mha_layer_job *whole, size_t first, size_t most)
{
    const mha_layer_args *a = whole->args;
    const mha_layer_input *in = whole->inputs;
    const size_t q_rows = first * a->queries, k_rows = first * a->keys, values = in[MHA_VALUES].features;
    const ptrdiff_t stats = (ptrdiff_t)(q_rows * a->num_heads), context = (ptrdiff_t)(q_rows * values);
    const size_t out_features = a->W_o.weight != NULL ? a->W_o.out_features : values;
    mha_operand *rows[MHA_N_INPUTS];
    mha_layer_args part = *a;

    part.batch = mha_min(most, a->batch - first);
    rows[MHA_QUERIES] = &part.query_rows;
    rows[MHA_KEYS] = &part.key_rows;
    rows[MHA_VALUES] = &part.value_rows;
    for (int i = 0; i < MHA_N_INPUTS; i++) {
        rows[i]->data = advanced(whole, rows[i]->data, (ptrdiff_t)first * rows[i]->batch_stride);
    }
    if (a->visible.valid_lens != NULL) {
        part.visible.valid_lens += first * a->visible.lens_per_batch;
    }
    part.out = advanced(whole, a->out, (ptrdiff_t)(q_rows * out_features));
    part.q_projected = advanced(whole, a->q_projected, (ptrdiff_t)(q_rows * in[MHA_QUERIES].features));
    part.k_projected = advanced(whole, a->k_projected, (ptrdiff_t)(k_rows * in[MHA_KEYS].features));
    part.v_projected = advanced(whole, a->v_projected, (ptrdiff_t)(k_rows * values));
    part.context = advanced(whole, a->context, context);
    part.row_max = advanced(whole, a->row_max, stats);
    part.row_sum = advanced(whole, a->row_sum, stats);
    part.weights = advanced(whole, a->weights, stats * (ptrdiff_t)a->keys);
    return part;
}

size_t
mha_layer_slice_bytes(const mha_layer_job *whole, const mha_layer_slices *slices)
{
    size_t most = slices->n == 1 ? whole->scratch.total_bytes : 0;

    /* All slices are alike but for the last: a smaller one, which may go another way and need more of something. */
    for (size_t slice = 0; slices->n > 1 && slice < slices->n; slice += slices->n - 1) {
        const mha_layer_args args = mha_layer_items(whole, slice * slices->items, slices->items);
        mha_layer_job job;
        const mha_status status = mha_layer_plan(&job, &args, MHA_PASS_IN_TASK);

        most = mha_max(most, status == MHA_OK ? job.scratch.total_bytes : SIZE_MAX);
    }
    return most;
}

typedef struct {
    mha_layer_job *whole;
    mha_layer_slices slices;
    size_t bytes; /* of scratch memory for one slice */
    char *memory;
} sliced_call;

static void
run_slice(void *context, size_t slice, unsigned worker)
{
    const sliced_call *call = context;
    const mha_layer_args args = mha_layer_items(call->whole, slice * call->slices.items, call->slices.items);
    mha_layer_job job;
    const mha_status status = mha_layer_plan(&job, &args, MHA_PASS_IN_TASK);

    (void)status; /* sizes that were planned before: see mha_layer_slice_bytes */
    MHA_ASSERT(status == MHA_OK && job.scratch.total_bytes <= call->bytes);
    job.attention.first_item = slice * call->slices.items;
    job.scratch.base = call->memory + worker * call->bytes;
    mha_layer_run(&job);
}

/* A call that is not cut is one slice, planned already, whose steps share the threads. */
static void
run_slices(sliced_call *call)
{
    if (call->slices.n > 1) {
        mha_parallel_for(call->slices.n, call->slices.n_workers, run_slice, call);
    } else {
        call->whole->scratch.base = call->memory;
        mha_layer_run(call->whole);
    }
}

/* Whether a * b > most, whatever a * b wraps to. */
static int
exceeds(size_t a, size_t b, size_t most)
{
    return mha_mul_size(&a, b) < 0 || a > most;
}

int
mha_layer_packs(const mha_layer_args *args, mha_layer_args *packed, mha_linear_packing *packing)
{
    const mha_linear *const linears[] = {&args->W_q, &args->W_k, &args->W_v, &args->W_o};
    const size_t rows[] = {args->queries, args->keys, args->keys, args->queries};
    const mha_kernels *k = mha_kernels_for(args->dtype);
    int packs = 0;

    for (int i = 0; i < 4 && k != NULL; i++) {
        packs = packs || exceeds(args->batch, rows[i], mha_linear_most_rows(k, linears[i]));
    }
    if (packs) {
        mha_linear *const of_packed[] = {&packed->W_q, &packed->W_k, &packed->W_v, &packed->W_o};

        *packed = *args;
        for (int i = 0; i < 4; i++) {
            if (mha_linear_in_rows(linears[i])) {
                mha_linear_pack_later(packing, of_packed[i]);
            }
        }
    }
    return packs;
}

mha_status
mha_layer_forward(const mha_layer_args *args)
{
    mha_linear_packing packing = {.n = 0};
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    mha_layer_args packed;
    mha_layer_job job;
    mha_status status;

    if (mha_layer_packs(args, &packed, &packing)) {
        args = &packed;
    }
    status = mha_layer_plan(&job, args, MHA_PASS_FORWARD);
    if (status != MHA_OK) {
        return status;
    }
    sliced_call call = {.whole = &job, .slices = mha_layer_slices_for(&job)};
    call.bytes = mha_layer_slice_bytes(&job, &call.slices);
    (void)mha_scratch_add(&scratch, call.slices.n_workers, call.bytes);
    mha_linear_packing_plan(&packing, job.kernels, &scratch);
    status = mha_scratch_open(&scratch);
    if (status == MHA_OK) {
        call.memory = scratch.base;
        mha_linear_packing_run(&packing, job.kernels, &scratch);
        run_slices(&call);
        mha_scratch_close(&scratch);
        status = mha_interrupt_status();
    }
    return status;
}
