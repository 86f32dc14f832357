/*
 * time_threads.c: what handing work to the pool costs.  Prints, per number of threads, nanoseconds from the call of
 * mha_parallel_for to its return, over two tasks that meet: neither ends before both have begun, so that the figure
 * holds a full hand-over to another thread.  Minima and medians, hot and after 5 ms without work; then what a job of
 * 100 us costs on more threads than there are CPUs.
 *
 *     cc -O3 -std=c11 -pthread -Icsrc tests/c/time_threads.c csrc/runtime/threads*.c -lm -o build/time_threads
 */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "mha.h"
#include "runtime/threads.h"

static double
now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int
compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void
report(const char *name, double *ns, size_t n)
{
    qsort(ns, n, sizeof *ns, compare);
    printf("%-44s min %9.0f  median %9.0f  p95 %9.0f ns\n", name, ns[0], ns[n / 2], ns[n * 95 / 100]);
}

/* Waits, 1 ms at most, until the other task has begun as well. */
static void
meet(void *context, size_t task, unsigned worker)
{
    atomic_uint *begun = context;
    const double limit = now_ns() + 1e6;

    (void)task;
    (void)worker;
    atomic_fetch_add(begun, 1);
    while (atomic_load(begun) < 2 && now_ns() < limit) {
    }
}

static void
nothing(void *context, size_t task, unsigned worker)
{
    (void)context;
    (void)task;
    (void)worker;
}

static void
burn(void *context, size_t task, unsigned worker)
{
    volatile double x = 1;

    (void)task;
    (void)worker;
    for (int i = 0; i < *(int *)context; i++) {
        x = x * 1.0000001;
    }
}

static void
time_meetings(const char *name, size_t n, long pause_ns)
{
    double *ns = malloc(n * sizeof *ns);

    for (size_t i = 0; i < n; i++) {
        atomic_uint begun = 0;
        if (pause_ns > 0) {
            nanosleep(&(struct timespec){0, pause_ns}, NULL);
        }
        const double start = now_ns();
        mha_parallel_for(2, 2, meet, &begun);
        ns[i] = now_ns() - start;
    }
    report(name, ns, n);
    free(ns);
}

static void
time_burning(unsigned n_threads, size_t n)
{
    double *ns = malloc(n * sizeof *ns);
    int steps = 500;
    char name[64];

    for (size_t i = 0; i < n; i++) {
        const double start = now_ns();
        mha_parallel_for(64, n_threads, burn, &steps);
        ns[i] = now_ns() - start;
    }
    snprintf(name, sizeof name, "64 tasks of 500 steps, %u threads", n_threads);
    report(name, ns, n);
    free(ns);
}

int
main(void)
{
    double ns[2000];

    for (size_t i = 0; i < 2000; i++) {
        const double start = now_ns();
        mha_parallel_for(2, 2, nothing, NULL);
        ns[i] = now_ns() - start;
    }
    report("two empty tasks, hot", ns, 2000);
    time_meetings("two tasks that meet, hot", 20000, 0);
    time_meetings("two tasks that meet, after 5 ms", 300, 5000000);
    for (unsigned n_threads = 1; n_threads <= 32; n_threads *= 2) {
        time_burning(n_threads, 500);
    }
    return 0;
}
