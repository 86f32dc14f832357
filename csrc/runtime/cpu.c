/*
 * cpu.c: which instruction sets the CPU and the OS offer.
 *
 * Compiled for the plainest CPU of its architecture, as it decides whether anything wider may run.
 * A bit in CPUID is not enough: the OS must also save the wide registers when it switches threads,
 * which XGETBV tells.  (macOS on x86 turns the AVX-512 state on only at first use; it counts as absent.)
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "cpu.h"

#if defined(__x86_64__) || defined(__i386__)
#define MHA_CPU_IS_X86 1
#include <cpuid.h>

#if defined(MHA_PRETENDED_CPU) /* a test answers for the CPU */
#define CPUID mha_pretended_cpuid
int mha_pretended_cpuid(unsigned leaf, unsigned subleaf, unsigned *eax, unsigned *ebx, unsigned *ecx, unsigned *edx);
#else
#define CPUID __get_cpuid_count
#endif
#else
#define MHA_CPU_IS_X86 0
#endif

#if MHA_CPU_IS_X86
/* CPUID leaf 1, ECX. */
#define HAS_FMA (1u << 12)
#define HAS_OSXSAVE (1u << 27) /* the OS uses XSAVE, and XGETBV may be executed */
/* CPUID leaf 7, EBX. */
#define HAS_AVX2 (1u << 5)
#define HAS_AVX512 ((1u << 16) | (1u << 17) | (1u << 30) | (1u << 31)) /* f, dq, bw, vl */
/* XCR0, the register states that the OS saves. */
#define SAVES_YMM 0x06u /* SSE and AVX state */
#define SAVES_ZMM 0xE6u /* the same, mask registers, and both parts of the 512-bit state */

#if defined(MHA_PRETENDED_CPU) /* a test answers for the CPU */
#define XCR0 mha_pretended_xcr0
unsigned mha_pretended_xcr0(void);
#else
#define XCR0 read_xcr0

static unsigned
read_xcr0(void)
{
    unsigned low, high;

    /* The bytes of xgetbv: its name and its intrinsic both need a target flag that this file must not have. */
    __asm__ volatile(".byte 0x0f, 0x01, 0xd0" : "=a"(low), "=d"(high) : "c"(0));
    (void)high;
    return low;
}
#endif

/* 1 if the CPU has AVX2, FMA and all of the leaf 7 bits `features`, and the OS saves all of `states`. */
static int
x86_offers(unsigned features, unsigned states)
{
    unsigned eax, ebx, ecx, edx;

    if (!CPUID(1, 0, &eax, &ebx, &ecx, &edx) || (ecx & HAS_OSXSAVE) == 0 || (ecx & HAS_FMA) == 0) {
        return 0;
    }
    if ((XCR0() & states) != states || !CPUID(7, 0, &eax, &ebx, &ecx, &edx)) {
        return 0;
    }
    features |= HAS_AVX2;
    return (ebx & features) == features;
}
#endif

int
mha_cpu_offers(mha_isa isa)
{
#if MHA_CPU_IS_X86
    if (isa == MHA_ISA_AVX2 || isa == MHA_ISA_AVX512) { /* kernels of the latter use the former's instructions, too */
        return isa == MHA_ISA_AVX2 ? x86_offers(0, SAVES_YMM) : x86_offers(HAS_AVX512, SAVES_ZMM);
    }
#elif defined(__aarch64__) /* every such CPU has NEON */
    if (isa == MHA_ISA_NEON) {
        return 1;
    }
#elif defined(__wasm__)    /* an engine without SIMD128 does not load a module that holds it */
    if (isa == MHA_ISA_WASM) {
        return 1;
    }
#endif
    return isa == MHA_ISA_SCALAR;
}
