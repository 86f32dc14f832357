/*
 * test_cpu_caches.c: which sizes of caches are used, and what drivers choose by them.  Prints a line per check; exit
 * status 1 if one fails.
 *
 * POSIX only: sysconf
 * build: -Wl,--wrap=sysconf
 * SPDX-License-Identifier: BSD-3-Clause
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <unistd.h>

#include "layer/linear.h"
#include "mha.h"

static int n_failed;

/* What the system says of its caches. */
static long first_told, second_told;

long __real_sysconf(int);
long __wrap_sysconf(int);
long
__wrap_sysconf(int name)
{
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    if (name == _SC_LEVEL1_DCACHE_SIZE || name == _SC_LEVEL2_CACHE_SIZE) {
        return name == _SC_LEVEL2_CACHE_SIZE ? second_told : first_told;
    }
#endif
    return __real_sysconf(name);
}

/* Both in KiB. */
static void
check(size_t first, size_t second, const char *name)
{
    mha_caches_select((mha_cache_sizes){0, 0});
    const mha_cache_sizes found = mha_caches_active();
    const int ok = found.first == first * 1024 && found.second == second * 1024;

    printf("%s  %s: %zu %zu KiB\n", ok ? "ok  " : "FAIL", name, found.first / 1024, found.second / 1024);
    n_failed += !ok;
}

static void
check_told(long first, long second, int is_sane, const char *name)
{
    first_told = first;
    second_told = second;
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    check(is_sane ? (size_t)first / 1024 : 32, is_sane ? (size_t)second / 1024 : 512, name);
#else
    (void)is_sane;
    check(32, 512, name);
#endif
}

/* Rows of the left side that a task of a projection's gradients has room to copy: 256 steps of each, 16 numbers apart.
 */
static size_t
copied_rows(mha_dtype dtype)
{
    const mha_kernels *k = mha_kernels_for(dtype);
    const mha_linear_grads grads = {.dtype = dtype, .rows = 5000, .in_features = 1000, .out_features = 1000};
    mha_linear_room room = {.bytes = 0};

    mha_linear_grads_plan(k, &grads, &room);
    return (room.bytes / k->itemsize - 256 * k->panel_width) / (256 + 16);
}

/* Rows of a task of a projection of 5000 rows: 17 or 18 tasks of 288 at most, 26 or 27 of 192. */
static size_t
task_rows(mha_dtype dtype)
{
    const mha_linear linear = {.weight = &dtype, .out_features = 1000, .in_features = 1000};

    return mha_linear_plan_for(mha_kernels_for(dtype), &linear, 5000).task_rows;
}

static void
check_choice(size_t first, size_t second, size_t rows_f32, size_t rows_f64)
{
    mha_caches_select((mha_cache_sizes){first * 1024, second * 1024});
    const int ok = copied_rows(MHA_F32) == rows_f32 && copied_rows(MHA_F64) == rows_f64;

    printf("%s  %zu and %zu KiB: %zu and %zu rows of gradients\n", ok ? "ok  " : "FAIL", first, second,
           copied_rows(MHA_F32), copied_rows(MHA_F64));
    n_failed += !ok;
}

/* At most so many rows, and no more than a register tile's fewer. */
static void
check_tasks(size_t second, size_t most_f32, size_t most_f64)
{
    mha_caches_select((mha_cache_sizes){32 * 1024, second * 1024});
    const size_t f32 = task_rows(MHA_F32), f64 = task_rows(MHA_F64);
    const int ok = f32 <= most_f32 + 12 && f32 > most_f32 * 9 / 10 && f64 <= most_f64 + 12 && f64 > most_f64 * 9 / 10;

    printf("%s  %zu KiB: tasks of %zu and %zu rows\n", ok ? "ok  " : "FAIL", second, f32, f64);
    n_failed += !ok;
}

/* Two fifths of the second cache within 384 and 512 rows. */
static void
check_choices(void)
{
    mha_threads_set(1);
    check_tasks(512, 192, 128);
    check_tasks(1024, 288, 152);
    check_tasks(2048, 288, 288);
    check_tasks(65536, 288, 288);
    mha_threads_set(20);
    check_tasks(2048, 250, 250);
    mha_threads_set(40);
    check_tasks(2048, 192, 128);
    check_choice(32, 512, 384, 384);
    check_choice(48, 1024, 385, 384);
    check_choice(48, 2048, 512, 385);
    check_choice(128, 3072, 512, 512);
    check_choice(4, 64, 384, 384);
    check_choice(1024, 65536, 512, 512);
}

static void
check_all_told(void)
{
    check_told(48 * 1024, 2048 * 1024, 1, "a server's core");
    check_told(32 * 1024, 512 * 1024, 1, "the smallest in use");
    check_told(0, 0, 0, "a system that does not know");
    check_told(-1, -1, 0, "one that has no such question");
    check_told(32 * 1024, 0, 0, "one cache");
    check_told(1, 1, 0, "a hypervisor with caches of one byte");
    check_told(1024, 1024 * 1024, 0, "a first cache of one KiB");
    check_told(1L << 30, 1L << 30, 0, "caches larger than memory");
    check_told(1024 * 1024, 64 * 1024, 0, "a second cache smaller than the first");
    mha_caches_select((mha_cache_sizes){64 * 1024, 3072 * 1024});
    n_failed += mha_caches_active().first != 64 * 1024 || mha_caches_active().second != 3072 * 1024;
    mha_caches_select((mha_cache_sizes){64 * 1024, 1});
    n_failed += mha_caches_active().first != 32 * 1024;
}

int
main(void)
{
    check_all_told();
    check_choices();
    printf("%d failed\n", n_failed);
    return n_failed != 0;
}
