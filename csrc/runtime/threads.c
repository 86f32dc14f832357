/*
 * threads.c: the pool behind mha_parallel_for.
 *
 * One job at a time.  The caller writes the job down, opens its gate and rings the bell.  A worker
 * that hears the bell joins through the gate, which numbers it, and claims tasks until none is left.
 * The caller claims tasks as well, then closes the gate and waits for those who have joined.
 * Nobody ever waits for a worker that has not joined: one that the OS has not scheduled yet, that
 * could not be started, or that did not survive a fork costs its help and nothing else.
 *
 * If the process has a team of threads already (mha_threads_use_team), the same job is done inside a region of that
 * team: its threads join through the gate, too, and leave again if they find it closed.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#if defined(__linux__)
#define _GNU_SOURCE /* pthread_setname_np, syscall */
#endif

#include "threads.h"

#include "common.h"
#include "mha.h"
#include "threads_interrupt.h"

#include <stdatomic.h>

#define MOST_THREADS (MHA_HAVE_THREADS ? 1024u : 1u)

#define SUGGESTED (1u << 31) /* a bit of thread_limit: nobody has set it */

static atomic_uint thread_limit = 1;
static _Thread_local unsigned own_limit; /* for calls of this thread alone; 0: no such limit */

static unsigned
within_most(unsigned n_threads)
{
    return n_threads < 1 ? 1 : n_threads < MOST_THREADS ? n_threads : MOST_THREADS;
}

void
mha_threads_set(unsigned n_threads)
{
    atomic_store(&thread_limit, within_most(n_threads));
}

void
mha_threads_suggest(unsigned n_threads)
{
    atomic_store(&thread_limit, within_most(n_threads) | SUGGESTED);
}

unsigned
mha_threads_get(void)
{
    const unsigned stored = atomic_load_explicit(&thread_limit, memory_order_relaxed), limit = stored & ~SUGGESTED;

    return own_limit != 0 && (own_limit < limit || stored != limit) ? own_limit : limit;
}

void
mha_threads_limit_own(unsigned n_threads)
{
    own_limit = n_threads == 0 ? 0 : within_most(n_threads);
}

#if MHA_HAVE_THREADS
#include <errno.h>
#include <fenv.h>

#include "threads_park.h"

/*
 * How long a worker without work, or a caller whose tasks are all claimed, spins before it parks.  The jobs of one
 * layer follow each other faster than that, and spinning in vain costs about as much as leaving the kernel does.  After
 * YIELD_AFTER_NS it yields: without that, 16 threads on 2 CPUs spend most of their time in each other's way.
 *
 * Beside others, too: with workers that spin for 0, 5, 20, 51 and 200 us, what NumPy or torch computes between two of
 * our calls took as long (2.1 to 2.2 ms, 2.5 to 2.7 ms), and small calls alone took 166 to 175 us, all within what one
 * run scatters (benchmarks/beside.py --own-threads, AMD EPYC family 25 model 1, two cores).
 */
#define SPIN_NS 50000
#define YIELD_AFTER_NS 10000

/* How long a caller whose call may be interrupted sleeps at most, waiting for its helpers. */
#define LOOK_AGAIN_NS 20000000

/* The gate: how many workers may join in its upper half, how many have joined in the lower; 0 is closed. */
#define GATE_OPEN(places) ((unsigned)(places) << 16)
#define GATE_PLACES(gate) ((gate) >> 16)
#define GATE_JOINED(gate) ((gate) & 0xFFFFu)

/*
 * The job and what its threads share.  Fields marked (owner) belong to the caller that holds `busy`; workers read
 * them between joining and reporting that they have finished.
 */
static struct {
    /* read by everybody at the start of a job: one cache line */
    _Alignas(64) mha_counter bell; /* counts jobs */
    atomic_uint gate;
    mha_task_fn run;       /* (owner) */
    void *context;         /* (owner) */
    size_t n_tasks;        /* (owner) */
    fenv_t fp_mode;        /* (owner) of the calling thread */
    const void *interrupt; /* (owner) the call's flag, see threads_interrupt.h */
    /* written by everybody, each on its own line */
    _Alignas(64) atomic_size_t next_task;
    _Alignas(64) mha_counter finished; /* joined workers that have left the job again */
    _Alignas(64) atomic_int busy;      /* some caller has the pool */
    unsigned n_started;                /* (owner) workers that exist */
    atomic_int watches_forks;
    const mha_team *_Atomic team; /* whose threads do jobs; NULL: our own */
} pool = {.bell = MHA_COUNTER_ZERO, .finished = MHA_COUNTER_ZERO};

/* --- Worker threads ----------------------------------------------------------------- */

static void
claim_tasks(unsigned worker)
{
    const mha_task_fn run = pool.run;
    void *const context = pool.context;
    const size_t n_tasks = pool.n_tasks;
    size_t task;

    while (!mha_interrupted() &&
           (task = atomic_fetch_add_explicit(&pool.next_task, 1, memory_order_relaxed)) < n_tasks) {
        run(context, task, worker);
    }
}

/*
 * Takes part in the job whose gate is open, if any; returns whether it did.  The thread then rounds, and treats
 * subnormals, as the caller does, so that it makes no difference who runs a task.
 */
static int
join_job(void)
{
    unsigned gate = atomic_load_explicit(&pool.gate, memory_order_relaxed);

    do {
        if (GATE_JOINED(gate) >= GATE_PLACES(gate)) {
            return 0;
        }
    } while (!atomic_compare_exchange_weak_explicit(&pool.gate, &gate, gate + 1, memory_order_acquire,
                                                    memory_order_relaxed));
    fesetenv(&pool.fp_mode);
    mha_interrupt_follow(pool.interrupt);
    claim_tasks(GATE_JOINED(gate) + 1);

    /* The caller may return, and another job begin, from this addition on. */
    atomic_fetch_add(&pool.finished.count, 1);
    if (atomic_load(&pool.finished.parked) != 0) {
        mha_counter_unpark(&pool.finished, 1);
    }
    return 1;
}

static mha_thread_end MHA_THREAD_CALL
work_forever(void *unused)
{
    int64_t worked_at = -SPIN_NS;

    (void)unused;
    mha_name_thread();
    for (;;) {
        /* Reads the bell before the gate: a job posted after the look at the gate changes the bell. */
        const unsigned jobs_seen = atomic_load_explicit(&pool.bell.count, memory_order_acquire);
        if (join_job()) {
            worked_at = mha_now_ns(); /* only work earns the right to spin */
        }
        if (!mha_counter_spin(&pool.bell, jobs_seen, worked_at + YIELD_AFTER_NS, worked_at + SPIN_NS)) {
            mha_counter_park(&pool.bell, jobs_seen, MHA_FOREVER);
        }
    }
    return 0;
}

/*
 * In the child of a fork: the workers are gone, and so is the caller they may have worked for.  All state returns to
 * that of a process that has not used the pool, and the next call starts new workers.  It needs no lock in the
 * parent, for nothing of the old state is kept, however unfinished it was copied.  A call whose watcher forked cannot
 * be finished: nobody works on the tasks that its workers had claimed.
 */
static void
forget_pool(void)
{
    mha_interrupt_lost_helpers(pool.interrupt);
    pool.interrupt = NULL;
    atomic_store(&pool.team, NULL);
    atomic_store(&pool.gate, 0);
    pool.bell = pool.finished = (mha_counter)MHA_COUNTER_ZERO; /* whatever other threads were doing to them */
    pool.n_started = 0;
    atomic_store(&pool.busy, 0);
}

/* Whether the pool learns of forks.  If it does not, a child would count on workers that do not exist. */
static int
watch_forks(void)
{
    if (!atomic_load(&pool.watches_forks) && mha_at_fork(forget_pool)) { /* to be told twice does no harm */
        atomic_store(&pool.watches_forks, 1);
    }
    return atomic_load(&pool.watches_forks);
}

/* Makes sure of `wanted` workers as far as the system lets us; returns how many of them there are. */
static unsigned
start_workers(unsigned wanted)
{
    if (watch_forks() && pool.n_started < wanted) {
        pool.n_started += mha_start_threads(wanted - pool.n_started, work_forever);
    }
    return pool.n_started < wanted ? pool.n_started : wanted;
}

/* --- Jobs ------------------------------------------------------------------------------ */

/* Opens the job that the pool's fields describe to n_helpers workers. */
static void
post_job(unsigned n_helpers)
{
    atomic_store_explicit(&pool.gate, GATE_OPEN(n_helpers), memory_order_release);
    atomic_fetch_add(&pool.bell.count, 1);

    /* Workers that are awake hear the bell themselves; only as many as are missing are woken. */
    const unsigned n_parked = atomic_load(&pool.bell.parked);
    const unsigned n_awake = pool.n_started > n_parked ? pool.n_started - n_parked : 0;
    if (n_awake < n_helpers) {
        mha_counter_unpark(&pool.bell, n_helpers - n_awake);
    }
}

/* Closes the gate and returns when every worker that had come through has finished. */
static void
wait_for_helpers(void)
{
    const unsigned gate = atomic_exchange_explicit(&pool.gate, 0, memory_order_relaxed);
    const unsigned n_joined = GATE_JOINED(gate);

    for (;;) {
        const unsigned n_finished = atomic_load_explicit(&pool.finished.count, memory_order_acquire);
        if (n_finished == n_joined) {
            return;
        }
        /* Asked every time, not only after a park: in the child, a call by the watcher may have counted its helpers. */
        if (mha_interrupt_status() == MHA_ERR_FORKED) { /* our helpers are not in this process */
            return;
        } /* for any other reason to end, the helpers end by themselves */
        const int64_t now = mha_now_ns();
        if (!mha_counter_spin(&pool.finished, n_finished, now + YIELD_AFTER_NS, now + SPIN_NS)) {
            mha_counter_park(&pool.finished, n_finished, pool.interrupt != NULL ? LOOK_AGAIN_NS : MHA_FOREVER);
        }
    }
}

/* --- The same job on a team ---------------------------------------------------------------- */

/*
 * What every thread of the team does in a region.  The caller waits here, where it is asked whether to go on, and not
 * at the region's end.  Returns whether the region's other threads are lost, see mha_team.
 */
static int
take_part(void *caller)
{
    fenv_t own_mode;

    if (caller == &own_limit) { /* whose address differs from thread to thread */
        claim_tasks(0);
        wait_for_helpers();
        return mha_interrupt_status() == MHA_ERR_FORKED;
    }
    const void *const own_flag = mha_interrupt_flag();
    fegetenv(&own_mode);
    if (join_job()) { /* the thread is not ours: it gets back what it had */
        mha_interrupt_follow(own_flag);
        fesetenv(&own_mode);
    }
    return 0;
}

int
mha_threads_use_team(const mha_team *team)
{
    if (team != NULL && !watch_forks()) {
        return 0;
    }
    atomic_store(&pool.team, team);
    return 1;
}

int
mha_threads_has_team(void)
{
    return atomic_load(&pool.team) != NULL;
}

/* --- Who does a job ------------------------------------------------------------------------ */

/* Writes the job down; to be posted, or taken up by a team. */
static void
describe_job(size_t n_tasks, mha_task_fn run, void *context)
{
    pool.run = run;
    pool.context = context;
    pool.n_tasks = n_tasks;
    pool.interrupt = mha_interrupt_flag();
    fegetenv(&pool.fp_mode);
    atomic_store_explicit(&pool.next_task, 0, memory_order_relaxed);
    atomic_store_explicit(&pool.finished.count, 0, memory_order_relaxed);
}

/* Shares the tasks with n_useful - 1 threads, if they can be had; returns whether all are done. */
static int
share_out(size_t n_tasks, unsigned n_useful, mha_task_fn run, void *context)
{
    /* A busy pool has another caller, or runs the very task that calls. */
    if (atomic_exchange_explicit(&pool.busy, 1, memory_order_acquire) != 0) {
        return 0;
    }
    const int saved_errno = errno;
    const mha_team *const team = atomic_load(&pool.team);
    const unsigned in_team = team != NULL ? team->n_threads() : 0;
    unsigned n_helpers = 0;

    if (in_team >= n_useful) {
        n_helpers = n_useful - 1;
        describe_job(n_tasks, run, context);
        atomic_store_explicit(&pool.gate, GATE_OPEN(n_helpers), memory_order_release);
        team->run(take_part, &own_limit);
    } else if (in_team != 1 && (n_helpers = start_workers(n_useful - 1)) > 0) {
        describe_job(n_tasks, run, context);
        post_job(n_helpers);
        claim_tasks(0);
        wait_for_helpers();
    }
    pool.interrupt = NULL;
    atomic_store_explicit(&pool.busy, 0, memory_order_release);
    errno = saved_errno;
    return n_helpers > 0;
}

#else

int
mha_threads_use_team(const mha_team *team)
{
    return team == NULL;
}

int
mha_threads_has_team(void)
{
    return 0;
}

#endif

/* --- How many threads, and all of it ------------------------------------------------------------ */

unsigned
mha_threads_decide(size_t n_tasks, double work, const char **reason)
{
    *reason = "all";
    if (MOST_THREADS == 1) {
        return 1;
    }
    if (n_tasks <= 1) {
        *reason = "one task";
        return 1;
    }
    if (!(work >= MHA_WORTH_SHARING)) {
        *reason = "little work";
        return 1;
    }
    const unsigned allowed = mha_threads_get();
    const size_t most = mha_min(allowed, n_tasks);
    const double worth = work / MHA_WORK_PER_THREAD;

    if (worth < (double)most) {
        *reason = "work";
        return (unsigned)worth;
    }
    if (n_tasks < allowed) {
        *reason = "tasks";
    }
    return (unsigned)most;
}

unsigned
mha_threads_for(size_t n_tasks, double work)
{
    const char *unused;

    return mha_threads_decide(n_tasks, work, &unused);
}

void
mha_parallel_for(size_t n_tasks, unsigned n_workers, mha_task_fn run, void *context)
{
#if MHA_HAVE_THREADS
    const unsigned n_useful = (unsigned)mha_min(mha_min(n_workers, MOST_THREADS), n_tasks);
    if (n_useful > 1 && share_out(n_tasks, n_useful, run, context)) {
        return;
    }
#else
    (void)n_workers;
#endif
    const int watched = mha_interrupt_flag() != NULL;

    for (size_t task = 0; task < n_tasks && !(watched && mha_interrupted()); task++) { /* all on the calling thread */
        run(context, task, 0);
    }
}
