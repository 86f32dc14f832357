/*
 * backward_bias.c: the gradient of an additive bias, dS summed over the axes that it is
 * broadcast along.
 *
 * Several heads and items may add to one element, so tasks are split by query rows: all who add to
 * a row are in one task and come in a fixed order.  The price is a second computation of dS, paid
 * only by those who ask for this gradient.
 */
#include "backward.h"

#include "runtime/common.h"
#include "runtime/threads.h"

#include <string.h>

static char *
bias_grad_at(const mha_backward_plan *b, const mha_rows *tile, size_t row, size_t key)
{
    const mha_mask_result *x = &b->grads->grad_bias;
    const ptrdiff_t offset = (ptrdiff_t)tile->item * x->batch_stride + (ptrdiff_t)tile->head * x->head_stride +
                             (ptrdiff_t)(tile->query + row) * x->query_stride + (ptrdiff_t)key * x->key_stride;
    return (char *)x->data + offset * (ptrdiff_t)b->plan.kernels->itemsize;
}

/* Adds the bias gradients of the rows of one tile. */
static void
bias_rows(const mha_backward_plan *b, const mha_rows *tile, const mha_arena *arena)
{
    const mha_plan *plan = &b->plan;
    const mha_kernels *k = plan->kernels;
    const mha_key_block *block;
    mha_walk walk;

    mha_backward_rows(b, tile, arena);
    mha_walk_start(&walk, plan, tile, arena, 1, tile->keys);
    for (block = &walk.block; mha_walk_next(&walk);) {
        const size_t first = block->keys.first - block->first_key;
        mha_backward_tile(b, tile, arena, &walk.block, 1.0);
        for (size_t i = 0; i < tile->rows; i++) {
            k->add_row(block->keys.last - block->keys.first,
                       arena->grads + (i * plan->score_stride + first) * k->itemsize,
                       bias_grad_at(b, tile, i, block->keys.first), b->grads->grad_bias.key_stride);
        }
    }
}

static void
clear_bias_rows(const mha_backward_plan *b, const mha_rows *tile)
{
    const mha_attention_args *args = b->plan.args;

    for (size_t i = 0; i < tile->rows; i++) {
        for (size_t j = 0; j < args->keys; j++) {
            memset(bias_grad_at(b, tile, i, j), 0, b->plan.kernels->itemsize);
        }
    }
}

/* The rows of one tile of queries, for all items and heads: whoever else adds to them is in this task too. */
static void
bias_task(void *context, size_t task, unsigned worker)
{
    const mha_backward_plan *b = context;
    const mha_plan *plan = &b->plan;
    const mha_attention_args *args = plan->args;
    mha_arena arena;
    const mha_mask_result *bias = &b->grads->grad_bias;
    const int one_task = bias->query_stride == 0;
    const size_t first = one_task ? 0 : task * plan->tile_rows;
    const size_t last = one_task ? args->queries : mha_min(first + plan->tile_rows, args->queries);

    mha_plan_arena(plan, worker, &arena);
    for (int pass = 0; pass < 2; pass++) {
        for (size_t head_number = 0; head_number < args->batch * args->heads && !mha_interrupted();
             head_number++) {
            const size_t head = head_number % args->heads;
            mha_rows whole;
            mha_task_rows(plan, head_number / plan->group, &arena, &whole);
            whole.head = head;
            for (size_t row = first; row < last; row += plan->tile_rows) {
                mha_rows tile;
                mha_task_tile(plan, &whole, 0, row, &tile);
                tile.rows = mha_min(tile.rows, last - row);
                if (pass == 1) {
                    bias_rows(b, &tile, &arena);
                } else if ((bias->batch_stride != 0 || tile.item == 0) && (bias->head_stride != 0 || head == 0)) {
                    clear_bias_rows(b, &tile);
                }
            }
        }
    }
}

void
mha_backward_bias(mha_backward_plan *b)
{
    const size_t tiles = mha_ceil_div(b->plan.args->queries, b->plan.tile_rows);
    const size_t n_tasks = b->grads->grad_bias.query_stride == 0 ? mha_min(tiles, 1) : tiles;

    mha_parallel_for(n_tasks, b->plan.n_workers, bias_task, b);
}
