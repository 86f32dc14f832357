/*
 * test_threads.c: what the pool does with a POSIX system: threads, signals, forks.  Prints a line per check; exit
 * status 1 if one fails.
 *
 * build: -Wl,--wrap=pthread_create,--wrap=pthread_atfork,--wrap=pthread_attr_init
 * POSIX only: signals, forks, what a process is there
 * not emulated: in qemu's user mode thread creation takes other ways than the wrapped function
 *
 * The linker's --wrap lets the checks make these functions fail without a hook in the pool.  Worth running with
 * -fsanitize=thread, -fsanitize=address,undefined, and with -DMHA_PARK_ON_CONDITION (what macOS uses) as well.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "mha.h"
#include "threads_watch.h"

/* --- pthread_create that fails on demand ------------------------------------------------ */

static atomic_int creations_left = -1; /* this many succeed, then all fail; -1: no limit */

int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int
__wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument)
{
    if (atomic_load(&creations_left) == 0) {
        errno = EAGAIN; /* the C library's own attempts may leave something there */
        return EAGAIN;
    }
    if (atomic_load(&creations_left) > 0) {
        atomic_fetch_sub(&creations_left, 1);
    }
    return __real_pthread_create(thread, attributes, start, argument);
}

/* --- The same for what comes before it ---------------------------------------------------- */

static atomic_int atfork_fails, attributes_fail;

int __real_pthread_atfork(void (*)(void), void (*)(void), void (*)(void));
int __wrap_pthread_atfork(void (*)(void), void (*)(void), void (*)(void));
int
__wrap_pthread_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void))
{
    if (atomic_load(&atfork_fails)) {
        errno = ENOMEM;
        return ENOMEM;
    }
    return __real_pthread_atfork(prepare, parent, child);
}

int __real_pthread_attr_init(pthread_attr_t *);
int __wrap_pthread_attr_init(pthread_attr_t *);
int
__wrap_pthread_attr_init(pthread_attr_t *attributes)
{
    if (atomic_load(&attributes_fail)) {
        errno = ENOMEM;
        return ENOMEM;
    }
    return __real_pthread_attr_init(attributes);
}

/* --- Checks ---------------------------------------------------------------------------- */

static void
check_lazy_start(watch *w)
{
    const int before = n_threads_of_process();

    mha_threads_set(4);
    runs_right(w, 100, 1, 0);
    runs_right(w, 1, 4, 0);
    runs_right(w, 0, 4, 0);
    check(n_threads_of_process() == before, "no thread before the first call that can use one");
    runs_right(w, 100, 3, 0);
    check(n_threads_of_process() == before + 2, "three workers: two threads beside the caller");
    runs_right(w, 100, 2, 0);
    check(n_threads_of_process() == before + 2, "fewer workers: no thread more or less");
}

static void
check_creation_failure(watch *w)
{
    const int before = n_threads_of_process();
    sigset_t mask;
    int ok;

    atomic_store(&atfork_fails, 1);
    errno = 77;
    ok = runs_right(w, 1000, 8, 0) && n_threads_of_process() == before && errno == 77;
    check(ok && atomic_load(&w->workers_seen) == 1, "forks cannot be watched: no threads, errno untouched");
    atomic_store(&atfork_fails, 0);
    atomic_store(&attributes_fail, 1);
    ok = runs_right(w, 1000, 8, 0) && n_threads_of_process() == before && errno == 77;
    check(ok && atomic_load(&w->workers_seen) == 1, "no memory for a thread's attributes: inline, errno untouched");
    atomic_store(&attributes_fail, 0);
    atomic_store(&creations_left, 0);
    errno = 77;
    ok = runs_right(w, 1000, 8, 0) && n_threads_of_process() == before && errno == 77;
    check(ok && atomic_load(&w->workers_seen) == 1, "no thread can be started: inline, errno untouched");
    atomic_store(&creations_left, 2);
    ok = runs_right(w, 1000, 8, 100) && n_threads_of_process() == before + 2;
    check(ok, "two of seven threads can be started: they are used");
    ok = 1;
    for (int i = 0; i < 100; i++) {
        ok &= runs_right(w, 100, 8, 100);
        ok &= (atomic_load(&w->workers_seen) & ~7u) == 0;
    }
    check(ok && n_threads_of_process() == before + 2, "and go on being used while the rest still fails");
    atomic_store(&creations_left, -1);
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    check(!sigismember(&mask, SIGINT) && !sigismember(&mask, SIGTERM), "the caller's signal mask is as before");
    check(runs_right(w, 1000, 4, 0) && n_threads_of_process() == before + 3, "later calls start what was missing");
}

typedef struct {
    pthread_t caller;
    atomic_int n_wrong_mask, n_elsewhere;
} surroundings;

static void
look_around(void *context, size_t task, unsigned worker)
{
    surroundings *s = context;
    sigset_t mask;

    (void)task;
    (void)worker;
    if (!pthread_equal(pthread_self(), s->caller)) {
        atomic_fetch_add(&s->n_elsewhere, 1);
        pthread_sigmask(SIG_SETMASK, NULL, &mask);
        if (!sigismember(&mask, SIGINT) || !sigismember(&mask, SIGPROF) || sigismember(&mask, SIGSEGV)) {
            atomic_fetch_add(&s->n_wrong_mask, 1);
        }
    }
    for (volatile int i = 0; i < 2000; i++) {
    }
}

static void
check_signals(void)
{
    surroundings s = {.caller = pthread_self()};

    for (int i = 0; i < 200 || (i < 100000 && atomic_load(&s.n_elsewhere) == 0); i++) {
        mha_parallel_for(64, 4, look_around, &s);
    }
    check(atomic_load(&s.n_elsewhere) > 0 && atomic_load(&s.n_wrong_mask) == 0,
          "workers leave signals to the program, except their own faults");
}

static void
check_idle(watch *w)
{
    struct timespec before, after;

    runs_right(w, 1000, 4, 100);
    sleep_ms(20);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    sleep_ms(200);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    const double used = (double)(after.tv_sec - before.tv_sec) + (double)(after.tv_nsec - before.tv_nsec) * 1e-9;
    check(used < 0.01, "idle workers cost no CPU");
}

static void *
do_nothing(void *unused)
{
    return unused;
}

int
main(void)
{
    watch *w = malloc(sizeof *w);
    pthread_t first;

    /* A sanitizer starts a thread of its own beside a program's first: before we count. */
    pthread_create(&first, NULL, do_nothing, NULL);
    pthread_join(first, NULL);
    /* In a child, which leaves this process without threads.  Before there are any: one of them might hold a
     * sanitizer's lock at the fork, and the child would wait for it forever. */
    const pid_t pid = fork();
    if (pid == 0) {
        n_failed = 0;
        check_lazy_start(w);
        exit(n_failed);
    }
    int status;
    waitpid(pid, &status, 0);
    check(status == 0, "lazy start");
    check_creation_failure(w);
    check_signals();
    check_idle(w);
    free(w);
    return report();
}
