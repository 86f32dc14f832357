/*
 * simd_names.h: gives every word of the vector vocabulary (README.md) the names
 * of its type and ISA, so that one translation unit may hold several: with
 * VF_F64 0 and MHA_ISA avx2, the text `vf_add` becomes vf_add_f32_avx2.
 * Each simd_<isa>.h includes it first; it takes back what the one before it
 * defined. The functions stay: their names carry the type.
 *
 * A number of the type has a sign bit, an exponent (stored plus VF_BIAS) and
 * VF_MANTISSA bits of mantissa. VF_MAGIC is 1.5 * 2^VF_MANTISSA: around it the
 * numbers are exactly the whole ones, so that adding it rounds to a whole
 * number, which then stands in the low bits as an integer.
 */
#undef real
#undef VF_TYPE
#undef VF_MANTISSA
#undef VF_BIAS
#undef VF_MAGIC
#undef VF_OP
#undef VF_BLOCKS
#undef VF_HALVES
#undef VF_TWO_BLOCKS
#undef VF_FIRST_BLOCK
#undef VF_INSERT_BLOCK
#undef VF_EXPONENT
#undef VF_INT
#undef VF_TO_INT
#undef VF_FROM_INT
#undef VF_LESS
#undef VF_NOT_LESS
#undef VF_BITS
#undef VF_LANES
#undef VF_TILE_ROWS
#undef VF_TILE_VECTORS
#undef VF_ACCUMULATORS
#undef VF_FUSED
#undef VF_MASKED
#undef VF_TABLE
#undef VF_FOUR
#undef VF_X86
#undef VF_SPLAT
#undef VF_SHIFT
#undef VF_SUM
#undef VF_LOW
#undef VF_HIGH
#undef VF_SIGN

#if VF_F64
#define real double
#define VF_TYPE f64
#define VF_MANTISSA 52
#define VF_BIAS 1023
#define VF_MAGIC 6755399441055744.0
#else
#define real float
#define VF_TYPE f32
#define VF_MANTISSA 23
#define VF_BIAS 127
#define VF_MAGIC 12582912.0f
#endif

#ifndef MHA_SIMD_NAMES_H
#define MHA_SIMD_NAMES_H

#define VF_PASTE_(word, type, isa) word##_##type##_##isa
#define VF_PASTE(word, type, isa) VF_PASTE_(word, type, isa)
#define VF_NAME(word) VF_PASTE(word, VF_TYPE, MHA_ISA)

/* What stands for n = 0 in the k of vf_pow2(k) and of vf_scale2(a, k). */
#define VF_POW2_BASE (VF_MAGIC + VF_BIAS)
#define VF_SCALE2_BASE (VF_MAGIC - 1)

#define vf VF_NAME(vf)
#define vf_mask VF_NAME(vf_mask)
#define vf_set1 VF_NAME(vf_set1)
#define vf_zero VF_NAME(vf_zero)
#define vf_load VF_NAME(vf_load)
#define vf_store VF_NAME(vf_store)
#define vf_load_first VF_NAME(vf_load_first)
#define vf_store_first VF_NAME(vf_store_first)
#define vf_keep_first VF_NAME(vf_keep_first)
#define vf_first_lanes VF_NAME(vf_first_lanes)
#define vf_add VF_NAME(vf_add)
#define vf_sub VF_NAME(vf_sub)
#define vf_mul VF_NAME(vf_mul)
#define vf_div VF_NAME(vf_div)
#define vf_fma VF_NAME(vf_fma)
#define vf_fnma VF_NAME(vf_fnma)
#define vf_max VF_NAME(vf_max)
#define vf_min VF_NAME(vf_min)
#define vf_abs VF_NAME(vf_abs)
#define vf_copysign VF_NAME(vf_copysign)
#define vf_select_lt VF_NAME(vf_select_lt)
#define vf_zero_lt VF_NAME(vf_zero_lt)
#define vf_table VF_NAME(vf_table)
#define vf_pow2 VF_NAME(vf_pow2)
#define vf_scale2 VF_NAME(vf_scale2)
#define vf_hsum VF_NAME(vf_hsum)
#define vf_hmax VF_NAME(vf_hmax)
#define vf_hsum4 VF_NAME(vf_hsum4)
#define vf_hmax4 VF_NAME(vf_hmax4)
#define vf_transpose VF_NAME(vf_transpose)
#define vf_load_square VF_NAME(vf_load_square)
#define vf_exp VF_NAME(vf_exp)
#define vf_exp_falling VF_NAME(vf_exp_falling)
#define vf_tanh VF_NAME(vf_tanh)
#define vw VF_NAME(vw)
#define vw_word VF_NAME(vw_word)
#define vw_multiply VF_NAME(vw_multiply)

#endif
