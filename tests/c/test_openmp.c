/*
 * test_openmp.c: the core in a program that uses OpenMP: called inside the program's regions, by several of its
 * threads, and with the program's own team for its work.  Prints a line per check; exit status 1 if one fails.
 *
 * build: -fopenmp
 * nightly: 1000
 * leaks not counted: the runtime keeps its threads' memory
 * POSIX only: forks
 * not emulated: nothing in it depends on the processor
 * SPDX-License-Identifier: BSD-3-Clause
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "threads_watch.h"

#define HANGS 300

/* What gcc makes of a parallel region; a program has no header for it. */
void GOMP_parallel(void (*body)(void *), void *data, unsigned n_threads, unsigned flags);
int omp_get_max_threads(void);
int omp_in_parallel(void);
int omp_get_thread_num(void);
void omp_set_num_threads(int);

static atomic_uint regions;

static unsigned
team_size(void)
{
    return omp_in_parallel() ? 1 : (unsigned)omp_get_max_threads();
}

typedef struct {
    int (*body)(void *data);
    void *data;
} region;

static void
run_body(void *the_region)
{
    const region *const r = the_region;

    (void)r->body(r->data);
}

static void
run_region(int (*body)(void *data), void *data)
{
    region r = {body, data};

    atomic_fetch_add(&regions, 1);
    GOMP_parallel(run_body, &r, 0, 0);
}

static const mha_team openmp = {team_size, run_region};

/* Calls by all threads of a region at once. */
static int
inside_a_region(watch *watches)
{
    int n_right = 0;

#pragma omp parallel reduction(+ : n_right)
    n_right += runs_right(&watches[omp_get_thread_num()], 100, 4, 20);
    return n_right;
}

static int
in_a_child(watch *w)
{
    const pid_t pid = fork();
    int status;

    if (pid == 0) {
        alarm(HANGS);
        _exit(runs_right(w, 100, 4, 20) && !mha_threads_has_team() ? 0 : 1);
    }
    return waitpid(pid, &status, 0) == pid && status == 0;
}

int
main(int argc, char **argv)
{
    const int rounds = argc > 1 ? (atoi(argv[1]) > 0 ? atoi(argv[1]) : 20) : 100;
    watch *w = malloc(4 * sizeof *w);
    int own = 1, on_team = 1, inside = 1, children = 1, sizes = 1;

    omp_set_num_threads(4);
    for (int i = 0; i < rounds; i++) {
        own &= inside_a_region(w) == 4 && runs_right(w, 200, 4, 20);
    }
    check(own, "threads of the core's own, in and beside the program's regions");
    mha_threads_use_team(&openmp);
    for (int i = 0; i < rounds; i++) {
        on_team &= runs_right(w, 200, 4, 20);
        const unsigned before = atomic_load(&regions);
        inside &= inside_a_region(w) == 4 && atomic_load(&regions) == before;
        children &= in_a_child(w);
        omp_set_num_threads(2 + i % 4); /* the program's threads come and go */
        sizes &= runs_right(w, 200, 4, 20);
        omp_set_num_threads(4);
    }
    check(on_team && atomic_load(&regions) >= (unsigned)rounds, "the program's team does the work");
    check(inside, "inside its regions no other is begun");
    check(children, "the child of a fork works without the team");
    check(sizes, "a team that grows and shrinks");
    free(w);
    return report();
}
