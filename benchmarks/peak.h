/*
 * peak.h: the multiply-add rate that this core reaches on registers alone, in GFLOP/s.
 * Included by core.c, and compiled by machine.py into a small library of its own.
 */
#ifndef MHA_BENCH_PEAK_H
#define MHA_BENCH_PEAK_H

#include <time.h>

static double
seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* More independent sums than latency times throughput of any core asks for (about 10); the compiler keeps them in
 * registers because the loops over `i` are unrolled. */
#define PEAK_SUMS 12
#define PEAK_STEPS 20000
#define PEAK_PROBE(NAME, TARGET, LANES) \
    typedef float NAME##_vector __attribute__((vector_size(4 * LANES))); \
    TARGET __attribute__((noinline)) static float NAME##_run(float start) \
    { \
        NAME##_vector sum[PEAK_SUMS], factor, zero = {0}; \
        factor = zero + start; \
        for (int i = 0; i < PEAK_SUMS; i++) { \
            sum[i] = factor + (float)i; \
        } \
        for (int step = 0; step < PEAK_STEPS; step++) { \
            for (int i = 0; i < PEAK_SUMS; i++) { \
                sum[i] = sum[i] * factor + factor; \
            } \
        } \
        for (int i = 1; i < PEAK_SUMS; i++) { \
            sum[0] += sum[i]; \
        } \
        return sum[0][0]; \
    } \
    /* The rate over at least so many seconds: what this core gives at this moment. */ \
    static double NAME##_for(double seconds) \
    { \
        volatile float start = 0.5f, result; \
        const double begin = seconds_now(); \
        double taken = 0; \
        int runs = 0; \
        do { \
            result = NAME##_run(start); \
            taken = seconds_now() - begin; \
            runs++; \
        } while (taken < seconds); \
        (void)result; \
        return 2e-9 * PEAK_SUMS * PEAK_STEPS * LANES * runs / taken; \
    } \
    /* The best of 20 runs of some 60 us. */ \
    static double NAME(void) \
    { \
        double best = 0; \
        for (int run = 0; run < 20; run++) { \
            const double rate = NAME##_for(0); \
            best = rate > best ? rate : best; \
        } \
        return best; \
    }

#define PEAK_OPTIONS "O3", "fp-contract=fast"
#if defined(__x86_64__)
PEAK_PROBE(peak_avx512, __attribute__((target("avx512f"), optimize(PEAK_OPTIONS))), 16)
PEAK_PROBE(peak_avx2, __attribute__((target("avx2,fma"), optimize(PEAK_OPTIONS))), 8)
PEAK_PROBE(peak_scalar, __attribute__((optimize(PEAK_OPTIONS))), 4)
#elif defined(__wasm__) /* without a fused multiply-add: a product and a sum */
PEAK_PROBE(peak_wasm, __attribute__((target("simd128"))), 4)
PEAK_PROBE(peak_scalar, , 1)
#else
PEAK_PROBE(peak_neon, __attribute__((optimize(PEAK_OPTIONS))), 4)
PEAK_PROBE(peak_scalar, __attribute__((optimize(PEAK_OPTIONS))), 4)
#endif

#endif /* MHA_BENCH_PEAK_H */
