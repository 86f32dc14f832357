/*
 * plan.h: what a call of attention is, checked, and how it is gone about: chosen once, from sizes alone.
 *
 * Shape of the work: a task is some queries of all heads that share one key head.  It walks over
 * key blocks (packed once per task), and in each over tiles of query rows.
 */
#ifndef MHA_PLAN_H
#define MHA_PLAN_H

#include "runtime/common.h"
#include "kernels/dispatch.h"
#include "mha.h"
#include "runtime/scratch.h"
#include "room.h"
#include "visible.h"

/* Products in a part of a score's sum: half the error of one long sum, and it costs nothing. */
#define MHA_SCORE_PART ((size_t)32)

/* Keys in a part of an output's sum, and of a gradient's. */
#define MHA_VALUE_PART ((size_t)64)
#define MHA_GRAD_PART ((size_t)128)

/* Most single-query rows of different items that are scored by columns side by side. */
#define MHA_SHORT_ITEMS ((size_t)64)

/* Fewest queries for which rows of a key block may be worth a copy (walk.c). */
#define MHA_COPY_QUERIES ((size_t)48)

typedef enum {
    MHA_PASS_FORWARD,
    MHA_PASS_IN_TASK, /* forward inside a task of the caller's: one thread */
    MHA_PASS_WEIGHTS, /* the weights alone, by rows */
    MHA_PASS_BACKWARD
} mha_pass;

/* How scores are computed. */
typedef enum {
    MHA_WAY_PACKED,   /* a block's keys are packed into panels, which all tiles of the task meet */
    MHA_WAY_IN_PLACE, /* one register tile of queries: keys are read where they lie, once, a panel of them at a time */
    MHA_WAY_COLUMNS,  /* few keys: scores stand transposed and a tile's queries are packed (columns.c) */
    MHA_WAY_ADDITIVE, /* additive scores, of keys where they lie */
    MHA_WAY_ITEMS     /* additive scores by columns, of one query from each of several items (columns.c) */
} mha_way;

typedef struct mha_plan {
    /* The problem: facts. */
    mha_pass pass;
    const mha_attention_args *args;
    const mha_kernels *kernels;
    mha_scalar scale, one;
    size_t group;        /* query heads per key head */
    int same_visibility; /* all queries of an item see the same keys: 0 .. length */
    int watched;         /* the call may be given up half-way, see runtime/threads_interrupt.h */
    double work;         /* multiply-adds of the call, roughly: what decides about threads */

    /* What is chosen, from these sizes alone. */
    mha_way way;
    size_t key_block;    /* keys per block; a function of the head sizes only, never of the data */
    size_t tile_rows;    /* query rows per tile */
    size_t score_stride; /* from one row of a tile's scores to the next */
    size_t factor_rows;  /* rows of a tile that get their dropout factors, and use them, before the next do */
    int copies_rows;     /* rows of a key block may be worth a copy, see walk.c */
    int keeps_slopes;    /* scores are capped, and the backward pass needs by how much */
    int weights_later;   /* rows may span several blocks: weights are written by a second pass */
    size_t task_queries; /* queries per task */
    size_t task_heads;   /* heads per task whose row statistics are there together */
    size_t tasks_per_head; /* tasks per key head */
    size_t n_tasks;
    size_t blocks_abreast; /* key blocks of a task that are tasks of their own and are joined afterwards; 1: none is */
    size_t n_spans, spans_abreast, n_grad_w; /* backward: see backward.c */
    unsigned n_workers;

    /* Scratch memory: offsets, and the addresses that mha_plan_place makes of them. */
    mha_room room; /* as it is measured */
    size_t rooms_at, first_room, room_bytes, row_keys_at, stats_at[2];
    size_t partial_at, partial_bytes, grad_w_at, grad_w_bytes;
    mha_room *rooms;              /* one for each worker */
    const mha_interval *row_keys; /* one for each query, where those of all items see the same; else NULL */
    void *row_max, *row_sum;      /* the caller's, or ours where the weights need them, or NULL */
    char *partials;               /* what blocks abreast leave behind; backward: gradients of q, of each span abreast */
    char *grad_w;                 /* backward: n_grad_w gradients of the additive weights, one a task */
    const mha_attention_grads *grads; /* backward */
    size_t first_span;            /* backward: of this round of tasks */
} mha_plan;

MHA_INLINE int
mha_by_columns(const mha_plan *plan)
{
    return plan->way == MHA_WAY_COLUMNS || plan->way == MHA_WAY_ITEMS;
}

/* 1 if two queries of an item may see different keys. */
MHA_INLINE int
mha_hides_single_keys(const mha_plan *plan)
{
    return plan->args->keep_mask.data != NULL || !plan->same_visibility;
}

/* The first key of the block that holds `key`. */
MHA_INLINE size_t
mha_block_start(const mha_plan *plan, size_t key)
{
    return key / plan->key_block * plan->key_block;
}

/* Those of `keys` that lie in the block at first_key. */
MHA_INLINE mha_interval
mha_block_keys(const mha_plan *plan, mha_interval keys, size_t first_key)
{
    const mha_interval block = {first_key, first_key + plan->key_block};

    return mha_interval_meet(block, keys);
}

/*
 * One query a head, as in a decoder: the heads that share a key head are as good as its queries, which read each key
 * once, and where it lies.  *folded is the call so put, or *args where something tells heads from queries.
 */
void mha_fold_heads(const mha_attention_args *args, mha_attention_args *folded);

/* The facts of a plan, and the checks. */
MHA_MUST_CHECK mha_status mha_plan_describe(mha_plan *plan, const mha_attention_args *args, mha_pass pass);

/*
 * A forward call's life: init checks the sizes and adds what it needs to `scratch` (operands need not
 * have addresses yet), the caller opens the scratch memory, place takes its share, run cannot fail.
 */
MHA_MUST_CHECK mha_status mha_plan_init(mha_plan *plan, const mha_attention_args *args, mha_pass pass,
                                        mha_scratch *scratch);
void mha_plan_place(mha_plan *plan, const mha_scratch *scratch);
void mha_attention_run(const mha_plan *plan);

/* Room for every worker of a plan whose choices are made, in `scratch`. */
void mha_plan_rooms(mha_plan *plan, mha_scratch *scratch);

/*
 * What `factor_rows` shall be, by the plan's tile_rows and score_stride: factors and the scores that they are for take
 * two thirds of the first cache.  (With 48 KiB, 32 KiB of factors took 1.01 of the time of 16, and 8 KiB as
 * long.)
 */
size_t mha_factor_rows(const mha_plan *plan);

#endif
