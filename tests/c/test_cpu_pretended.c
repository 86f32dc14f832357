/*
 * test_cpu_pretended.c: which instruction sets an x86 CPU of any make would be given: cpu.c with a CPU of this file's
 * own, of which one feature after another is missing.  An instruction that the CPU lacks, or whose registers the system
 * does not save, ends the process, so each of them has to be asked for.  And caches.c with the caches of several makes.
 *
 * build: runtime/cpu.c runtime/caches.c -DMHA_PRETENDED_CPU
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include <stdio.h>

#include "mha.h"
#include "runtime/cpu.h"

#if defined(__x86_64__) || defined(__i386__)
static struct {
    unsigned highest_leaf, leaf1_ecx, leaf7_ebx, xcr0;
} cpu;
static int n_failed, n_xcr0_reads;

int mha_pretended_cpuid(unsigned leaf, unsigned subleaf, unsigned *eax, unsigned *ebx, unsigned *ecx, unsigned *edx);
unsigned mha_pretended_xcr0(void);

/* One cache: type 1 data, 2 instructions, 3 both; hardware threads that share it. */
typedef struct {
    unsigned type, level, ways, line, sets, sharers;
} pretended_cache;

static struct {
    unsigned leaf;                  /* that answers */
    const pretended_cache *caches;  /* behind the last one the type is 0, */
    int n_caches;                   /* but it never ends if this is -1 */
} cached;
static int n_asked;

static int
answer_cache(unsigned leaf, unsigned subleaf, unsigned *eax, unsigned *ebx, unsigned *ecx, unsigned *edx)
{
    n_asked++;
    *eax = *ebx = *ecx = *edx = 0;
    if (leaf == 0x8000001D && cached.leaf != leaf) {
        return 0;
    }
    if (cached.leaf == leaf && (cached.n_caches < 0 || (int)subleaf < cached.n_caches)) {
        const pretended_cache *c = &cached.caches[cached.n_caches < 0 ? 0 : subleaf];
        *eax = c->type | c->level << 5 | (c->sharers - 1) << 14;
        *ebx = (c->line - 1) | (c->ways - 1) << 22;
        *ecx = c->sets - 1;
    }
    return 1;
}

/* 0 if the CPU does not know this leaf; what it answers otherwise, by Intel's manual. */
int
mha_pretended_cpuid(unsigned leaf, unsigned subleaf, unsigned *eax, unsigned *ebx, unsigned *ecx, unsigned *edx)
{
    if (leaf == 4 || leaf == 0x8000001D) {
        return answer_cache(leaf, subleaf, eax, ebx, ecx, edx);
    }
    if (leaf > cpu.highest_leaf || subleaf != 0) {
        return 0;
    }
    *eax = *edx = 0;
    *ebx = leaf == 7 ? cpu.leaf7_ebx : 0;
    *ecx = leaf == 1 ? cpu.leaf1_ecx : 0;
    return 1;
}

unsigned
mha_pretended_xcr0(void)
{
    n_xcr0_reads++;
    return cpu.xcr0;
}

static void
check(int avx2, int avx512, const char *name)
{
    const int ok = mha_cpu_offers(MHA_ISA_SCALAR) == 1 && mha_cpu_offers(MHA_ISA_AVX2) == avx2 &&
                   mha_cpu_offers(MHA_ISA_AVX512) == avx512;

    printf("%s  %s\n", ok ? "ok  " : "FAIL", name);
    n_failed += !ok;
}

#define DEFAULTS 32, 512

static void
check_caches(unsigned leaf, const pretended_cache *caches, int n_caches, size_t first, size_t second, const char *name)
{
    cached.leaf = leaf;
    cached.caches = caches;
    cached.n_caches = n_caches;
    n_asked = 0;
    mha_caches_select((mha_cache_sizes){0, 0});
    const mha_cache_sizes found = mha_caches_active();
    const int ok = found.first == first * 1024 && found.second == second * 1024 && n_asked <= 40;

    printf("%s  caches of %s: %zu %zu KiB\n", ok ? "ok  " : "FAIL", name, found.first / 1024, found.second / 1024);
    n_failed += !ok;
}

static void
check_all_caches(void)
{
    /* type, level, ways, line, sets, sharers; as the processors answer, the third level behind the others */
    static const pretended_cache zen2[] = {
        {1, 1, 8, 64, 64, 2}, {2, 1, 8, 64, 64, 2}, {3, 2, 8, 64, 1024, 2}, {3, 3, 16, 64, 16384, 8}};
    static const pretended_cache zen4[] = {
        {1, 1, 8, 64, 64, 2}, {2, 1, 8, 64, 64, 2}, {3, 2, 8, 64, 2048, 2}, {3, 3, 16, 64, 32768, 16}};
    static const pretended_cache zen5[] = {
        {1, 1, 12, 64, 64, 2}, {2, 1, 8, 64, 64, 2}, {3, 2, 16, 64, 1024, 2}, {3, 3, 16, 64, 32768, 16}};
    static const pretended_cache emerald_rapids[] = {
        {1, 1, 12, 64, 64, 2}, {2, 1, 8, 64, 64, 2}, {3, 2, 16, 64, 2048, 2}, {3, 3, 20, 64, 212992, 128}};
    static const pretended_cache gracemont[] = {{1, 1, 8, 64, 64, 1}, {2, 1, 8, 64, 128, 1}, {3, 2, 16, 64, 2048, 8}};
    static const pretended_cache only_first[] = {{1, 1, 8, 64, 64, 2}};
    static const pretended_cache tiny[] = {{1, 1, 1, 1, 1, 1}, {3, 2, 1, 1, 1, 1}};
    static const pretended_cache tiny_first[] = {{1, 1, 1, 64, 2, 1}, {3, 2, 8, 64, 1024, 2}};
    static const pretended_cache huge[] = {{1, 1, 1024, 4096, 4096, 1}, {3, 2, 1024, 4096, 1u << 31, 1}};
    static const pretended_cache swapped[] = {{1, 1, 16, 64, 1024, 1}, {3, 2, 8, 64, 128, 1}};
    static const pretended_cache instructions[] = {{2, 1, 8, 64, 64, 2}, {2, 2, 8, 64, 1024, 2}};

    check_caches(0x8000001D, zen2, 4, 32, 512, "Zen 2");
    check_caches(0x8000001D, zen4, 4, 32, 1024, "Zen 4");
    check_caches(0x8000001D, zen5, 4, 48, 1024, "Zen 5");
    check_caches(4, emerald_rapids, 4, 48, 2048, "Emerald Rapids");
    check_caches(4, gracemont, 3, 32, 512, "a core of four that share 2 MiB");
    check_caches(4, NULL, 0, DEFAULTS, "a processor that does not say");
    check_caches(4, only_first, 1, DEFAULTS, "a processor with one cache");
    check_caches(4, instructions, 2, DEFAULTS, "a processor whose caches hold instructions");
    check_caches(4, tiny, 2, DEFAULTS, "a hypervisor with caches of one byte");
    check_caches(4, tiny_first, 2, DEFAULTS, "a hypervisor with a first cache of two lines");
    check_caches(4, huge, 2, DEFAULTS, "a hypervisor with caches larger than memory");
    check_caches(4, swapped, 2, DEFAULTS, "a hypervisor whose second cache is smaller than its first");
    check_caches(4, zen4, -1, DEFAULTS, "a hypervisor that does not end its list");
    mha_caches_select((mha_cache_sizes){64 * 1024, 3072 * 1024});
    n_failed += mha_caches_active().first != 64 * 1024 || mha_caches_active().second != 3072 * 1024;
    mha_caches_select((mha_cache_sizes){64 * 1024, 1});
    n_failed += mha_caches_active().first != 32 * 1024;
}

static void
restore(void)
{
    cpu.highest_leaf = 7;
    cpu.leaf1_ecx = 1u << 12 | 1u << 27;                                   /* FMA, OSXSAVE */
    cpu.leaf7_ebx = 1u << 5 | 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;   /* AVX2; AVX-512 F, DQ, BW, VL */
    cpu.xcr0 = 0xE7;                                                       /* x87, SSE, AVX, opmask, both ZMM parts */
    n_xcr0_reads = 0;
}

int
main(void)
{
    static const unsigned avx512_bits[] = {16, 17, 30, 31}, ymm_states[] = {1, 2}, zmm_states[] = {5, 6, 7};

    restore();
    check(1, 1, "a CPU with everything");
    cpu.highest_leaf = 0;
    check(0, 0, "a CPU without leaf 1");
    cpu.highest_leaf = 6;
    check(0, 0, "a CPU without leaf 7");
    restore();
    cpu.leaf1_ecx &= ~(1u << 27);
    check(0, 0, "no OSXSAVE");
    n_failed += n_xcr0_reads != 0; /* reading it would be an illegal instruction */
    restore();
    cpu.leaf1_ecx &= ~(1u << 12);
    check(0, 0, "no FMA");
    restore();
    cpu.leaf7_ebx &= ~(1u << 5);
    check(0, 0, "no AVX2: no AVX-512 kernels either, which use it");
    for (int i = 0; i < 4; i++) {
        restore();
        cpu.leaf7_ebx &= ~(1u << avx512_bits[i]);
        check(1, 0, "one part of AVX-512 is missing");
    }
    for (int i = 0; i < 2; i++) {
        restore();
        cpu.xcr0 &= ~(1u << ymm_states[i]);
        check(0, 0, "the system does not save SSE or AVX registers");
    }
    for (int i = 0; i < 3; i++) {
        restore();
        cpu.xcr0 &= ~(1u << zmm_states[i]);
        check(1, 0, "the system does not save a part of the AVX-512 registers");
    }
    check_all_caches();
    printf("%d failed\n", n_failed);
    return n_failed != 0;
}
#else
int
main(void)
{
    printf("no x86\n");
    return mha_cpu_offers(MHA_ISA_AVX2) != 0;
}
#endif
