/*
 * test_cpu_pretended.c: which instruction sets an x86 CPU of any make would be given: cpu.c with a CPU of this file's
 * own, of which one feature after another is missing.  An instruction that the CPU lacks, or whose registers the system
 * does not save, ends the process, so each of them has to be asked for.
 *
 * build: runtime/cpu.c -DMHA_PRETENDED_CPU
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include <stdio.h>

#include "check.h"
#include "mha.h"
#include "runtime/cpu.h"

#if defined(__x86_64__) || defined(__i386__)
static struct {
    unsigned highest_leaf, leaf1_ecx, leaf7_ebx, xcr0;
} cpu;
static int n_xcr0_reads;

int mha_pretended_cpuid(unsigned leaf, unsigned subleaf, unsigned *eax, unsigned *ebx, unsigned *ecx, unsigned *edx);
unsigned mha_pretended_xcr0(void);

/* 0 if the CPU does not know this leaf; what it answers otherwise, by Intel's manual. */
int
mha_pretended_cpuid(unsigned leaf, unsigned subleaf, unsigned *eax, unsigned *ebx, unsigned *ecx, unsigned *edx)
{
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
check_offers(int avx2, int avx512, const char *name)
{
    check(mha_cpu_offers(MHA_ISA_SCALAR) == 1 && mha_cpu_offers(MHA_ISA_AVX2) == avx2 &&
              mha_cpu_offers(MHA_ISA_AVX512) == avx512,
          name);
}

static void
restore(void)
{
    cpu.highest_leaf = 7;
    cpu.leaf1_ecx = 1u << 12 | 1u << 27;                                 /* FMA, OSXSAVE */
    cpu.leaf7_ebx = 1u << 5 | 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* AVX2; AVX-512 F, DQ, BW, VL */
    cpu.xcr0 = 0xE7;                                                     /* x87, SSE, AVX, opmask, both ZMM parts */
    n_xcr0_reads = 0;
}

int
main(void)
{
    static const unsigned avx512_bits[] = {16, 17, 30, 31}, ymm_states[] = {1, 2}, zmm_states[] = {5, 6, 7};

    restore();
    check_offers(1, 1, "a CPU with everything");
    cpu.highest_leaf = 0;
    check_offers(0, 0, "a CPU without leaf 1");
    cpu.highest_leaf = 6;
    check_offers(0, 0, "a CPU without leaf 7");
    restore();
    cpu.leaf1_ecx &= ~(1u << 27);
    check_offers(0, 0, "no OSXSAVE");
    n_failed += n_xcr0_reads != 0; /* reading it would be an illegal instruction */
    restore();
    cpu.leaf1_ecx &= ~(1u << 12);
    check_offers(0, 0, "no FMA");
    restore();
    cpu.leaf7_ebx &= ~(1u << 5);
    check_offers(0, 0, "no AVX2: no AVX-512 kernels either, which use it");
    for (int i = 0; i < 4; i++) {
        restore();
        cpu.leaf7_ebx &= ~(1u << avx512_bits[i]);
        check_offers(1, 0, "one part of AVX-512 is missing");
    }
    for (int i = 0; i < 2; i++) {
        restore();
        cpu.xcr0 &= ~(1u << ymm_states[i]);
        check_offers(0, 0, "the system does not save SSE or AVX registers");
    }
    for (int i = 0; i < 3; i++) {
        restore();
        cpu.xcr0 &= ~(1u << zmm_states[i]);
        check_offers(1, 0, "the system does not save a part of the AVX-512 registers");
    }
    return report();
}
#else
int
main(void)
{
    printf("no x86\n");
    return mha_cpu_offers(MHA_ISA_AVX2) != 0;
}
#endif
