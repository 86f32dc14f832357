/*
 * team.c: torch's own threads, those of its OpenMP runtime, as a team of the core.
 *
 * After each operation torch's threads spin for a while on CPUs that threads of ours would need, and the other way
 * round: so both computations use the same threads.  Nothing of OpenMP is compiled in or linked: what torch's library
 * calls itself is found where it is loaded (bound.c).
 *
 * A team belongs to the thread that begins its regions.  A region asks for no number of threads, as torch's do not:
 * libgomp ends threads and starts others when a team's size changes.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#if defined(__linux__)
#define _GNU_SOURCE /* dladdr */
#endif

#include "python/args.h"
#include "team.h"

#if defined(__linux__) && defined(__LP64__)
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdatomic.h>

/* torch's library that computes, and what it calls to begin a region, and to know of regions. */
#define TORCHS_LIBRARY "libtorch_cpu."
enum { PARALLEL, MAX_THREADS, IN_PARALLEL, N_CALLED };
static const char *const called[N_CALLED] = {"GOMP_parallel", "omp_get_max_threads", "omp_in_parallel"};

static struct {
    void (*parallel)(void (*body)(void *), void *data, unsigned n_threads, unsigned flags);
    int (*max_threads)(void);
    int (*in_parallel)(void);
    unsigned most; /* a larger team is left alone */
} omp;

/* What is known of the calling thread's team. */
static _Thread_local struct {
    int has_tensors; /* it has called with tensors: its team is torch's, too */
    int asked;       /* for so many threads a region has been tried out, */
    unsigned got;    /* and has had so many; 0: not to be begun */
} here;

/* --- The sign that it works ---------------------------------------------------------------------- */

#define MOST_TRIED 1024

static void *
wait_to_end(void *gate)
{
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* Whether so many threads can be started now: where they cannot, libgomp ends the process. */
static int
can_start(int n)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t threads[MOST_TRIED];
    int n_started = 0;

    pthread_mutex_lock(&gate);
    while (n_started < n && pthread_create(&threads[n_started], NULL, wait_to_end, &gate) == 0) {
        n_started++;
    }
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < n_started; i++) {
        pthread_join(threads[i], NULL);
    }
    return n_started == n;
}

static void
count(void *came)
{
    atomic_fetch_add((atomic_uint *)came, 1);
}

/* How many threads come to a region, where `n` may. */
static unsigned
tried_out(int n)
{
    atomic_uint came = 0;

    if (n < 2 || n > MOST_TRIED || (unsigned)n > omp.most || !can_start(n - 1)) {
        return 0;
    }
    omp.parallel(count, &came, 0, 0);
    return atomic_load(&came);
}

/* --- The team ------------------------------------------------------------------------------------ */

static unsigned
n_threads(void)
{
    if (!here.has_tensors) {
        return 0;
    }
    if (omp.in_parallel()) {
        return 1;
    }
    const int now = omp.max_threads();
    if (now != here.asked) {
        here.asked = now;
        here.got = tried_out(now);
    }
    return here.got < 2 ? 0 : here.got;
}

typedef struct {
    int (*body)(void *data);
    void *data;
    jmp_buf without_team;
} region;

static void
run_body(void *the_region)
{
    region *const r = the_region;

    if (r->body(r->data)) { /* the others would be waited for at the region's end, forever */
        longjmp(r->without_team, 1);
    }
}

static void
run(int (*body)(void *data), void *data)
{
    region r = {.body = body, .data = data};

    if (setjmp(r.without_team) == 0) {
        omp.parallel(run_body, &r, 0, 0);
    }
}

static const mha_team team = {.n_threads = n_threads, .run = run};

void
mha_py_here_are_tensors(void)
{
    here.has_tensors = 1;
}

PyObject *
py_use_torch_threads(mha_py_call *call, PyObject *const *values)
{
    const int64_t most = mha_py_whole(call, values[0], "most", 0);
    void *found[N_CALLED];
    Dl_info whose;

    if (call->failed) {
        return NULL;
    }
    if (most == 0) {
        (void)mha_threads_use_team(NULL);
        Py_RETURN_NONE;
    }
    mha_py_bound(TORCHS_LIBRARY, called, found, N_CALLED);
    for (int i = 0; i < N_CALLED; i++) {
        if (found[i] == NULL) {
            Py_RETURN_NONE;
        }
    }
    memcpy(&omp.parallel, &found[PARALLEL], sizeof omp.parallel);
    memcpy(&omp.max_threads, &found[MAX_THREADS], sizeof omp.max_threads);
    memcpy(&omp.in_parallel, &found[IN_PARALLEL], sizeof omp.in_parallel);
    omp.most = most > UINT32_MAX ? UINT32_MAX : (unsigned)most;
    if (dladdr(found[PARALLEL], &whose) == 0 || !mha_threads_use_team(&team)) {
        Py_RETURN_NONE;
    }
    return PyUnicode_DecodeFSDefault(whose.dli_fname);
}
#else
void
mha_py_here_are_tensors(void)
{
}

PyObject *
py_use_torch_threads(mha_py_call *Py_UNUSED(call), PyObject *const *Py_UNUSED(values))
{
    Py_RETURN_NONE; /* nothing is known here of the threads that torch has */
}
#endif
