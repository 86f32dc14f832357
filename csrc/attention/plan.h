/*
 * plan.h: the plan of a call of attention: choices alone, made once, from the sizes of the problem.
 *
 * Shape of the work: a task is some queries of all heads that share one key head.  It walks over
 * key blocks (packed once per task), and in each over tiles of query rows.
 */
#ifndef MHA_PLAN_H
#define MHA_PLAN_H

#include "problem.h"

/*
 * Products in a part of a score's sum: parts halve the error of one long sum, for 3.5 % of the product at 64 features,
 * 1.7 % of the call (AVX-512 on an AMD EPYC, family 25, model 17).
 */
#define MHA_SCORE_PART ((size_t)32)

/* Keys in a part of an output's sum, and of a gradient's. */
#define MHA_VALUE_PART ((size_t)64)
#define MHA_GRAD_PART ((size_t)128)

/* The most queries of a task of MHA_WAY_COLUMNS that gathers runs. */
#define MHA_GATHERED ((size_t)64)

#define MHA_SPLIT_BLOCKS ((size_t)2) /* backward: key blocks of a split, which share a gradient of q */

/* How scores are computed. */
typedef enum {
    MHA_WAY_PACKED,   /* a block's keys are packed into panels, which all tiles of the task meet */
    MHA_WAY_IN_PLACE, /* few queries: keys are read where they lie, once, a panel of them at a time */
    MHA_WAY_COLUMNS,  /* few keys: scores stand transposed, of runs of queries side by side (columns.c) */
    MHA_WAY_ADDITIVE  /* additive scores: keys are read where they lie */
} mha_way;

typedef struct {
    mha_way way;
    size_t key_block;      /* keys per block; a function of the head sizes only, never of the data */
    size_t tile_rows;      /* query rows per tile */
    size_t score_stride;   /* from one row of a tile's scores to the next */
    int copies_rows;       /* rows of a key block are copied side by side: values; in the backward pass keys */
    int weights_later;     /* rows may have several blocks: a second pass makes weights of the scores */
    size_t task_queries;   /* queries per task */
    size_t task_heads;     /* heads per task (by columns: runs), whose row statistics are in the room together */
    size_t tasks_per_head; /* tasks per key head */
    size_t n_tasks;        /* before a split */
    /* A task's keys are cut into splits, whose results are joined in the order of the keys. */
    size_t n_splits;       /* 1: they are not */
    size_t splits_abreast; /* that many are tasks of their own, side by side: forward all, backward see backward.c */
    unsigned n_workers;
} mha_plan;

void mha_plan_forward(mha_plan *plan, const mha_problem *problem);
void mha_plan_backward(mha_plan *plan, const mha_problem *problem);

/* The first key of the block that holds `key`. */
MHA_INLINE size_t
mha_block_start(const mha_plan *plan, size_t key)
{
    return key / plan->key_block * plan->key_block;
}

#endif
