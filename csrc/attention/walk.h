/*
 * walk.h: how a task goes over its work: key blocks, in each the heads, in each tiles of query rows.  All passes
 * (forward.c, weights.c, backward.c, score_grads.c) take this walk and differ in what they do where it stands.
 */
#ifndef MHA_WALK_H
#define MHA_WALK_H

#include "values.h"
#include "runtime/threads_interrupt.h"

/* Where a walk stands: `tile` meets `block`. */
typedef struct {
    const mha_plan *plan;
    const mha_rows *task;
    const mha_room *room;
    size_t n_heads;      /* 1, or those of the group */
    mha_interval keys;   /* of the task, as far as the walk goes */
    int prepares;        /* keys and values of a block are packed or copied when it is entered; starters may say 0 */
    size_t next_key;     /* where the next block begins */
    size_t head, row;    /* of the next tile */
    mha_interval keys_here; /* the task's keys in this block */
    const char *dense_rows; /* where rows of this block are copied to, or NULL: they are read where they lie */
    mha_rows tile;
    mha_key_block block;
} mha_walk;

/* Split task number into (item, key head, first query, number of queries), and fill room->row_keys. */
void mha_describe_task(const mha_plan *plan, size_t task, const mha_room *room, mha_rows *rows);

/*
 * Tiles are filled member by member: a whole struct is copied in vectors, and a vector load of what was
 * stored in words just before waits for tens of cycles, in every task.
 */

/* The rows of head `group_head` of the task. */
MHA_INLINE void
mha_describe_head(const mha_rows *task, size_t group_head, mha_rows *rows)
{
    rows->item = task->item;
    rows->head = task->head + group_head;
    rows->key_head = task->key_head;
    rows->query = task->query;
    rows->rows = task->rows;
    rows->row_keys = task->row_keys;
    rows->keys.first = task->keys.first;
    rows->keys.last = task->keys.last;
}

/* Rows [row, row + tile_rows) of head `group_head` of the task, cut at its end. */
MHA_INLINE void
mha_describe_tile(const mha_plan *plan, const mha_rows *task, size_t group_head, size_t row, mha_rows *tile)
{
    mha_describe_head(task, group_head, tile);
    tile->query += row;
    tile->rows = mha_min(plan->tile_rows, task->rows - row);
    if (!plan->same_visibility && tile->rows < task->rows) {
        tile->row_keys = task->row_keys + row;
        tile->keys = mha_intervals_join(tile->row_keys, tile->rows);
    }
}

/* Over those of the task's keys that are among `keys`, for n_heads of its heads from the first on. */
MHA_INLINE void
mha_walk_start(mha_walk *walk, const mha_plan *plan, const mha_rows *task, const mha_room *room, size_t n_heads,
               mha_interval keys)
{
    walk->plan = plan;
    walk->task = task;
    walk->room = room;
    walk->keys = mha_interval_meet(task->keys, keys);
    walk->prepares = 1;
    walk->next_key = task->rows > 0 ? mha_block_start(plan, walk->keys.first) : walk->keys.last;
    walk->n_heads = n_heads;
    walk->head = n_heads;
    walk->row = 0;
    walk->dense_rows = NULL;
}

/* On to the next block, before its first tile; 0 when there is none. */
int mha_walk_enter_block(mha_walk *walk);

/* On to the next tile that sees keys of its block; 0 when there is none. */
MHA_INLINE int
mha_walk_next(mha_walk *walk)
{
    do {
        if ((walk->head >= walk->n_heads && !mha_walk_enter_block(walk)) ||
            (walk->plan->watched && mha_interrupted())) { /* before every tile: a task may be many walks of one */
            return 0;
        }
        mha_describe_tile(walk->plan, walk->task, walk->head, walk->row, &walk->tile);
        walk->block.keys = mha_interval_meet(walk->tile.keys, walk->keys_here);
        walk->row += walk->plan->tile_rows;
        if (walk->row >= walk->task->rows) {
            walk->row = 0;
            walk->head++;
        }
    } while (walk->block.keys.first >= walk->block.keys.last);
    return 1;
}

#endif
