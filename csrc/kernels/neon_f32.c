/* neon_f32.c: every kernel for float32, compiled for 64-bit Arm, which always has NEON. */
#include "kernels.h"

#if MHA_HAVE_NEON
#define MHA_ISA neon
#define VF_F64 0
#include "simd_neon.h"
#include "texts.inc"
#endif
