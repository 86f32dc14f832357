/*
 * isa_avx2.c: every kernel compiled for x86-64 with AVX2 and FMA.
 * The region between the pragmas is the only code of this file; everything in it is static
 * but the two tables, so that no function built with wider instructions can be picked by others.
 */
#include "runtime/common.h"
#include "kernels.h"

#include <math.h>
#include <string.h>

#if MHA_HAVE_X86
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

#define MHA_ISA avx2

#define VF_F64 0
#include "simd_avx2.h"
#include "texts.inc"

#undef VF_F64
#define VF_F64 1
#include "simd_avx2.h"
#include "texts.inc"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
