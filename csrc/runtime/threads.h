/*
 * threads.h: the core's own small pool.  Drivers call mha_parallel_for; kernels never see it.
 *
 * Lazy: the first call that is worth it starts the workers.  Fork-safe: a child starts its own.
 * If the pool is busy with another caller's work, if the call comes from inside a worker, or if
 * threads cannot be started, the calling thread does everything itself, with the same results:
 * tasks are independent and write disjoint memory.
 */
#ifndef MHA_THREADS_H
#define MHA_THREADS_H

#include <stddef.h>

#if defined(__EMSCRIPTEN__) && !defined(__EMSCRIPTEN_PTHREADS__) && !defined(MHA_NO_THREADS)
#define MHA_NO_THREADS /* a web page without special headers has no threads */
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
 * The same decision, and its reason.  "one task": nothing to share; "little work": not worth waking another thread;
 * "work": one more thread would get too little; "tasks": there are no more; "all": as many as mha_threads_get allows.
 */
unsigned mha_threads_decide(size_t n_tasks, double work, const char **reason);

/*
 * From work to time: the multiply-adds that a core does in a second.  Waking a parked worker takes 10 to 25 us
 * (tests/c/time_threads.c), so a second thread, which at best halves the time, gains little below 30 us of work;
 * and every further thread should have 15 us of work as well.
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
