/* scalar_f64.c: every kernel for float64, in plain C, a number at a time: the baseline that runs everywhere. */
#include "kernels.h"

#define MHA_ISA scalar
#define VF_F64 1
#include "simd_scalar.h"
#include "texts.inc"
