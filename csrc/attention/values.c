/*
 * values.c: a tile's weights on their way to the output: dropout, and products that keep hidden values out.
 */
#include "values.h"

#include "runtime/common.h"

#include <string.h>

/* 1 if some key of the block is visible to one row of the tile and hidden from another. */
static int
is_ragged(const mha_walk *walk)
{
    const mha_interval all = walk->block.keys;

    if (walk->problem->same_visibility || walk->problem->args->keep_mask.data != NULL) {
        return walk->problem->args->keep_mask.data != NULL;
    }
    for (size_t i = 0; i < walk->tile.rows; i++) {
        const mha_interval seen = mha_row_keys_here(walk, i);
        if (seen.first != all.first || seen.last != all.last) {
            return 1;
        }
    }
    return 0;
}

/* 1 if row `row` of the tile may see the key. */
static int
row_sees(const mha_walk *walk, size_t row, size_t key)
{
    const mha_mask *keep = &walk->problem->args->keep_mask;
    const mha_interval seen = mha_row_keys(&walk->tile, row);

    return key >= seen.first && key < seen.last &&
           (keep->data == NULL || *mha_mask_at(keep, 1, &walk->tile, row, key) != 0);
}

/*
 * Takes the product row by row, with 0 for the rows of b that the row may not see.  For the rare block
 * that holds NaN or infinity: 0 * NaN would leak from hidden keys into rows that may not see them.
 */
static void
product_of_visible(const mha_walk *walk, const mha_product *all, int rows_are_keys)
{
    const mha_kernels *k = walk->problem->kernels;
    const size_t row_bytes = all->cols * k->itemsize;
    char *rows = walk->room->visible_rows;

    for (size_t i = 0; i < all->rows; i++) {
        mha_product one = *all;
        for (size_t j = 0; j < all->depth; j++) {
            const size_t query = rows_are_keys ? j : i, key = walk->block.keys.first + (rows_are_keys ? i : j);
            if (row_sees(walk, query, key)) {
                const ptrdiff_t at = (ptrdiff_t)j * all->b.stride * (ptrdiff_t)k->itemsize;
                memcpy(rows + j * row_bytes, (const char *)all->b.data + at, row_bytes);
            } else {
                memset(rows + j * row_bytes, 0, row_bytes);
            }
        }
        one.rows = 1;
        one.a = (const char *)all->a + (ptrdiff_t)i * all->a_row * (ptrdiff_t)k->itemsize;
        one.b = (mha_right){.data = rows, .layout = MHA_ROWS, .stride = (ptrdiff_t)all->cols};
        one.c = (char *)all->c + (ptrdiff_t)i * all->c_row * (ptrdiff_t)k->itemsize;
        one.scale = (const char *)all->scale + i * all->scale_step * k->itemsize;
        k->product(&one);
    }
}

void
mha_guarded_product(const mha_walk *walk, const mha_product *product, int rows_are_keys)
{
    const mha_kernels *k = walk->problem->kernels;
    const int ragged = is_ragged(walk);

    /* A sum that goes on must not be spoilt: b is checked first.  Else c's first row, which met all of b, is enough. */
    if (ragged && product->accumulate &&
        !k->all_finite(product->depth, product->cols, product->b.data, product->b.stride)) {
        product_of_visible(walk, product, rows_are_keys);
        return;
    }
    k->product(product);
    if (ragged && !product->accumulate && !k->all_finite(1, product->cols, product->c, 0)) {
        product_of_visible(walk, product, rows_are_keys);
    }
}

void
mha_draw_factors(const mha_walk *walk, mha_interval keys)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_dropout dropout = {
        .rows = walk->tile.rows,
        .keys = keys.last - keys.first,
        .seed = args->seed,
        .item = args->first_item + walk->tile.item,
        .head = args->first_head + walk->tile.head,
        .query = args->visible.first_query + walk->tile.query,
        .key = args->visible.first_key + keys.first,
        .p = args->dropout,
        .factors = walk->room->factors,
        .factors_row = (ptrdiff_t)walk->plan->score_stride,
    };
    walk->problem->kernels->dropout_factors(&dropout);
}

void
mha_describe_product(const mha_walk *walk, char *numbers, int of_values, mha_product *product)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_rows *tile = &walk->tile;
    const mha_key_block *block = &walk->block;
    const char *copies = walk->dense_rows;
    const mha_operand *rows = of_values ? &args->v : &args->k;
    const size_t first = block->keys.first - block->first_key, cols = of_values ? args->value_dim : args->head_dim;
    const size_t dense = mha_round_up(cols, k->lanes);

    *product = (mha_product){
        .rows = tile->rows,
        .cols = cols,
        .depth = block->keys.last - block->keys.first,
        .part = of_values ? MHA_VALUE_PART : MHA_GRAD_PART,
        .first_step = first,
        .a = mha_score_at(walk, numbers, 0, block->keys.first),
        .a_row = (ptrdiff_t)walk->plan->score_stride,
        .a_step = 1,
        .b = {.data = copies != NULL ? copies + first * dense * k->itemsize
                                     : mha_operand_at(k, rows, tile->item, tile->key_head, block->keys.first),
              .layout = MHA_ROWS,
              .stride = copies != NULL ? (ptrdiff_t)dense : rows->row_stride,
              .padded = copies != NULL},
        .scale = &walk->problem->one,
    };
}

void
mha_drop_weights(const mha_walk *walk)
{
    const mha_kernels *k = walk->problem->kernels;
    const mha_interval keys = walk->block.keys;

    if (walk->problem->args->dropout > 0) {
        mha_draw_factors(walk, keys);
        k->multiply_rows(walk->tile.rows, keys.last - keys.first, mha_score_at(walk, walk->room->scores, 0, keys.first),
                         walk->room->factors, (ptrdiff_t)walk->plan->score_stride);
    }
}
