/*
 * threads_posix.h: what the pool needs of a POSIX system: a counter to sleep on, a clock, threads, forks.
 *
 * On Linux the kernel parks on the counter itself (futex); elsewhere a mutex and a condition do it.
 * threads_windows.h defines the same names for Windows.  For threads_park.h and threads.c alone.
 */
#ifndef MHA_THREADS_POSIX_H
#define MHA_THREADS_POSIX_H

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "common.h"
#include "threads_clock.h"

#if defined(__linux__) && !defined(MHA_PARK_ON_CONDITION)
#include <limits.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
/* Systems of 32 bits have another call for today's `timespec`: they park on a condition. */
#if defined(SYS_futex) && defined(__LP64__) && !defined(MHA_PARK_ON_CONDITION)
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

MHA_INLINE void
mha_yield(void)
{
    sched_yield();
}

#define MHA_FOREVER ((int64_t)-1)

/* Sleeps until the counter is no longer `seen`, or `most_ns` have passed; may return early. */
MHA_INLINE void
mha_counter_park(mha_counter *counter, unsigned seen, int64_t most_ns)
{
    const int saved_errno = errno;

    atomic_fetch_add(&counter->parked, 1);
#if MHA_PARK_ON_FUTEX
    const struct timespec most = {(time_t)(most_ns / 1000000000), (long)(most_ns % 1000000000)};
    syscall(SYS_futex, (void *)&counter->count, FUTEX_WAIT_PRIVATE, seen, most_ns < 0 ? NULL : &most, NULL, 0);
#else
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until); /* the clock of conditions */
    until.tv_sec += (time_t)((until.tv_nsec + most_ns) / 1000000000);
    until.tv_nsec = (long)((until.tv_nsec + most_ns) % 1000000000);
    pthread_mutex_lock(&counter->mutex);
    int woken = 0;
    while (woken == 0 && atomic_load(&counter->count) == seen) {
        woken = most_ns < 0 ? pthread_cond_wait(&counter->changed, &counter->mutex)
                            : pthread_cond_timedwait(&counter->changed, &counter->mutex, &until);
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

/* --- Threads ---------------------------------------------------------------------------- */

#define MHA_STACK_BYTES \
    ((size_t)1 << 20)   /* kernels need little; thread-local data of a big process comes out of it \
                         */
#define MHA_THREAD_CALL /* how the system calls a thread's function */

typedef void *mha_thread_end;
typedef mha_thread_end(MHA_THREAD_CALL *mha_thread_fn)(void *);

MHA_INLINE void
mha_name_thread(void)
{
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "mha_c");
#elif defined(__APPLE__)
    pthread_setname_np("mha_c");
#endif
}

/* Calls `forget` in the child of every later fork; returns whether it will. */
static int
mha_at_fork(void (*forget)(void))
{
    return pthread_atfork(NULL, NULL, forget) == 0;
}

/* Starts up to n_threads detached threads; returns how many. */
static unsigned
mha_start_threads(unsigned n_threads, mha_thread_fn run)
{
    pthread_attr_t attributes;
    sigset_t blocked, before;
    unsigned n_started = 0;

    if (pthread_attr_init(&attributes) != 0) {
        return 0;
    }
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, MHA_STACK_BYTES);

    /* A new thread inherits the mask.  Signals are for the program's own threads, except those that a fault of the
     * thread itself raises: if they were blocked, they would kill the process past its crash handler. */
    sigfillset(&blocked);
    sigdelset(&blocked, SIGSEGV);
    sigdelset(&blocked, SIGBUS);
    sigdelset(&blocked, SIGFPE);
    sigdelset(&blocked, SIGILL);
    sigdelset(&blocked, SIGTRAP);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    while (n_started < n_threads) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, run, NULL) != 0) {
            break; /* fewer will do */
        }
        n_started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return n_started;
}

#endif /* MHA_THREADS_POSIX_H */
