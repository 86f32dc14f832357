/*
 * simd_neon.h: the vector vocabulary (README.md) for NEON of 64-bit Arm. A
 * register holds 4 float or 2 double; there are 32 of them. NEON has no masked
 * loads, so part of a vector goes number by number through a small array.
 * Included once per type, VF_F64 being 0 or 1. Wants <arm_neon.h>.
 */
#include "simd_names.h"

#if VF_F64
#define VF_LANES 2
#define VF_OP(op) op##_f64
#define VF_INT(op) op##_u64
#define VF_TO_INT(v) vreinterpretq_u64_f64(v)
#define VF_FROM_INT(i) vreinterpretq_f64_u64(i)
#define VF_SIGN ((uint64_t)1 << 63)
typedef float64x2_t vf;
typedef uint64x2_t vf_mask;
#else
#define VF_LANES 4
#define VF_OP(op) op##_f32
#define VF_INT(op) op##_u32
#define VF_TO_INT(v) vreinterpretq_u32_f32(v)
#define VF_FROM_INT(i) vreinterpretq_f32_u32(i)
#define VF_SIGN ((uint32_t)1 << 31)
typedef float32x4_t vf;
typedef uint32x4_t vf_mask;
#endif

/* 4 x 4 sums: 2 multiply-adds a load, which the two load units of Apple's cores ask for; 6 x 4 would spill. */
#define VF_TILE_ROWS 4
#define VF_TILE_VECTORS 4
#define VF_ACCUMULATORS 16

#define VF_FUSED 1

MHA_INLINE vf
vf_set1(real x)
{
    return VF_OP(vdupq_n)(x);
}

MHA_INLINE vf
vf_zero(void)
{
    return VF_OP(vdupq_n)(0);
}

MHA_INLINE vf
vf_load(const real *p)
{
    return VF_OP(vld1q)(p);
}

MHA_INLINE void
vf_store(real *p, vf v)
{
    VF_OP(vst1q)(p, v);
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
    return VF_OP(vbslq)(vf_first_lanes(n), v, fill);
}

MHA_INLINE vf
vf_add(vf a, vf b)
{
    return VF_OP(vaddq)(a, b);
}

MHA_INLINE vf
vf_sub(vf a, vf b)
{
    return VF_OP(vsubq)(a, b);
}

MHA_INLINE vf
vf_mul(vf a, vf b)
{
    return VF_OP(vmulq)(a, b);
}

MHA_INLINE vf
vf_div(vf a, vf b)
{
    return VF_OP(vdivq)(a, b);
}

/* NEON takes the addend first. */
MHA_INLINE vf
vf_fma(vf a, vf b, vf c)
{
    return VF_OP(vfmaq)(c, a, b);
}

MHA_INLINE vf
vf_fnma(vf a, vf b, vf c)
{
    return VF_OP(vfmsq)(c, a, b);
}

/* Not the max of NEON, which is NaN for a NaN in a: the words give b then. */
MHA_INLINE vf
vf_max(vf a, vf b)
{
    return VF_OP(vbslq)(VF_OP(vcgtq)(a, b), a, b);
}

MHA_INLINE vf
vf_min(vf a, vf b)
{
    return VF_OP(vbslq)(VF_OP(vcltq)(a, b), a, b);
}

MHA_INLINE vf
vf_abs(vf a)
{
    return VF_OP(vabsq)(a);
}

MHA_INLINE vf
vf_copysign(vf a, vf sign)
{
    return VF_OP(vbslq)(VF_INT(vdupq_n)(VF_SIGN), sign, a);
}

MHA_INLINE vf
vf_select_lt(vf a, vf b, vf x, vf y)
{
    return VF_OP(vbslq)(VF_OP(vcltq)(a, b), x, y);
}

MHA_INLINE vf
vf_zero_lt(vf a, vf b, vf x)
{
    return VF_FROM_INT(VF_INT(vbicq)(VF_TO_INT(x), VF_OP(vcltq)(a, b)));
}

MHA_INLINE vf
vf_round(vf a)
{
    return VF_OP(vrndnq)(a);
}

/* The low bits of k, n plus the bias, move up to where the exponent lies. */
MHA_INLINE vf
vf_pow2(vf k)
{
    return VF_FROM_INT(VF_INT(vshlq_n)(VF_TO_INT(k), VF_MANTISSA));
}

/*
 * The low bits of k, n - 1, are added to the exponent of a: half of what is wanted, so that inf comes by itself.
 * k - k is 0, but NaN for NaN, whose bits that sum does not keep.
 */
MHA_INLINE vf
vf_scale2(vf a, vf k)
{
    const vf half = VF_FROM_INT(VF_INT(vaddq)(VF_TO_INT(a), VF_INT(vshlq_n)(VF_TO_INT(k), VF_MANTISSA)));
    return vf_fma(half, vf_set1(2), vf_sub(k, k));
}

MHA_INLINE real
vf_hsum(vf v)
{
#if !VF_F64
    v = vaddq_f32(v, vextq_f32(v, v, 2)); /* lane j and j + 2 first; vaddvq alone takes neighbours */
    return vpadds_f32(vget_low_f32(v));
#else
    return VF_OP(vaddvq)(v);
#endif
}

MHA_INLINE real
vf_hmax(vf v)
{
    return VF_OP(vmaxvq)(v);
}

/* Of a0 a1 a2 a3 and b0 b1 b2 b3 (float): a0 b0 a1 b1 and a2 b2 a3 b3. */
MHA_INLINE void
VF_NAME(interleave)(vf *a, vf *b)
{
    const vf low = VF_OP(vzip1q)(*a, *b);
    *b = VF_OP(vzip2q)(*a, *b);
    *a = low;
}

MHA_INLINE void
vf_transpose(vf r[VF_LANES])
{
#if !VF_F64
    VF_NAME(interleave)(r, r + 2);
    VF_NAME(interleave)(r + 1, r + 3);
    VF_NAME(interleave)(r + 2, r + 3);
#endif
    VF_NAME(interleave)(r, r + 1);
}

#include "load_square.inc"

typedef uint64x2_t vw;

MHA_INLINE vw
vw_multiply(vw a, vw b)
{
    return vmull_u32(vmovn_u64(a), vmovn_u64(b));
}
