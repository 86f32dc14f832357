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
#else
#define VF_LANES 4
#define VF_OP(op) v##op##q_f32
#endif
#define VF_LOW(a, b) VF_OP(zip1)(a, b)
#define VF_HIGH(a, b) VF_OP(zip2)(a, b)

/* 4 x 4 sums: 2 multiply-adds a load, which the two load units of Apple's cores ask for; 6 x 4 would spill. */
#define VF_TILE_ROWS 4
#define VF_TILE_VECTORS 4
#define VF_ACCUMULATORS 16

#define VF_FUSED 1
#define VF_OWN_SIGN 1 /* vf_abs and vf_copysign are here: an instruction each */

#include "simd_words.inc"

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
    return VF_OP(bsl)((vf_bits)vf_first_lanes(n), v, fill);
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

MHA_INLINE vf
vf_abs(vf a)
{
    return VF_OP(abs)(a);
}

MHA_INLINE vf
vf_copysign(vf a, vf sign)
{
    return VF_OP(bsl)(to_bits(vf_set1((real)-0.0)), sign, a);
}

MHA_INLINE vf
vf_select_lt(vf a, vf b, vf x, vf y)
{
    return VF_OP(bsl)(VF_OP(clt)(a, b), x, y);
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
