/*
 * caches.c: how large the data caches of one core are, asked of the processor or the system once, at import
 * (mha_caches_select).
 *
 * Drivers choose by these sizes what changes the time of a call and none of its bits: how many rows a task has, what is
 * asked for ahead.  What decides about the order of sums, such as the key block, is the same on every machine.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#if defined(__linux__)
#define _GNU_SOURCE /* O_CLOEXEC */
#endif

#include "common.h"
#include "mha.h"

#include "cpu_x86.h"

#define KIB ((size_t)1024)
/* Of the smallest in use, for processors that say nothing, and systems that let nobody ask. */
#define DEFAULT_FIRST (32 * KIB)
#define DEFAULT_SECOND (512 * KIB)

#if MHA_CPU_IS_X86 && !defined(MHA_CACHES_OF_CPU)

/* Leaves with one cache a subleaf: of Intel and who does as it, and of AMD. */
#define LEAF_INTEL 4u
#define LEAF_AMD 0x8000001Du
/* Their registers. */
#define CACHE_TYPE(eax) ((eax) & 31u) /* 0: no more caches; 1: data; 2: instructions; 3: both */
#define CACHE_LEVEL(eax) ((eax) >> 5 & 7u)
#define CACHE_SHARERS(eax) (((eax) >> 14 & 0xFFFu) + 1)
#define CACHE_WAYS(ebx) ((size_t)((ebx) >> 22) + 1)
#define CACHE_PARTITIONS(ebx) ((size_t)((ebx) >> 12 & 0x3FFu) + 1)
#define CACHE_LINE(ebx) ((size_t)((ebx) & 0xFFFu) + 1)
#define CACHES_MOST 16u /* a processor that never says 0 is not asked for ever */
/* Hardware threads of a core: a cache that more share serves several cores. */
#define THREADS_PER_CORE 2u

static mha_cache_sizes
caches_of_leaf(unsigned leaf)
{
    mha_cache_sizes found = {0, 0};
    unsigned eax, ebx, ecx, edx;

    for (unsigned i = 0; i < CACHES_MOST && CPUID(leaf, i, &eax, &ebx, &ecx, &edx) && CACHE_TYPE(eax) != 0; i++) {
        const size_t bytes = CACHE_WAYS(ebx) * CACHE_PARTITIONS(ebx) * CACHE_LINE(ebx) * ((size_t)ecx + 1);
        const unsigned sharers = CACHE_SHARERS(eax);
        const size_t share = sharers <= THREADS_PER_CORE ? bytes : bytes / sharers * THREADS_PER_CORE;

        if (CACHE_TYPE(eax) != 2 && CACHE_LEVEL(eax) == 1) {
            found.first = share;
        } else if (CACHE_TYPE(eax) != 2 && CACHE_LEVEL(eax) == 2) {
            found.second = share;
        }
    }
    return found;
}

static mha_cache_sizes
ask(void)
{
    const mha_cache_sizes found = caches_of_leaf(LEAF_INTEL);

    return found.first != 0 ? found : caches_of_leaf(LEAF_AMD);
}

#elif defined(__linux__)
#include <string.h>

#include "read_start.h"

/* Where the kernel tells.  Tests build with a tree of their own, on any processor. */
#ifndef MHA_CACHES_OF_CPU
#define MHA_CACHES_OF_CPU "/sys/devices/system/cpu/cpu0/cache"
#endif
#define INDEX_AT (sizeof MHA_CACHES_OF_CPU "/index" - 1)
#define CACHES_MOST 10

/* What `file` says of a cache, whose directory path[0 .. INDEX_AT] names. */
static void
read_fact(char *path, const char *file, char *text, size_t capacity)
{
    strcpy(path + INDEX_AT + 1, file);
    mha_read_start(path, text, capacity);
}

/* "2048K" in bytes; 0 if it is anything else. */
static size_t
parse_size(const char *text)
{
    size_t kib = 0;

    for (; *text >= '0' && *text <= '9' && kib < (size_t)1 << 20; text++) {
        kib = 10 * kib + (size_t)(*text - '0');
    }
    return *text == 'K' ? kib * KIB : 0;
}

/* How many bits of "00000000,0000000f" are set; at least 1. */
static size_t
count_cpus(const char *text)
{
    size_t n = 0;

    for (; *text != '\0'; text++) {
        const unsigned digit = *text >= 'a' ? (unsigned)(*text - 'a') + 10 : (unsigned)(*text - '0');
        n += digit < 16 ? (size_t)__builtin_popcount(digit) : 0;
    }
    return mha_max(n, 1);
}

static mha_cache_sizes
ask(void)
{
    char path[] = MHA_CACHES_OF_CPU "/index0/shared_cpu_map", text[2048]; /* the longest of these files' names */
    mha_cache_sizes found = {0, 0};

    for (int i = 0; i < CACHES_MOST; i++) {
        path[INDEX_AT] = (char)('0' + i);
        read_fact(path, "/type", text, sizeof text);
        const int holds_data = text[0] == 'D' || text[0] == 'U';
        read_fact(path, "/size", text, sizeof text);
        const size_t bytes = parse_size(text);
        read_fact(path, "/shared_cpu_map", text, sizeof text);
        const size_t share = bytes / count_cpus(text);
        read_fact(path, "/level", text, sizeof text);
        if (holds_data && text[0] == '1') {
            found.first = share;
        } else if (holds_data && text[0] == '2') {
            found.second = share;
        }
    }
    return found;
}

#elif defined(__APPLE__)
#include <sys/sysctl.h>

/* 0 if the system does not know the name. */
static size_t
told(const char *name)
{
    uint64_t value = 0; /* some are 32 bits long, of a little-endian number */
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

#elif defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#define FACTS_MOST 1024

static mha_cache_sizes
ask(void)
{
    SYSTEM_LOGICAL_PROCESSOR_INFORMATION facts[FACTS_MOST];
    const DWORD saved_error = GetLastError();
    DWORD n_bytes = sizeof facts;
    mha_cache_sizes found = {0, 0};

    if (!GetLogicalProcessorInformation(facts, &n_bytes)) {
        n_bytes = 0;
    }
    for (size_t i = 0; i < n_bytes / sizeof *facts; i++) {
        const CACHE_DESCRIPTOR *cache = &facts[i].Cache;
        if (facts[i].Relationship != RelationCache || (facts[i].ProcessorMask & 1) == 0) {
            continue; /* the first processor stands for all */
        }
        const size_t n_cpus = (size_t)__builtin_popcountll((unsigned long long)facts[i].ProcessorMask);
        if (cache->Level == 1 && cache->Type == CacheData) {
            found.first = cache->Size / n_cpus;
        } else if (cache->Level == 2 && cache->Type != CacheInstruction) {
            found.second = cache->Size / n_cpus;
        }
    }
    SetLastError(saved_error);
    return found;
}

#else /* a browser tells nobody */

static mha_cache_sizes
ask(void)
{
    return (mha_cache_sizes){0, 0};
}
#endif

/* Hypervisors say what they like. */
static int
is_sane(mha_cache_sizes sizes)
{
    return sizes.first >= 4 * KIB && sizes.first <= 1024 * KIB && sizes.second >= 64 * KIB &&
           sizes.second <= 64 * 1024 * KIB && sizes.first <= sizes.second;
}

static mha_cache_sizes active = {DEFAULT_FIRST, DEFAULT_SECOND};

mha_cache_sizes
mha_caches_active(void)
{
    return active;
}

void
mha_caches_select(mha_cache_sizes sizes)
{
    const mha_cache_sizes found = is_sane(sizes) ? sizes : ask();

    active = is_sane(found) ? found : (mha_cache_sizes){DEFAULT_FIRST, DEFAULT_SECOND};
}
