/*
 * callers.h: threads of a test's own, on every system; where there are none, they run one after the other.
 *
 *     static THREAD_FUNCTION run(void *argument) { ...; return 0; }
 *     thread_id thread = start(run, argument);
 *     join(thread);
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef CALLERS_H
#define CALLERS_H

#include <stdint.h>
#include <stdlib.h>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN /* else `small` and other words are taken */
#include <windows.h>
typedef HANDLE thread_id;
#define THREAD_FUNCTION DWORD WINAPI
#define this_thread() ((thread_id)(uintptr_t)GetCurrentThreadId())
#define same_thread(a, b) ((a) == (b))
#define start(run, argument) CreateThread(NULL, 0, run, argument, 0, NULL)
#define join(thread) WaitForSingleObject(thread, INFINITE)
#elif defined(MHA_NO_THREADS)
typedef int thread_id;
#define THREAD_FUNCTION void *
#define this_thread() 0
#define same_thread(a, b) ((a) == (b))
#define start(run, argument) (run(argument), 0)
#define join(thread) ((void)(thread))
#else
#include <pthread.h>
typedef pthread_t thread_id;
#define THREAD_FUNCTION void *
#define this_thread() pthread_self()
#define same_thread(a, b) pthread_equal(a, b)
#define join(thread) pthread_join(thread, NULL)

static inline thread_id
start(void *(*run)(void *), void *argument)
{
    thread_id thread;

    if (pthread_create(&thread, NULL, run, argument) != 0) {
        exit(2);
    }
    return thread;
}
#endif

#endif
