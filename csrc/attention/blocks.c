/*
 * blocks.c: what a task does of a key block once, for all its tiles: keys are packed into panels, rows that many
 * tiles read are copied.
 */
#include "blocks.h"

#include "operands.h"
#include "runtime/common.h"

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

/* Rows side by side: all tiles of the task then read them from whole cache lines. */
static void
copy_rows(mha_walk *walk, const mha_operand *rows, size_t cols)
{
    const mha_kernels *k = walk->problem->kernels;
    const size_t row = mha_round_up(cols, k->lanes), at = (walk->keys_here.first - walk->block.first_key) * row;

    walk->dense_rows = walk->room->dense_rows;
    k->copy_rows(walk->keys_here.last - walk->keys_here.first, cols, first_row(walk, rows, walk->keys_here.first),
                 rows->row_stride, walk->room->dense_rows + at * k->itemsize, (ptrdiff_t)row);
}

void
mha_prepare_block(mha_walk *walk)
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
