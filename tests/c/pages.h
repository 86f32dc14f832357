/*
 * pages.h: memory that may not be touched, on every system that has such a thing: POSIX, Windows; not in a browser.
 *
 * Include after a feature-test macro that gives MAP_ANONYMOUS.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef PAGES_H
#define PAGES_H

#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#if defined(_WIN32)
#include <io.h>
#include <process.h>
#include <windows.h>
#undef IN /* empty words of its headers, and names in ours */
#undef OUT

#define WRITE_OUT(text, length) _write(1, text, (unsigned)(length))

static inline size_t
page_size(void)
{
    SYSTEM_INFO info;

    GetSystemInfo(&info);
    return info.dwPageSize;
}

/* n bytes of pages that may not be touched; NULL if they are not to be had. */
static inline char *
closed_pages(size_t n)
{
    return VirtualAlloc(NULL, n, MEM_RESERVE | MEM_COMMIT, PAGE_NOACCESS);
}

/* Opens some of them; whether that worked. */
static inline int
open_pages(char *pages, size_t n)
{
    DWORD before;

    return VirtualProtect(pages, n, PAGE_READWRITE, &before) != 0;
}

/* Whether a read of that byte would be a fault: it is tried. */
static inline int
is_closed(const volatile char *byte)
{
    return IsBadReadPtr((const void *)byte, 1) != 0;
}

#else
#include <unistd.h>

#define WRITE_OUT(text, length) write(STDOUT_FILENO, text, length)

#if defined(__EMSCRIPTEN__) /* every page is open */
static inline size_t
page_size(void)
{
    return 65536;
}

static inline char *
closed_pages(size_t n)
{
    return malloc(n);
}

static inline int
open_pages(char *pages, size_t n)
{
    (void)n;
    return pages != NULL;
}

static inline int
is_closed(const volatile char *byte)
{
    (void)byte;
    return 1;
}

#else
#include <sys/mman.h>
#include <sys/wait.h>

static inline size_t
page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* n bytes of pages that may not be touched; NULL if they are not to be had. */
static inline char *
closed_pages(size_t n)
{
    void *pages = mmap(NULL, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    return pages == MAP_FAILED ? NULL : pages;
}

/* Opens some of them; whether that worked. */
static inline int
open_pages(char *pages, size_t n)
{
    return mprotect(pages, n, PROT_READ | PROT_WRITE) == 0;
}

/* Whether a read of that byte is a fault: a child tries, and must not survive it. */
static inline int
is_closed(const volatile char *byte)
{
    int status = 0;

    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        signal(SIGBUS, SIG_DFL);
        _exit(*byte == 0 ? 0 : 3);
    }
    waitpid(child, &status, 0);
    return WIFSIGNALED(status);
}
#endif
#endif
#endif
