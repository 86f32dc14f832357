/* wasm_f64.c: every kernel for float64, compiled for WebAssembly with SIMD128. */
#include "kernels.h"

#if MHA_HAVE_WASM
#define MHA_ISA wasm
#define VF_F64 1
#include "simd_wasm.h"
#include "texts.inc"
#endif
