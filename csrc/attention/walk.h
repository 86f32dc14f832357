/*
 * walk.h: how a task goes over its work: over key blocks, in each block over heads, for each head over tiles of query
 * rows.  All passes (forward.c, weights.c, backward.c, score_grads.c) take this walk; each does its own work at a tile.
 */
#ifndef MHA_WALK_H
#define MHA_WALK_H

#include "job.h"
#include "runtime/threads_interrupt.h"

/* Rows of queries: of a task (`head` is then the first of its heads), of one of its heads, or of a tile. */
typedef struct {
    size_t item, head, key_head;
    size_t query, rows;           /* the first query, and the number of queries */
    size_t place;                 /* where the first row's statistics stand in the room */
    const mha_interval *row_keys; /* what each of these rows sees; NULL: all see `keys` */
    mha_interval keys;            /* what any of them sees */
} mha_rows;

/* The key block that a tile meets. */
typedef struct {
    size_t first_key;  /* of the block */
    mha_interval keys; /* those of the block that the tile sees */
} mha_key_block;

/* Where a worker stands in its task: `tile` meets `block`. */
typedef struct {
    const mha_attention_job *job;
    const mha_problem *problem;
    const mha_plan *plan;
    const mha_room *room;
    mha_rows task;          /* what the walk goes over; `head` is the first of n_heads */
    size_t n_heads;         /* 1, or all heads of the group */
    mha_interval keys;      /* those of the task's keys that the walk goes over */
    int is_new_block;       /* this is the first tile of its block: see mha_next_prepared in blocks.h */
    size_t next_key;        /* where the next block begins */
    size_t head, row;       /* of the next tile */
    mha_interval keys_here; /* the task's keys in this block */
    const char *dense_rows; /* where rows of this block were copied to, or NULL: they are read where they lie */
    mha_rows tile;
    mha_key_block block;
} mha_walk;

MHA_INLINE void
mha_walk_init(mha_walk *walk, const mha_attention_job *job, const mha_room *room)
{
    walk->job = job;
    walk->problem = &job->problem;
    walk->plan = &job->plan;
    walk->room = room;
}

/*
 * Describes the rows of task number `number` (MHA_WAY_COLUMNS: run), whose statistics stand at `place` in the room;
 * fills room->row_keys from there on if it needs them.
 */
void mha_describe_rows(const mha_walk *walk, size_t number, size_t place, mha_rows *rows);

/* What every task begins with. */
MHA_INLINE void
mha_walk_task(mha_walk *walk, const mha_attention_job *job, size_t task, unsigned worker)
{
    mha_walk_init(walk, job, &job->rooms[worker]);
    mha_describe_rows(walk, task, 0, &walk->task);
}

/*
 * *to = *from, member by member: a whole struct would be copied in vectors, and a vector load of words that were stored
 * just before waits for tens of cycles, in every task.
 */
MHA_INLINE void
mha_copy_rows(mha_rows *to, const mha_rows *from)
{
    to->item = from->item;
    to->head = from->head;
    to->key_head = from->key_head;
    to->query = from->query;
    to->rows = from->rows;
    to->place = from->place;
    to->row_keys = from->row_keys;
    to->keys.first = from->keys.first;
    to->keys.last = from->keys.last;
}

/* Describes all of the task's rows of head `group_head`. */
MHA_INLINE void
mha_describe_head(const mha_walk *walk, size_t group_head, mha_rows *rows)
{
    mha_copy_rows(rows, &walk->task);
    rows->head += group_head;
    rows->place += group_head * walk->plan->task_queries;
}

/* Describes rows [row, row + tile_rows) of the task's head `group_head`, cut at the task's end. */
MHA_INLINE void
mha_describe_tile(const mha_walk *walk, size_t group_head, size_t row, mha_rows *tile)
{
    const mha_rows *task = &walk->task;

    mha_describe_head(walk, group_head, tile);
    tile->query += row;
    tile->place += row;
    tile->rows = mha_min(walk->plan->tile_rows, task->rows - row);
    if (!walk->problem->same_visibility && tile->rows < task->rows) {
        tile->row_keys = task->row_keys + row;
        tile->keys = mha_intervals_join(tile->row_keys, tile->rows);
    }
}

/* Begins a walk over those of the task's keys that are among `keys`, for the first n_heads of its heads. */
MHA_INLINE void
mha_walk_start(mha_walk *walk, size_t n_heads, mha_interval keys)
{
    walk->keys = mha_interval_meet(walk->task.keys, keys);
    walk->next_key = walk->task.rows > 0 ? mha_block_start(walk->plan, walk->keys.first) : walk->keys.last;
    walk->n_heads = n_heads;
    walk->head = n_heads;
    walk->row = 0;
    walk->dense_rows = NULL;
}

/* Begins a walk of one query, number `row` of another walk's `rows`, over `keys`, which are read where they lie. */
void mha_walk_start_row(mha_walk *walk, const mha_walk *other, const mha_rows *rows, size_t row, mha_interval keys);

/* Goes on to the next block, before its first tile; 0 if there is none. */
int mha_walk_enter_block(mha_walk *walk);

/* Goes on to the next tile that sees keys of its block; 0 if there is none. */
MHA_INLINE int
mha_walk_next(mha_walk *walk)
{
    walk->is_new_block = 0;
    do {
        if ((walk->head >= walk->n_heads && !mha_walk_enter_block(walk)) ||
            (walk->problem->watched && mha_interrupted())) { /* at every tile: many walks have only one */
            return 0;
        }
        mha_describe_tile(walk, walk->head, walk->row, &walk->tile);
        walk->block.keys = mha_interval_meet(walk->tile.keys, walk->keys_here);
        walk->row += walk->plan->tile_rows;
        if (walk->row >= walk->task.rows) {
            walk->row = 0;
            walk->head++;
        }
    } while (walk->block.keys.first >= walk->block.keys.last);
    return 1;
}

#endif
