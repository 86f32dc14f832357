/*
 * cpu_caches.c: how large the data caches of one core are; the system is asked once, at import (mha_caches_select).
 *
 * By these sizes drivers choose how many rows a task has and what is prefetched, which changes the time of a call and
 * none of its bits.  It gains 1 to 4 % of the time: too little for code that asks Windows or musl in their own way.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#if defined(__linux__)
#define _GNU_SOURCE /* _SC_LEVEL1_DCACHE_SIZE */
#endif

#include "common.h"
#include "mha.h"

#if defined(__unix__)
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#define KIB ((size_t)1024)
/* The smallest in use, for systems that do not know their caches, and hypervisors that report anything. */
#define DEFAULTS ((mha_cache_sizes){32 * KIB, 512 * KIB})

#if defined(_SC_LEVEL1_DCACHE_SIZE) /* glibc, which asks the processor */
static mha_cache_sizes
ask(void)
{
    const long first = sysconf(_SC_LEVEL1_DCACHE_SIZE), second = sysconf(_SC_LEVEL2_CACHE_SIZE);

    return first > 0 && second > 0 ? (mha_cache_sizes){(size_t)first, (size_t)second} : DEFAULTS;
}

#elif defined(__APPLE__)
/* 0 if the system does not know the name. */
static size_t
told(const char *name)
{
    uint64_t value = 0; /* some values have 32 bits: the lower half, as numbers are little-endian */
    size_t n_bytes = sizeof value;

    return sysctlbyname(name, &value, &n_bytes, NULL, 0) == 0 ? (size_t)value : 0;
}

/* Of the fast cores, where there are slower ones too. */
static mha_cache_sizes
ask(void)
{
    const mha_cache_sizes fast = {
        told("hw.perflevel0.l1dcachesize"),
        told("hw.perflevel0.l2cachesize") / mha_max(told("hw.perflevel0.cpusperl2"), 1),
    };
    const mha_cache_sizes any = {told("hw.l1dcachesize"), told("hw.l2cachesize")};

    return fast.first != 0 ? fast : any;
}

#else
static mha_cache_sizes
ask(void)
{
    return DEFAULTS;
}
#endif

static int
is_sane(mha_cache_sizes sizes)
{
    return sizes.first >= 4 * KIB && sizes.first <= 1024 * KIB && sizes.second >= 64 * KIB &&
           sizes.second <= 64 * 1024 * KIB && sizes.first <= sizes.second;
}

static mha_cache_sizes active = DEFAULTS;

mha_cache_sizes
mha_caches_active(void)
{
    return active;
}

void
mha_caches_select(mha_cache_sizes sizes)
{
    const mha_cache_sizes found = is_sane(sizes) ? sizes : ask();

    active = is_sane(found) ? found : DEFAULTS;
}
