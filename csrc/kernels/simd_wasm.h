/*
 * simd_wasm.h: the vector vocabulary (README.md) for SIMD128 of WebAssembly, which every browser has had since 2023. A
 * vector holds 4 float or 2 double. It has no multiply-add with one rounding that gives the same bits on every machine,
 * so a product and a sum round twice, as in simd_scalar.h: exp, tanh and products have the same bits as there.
 * An engine checks a module as a whole when it loads it, so nothing is chosen at run time: for an engine without
 * SIMD128, build with MHA_NO_SIMD128.
 */
#include "simd_number.h"

#include <wasm_simd128.h>

/* The target for the rest of the including file. */
#define VF_CLANG_TARGET 1
#pragma clang attribute push(__attribute__((target("simd128"))), apply_to = function)

#if VF_F64
#define VF_LANES 2
#define VF_OP(op) wasm_f64x2_##op
#define VF_LOW(a, b) wasm_i64x2_shuffle(a, b, 0, 2)
#define VF_HIGH(a, b) wasm_i64x2_shuffle(a, b, 1, 3)
#else
#define VF_LANES 4
#define VF_OP(op) wasm_f32x4_##op
#define VF_LOW(a, b) wasm_i32x4_shuffle(a, b, 0, 4, 1, 5)
#define VF_HIGH(a, b) wasm_i32x4_shuffle(a, b, 2, 6, 3, 7)
#endif

/* 4 x 2 sums, 2 vectors of the panel, a broadcast and a product: 12 of the 16 registers of the x86 below. */
#define VF_TILE_ROWS 4
#define VF_TILE_VECTORS 2
#define VF_ACCUMULATORS 8

#define VF_FUSED 0
#define VF_OWN_MAX 1

#include "simd_words.inc"

/* Halves of a vector and lanes have loads and stores of their own, which touch nothing else. */
MHA_INLINE vf
vf_load_first(const real *p, size_t n)
{
    if (n >= VF_LANES) {
        return vf_load(p);
    }
#if VF_F64
    return n == 0 ? vf_zero() : wasm_v128_load64_zero(p);
#else
    if (n == 3) {
        return wasm_v128_load32_lane(p + 2, wasm_v128_load64_zero(p), 2);
    }
    return n == 0 ? vf_zero() : n == 1 ? wasm_v128_load32_zero(p) : wasm_v128_load64_zero(p);
#endif
}

MHA_INLINE void
vf_store_first(real *p, vf v, size_t n)
{
    if (n >= VF_LANES) {
        vf_store(p, v);
        return;
    }
#if VF_F64
    if (n == 1) {
        wasm_v128_store64_lane(p, v, 0);
    }
#else
    if (n >= 2) {
        wasm_v128_store64_lane(p, v, 0);
    }
    if (n == 3) {
        wasm_v128_store32_lane(p + 2, v, 2);
    } else if (n == 1) {
        wasm_v128_store32_lane(p, v, 0);
    }
#endif
}

MHA_INLINE vf
vf_keep_first(vf v, size_t n, vf fill)
{
    return wasm_v128_bitselect(v, fill, vf_first_lanes(n));
}

/* pmax(b, a) is b < a ? a : b, and so b for a NaN in either. */
MHA_INLINE vf
vf_max(vf a, vf b)
{
    return VF_OP(pmax)(b, a);
}

MHA_INLINE vf
vf_min(vf a, vf b)
{
    return VF_OP(pmin)(b, a);
}

MHA_INLINE vf
vf_select_lt(vf a, vf b, vf x, vf y)
{
    return wasm_v128_bitselect(x, y, VF_OP(lt)(a, b));
}

/* The upper half onto the lower one, until one lane is left. */
MHA_INLINE real
vf_hsum(vf v)
{
#if !VF_F64
    v = VF_OP(add)(v, wasm_i64x2_shuffle(v, v, 1, 1));
#endif
    return VF_OP(extract_lane)(v, 0) + VF_OP(extract_lane)(v, 1);
}

MHA_INLINE real
vf_hmax(vf v)
{
    v = vf_max(v, wasm_i64x2_shuffle(v, v, 1, 1));
#if !VF_F64
    v = vf_max(v, wasm_i32x4_shuffle(v, v, 1, 1, 1, 1));
#endif
    return VF_OP(extract_lane)(v, 0);
}
