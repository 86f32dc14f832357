/*
 * isa_wasm.c: every kernel compiled for WebAssembly with SIMD128, which every browser has had since 2023.
 * A module is checked as a whole when it is loaded, so that nothing is chosen at run time: build with
 * MHA_NO_SIMD128 for an engine without.
 */
#include "runtime/common.h"
#include "kernels.h"

#include <math.h>
#include <string.h>

#if MHA_HAVE_WASM
#include <wasm_simd128.h>

#pragma clang attribute push(__attribute__((target("simd128"))), apply_to = function)

#define MHA_ISA wasm

#define VF_F64 0
#include "simd_wasm.h"
#include "texts.inc"

#undef VF_F64
#define VF_F64 1
#include "simd_wasm.h"
#include "texts.inc"

#pragma clang attribute pop
#endif
