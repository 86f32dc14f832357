/*
 * test_cpu.c: CPU features.  Prints a line per check; exit status 1 if one fails.
 *
 * POSIX only: files under /proc
 * not emulated: /proc/cpuinfo, which it compares with, is the host's
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "runtime/cpu.h"
#include "mha.h"

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
    check_features();
    return report();
}
