/*
 * simd_scalar.h: the vector vocabulary (README.md) in plain C, a "vector" being
 * one number. For any CPU, and the easiest to read: each word says in C what it
 * means in every instruction set.
 * Wants <string.h>; calls nothing of the maths library.
 */
#include "simd_number.h"

/* The integer that has the size of a number, and its sign bit. */
#if VF_F64
#define VF_BITS uint64_t
#define VF_SIGN ((uint64_t)1 << 63)
#else
#define VF_BITS uint32_t
#define VF_SIGN ((uint32_t)1 << 31)
#endif

#define VF_LANES 1
/* A tile of 4 x 4 sums; more would not fit the 16 registers of x86. */
#define VF_TILE_ROWS 4
#define VF_TILE_VECTORS 4
#define VF_ACCUMULATORS 16

#define VF_FUSED 0
#define VF_MASKED 0

typedef real vf;
#define VF_TO_INT(v) to_bits(v)
#define VF_FROM_INT(i) from_bits(i)
#define VF_SHIFT(i) ((i) << VF_MANTISSA)
#define VF_SUM(i, j) ((i) + (j))

/* A number as the integer of the same bits, and back. */
MHA_INLINE VF_BITS
to_bits(real x)
{
    VF_BITS bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

MHA_INLINE real
from_bits(VF_BITS bits)
{
    real x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

MHA_INLINE vf
vf_set1(real x)
{
    return x;
}

MHA_INLINE vf
vf_load(const real *p)
{
    return *p;
}

MHA_INLINE void
vf_store(real *p, vf v)
{
    *p = v;
}

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
vf_add(vf a, vf b)
{
    return a + b;
}

MHA_INLINE vf
vf_sub(vf a, vf b)
{
    return a - b;
}

MHA_INLINE vf
vf_mul(vf a, vf b)
{
    return a * b;
}

MHA_INLINE vf
vf_div(vf a, vf b)
{
    return a / b;
}

/* Two roundings: a fused fma would be a slow library call on old CPUs. */
MHA_INLINE vf
vf_fma(vf a, vf b, vf c)
{
    return a * b + c;
}

MHA_INLINE vf
vf_fnma(vf a, vf b, vf c)
{
    return c - a * b;
}

/* A comparison with NaN is false, so that NaN in a or b gives b. */
MHA_INLINE vf
vf_max(vf a, vf b)
{
    return a > b ? a : b;
}

MHA_INLINE vf
vf_min(vf a, vf b)
{
    return a < b ? a : b;
}

MHA_INLINE vf
vf_abs(vf a)
{
    return from_bits(to_bits(a) & ~VF_SIGN);
}

MHA_INLINE vf
vf_copysign(vf a, vf sign)
{
    return from_bits(to_bits(a) | (to_bits(sign) & VF_SIGN));
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

#include "simd_words.inc"
