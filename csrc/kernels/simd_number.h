/*
 * simd_number.h: the number type, float where VF_F64 is 0 and double where it is 1, for each vocabulary simd_<isa>.h.
 *
 * A number of the type has a sign bit, an exponent (stored plus VF_BIAS) and
 * VF_MANTISSA bits of mantissa. VF_MAGIC is 1.5 * 2^VF_MANTISSA: near it the type
 * has exactly the whole numbers. So adding it rounds to a whole number, which then
 * stands in the low bits as an integer.
 */
#include "runtime/common.h"

#include <math.h>
#include <string.h>

#if VF_F64
#define real double
#define VF_BITS uint64_t /* the integer of the same size */
#define VF_SIGNED int64_t
#define VF_TYPE f64
#define VF_MANTISSA 52
#define VF_BIAS 1023
#define VF_MAGIC 6755399441055744.0
#else
#define real float
#define VF_BITS uint32_t
#define VF_SIGNED int32_t
#define VF_TYPE f32
#define VF_MANTISSA 23
#define VF_BIAS 127
#define VF_MAGIC 12582912.0f
#endif

/* The k that stands for n = 0 in vf_pow2(k) and in vf_scale2(a, k). */
#define VF_POW2_BASE (VF_MAGIC + VF_BIAS)
#define VF_SCALE2_BASE (VF_MAGIC - 1)
