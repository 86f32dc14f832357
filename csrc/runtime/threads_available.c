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
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

/* Where the kernel tells.  Tests build with a tree of their own. */
#ifndef MHA_CGROUP_OF_SELF
#define MHA_CGROUP_OF_SELF "/proc/self/cgroup"
#endif
#ifndef MHA_CGROUP_ROOT
#define MHA_CGROUP_ROOT "/sys/fs/cgroup"
#endif

#define NO_QUOTA UINT_MAX

/* A path under the cgroup tree; longer ones are not looked at. */
typedef struct {
    char text[1024];
    size_t length;
} path_buffer;

/* Reads the start of a file, NUL-terminated; returns its length, 0 if it cannot be read. */
static size_t
read_start(const char *path, char *text, size_t capacity)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t length = 0;

    if (fd >= 0) {
        while (length < capacity - 1) {
            const ssize_t n = read(fd, text + length, capacity - 1 - length);
            if (n > 0) {
                length += (size_t)n;
            }
            else if (n == 0 || errno != EINTR) {
                break;
            }
        }
        close(fd);
    }
    text[length] = '\0';
    return length;
}

/* Reads a decimal number after blanks, moving *text on; -1 if there is none ("max", "-1") or it is absurd. */
static int64_t
parse_number(const char **text)
{
    int64_t value = -1;

    while (**text == ' ') {
        (*text)++;
    }
    for (; **text >= '0' && **text <= '9'; (*text)++) {
        value = (value < 0 ? 0 : value) * 10 + (**text - '0');
        if (value > INT64_MAX / 100) {
            return -1;
        }
    }
    return value;
}

/* Returns 0, or -1 and an unchanged path if the result would be too long. */
static int
path_append(path_buffer *path, const char *text, size_t length)
{
    if (length >= sizeof path->text - path->length) {
        return -1;
    }
    memcpy(path->text + path->length, text, length);
    path->length += length;
    path->text[path->length] = '\0';
    return 0;
}

/* Reads `file` in the directory `path` and leaves `path` as it was; *text is "" if there is no such file. */
static void
read_in(path_buffer *path, const char *file, char *text, size_t capacity)
{
    const size_t length = path->length;

    text[0] = '\0';
    if (path_append(path, file, strlen(file)) == 0) {
        read_start(path->text, text, capacity);
    }
    path->length = length;
    path->text[length] = '\0';
}

/* The quota that one cgroup directory sets, in CPUs rounded up. */
static unsigned
quota_in(path_buffer *path, int version)
{
    char text[64];
    int64_t quota, period;
    const char *at = text;

    if (version == 2) { /* one file: "max 100000" or "150000 100000" */
        read_in(path, "/cpu.max", text, sizeof text);
        quota = parse_number(&at);
        period = parse_number(&at);
    }
    else { /* two files, a quota of -1 for none */
        read_in(path, "/cpu.cfs_quota_us", text, sizeof text);
        quota = parse_number(&at);
        read_in(path, "/cpu.cfs_period_us", text, sizeof text);
        at = text;
        period = parse_number(&at);
    }
    if (quota < 0 || period <= 0) {
        return NO_QUOTA;
    }
    const int64_t n_cpus = quota / period + (quota % period != 0);
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
smallest_quota(const char *mount, const char *own, size_t own_length, int version)
{
    path_buffer path = {"", 0};
    unsigned smallest = NO_QUOTA;
    const int fits = path_append(&path, mount, strlen(mount));

    MHA_ASSERT(fits == 0); /* the mounts are literals */
    (void)fits;
    const size_t root_length = path.length;
    if (path_append(&path, own, own_length) < 0) {
        path.length = root_length; /* look at the root alone */
    }
    for (;;) {
        const unsigned quota = quota_in(&path, version);
        smallest = quota < smallest ? quota : smallest;
        if (path.length == root_length) {
            return smallest;
        }
        do { /* one level up */
            path.length--;
        } while (path.length > root_length && path.text[path.length] != '/');
        path.text[path.length] = '\0';
    }
}

/* 1 if the comma-separated list of `length` characters contains "cpu". */
static int
lists_cpu(const char *list, size_t length)
{
    for (size_t start = 0; start < length; start++) {
        const char *comma = memchr(list + start, ',', length - start);
        const size_t end = comma == NULL ? length : (size_t)(comma - list);
        if (end - start == 3 && memcmp(list + start, "cpu", 3) == 0) {
            return 1;
        }
        start = end;
    }
    return 0;
}

/* The quota for one line of /proc/self/cgroup, "number:controllers:path"; version 2 has number 0 and no controllers. */
static unsigned
quota_of_line(const char *line, size_t length)
{
    /* The usual mount points; a name that is a link to another costs one more look. */
    static const char *const mounts_v1[] = {MHA_CGROUP_ROOT "/cpu", MHA_CGROUP_ROOT "/cpu,cpuacct"};
    static const char *const mounts_v2[] = {MHA_CGROUP_ROOT, MHA_CGROUP_ROOT "/unified"};
    unsigned smallest = NO_QUOTA;

    const char *controllers = memchr(line, ':', length);
    if (controllers == NULL) {
        return NO_QUOTA;
    }
    controllers++;
    const char *own = memchr(controllers, ':', length - (size_t)(controllers - line));
    if (own == NULL) {
        return NO_QUOTA;
    }
    const size_t controllers_length = (size_t)(own - controllers);
    own++;
    const int version = controllers_length == 0 ? 2 : 1;
    if (version == 1 && !lists_cpu(controllers, controllers_length)) {
        return NO_QUOTA;
    }
    for (size_t i = 0; i < 2; i++) {
        const char *mount = version == 2 ? mounts_v2[i] : mounts_v1[i];
        const unsigned quota = smallest_quota(mount, own, length - (size_t)(own - line), version);
        smallest = quota < smallest ? quota : smallest;
    }
    return smallest;
}

static unsigned
quota_of_process(void)
{
    char text[4096];
    unsigned smallest = NO_QUOTA;
    const char *line = text;

    read_start(MHA_CGROUP_OF_SELF, text, sizeof text);
    while (*line != '\0') {
        const size_t length = strcspn(line, "\n");
        const unsigned quota = quota_of_line(line, length);
        smallest = quota < smallest ? quota : smallest;
        line += length + (line[length] == '\n');
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
