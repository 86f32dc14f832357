/* scalar_f32.c: every kernel for float32, in plain C, a number at a time: the baseline that runs everywhere. */
#include "kernels.h"

#define MHA_ISA scalar
#define VF_F64 0
#include "simd_scalar.h"
#include "texts.inc"
