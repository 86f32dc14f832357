/*
 * common.h: what GCC and clang, the compilers of the core, spell differently; and small helpers that every C file of
 * the core may use.
 * No libc beyond the headers named here; Python, NumPy and stdio never come in.
 */
#ifndef MHA_COMMON_H
#define MHA_COMMON_H

#include <stddef.h>
#include <stdint.h>

#if defined(MHA_COVERAGE) /* one copy for all callers: gcov counts the branches of every copy */
#define MHA_INLINE static __attribute__((unused))
#else
#define MHA_INLINE static inline __attribute__((always_inline))
#endif
#define MHA_NOINLINE __attribute__((noinline))
#define MHA_PREFETCH_READ(p) __builtin_prefetch(p, 0, 3)
#define MHA_PREFETCH_WRITE(p) __builtin_prefetch(p, 1, 3)
#define MHA_PREFETCH_FAR(p) __builtin_prefetch(p, 0, 2) /* to the second cache */

/* Unroll the loop that follows completely: arrays of vectors then live in registers. */
#if defined(__clang__)
#define MHA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MHA_UNROLL _Pragma("GCC unroll 16")
#endif

/* The loop that follows takes two steps at a time: half as many additions to addresses. */
#if defined(__clang__)
#define MHA_UNROLL_TWICE _Pragma("clang loop unroll_count(2)")
#else
#define MHA_UNROLL_TWICE _Pragma("GCC unroll 2")
#endif

#if defined(MHA_DEBUG)
#include <assert.h>
#define MHA_ASSERT(x) assert(x)
#else
#define MHA_ASSERT(x) ((void)0)
#endif

/* A cache line; also the width of the widest vector. */
#define MHA_ALIGN ((size_t)64)

MHA_INLINE size_t
mha_min(size_t a, size_t b)
{
    return a < b ? a : b;
}

MHA_INLINE size_t
mha_max(size_t a, size_t b)
{
    return a > b ? a : b;
}

MHA_INLINE size_t
mha_ceil_div(size_t a, size_t b)
{
    return a / b + (a % b != 0);
}

/* a rounded up to a multiple of b, for most callers a power of two; callers know that it does not overflow. */
MHA_INLINE size_t
mha_round_up(size_t a, size_t b)
{
    return (b & (b - 1)) == 0 ? (a + b - 1) & ~(b - 1) : mha_ceil_div(a, b) * b;
}

/* *total *= factor; returns 0, or -1 on overflow and then *total is unchanged. */
MHA_INLINE int
mha_mul_size(size_t *total, size_t factor)
{
    size_t product;

    if (__builtin_mul_overflow(*total, factor, &product)) {
        return -1;
    }
    *total = product;
    return 0;
}

#endif /* MHA_COMMON_H */
