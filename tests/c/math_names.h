/*
 * math_names.h: lets one file hold several vocabularies (csrc/kernels/simd_<isa>.h), which are written for a file each:
 * with VF_F64 0 and MHA_ISA avx2 the text `vf_fma` becomes vf_fma_f32_avx2.  Included before each vocabulary; it takes
 * back the macros of the one before.  A name that is missing here is defined twice, and nothing compiles.
 */
#undef real
#undef VF_TYPE
#undef VF_MANTISSA
#undef VF_BIAS
#undef VF_MAGIC
#undef VF_POW2_BASE
#undef VF_SCALE2_BASE
#undef VF_CLANG_TARGET
#undef VF_ACCUMULATORS
#undef VF_BITS
#undef VF_BLOCKS
#undef VF_FIRST_BLOCK
#undef VF_FUSED
#undef VF_HALVES
#undef VF_HIGH
#undef VF_INSERT_BLOCK
#undef VF_LANES
#undef VF_LESS
#undef VF_LOW
#undef VF_NOT_LESS
#undef VF_OP
#undef VF_OWN_MASK
#undef VF_OWN_MAX
#undef VF_OWN_SCALE2
#undef VF_OWN_SIGN
#undef VF_SIGNED
#undef VF_TABLE
#undef VF_TILE_ROWS
#undef VF_TILE_VECTORS
#undef VF_TWO_BLOCKS
#undef VF_X86
#undef VF_LOG2E
#undef VF_LN2_HIGH
#undef VF_LN2_LOW
#undef VF_HALF_LN2
#undef VF_HALF_LN2_LOW
#undef VF_EXP_MAX
#undef VF_EXP_MIN
#undef VF_TANH_MAX

#ifndef MATH_NAMES_H
#define MATH_NAMES_H

#define VF_PASTE_(word, type, isa) word##_##type##_##isa
#define VF_PASTE(word, type, isa) VF_PASTE_(word, type, isa)
#define VF_NAME(word) VF_PASTE(word, VF_TYPE, MHA_ISA)

#define exp_tail VF_NAME(exp_tail)
#define interleave VF_NAME(interleave)
#define reduce_pair VF_NAME(reduce_pair)
#define reduce4 VF_NAME(reduce4)
#define sort_blocks VF_NAME(sort_blocks)
#define swap_blocks VF_NAME(swap_blocks)
#define tanh_reduce VF_NAME(tanh_reduce)
#define tanh_tail VF_NAME(tanh_tail)
#define to_bits VF_NAME(to_bits)
#define from_bits VF_NAME(from_bits)
#define transpose_blocks VF_NAME(transpose_blocks)
#define transpose_in_blocks VF_NAME(transpose_in_blocks)
#define vf VF_NAME(vf)
#define vf_abs VF_NAME(vf_abs)
#define vf_anywhere VF_NAME(vf_anywhere)
#define vf_bits VF_NAME(vf_bits)
#define vf_copysign VF_NAME(vf_copysign)
#define vf_exp VF_NAME(vf_exp)
#define vf_exp_double VF_NAME(vf_exp_double)
#define vf_exp_falling VF_NAME(vf_exp_falling)
#define vf_first_lanes VF_NAME(vf_first_lanes)
#define vf_fma VF_NAME(vf_fma)
#define vf_fnma VF_NAME(vf_fnma)
#define vf_hmax VF_NAME(vf_hmax)
#define vf_hsum VF_NAME(vf_hsum)
#define vf_keep_first VF_NAME(vf_keep_first)
#define vf_load VF_NAME(vf_load)
#define vf_load_first VF_NAME(vf_load_first)
#define vf_load_square VF_NAME(vf_load_square)
#define vf_mask VF_NAME(vf_mask)
#define vf_max VF_NAME(vf_max)
#define vf_min VF_NAME(vf_min)
#define vf_pow2 VF_NAME(vf_pow2)
#define vf_scale2 VF_NAME(vf_scale2)
#define vf_select_lt VF_NAME(vf_select_lt)
#define vf_set1 VF_NAME(vf_set1)
#define vf_store VF_NAME(vf_store)
#define vf_store_first VF_NAME(vf_store_first)
#define vf_table VF_NAME(vf_table)
#define vf_tanh VF_NAME(vf_tanh)
#define vf_transpose VF_NAME(vf_transpose)
#define vf_zero VF_NAME(vf_zero)
#define vf_zero_lt VF_NAME(vf_zero_lt)
#define vw VF_NAME(vw)
#define vw_multiply VF_NAME(vw_multiply)
#define vw_word VF_NAME(vw_word)

#endif
