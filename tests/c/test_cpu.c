/*
 * test_cpu.c: CPU features, and the CPU count against made-up cgroup trees.  Prints a line per check; exit status 1 if
 * one fails.  Builds with a tree of its own, which it writes into a folder it makes and enters.
 *
 * POSIX only: files under /proc and /sys
 * not emulated: /proc/cpuinfo, which it compares with, is the host's
 * build: -Wl,--wrap=read,--wrap=sched_getaffinity,--wrap=sysconf runtime/threads_available.c '-DMHA_CGROUP_OF_SELF="self"' '-DMHA_CGROUP_ROOT="tree"'
 * SPDX-License-Identifier: BSD-3-Clause
 */
#define _GNU_SOURCE
#include <errno.h>
#include <ftw.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/cpu.h"
#include "mha.h"

static int n_failed;

static void
check(int ok, const char *name)
{
    printf("%s  %s\n", ok ? "ok  " : "FAIL", name);
    n_failed += !ok;
}

/* --- A system that answers otherwise ------------------------------------------------------------- */

static int interruptions, reads_fail, has_no_affinity; /* reads to interrupt; all fail; an old kernel */
static long processors;                                /* as sysconf counts them; 0: it is asked */

ssize_t __real_read(int, void *, size_t);
ssize_t __wrap_read(int, void *, size_t);
ssize_t
__wrap_read(int file, void *buffer, size_t n_bytes)
{
    if (reads_fail || interruptions > 0) {
        interruptions -= !reads_fail;
        errno = reads_fail ? EIO : EINTR;
        return -1;
    }
    return __real_read(file, buffer, n_bytes < 5 ? n_bytes : 5); /* in pieces, as it may */
}

int __real_sched_getaffinity(pid_t, size_t, cpu_set_t *);
int __wrap_sched_getaffinity(pid_t, size_t, cpu_set_t *);
int
__wrap_sched_getaffinity(pid_t process, size_t n_bytes, cpu_set_t *mask)
{
    if (has_no_affinity) {
        errno = ENOSYS;
        return -1;
    }
    return __real_sched_getaffinity(process, n_bytes, mask);
}

long __real_sysconf(int);
long __wrap_sysconf(int);
long
__wrap_sysconf(int name)
{
    return processors != 0 && name == _SC_NPROCESSORS_ONLN ? processors : __real_sysconf(name);
}

/* Writes a file and the folders above it; NULL removes it. */
static void
put(const char *path, const char *text)
{
    char folder[2048];

    if (text == NULL) {
        unlink(path);
        return;
    }
    for (const char *slash = strchr(path, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        memcpy(folder, path, (size_t)(slash - path));
        folder[slash - path] = '\0';
        mkdir(folder, 0700);
    }
    FILE *file = fopen(path, "w");
    if (file == NULL) {
        perror(path);
        exit(2);
    }
    fputs(text, file);
    fclose(file);
}

static unsigned n_cpus; /* what the affinity mask allows */

/* 1 if the count is `wanted`, or what the mask allows where that is less. */
static int
counts(unsigned wanted)
{
    return mha_threads_available() == (wanted < n_cpus ? wanted : n_cpus);
}

#define NO_LIMIT 0xFFFFFFFFu

static void
check_version_2(void)
{
    put("self", "0::/a/b\n");
    check(counts(NO_LIMIT), "no files: no quota");
    put("tree/a/b/cpu.max", "max 100000\n");
    check(counts(NO_LIMIT), "\"max\" is no quota");
    put("tree/a/b/cpu.max", "50000 100000\n");
    check(counts(1), "half a CPU counts as one");
    put("tree/a/b/cpu.max", "100001 100000\n");
    check(counts(2), "a little more than one counts as two");
    put("tree/a/b/cpu.max", "100000 100000\n");
    check(counts(1), "exactly one");
    put("tree/a/b/cpu.max", "9000000 100000\n");
    put("tree/a/cpu.max", "100000 100000\n");
    check(counts(1), "the level above holds if it is smaller");
    put("tree/a/cpu.max", NULL);
    put("tree/cpu.max", "100000 100000\n");
    check(counts(1), "and so does the root, with a level between that says nothing");
    put("tree/a/b/cpu.max", NULL);
    put("self", "0::/elsewhere/deep\n");
    check(counts(1), "a path that is not in the tree: its root is looked at");
    put("self", "0::/\n");
    check(counts(1), "a process in the root");
    put("tree/cpu.max", NULL);
    put("tree/unified/c/cpu.max", "100000 100000\n");
    put("self", "4:memory:/x\n1:name=systemd:/c\n0::/c");
    check(counts(1), "both versions mounted, no line end");
    put("tree/unified/c/cpu.max", NULL);
}

static void
check_version_1(void)
{
    put("self", "9:name=systemd:/d\n5:cpuset:/d\n3:cpu,cpuacct:/d/e\n");
    put("tree/cpu/d/e/cpu.cfs_quota_us", "-1\n");
    put("tree/cpu/d/e/cpu.cfs_period_us", "100000\n");
    check(counts(NO_LIMIT), "version 1: -1 is no quota");
    put("tree/cpu/d/e/cpu.cfs_quota_us", "100000\n");
    check(counts(1), "version 1: one CPU");
    put("self", "3:cpuacct,cpu:/d/e\n");
    check(counts(1), "version 1: controllers in the other order");
    put("self", "3:cpuset:/d/e\n2:cpuacct:/d/e\n");
    check(counts(NO_LIMIT), "version 1: only the cpu controller counts");
    put("self", "3:cpu:/d/e\n");
    put("tree/cpu/d/e/cpu.cfs_period_us", "0\n");
    check(counts(NO_LIMIT), "version 1: a period of 0 is no quota");
    put("tree/cpu/d/e/cpu.cfs_period_us", NULL);
    check(counts(NO_LIMIT), "version 1: a quota without its period is none");
    put("tree/cpu/d/e/cpu.cfs_quota_us", NULL);
    put("tree/cpu,cpuacct/cpu.cfs_quota_us", "100000\n");
    put("tree/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
    check(counts(1), "version 1: the container's own root, by its other name");
    put("tree/cpu,cpuacct/cpu.cfs_quota_us", NULL);
}

static void
check_odd_files(void)
{
    static const char *const odd[] = {"",           "\n",         "garbage",     "0",          "0:",
                                      "0::",        ":::::",      "0::a/b",      "0::/../..",  "3:cpu",
                                      "3:,,cpu,:/", "0:::/a:b\n", "0::/a//b//\n", "\n\n0::/q\n"};
    static const char *const quotas[] = {"",  " ", "max", "1", "100000", "99999999999999999999999 100000", "100000 0",
                                         "x", "100000 99999999999999999999999"};
    char longest[6000];
    int ok = 1;

    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        put("self", odd[i]);
        ok &= counts(NO_LIMIT);
    }
    memset(longest, 'a', sizeof longest);
    memcpy(longest, "0::/", 4);
    for (size_t length = 900; length < sizeof longest; length += 7) { /* past every buffer's end */
        const char kept = longest[length];
        longest[length] = '\0';
        put("self", longest);
        ok &= counts(NO_LIMIT);
        longest[length] = kept;
    }
    put("self", "0::/r\n");
    for (size_t i = 0; i < sizeof quotas / sizeof *quotas; i++) {
        put("tree/r/cpu.max", quotas[i]);
        ok &= counts(NO_LIMIT);
    }
    put("tree/r/cpu.max", NULL);
    put("self", NULL);
    errno = 77;
    ok &= counts(NO_LIMIT) && errno == 77;
    check(ok, "odd, long and missing files are no quota; errno untouched");
}

static void
check_odd_systems(void)
{
    put("self", "0::/s\n");
    put("tree/s/cpu.max", "100000 100000\n");
    interruptions = 3;
    check(counts(1) && interruptions == 0, "interrupted reads are repeated");
    reads_fail = 1;
    check(counts(NO_LIMIT), "files that cannot be read are no quota");
    reads_fail = 0;
    put("tree/s/cpu.max", "9223372036854 1\n");
    check(counts(NO_LIMIT), "a quota beyond 32 bits of CPUs");
    put("tree/s/cpu.max", "0 100000\n");
    check(counts(1), "a quota of nothing counts as one");
    put("self", "3:cpu,cpuacct:/s\n2:cpu_:/s\n1:xcpu:/s\n0:abc:/s\n");
    check(counts(NO_LIMIT), "controllers with other names");
    put("self", NULL);
    put("tree/s/cpu.max", NULL);
    has_no_affinity = 1;
    processors = 3;
    errno = 77;
    check(mha_threads_available() == 3 && errno == 77, "no affinity masks: all processors");
    processors = -1;
    check(mha_threads_available() == 1, "and if nobody can count them: one");
    has_no_affinity = 0;
    processors = 0;
}

/* The names of /proc/cpuinfo are the kernel's reading of the same bits. */
static int
cpuinfo_has(const char *flag)
{
    static char line[1 << 16];
    char spaced[32];
    FILE *file = fopen("/proc/cpuinfo", "r");
    int found = 0;

    snprintf(spaced, sizeof spaced, " %s", flag);
    while (file != NULL && !found && fgets(line, sizeof line, file) != NULL) {
        const char *at = strncmp(line, "flags", 5) == 0 ? line : NULL;
        while (!found && at != NULL && (at = strstr(at, spaced)) != NULL) {
            at += strlen(spaced);
            found = *at == ' ' || *at == '\n';
        }
    }
    if (file != NULL) {
        fclose(file);
    }
    return found;
}

static void
check_features(void)
{
    const int avx2 = cpuinfo_has("avx2") && cpuinfo_has("fma");
    const int avx512 =
        avx2 && cpuinfo_has("avx512f") && cpuinfo_has("avx512dq") && cpuinfo_has("avx512bw") && cpuinfo_has("avx512vl");

    check(mha_cpu_offers(MHA_ISA_SCALAR) == 1, "every CPU offers scalar");
    check(mha_cpu_offers(MHA_ISA_AVX2) == avx2, "AVX2 as the kernel says");
    check(mha_cpu_offers(MHA_ISA_AVX512) == avx512, "AVX-512 as the kernel says");
#if defined(__aarch64__)
    check(mha_cpu_offers(MHA_ISA_NEON) == 1, "NEON on 64-bit Arm");
#else
    check(mha_cpu_offers(MHA_ISA_NEON) == 0, "no NEON elsewhere");
#endif
    check(mha_cpu_offers(MHA_ISA_WASM) == 0, "no WebAssembly here");
    check(mha_cpu_offers(MHA_N_ISAS) == 0 && mha_cpu_offers((mha_isa)1000) == 0, "numbers that are no ISA");
}

static int
remove_entry(const char *path, const struct stat *status, int type, struct FTW *where)
{
    (void)status;
    (void)type;
    (void)where;
    return remove(path);
}

int
main(void)
{
    char folder[] = "test_cpu_XXXXXX";
    cpu_set_t mask;

    if (mkdtemp(folder) == NULL || chdir(folder) != 0 || sched_getaffinity(0, sizeof mask, &mask) != 0) {
        perror(folder);
        return 2;
    }
    n_cpus = (unsigned)CPU_COUNT(&mask);
    check_features();
    check_version_2();
    check_version_1();
    check_odd_files();
    check_odd_systems();
    for (int i = 0; n_cpus > 1 && i < CPU_SETSIZE; i++) {
        if (CPU_ISSET(i, &mask) && CPU_COUNT(&mask) > 1) {
            CPU_CLR(i, &mask);
        }
    }
    sched_setaffinity(0, sizeof mask, &mask);
    check(mha_threads_available() == 1, "one CPU in the mask: one");
    if (chdir("..") == 0) {
        nftw(folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
    }
    printf("%d failed\n", n_failed);
    return n_failed != 0;
}
