/*
 * walk.c: where a walk (walk.h) begins, and how it enters a key block.
 */
#include "walk.h"

#include "runtime/common.h"

void
mha_describe_rows(const mha_walk *walk, size_t number, size_t place, mha_rows *rows)
{
    const mha_plan *plan = walk->plan;
    const mha_attention_args *args = walk->problem->args;
    const size_t together = plan->way == MHA_WAY_COLUMNS ? 1 : walk->problem->group;
    const size_t first_head = number / plan->tasks_per_head * together; /* counted through all items */

    rows->item = first_head / args->heads;
    rows->head = first_head % args->heads;
    rows->key_head = rows->head / walk->problem->group;
    rows->query = number % plan->tasks_per_head * plan->task_queries;
    rows->rows = mha_min(plan->task_queries, args->queries - rows->query);
    rows->place = place;
    rows->row_keys = NULL;
    if (walk->problem->same_visibility) {
        rows->keys = mha_visible_keys(&args->visible, args->queries, args->keys, rows->item, rows->query);
        return;
    }
    if (walk->job->row_keys != NULL) {
        rows->row_keys = walk->job->row_keys + rows->query;
        rows->keys = mha_intervals_join(rows->row_keys, rows->rows);
        return;
    }
    rows->row_keys = walk->room->row_keys + place;
    rows->keys = mha_visible_rows(&args->visible, args->queries, args->keys, rows->item, rows->query, rows->rows,
                                  walk->room->row_keys + place);
}

void
mha_walk_start_row(mha_walk *walk, const mha_walk *other, const mha_rows *rows, size_t row, mha_interval keys)
{
    mha_walk_init(walk, other->job, other->room);
    walk->task = *rows;
    walk->task.query += row;
    walk->task.place += row;
    walk->task.rows = 1;
    walk->task.row_keys = NULL;
    walk->task.keys = keys;
    mha_walk_start(walk, 1, keys);
}

int
mha_walk_enter_block(mha_walk *walk)
{
    const size_t first = walk->next_key;

    if (first >= walk->keys.last) {
        return 0;
    }
    walk->block.first_key = first;
    walk->next_key = first + walk->plan->key_block;
    walk->keys_here = mha_interval_meet(walk->keys, (mha_interval){first, walk->next_key});
    walk->is_new_block = 1;
    walk->head = 0;
    return 1;
}
