/*
 * threads.h: the core's own small pool.  Drivers call mha_parallel_for; kernels never see it.
 *
 * Lazy: the first call that is worth it starts the workers.  Fork-safe: a child starts afresh.
 * A pool that is busy with another caller's work, a call from inside a worker, or threads that
 * cannot be started make the calling thread do everything itself: same results, for tasks are
 * independent and write disjoint memory.
 */
#ifndef MHA_THREADS_H
#define MHA_THREADS_H

#include <stddef.h>

#if defined(__EMSCRIPTEN__) && !defined(__EMSCRIPTEN_PTHREADS__) && !defined(MHA_NO_THREADS)
#define MHA_NO_THREADS /* a page without special headers has none */
#endif
#if (defined(__unix__) || defined(__APPLE__) || defined(_WIN32)) && !defined(MHA_NO_THREADS)
#define MHA_HAVE_THREADS 1
#else
#define MHA_HAVE_THREADS 0
#endif

/*
 * One unit of work.  `worker` numbers the thread that runs it, 0 <= worker < the n_workers given to
 * mha_parallel_for, so that a task may use that worker's part of the scratch memory.
 */
typedef void (*mha_task_fn)(void *context, size_t task, unsigned worker);

/*
 * How many threads a call of `n_tasks` tasks and about `work` multiply-adds should use: 1 below
 * some 30 microseconds of work, never more than n_tasks or mha_threads_get().
 */
unsigned mha_threads_for(size_t n_tasks, double work);

/*
 * The same decision, and why: "one task", so nothing to share; "little work", less than waking another thread is worth;
 * "work", of which one more would get too little; "tasks", there are no more; "all" that mha_threads_get allows.
 */
unsigned mha_threads_decide(size_t n_tasks, double work, const char **reason);

/*
 * From work to time: what a core does in a second, in multiply-adds.  Waking a parked worker takes 10 to 25 us
 * (tests/c/time_threads.c), so that a second thread gains little below 30 us of work, which it would at best halve;
 * and every further thread should bring 15 us of work as well.
 */
#define MHA_WORK_PER_SECOND 25e9
#define MHA_WORTH_SHARING (30e-6 * MHA_WORK_PER_SECOND)
#define MHA_WORK_PER_THREAD (15e-6 * MHA_WORK_PER_SECOND)

/*
 * Run tasks 0 .. n_tasks-1, each exactly once, on up to n_workers threads; returns when all are done.
 * Every task runs in the caller's rounding mode.  A task may call this function, but not fork.
 */
void mha_parallel_for(size_t n_tasks, unsigned n_workers, mha_task_fn run, void *context);

#endif /* MHA_THREADS_H */
