/*
 * simd_avx512.h: the vector vocabulary (README.md) for AVX-512 F, VL, DQ, BW.
 * A register holds 16 float or 8 double; there are 32 of them, and mask
 * registers (one bit a lane) that let a load or store skip lanes for good:
 * a skipped lane cannot fault.
 */
#include "simd_number.h"

#include <immintrin.h>

/* The target for the rest of the including file, in which all but the table is static: no other file uses wide code. */
#if defined(__clang__)
#define VF_CLANG_TARGET 1 /* texts.inc ends it */
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")
#endif

#if VF_F64
#define VF_LANES 8
#define VF_OP(op) _mm512_##op##_pd
#define VF_BLOCKS(a, b, order) _mm512_shuffle_f64x2(a, b, order)
#define VF_FIRST_BLOCK(p) _mm512_castpd128_pd512(_mm_loadu_pd(p))
#define VF_INSERT_BLOCK(v, p, at) _mm512_insertf64x2(v, _mm_loadu_pd(p), at)
#define VF_LESS(a, b) _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ)
#define VF_NOT_LESS(a, b) _mm512_cmp_pd_mask(a, b, _CMP_NLT_UQ)
typedef __mmask8 vf_mask;
#else
#define VF_LANES 16
#define VF_OP(op) _mm512_##op##_ps
#define VF_BLOCKS(a, b, order) _mm512_shuffle_f32x4(a, b, order)
#define VF_FIRST_BLOCK(p) _mm512_castps128_ps512(_mm_loadu_ps(p))
#define VF_INSERT_BLOCK(v, p, at) _mm512_insertf32x4(v, _mm_loadu_ps(p), at)
#define VF_LESS(a, b) _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)
#define VF_NOT_LESS(a, b) _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ)
typedef __mmask16 vf_mask;
#endif
#define VF_X86 1
#define VF_OWN_MASK 1   /* vf_mask, vf_first_lanes and vf_zero_lt are defined here */
#define VF_OWN_SCALE2 1 /* vf_scale2 is defined here */
#define VF_LOW(a, b) VF_OP(unpacklo)(a, b)
#define VF_HIGH(a, b) VF_OP(unpackhi)(a, b)

/*
 * 6 x 4 sums, 4 vectors of the panel and 1 broadcast fill 29 of 32 registers.  12 x 2, for fewer columns, take as many
 * multiply-adds a step, but 14 loads where these take 10: 1.04 to 1.10 times as long (Xeon with AVX-512).
 */
#define VF_TILE_ROWS 12
#define VF_TILE_VECTORS 4
#define VF_ACCUMULATORS 24

#define VF_FUSED 1

#if !VF_F64
#define VF_TABLE 32 /* entries of a table that two registers hold */
#endif

#include "simd_words.inc"

/* A mask with the first n bits set, all of them if n >= VF_LANES. */
MHA_INLINE vf_mask
vf_first_lanes(size_t n)
{
    return (vf_mask)((1u << mha_min(n, VF_LANES)) - 1u);
}

MHA_INLINE vf
vf_load_first(const real *p, size_t n)
{
    return VF_OP(maskz_loadu)(vf_first_lanes(n), p);
}

MHA_INLINE void
vf_store_first(real *p, vf v, size_t n)
{
    VF_OP(mask_storeu)(p, vf_first_lanes(n), v);
}

MHA_INLINE vf
vf_keep_first(vf v, size_t n, vf fill)
{
    return VF_OP(mask_blend)(vf_first_lanes(n), fill, v);
}

MHA_INLINE vf
vf_select_lt(vf a, vf b, vf x, vf y)
{
    return VF_OP(mask_blend)(VF_LESS(a, b), y, x);
}

MHA_INLINE vf
vf_zero_lt(vf a, vf b, vf x)
{
    return VF_OP(maskz_mov)(VF_NOT_LESS(a, b), x);
}

#if !VF_F64
MHA_INLINE vf
vf_table(const real *table, vf x)
{
    const vf_bits index = (vf_bits)x >> (VF_MANTISSA - 2); /* its low five bits count */
    return _mm512_permutex2var_ps(vf_load(table), (__m512i)index, vf_load(table + VF_LANES));
}
#endif

/* One instruction does it all, but it takes n itself, not k. */
MHA_INLINE vf
vf_scale2(vf a, vf k)
{
    return VF_OP(scalef)(a, k - vf_set1(VF_SCALE2_BASE));
}

/* Halves are added until one lane is left. */
MHA_INLINE real
vf_hsum(vf v)
{
    return VF_OP(reduce_add)(v);
}

MHA_INLINE real
vf_hmax(vf v)
{
    return VF_OP(reduce_max)(v);
}

/* Blocks a0 a1 a2 a3 and b0 b1 b2 b3 become a0 a2 b0 b2 and a1 a3 b1 b3. */
MHA_INLINE void
sort_blocks(vf *a, vf *b)
{
    const vf even = VF_BLOCKS(*a, *b, 0x88);
    *b = VF_BLOCKS(*a, *b, 0xdd);
    *a = even;
}

/* Transposes the 4 x 4 blocks of the rows r[0], r[step], r[2 step], r[3 step]. */
MHA_INLINE void
transpose_blocks(vf *r, size_t step)
{
    sort_blocks(r, r + step);
    sort_blocks(r + 2 * step, r + 3 * step);
    sort_blocks(r, r + 2 * step);
    sort_blocks(r + step, r + 3 * step);
}

/*
 * First inside the blocks, then the blocks. All is inlined and every index a
 * constant in the end, so that the compiler keeps the array in registers.
 */
MHA_INLINE void
vf_transpose(vf r[VF_LANES])
{
    const size_t step = VF_LANES / 4; /* rows, and so columns, of a block */

    transpose_in_blocks(r);
    transpose_in_blocks(r + step);
    transpose_in_blocks(r + 2 * step);
    transpose_in_blocks(r + 3 * step);

    transpose_blocks(r, step);
    transpose_blocks(r + 1, step);
#if !VF_F64
    transpose_blocks(r + 2, step);
    transpose_blocks(r + 3, step);
#endif
}

/* Each block is loaded to its place, so blocks need no shuffling; any port can blend in a block from memory. */
MHA_INLINE void
vf_load_square(const real *p, ptrdiff_t row, vf r[VF_LANES])
{
    const size_t step = VF_LANES / 4;
    const ptrdiff_t quarter = (ptrdiff_t)step * row;
    const real *rows[4] = {p, p + quarter, p + 2 * quarter, p + 3 * quarter};

    MHA_UNROLL
    for (size_t i = 0; i < step; i++) { /* four rows at a time, so that few addresses are needed */
        MHA_UNROLL
        for (size_t block = 0; block < VF_LANES; block += step) {
            vf v = VF_FIRST_BLOCK(rows[0] + block);
            v = VF_INSERT_BLOCK(v, rows[1] + block, 1);
            v = VF_INSERT_BLOCK(v, rows[2] + block, 2);
            r[block + i] = VF_INSERT_BLOCK(v, rows[3] + block, 3);
        }
        MHA_UNROLL
        for (size_t lane = 0; lane < 4; lane++) {
            rows[lane] += row;
        }
    }
    transpose_in_blocks(r);
    transpose_in_blocks(r + step);
    transpose_in_blocks(r + 2 * step);
    transpose_in_blocks(r + 3 * step);
}

typedef uint64_t vw_word;
typedef vw_word vw __attribute__((vector_size(64)));

MHA_INLINE vw
vw_multiply(vw a, vw b, vw *low)
{
    *low = (vw)_mm512_mul_epu32((__m512i)a, (__m512i)b);
    return *low >> 32;
}
