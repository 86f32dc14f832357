/*
 * threads_available.c: how many CPUs this process may use (mha_threads_available): those that its affinity mask has,
 * or all of the system where there are no masks.  How much time it gets on them is no question of C: mha_c/config.py.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#if defined(__linux__)
#define _GNU_SOURCE /* sched_getaffinity, CPU_COUNT_S */
#endif

#include "mha.h"

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

/* A process in one group of up to 64 CPUs has an affinity mask there; in several groups it has all of their CPUs. */
unsigned
mha_threads_available(void)
{
    const DWORD saved_error = GetLastError();
    DWORD_PTR mask = 0, of_system = 0;
    USHORT groups[64], n_groups = 64;
    DWORD n_cpus = 0;

    if (!GetProcessGroupAffinity(GetCurrentProcess(), &n_groups, groups)) {
        n_groups = 1;
    }
    if (n_groups == 1 && GetProcessAffinityMask(GetCurrentProcess(), &mask, &of_system)) {
        for (; mask != 0; mask &= mask - 1) {
            n_cpus++;
        }
    }
    for (USHORT i = 0; n_groups > 1 && i < n_groups; i++) {
        n_cpus += GetActiveProcessorCount(groups[i]);
    }
    SetLastError(saved_error);
    return n_cpus < 1 ? 1 : n_cpus;
}

#elif defined(__unix__) || defined(__APPLE__)
#include <errno.h>
#include <unistd.h>
#if defined(__linux__)
#include <sched.h>
#endif

unsigned
mha_threads_available(void)
{
    const int saved_errno = errno;
    long n_cpus;

#if defined(__linux__)
    cpu_set_t masks[8]; /* 8192 CPUs: the call fails if the kernel was built for more than it is offered */

    n_cpus = sched_getaffinity(0, sizeof masks, masks) == 0 ? CPU_COUNT_S(sizeof masks, masks)
                                                            : sysconf(_SC_NPROCESSORS_ONLN);
#else
    n_cpus = sysconf(_SC_NPROCESSORS_ONLN);
#endif
    errno = saved_errno;
    return n_cpus < 1 ? 1 : (unsigned)n_cpus;
}

#else

/* threads.c runs everything on the calling thread here, so one CPU is what we can use. */
unsigned
mha_threads_available(void)
{
    return 1;
}
#endif
