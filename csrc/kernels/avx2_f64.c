/* avx2_f64.c: every kernel for float64, compiled for x86-64 with AVX2 and FMA. */
#include "kernels.h"

#if MHA_HAVE_X86
#define MHA_ISA avx2
#define VF_F64 1
#include "simd_avx2.h"
#include "texts.inc"
#endif
