/*
 * room.h: the memory of one worker: what the steps of a tile, and the tiles of a task, leave to each other.
 */
#ifndef MHA_ROOM_H
#define MHA_ROOM_H

#include "plan.h"

/* Addresses of numbers, unless a comment says otherwise; room.c says how many, and which of them a call needs. */
typedef struct {
    char
        *panels; /* packed: keys of a block, or queries of a tile, or one panel of keys: see mha_way; or exponentials */
    char *value_panels; /* backward: packed values of a block */
    char *dense_rows;   /* rows of a key block, copied side by side: values; in the backward pass keys */
    char *visible_rows; /* such rows for one row of the tile, with 0 for those that it may not see */
    char *scores;       /* of a tile; its rows lie score_stride apart */
    char *factors;      /* of dropout, laid out like scores */
    char *grads;        /* backward: dP, then dS, laid out like scores */
    char *slopes;       /* backward: of capped scores, laid out like scores */
    char *block_out;    /* what one key block gives to a tile's output, rows padded to whole vectors */
    char *ends;         /* one for each column of scores: how many keys that query sees */
    char *max, *sum, *sum_compensation, *inverse, *delta; /* one for each row of the task; delta: backward */
    char *out_compensation;                               /* what the task's outputs lose to rounding; as block_out */
    char *rescale, *factor, *block_max, *block_sum;       /* one for each row of a tile */
    char *mean, *mean_compensation; /* a row like those of block_out: the mean of all values, for empty rows */
    double *table;                  /* backward: sums of the gradients of a head's relative biases */
    mha_interval *row_keys;         /* what each query of the task sees */
} mha_room;

/*
 * Lays out a room: its parts get their distances from its base.  Returns its bytes: if they overflow, more than any
 * memory has.  `place` makes a room of a layout, at an address; parts that the call does not need point anywhere.
 */
size_t mha_room_lay_out(const mha_problem *problem, const mha_plan *plan, mha_room *layout);
void mha_room_place(const mha_room *layout, const char *base, mha_room *room);

#endif
