/*
 * memory_shim.c: the C library's allocator, counted, and failing on demand; threads that cannot be started.  Built and
 * preloaded (LD_PRELOAD) by the tests that need it; glibc only, by whose own names the real allocator is called.
 *
 *     shim_live()                 blocks allocated and not yet freed, by the whole process
 *     shim_fail(first, count)     of the allocations to come under the library that shim_watch named, `count` fail,
 *                                 the first of them being number `first` (from 0)
 *     shim_stop()                 none fails any more; returns how many have
 *     shim_refuse_threads(n)      1: pthread_create fails; returns how many times it has
 * SPDX-License-Identifier: BSD-3-Clause
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

static atomic_long live, failed, first, count;
static atomic_int refuses;
static atomic_long refused;

long
shim_live(void)
{
    return atomic_load(&live);
}

void
shim_fail(long new_first, long new_count)
{
    atomic_store(&failed, 0);
    atomic_store(&first, new_first);
    atomic_store(&count, new_count);
}

long
shim_stop(void)
{
    atomic_store(&count, 0);
    return atomic_load(&failed);
}

long
shim_refuse_threads(int on)
{
    atomic_store(&refuses, on);
    return atomic_load(&refused);
}

/* --- Which library asks ---------------------------------------------------------------------- */

static uintptr_t watched_from, watched_to; /* its addresses */

static int
note_library(struct dl_phdr_info *info, size_t size, void *name)
{
    (void)size;
    for (int i = 0; strstr(info->dlpi_name, name) != NULL && i < info->dlpi_phnum; i++) {
        const uintptr_t from = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        if (info->dlpi_phdr[i].p_type == PT_LOAD && (info->dlpi_phdr[i].p_flags & PF_X)) {
            watched_from = from;
            watched_to = from + info->dlpi_phdr[i].p_memsz;
        }
    }
    return 0;
}

/* Only allocations made by functions of this library, or by what they call, are to fail; 1 if it is loaded. */
int
shim_watch(char *part_of_name)
{
    void *frames[1];

    backtrace(frames, 1); /* its own first call allocates */
    dl_iterate_phdr(note_library, part_of_name);
    return watched_to > watched_from;
}

static int
is_watched(void)
{
    void *frames[64];
    const int n = backtrace(frames, 64);

    for (int i = 0; i < n; i++) {
        if ((uintptr_t)frames[i] >= watched_from && (uintptr_t)frames[i] < watched_to) {
            return 1;
        }
    }
    return 0;
}

static int
must_fail(void)
{
    if (atomic_load(&count) == 0 || !is_watched()) {
        return 0;
    }
    if (atomic_fetch_sub(&first, 1) > 0) {
        return 0;
    }
    atomic_fetch_sub(&count, 1);
    atomic_fetch_add(&failed, 1);
    errno = ENOMEM;
    return 1;
}

static void *
counted(void *block)
{
    atomic_fetch_add(&live, block != NULL);
    return block;
}

void *
malloc(size_t n)
{
    return must_fail() ? NULL : counted(__libc_malloc(n));
}

void *
calloc(size_t n, size_t size)
{
    return must_fail() ? NULL : counted(__libc_calloc(n, size));
}

void *
realloc(void *block, size_t n)
{
    if (must_fail()) {
        return NULL;
    }
    return block == NULL ? counted(__libc_malloc(n)) : __libc_realloc(block, n);
}

void *
memalign(size_t alignment, size_t n)
{
    return must_fail() ? NULL : counted(__libc_memalign(alignment, n));
}

void *
aligned_alloc(size_t alignment, size_t n)
{
    return memalign(alignment, n);
}

int
posix_memalign(void **block, size_t alignment, size_t n)
{
    void *got = memalign(alignment, n);

    if (got == NULL) {
        return ENOMEM;
    }
    *block = got;
    return 0;
}

void
free(void *block)
{
    atomic_fetch_sub(&live, block != NULL);
    __libc_free(block);
}

int
pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument)
{
    static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

    if (atomic_load(&refuses)) {
        atomic_fetch_add(&refused, 1);
        return EAGAIN;
    }
    if (real == NULL) {
        real =
            (int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))dlsym(RTLD_NEXT, "pthread_create");
    }
    return real(thread, attributes, start, argument);
}
