/*
 * isa_scalar.c: every kernel compiled for plain C, one number at a time: the baseline that runs everywhere.
 */
#include "runtime/common.h"
#include "kernels.h"

#include <math.h>
#include <string.h>

#define MHA_ISA scalar

#define VF_F64 0
#include "simd_scalar.h"
#include "texts.inc"

#undef VF_F64
#define VF_F64 1
#include "simd_scalar.h"
#include "texts.inc"
