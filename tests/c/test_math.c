/*
 * test_math.c: exp and tanh of csrc/kernels/math.inc, and every other word of the
 * vector vocabulary, in each instruction set that this CPU has.
 *
 *     cc -O2 -std=c11 -ffp-contract=off -pthread -Icsrc -Itests/c tests/c/test_math.c -lm -o test_math
 *     ./test_math          all floats from 2^-26 to 128, where exp and tanh say something, and every 257th of the
 * others
 *     ./test_math full     all 2^32: a minute or two
 *     ./test_math quick    every 257th, and every 4099th of the others
 *     ./test_math time     how long a number takes
 *
 * Prints the largest errors in ULP (units in the last place of the correctly
 * rounded result, subnormals included) and exits with 1 if a check failed.
 *
 * nightly: full
 */
#define _GNU_SOURCE
#include "math_isas.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "callers.h"
#include "check.h"
#include "pages.h"

#define ISAS (sizeof isas / sizeof isas[0])
#define BLOCK 2048
#define EXP_BOUND 1.0
#define EXP_DOUBLE_BOUND 2.0
#define TANH_BOUND 2.0

#undef real /* the last vocabulary's */
#define real float
#define TYPE "float32"
#define NAME(x) x##_f32
#define FUSED_FMA fmaf
#define LARGEST FLT_MAX
#define NORMAL FLT_MIN
#define SMALLEST 0x1p-149f
#define POW2_RANGE 126
#define SCALE2_LEAST (-124)
#define SCALE2_MOST 128
#include "math_words.inc"
#undef real
#undef TYPE
#undef NAME
#undef FUSED_FMA
#undef LARGEST
#undef NORMAL
#undef SMALLEST
#undef POW2_RANGE
#undef SCALE2_LEAST
#undef SCALE2_MOST

#define real double
#define TYPE "float64"
#define NAME(x) x##_f64
#define FUSED_FMA fma
#define LARGEST DBL_MAX
#define NORMAL DBL_MIN
#define SMALLEST 0x1p-1074
#define POW2_RANGE 1022
#define SCALE2_LEAST (-1020)
#define SCALE2_MOST 1024
#include "math_words.inc"

/* The largest error seen and where; one for exp and one for tanh of each ISA. */
struct worst {
    double error[2], at[2];
};

static void
note(struct worst *worst, int which, double error, double x)
{
    if (error > worst->error[which]) {
        worst->error[which] = error;
        worst->at[which] = x;
    }
}

/*
 * Error of a float against the true value. An ULP is 2^(e - 23) with e the exponent of
 * the true value, at least -126. Infinity counts as 2^128, the number after the largest.
 */
static double
ulps_f32(float got, double want)
{
    uint64_t bits;
    memcpy(&bits, &want, sizeof bits);
    uint64_t exponent = bits >> 52 & 2047; /* biased with 1023 */

    if (isnan(want) || isnan(got)) {
        return isnan(want) && isnan(got) ? 0 : INFINITY;
    }
    if (exponent < 1023 - 126) {
        exponent = 1023 - 126;
    }
    if (exponent > 1023 + 127) {
        exponent = 1023 + 127;
        want = 0x1p128;
    }
    bits = (uint64_t)(2 * 1023 + 23 - exponent) << 52; /* 1 / ULP */
    double per_ulp;
    memcpy(&per_ulp, &bits, sizeof per_ulp);
    return fabs((isinf(got) ? copysign(0x1p128, got) : got) - want) * per_ulp;
}

/* The same for a double; the true value has the digits of long double. */
static double
ulps_f64(double got, long double want)
{
    int e;

    if (isnan(got) || isinf((double)want) || isinf(got)) {
        return (double)want == got ? 0 : INFINITY;
    }
    frexpl(want, &e);
    return (double)ldexpl(fabsl(got - want), 53 - (e > -1021 ? e : -1021));
}

/* exp and tanh of a float in double; shortcuts where so many terms of the series are exact enough. */
static double
true_exp(float x)
{
    const double y = x;

    if (x > 120) {
        return INFINITY;
    }
    if (x < -86) { /* as math.inc promises: no subnormal numbers */
        return 0;
    }
    return fabsf(x) < 0x1p-10f ? 1 + y * (1 + y * (0.5 + y * (1 / 6. + y / 24))) : exp(y);
}

/* By exp(x), which is at hand: what 1 takes from its square is an error of 2^-42 of tanh at most, 2^-18 of an ULP. */
static double
true_tanh(float x, double exp_x)
{
    const double y = x, square = exp_x * exp_x;

    if (fabsf(x) > 20) {
        return copysign(1, y);
    }
    return fabsf(x) < 0x1p-10f ? y - y * y * y / 3 : (square - 1) / (square + 1);
}

/*
 * What one thread measures: of the float inputs first, first + step, ... below 2^32
 * as bits, but in other steps where the answer is the same for all; of double a number of random points.
 */
struct share {
    uint64_t first, step, dull_step, points;
    struct worst f32[ISAS], f64[ISAS];
};

static void
measure_block_f32(struct share *share, const float *in, float out[2][BLOCK])
{
    static _Thread_local double want[2][BLOCK];

    for (size_t i = 0; i < BLOCK; i++) {
        want[0][i] = true_exp(in[i]);
        want[1][i] = true_tanh(in[i], want[0][i]);
    }
    for (size_t k = 0; k < ISAS; k++) {
        if (!isas[k].available()) {
            continue;
        }
        isas[k].f32.exp(out[0], in, BLOCK);
        isas[k].f32.tanh(out[1], in, BLOCK);
        for (int which = 0; which < 2; which++) {
            for (size_t i = 0; i < BLOCK; i++) {
                if (out[which][i] != (float)want[which][i]) { /* else correctly rounded, as nearly all are */
                    note(&share->f32[k], which, ulps_f32(out[which][i], want[which][i]), (double)in[i]);
                }
            }
        }
    }
}

/* 7 of 8 floats: exp is 1 and tanh x, or they are 0, 1, infinite or NaN. */
static int
is_dull(uint64_t bits)
{
    const int exponent = (int)(bits >> 23 & 255) - 127;

    return exponent < -26 || exponent > 6;
}

static void
measure_f32(struct share *share)
{
    static _Thread_local float in[BLOCK], out[2][BLOCK];
    const uint64_t end = (uint64_t)1 << 32;

    for (uint64_t u = share->first; u < end;) {
        for (size_t i = 0; i < BLOCK; i++) {
            const uint32_t bits = (uint32_t)u;
            memcpy(&in[i], &bits, sizeof bits);
            const uint64_t step = is_dull(u) ? share->dull_step : share->step;
            u += u + step < end || i + 1 == BLOCK ? step : 0; /* the last one again */
        }
        measure_block_f32(share, in, out);
    }
}

/*
 * A random double. Its size is spread over the ranges where the functions do
 * something: exp up to overflow and underflow, tanh up to 1 and, more often, in the
 * first steps of its reduction, where its error is largest.
 */
static double
random_f64(uint64_t *state)
{
    static const double sizes[] = {750, 40, 20, 1, 0.55, 0.2};
    const size_t n = sizeof sizes / sizeof sizes[0];

    *state ^= *state << 13; /* Marsaglia's xorshift */
    *state ^= *state >> 7;
    *state ^= *state << 17;
    const double unit = (double)(int64_t)*state * 0x1p-63;
    const size_t kind = *state % (n + 1);
    return kind < n ? unit * sizes[kind] : ldexp(unit, -(int)(*state >> 8 & 63));
}

static void
measure_f64(struct share *share)
{
    static _Thread_local double in[BLOCK], out[2][BLOCK];
    static _Thread_local long double want[2][BLOCK];
    uint64_t state = 88172645463325252u + share->first;

    for (uint64_t done = 0; done < share->points; done += BLOCK) {
        for (size_t i = 0; i < BLOCK; i++) {
            in[i] = random_f64(&state);
            want[0][i] = in[i] < -707 ? 0 : expl((long double)in[i]);
            want[1][i] = tanhl((long double)in[i]);
        }
        for (size_t k = 0; k < ISAS; k++) {
            if (!isas[k].available()) {
                continue;
            }
            isas[k].f64.exp(out[0], in, BLOCK);
            isas[k].f64.tanh(out[1], in, BLOCK);
            for (int which = 0; which < 2; which++) {
                for (size_t i = 0; i < BLOCK; i++) {
                    if (out[which][i] != (double)want[which][i]) {
                        note(&share->f64[k], which, ulps_f64(out[which][i], want[which][i]), in[i]);
                    }
                }
            }
        }
    }
}

static THREAD_FUNCTION
measure_share(void *argument)
{
    measure_f32(argument);
    measure_f64(argument);
    return 0;
}

static void
report_accuracy(const char *isa, const char *type, const struct worst *a, const struct worst *b, double slack)
{
    static const char *const names[2] = {"exp", "tanh"};
    const double bounds[2] = {EXP_BOUND + slack, TANH_BOUND + slack};

    printf("%-7s %s:", isa, type);
    for (int which = 0; which < 2; which++) {
        const struct worst *const worst = a->error[which] > b->error[which] ? a : b;
        const int ok = worst->error[which] <= bounds[which];
        printf("  %s %.3f ULP at %a%s", names[which], worst->error[which], worst->at[which], ok ? "" : " TOO MUCH");
        n_failed += !ok;
    }
    putchar('\n');
}

/* Two threads take every other input each. */
static void
check_accuracy(uint64_t step, uint64_t dull_step, uint64_t points)
{
    static struct share shares[2];
    /* Where long double, or musl's functions of it (128 bits), are those of double, true values are up to 1 ULP off. */
    volatile const double one = 1; /* not for the compiler to know */
    const double slack = expl(one) != (long double)exp(one) ? 0 : 1;

    for (uint64_t i = 0; i < 2; i++) {
        shares[i].first = i * step;
        shares[i].step = 2 * step;
        shares[i].dull_step = 2 * dull_step;
        shares[i].points = points / 2;
    }
    const thread_id thread = start(measure_share, &shares[1]);
    measure_share(&shares[0]);
    join(thread);
    for (size_t k = 0; k < ISAS; k++) {
        if (isas[k].available()) {
            report_accuracy(isas[k].f32.isa, "float32", &shares[0].f32[k], &shares[1].f32[k], 0);
            report_accuracy(isas[k].f32.isa, "float64", &shares[0].f64[k], &shares[1].f64[k], slack);
        }
    }
}

/* Without a fused multiply-add a word of a vector does what scalar does to each lane, and so do exp and tanh. */
static void
check_bits_of_scalar(void)
{
    static float in32[BLOCK], out32[2][BLOCK];
    static double in64[BLOCK], out64[2][BLOCK];
    uint64_t state = 88172645463325252u;

    for (size_t i = 0; i < BLOCK; i++) {
        in64[i] = random_f64(&state);
        in32[i] = (float)in64[i];
    }
    for (size_t k = 1; k < ISAS; k++) {
        if (!isas[k].available() || isas[k].f32.fused) {
            continue;
        }
        isas[0].f32.exp(out32[0], in32, BLOCK);
        isas[k].f32.exp(out32[1], in32, BLOCK);
        CHECK(memcmp(out32[0], out32[1], sizeof out32[0]) == 0, "%s: exp of float32 as scalar's", isas[k].f32.isa);
        isas[0].f32.tanh(out32[0], in32, BLOCK);
        isas[k].f32.tanh(out32[1], in32, BLOCK);
        CHECK(memcmp(out32[0], out32[1], sizeof out32[0]) == 0, "%s: tanh of float32 as scalar's", isas[k].f32.isa);
        isas[0].f64.exp(out64[0], in64, BLOCK);
        isas[k].f64.exp(out64[1], in64, BLOCK);
        CHECK(memcmp(out64[0], out64[1], sizeof out64[0]) == 0, "%s: exp of float64 as scalar's", isas[k].f64.isa);
        isas[0].f64.tanh(out64[0], in64, BLOCK);
        isas[k].f64.tanh(out64[1], in64, BLOCK);
        CHECK(memcmp(out64[0], out64[1], sizeof out64[0]) == 0, "%s: tanh of float64 as scalar's", isas[k].f64.isa);
    }
}

/* e^2x is for -10 .. 10 and NaN. */
static void
check_exp_double(const struct math_f32 *f32, const struct math_f64 *f64)
{
    static float in32[BLOCK], out32[BLOCK];
    static double in64[BLOCK], out64[BLOCK];
    const double slack = sizeof(long double) > sizeof(double) ? 0 : 1;
    double worst32 = 0, worst64 = 0;

    for (size_t i = 0; i < BLOCK; i++) {
        in64[i] = in32[i] = (float)((double)i * 20 / (BLOCK - 1) - 10);
    }
    in64[7] = in32[7] = NAN;
    f32->exp_double(out32, in32, BLOCK);
    f64->exp_double(out64, in64, BLOCK);
    for (size_t i = 0; i < BLOCK; i++) {
        if (i != 7) {
            worst32 = fmax(worst32, ulps_f32(out32[i], exp(2.0 * (double)in32[i])));
            worst64 = fmax(worst64, ulps_f64(out64[i], expl(2 * (long double)in64[i])));
        }
    }
    printf("%-7s e^2x: float32 %.3f ULP, float64 %.3f ULP\n", f32->isa, worst32, worst64);
    CHECK(worst32 <= EXP_DOUBLE_BOUND && worst64 <= EXP_DOUBLE_BOUND + slack, "%s: e^2x", f32->isa);
    CHECK(isnan(out32[7]) && isnan(out64[7]), "%s: e^2x of NaN", f32->isa);
}

static double
now(void)
{
    struct timespec t;

    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ns per number of an array function, the best of many runs over an array in the first cache. */
#define TIME(function, in, out, ns) \
    do { \
        (ns) = INFINITY; \
        for (int run = 0; run < 1000; run++) { \
            const double start = now(); \
            for (int i = 0; i < 10; i++) { \
                (function)(out, in, 1024); \
            } \
            const double each = (now() - start) * 1e9 / (10 * 1024); \
            (ns) = each < (ns) ? each : (ns); \
        } \
    } while (0)

static void
show_times(void)
{
    static float in32[1024], out32[1024];
    static double in64[1024], out64[1024];

    for (int i = 0; i < 1024; i++) {
        in64[i] = (i * 389 % 1024 - 512) / 128.0; /* -4 .. 4 in no order */
        in32[i] = (float)in64[i];
    }
    for (size_t k = 0; k < ISAS; k++) {
        double ns[4];
        if (!isas[k].available()) {
            continue;
        }
        TIME(isas[k].f32.exp, in32, out32, ns[0]);
        TIME(isas[k].f32.tanh, in32, out32, ns[1]);
        TIME(isas[k].f64.exp, in64, out64, ns[2]);
        TIME(isas[k].f64.tanh, in64, out64, ns[3]);
        printf("%-7s ns per number: float32 exp %.3f, tanh %.3f; float64 exp %.3f, tanh %.3f\n", isas[k].f32.isa, ns[0],
               ns[1], ns[2], ns[3]);
    }
}

/* Two pages, of which the second faults; the address between them. */
static unsigned char *
guarded_page_end(void)
{
    const size_t page = page_size();
    char *const pages = closed_pages(2 * page);

    if (pages == NULL || !open_pages(pages, page)) {
        perror("pages");
        exit(2);
    }
    return (unsigned char *)pages + page;
}

int
main(int argc, char **argv)
{
    const char *const mode = argc > 1 ? argv[1] : "";
    unsigned char *const page_end = guarded_page_end();

    if (strcmp(mode, "time") == 0) {
        show_times();
        return 0;
    }
    for (size_t k = 0; k < ISAS; k++) {
        if (isas[k].available()) {
            check_words_f32(&isas[k].f32, page_end);
            check_words_f64(&isas[k].f64, page_end);
            check_exp_double(&isas[k].f32, &isas[k].f64);
        } else {
            printf("%s: not on this CPU, or not asked for\n", isas[k].f32.isa);
        }
    }
    check_bits_of_scalar();
    if (strcmp(mode, "quick") == 0) {
        check_accuracy(257, 4099, 200000);
    } else {
        check_accuracy(1, strcmp(mode, "full") == 0 ? 1 : 257, 10000000);
    }
    return report();
}
