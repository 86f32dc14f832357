/*
 * facts.h: what mha_*_explain says of a call, noted so that a test asks for facts by name.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef FACTS_H
#define FACTS_H

#include "mha_explain.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const void *group; /* the fact that it belongs to, NULL: none */
    const char *name;
    mha_fact fact;
} told_fact;

static struct {
    size_t n;
    told_fact facts[128];
} told;

/* An mha_emit_fn; its `to` is the fact that stands for the group, or NULL. */
static inline void *
note_fact(void *group, const char *name, mha_fact fact)
{
    told.facts[told.n] = (told_fact){group, name, fact};
    return &told.facts[told.n++];
}

/* Forgets what was told before; for `emit, to` in a call of mha_*_explain. */
#define NOTING_FACTS (told.n = 0, note_fact), NULL

/* "share.n_tasks" is the fact n_tasks of the group share; NULL where it was not told. */
static inline const mha_fact *
find_fact(const char *path)
{
    const void *group = NULL;
    size_t i = 0;

    for (size_t length; i < told.n; i++) {
        length = strlen(told.facts[i].name);
        if (told.facts[i].group != group || strncmp(path, told.facts[i].name, length) != 0) {
            continue;
        }
        if (path[length] == '\0') {
            return &told.facts[i].fact;
        }
        if (path[length] == '.') { /* what it holds comes behind it */
            group = &told.facts[i];
            path += length + 1;
        }
    }
    return NULL;
}

static inline mha_fact
fact(const char *path)
{
    const mha_fact *found = find_fact(path);

    if (found == NULL) {
        printf("failed: no fact %s\n", path);
        exit(1);
    }
    return *found;
}

static inline size_t
count_of(const char *path)
{
    return fact(path).count;
}

#endif
