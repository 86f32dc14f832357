/*
 * backward_tile.c: what both backward passes (backward.c, score_grads.c) do first: one tile's weights and the
 * gradients of its scores, computed again from the row statistics.
 */
#include "backward.h"

#include "runtime/common.h"

#include <string.h>

void
mha_backward_rows(mha_walk *walk)
{
    const mha_kernels *k = walk->problem->kernels;
    const mha_operand *out = &walk->job->grads->out, *grad = &walk->job->grads->grad_out;
    const mha_rows *rows = &walk->tile;

    mha_walk_describe_head(walk, 0);
    mha_load_statistics(walk);
    k->row_dots(rows->rows, walk->problem->args->value_dim,
                mha_operand_at(k, grad, rows->item, rows->head, rows->query), grad->row_stride,
                mha_operand_at(k, out, rows->item, rows->head, rows->query), out->row_stride, walk->room->delta);
}

/* Weights of the tile against the block, from its scores; exactly 0 where hidden and past the last key. */
static void
tile_weights(const mha_walk *walk)
{
    const mha_kernels *k = walk->problem->kernels;
    const mha_key_block *block = &walk->block;
    const char *max = mha_statistics_at(walk, walk->room->max);
    const char *inverse = mha_statistics_at(walk, walk->room->inverse);

    for (size_t i = 0; i < walk->tile.rows; i++) {
        char *row = walk->room->scores + i * walk->plan->score_stride * k->itemsize;
        const mha_interval seen = mha_row_keys_here(walk, i);
        const size_t first = seen.last > 0 ? seen.first - block->first_key : block->from;
        const size_t last = seen.last > 0 ? seen.last - block->first_key : block->from;
        memset(row + block->from * k->itemsize, 0, (first - block->from) * k->itemsize);
        k->weights_row(last - first, row + first * k->itemsize, max + i * k->itemsize, inverse + i * k->itemsize,
                       row + first * k->itemsize);
        memset(row + last * k->itemsize, 0, (block->from + block->width - last) * k->itemsize);
    }
}

/*
 * How many keys of the block each row of the tile sees, one number for all or one for each; NULL if some row sees
 * others than the first ones.
 */
static const size_t *
visible_keys(const mha_walk *walk)
{
    const size_t from = walk->block.first_key + walk->block.from;
    size_t *numbers = walk->room->n_visible;

    if (walk->problem->args->keep_mask.data != NULL) {
        return NULL;
    }
    if (walk->problem->same_visibility) {
        return &walk->block.visible;
    }
    for (size_t i = 0; i < walk->tile.rows; i++) {
        const mha_interval seen = mha_row_keys_here(walk, i);
        if (seen.last > 0 && seen.first != from) {
            return NULL;
        }
        numbers[i] = seen.last > 0 ? seen.last - from : 0;
    }
    return numbers;
}

/* dS from the tile's scores and dP. */
static void
score_grads(const mha_walk *walk, double scale)
{
    const mha_kernels *k = walk->problem->kernels;
    const mha_room *room = walk->room;
    const mha_key_block *block = &walk->block;
    const int drop = walk->problem->args->dropout > 0;
    const mha_interval keys = {block->first_key + block->from, block->first_key + block->from + block->width};
    const size_t rows = walk->tile.rows, at_once = drop ? walk->plan->factor_rows : rows;
    const size_t step = !walk->problem->same_visibility;
    const size_t *visible = visible_keys(walk);

    if (visible == NULL) {
        tile_weights(walk);
    }
    for (size_t row = 0; row < rows; row += at_once) {
        const size_t at = (row * walk->plan->score_stride + block->from) * k->itemsize;
        const size_t stat = (mha_row_in_task(walk) + row) * k->itemsize;
        const mha_score_grads grads = {
            .rows = mha_min(at_once, rows - row),
            .cols = block->width,
            .visible = visible != NULL ? visible + row * step : NULL,
            .visible_step = step,
            .max = visible != NULL ? room->max + stat : NULL,
            .inverse = visible != NULL ? room->inverse + stat : NULL,
            .weights = room->scores + at,
            .grads = room->grads + at,
            .factors = drop ? room->factors : NULL,
            .row_stride = (ptrdiff_t)walk->plan->score_stride,
            .delta = room->delta + stat,
            .scale = scale,
        };
        if (drop) {
            mha_dropout_rows(walk, row, grads.rows, keys);
        }
        k->score_grads(&grads);
    }
}

void
mha_backward_tile(mha_walk *walk, double scale)
{
    const mha_kernels *k = walk->problem->kernels;
    const mha_operand *grad_out = &walk->job->grads->grad_out;
    const mha_rows *tile = &walk->tile;
    const mha_key_block *block = &walk->block;
    const size_t value_dim = walk->problem->args->value_dim;

    mha_score_tile(walk);
    /* Whole panels, as the values were packed; additive scores may start inside one. */
    const size_t from = block->from / k->panel_width * k->panel_width;
    const mha_product product = {
        .rows = tile->rows,
        .cols = block->from + block->width - from,
        .depth = value_dim,
        .a = mha_operand_at(k, grad_out, tile->item, tile->head, tile->query),
        .a_row = grad_out->row_stride,
        .a_step = 1,
        .b = {.data = walk->room->value_panels + from * value_dim * k->itemsize, .layout = MHA_PANELS},
        .c = walk->room->grads + from * k->itemsize,
        .c_row = (ptrdiff_t)walk->plan->score_stride,
        .scale = &walk->problem->one,
    };
    k->product(&product);
    score_grads(walk, scale);
}
