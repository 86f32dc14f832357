/*
 * scratch.c: one aligned block per call; scratch.h states the contract.
 *
 * The only file of the core that allocates, and through two pointers only, so that a test can make
 * every allocation of every call fail (mha_set_allocator).
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "scratch.h"

#include <stdlib.h>

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

mha_status
mha_scratch_open(mha_scratch *scratch)
{
    MHA_ASSERT(scratch->block == NULL);
    if (scratch->total_bytes > MHA_LARGEST_BLOCK - MHA_ALIGN) {
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
