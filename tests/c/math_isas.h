/*
 * math_isas.h: the words of the vector vocabulary (csrc/kernels/README.md) behind
 * pointers, one table per instruction set, for test_math.c. The functions come
 * from math_isa.inc, compiled once per ISA in a target region as in csrc/kernels.
 */
#include "runtime/common.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__wasm__)
#include <wasm_simd128.h>
#endif

/* Most lanes of any ISA. */
#define MOST_LANES 16

/* The words that take up to three vectors and give one. */
enum word { ADD, SUB, MUL, DIV, FMA, FNMA, MAX, MIN, ABS, COPYSIGN, SELECT_LT, ZERO_LT, POW2, SCALE2, WORDS };

/*
 * exp, exp_double, tanh: n numbers from `in` to `out`, n a multiple of the lanes
 * words: a vector of each word's result. SELECT_LT is a < b ? a : c, ZERO_LT a < b ? 0 : c, COPYSIGN has
 *   |a| with the sign of b; POW2 is 2^a and SCALE2 is a 2^b, a and b without base
 */
#define TABLE(real, type) \
    struct math_##type { \
        const char *isa; \
        size_t lanes; \
        int fused; /* is fma one rounding? */ \
        void (*exp)(real * out, const real *in, size_t n); \
        void (*exp_double)(real * out, const real *in, size_t n); \
        void (*tanh)(real * out, const real *in, size_t n); \
        void (*words)(real out[WORDS][MOST_LANES], const real *a, const real *b, const real *c); \
        void (*load_first)(real * out, const real *p, size_t n); \
        void (*store_first)(real * p, const real *v, size_t n); \
        void (*keep_first)(real * out, const real *v, size_t n, const real *fill); \
        real (*hsum)(const real *v); \
        real (*hmax)(const real *v); \
        void (*transpose)(real * square); /* lanes rows of lanes numbers */ \
    };
TABLE(float, f32)
TABLE(double, f64)

struct math_isa {
    int (*available)(void);
    struct math_f32 f32;
    struct math_f64 f64;
};

#define FUNCTIONS(type, isa) \
    {#isa, \
     lanes_##type##_##isa, \
     fused_##type##_##isa, \
     exp_array_##type##_##isa, \
     exp_double_array_##type##_##isa, \
     tanh_array_##type##_##isa, \
     words_##type##_##isa, \
     load_first_##type##_##isa, \
     store_first_##type##_##isa, \
     keep_first_##type##_##isa, \
     hsum_##type##_##isa, \
     hmax_##type##_##isa, \
     transpose_##type##_##isa}

static int
always(void)
{
    return 1;
}

#if defined(FIRST_ISA) /* as in first_isa.h: under emulation scalar would take half of the time */
static int
never(void)
{
    return 0;
}
#define WANT_SCALAR never
#else
#define WANT_SCALAR always
#endif

#define MHA_ISA scalar
#define SIMD_HEADER "kernels/simd_scalar.h"
#include "math_isa.inc"

#if defined(__x86_64__)
static int
have_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static int
have_avx512(void)
{
    return have_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}

#if !defined(__clang__)
#pragma GCC push_options
#endif
#define MHA_ISA avx2
#define SIMD_HEADER "kernels/simd_avx2.h"
#include "math_isa.inc"
#if !defined(__clang__)
#pragma GCC pop_options
#pragma GCC push_options
#endif
#define MHA_ISA avx512
#define SIMD_HEADER "kernels/simd_avx512.h"
#include "math_isa.inc"
#if !defined(__clang__)
#pragma GCC pop_options
#endif
#endif

#if defined(__aarch64__)
#define MHA_ISA neon
#define SIMD_HEADER "kernels/simd_neon.h"
#include "math_isa.inc"
#endif

#if defined(__wasm__)
#define MHA_ISA wasm
#define SIMD_HEADER "kernels/simd_wasm.h"
#include "math_isa.inc"
#endif

static const struct math_isa isas[] = {
    {WANT_SCALAR, FUNCTIONS(f32, scalar), FUNCTIONS(f64, scalar)},
#if defined(__x86_64__)
    {have_avx2, FUNCTIONS(f32, avx2), FUNCTIONS(f64, avx2)},
    {have_avx512, FUNCTIONS(f32, avx512), FUNCTIONS(f64, avx512)},
#elif defined(__aarch64__)
    {always, FUNCTIONS(f32, neon), FUNCTIONS(f64, neon)},
#elif defined(__wasm__)
    {always, FUNCTIONS(f32, wasm), FUNCTIONS(f64, wasm)},
#endif
};
