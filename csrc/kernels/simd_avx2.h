/*
 * simd_avx2.h: the vector vocabulary (README.md) for AVX2 with FMA. A register
 * holds 8 float or 4 double; there are 16 of them. A mask is a register of
 * integers as wide as the numbers: all bits set where a lane counts, else 0.
 */
#include "simd_number.h"

#include <immintrin.h>

/* The target for the rest of the including file, in which all but the table is static: no other file uses wide code. */
#if defined(__clang__)
#define VF_CLANG_TARGET 1 /* texts.inc ends it */
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#if VF_F64
#define VF_LANES 4
#define VF_OP(op) _mm256_##op##_pd
#define VF_HALVES(a, b, order) _mm256_permute2f128_pd(a, b, order)
#define VF_TWO_BLOCKS(p, q) _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(p)), _mm_loadu_pd(q), 1)
#else
#define VF_LANES 8
#define VF_OP(op) _mm256_##op##_ps
#define VF_HALVES(a, b, order) _mm256_permute2f128_ps(a, b, order)
#define VF_TWO_BLOCKS(p, q) _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(q), 1)
#endif
#define VF_X86 1
#define VF_LOW(a, b) VF_OP(unpacklo)(a, b)
#define VF_HIGH(a, b) VF_OP(unpackhi)(a, b)

/* 6 x 2 sums, 2 vectors of the panel and 1 broadcast fill 15 of 16 registers. */
#define VF_TILE_ROWS 6
#define VF_TILE_VECTORS 2
#define VF_ACCUMULATORS 12

#define VF_FUSED 1

#include "simd_words.inc"

/* A lane that the mask leaves out is not accessed and cannot fault. */
MHA_INLINE vf
vf_load_first(const real *p, size_t n)
{
    return VF_OP(maskload)(p, (__m256i)vf_first_lanes(n));
}

MHA_INLINE void
vf_store_first(real *p, vf v, size_t n)
{
    if (n >= VF_LANES) { /* a masked store takes tens of cycles on Zen 2 to Zen 4, whatever the mask */
        vf_store(p, v);
    } else {
        VF_OP(maskstore)(p, (__m256i)vf_first_lanes(n), v);
    }
}

MHA_INLINE vf
vf_keep_first(vf v, size_t n, vf fill)
{
    return VF_OP(blendv)(fill, v, (vf)vf_first_lanes(n));
}

MHA_INLINE vf
vf_select_lt(vf a, vf b, vf x, vf y)
{
    return VF_OP(blendv)(y, x, VF_OP(cmp)(a, b, _CMP_LT_OQ));
}

/* The upper half onto the lower one, until one lane is left. */
MHA_INLINE real
vf_hsum(vf v)
{
#if VF_F64
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
#else
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#endif
}

MHA_INLINE real
vf_hmax(vf v)
{
#if VF_F64
    const __m128d two = _mm_max_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_max_sd(two, _mm_unpackhi_pd(two, two)));
#else
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#endif
}

/* Blocks a0 a1 and b0 b1 become a0 b0 and a1 b1. */
MHA_INLINE void
swap_blocks(vf *a, vf *b)
{
    const vf low = VF_HALVES(*a, *b, 0x20);
    *b = VF_HALVES(*a, *b, 0x31);
    *a = low;
}

/*
 * First inside the blocks, then the 2 x 2 blocks. All is inlined and every index
 * a constant in the end, so that the compiler keeps the array in registers.
 */
MHA_INLINE void
vf_transpose(vf r[VF_LANES])
{
    const size_t step = VF_LANES / 2; /* rows, and so columns, of a block */

    transpose_in_blocks(r);
    transpose_in_blocks(r + step);

    swap_blocks(r, r + step);
    swap_blocks(r + 1, r + 1 + step);
#if !VF_F64
    swap_blocks(r + 2, r + 2 + step);
    swap_blocks(r + 3, r + 3 + step);
#endif
}

/* Each block is loaded to its place, so blocks need no shuffling; any port can blend in a block from memory. */
MHA_INLINE void
vf_load_square(const real *p, ptrdiff_t row, vf r[VF_LANES])
{
    const size_t step = VF_LANES / 2;

    MHA_UNROLL
    for (size_t i = 0; i < VF_LANES; i++) { /* blocks i / step of the rows i % step and i % step + step */
        const real *block = p + (ptrdiff_t)(i % step) * row + (ptrdiff_t)(i / step * step);
        r[i] = VF_TWO_BLOCKS(block, block + (ptrdiff_t)step * row);
    }
    transpose_in_blocks(r);
    transpose_in_blocks(r + step);
}

typedef uint64_t vw_word;
typedef vw_word vw __attribute__((vector_size(32)));

MHA_INLINE vw
vw_multiply(vw a, vw b, vw *low)
{
    *low = (vw)_mm256_mul_epu32((__m256i)a, (__m256i)b);
    return *low >> 32;
}
