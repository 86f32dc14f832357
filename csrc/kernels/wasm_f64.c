/*
 * wasm_f64.c: every kernel for float64, compiled for WebAssembly with SIMD128, which every browser has had since 2023.
 * A module is checked as a whole when it is loaded, so that nothing is chosen at run time: build with
 * MHA_NO_SIMD128 for an engine without.
 */
#include "kernels.h"

#if MHA_HAVE_WASM
#define MHA_ISA wasm
#define VF_F64 1
#include "simd_wasm.h"
#include "texts.inc"
#endif
