/*
 * layer.h: what the forward pass (layer.c, slices.c) and the backward pass (layer_backward.c) of a whole layer
 * share: its three inputs on their way to attention, and the attention problem between the projections.
 */
#ifndef MHA_LAYER_H
#define MHA_LAYER_H

#include "attention/job.h"
#include "linear.h"

/* Which rows of an item count: those of the interval that are marked; all of it if none is marked (NULL). */
typedef struct {
    mha_interval rows;
    const uint8_t *seen; /* of all rows of the item */
} mha_needed;

/* One input on its way to attention: rows of all items, projected, copied, or as they are. */
typedef struct {
    const mha_layer_input *given;
    const mha_needed *needed; /* the rows of each item; NULL: all */
    size_t rows;              /* per item */
    size_t features;          /* per row, where attention reads it */
    int moves;                /* its rows are moved to memory of their own before attention reads them */
    mha_linear_plan plan;     /* of the forward call */
    char *projected;          /* dense (B, rows, features), if rows are moved */
} mha_layer_path;

typedef struct {
    const mha_layer_args *args;
    const mha_kernels *kernels;
    mha_attention_args attention; /* those of `args`, with operands */
    mha_attention_args folded;    /* computed where heads share keys: see mha_fold_heads */
    mha_attention_job attention_job;
    mha_layer_path inputs[MHA_N_INPUTS];
    mha_needed *needed; /* of keys, item by item, and behind them those of values */
    uint8_t *seen;      /* (B, K): whether any query sees a key; only with a mask */
    size_t n_tasks;     /* of moving the inputs */
    double work;        /* multiply-adds of it */
    unsigned n_workers;
    mha_linear_plan output; /* of W_o */

    /* Scratch memory: first that of attention, then, from own_at on, the job's own. */
    mha_scratch scratch;
    size_t own_at;
    void *context;           /* the attention output */
    char *gathered, *panels; /* for each worker: needed rows, a weight's panel */
    size_t gathered_bytes, panel_bytes;
} mha_layer_job;

/* 1 if the rows of all items lie at one constant distance, also from the last row of an item to the next item. */
MHA_INLINE int
mha_layer_is_even(const mha_layer_job *job, const mha_layer_path *in, ptrdiff_t batch_stride, ptrdiff_t row_stride)
{
    return job->args->attention.batch == 1 || batch_stride == (ptrdiff_t)in->rows * row_stride;
}

/* Its projection number `which` of W_q, W_k, W_v, W_o. */
MHA_INLINE const mha_linear *
mha_layer_linear(const mha_layer_args *args, int which)
{
    return which < MHA_N_INPUTS ? &args->inputs[which].W : &args->W_o;
}

/* Heads of an input, as columns of what attention reads. */
MHA_INLINE size_t
mha_layer_heads(const mha_layer_args *args, int input)
{
    return input == MHA_QUERIES ? args->attention.heads : args->attention.kv_heads;
}

/* Features of what W_o is applied to, if the values have so many. */
MHA_INLINE size_t
mha_layer_context_features(const mha_layer_args *args, size_t value_features)
{
    return value_features / args->attention.kv_heads * args->attention.heads;
}

/* 1 if every input has an address, or no numbers. */
int mha_layer_has_inputs(const mha_layer_args *args);

/*
 * Fills in the sizes of the inputs and of the attention problem; MHA_ERR_ARG if they do not fit together.  `kernels`
 * are those of the whole call.
 */
MHA_MUST_CHECK mha_status mha_layer_describe(mha_layer_job *job, const mha_kernels *kernels,
                                             const mha_layer_args *args);

/* mha_layer_describe, then the plan of attention and all sizes of the forward call's scratch memory. */
MHA_MUST_CHECK mha_status mha_layer_plan(mha_layer_job *job, const mha_kernels *kernels, const mha_layer_args *args,
                                         mha_pass pass);

/* Runs all steps of a planned job whose scratch memory is there. */
void mha_layer_run(mha_layer_job *job);

/*
 * A planned call: the batch as a whole, or cut into slices, each of which is one task that takes all steps; and the
 * weights in rows that the call packs.
 */
typedef struct {
    mha_layer_job whole;
    mha_layer_args args; /* those of `whole`, with the weights packed */
    mha_linear_packing packing;
    size_t slice_items, n_slices;  /* n_slices is 1 if the batch is not cut */
    size_t slices_at, slice_bytes; /* where the workers' parts of scratch memory begin; bytes that any slice fits in */
    double work;                   /* multiply-adds of the whole call, roughly */
    unsigned n_workers;            /* for slices */
    mha_scratch scratch;
} mha_layer_call;

MHA_MUST_CHECK mha_status mha_layer_call_plan(mha_layer_call *call, const mha_layer_args *args);

/* Plans slice number `slice` as a job of its own; writes its arguments to *args. */
MHA_MUST_CHECK mha_status mha_layer_slice_plan(const mha_layer_call *call, size_t slice, mha_layer_args *args,
                                               mha_layer_job *job);

/*
 * needed.c.  Which rows of its inputs an item needs.  seen: room for a mark of each key, if there is a mask; NULL: it
 * is not looked at, and hides no row.
 */
void mha_layer_needed(const mha_layer_job *job, size_t item, uint8_t *seen, mha_needed needed[MHA_N_INPUTS]);

/* Takes memory for what find_needed finds: the rows of keys and values that each item needs. */
void mha_layer_take_needed(mha_layer_job *job, mha_scratch *scratch);
void mha_layer_find_needed(mha_layer_job *job);

/* Copies the needed ones of rows first .. last-1 of an input without projection; the others become 0. */
void mha_layer_copy_rows(const mha_layer_job *job, const mha_layer_path *in, size_t first, size_t last);

/*
 * Tells attention where its inputs are, once the addresses of their projected rows are known, and finds the rows of
 * keys and values that each item needs.
 */
void mha_layer_place_inputs(mha_layer_job *job);

#endif
