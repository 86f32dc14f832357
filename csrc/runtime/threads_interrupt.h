/*
 * threads_interrupt.h: giving a call up half-way.  The calling thread alone asks the watcher (mha_interrupt_watch in
 * mha.h), between pieces of work; the threads that help it only look whether the watcher has said yes.
 */
#ifndef MHA_THREADS_INTERRUPT_H
#define MHA_THREADS_INTERRUPT_H

#include "mha.h"

/*
 * 1 if the call that this thread works for is to be given up: the rest of its work no longer counts.  To be called
 * between pieces of work.
 */
int mha_interrupted(void);

/* The status that an entry point returns at its end. */
MHA_MUST_CHECK mha_status mha_interrupt_status(void);

/* The flag of this thread's call, NULL if nobody watches it.  A helper follows the caller's flag from then on. */
const void *mha_interrupt_flag(void);
void mha_interrupt_follow(const void *flag);

/* In the child of a fork: the call with this flag has lost its helpers.  It ends, if it is the forking thread's own. */
void mha_interrupt_lost_helpers(const void *flag);

#endif /* MHA_THREADS_INTERRUPT_H */
