/*
 * scratch.c: one aligned block per call; scratch.h states the contract.
 *
 * The only file of the core that allocates, and through two pointers only, so that a test can make
 * every allocation of every call fail (mha_set_allocator).
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "scratch.h"

#include <stdlib.h>

#include "common.h"

/* total_bytes after an overflow: no real plan reaches it, because pointers differ by at most PTRDIFF_MAX. */
#define OVERFLOWED SIZE_MAX
#define LARGEST_BLOCK ((size_t)PTRDIFF_MAX)

static mha_alloc_fn alloc_block = malloc;
static mha_free_fn free_block = free;

void
mha_set_allocator(mha_alloc_fn alloc, mha_free_fn release)
{
    /* Both functions are the caller's, or both are ours. */
    const int custom = alloc != NULL && release != NULL;

    alloc_block = custom ? alloc : malloc;
    free_block = custom ? release : free;
}

size_t
mha_scratch_add(mha_scratch *scratch, size_t count, size_t itemsize)
{
    const size_t offset = scratch->total_bytes;
    size_t n_bytes = count;

    MHA_ASSERT(scratch->block == NULL);
    if (count == 0) { /* a plan has no use for most of what it may ask for */
        return offset;
    }
    if (offset == OVERFLOWED || mha_mul_size(&n_bytes, itemsize) < 0 || n_bytes > LARGEST_BLOCK) {
        scratch->total_bytes = OVERFLOWED;
        return 0;
    }
    /* Neither step can wrap: n_bytes and offset are at most SIZE_MAX / 2 each, roundings included. */
    n_bytes = mha_round_up(n_bytes, MHA_ALIGN);
    scratch->total_bytes = n_bytes > LARGEST_BLOCK - mha_min(offset, LARGEST_BLOCK) ? OVERFLOWED : offset + n_bytes;
    return offset;
}

void *
mha_scratch_take(mha_scratch *scratch, size_t count, size_t itemsize)
{
    const size_t at = mha_scratch_add(scratch, count, itemsize);

    return scratch->base == NULL ? NULL : scratch->base + at;
}

mha_status
mha_scratch_open(mha_scratch *scratch)
{
    MHA_ASSERT(scratch->block == NULL);
    if (scratch->total_bytes > LARGEST_BLOCK - MHA_ALIGN) {
        return MHA_ERR_SIZE;
    }
    /* An allocator promises less alignment than we want: ask for enough to move up to the next multiple. */
    void *block = alloc_block(scratch->total_bytes + MHA_ALIGN);
    if (block == NULL) {
        return MHA_ERR_NOMEM;
    }
    const size_t misaligned = (size_t)((uintptr_t)block % MHA_ALIGN);
    scratch->block = block;
    scratch->base = (char *)block + (misaligned == 0 ? 0 : MHA_ALIGN - misaligned);
    return MHA_OK;
}

void
mha_scratch_close(mha_scratch *scratch)
{
    if (scratch->block != NULL) {
        free_block(scratch->block);
    }
    *scratch = (mha_scratch)MHA_SCRATCH_EMPTY;
}
