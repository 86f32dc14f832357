/*
 * threads_park.h: counters that threads wait on; the only place where the pool sleeps.  For threads.c alone.
 *
 * A waiting thread first spins: it looks at the counter, and sees a change within a fraction of a
 * microsecond.  Then it parks in the kernel, which costs no CPU but takes microseconds to leave.
 *
 * No change is slept through.  A thread that changes the counter looks for parked threads afterwards;
 * a thread that parks says so first and looks at the counter afterwards; all in one total order
 * (seq_cst).  So either the first sees that the second is parked, or the second sees the change.
 */
#ifndef MHA_THREADS_PARK_H
#define MHA_THREADS_PARK_H

#if defined(_WIN32)
#include "threads_windows.h"
#else
#include "threads_posix.h"
#endif

/* Tells the core that this is a waiting loop: the core saves power and leaves more to its other thread. */
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
 * it offers the CPU to others between looks: the thread we wait for may need it, if threads outnumber the CPUs.
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
            mha_yield();
        }
    }
}

#endif /* MHA_THREADS_PARK_H */
