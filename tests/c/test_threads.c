/*
 * test_threads.c: the promises of threads.h.  Prints a line per check; exit status 1 if one fails.
 *
 * build: -Wl,--wrap=pthread_create,--wrap=pthread_atfork,--wrap=pthread_attr_init,--wrap=mha_threads_available
 * not emulated: in qemu's user mode thread creation takes other ways than the wrapped function
 *
 * The linker's --wrap lets the checks make these functions fail without a hook in the pool.  Worth running with
 * -fsanitize=thread, -fsanitize=address,undefined, and with -DMHA_PARK_ON_CONDITION (what macOS uses) as well.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fenv.h>
#include <math.h>
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

/* --- The same for what comes before it, and another number of CPUs ------------------------------- */

static atomic_int atfork_fails, attributes_fail, pretended_cpus, limit_set_meanwhile;

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

unsigned __real_mha_threads_available(void);
unsigned __wrap_mha_threads_available(void);
unsigned
__wrap_mha_threads_available(void)
{
    if (atomic_load(&limit_set_meanwhile) != 0) {
        mha_threads_set((unsigned)atomic_load(&limit_set_meanwhile)); /* as another thread might */
    }
    return atomic_load(&pretended_cpus) != 0 ? (unsigned)atomic_load(&pretended_cpus) : __real_mha_threads_available();
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

static void
check_every_task_once(watch *w)
{
    static const size_t n_tasks[] = {0, 1, 2, 3, 7, 8, 9, 64, 1000, MOST_TASKS};
    static const unsigned n_workers[] = {0, 1, 2, 3, 4, 7, 8, 16, 33, 64};
    unsigned seen = 0;
    int ok = 1;

    for (size_t i = 0; i < sizeof n_tasks / sizeof *n_tasks; i++) {
        for (size_t j = 0; j < sizeof n_workers / sizeof *n_workers; j++) {
            ok &= runs_right(w, n_tasks[i], n_workers[j], 50);
            seen |= atomic_load(&w->workers_seen);
        }
    }
    check(ok, "every task once, worker numbers in range and disjoint: 10 task counts x 10 worker counts");
    check((seen & ~1u) != 0, "workers do take part");
    for (int i = 0; i < (WITH_TSAN ? 500 : 5000); i++) {
        ok &= runs_right(w, (size_t)(i % 13), (unsigned)(i % 7), i % 50);
        if (i % 500 == 0) {
            sleep_ms(2); /* long enough for the workers to park */
        }
    }
    check(ok, "and through thousands of small calls, hot and after pauses");
}

typedef struct {
    pthread_t thread;
    atomic_uint inner_runs, errors;
} nesting;

static void
inner_task(void *context, size_t task, unsigned worker)
{
    nesting *n = context;

    (void)task;
    atomic_fetch_add(&n->inner_runs, 1);
    if (worker != 0 || !pthread_equal(pthread_self(), n->thread)) {
        atomic_fetch_add(&n->errors, 1);
    }
}

static void
outer_task(void *context, size_t task, unsigned worker)
{
    nesting *n = (nesting *)context + task;

    (void)worker;
    n->thread = pthread_self();
    mha_parallel_for(10, 4, inner_task, n);
    mha_parallel_for(10, 4, inner_task, n);
}

static void
check_nested(void)
{
    nesting *n = calloc(64, sizeof *n);
    int ok = 1;

    mha_parallel_for(64, 4, outer_task, n);
    for (size_t i = 0; i < 64; i++) {
        ok &= atomic_load(&n[i].inner_runs) == 20 && atomic_load(&n[i].errors) == 0;
    }
    check(ok, "a call from inside a task runs on that thread, as worker 0");
    free(n);
}

static void *
call_often(void *unused)
{
    watch *w = malloc(sizeof *w);
    intptr_t n_wrong = 0;

    (void)unused;
    for (int i = 0; i < (WITH_TSAN ? 60 : 300); i++) {
        n_wrong += !runs_right(w, 200, 4, 20);
        mha_threads_set((unsigned)(1 + i % 5));
        n_wrong += mha_threads_get() < 1 || mha_threads_get() > 5;
    }
    free(w);
    return (void *)n_wrong;
}

static void
check_concurrent_callers(void)
{
    pthread_t callers[4];
    void *n_wrong;
    int ok = 1;

    mha_threads_set(4);
    for (int i = 0; i < 4; i++) {
        pthread_create(&callers[i], NULL, call_often, NULL);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(callers[i], &n_wrong);
        ok &= n_wrong == NULL;
    }
    check(ok, "four callers at once, each changing the limit");
}

typedef struct {
    pthread_t caller;
    double value;
    atomic_int n_wrong_mask, n_wrong_mode, n_elsewhere;
    int mode;
} surroundings;

static void
look_around(void *context, size_t task, unsigned worker)
{
    surroundings *s = context;
    sigset_t mask;

    (void)task;
    (void)worker;
    if (fegetround() != s->mode) {
        atomic_fetch_add(&s->n_wrong_mode, 1);
    }
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
check_surroundings(void)
{
    static const int modes[] = {FE_UPWARD, FE_TONEAREST, FE_TOWARDZERO, FE_TONEAREST};
    surroundings s = {.caller = pthread_self()};
    int ok = 1;

    for (int i = 0; i < 200; i++) {
        s.mode = modes[i % 4];
        fesetround(s.mode);
        mha_parallel_for(64, 4, look_around, &s);
        ok &= fegetround() == s.mode;
    }
    check(atomic_load(&s.n_elsewhere) > 0 && atomic_load(&s.n_wrong_mask) == 0,
          "workers leave signals to the program, except their own faults");
    check(ok, "the caller's rounding mode is untouched");
    check(atomic_load(&s.n_wrong_mode) == 0, "workers round as their caller does");
}

static void
check_how_many(void)
{
    mha_threads_set(0);
    check(mha_threads_get() == 1, "a limit of 0 counts as 1");
    mha_threads_set(100000000);
    check(mha_threads_get() >= 256, "an absurd limit is cut");
    mha_threads_set(8);
    check(mha_threads_for(100, 0) == 1 && mha_threads_for(100, -1) == 1 && mha_threads_for(100, NAN) == 1 &&
              mha_threads_for(100, 0.7e6) == 1,
          "little or no work: one thread");
    check(mha_threads_for(100, 0.8e6) == 2 && mha_threads_for(100, 1.6e6) == 4, "a thread per 15 us of work");
    check(mha_threads_for(100, 1e12) == 8 && mha_threads_for(100, INFINITY) == 8, "never more than the limit");
    check(mha_threads_for(3, 1e12) == 3 && mha_threads_for(1, 1e12) == 1 && mha_threads_for(0, 1e12) == 1 &&
              mha_threads_for(SIZE_MAX, 1e12) == 8,
          "never more than tasks");
    mha_threads_set(4);
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

/* The first question for the limit, in processes that have not asked yet. */
static void
check_first_limit(int cpus, int meanwhile, unsigned expected, const char *name)
{
    int status;

    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
        atomic_store(&pretended_cpus, cpus);
        atomic_store(&limit_set_meanwhile, meanwhile);
        exit(mha_threads_get() == expected && mha_threads_get() == expected ? 0 : 1);
    }
    waitpid(pid, &status, 0);
    check(status == 0, name);
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
    const unsigned available = mha_threads_available();

    check_first_limit(7, 0, 7, "a machine of 7 CPUs: 7 threads");
    check_first_limit(100000, 0, 1024, "a machine of 100000 CPUs: 1024 threads");
    check_first_limit(7, 3, 3, "a limit set while the first caller counts the CPUs holds");
    check(mha_threads_get() == available && available >= 1, "the default limit is what is available");
    errno = 77;
    check(mha_threads_available() == available && errno == 77, "asking again gives the same, errno untouched");
    /* A sanitizer starts a thread of its own beside a program's first: before we count. */
    pthread_create(&first, NULL, do_nothing, NULL);
    pthread_join(first, NULL);
    check_creation_failure(w);
    const pid_t pid = fork();
    if (pid == 0) { /* a process that has not started a thread */
        n_failed = 0;
        check_lazy_start(w);
        exit(n_failed);
    }
    int status;
    waitpid(pid, &status, 0);
    check(status == 0, "lazy start");
    check_every_task_once(w);
    check_nested();
    check_concurrent_callers();
    check_surroundings();
    check_how_many();
    check_idle(w);
    free(w);
    printf("%d failed\n", n_failed);
    return n_failed != 0;
}
