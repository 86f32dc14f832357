/*
 * test_team.c: jobs on a team of threads that the process has already (mha_team).  Prints a line per check; exit status
 * 1 if one fails.  The team here is made of threads of this program, so that the thread sanitizer sees all of it;
 * test_openmp.c has a real one.
 *
 * leaks not counted: the search in a child that was forked beside threads waits for threads that it does not have
 * POSIX only: threads and forks
 * not emulated: qemu's user mode asserts when a process with threads forks
 * SPDX-License-Identifier: BSD-3-Clause
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/threads_interrupt.h"
#include "threads_watch.h"

#define TEAM 4
#define ROUNDS (WITH_TSAN ? 100 : 1000)
#define HANGS 300 /* s, after which what hangs is ended, on a machine that computes other things too */

/* --- A team ------------------------------------------------------------------------------------ */

/* A region: its threads begin at the first barrier and end at the second, as those of OpenMP do. */
static struct {
    pthread_barrier_t begin, end;
    int (*body)(void *data);
    void *data;
    unsigned says;                     /* how many threads it is said to have */
    atomic_uint regions, asked, wrong; /* wrong: threads that came out changed */
} team;
static _Thread_local int in_region;

static unsigned
team_size(void)
{
    atomic_fetch_add(&team.asked, 1);
    return in_region ? 1 : team.says;
}

static void *
be_of_the_team(void *unused)
{
    static const int modes[] = {FE_DOWNWARD, FE_TONEAREST};
    int round = 0;

    for (;;) {
        pthread_barrier_wait(&team.begin);
        const int mode = modes[round++ % 2];
        fesetround(mode);
        in_region = 1;
        const int lost = team.body(team.data);
        in_region = 0;
        if (lost || fegetround() != mode || mha_interrupt_flag() != NULL) {
            atomic_fetch_add(&team.wrong, 1);
        }
        pthread_barrier_wait(&team.end);
    }
    return unused;
}

static void
run_region(int (*body)(void *data), void *data)
{
    atomic_fetch_add(&team.regions, 1);
    team.body = body;
    team.data = data;
    pthread_barrier_wait(&team.begin);
    in_region = 1;
    const int lost = body(data);
    in_region = 0;
    errno = 99;
    if (!lost) { /* else the others do not come */
        pthread_barrier_wait(&team.end);
    }
}

static const mha_team the_team = {team_size, run_region};

static void
make_team(void)
{
    pthread_barrier_init(&team.begin, NULL, TEAM);
    pthread_barrier_init(&team.end, NULL, TEAM);
    for (int i = 1; i < TEAM; i++) {
        pthread_t thread;
        pthread_create(&thread, NULL, be_of_the_team, NULL);
        pthread_detach(thread);
    }
    team.says = TEAM;
}

/* --- Checks -------------------------------------------------------------------------------------- */

static void
check_on_the_team(watch *w)
{
    const int before = n_threads_of_process();
    unsigned workers = 0;
    int ok = 1;

    atomic_store(&team.regions, 0);
    errno = 77;
    for (int i = 0; i < ROUNDS; i++) {
        ok &= runs_right(w, (size_t)(2 + i % 70), (unsigned)(2 + i % 3), i % 50);
        workers |= atomic_load(&w->workers_seen);
    }
    check(ok && errno == 77, "every task once, on two to four threads of the team, errno untouched");
    check(atomic_load(&team.regions) == ROUNDS, "each job is one region");
    check(workers > 1 && (workers & ~15u) == 0, "the team's threads take part, under the numbers that were asked for");
    check(n_threads_of_process() == before, "no thread of our own is started beside the team");
    check(runs_right(w, 1, 4, 0) && runs_right(w, 100, 1, 0) && atomic_load(&team.regions) == ROUNDS,
          "what one thread does begins no region");
    check(atomic_load(&team.wrong) == 0, "its threads round as before, and follow no call, when they leave");
}

static void
look_at_rounding(void *n_wrong, size_t task, unsigned worker)
{
    (void)task;
    (void)worker;
    if (fegetround() != FE_UPWARD) {
        atomic_fetch_add((atomic_int *)n_wrong, 1);
    }
    for (volatile int i = 0; i < 2000; i++) {
    }
}

static void
check_rounding(void)
{
    atomic_int n_wrong = 0;

    fesetround(FE_UPWARD);
    for (int i = 0; i < 100; i++) {
        mha_parallel_for(64, 4, look_at_rounding, &n_wrong);
    }
    fesetround(FE_TONEAREST);
    check(atomic_load(&n_wrong) == 0, "the team rounds as the caller does");
}

static void
call_again(void *w, size_t task, unsigned worker)
{
    if (task == 0) { /* one at a time: it watches */
        check(worker < 4 && runs_right(w, 50, 4, 0) && atomic_load(&((watch *)w)->workers_seen) == 1,
              "a call from inside a task runs on that thread");
    }
}

static void
check_what_it_is_not_for(watch *w)
{
    const unsigned before = atomic_load(&team.regions);

    team.says = 3;
    check(runs_right(w, 100, 4, 0) && atomic_load(&team.regions) == before, "a team that is too small is left alone");
    team.says = 0;
    check(runs_right(w, 100, 4, 0) && atomic_load(&team.regions) == before, "so is one that must not be begun");
    team.says = 1;
    check(runs_right(w, 100, 4, 0) && atomic_load(&w->workers_seen) == 1 && atomic_load(&team.regions) == before,
          "inside a region of the team, the caller does all");
    team.says = TEAM;
    mha_parallel_for(2, 2, call_again, w);
    check(mha_threads_use_team(NULL) && !mha_threads_has_team(), "the core's own threads again");
    atomic_store(&team.regions, 0);
    check(runs_right(w, 100, 4, 0) && atomic_load(&team.regions) == 0, "which then do the work");
    mha_threads_use_team(&the_team);
}

static atomic_int stop;

static void
check_concurrent_callers(watch *w)
{
    pthread_t callers[3];
    void *n_wrong;
    int ok = 1;

    atomic_store(&stop, 0);
    for (int i = 0; i < 3; i++) {
        pthread_create(&callers[i], NULL, keep_calling, &stop);
    }
    for (int i = 0; i < ROUNDS; i++) {
        ok &= runs_right(w, 100, 4, 20);
        if (i % 100 == 50) { /* whoever is inside a region ends it there */
            mha_threads_use_team(i % 200 == 50 ? NULL : &the_team);
        }
    }
    atomic_store(&stop, 1);
    for (int i = 0; i < 3; i++) {
        pthread_join(callers[i], &n_wrong);
        ok &= n_wrong == NULL;
    }
    mha_threads_use_team(&the_team);
    check(ok, "four callers at once, of whom one has the team, and the team taken away and given back meanwhile");
}

static int
child_is_fine(watch *w)
{
    atomic_store(&team.regions, 0);
    return !mha_threads_has_team() && runs_right(w, 500, 4, 20) && runs_right(w, 500, 4, 20) &&
           atomic_load(&team.regions) == 0;
}

static void
check_fork(watch *w)
{
    pthread_t caller;
    int n_good = 0;

    atomic_store(&stop, 0);
    pthread_create(&caller, NULL, keep_calling, &stop);
    for (int i = 0; i < ROUNDS / 10; i++) {
        const pid_t pid = fork();
        if (pid == 0) {
            alarm(HANGS);
            _exit(child_is_fine(w) ? 0 : 1);
        }
        int status;
        n_good += waitpid(pid, &status, 0) == pid && status == 0;
    }
    atomic_store(&stop, 1);
    pthread_join(caller, NULL);
    check(n_good == ROUNDS / 10, "the child of a fork has threads of its own, whatever a caller was doing");
    check(runs_right(w, 100, 4, 20) && mha_threads_has_team(), "the parent keeps the team");
}

/* --- A watcher of a call on the team ------------------------------------------------------------- */

static atomic_int helper_came, may_end, n_asked;
static pid_t child;
static int child_status;

static void
meet(void *unused, size_t task, unsigned worker)
{
    (void)unused;
    (void)task;
    if (worker != 0) {
        atomic_store(&helper_came, 1);
    }
    while (!atomic_load(worker == 0 ? &helper_came : &may_end)) {
        sleep_ms(1);
    }
}

static int
fork_once(void *unused)
{
    (void)unused;
    if (!atomic_load(&may_end)) {
        child = fork();
        if (child == 0) {
            alarm(HANGS);
            return 0;
        }
        waitpid(child, &child_status, 0);
        atomic_store(&may_end, 1);
    }
    return 0;
}

static int
give_up(void *unused)
{
    (void)unused;
    atomic_fetch_add(&n_asked, 1);
    atomic_store(&may_end, 1);
    return 1;
}

static void
check_watchers(watch *w)
{
    atomic_store(&team.regions, 0);
    atomic_store(&helper_came, 0);
    atomic_store(&may_end, 0);
    mha_interrupt_watch(give_up, NULL);
    mha_parallel_for(2, 2, meet, NULL);
    mha_status status = mha_interrupt_status();
    mha_interrupt_watch(NULL, NULL);
    check(status == MHA_ERR_INTERRUPTED && atomic_load(&n_asked) > 0 && atomic_load(&team.regions) == 1,
          "a caller that waits for the team's threads is asked, and may give the call up");

    child_status = -1;
    atomic_store(&helper_came, 0);
    atomic_store(&may_end, 0);
    mha_interrupt_watch(fork_once, NULL);
    mha_parallel_for(2, 2, meet, NULL);
    status = mha_interrupt_status();
    mha_interrupt_watch(NULL, NULL);
    if (child == 0) { /* it has come out of a region whose other threads it does not have */
        _exit(status == MHA_ERR_FORKED && child_is_fine(w) ? 0 : 1);
    }
    check(status == MHA_OK && child_status == 0, "a watcher forks: the child's call leaves the region, and says so");
}

static void
check_numbers(void)
{
    mha_threads_suggest(2);
    mha_threads_limit_own(3);
    check(mha_threads_get() == 3, "where nobody has chosen a number, a thread's own counts, even a higher one");
    mha_threads_limit_own(0);
    check(mha_threads_get() == 2, "and without one, what was suggested");
    mha_threads_set(2);
    mha_threads_limit_own(3);
    check(mha_threads_get() == 2, "a number that was set is not passed");
    mha_threads_limit_own(0);
}

int
main(void)
{
    watch *w = malloc(sizeof *w);

    make_team();
    check(!mha_threads_has_team() && mha_threads_use_team(&the_team) && mha_threads_has_team(), "a team is given");
    check_on_the_team(w);
    check_rounding();
    check_what_it_is_not_for(w);
    check_watchers(w);
    check_concurrent_callers(w);
    check_fork(w);
    check_numbers();
    free(w);
    return report();
}
