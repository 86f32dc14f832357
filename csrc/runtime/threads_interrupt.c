/*
 * threads_interrupt.c: asks the watcher of a call, every MHA_ASK_EVERY_NS, whether the call is to be given up.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#if !defined(_WIN32) && !defined(__APPLE__) && !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#endif

#include "threads_interrupt.h"

#include <stdatomic.h>

#include "common.h"
#include "threads_clock.h"

/* How often the watcher is asked; not more often, for it may have to wait (the binding's watcher for Python's lock). */
#ifndef MHA_ASK_EVERY_NS /* test_interrupt.c is built with less: its calls have to be asked several times */
#define MHA_ASK_EVERY_NS 50000000
#endif
/* The clock is read when pieces of work have taken about so long, or after at most MOST_SKIPPED of them. */
#define LOOK_EVERY_NS 1000000
#define MOST_SKIPPED 64u

static _Thread_local struct {
    mha_interrupt_fn check;
    void *context;
    int asking; /* a call inside of `check` is not watched */
    unsigned skip, skipped;
    int64_t looked_at, ask_at;
} watch;
static _Thread_local atomic_int stopped;       /* this thread's own call: the status it ends with, MHA_OK to go on */
static _Thread_local const atomic_int *follow; /* the `stopped` of the call that this thread works for */

void
mha_interrupt_watch(mha_interrupt_fn check, void *context)
{
    if (watch.asking) {
        return;
    }
    watch.check = check;
    watch.context = context;
    watch.skip = watch.skipped = 0;
    watch.looked_at = check != NULL ? mha_now_ns() : 0;
    watch.ask_at = watch.looked_at + MHA_ASK_EVERY_NS;
    atomic_store(&stopped, MHA_OK);
    follow = check != NULL ? &stopped : NULL;
}

const void *
mha_interrupt_flag(void)
{
    return watch.asking ? NULL : follow;
}

void
mha_interrupt_follow(const void *flag)
{
    follow = flag;
}

void
mha_interrupt_lost_helpers(const void *flag)
{
    if (flag == &stopped) {
        atomic_store(&stopped, MHA_ERR_FORKED);
    }
}

static void
ask(void)
{
    watch.asking = 1;
    if (watch.check(watch.context) != 0 && atomic_load(&stopped) == MHA_OK) {
        atomic_store(&stopped, MHA_ERR_INTERRUPTED);
    }
    watch.asking = 0;
    watch.looked_at = mha_now_ns(); /* after the answer: who has to wait for it is not asked at every look */
    watch.ask_at = watch.looked_at + MHA_ASK_EVERY_NS;
}

int
mha_interrupted(void)
{
    if (mha_interrupt_flag() == NULL) {
        return 0;
    }
    if (watch.check != NULL && atomic_load(&stopped) == MHA_OK && watch.skipped++ >= watch.skip) {
        const int64_t now = mha_now_ns(), passed = now - watch.looked_at;
        watch.skip = passed >= LOOK_EVERY_NS ? 0 : mha_min(2 * watch.skip + 1, MOST_SKIPPED);
        watch.skipped = 0;
        watch.looked_at = now;
        if (now >= watch.ask_at) {
            ask();
        }
    }
    return atomic_load_explicit(follow, memory_order_relaxed) != MHA_OK;
}

mha_status
mha_interrupt_status(void)
{
    return mha_interrupted() ? (mha_status)atomic_load(follow) : MHA_OK;
}
