/*
 * threads_available.c: how many CPUs this process may use (mha_threads_available).
 *
 * The smaller of two limits: the affinity mask says which CPUs, a cgroup quota says how much time
 * per period on them (what `docker run --cpus` and Kubernetes set).  Threads beyond the quota would
 * use the period up early and then all stand still together.  Every level of the cgroup tree may
 * carry a quota; the smallest holds.  Files that are missing or odd mean "no quota".
 * SPDX-License-Identifier: BSD-3-Clause
 */
#if defined(__linux__)
#define _GNU_SOURCE /* sched_getaffinity, CPU_COUNT_S */
#endif

#include "common.h"
#include "mha.h"

#if defined(__linux__)
#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "read_start.h"

/* Where the kernel tells.  Tests build with a tree of their own. */
#ifndef MHA_CGROUP_OF_SELF
#define MHA_CGROUP_OF_SELF "/proc/self/cgroup"
#endif
#ifndef MHA_CGROUP_ROOT
#define MHA_CGROUP_ROOT "/sys/fs/cgroup"
#endif

#define NO_QUOTA UINT_MAX

/* Reads a number, moving *text on; -1 if there is none ("max", "-1") or it is absurd. */
static long long
parse_number(char **text)
{
    char *const start = *text;
    const long long value = strtoll(start, text, 10);

    return *text == start || value < 0 || value == LLONG_MAX ? -1 : value;
}

/* A number from `file` in the directory that the first `length` characters of `path` name, which has room for it. */
static long long
number_in(char *path, size_t length, const char *file, long long *second)
{
    char text[64], *at = text;

    strcpy(path + length, file);
    mha_read_start(path, text, sizeof text);
    const long long first = parse_number(&at);
    *second = parse_number(&at);
    return first;
}

/* The quota that one cgroup directory sets, in CPUs rounded up. */
static unsigned
quota_in(char *path, size_t length, int version)
{
    long long quota, period, unused;

    if (version == 2) { /* one file: "max 100000" or "150000 100000" */
        quota = number_in(path, length, "/cpu.max", &period);
    }
    else { /* two files, a quota of -1 for none */
        quota = number_in(path, length, "/cpu.cfs_quota_us", &unused);
        period = number_in(path, length, "/cpu.cfs_period_us", &unused);
    }
    if (quota < 0 || period <= 0) {
        return NO_QUOTA;
    }
    const long long n_cpus = quota / period + (quota % period != 0);
    return n_cpus < 1 ? 1 : n_cpus < NO_QUOTA ? (unsigned)n_cpus : NO_QUOTA;
}

/*
 * The smallest quota from the cgroup `own` up to the root of the hierarchy mounted at `mount`.
 *
 * A container often sees only its own part of the tree, mounted as if it were all, while `own` still
 * counts from the host's root: then the deeper directories do not exist here, and the walk up to the
 * mount finds the container's quota.
 */
static unsigned
smallest_quota(const char *mount, const char *own, int version)
{
    char path[1024 + 32]; /* a longer name than the first is not looked at; the rest is for a file's name */
    const size_t root_length = strlen(mount), own_length = strlen(own);
    size_t length = root_length + (root_length + own_length < 1024 ? own_length : 0);

    memcpy(path, mount, root_length);
    memcpy(path + root_length, own, length - root_length);
    for (unsigned smallest = NO_QUOTA;;) {
        const unsigned quota = quota_in(path, length, version);
        smallest = quota < smallest ? quota : smallest;
        if (length == root_length) {
            return smallest;
        }
        do { /* one level up */
            length--;
        } while (length > root_length && path[length] != '/');
    }
}

/* 1 if the comma-separated list, which a colon ends, contains "cpu". */
static int
lists_cpu(const char *list)
{
    for (size_t n; (n = strcspn(list, ",:")) != 3 || memcmp(list, "cpu", 3) != 0; list += n + 1) {
        if (list[n] == ':') {
            return 0;
        }
    }
    return 1;
}

/* The quota for one line of /proc/self/cgroup, "number:controllers:path"; version 2 has number 0 and no controllers. */
static unsigned
quota_of_line(const char *line)
{
    /* The usual mount points; a name that is a link to another costs one more look. */
    static const char *const mounts_v1[] = {MHA_CGROUP_ROOT "/cpu", MHA_CGROUP_ROOT "/cpu,cpuacct"};
    static const char *const mounts_v2[] = {MHA_CGROUP_ROOT, MHA_CGROUP_ROOT "/unified"};
    const char *controllers = strchr(line, ':');
    const char *own = controllers == NULL ? NULL : strchr(controllers + 1, ':');

    if (own == NULL) {
        return NO_QUOTA;
    }
    const int version = own == controllers + 1 ? 2 : 1;
    if (version == 1 && !lists_cpu(controllers + 1)) {
        return NO_QUOTA;
    }
    const char *const *mounts = version == 2 ? mounts_v2 : mounts_v1;
    const unsigned first = smallest_quota(mounts[0], own + 1, version);
    const unsigned second = smallest_quota(mounts[1], own + 1, version);
    return first < second ? first : second;
}

static unsigned
quota_of_process(void)
{
    char text[4096], *next;
    unsigned smallest = NO_QUOTA;

    mha_read_start(MHA_CGROUP_OF_SELF, text, sizeof text);
    for (char *line = text; line != NULL; line = next) {
        next = strchr(line, '\n');
        if (next != NULL) {
            *next++ = '\0';
        }
        const unsigned quota = quota_of_line(line);
        smallest = quota < smallest ? quota : smallest;
    }
    return smallest;
}

static unsigned
cpus_in_affinity_mask(void)
{
    cpu_set_t masks[8]; /* 8192 CPUs: the call fails if the kernel was built for more than it is offered */
    long n_cpus;

    if (sched_getaffinity(0, sizeof masks, masks) == 0) {
        n_cpus = CPU_COUNT_S(sizeof masks, masks);
    }
    else {
        n_cpus = sysconf(_SC_NPROCESSORS_ONLN);
    }
    return n_cpus < 1 ? 1 : (unsigned)n_cpus;
}

unsigned
mha_threads_available(void)
{
    const int saved_errno = errno; /* files that are not there are no business of our caller's */
    const unsigned n_cpus = cpus_in_affinity_mask();
    const unsigned quota = quota_of_process();

    errno = saved_errno;
    return quota < n_cpus ? quota : n_cpus;
}

#elif defined(__unix__) || defined(__APPLE__)
#include <unistd.h>

unsigned
mha_threads_available(void)
{
    const long n_cpus = sysconf(_SC_NPROCESSORS_ONLN);

    return n_cpus < 1 ? 1 : (unsigned)n_cpus;
}

#elif defined(_WIN32)
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

#else

/* threads.c runs everything on the calling thread here, so one CPU is what we can use. */
unsigned
mha_threads_available(void)
{
    return 1;
}
#endif
