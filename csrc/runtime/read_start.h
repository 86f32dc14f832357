/*
 * read_start.h: the start of a small file in which a kernel tells something; for threads_available.c and caches.c.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef MHA_READ_START_H
#define MHA_READ_START_H

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "common.h"

/* Reads the start of a file, NUL-terminated: "" if it cannot be read. */
MHA_INLINE void
mha_read_start(const char *path, char *text, size_t capacity)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t length = 0;

    while (fd >= 0 && length < capacity - 1) {
        const ssize_t n = read(fd, text + length, capacity - 1 - length);
        if (n > 0) {
            length += (size_t)n;
        }
        else if (n == 0 || errno != EINTR) {
            break;
        }
    }
    if (fd >= 0) {
        close(fd);
    }
    text[length] = '\0';
}

#endif /* MHA_READ_START_H */
