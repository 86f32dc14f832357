/*
 * cpu_x86.h: how cpu.c and caches.c ask an x86 processor; in a test, which answers for it.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef MHA_CPU_X86_H
#define MHA_CPU_X86_H

#if defined(__x86_64__) || defined(__i386__)
#define MHA_CPU_IS_X86 1
#include <cpuid.h>

#if defined(MHA_PRETENDED_CPU)
#define CPUID mha_pretended_cpuid
int mha_pretended_cpuid(unsigned leaf, unsigned subleaf, unsigned *eax, unsigned *ebx, unsigned *ecx, unsigned *edx);
#else
#define CPUID __get_cpuid_count
#endif
#else
#define MHA_CPU_IS_X86 0
#endif

#endif /* MHA_CPU_X86_H */
