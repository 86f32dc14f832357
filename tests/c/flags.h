/*
 * flags.h: did a call meet subnormal numbers?  Vector units of some makers stop for a hundred cycles or more at each of
 * them, so calls with ordinary numbers have to do without: in lanes nobody looks at, too.  The processor keeps count in
 * sticky flags, on those that do not stop just as well.
 *
 * Flags are a thread's own: what the pool does is seen only in calls of one thread.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef FLAGS_H
#define FLAGS_H

#include <fenv.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static inline void
forget_subnormals(void)
{
    feclearexcept(FE_ALL_EXCEPT);
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() & ~0x3fu);
#endif
}

/* What happened since then, or NULL. */
static inline const char *
subnormals_met(void)
{
#if defined(FE_UNDERFLOW)
    int operand = 0, result = fetestexcept(FE_UNDERFLOW) != 0;
#else /* WebAssembly keeps no flags */
    int operand = 0, result = 0;
#endif

#if defined(__x86_64__)
    operand = (_mm_getcsr() & 0x02u) != 0; /* the flag DE, which C has no name for */
    result |= (_mm_getcsr() & 0x10u) != 0; /* UE */
#endif
    return operand && result ? "subnormal operands and results"
           : operand         ? "a subnormal operand"
           : result          ? "a subnormal result"
                             : NULL;
}

/* Fresh memory full of numbers that are subnormal, as float and as double: whoever reckons with it is found out. */
static inline void *
fill_with_subnormals(void *memory, size_t n_bytes)
{
    for (size_t i = 0; memory != NULL && i + 4 <= n_bytes; i += 4) {
        memcpy((char *)memory + i, &(const unsigned){1}, 4);
    }
    return memory;
}

static inline void *
allocate_subnormals(size_t n_bytes)
{
    return fill_with_subnormals(malloc(n_bytes), n_bytes);
}

#endif
