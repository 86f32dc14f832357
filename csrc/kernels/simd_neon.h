/*
 * simd_neon.h: the vector vocabulary (README.md) for NEON of 64-bit Arm. A
 * register holds 4 float or 2 double; there are 32 of them. NEON has no masked
 * loads, so part of a vector goes number by number through a small array.
 */
#include "simd_number.h"

#include <arm_neon.h>

#if VF_F64
#define VF_LANES 2
#define VF_OP(op) v##op##q_f64
#define VF_SPLAT(x) vdupq_n_f64(x)
#define VF_INT(op) v##op##q_u64
#define VF_TO_INT(v) vreinterpretq_u64_f64(v)
#define VF_FROM_INT(i) vreinterpretq_f64_u64(i)
#define VF_SHIFT(i) vshlq_n_u64(i, VF_MANTISSA)
typedef float64x2_t vf;
typedef uint64x2_t vf_mask;
#else
#define VF_LANES 4
#define VF_OP(op) v##op##q_f32
#define VF_SPLAT(x) vdupq_n_f32(x)
#define VF_INT(op) v##op##q_u32
#define VF_TO_INT(v) vreinterpretq_u32_f32(v)
#define VF_FROM_INT(i) vreinterpretq_f32_u32(i)
#define VF_SHIFT(i) vshlq_n_u32(i, VF_MANTISSA)
typedef float32x4_t vf;
typedef uint32x4_t vf_mask;
#endif
#define VF_SUM(i, j) VF_INT(add)(i, j)
#define VF_LOW(a, b) VF_OP(zip1)(a, b)
#define VF_HIGH(a, b) VF_OP(zip2)(a, b)

/* 4 x 4 sums: 2 multiply-adds a load, which the two load units of Apple's cores ask for; 6 x 4 would spill. */
#define VF_TILE_ROWS 4
#define VF_TILE_VECTORS 4
#define VF_ACCUMULATORS 16

#define VF_FUSED 1
#define VF_MASKED 0

MHA_INLINE vf
vf_set1(real x)
{
    return VF_SPLAT(x);
}

MHA_INLINE vf
vf_load(const real *p)
{
    return VF_OP(ld1)(p);
}

MHA_INLINE void
vf_store(real *p, vf v)
{
    VF_OP(st1)(p, v);
}

/* The mask of the first n lanes, of all of them if n >= VF_LANES. */
MHA_INLINE vf_mask
vf_first_lanes(size_t n)
{
#if VF_F64
    const uint64_t lanes[VF_LANES] = {0, 1};
    return vcgtq_u64(vdupq_n_u64(n), vld1q_u64(lanes));
#else
    const uint32_t lanes[VF_LANES] = {0, 1, 2, 3};
    const uint32_t count = (uint32_t)mha_min(n, VF_LANES);
    return vcgtq_u32(vdupq_n_u32(count), vld1q_u32(lanes));
#endif
}

MHA_INLINE vf
vf_load_first(const real *p, size_t n)
{
    if (n >= VF_LANES) {
        return vf_load(p);
    }
    real lanes[VF_LANES] = {0};
    for (size_t i = 0; i < n && i < VF_LANES; i++) {
        lanes[i] = p[i];
    }
    return vf_load(lanes);
}

MHA_INLINE void
vf_store_first(real *p, vf v, size_t n)
{
    if (n >= VF_LANES) {
        vf_store(p, v);
        return;
    }
    real lanes[VF_LANES];
    vf_store(lanes, v);
    for (size_t i = 0; i < n && i < VF_LANES; i++) {
        p[i] = lanes[i];
    }
}

MHA_INLINE vf
vf_keep_first(vf v, size_t n, vf fill)
{
    return VF_OP(bsl)(vf_first_lanes(n), v, fill);
}

/* NEON takes the addend first. */
MHA_INLINE vf
vf_fma(vf a, vf b, vf c)
{
    return VF_OP(fma)(c, a, b);
}

MHA_INLINE vf
vf_fnma(vf a, vf b, vf c)
{
    return VF_OP(fms)(c, a, b);
}

/* Not the max of NEON, which is NaN for a NaN in a: the words give b then. */
MHA_INLINE vf
vf_max(vf a, vf b)
{
    return VF_OP(bsl)(VF_OP(cgt)(a, b), a, b);
}

MHA_INLINE vf
vf_min(vf a, vf b)
{
    return VF_OP(bsl)(VF_OP(clt)(a, b), a, b);
}

MHA_INLINE vf
vf_abs(vf a)
{
    return VF_OP(abs)(a);
}

MHA_INLINE vf
vf_copysign(vf a, vf sign)
{
    return VF_OP(bsl)(VF_TO_INT(VF_SPLAT((real)-0.0)), sign, a);
}

MHA_INLINE vf
vf_select_lt(vf a, vf b, vf x, vf y)
{
    return VF_OP(bsl)(VF_OP(clt)(a, b), x, y);
}

MHA_INLINE vf
vf_zero_lt(vf a, vf b, vf x)
{
    return VF_FROM_INT(VF_INT(bic)(VF_TO_INT(x), VF_OP(clt)(a, b)));
}

MHA_INLINE real
vf_hsum(vf v)
{
#if !VF_F64
    v = vaddq_f32(v, vextq_f32(v, v, 2)); /* lane j and j + 2 first; vaddvq alone takes neighbours */
    return vpadds_f32(vget_low_f32(v));
#else
    return VF_OP(addv)(v);
#endif
}

MHA_INLINE real
vf_hmax(vf v)
{
    return VF_OP(maxv)(v);
}

#include "simd_words.inc"
