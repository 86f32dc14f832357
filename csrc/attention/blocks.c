/*
 * blocks.c: what a task does of a key block once, for all its tiles: keys are packed into panels, rows that lie badly
 * are copied.
 */
#include "blocks.h"

#include "operands.h"
#include "runtime/common.h"

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
