/*
 * threads_watch.h: a job that watches how the pool runs it, for test_pool.c, test_team.c, test_threads.c,
 * test_threads_process.c.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef THREADS_WATCH_H
#define THREADS_WATCH_H

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(_WIN32)
#include <windows.h>
#else
#include <dirent.h>
#include <time.h>
#endif

#include "check.h"
#include "runtime/threads.h"

#if defined(__SANITIZE_THREAD__)
#define WITH_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define WITH_TSAN 1
#endif
#endif
#if defined(WITH_TSAN)
/* Our children start threads, which is the point. */
const char *__tsan_default_options(void);
const char *
__tsan_default_options(void)
{
    return "die_after_fork=0";
}
#else
#define WITH_TSAN 0
#endif

static inline void
sleep_ms(long ms)
{
#if defined(_WIN32)
    Sleep((DWORD)ms);
#else
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
#endif
}

#define MOST_TASKS 10007
#define MOST_WORKERS 64

typedef struct {
    unsigned n_workers;
    int spin; /* of each task */
    atomic_uint runs[MOST_TASKS];
    atomic_uint in_use[MOST_WORKERS];
    atomic_uint errors;
    atomic_uint workers_seen; /* bit per worker number below 32 */
} watch;

static void
watched_task(void *context, size_t task, unsigned worker)
{
    watch *w = context;

    if (worker >= w->n_workers || atomic_fetch_add(&w->in_use[worker], 1) != 0) {
        atomic_fetch_add(&w->errors, 1);
        return;
    }
    atomic_fetch_add(&w->runs[task], 1);
    atomic_fetch_or(&w->workers_seen, 1u << (worker & 31));
    for (volatile int i = 0; i < w->spin; i++) {
    }
    atomic_fetch_sub(&w->in_use[worker], 1);
}

/* Runs n_tasks watched tasks; 1 if each ran once and no worker number was in use twice at a time or out of range. */
static int
runs_right(watch *w, size_t n_tasks, unsigned n_workers, int spin)
{
    int right = 1;

    memset(w, 0, sizeof *w);
    w->n_workers = n_workers < 1 ? 1 : n_workers;
    w->spin = spin;
    mha_parallel_for(n_tasks, n_workers, watched_task, w);
    for (size_t i = 0; i < MOST_TASKS; i++) {
        right &= atomic_load(&w->runs[i]) == (i < n_tasks ? 1u : 0u);
    }
    return right && atomic_load(&w->errors) == 0;
}

/* What a thread runs: calls, until `stop`, an atomic_int, is set.  How many went wrong, as a pointer. */
static inline void *
keep_calling(void *stop)
{
    watch *w = malloc(sizeof *w);
    intptr_t n_wrong = 0;

    while (!atomic_load((atomic_int *)stop)) {
        n_wrong += !runs_right(w, 300, 4, 100);
    }
    free(w);
    return (void *)n_wrong;
}

#if !defined(_WIN32)
static inline int
n_threads_of_process(void)
{
    DIR *tasks = opendir("/proc/self/task");
    int n = 0;

    while (tasks != NULL && readdir(tasks) != NULL) {
        n++;
    }
    if (tasks != NULL) {
        closedir(tasks);
    }
    return n - 2; /* "." and ".." */
}
#endif

#endif /* THREADS_WATCH_H */
