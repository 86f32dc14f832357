/*
 * test_cpu.c: CPU features, and how many CPUs there are.  Prints a line per check; exit status 1 if one fails.
 *
 * POSIX only: files under /proc
 * not emulated: /proc/cpuinfo, which it compares with, is the host's
 * build: -Wl,--wrap=sched_getaffinity,--wrap=sysconf
 * SPDX-License-Identifier: BSD-3-Clause
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "runtime/cpu.h"
#include "mha.h"

static int n_failed;

static void
check(int ok, const char *name)
{
    printf("%s  %s\n", ok ? "ok  " : "FAIL", name);
    n_failed += !ok;
}

/* --- A system that answers otherwise ------------------------------------------------------------- */

static int has_no_affinity; /* an old kernel */
static long processors;     /* as sysconf counts them; 0: it is asked */

int __real_sched_getaffinity(pid_t, size_t, cpu_set_t *);
int __wrap_sched_getaffinity(pid_t, size_t, cpu_set_t *);
int
__wrap_sched_getaffinity(pid_t process, size_t n_bytes, cpu_set_t *mask)
{
    if (has_no_affinity) {
        errno = ENOSYS;
        return -1;
    }
    return __real_sched_getaffinity(process, n_bytes, mask);
}

long __real_sysconf(int);
long __wrap_sysconf(int);
long
__wrap_sysconf(int name)
{
    return processors != 0 && name == _SC_NPROCESSORS_ONLN ? processors : __real_sysconf(name);
}

static void
check_odd_systems(void)
{
    has_no_affinity = 1;
    processors = 3;
    errno = 77;
    check(mha_threads_available() == 3 && errno == 77, "no affinity masks: all processors");
    processors = -1;
    check(mha_threads_available() == 1, "and if nobody can count them: one");
    has_no_affinity = 0;
    processors = 0;
}

/* The names of /proc/cpuinfo are the kernel's reading of the same bits. */
static int
cpuinfo_has(const char *flag)
{
    static char line[1 << 16];
    char spaced[32];
    FILE *file = fopen("/proc/cpuinfo", "r");
    int found = 0;

    snprintf(spaced, sizeof spaced, " %s", flag);
    while (file != NULL && !found && fgets(line, sizeof line, file) != NULL) {
        const char *at = strncmp(line, "flags", 5) == 0 ? line : NULL;
        while (!found && at != NULL && (at = strstr(at, spaced)) != NULL) {
            at += strlen(spaced);
            found = *at == ' ' || *at == '\n';
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return found;
}

static void
check_features(void)
{
    const int avx2 = cpuinfo_has("avx2") && cpuinfo_has("fma");
    const int avx512 =
        avx2 && cpuinfo_has("avx512f") && cpuinfo_has("avx512dq") && cpuinfo_has("avx512bw") && cpuinfo_has("avx512vl");

    check(mha_cpu_offers(MHA_ISA_SCALAR) == 1, "every CPU offers scalar");
    check(mha_cpu_offers(MHA_ISA_AVX2) == avx2, "AVX2 as the kernel says");
    check(mha_cpu_offers(MHA_ISA_AVX512) == avx512, "AVX-512 as the kernel says");
#if defined(__aarch64__)
    check(mha_cpu_offers(MHA_ISA_NEON) == 1, "NEON on 64-bit Arm");
#else
    check(mha_cpu_offers(MHA_ISA_NEON) == 0, "no NEON elsewhere");
#endif
    check(mha_cpu_offers(MHA_ISA_WASM) == 0, "no WebAssembly here");
    check(mha_cpu_offers(MHA_N_ISAS) == 0 && mha_cpu_offers((mha_isa)1000) == 0, "numbers that are no ISA");
}

int
main(void)
{
    cpu_set_t mask;

    if (sched_getaffinity(0, sizeof mask, &mask) != 0) {
        perror("sched_getaffinity");
        return 2;
    }
    check_features();
    check_odd_systems();
    check(mha_threads_available() == (unsigned)CPU_COUNT(&mask), "as many as the mask has");
    for (int i = 0; i < CPU_SETSIZE; i++) {
        if (CPU_ISSET(i, &mask) && CPU_COUNT(&mask) > 1) {
            CPU_CLR(i, &mask);
        }
    }
    sched_setaffinity(0, sizeof mask, &mask);
    check(mha_threads_available() == 1, "one CPU in the mask: one");
    printf("%d failed\n", n_failed);
    return n_failed != 0;
}
