/*
 * values.c: a tile's weights on their way to the output: dropout, and products that keep hidden values out.
 */
#include "values.h"

#include "runtime/common.h"

#include <string.h>

/* 1 if some key of the block is visible to one row of the tile and hidden from another. */
static int
is_ragged(const mha_plan *plan, const mha_rows *tile, const mha_key_block *block)
{
    if (plan->same_visibility || plan->args->keep_mask.data != NULL) {
        return plan->args->keep_mask.data != NULL;
    }
    for (size_t i = 0; i < tile->rows; i++) {
        const mha_interval seen = mha_interval_meet(mha_row_keys(tile, i), block->keys);
        if (seen.first != block->keys.first || seen.last != block->keys.last) {
            return 1;
        }
    }
    return 0;
}

/* 1 if row `row` of the tile may see the key. */
static int
row_sees(const mha_plan *plan, const mha_rows *tile, size_t row, size_t key)
{
    const mha_interval seen = mha_row_keys(tile, row);

    if (key < seen.first || key >= seen.last) {
        return 0;
    }
    return plan->args->keep_mask.data == NULL || *mha_mask_at(&plan->args->keep_mask, 1, tile, row, key) != 0;
}

/*
 * The product row by row, with the rows of b that its row may not see replaced by 0.  For the rare
 * block that holds NaN or infinity: 0 * NaN would leak from hidden keys into rows that hide them.
 */
static void
product_of_visible(const mha_plan *plan, const mha_rows *tile, const mha_room *room, const mha_key_block *block,
                   const mha_product *all, int rows_are_keys)
{
    const size_t itemsize = plan->kernels->itemsize, row_bytes = all->cols * itemsize;

    for (size_t i = 0; i < all->rows; i++) {
        mha_product one = *all;
        for (size_t j = 0; j < all->depth; j++) {
            const size_t query = rows_are_keys ? j : i, key = block->keys.first + (rows_are_keys ? i : j);
            char *b = room->visible_rows + j * row_bytes;
            if (row_sees(plan, tile, query, key)) {
                const ptrdiff_t at = (ptrdiff_t)j * all->b.stride * (ptrdiff_t)itemsize;
                memcpy(b, (const char *)all->b.data + at, row_bytes);
            } else {
                memset(b, 0, row_bytes);
            }
        }
        one.rows = 1;
        one.a = (const char *)all->a + (ptrdiff_t)i * all->a_row * (ptrdiff_t)itemsize;
        one.b = (mha_right){.data = room->visible_rows, .layout = MHA_ROWS, .stride = (ptrdiff_t)all->cols};
        one.c = (char *)all->c + (ptrdiff_t)i * all->c_row * (ptrdiff_t)itemsize;
        one.scale = (const char *)all->scale + i * all->scale_step * itemsize;
        plan->kernels->product(&one);
    }
}

void
mha_guarded_product(const mha_plan *plan, const mha_rows *tile, const mha_room *room, const mha_key_block *block,
                    const mha_product *product, int rows_are_keys)
{
    const mha_kernels *k = plan->kernels;
    const int ragged = is_ragged(plan, tile, block);

    /* What is added to must be known to stay sound before.  Else a first row tells afterwards: each meets all of b. */
    if (ragged && product->accumulate &&
        !k->all_finite(product->depth, product->cols, product->b.data, product->b.stride)) {
        product_of_visible(plan, tile, room, block, product, rows_are_keys);
        return;
    }
    k->product(product);
    if (ragged && !product->accumulate && !k->all_finite(1, product->cols, product->c, 0)) {
        product_of_visible(plan, tile, room, block, product, rows_are_keys);
    }
}

void
mha_dropout_tile(const mha_plan *plan, const mha_rows *tile, mha_interval keys, char *factors)
{
    const mha_attention_args *args = plan->args;
    const mha_dropout dropout = {
        .rows = tile->rows,
        .keys = keys.last - keys.first,
        .seed = args->seed,
        .item = args->first_item + tile->item,
        .head = args->first_head + tile->head,
        .query = args->visible.first_query + tile->query,
        .key = args->visible.first_key + keys.first,
        .p = args->dropout,
        .factors = factors,
        .factors_row = (ptrdiff_t)plan->score_stride,
    };
    plan->kernels->dropout_factors(&dropout);
}

void
mha_describe_product(const mha_plan *plan, const mha_rows *tile, const mha_key_block *block, const char *numbers,
                     const char *dense_rows, int of_values, mha_product *product)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const mha_operand *rows = of_values ? &args->v : &args->k;
    const size_t first = block->keys.first - block->first_key, cols = of_values ? args->value_dim : args->head_dim;
    const size_t dense = mha_round_up(cols, k->lanes);

    *product = (mha_product){
        .rows = tile->rows,
        .cols = cols,
        .depth = block->keys.last - block->keys.first,
        .part = of_values ? MHA_VALUE_PART : MHA_GRAD_PART,
        .first_step = first,
        .a = mha_score_at(plan, block, numbers, 0, block->keys.first),
        .a_row = (ptrdiff_t)plan->score_stride,
        .a_step = 1,
        .b = {.data = dense_rows != NULL ? dense_rows + first * dense * k->itemsize
                                         : mha_operand_at(k, rows, tile->item, tile->key_head, block->keys.first),
              .layout = MHA_ROWS,
              .stride = dense_rows != NULL ? (ptrdiff_t)dense : rows->row_stride,
              .padded = dense_rows != NULL},
        .scale = &plan->one,
    };
}

void
mha_drop_weights(const mha_plan *plan, const mha_rows *tile, const mha_room *room, const mha_key_block *block)
{
    const mha_kernels *k = plan->kernels;
    const size_t at_once = plan->factor_rows;
    mha_rows some = *tile;

    for (size_t row = 0; row < tile->rows; row += at_once) {
        some.query = tile->query + row;
        some.rows = mha_min(at_once, tile->rows - row);
        mha_dropout_tile(plan, &some, block->keys, room->factors);
        k->multiply_rows(some.rows, block->keys.last - block->keys.first,
                         mha_score_at(plan, block, room->scores, row, block->keys.first), room->factors,
                         (ptrdiff_t)plan->score_stride);
    }
}
