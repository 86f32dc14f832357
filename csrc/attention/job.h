/*
 * job.h: a call of attention and its life: what it is, how it is gone about, and its memory.
 */
#ifndef MHA_JOB_H
#define MHA_JOB_H

#include "room.h"
#include "runtime/scratch.h"

typedef struct {
    mha_problem problem;
    mha_plan plan;

    /* Scratch memory: addresses counted from 0 on, until mha_attention_place knows where it begins. */
    mha_room measured;
    mha_room *rooms; /* one for each worker */
    char *first_room;
    size_t room_bytes;
    size_t row_keys_at;
    const mha_interval *row_keys; /* one for each query, where those of all items see the same; else NULL */
    void *row_max, *row_sum; /* the caller's, or ours where the weights need them, or NULL */
    char *partials;          /* what blocks abreast leave behind; backward: gradients of q, of each span abreast */
    size_t partial_bytes;
    char *grad_w; /* backward: n_grad_w gradients of the additive weights, one a task */
    size_t grad_w_bytes, n_grad_w;

    const mha_attention_grads *grads; /* backward */
    size_t first_span;                /* backward: of this round of tasks */
} mha_attention_job;

/*
 * A job's life: init checks the sizes, chooses, and adds what the job needs to `scratch` (operands need not have
 * addresses yet), the caller opens the scratch memory, place takes its share, and the run of its pass cannot fail.
 */
MHA_MUST_CHECK mha_status mha_attention_init(mha_attention_job *job, const mha_attention_args *args, mha_pass pass,
                                             mha_scratch *scratch);
void mha_attention_place(mha_attention_job *job, const mha_scratch *scratch);
void mha_attention_run(const mha_attention_job *job);
void mha_backward_run(mha_attention_job *job, const mha_attention_grads *grads);

#endif
