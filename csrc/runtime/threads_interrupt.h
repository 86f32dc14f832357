/*
 * threads_interrupt.h: giving a call up half-way.  Who watches (mha_interrupt_watch in mha.h) is asked by the calling
 * thread alone, between pieces of work; the threads that help it only look whether it has said yes.
 */
#ifndef MHA_THREADS_INTERRUPT_H
#define MHA_THREADS_INTERRUPT_H

#include "mha.h"

/*
 * 1 if the call that this thread works for is to be given up: what is left of its work counts no more.  To be asked
 * between pieces of work.
 */
int mha_interrupted(void);

/* What an entry point returns at its end. */
MHA_MUST_CHECK mha_status mha_interrupt_status(void);

/* The flag of the calling thread's call, NULL if nobody watches; and a helper's promise to look at it from now on. */
const void *mha_interrupt_flag(void);
void mha_interrupt_follow(const void *flag);

/* In the child of a fork: the call with this flag has lost its helpers.  It ends, if it is the forking thread's own. */
void mha_interrupt_lost_helpers(const void *flag);

#endif /* MHA_THREADS_INTERRUPT_H */
