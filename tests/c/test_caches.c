/*
 * test_caches.c: caches.c where a kernel tells the sizes in files, as on 64-bit ARM: against made-up trees, which it
 * writes into a folder it makes and enters; and what drivers choose by these sizes.  Prints a line per check; exit
 * status 1 if one fails.
 *
 * POSIX only: files under /sys
 * build: runtime/caches.c '-DMHA_CACHES_OF_CPU="tree"'
 * SPDX-License-Identifier: BSD-3-Clause
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "attention/plan.h"
#include "layer/linear.h"
#include "mha.h"

static int n_failed;
static const char *const files[] = {"type", "level", "size", "shared_cpu_map"};

/* Writes tree/indexN/file for each of the four files; NULL removes one. */
static void
put(int index, const char *type, const char *level, const char *size, const char *sharers)
{
    const char *const texts[] = {type, level, size, sharers};
    char path[64];

    mkdir("tree", 0700);
    snprintf(path, sizeof path, "tree/index%d", index);
    mkdir(path, 0700);
    for (int i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "tree/index%d/%s", index, files[i]);
        FILE *file = texts[i] == NULL ? NULL : fopen(path, "w");
        if (file == NULL) {
            unlink(path);
            continue;
        }
        fprintf(file, "%s\n", texts[i]);
        fclose(file);
    }
}

static void
check(size_t first, size_t second, const char *name)
{
    mha_caches_select((mha_cache_sizes){0, 0});
    const mha_cache_sizes found = mha_caches_active();
    const int ok = found.first == first * 1024 && found.second == second * 1024;

    printf("%s  %s: %zu %zu KiB\n", ok ? "ok  " : "FAIL", name, found.first / 1024, found.second / 1024);
    n_failed += !ok;
}

/* Rows of the left side that a task of a projection's gradients has room to copy: 256 steps of each, 16 numbers apart. */
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
    return mha_linear_task_rows(mha_kernels_for(dtype), 1000, 5000);
}

static size_t
factor_rows(size_t score_stride)
{
    const mha_plan plan = {.kernels = mha_kernels_for(MHA_F32), .score_stride = score_stride, .tile_rows = 48};

    return mha_factor_rows(&plan);
}

static void
check_choice(size_t first, size_t second, size_t rows_f32, size_t rows_f64, size_t factors)
{
    mha_caches_select((mha_cache_sizes){first * 1024, second * 1024});
    const int ok = copied_rows(MHA_F32) == rows_f32 && copied_rows(MHA_F64) == rows_f64 && factor_rows(512) == factors;

    printf("%s  %zu and %zu KiB: %zu and %zu rows of gradients, %zu of factors\n", ok ? "ok  " : "FAIL", first, second,
           copied_rows(MHA_F32), copied_rows(MHA_F64), factor_rows(512));
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

/* Two fifths of the second cache within 384 and 512 rows; a third of the first, but a row, and no more than a tile. */
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
    check_choice(32, 512, 384, 384, 5);
    check_choice(48, 1024, 385, 384, 8);
    check_choice(48, 2048, 512, 385, 8);
    check_choice(128, 3072, 512, 512, 21);
    check_choice(4, 64, 384, 384, 1);
    check_choice(1024, 65536, 512, 512, 48);
}

static void
remove_tree(void)
{
    char path[64];

    for (int index = 0; index < 10; index++) {
        put(index, NULL, NULL, NULL, NULL);
        snprintf(path, sizeof path, "tree/index%d", index);
        rmdir(path);
    }
    rmdir("tree");
}

int
main(void)
{
    char folder[] = "test_caches_XXXXXX", longest[6000];

    if (mkdtemp(folder) == NULL || chdir(folder) != 0) {
        perror(folder);
        return 2;
    }
    check(32, 512, "no files: the smallest in use");
    put(0, "Data", "1", "64K", "00000000,00000001");
    put(1, "Instruction", "1", "128K", "00000000,00000001");
    put(2, "Unified", "2", "1024K", "00000000,00000001");
    put(3, "Unified", "3", "32768K", "ffffffff,ffffffff");
    check(64, 1024, "a server's core");
    put(2, "Unified", "2", "2048K", "f");
    check(64, 512, "four cores share the second");
    put(2, "Unified", "2", "2048K", "30000000,00000000");
    check(64, 1024, "two cores share it, with high numbers");
    put(2, "Unified", "2", "2048K", NULL);
    check(64, 2048, "nobody says who shares it");
    put(2, "Unified", "2", "2048K", "0");
    check(64, 2048, "nobody shares it");
    put(9, "Unified", "2", "256K", "1");
    check(64, 256, "the last of its list");
    put(9, NULL, NULL, NULL, NULL);
    static const char *const odd[] = {"", "K", "-1K", "2M", "2048", "x", "0K", "99999999999999999999999999K", "1K"};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        put(2, "Unified", "2", odd[i], "1");
        check(32, 512, "a size that is none, or cannot be");
    }
    memset(longest, 'f', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    put(2, "Unified", "2", "2048K", longest);
    check(32, 512, "more sharers than a text has room for");
    remove_tree();
    check_choices();
    if (chdir("..") == 0) {
        rmdir(folder);
    }
    printf("%d failed\n", n_failed);
    return n_failed != 0;
}
