/*
 * core.c: products, exp and tanh of the C core alone, for every instruction set of this CPU; no Python.
 * `make bench-core` builds and runs it; an argument picks one instruction set by name.
 *
 * Products are mha_linear_forward on packed weights: M rows, N outputs, K inputs; behind it the gradients of its
 * inputs and of its weight, and of each the share of the peak.
 */
#define _POSIX_C_SOURCE 200809L
#include "math_isas.h"
#include "mha.h"
#include "peak.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SECONDS_PER_FIGURE 0.15

static double
random_number(void)
{
    static uint64_t state = 20;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 40) / (1 << 23) - 1.0;
}

static float *
random_floats(size_t n, float scale)
{
    float *numbers = malloc((n ? n : 1) * sizeof *numbers);
    if (numbers == NULL) {
        exit(EXIT_FAILURE);
    }
    for (size_t i = 0; i < n; i++) {
        numbers[i] = scale * (float)random_number();
    }
    return numbers;
}

static void
check(mha_status status)
{
    if (status != MHA_OK) {
        fprintf(stderr, "%s\n", mha_status_text(status));
        exit(EXIT_FAILURE);
    }
}

static double
peak_of(mha_isa isa)
{
    switch (isa) {
#if defined(__x86_64__)
    case MHA_ISA_AVX512: return peak_avx512();
    case MHA_ISA_AVX2: return peak_avx2();
#elif defined(__wasm__)
    case MHA_ISA_WASM: return peak_wasm();
#else
    case MHA_ISA_NEON: return peak_neon();
#endif
    default: return peak_scalar();
    }
}

/* Seconds of the shortest of many calls, by turns: forward, the gradient of x, that of the weight. */
static void
best_of_three(const mha_linear *linear, mha_linear_grads *grads, float *y, double best[3])
{
    float *const grad_x = grads->grad_x, *const grad_weight = grads->grad_weight;
    double end = seconds_now() + 3 * SECONDS_PER_FIGURE;

    best[0] = best[1] = best[2] = 1e9;
    for (int calls = 0; calls < 3 || seconds_now() < end; calls++) {
        for (int which = 0; which < 3; which++) {
            grads->grad_x = which == 1 ? grad_x : NULL;
            grads->grad_weight = which == 2 ? grad_weight : NULL;
            double before = seconds_now();
            check(which == 0 ? mha_linear_forward(MHA_F32, linear, grads->rows, grads->x, grads->x_row_stride, y,
                                                  grads->grad_y_row_stride)
                             : mha_linear_backward(grads));
            double taken = seconds_now() - before;
            best[which] = taken < best[which] ? taken : best[which];
        }
    }
}

static void
time_product(size_t rows, size_t outputs, size_t inputs, double peak)
{
    size_t packed_size = 0, width = 0;
    check(mha_linear_packed_size(MHA_F32, outputs, inputs, &packed_size, &width));
    float *weight = random_floats(outputs * inputs, 1.0f), *x = random_floats(rows * inputs, 1.0f);
    float *y = random_floats(rows * outputs, 1.0f), *packed = aligned_alloc(64, (packed_size * 4 + 63) / 64 * 64);
    float *grad_y = random_floats(rows * outputs, 1.0f), *grad_x = random_floats(rows * inputs, 1.0f);
    float *grad_weight = random_floats(outputs * inputs, 1.0f);
    if (packed == NULL) {
        exit(EXIT_FAILURE);
    }
    check(mha_linear_pack(MHA_F32, outputs, inputs, weight, (ptrdiff_t)inputs, packed));
    const mha_linear linear = {.weight = packed, .out_features = outputs, .in_features = inputs, .panel_width = width};
    mha_linear_grads grads = {
        .dtype = MHA_F32,
        .rows = rows,
        .out_features = outputs,
        .in_features = inputs,
        .x = x,
        .weight = weight,
        .grad_y = grad_y,
        .x_row_stride = (ptrdiff_t)inputs,
        .grad_y_row_stride = (ptrdiff_t)outputs,
        .grad_x = grad_x,
        .grad_weight = grad_weight,
    };
    double best[3];
    best_of_three(&linear, &grads, y, best);
    double flops = 2e-9 * (double)rows * (double)outputs * (double)inputs;
    printf("  %5zu x %4zu x %4zu %10.1f us", rows, outputs, inputs, 1e6 * best[0]);
    for (int which = 0; which < 3; which++) {
        printf(" %8.1f GFLOP/s %3.0f %%", flops / best[which], 100 * flops / best[which] / peak);
    }
    putchar('\n');
    float *const all[] = {packed, y, x, weight, grad_y, grad_x, grad_weight};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        free(all[i]);
    }
}

static void
time_function(const char *name, void (*function)(float *, const float *, size_t), float scale)
{
    enum { N = 4096 };
    float *x = random_floats(N, scale), *y = random_floats(N, scale);
    double best = 1e9, end = seconds_now() + SECONDS_PER_FIGURE;
    while (seconds_now() < end) {
        double before = seconds_now();
        function(y, x, N);
        double taken = seconds_now() - before;
        best = taken < best ? taken : best;
    }
    printf("  %-4s %.3f ns for each number\n", name, 1e9 * best / N);
    free(y);
    free(x);
}

int
main(int argc, char **argv)
{
    static const size_t products[][3] = {
        {8, 100, 100},    {12, 100, 100},  {200, 24, 24},    {640, 32, 32},   {64, 64, 64},
        {128, 128, 128},  {256, 256, 256}, {1152, 256, 256}, {592, 512, 512}, {512, 768, 768},
        {4096, 128, 128}, {4, 256, 256},   {1, 768, 768},
    };
    mha_threads_set(1);
    for (mha_isa isa = MHA_ISA_SCALAR; isa < MHA_N_ISAS; isa++) {
        if (!mha_isa_available(isa) || (argc > 1 && strcmp(argv[1], mha_isa_name(isa)) != 0)) {
            continue;
        }
        check(mha_isa_select(isa));
        double peak = peak_of(isa);
        printf("%s, FMA peak of one core %.1f GFLOP/s; forward, gradient of x, gradient of W\n", mha_isa_name(isa),
               peak);
        for (size_t i = 0; i < sizeof products / sizeof *products; i++) {
            time_product(products[i][0], products[i][1], products[i][2], peak);
        }
        for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
            if (strcmp(isas[i].f32.isa, mha_isa_name(isa)) == 0) {
                time_function("exp", isas[i].f32.exp, 10.0f);
                time_function("tanh", isas[i].f32.tanh, 3.0f);
            }
        }
    }
    return 0;
}
