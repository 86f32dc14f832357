/*
 * test_pool.c: the promises of threads.h that hold on every system, with and without threads.  Prints a line per check;
 * exit status 1 if one fails.  test_threads.c and test_threads_process.c have those about POSIX.
 *
 * Worth running with -fsanitize=thread and with -DMHA_PARK_ON_CONDITION (what macOS uses) as well.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#define _GNU_SOURCE
#include <fenv.h>
#include <math.h>
#include <stdlib.h>

#include "callers.h"
#include "mha.h"
#include "threads_watch.h"

/* --- Checks ---------------------------------------------------------------------------------- */

static void
check_every_task_once(watch *w)
{
    static const size_t n_tasks[] = {0, 1, 2, 3, 7, 8, 9, 64, 1000, MOST_TASKS};
    static const unsigned n_workers[] = {0, 1, 2, 3, 4, 7, 8, 16, 33, 64};
    int ok = 1;

    for (size_t i = 0; i < sizeof n_tasks / sizeof *n_tasks; i++) {
        for (size_t j = 0; j < sizeof n_workers / sizeof *n_workers; j++) {
            ok &= runs_right(w, n_tasks[i], n_workers[j], 50);
        }
    }
    check(ok, "every task once, worker numbers in range and disjoint: 10 task counts x 10 worker counts");
    for (int i = 0; i < (WITH_TSAN ? 500 : 5000); i++) {
        ok &= runs_right(w, (size_t)(i % 13), (unsigned)(i % 7), i % 50);
        if (i % 500 == 0) {
            sleep_ms(2); /* long enough for the workers to park */
        }
    }
    check(ok, "and through thousands of small calls, hot and after pauses");
}

#if defined(MHA_NO_THREADS)
static void
check_workers_take_part(watch *w)
{
    check(runs_right(w, 64, 4, 0) && atomic_load(&w->workers_seen) == 1, "without threads the caller does everything");
}
#else
#define PATIENCE_MS 60000 /* of a caller whose worker does not come: where others keep all cores busy it comes late */

static void
wait_for_a_worker(void *came, size_t task, unsigned worker)
{
    (void)task;
    if (worker != 0) {
        atomic_store((atomic_int *)came, 1);
    }
    for (int ms = 0; ms < PATIENCE_MS && !atomic_load((atomic_int *)came); ms++) {
        sleep_ms(1);
    }
}

static void
check_workers_take_part(watch *w)
{
    atomic_int came = 0;

    (void)w;
    mha_parallel_for(2, 2, wait_for_a_worker, &came);
    check(atomic_load(&came), "workers do take part");
}
#endif

typedef struct {
    thread_id thread;
    atomic_uint inner_runs, errors;
} nesting;

static void
inner_task(void *context, size_t task, unsigned worker)
{
    nesting *n = context;

    (void)task;
    atomic_fetch_add(&n->inner_runs, 1);
    if (worker != 0 || !same_thread(this_thread(), n->thread)) {
        atomic_fetch_add(&n->errors, 1);
    }
}

static void
outer_task(void *context, size_t task, unsigned worker)
{
    nesting *n = (nesting *)context + task;

    (void)worker;
    n->thread = this_thread();
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

static THREAD_FUNCTION
call_often(void *n_wrong_ret)
{
    watch *w = malloc(sizeof *w);
    int n_wrong = 0;

    for (int i = 0; i < (WITH_TSAN ? 60 : 300); i++) {
        n_wrong += !runs_right(w, 200, 4, 20);
        mha_threads_set((unsigned)(1 + i % 5));
        n_wrong += mha_threads_get() < 1 || mha_threads_get() > 5;
    }
    free(w);
    *(int *)n_wrong_ret = n_wrong;
    return 0;
}

static void
check_concurrent_callers(void)
{
    thread_id callers[4];
    int n_wrong[4], ok = 1;

    mha_threads_set(4);
    for (int i = 0; i < 4; i++) {
        callers[i] = start(call_often, &n_wrong[i]);
    }
    for (int i = 0; i < 4; i++) {
        join(callers[i]);
        ok &= n_wrong[i] == 0;
    }
    check(ok, "four callers at once, each changing the limit");
}

typedef struct {
    atomic_int n_wrong;
    int mode;
} rounding;

static void
look_at_rounding(void *context, size_t task, unsigned worker)
{
    rounding *r = context;

    (void)task;
    (void)worker;
    if (fegetround() != r->mode) {
        atomic_fetch_add(&r->n_wrong, 1);
    }
    for (volatile int i = 0; i < 2000; i++) {
    }
}

static void
check_rounding(void)
{
#if defined(FE_UPWARD) && !defined(__wasm__) /* which rounds to nearest alone */
    static const int modes[] = {FE_UPWARD, FE_TONEAREST, FE_TOWARDZERO, FE_TONEAREST};
    rounding r = {.mode = FE_TONEAREST};
    int ok = 1;

    for (int i = 0; i < 200; i++) {
        r.mode = modes[i % 4];
        fesetround(r.mode);
        mha_parallel_for(64, 4, look_at_rounding, &r);
        ok &= fegetround() == r.mode;
    }
    check(ok, "the caller's rounding mode is untouched");
    check(atomic_load(&r.n_wrong) == 0, "workers round as their caller does");
#endif
}

static void
check_how_many(void)
{
#if defined(MHA_NO_THREADS)
    mha_threads_set(8);
    check(mha_threads_get() == 1 && mha_threads_for(100, 1e12) == 1, "without threads the limit is 1");
#else
    mha_threads_set(0);
    check(mha_threads_get() == 1, "a limit of 0 counts as 1");
    mha_threads_set(100000000);
    check(mha_threads_get() >= 256, "an absurd limit is cut");
    mha_threads_set(8);
    mha_threads_limit_own(9);
    check(mha_threads_get() == 8, "a thread's own limit allows no more than the common one");
    mha_threads_limit_own(2);
    check(mha_threads_get() == 2 && mha_threads_for(100, 1e12) == 2, "a thread's own limit holds for its calls");
    mha_threads_limit_own(0);
    check(mha_threads_get() == 8, "the common limit has stayed");
    check(mha_threads_for(100, 0) == 1 && mha_threads_for(100, -1) == 1 && mha_threads_for(100, NAN) == 1 &&
              mha_threads_for(100, 0.7e6) == 1,
          "little or no work: one thread");
    check(mha_threads_for(100, 0.8e6) == 2 && mha_threads_for(100, 1.6e6) == 4, "a thread per 15 us of work");
    check(mha_threads_for(100, 1e12) == 8 && mha_threads_for(100, INFINITY) == 8, "never more than the limit");
    check(mha_threads_for(3, 1e12) == 3 && mha_threads_for(1, 1e12) == 1 && mha_threads_for(0, 1e12) == 1 &&
              mha_threads_for(SIZE_MAX, 1e12) == 8,
          "never more than tasks");
#endif
}

int
main(void)
{
    watch *w = malloc(sizeof *w);

    check(mha_threads_get() == 1, "one thread, until somebody sets more");
    mha_threads_set(4);
    check_every_task_once(w);
    check_workers_take_part(w);
    check_nested();
    check_concurrent_callers();
    check_rounding();
    check_how_many();
    free(w);
    return report();
}
