/*
 * guarded.h: memory between pages that may not be touched, and numbers to fill it with.
 *
 * `guarded(n)` gives n bytes of the next slot, flush with the page behind it or before it, as `at_end` says; a read or
 * write one byte beyond is a fault, whose handler prints what was going on and ends the program.  Slots are used again
 * after guarded_reset, because a mapping for every operand of every case would take most of the time.
 * Include after a feature-test macro that gives MAP_ANONYMOUS.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef GUARDED_H
#define GUARDED_H

#include <stdint.h>
#include <string.h>

#include "check.h"
#include "flags.h"
#include "mha.h"
#include "pages.h"

#define N_SLOTS 64
#define SLOT_BYTES ((size_t)1 << 20)
#define SCRATCH_BYTES ((size_t)16 << 20) /* for the core's own block, in a slot of its own */

static struct {
    char *slots, *scratch;
    size_t page, n_used;
    int at_end;              /* the next operand touches the page behind it; 0: the one before it */
    int n_scratch;           /* blocks the core holds; there is one slot */
    size_t n_bytes[N_SLOTS]; /* of the operand in each used slot */
    char doing[160];         /* for the fault handler */
} guard;

static void
report_fault(int signal_number)
{
    const char *text = signal_number == SIGSEGV ? "failed: fault in " : "failed: bus error in ";
    long written = (long)WRITE_OUT(text, strlen(text));

    written += (long)WRITE_OUT(guard.doing, strlen(guard.doing));
    written += (long)WRITE_OUT("\n", 1);
    _exit(written < 0 ? 2 : 1);
}

static char *
map_guarded(size_t n_slots, size_t slot_bytes)
{
    const size_t step = slot_bytes + guard.page;
    char *memory = closed_pages(n_slots * step + guard.page);

    for (size_t i = 0; i < n_slots; i++) {
        if (memory == NULL || !open_pages(memory + i * step + guard.page, slot_bytes)) {
            perror("guard pages");
            exit(2);
        }
    }
    return memory + guard.page;
}

/* The operand in slot i. */
static char *
operand(size_t i)
{
    char *slot = guard.slots + i * (SLOT_BYTES + guard.page);

    return guard.at_end ? slot + SLOT_BYTES - guard.n_bytes[i] : slot;
}

/* One number for all operands as they are now: what it was before a refused call, it is behind it. */
static inline uint64_t
hash_operands(void)
{
    uint64_t hash = 0;

    for (size_t i = 0; i < guard.n_used; i++) {
        for (size_t b = 0; b < guard.n_bytes[i]; b++) {
            hash = (hash ^ (unsigned char)operand(i)[b]) * 1099511628211u;
        }
    }
    return hash;
}

static void *
guarded(size_t n_bytes)
{
    if (guard.n_used == N_SLOTS || n_bytes > SLOT_BYTES) {
        printf("failed: slots are too few or too small for %s\n", guard.doing);
        exit(2);
    }
    guard.n_bytes[guard.n_used] = n_bytes;
    return operand(guard.n_used++);
}

static void
guarded_reset(int at_end)
{
    guard.n_used = 0;
    guard.at_end = at_end;
}

/*
 * The core moves up to the next multiple of 64 within the block it asks for: a block that starts one byte after such a
 * multiple loses 63 of its 64 spare bytes so, and the last one is not there.  What the core uses ends at the page.
 */
static void *
guarded_alloc(size_t n_bytes)
{
    if (guard.n_scratch++ != 0 || n_bytes > SCRATCH_BYTES) {
        printf("failed: a second block, or too large a one, in %s\n", guard.doing);
        exit(2);
    }
    return fill_with_subnormals(guard.scratch + SCRATCH_BYTES + 1 - n_bytes, n_bytes - 1);
}

static void
guarded_free(void *memory)
{
    (void)memory;
    guard.n_scratch--;
}

static void
guarded_start(void)
{
    guard.page = page_size();
    guard.slots = map_guarded(N_SLOTS, SLOT_BYTES);
    guard.scratch = map_guarded(1, SCRATCH_BYTES);
    signal(SIGSEGV, report_fault);
#if defined(SIGBUS)
    signal(SIGBUS, report_fault);
#endif
    mha_set_allocator(guarded_alloc, guarded_free);
}

/* --- Numbers --------------------------------------------------------------------------- */

static uint64_t random_state;

static double
uniform(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (double)(random_state >> 40) / (1 << 23) - 1.0;
}

/* n numbers in -most .. most in guarded memory. */
static void *
numbers_up_to(double most, mha_dtype dtype, size_t n)
{
    void *x = guarded(n * size_of(dtype));

    for (size_t i = 0; i < n; i++) {
        set(dtype, x, i, most * uniform());
    }
    return x;
}

static void *
numbers(mha_dtype dtype, size_t n)
{
    return numbers_up_to(1, dtype, n);
}

/* Room for n results, all NaN until written. */
static void *
room(mha_dtype dtype, size_t n)
{
    return memset(guarded(n * size_of(dtype)), 0xff, n * size_of(dtype));
}

/* FNV-1a over whole numbers: the bits of results, to compare two runs. */
static inline uint64_t
hash_bits(uint64_t hash, mha_dtype dtype, const void *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = 0;
        memcpy(&bits, (const char *)x + i * size_of(dtype), size_of(dtype));
        hash = (hash ^ bits) * 1099511628211u;
    }
    return hash;
}

#endif
