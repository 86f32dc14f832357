/*
 * scratch.h: the core's only allocation: one aligned block per call, planned first, then shared out by offsets.
 *
 * A driver declares what it needs (mha_scratch_add), asks once (mha_scratch_open) and then cannot fail;
 * mha_scratch_close gives it back.  Sizes that overflow surface as MHA_ERR_SIZE from open.
 */
#ifndef MHA_SCRATCH_H
#define MHA_SCRATCH_H

#include "common.h"
#include "mha.h"

typedef struct {
    size_t total_bytes; /* planned so far; SIZE_MAX once a sum or product has overflowed */
    void *block;        /* what the allocator gave */
    char *base;         /* first aligned byte of it; NULL until open */
} mha_scratch;

#define MHA_SCRATCH_EMPTY {0, NULL, NULL}

/* No block is larger, because pointers differ by at most so much. */
#define MHA_LARGEST_BLOCK ((size_t)PTRDIFF_MAX)

/*
 * Plan room for `count` numbers of `itemsize` bytes; returns their offset from `base`, a multiple of MHA_ALIGN.  Call
 * only before open.  (Inlined, as is what takes: 40 parts of memory are 1 % of the smallest call's instructions.)
 */
MHA_INLINE size_t
mha_scratch_add(mha_scratch *scratch, size_t count, size_t itemsize)
{
    const size_t at = scratch->total_bytes;
    size_t n_bytes = count;

    if (count > 0) { /* a plan has no use for most of what it may ask for */
        const int fits = mha_mul_size(&n_bytes, itemsize) == 0 && n_bytes <= MHA_LARGEST_BLOCK;

        /* No sum wraps: both parts are about half of SIZE_MAX at most. */
        n_bytes = fits ? mha_min(at, MHA_LARGEST_BLOCK) + mha_round_up(n_bytes, MHA_ALIGN) : SIZE_MAX;
        scratch->total_bytes = n_bytes > MHA_LARGEST_BLOCK ? SIZE_MAX : n_bytes;
    }
    return at;
}

/*
 * The same, as an address: NULL while there is no base.  So a function that takes all parts of its memory is called
 * twice: to measure them, and, with a scratch of the same start and the base of the open one, to place them.
 */
MHA_INLINE void *
mha_scratch_take(mha_scratch *scratch, size_t count, size_t itemsize)
{
    const size_t at = mha_scratch_add(scratch, count, itemsize);

    return scratch->base == NULL ? NULL : scratch->base + at;
}

MHA_MUST_CHECK mha_status mha_scratch_open(mha_scratch *scratch);
void mha_scratch_close(mha_scratch *scratch);

#endif /* MHA_SCRATCH_H */
