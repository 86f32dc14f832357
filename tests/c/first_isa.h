/*
 * first_isa.h: the first of the instruction sets that a test program goes through.  All that the CPU has, but under
 * emulation (-DFIRST_ISA=...), where scalar would take half of the time for what the native build asks of the same
 * text. SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef FIRST_ISA
#define FIRST_ISA MHA_ISA_SCALAR
#endif
