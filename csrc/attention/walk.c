/*
 * walk.c: where a walk (walk.h) begins, and how it enters a key block.
 */
#include "walk.h"

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
    if (plan->row_keys != NULL) {
        rows->row_keys = plan->row_keys + rows->query;
        rows->keys = mha_intervals_join(rows->row_keys, rows->rows);
        return;
    }
    rows->row_keys = arena->row_keys;
    rows->keys = mha_visible_rows(&args->visible, args->queries, args->keys, rows->item, rows->query, rows->rows,
                                  arena->row_keys);
}

static void
pack_rows(const mha_walk *walk, const mha_operand *rows, size_t depth, char *panels)
{
    const mha_kernels *k = walk->plan->kernels;
    const size_t first = walk->block.first_key;

    k->pack_panels(mha_operand_at(k, rows, walk->task->item, walk->task->key_head, first), rows->row_stride,
                   walk->packed.first - first, walk->packed.last - first, depth, panels);
}

/* Rows of keys or values, where they shall not be read as they lie. */
static void
copy_rows(mha_walk *walk, const mha_operand *rows, size_t cols)
{
    const mha_plan *plan = walk->plan;
    const mha_kernels *k = plan->kernels;
    const size_t row = mha_round_up(cols, k->lanes), at = (walk->packed.first - walk->block.first_key) * row;
    const char *first = mha_operand_at(k, rows, walk->task->item, walk->task->key_head, walk->packed.first);
    const uintptr_t places = (uintptr_t)first | (uintptr_t)(rows->row_stride * (ptrdiff_t)k->itemsize);

    walk->dense_rows = NULL; /* not those of the block before */
    if (plan->copies_rows == MHA_COPY_ALWAYS || places % (k->lanes * k->itemsize) != 0) {
        walk->dense_rows = walk->arena->dense_rows;
        k->copy_rows(walk->packed.last - walk->packed.first, cols, first, rows->row_stride,
                     walk->dense_rows + at * k->itemsize, (ptrdiff_t)row);
    }
}

int
mha_walk_enter_block(mha_walk *walk)
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
    if (plan->copies_rows != MHA_COPY_NEVER && walk->packs) {
        const int is_backward = plan->packs_values;
        copy_rows(walk, is_backward ? &args->k : &args->v, is_backward ? args->head_dim : args->value_dim);
    }
    walk->head = 0;
    return 1;
}
