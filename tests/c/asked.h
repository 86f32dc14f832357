/*
 * asked.h: an allocator that counts what it is asked for, fails on demand, and aligns as badly as a test likes.
 *
 *     mha_set_allocator(counting_alloc, counting_free);
 *     forget_asked();                         nothing was asked for, and nothing fails
 *     asked.fail_at = 2; asked.for_ever = 1;  the third request from now on, and all behind it
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef ASKED_H
#define ASKED_H

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static struct {
    atomic_size_t n_calls, n_live, n_bytes; /* requests, blocks that are held, bytes of all requests: by any thread */
    size_t fail_at;
    int for_ever;
    size_t shift; /* of every block, in bytes */
} asked = {.fail_at = SIZE_MAX};

static inline void
forget_asked(void)
{
    memset(&asked, 0, sizeof asked);
    asked.fail_at = SIZE_MAX;
}

static inline void *
counting_alloc(size_t n_bytes)
{
    const size_t call = asked.n_calls++;

    asked.n_bytes += n_bytes;
    if (call == asked.fail_at || (asked.for_ever && call > asked.fail_at)) {
        return NULL;
    }
    char *memory = malloc(n_bytes + asked.shift);
    asked.n_live += memory != NULL;
    return memory == NULL ? NULL : memory + asked.shift;
}

static inline void
counting_free(void *memory)
{
    asked.n_live--;
    free((char *)memory - asked.shift);
}

static inline void *
no_memory(size_t n_bytes)
{
    (void)n_bytes;
    return NULL;
}

#endif
