/*
 * test_threads_process.c: the pool through fork, exit and a machine with too few CPUs.  Prints a line per check;
 * exit status 1 if one fails.  A child that hangs is ended (alarm).
 *
 * leaks not counted: the search in a child that was forked beside threads waits for threads that it does not have
 * POSIX only: signals, forks, what a process is there
 * not emulated: qemu's user mode asserts when a process with threads forks or exits
 * SPDX-License-Identifier: BSD-3-Clause
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/threads_interrupt.h"
#include "threads_watch.h"

#define REPETITIONS (WITH_TSAN ? 20 : 200)
#define HANGS 300 /* s, after which what hangs is ended, on a machine that computes other things too */

/* CPU time of all threads: those that spin for each other count, other programs do not. */
static double
now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double
median_time(watch *w, unsigned n_workers)
{
    double times[101];

    memset(w, 0, sizeof *w);
    w->n_workers = n_workers;
    w->spin = 1000;
    for (int i = 0; i < 101; i++) {
        const double start = now_s();
        mha_parallel_for(64, n_workers, watched_task, w);
        const double time = now_s() - start;
        int at = i;
        for (; at > 0 && times[at - 1] > time; at--) {
            times[at] = times[at - 1];
        }
        times[at] = time;
    }
    return times[50];
}

static void
check_oversubscribed(watch *w)
{
    cpu_set_t before, one;
    const double alone = median_time(w, 1);
    const double many = median_time(w, 32);

    check(many < 10 * alone, "32 threads: no 10 times the work of one");
    /* All on one CPU.  The mask of a thread is inherited, so this needs new workers: a child. */
    sched_getaffinity(0, sizeof before, &before);
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++) {
        if (CPU_ISSET(i, &before)) {
            CPU_SET(i, &one);
        }
    }
    sched_setaffinity(0, sizeof one, &one);
    const pid_t pid = fork();
    if (pid == 0) {
        alarm(HANGS);
        const double inline_time = median_time(w, 1);
        _exit(median_time(w, 8) < 10 * inline_time ? 0 : 1);
    }
    int status;
    waitpid(pid, &status, 0);
    sched_setaffinity(0, sizeof before, &before);
    check(status == 0, "8 threads on one CPU: no 10 times the work of one");
}

/* --- Fork and exit --------------------------------------------------------------------- */

static int
child_is_fine(watch *w, int depth)
{
    int ok = runs_right(w, 500, 4, 20) && runs_right(w, 500, 4, 20);

    ok &= n_threads_of_process() >= 2 || WITH_TSAN;
    if (depth > 0) {
        const pid_t pid = fork();
        if (pid == 0) {
            alarm(HANGS);
            _exit(child_is_fine(w, depth - 1) ? 0 : 1);
        }
        int status;
        ok &= waitpid(pid, &status, 0) == pid && status == 0;
    }
    return ok && runs_right(w, 100, 4, 20);
}

static int
forks_well(watch *w, int repetitions)
{
    int n_good = 0;

    for (int i = 0; i < repetitions; i++) {
        const pid_t pid = fork();
        if (pid == 0) {
            alarm(HANGS);
            _exit(child_is_fine(w, i % 4 == 0) ? 0 : 1);
        }
        int status;
        n_good += waitpid(pid, &status, 0) == pid && status == 0;
        if (!runs_right(w, 100, 4, 20)) {
            return 0;
        }
    }
    return n_good == repetitions;
}

static atomic_int stop;

static void
check_fork(watch *w)
{
    pthread_t callers[2];
    void *n_wrong;
    int ok;

    check(forks_well(w, REPETITIONS), "fork after use: the child has a pool of its own, and so has its child");
    atomic_store(&stop, 0);
    for (int i = 0; i < 2; i++) {
        pthread_create(&callers[i], NULL, keep_calling, &stop);
    }
    ok = forks_well(w, REPETITIONS);
    atomic_store(&stop, 1);
    for (int i = 0; i < 2; i++) {
        pthread_join(callers[i], &n_wrong);
        ok &= n_wrong == NULL;
    }
    check(ok, "fork while other threads are inside calls");
}

/* --- A fork by whoever watches a call ---------------------------------------------------- */

/* One task for the caller, which waits for a helper to come, and one for the helper, which waits for the watcher. */
static struct {
    atomic_int helper_came, may_end;
    pid_t child;
    int child_status;
} watched;

static void
meet(void *unused, size_t task, unsigned worker)
{
    (void)unused;
    (void)task;
    if (worker != 0) {
        atomic_store(&watched.helper_came, 1);
    }
    while (!atomic_load(worker == 0 ? &watched.helper_came : &watched.may_end)) {
        sleep_ms(1);
    }
}

/* Asked while the caller waits for its helper, which the child does not have. */
static int
fork_once(void *unused)
{
    (void)unused;
    if (!atomic_load(&watched.may_end)) {
        watched.child = fork();
        if (watched.child == 0) {
            alarm(HANGS);
            return 0;
        }
        waitpid(watched.child, &watched.child_status, 0);
        atomic_store(&watched.may_end, 1);
    }
    return 0;
}

static void
check_watcher_forks(watch *w)
{
    watched.child_status = -1;
    mha_interrupt_watch(fork_once, NULL);
    mha_parallel_for(2, 2, meet, NULL);
    const mha_status status = mha_interrupt_status();
    mha_interrupt_watch(NULL, NULL);
    if (watched.child == 0) {
        _exit(status == MHA_ERR_FORKED && runs_right(w, 500, 4, 20) ? 0 : 1);
    }
    check(status == MHA_OK && watched.child_status == 0, "a watcher forks: the child's call ends and says so");
}

static void
check_exit(void)
{
    int ok = 1;

    fflush(stdout);
    for (int i = 0; i < REPETITIONS / 4; i++) {
        const pid_t pid = fork();
        if (pid == 0) {
            pthread_t caller;
            alarm(HANGS);
            atomic_store(&stop, 0);
            pthread_create(&caller, NULL, keep_calling, &stop);
            sleep_ms(2);
            exit(0);
        }
        int status;
        ok &= waitpid(pid, &status, 0) == pid && status == 0;
    }
    check(ok, "exit while another thread is inside a call");
}

int
main(void)
{
    watch *w = malloc(sizeof *w);

    check_fork(w);
    check_watcher_forks(w);
    check_oversubscribed(w);
    check_exit();
    free(w);
    return report();
}
