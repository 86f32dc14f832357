/*
 * walk.c: how a task goes over its work: key blocks, in each the heads, in each tiles of query rows.  All passes
 * (forward.c, weights.c, backward.c, backward_bias.c) take this walk and differ in what they do where it stands.
 */
#include "attention.h"

#include "runtime/common.h"

void
mha_task_rows(const mha_plan *plan, size_t task, mha_arena *arena, mha_rows *rows)
{
    const mha_attention_args *args = plan->args;
    const size_t head = task / plan->tasks_per_head;

    rows->item = head / args->kv_heads;
    rows->key_head = head % args->kv_heads;
    rows->head = rows->key_head * plan->group;
    rows->query = task % plan->tasks_per_head * plan->task_queries;
    rows->rows = mha_min(plan->task_queries, args->queries - rows->query);
    rows->row_keys = NULL;
    if (plan->same_visibility) {
        rows->keys = mha_visible_keys(&args->visible, args->queries, args->keys, rows->item, rows->query);
        return;
    }
    rows->row_keys = arena->row_keys;
    for (size_t i = 0; i < rows->rows; i++) {
        arena->row_keys[i] = mha_visible_keys(&args->visible, args->queries, args->keys, rows->item, rows->query + i);
    }
    rows->keys = mha_intervals_join(arena->row_keys, rows->rows);
}

void
mha_task_tile(const mha_plan *plan, const mha_rows *task, size_t group_head, size_t row, mha_rows *tile)
{
    mha_task_head(task, group_head, tile);
    tile->query += row;
    tile->rows = mha_min(plan->tile_rows, task->rows - row);
    if (!plan->same_visibility) {
        tile->row_keys = task->row_keys + row;
        tile->keys = mha_intervals_join(tile->row_keys, tile->rows);
    }
}

void
mha_walk_start(mha_walk *walk, const mha_plan *plan, const mha_rows *task, const mha_arena *arena, size_t n_heads,
               mha_interval keys)
{
    walk->plan = plan;
    walk->task = task;
    walk->arena = arena;
    walk->keys = mha_interval_meet(task->keys, keys);
    walk->packs = 1;
    walk->next_key = task->rows > 0 ? mha_block_start(plan, walk->keys.first) : walk->keys.last;
    walk->n_heads = n_heads;
    walk->head = n_heads;
    walk->row = 0;
}

static void
pack_rows(const mha_walk *walk, const mha_operand *rows, size_t depth, char *panels)
{
    const mha_kernels *k = walk->plan->kernels;
    const size_t first = walk->block.first_key;

    k->pack_panels(mha_operand_at(k, rows, walk->task->item, walk->task->key_head, first), rows->row_stride,
                   walk->packed.first - first, walk->packed.last - first, depth, panels);
}

static int
enter_next_block(mha_walk *walk)
{
    const mha_plan *plan = walk->plan;
    const mha_attention_args *args = plan->args;

    if (walk->next_key >= walk->keys.last) {
        return 0;
    }
    walk->block.first_key = walk->next_key;
    walk->next_key += plan->key_block;
    walk->packed = mha_block_keys(plan, walk->keys, walk->block.first_key);
    if (plan->packs_keys && walk->packs) {
        pack_rows(walk, &args->k, args->head_dim, walk->arena->packed_keys);
    }
    if (plan->packs_values && walk->packs) {
        pack_rows(walk, &args->v, args->value_dim, walk->arena->packed_values);
    }
    walk->head = 0;
    return 1;
}

int
mha_walk_next(mha_walk *walk)
{
    for (;;) {
        if (walk->head >= walk->n_heads && !enter_next_block(walk)) {
            return 0;
        }
        mha_task_tile(walk->plan, walk->task, walk->head, walk->row, &walk->tile);
        walk->block.keys = mha_interval_meet(walk->tile.keys, walk->packed);
        walk->row += walk->plan->tile_rows;
        if (walk->row >= walk->task->rows) {
            walk->row = 0;
            walk->head++;
        }
        if (walk->block.keys.first < walk->block.keys.last) {
            return 1;
        }
    }
}
