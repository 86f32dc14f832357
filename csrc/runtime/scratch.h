/*
 * scratch.h: the core's only allocation: one aligned block per call, planned first, then shared out by offsets.
 *
 * A driver declares what it needs (mha_scratch_add), asks once (mha_scratch_open) and then cannot fail;
 * mha_scratch_close gives it back.  Sizes that overflow surface as MHA_ERR_SIZE from open.
 */
#ifndef MHA_SCRATCH_H
#define MHA_SCRATCH_H

#include "mha.h"

typedef struct {
    size_t total_bytes; /* planned so far; SIZE_MAX once a sum or product has overflowed */
    void *block;        /* what the allocator gave */
    char *base;         /* first aligned byte of it; NULL until open */
} mha_scratch;

#define MHA_SCRATCH_EMPTY {0, NULL, NULL}

/*
 * Plan room for `count` numbers of `itemsize` bytes; returns their offset from `base`, a multiple of
 * MHA_ALIGN.  Call only before open.
 */
size_t mha_scratch_add(mha_scratch *scratch, size_t count, size_t itemsize);

/*
 * The same, as an address: NULL while there is no base.  So a function that takes all parts of its memory is called
 * twice: to measure them, and, with a scratch of the same start and the base of the open one, to place them.
 */
void *mha_scratch_take(mha_scratch *scratch, size_t count, size_t itemsize);

MHA_MUST_CHECK mha_status mha_scratch_open(mha_scratch *scratch);
void mha_scratch_close(mha_scratch *scratch);

#endif /* MHA_SCRATCH_H */
