/*
 * forward.h: what other files than forward.c do of a forward call: a tile, and whole tasks.
 */
#ifndef MHA_FORWARD_H
#define MHA_FORWARD_H

#include "values.h"

/* A task; and, if key blocks of a task are tasks of their own, one of those, which all come before. */
void mha_forward_task(void *job, size_t task, unsigned worker);
void mha_split_task(void *job, size_t number, unsigned worker);

/* MHA_WAY_COLUMNS: a task. */
void mha_columns_task(void *job, size_t task, unsigned worker);

/* A task of the weights pass (weights.c): fills the task's rows of args->weights. */
void mha_weights_task(void *job, size_t task, unsigned worker);

#endif
