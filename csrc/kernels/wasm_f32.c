/* wasm_f32.c: every kernel for float32, compiled for WebAssembly with SIMD128. */
#include "kernels.h"

#if MHA_HAVE_WASM
#define MHA_ISA wasm
#define VF_F64 0
#include "simd_wasm.h"
#include "texts.inc"
#endif
