/*
 * threads_clock.h: the clock of the pool (threads_park.h) and of interruptions: nanoseconds that only go forward.
 */
#ifndef MHA_THREADS_CLOCK_H
#define MHA_THREADS_CLOCK_H

#include <stdint.h>

#include "common.h"

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

MHA_INLINE int64_t
mha_now_ns(void)
{
    LARGE_INTEGER now, per_second;

    QueryPerformanceFrequency(&per_second); /* both read memory that the kernel shares */
    QueryPerformanceCounter(&now);
    const int64_t whole = now.QuadPart / per_second.QuadPart, rest = now.QuadPart % per_second.QuadPart;
    return whole * 1000000000 + rest * 1000000000 / per_second.QuadPart;
}
#else
#include <time.h>

MHA_INLINE int64_t
mha_now_ns(void)
{
    struct timespec now;

#if defined(CLOCK_MONOTONIC)
    clock_gettime(CLOCK_MONOTONIC, &now);
#else
    (void)timespec_get(&now, TIME_UTC);
#endif
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
#endif

#endif /* MHA_THREADS_CLOCK_H */
