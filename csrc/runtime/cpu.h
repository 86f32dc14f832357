/*
 * cpu.h: what this machine offers, found out at run time.  Used by the dispatcher.
 *
 * Nothing here is cached: the caller asks once.
 */
#ifndef MHA_CPU_H
#define MHA_CPU_H

#include "mha.h"

/* 1 if the CPU has the instructions of `isa` and the OS saves its registers; says nothing about what is compiled in. */
int mha_cpu_offers(mha_isa isa);

#endif /* MHA_CPU_H */
