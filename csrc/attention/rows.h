/*
 * rows.h: rows of queries and what each of them has: its keys, its statistics, what it gets if it saw no key.
 */
#ifndef MHA_ROWS_H
#define MHA_ROWS_H

#include "plan.h"

/* Rows of queries: those of a task (of each of its heads, `head` is the first), of one of its heads, or of a tile. */
typedef struct {
    size_t item, head, key_head;
    size_t query, rows;    /* the first query and their number */
    const mha_interval *row_keys; /* what each of these rows sees; NULL: all see `keys` */
    mha_interval keys;     /* what any of them sees */
} mha_rows;

/* Address of element (item, head, row, 0) of an operand, and of a result. */
const char *mha_operand_at(const mha_kernels *kernels, const mha_operand *x, size_t item, size_t head, size_t row);
char *mha_result_at(const mha_kernels *kernels, const mha_result *x, size_t item, size_t head, size_t row);

/* Position of the tile's first row in the dense (B,H,Q) arrays. */
MHA_INLINE size_t
mha_row_index(const mha_plan *plan, const mha_rows *tile)
{
    return (tile->item * plan->args->heads + tile->head) * plan->args->queries + tile->query;
}

/* Row `row` of these in args->weights. */
MHA_INLINE char *
mha_weights_at(const mha_plan *plan, const mha_rows *rows, size_t row)
{
    const size_t at = (mha_row_index(plan, rows) + row) * plan->args->keys;

    return (char *)plan->args->weights + at * plan->kernels->itemsize;
}

/* The keys that row `row` of the tile sees. */
mha_interval mha_row_keys(const mha_rows *tile, size_t row);

/*
 * The keys whose mean a row without weights gets under MHA_EMPTY_UNIFORM: all K; but if the row does see keys,
 * and no mask or bias hid them, their scores overflowed to -inf: then those, for nobody promised to have the rest.
 */
mha_interval mha_mean_keys(const mha_plan *plan, const mha_rows *tile, size_t row);

/* Writes the weights of such a row: 1/n for each of those n keys, or zeros. */
void mha_fill_empty_weights(const mha_plan *plan, const mha_rows *tile, size_t row);

/* The tile's first row among those of its task: row r of head g is number g * task_queries + r. */
MHA_INLINE size_t
mha_row_in_task(const mha_plan *plan, const mha_rows *task, const mha_rows *tile)
{
    return (tile->head - task->head) * plan->task_queries + tile->query - task->query;
}

/* Where the tile's rows stand in the task's statistics. */
MHA_INLINE char *
mha_statistics_at(const mha_plan *plan, const mha_rows *task, const mha_rows *tile, char *numbers)
{
    return numbers + mha_row_in_task(plan, task, tile) * plan->kernels->itemsize;
}

/* After the last block: the sinks of these rows, which begin with the tile's, join their sums. */
void mha_add_sinks(const mha_plan *plan, const mha_rows *tile, const char *max, char *sum);

/* Before the first block: rows that no block will touch are empty rows. */
void mha_clear_statistics(const mha_plan *plan, const mha_room *room);

/* After the last block: rows that are empty, if there may be any, and the statistics that were asked for. */
void mha_finish_task(const mha_plan *plan, const mha_rows *task, const mha_room *room, int has_empty);

#endif
