/* avx512_f32.c: every kernel for float32, compiled for x86-64 with AVX-512 F, VL, DQ and BW. */
#include "kernels.h"

#if MHA_HAVE_X86
#define MHA_ISA avx512
#define VF_F64 0
#include "simd_avx512.h"
#include "texts.inc"
#endif
