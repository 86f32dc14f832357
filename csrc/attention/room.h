/*
 * room.h: the memory of one worker: what the steps of a tile, and the tiles of a task, leave to each other.
 */
#ifndef MHA_ROOM_H
#define MHA_ROOM_H

#include "plan.h"

/* Addresses of numbers, where not said otherwise; room.c says how many there are, and which calls have no use for. */
typedef struct {
    char *panels;       /* packed keys of a block; or queries of a tile, or one panel of keys at hand: see mha_way */
    char *value_panels; /* backward: packed values of a block */
    char *dense_rows;   /* rows of a key block side by side: values, in the backward pass keys */
    char *visible_rows; /* the same for one row of the tile, 0 where that may not see them */
    char *scores;       /* a tile's, rows score_stride apart; and so the next three */
    char *factors;      /* of dropout */
    char *grads;        /* backward: dP, then dS */
    char *slopes;       /* backward: of capped scores */
    char *block_out;    /* what one key block gives to a tile's output, rows padded to whole vectors */
    char *ends;         /* one for each column of scores: how many keys that query sees */
    char *max, *sum, *sum_compensation, *inverse, *delta; /* one for each row of the task; delta: backward */
    char *out_compensation;                               /* like block_out, for the rows of the task */
    char *rescale, *factor, *block_max, *block_sum;       /* one for each row of a tile */
    char *mean, *mean_compensation; /* a row like those of block_out: the mean of all values, for empty rows */
    char *span_grad_q;              /* backward: one span's gradient of the queries of one head */
    double *table;                  /* backward: sums of the gradients of a head's relative biases */
    mha_interval *row_keys;         /* what each query of the task sees */
} mha_room;

/* A room that begins at address 0; returns its bytes, too many for any memory where they overflow. */
size_t mha_room_measure(const mha_problem *problem, const mha_plan *plan, mha_room *room);

/* The same room at `base`. */
void mha_room_place(const mha_room *measured, char *base, mha_room *room);

#endif
