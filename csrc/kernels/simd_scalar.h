/*
 * simd_scalar.h: the vector vocabulary (README.md) in plain C, a "vector" being
 * one number. For any CPU, and the easiest to read: each word says in C what it
 * means in every instruction set.
 * Calls nothing of the maths library.
 */
#include "simd_number.h"

#define VF_LANES 1
/* A tile of 4 x 4 sums; more would not fit the 16 registers of x86. */
#define VF_TILE_ROWS 4
#define VF_TILE_VECTORS 4
#define VF_ACCUMULATORS 16

#define VF_FUSED 0

#include "simd_words.inc"

MHA_INLINE vf
vf_load_first(const real *p, size_t n)
{
    return n == 0 ? 0 : *p;
}

MHA_INLINE void
vf_store_first(real *p, vf v, size_t n)
{
    if (n != 0) {
        *p = v;
    }
}

MHA_INLINE vf
vf_keep_first(vf v, size_t n, vf fill)
{
    return n == 0 ? fill : v;
}

MHA_INLINE vf
vf_select_lt(vf a, vf b, vf x, vf y)
{
    return a < b ? x : y;
}

MHA_INLINE vf
vf_zero_lt(vf a, vf b, vf x)
{
    return a < b ? 0 : x;
}

MHA_INLINE real
vf_hsum(vf v)
{
    return v;
}

MHA_INLINE real
vf_hmax(vf v)
{
    return v;
}
