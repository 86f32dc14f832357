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

#include "mha_explain.h"

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

/* The same decision, with its reason. */
mha_share_facts mha_threads_share(size_t n_tasks, double work);

/*
 * Run tasks 0 .. n_tasks-1, each exactly once, on up to n_workers threads; returns when all are done.
 * Every task runs in the caller's rounding mode.  A task may call this function, but not fork.
 */
void mha_parallel_for(size_t n_tasks, unsigned n_workers, mha_task_fn run, void *context);

#endif /* MHA_THREADS_H */
