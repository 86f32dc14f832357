/*
 * backward_tile.c: what both backward passes (backward.c, score_grads.c) do first: one tile's weights and the
 * gradients of its scores, computed again from the row statistics.
 */
#include "backward.h"

#include "runtime/common.h"

#include <string.h>

void
mha_backward_rows(const mha_plan *plan, const mha_rows *rows, const mha_room *room)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const size_t at = rows->query * k->itemsize, bytes = rows->rows * k->itemsize;
    const size_t head_at = (rows->item * args->heads + rows->head) * args->queries * k->itemsize;
    const mha_operand *out = &plan->grads->out, *grad = &plan->grads->grad_out;

    memcpy(room->max + at, (const char *)args->row_max + head_at + at, bytes);
    memcpy(room->sum + at, (const char *)args->row_sum + head_at + at, bytes);
    k->invert_sums(rows->rows, room->max + at, room->sum + at, room->inverse + at);
    k->row_dots(rows->rows, args->value_dim, mha_operand_at(k, grad, rows->item, rows->head, rows->query),
                grad->row_stride, mha_operand_at(k, out, rows->item, rows->head, rows->query), out->row_stride,
                room->delta + at);
}

/* Weights of the tile against the block, from its scores; exactly 0 where hidden and past the last key. */
static void
tile_weights(const mha_plan *plan, const mha_rows *tile, const mha_room *room, const mha_key_block *block)
{
    const mha_kernels *k = plan->kernels;

    for (size_t i = 0; i < tile->rows; i++) {
        char *row = room->scores + i * plan->score_stride * k->itemsize;
        const mha_interval seen = mha_interval_meet(mha_row_keys(tile, i), block->keys);
        const size_t first = seen.last > 0 ? seen.first - block->first_key : block->from;
        const size_t last = seen.last > 0 ? seen.last - block->first_key : block->from;
        const size_t stat = (tile->query + i) * k->itemsize;

        memset(row + block->from * k->itemsize, 0, (first - block->from) * k->itemsize);
        k->weights_row(last - first, row + first * k->itemsize, room->max + stat, room->inverse + stat,
                       row + first * k->itemsize);
        memset(row + last * k->itemsize, 0, (block->from + block->width - last) * k->itemsize);
    }
}

/*
 * How many keys of the block each row of the tile sees, one number for all or one for each; NULL if some row sees
 * others than the first ones.  *step_ret is the distance of two rows' numbers.
 */
static const size_t *
visible_keys(const mha_plan *plan, const mha_rows *tile, size_t *numbers, const mha_key_block *block, size_t *step_ret)
{
    const size_t from = block->first_key + block->from;

    *step_ret = !plan->same_visibility;
    if (plan->args->keep_mask.data != NULL) {
        return NULL;
    }
    if (plan->same_visibility) {
        return &block->visible;
    }
    for (size_t i = 0; i < tile->rows; i++) {
        const mha_interval seen = mha_interval_meet(mha_row_keys(tile, i), block->keys);
        if (seen.last > 0 && seen.first != from) {
            return NULL;
        }
        numbers[i] = seen.last > 0 ? seen.last - from : 0;
    }
    return numbers;
}

/* dS from the tile's scores and dP. */
static void
score_grads(const mha_plan *plan, const mha_rows *tile, const mha_room *room, const mha_key_block *block,
            double scale)
{
    const mha_kernels *k = plan->kernels;
    const int drop = plan->args->dropout > 0;
    const mha_interval keys = {block->first_key + block->from, block->first_key + block->from + block->width};
    const size_t at_once = drop ? plan->factor_rows : tile->rows;
    mha_rows some = *tile;
    size_t step;

    const size_t *visible = visible_keys(plan, tile, room->n_visible, block, &step);
    if (visible == NULL) {
        tile_weights(plan, tile, room, block);
    }
    for (size_t row = 0; row < tile->rows; row += at_once) {
        const size_t at = (row * plan->score_stride + block->from) * k->itemsize;
        const size_t stat = (tile->query + row) * k->itemsize;
        const mha_score_grads grads = {
            .rows = mha_min(at_once, tile->rows - row),
            .cols = block->width,
            .visible = visible != NULL ? visible + row * step : NULL,
            .visible_step = step,
            .max = visible != NULL ? room->max + stat : NULL,
            .inverse = visible != NULL ? room->inverse + stat : NULL,
            .weights = room->scores + at,
            .grads = room->grads + at,
            .factors = drop ? room->factors : NULL,
            .row_stride = (ptrdiff_t)plan->score_stride,
            .delta = room->delta + stat,
            .scale = scale,
        };
        if (drop) {
            some.query = tile->query + row;
            some.rows = grads.rows;
            mha_dropout_tile(plan, &some, keys, room->factors);
        }
        k->score_grads(&grads);
    }
}

void
mha_backward_tile(const mha_plan *plan, const mha_rows *tile, const mha_room *room, mha_key_block *block,
                  double scale)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;

    mha_score_tile(plan, tile, room, block);
    /* Whole panels, as the values were packed; additive scores may start inside one. */
    const size_t from = block->from / k->panel_width * k->panel_width;
    const mha_product product = {
        .rows = tile->rows,
        .cols = block->from + block->width - from,
        .depth = args->value_dim,
        .a = mha_operand_at(k, &plan->grads->grad_out, tile->item, tile->head, tile->query),
        .a_row = plan->grads->grad_out.row_stride,
        .a_step = 1,
        .b = {.data = room->value_panels + from * args->value_dim * k->itemsize, .layout = MHA_PANELS},
        .c = room->grads + from * k->itemsize,
        .c_row = (ptrdiff_t)plan->score_stride,
        .scale = &plan->one,
    };
    k->product(&product);
    score_grads(plan, tile, room, block, scale);
}
