/*
 * simd_undef.h: takes back every macro of simd_names.h and simd_<isa>.h, so that
 * the next type can be defined. The functions stay: their names carry the type.
 * On purpose without an include guard.
 */
#undef real
#undef VF_NAME
#undef VF_PASTE
#undef VF_PASTE_
#undef VF_MANTISSA
#undef VF_BIAS
#undef VF_MAGIC
#undef VF_POW2_BASE
#undef VF_SCALE2_BASE
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
#undef VF_SIGN
#undef VF_LANES
#undef VF_TILE_ROWS
#undef VF_TILE_VECTORS
#undef VF_ACCUMULATORS
#undef VF_FUSED
#undef VF_TABLE
#undef VF_F64

#undef vf
#undef vf_mask
#undef vf_set1
#undef vf_zero
#undef vf_load
#undef vf_store
#undef vf_load_first
#undef vf_store_first
#undef vf_keep_first
#undef vf_first_lanes
#undef vf_add
#undef vf_sub
#undef vf_mul
#undef vf_div
#undef vf_fma
#undef vf_fnma
#undef vf_max
#undef vf_min
#undef vf_abs
#undef vf_copysign
#undef vf_select_lt
#undef vf_zero_lt
#undef vf_round
#undef vf_table
#undef vf_pow2
#undef vf_scale2
#undef vf_hsum
#undef vf_hmax
#undef vf_transpose
#undef vf_load_square
#undef vf_exp
#undef vf_tanh

#undef vw
#undef vw_multiply
