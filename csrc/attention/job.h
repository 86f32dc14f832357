/*
 * job.h: a call of attention and its life: its problem, its plan and its memory.
 */
#ifndef MHA_JOB_H
#define MHA_JOB_H

#include "room.h"
#include "runtime/scratch.h"

typedef struct {
    mha_problem problem;
    mha_plan plan;

    /* Scratch memory, from scratch_at on; no addresses before mha_attention_place. */
    size_t scratch_at;
    mha_room *rooms; /* one for each worker, of room_bytes */
    mha_room room_layout;
    size_t room_bytes;
    mha_interval *row_keys;  /* what each query sees, if that is the same in all items; else NULL */
    void *row_max, *row_sum; /* the caller's, or the job's own if the weights need them, or NULL */
    char *partials;          /* results of splits; backward: a gradient of q for each split abreast */
    size_t partial_bytes;
    char *grad_w; /* backward: n_grad_w gradients of the additive weights, one per task */
    size_t grad_w_bytes, n_grad_w;

    const mha_attention_grads *grads; /* backward */
    size_t first_split;               /* backward: the first split of this round of tasks */
} mha_attention_job;

/*
 * A job's life: init checks the sizes, makes the plan, and adds the memory that the job needs to `scratch` (operands
 * need not have addresses yet); the caller opens the scratch memory; place takes the job's share; a run
 * (attention.h, backward.h) cannot fail.
 * `kernels`: those of the caller's call, NULL for a type that has none.
 */
MHA_MUST_CHECK mha_status mha_attention_init(mha_attention_job *job, const mha_kernels *kernels,
                                             const mha_attention_args *args, mha_pass pass, mha_scratch *scratch);
void mha_attention_place(mha_attention_job *job, const mha_scratch *scratch);

#endif
