/*
 * threads_windows.h: what the pool needs of Windows 8 and later: a counter to sleep on, a clock, threads.
 *
 * It defines the same names as threads_posix.h.  Windows has no forks, but can unload a library while its threads sleep
 * in it: so starting a thread pins ours.  For threads_park.h and threads.c alone.
 */
#ifndef MHA_THREADS_WINDOWS_H
#define MHA_THREADS_WINDOWS_H

#include <stdatomic.h>
#include <stdint.h>

#include "common.h"
#include "threads_clock.h" /* and with it windows.h */

typedef struct {
    atomic_uint count;
    atomic_uint parked; /* threads that are in the kernel, or on their way there or back */
} mha_counter;

#define MHA_COUNTER_ZERO {0, 0}

MHA_INLINE void
mha_yield(void)
{
    SwitchToThread();
}

#define MHA_FOREVER ((int64_t)-1)

/* Sleeps until the counter is no longer `seen`, or `most_ns` have passed; may return early. */
MHA_INLINE void
mha_counter_park(mha_counter *counter, unsigned seen, int64_t most_ns)
{
    const DWORD saved_error = GetLastError();

    atomic_fetch_add(&counter->parked, 1);
    WaitOnAddress((volatile void *)&counter->count, &seen, sizeof seen,
                  most_ns < 0 ? INFINITE : (DWORD)(most_ns / 1000000));
    atomic_fetch_sub(&counter->parked, 1);
    SetLastError(saved_error);
}

/* Wakes up to n_threads of the parked threads; call after the counter changed. */
MHA_INLINE void
mha_counter_unpark(mha_counter *counter, unsigned n_threads)
{
    for (unsigned i = 0; i < n_threads; i++) {
        WakeByAddressSingle((void *)&counter->count);
    }
}

/* --- Threads ---------------------------------------------------------------------------- */

#define MHA_STACK_BYTES ((size_t)1 << 20)
#define MHA_THREAD_CALL WINAPI /* how the system calls a thread's function */

typedef DWORD mha_thread_end;
typedef mha_thread_end(MHA_THREAD_CALL *mha_thread_fn)(void *);

MHA_INLINE void
mha_name_thread(void)
{
}

static int
mha_at_fork(void (*forget)(void))
{
    (void)forget;
    return 1;
}

/* Starts up to n_threads detached threads; returns how many. */
static unsigned
mha_start_threads(unsigned n_threads, mha_thread_fn run)
{
    const DWORD flags = GET_MODULE_HANDLE_EX_FLAG_PIN | GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS;
    const DWORD saved_error = GetLastError();
    unsigned n_started = 0;
    HMODULE ours;

    while (n_started < n_threads && GetModuleHandleExW(flags, (LPCWSTR)(void *)run, &ours)) {
        const HANDLE thread = CreateThread(NULL, MHA_STACK_BYTES, run, NULL, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
        if (thread == NULL) {
            break; /* fewer will do */
        }
        CloseHandle(thread);
        n_started++;
    }
    SetLastError(saved_error);
    return n_started;
}

#endif /* MHA_THREADS_WINDOWS_H */
