/*
 * test_scratch.c: scratch memory and the allocator behind it.  Prints a line per check; exit status 1 if one fails.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "asked.h"
#include "check.h"
#include "runtime/common.h"
#include "mha.h"
#include "runtime/scratch.h"

/* What a driver does: plan three parts, open, use all of them, close. */
static mha_status
use_scratch(size_t n_a, size_t n_b, size_t n_c)
{
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    const size_t a = mha_scratch_add(&scratch, n_a, sizeof(float));
    const size_t b = mha_scratch_add(&scratch, n_b, sizeof(double));
    const size_t c = mha_scratch_add(&scratch, n_c, 1);
    const mha_status status = mha_scratch_open(&scratch);

    if (status == MHA_OK) {
        memset(scratch.base + a, 1, n_a * sizeof(float));
        memset(scratch.base + b, 2, n_b * sizeof(double));
        memset(scratch.base + c, 3, n_c);
        for (size_t i = 0; i < n_a * sizeof(float); i++) {
            n_failed += scratch.base[a + i] != 1; /* parts are disjoint */
        }
        for (size_t i = 0; i < n_b * sizeof(double); i++) {
            n_failed += scratch.base[b + i] != 2;
        }
    }
    mha_scratch_close(&scratch);
    return status;
}

/* --- Checks ------------------------------------------------------------------------------ */

static void
check_layout(void)
{
    int ok = 1;

    for (size_t shift = 0; shift < 64; shift++) { /* ASan sees a write beyond the block */
        forget_asked();
        asked.shift = shift;
        mha_scratch scratch = MHA_SCRATCH_EMPTY;
        size_t offsets[4];
        offsets[0] = mha_scratch_add(&scratch, 3, 4);
        offsets[1] = mha_scratch_add(&scratch, 0, 8);
        offsets[2] = mha_scratch_add(&scratch, 65, 1);
        offsets[3] = mha_scratch_add(&scratch, 8, 8);
        ok &= offsets[0] == 0 && offsets[1] == 64 && offsets[2] == 64 && offsets[3] == 192;
        ok &= mha_scratch_open(&scratch) == MHA_OK;
        ok &= (uintptr_t)scratch.base % MHA_ALIGN == 0;
        ok &= scratch.base >= (char *)scratch.block && scratch.base + 256 <= (char *)scratch.block + asked.n_bytes;
        memset(scratch.base, 7, 256);
        mha_scratch_close(&scratch);
        ok &= scratch.block == NULL && scratch.base == NULL && scratch.total_bytes == 0 && asked.n_live == 0;
        mha_scratch_close(&scratch);
        ok &= asked.n_live == 0;
    }
    forget_asked();
    check(ok, "64-byte offsets and base, whatever the allocator's alignment; closing twice is harmless");
    check(use_scratch(1000, 77, 13) == MHA_OK && use_scratch(0, 0, 0) == MHA_OK && asked.n_live == 0,
          "parts do not overlap; an empty plan opens");
}

static void
check_failing(void)
{
    int ok = 1;

    for (int for_ever = 0; for_ever < 2; for_ever++) {
        for (int n = 0; n < 5; n++) {
            forget_asked();
            asked.fail_at = (size_t)n;
            asked.for_ever = for_ever;
            for (int call = 0; call < 5; call++) {
                const int fails = for_ever ? call >= n : call == n;
                ok &= use_scratch(100, 100, 100) == (fails ? MHA_ERR_NOMEM : MHA_OK);
            }
            ok &= asked.n_live == 0 && asked.n_calls == 5;
        }
    }
    forget_asked();
    check(ok, "the N-th allocation fails, once or from then on: MHA_ERR_NOMEM, nothing leaked, the next call works");
}

/* The status of a plan of two parts, after which a small third must not make it look right again. */
static mha_status
status_of(size_t count_1, size_t size_1, size_t count_2, size_t size_2)
{
    mha_scratch scratch = MHA_SCRATCH_EMPTY;

    mha_scratch_add(&scratch, count_1, size_1);
    mha_scratch_add(&scratch, count_2, size_2);
    mha_scratch_add(&scratch, 1, 1);
    const mha_status status = mha_scratch_open(&scratch);
    mha_scratch_close(&scratch);
    return status;
}

static void
check_overflow(void)
{
    const size_t half = SIZE_MAX / 2;

    forget_asked();
    check(status_of(SIZE_MAX, 8, 1, 1) == MHA_ERR_SIZE && status_of(half / 4 + 1, 8, 1, 1) == MHA_ERR_SIZE &&
              status_of(1, 1, SIZE_MAX, SIZE_MAX) == MHA_ERR_SIZE,
          "a product that overflows");
    check(status_of(SIZE_MAX, 1, 1, 1) == MHA_ERR_SIZE && status_of(SIZE_MAX - 63, 1, 1, 1) == MHA_ERR_SIZE &&
              status_of(half, 1, 1, 1) == MHA_ERR_SIZE && status_of(half + 1, 1, 1, 1) == MHA_ERR_SIZE,
          "a size that rounding carries over the limit");
    check(status_of(half - 1000, 1, half - 1000, 1) == MHA_ERR_SIZE &&
              status_of(half / 2, 1, half / 2, 2) == MHA_ERR_SIZE,
          "a sum that overflows");
    check(status_of(half - 191, 1, 1, 1) == MHA_ERR_SIZE, "a sum that leaves no room for the alignment");
    check(asked.n_calls == 0, "the allocator is not asked for what cannot be");

    asked.fail_at = 0; /* a plan just below the limit does reach it */
    check(status_of(half - 1000, 1, 1, 1) == MHA_ERR_NOMEM && asked.n_calls == 1, "a plan just below the limit");
    forget_asked();
}

static void
check_allocator_choice(void)
{
    forget_asked();
    mha_set_allocator(NULL, NULL);
    check(use_scratch(10, 10, 10) == MHA_OK && asked.n_calls == 0, "NULL, NULL: back to the C library's");
    mha_set_allocator(counting_alloc, NULL);
    check(use_scratch(10, 10, 10) == MHA_OK && asked.n_calls == 0, "half an allocator is none");
    mha_set_allocator(counting_alloc, counting_free);
    check(use_scratch(10, 10, 10) == MHA_OK && asked.n_calls == 1 && asked.n_live == 0, "a whole one is used");
}

static void
check_texts(void)
{
    int ok = 1;

    for (int status = -6; status <= 2; status++) {
        const char *text = mha_status_text((mha_status)status);
        ok &= text != NULL && text[0] != '\0';
        for (int other = -4; other < status && status <= 0; other++) {
            ok &= strcmp(text, mha_status_text((mha_status)other)) != 0;
        }
    }
    check(ok, "a text for every status, and one for numbers that are none");
}

int
main(void)
{
    mha_set_allocator(counting_alloc, counting_free);
    check_layout();
    check_failing();
    check_overflow();
    check_allocator_choice();
    check_texts();
    return report();
}
