/*
 * walk.c: where a walk (walk.h) begins, and how it enters a key block.
 */
#include "rows.h"

#include "runtime/common.h"

void
mha_walk_describe_task(mha_walk *walk, size_t task)
{
    const mha_plan *plan = walk->plan;
    const mha_attention_args *args = walk->problem->args;
    const size_t head = task / plan->tasks_per_head;
    mha_rows *rows = &walk->task;

    rows->item = head / args->kv_heads;
    rows->key_head = head % args->kv_heads;
    rows->head = rows->key_head * walk->problem->group;
    rows->query = task % plan->tasks_per_head * plan->task_queries;
    rows->rows = mha_min(plan->task_queries, args->queries - rows->query);
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
    rows->row_keys = walk->room->row_keys;
    rows->keys = mha_visible_rows(&args->visible, args->queries, args->keys, rows->item, rows->query, rows->rows,
                                  walk->room->row_keys);
}

void
mha_walk_start_row(mha_walk *walk, const mha_walk *other, size_t row, mha_interval keys)
{
    mha_walk_init(walk, other->job, other->room);
    walk->task = other->tile;
    walk->task.query += row;
    walk->task.rows = 1;
    walk->task.row_keys = NULL;
    walk->task.keys = keys;
    mha_walk_start(walk, 1, keys);
    walk->prepares = 0;
}

/*
 * Rows at least FAR_ROWS bytes apart, as those of one head among the features of all, share few sets of the first
 * cache.  If the plan copies rows, tiles read them more than once, and so from a copy.  From ALIGN_QUERIES queries on,
 * a copy costs 1 %, but vectors that cross cache lines, as most of NumPy's large arrays do, cost 4 to 7 %: such rows
 * are copied, too (Xeon with AVX-512, 1,12,512,64 and 1,4,512,128).
 */
#define FAR_ROWS ((size_t)1024)
#define ALIGN_QUERIES ((size_t)256)

static const char *
first_row(const mha_walk *walk, const mha_operand *rows, size_t key)
{
    return mha_operand_at(walk->problem->kernels, rows, walk->task.item, walk->task.key_head, key);
}

static void
pack_rows(const mha_walk *walk, const mha_operand *rows, size_t depth, char *panels)
{
    const size_t first = walk->block.first_key;

    walk->problem->kernels->pack_panels(first_row(walk, rows, first), rows->row_stride, walk->keys_here.first - first,
                                        walk->keys_here.last - first, depth, panels);
}

/* Copies rows of keys or values if tiles should not read them in place. */
static void
copy_rows(mha_walk *walk, const mha_operand *rows, size_t cols)
{
    const mha_kernels *k = walk->problem->kernels;
    const size_t row = mha_round_up(cols, k->lanes), at = (walk->keys_here.first - walk->block.first_key) * row;
    const size_t stride = (size_t)(rows->row_stride < 0 ? -rows->row_stride : rows->row_stride);
    const char *first = first_row(walk, rows, walk->keys_here.first);
    const int far = stride > cols && stride * k->itemsize >= FAR_ROWS;
    const int aligned = ((uintptr_t)first | (stride * k->itemsize)) % (k->lanes * k->itemsize) == 0;

    walk->dense_rows = NULL; /* not the copy of the block before */
    if (far || (!aligned && walk->problem->args->queries >= ALIGN_QUERIES)) {
        walk->dense_rows = walk->room->dense_rows;
        k->copy_rows(walk->keys_here.last - walk->keys_here.first, cols, first, rows->row_stride,
                     walk->room->dense_rows + at * k->itemsize, (ptrdiff_t)row);
    }
}

/* Packs and copies what tiles will read of the keys and values of this block. */
static void
prepare_block(mha_walk *walk)
{
    const mha_attention_args *args = walk->problem->args;
    const int backward = walk->problem->pass == MHA_PASS_BACKWARD;

    if (walk->plan->way == MHA_WAY_PACKED) {
        pack_rows(walk, &args->k, args->head_dim, walk->room->panels);
    }
    if (backward) {
        pack_rows(walk, &args->v, args->value_dim, walk->room->value_panels);
    }
    if (walk->plan->copies_rows) {
        copy_rows(walk, backward ? &args->k : &args->v, backward ? args->head_dim : args->value_dim);
    }
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
    if (walk->prepares) {
        prepare_block(walk);
    }
    walk->head = 0;
    return 1;
}
