/*
 * isa_neon.c: every kernel compiled for 64-bit Arm, which always has NEON.
 * The region between the pragmas is the only code of this file; everything in it is static
 * but the two tables, so that no function built with wider instructions can be picked by others.
 */
#include "runtime/common.h"
#include "kernels.h"

#include <math.h>
#include <string.h>

#if MHA_HAVE_NEON
#include <arm_neon.h>

#define MHA_ISA neon

#define VF_F64 0
#include "simd_neon.h"
#include "texts.inc"

#undef VF_F64
#define VF_F64 1
#include "simd_neon.h"
#include "texts.inc"
#endif
