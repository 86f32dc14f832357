/*
 * problem.h: what a call of attention is: its arguments, checked, and what follows from them alone.
 */
#ifndef MHA_PROBLEM_H
#define MHA_PROBLEM_H

#include "kernels/dispatch.h"
#include "mha.h"
#include "visible.h"

typedef enum {
    MHA_PASS_FORWARD,
    MHA_PASS_IN_TASK, /* forward inside a task of the caller's: one thread */
    MHA_PASS_WEIGHTS, /* the weights alone, by rows */
    MHA_PASS_BACKWARD
} mha_pass;

typedef struct {
    mha_pass pass;
    const mha_attention_args *args;
    const mha_kernels *kernels;
    double score_scale; /* *args->scale, or the usual one */
    mha_scalar scale, one;
    size_t group;        /* query heads per key head */
    int same_visibility; /* all queries of an item see the same keys: 0 .. length */
    int counts_keys;     /* without features, forward: all scores are 0, a row's statistics are a count of keys */
    int watched;         /* the call may be given up half-way, see runtime/threads_interrupt.h */
    double work;         /* multiply-adds, roughly: what decides about threads */
} mha_problem;

/* 1 if all the operands that such a pass reads and writes have addresses, or no numbers. */
int mha_has_operands(const mha_attention_args *args, mha_pass pass);

/* Checks the arguments, whose operands need not have addresses yet, and notes the facts. */
MHA_MUST_CHECK mha_status mha_problem_describe(mha_problem *problem, const mha_kernels *kernels,
                                               const mha_attention_args *args, mha_pass pass);

/*
 * With one query a head, as in a decoder, heads that share a key head become as many queries of one head: so each key
 * is read once, and in place.  *folded is that call, or *args if some argument treats heads and queries differently.
 */
void mha_fold_heads(const mha_attention_args *args, mha_attention_args *folded);

/* 1 if two queries of an item may see different keys. */
MHA_INLINE int
mha_hides_single_keys(const mha_problem *problem)
{
    return problem->args->keep_mask.data != NULL || !problem->same_visibility;
}

#endif
