/*
 * threads_park.h: counters that threads wait on; the only place where the pool sleeps.  For threads.c alone.
 *
 * Who waits looks at the counter for a while, which catches a change within a fraction of a
 * microsecond, and then parks in the kernel, which takes microseconds to leave but costs no CPU.
 * On Linux the kernel parks on the counter itself (futex); elsewhere a mutex and a condition do it.
 *
 * A change is never slept through: who changes the counter looks for parked threads afterwards, who
 * parks says so first and looks at the counter afterwards, all in one total order (seq_cst).  Either
 * the changer sees the parked thread, or that thread sees the change.
 */
#ifndef MHA_THREADS_PARK_H
#define MHA_THREADS_PARK_H

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "common.h"

#if defined(__linux__) && !defined(MHA_PARK_ON_CONDITION)
#include <limits.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(SYS_futex) && !defined(MHA_PARK_ON_CONDITION)
#define MHA_PARK_ON_FUTEX 1
#define FUTEX_WAIT_PRIVATE 128 /* the kernel's numbers; not every C library has a header for them */
#define FUTEX_WAKE_PRIVATE 129
#else
#define MHA_PARK_ON_FUTEX 0
#endif

typedef struct {
    atomic_uint count;
    atomic_uint parked; /* threads that are in the kernel, or on their way there or back */
#if !MHA_PARK_ON_FUTEX
    pthread_mutex_t mutex;
    pthread_cond_t changed;
#endif
} mha_counter;

#if MHA_PARK_ON_FUTEX
#define MHA_COUNTER_ZERO {0, 0}
#else
#define MHA_COUNTER_ZERO {0, 0, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER}
#endif

/* Back to zero in a forked child, whatever the threads that are no longer there were doing to it. */
MHA_INLINE void
mha_counter_forget(mha_counter *counter)
{
    atomic_store(&counter->count, 0);
    atomic_store(&counter->parked, 0);
#if !MHA_PARK_ON_FUTEX
    pthread_mutex_init(&counter->mutex, NULL);
    pthread_cond_init(&counter->changed, NULL);
#endif
}

MHA_INLINE int64_t
mha_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Tells the core that this is a waiting loop: it saves power and leaves more to its sibling. */
MHA_INLINE void
mha_spin_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); /* yield is a no-op on most cores */
#endif
}

/*
 * Looks at the counter until it is no longer `seen` (then 1), but not beyond the deadline (then 0).  After `yield_ns`
 * it offers the CPU to others between looks: what we wait for may need it, if threads outnumber the CPUs.
 */
MHA_INLINE int
mha_counter_spin(const mha_counter *counter, unsigned seen, int64_t yield_ns, int64_t deadline_ns)
{
    for (;;) {
        for (int looks = 0; looks < 32; looks++) { /* the clock costs as much as a pause */
            if (atomic_load_explicit(&counter->count, memory_order_acquire) != seen) {
                return 1;
            }
            mha_spin_pause();
        }
        const int64_t now = mha_now_ns();
        if (now >= deadline_ns) {
            return 0;
        }
        if (now >= yield_ns) {
            sched_yield();
        }
    }
}

/* Sleeps until the counter is no longer `seen`; may return early. */
MHA_INLINE void
mha_counter_park(mha_counter *counter, unsigned seen)
{
    const int saved_errno = errno;

    atomic_fetch_add(&counter->parked, 1);
#if MHA_PARK_ON_FUTEX
    syscall(SYS_futex, (void *)&counter->count, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
    pthread_mutex_lock(&counter->mutex);
    while (atomic_load(&counter->count) == seen) {
        pthread_cond_wait(&counter->changed, &counter->mutex);
    }
    pthread_mutex_unlock(&counter->mutex);
#endif
    atomic_fetch_sub(&counter->parked, 1);
    errno = saved_errno;
}

/* Wakes up to n_threads of the parked threads; call after the counter changed. */
MHA_INLINE void
mha_counter_unpark(mha_counter *counter, unsigned n_threads)
{
    const int saved_errno = errno;

#if MHA_PARK_ON_FUTEX
    syscall(SYS_futex, (void *)&counter->count, FUTEX_WAKE_PRIVATE, n_threads, NULL, NULL, 0);
#else
    pthread_mutex_lock(&counter->mutex);
    for (unsigned i = 0; i < n_threads; i++) {
        pthread_cond_signal(&counter->changed);
    }
    pthread_mutex_unlock(&counter->mutex);
#endif
    errno = saved_errno;
}

#endif /* MHA_THREADS_PARK_H */
