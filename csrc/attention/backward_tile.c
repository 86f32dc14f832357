/*
 * backward_tile.c: what both backward passes (backward.c, score_grads.c) do first: one tile's weights and the
 * gradients of its scores, computed again from the row statistics.
 */
#include "backward.h"

#include "runtime/common.h"

void
mha_backward_rows(const mha_walk *walk)
{
    const mha_kernels *k = walk->problem->kernels;
    const mha_operand *out = &walk->job->grads->out, *grad = &walk->job->grads->grad_out;
    const mha_rows *rows = &walk->task;

    mha_load_statistics(walk, rows);
    k->row_dots(rows->rows, walk->problem->args->value_dim,
                mha_operand_at(k, grad, rows->item, rows->head, rows->query), grad->row_stride,
                mha_operand_at(k, out, rows->item, rows->head, rows->query), out->row_stride, walk->room->delta);
}

/* dS from the tile's scores and dP. */
static void
score_grads(const mha_walk *walk, const mha_score_columns *columns, double scale)
{
    const mha_kernels *k = walk->problem->kernels;
    const mha_room *room = walk->room;
    const size_t first = walk->block.first_key + columns->from;
    const int drop = walk->problem->args->dropout > 0;
    const mha_interval keys = {first, first + columns->width};
    const size_t at = columns->from * k->itemsize, stat = walk->tile.place * k->itemsize;
    const mha_score_grads grads = {
        .rows = walk->tile.rows,
        .cols = columns->width,
        .visible = columns->visible,
        .max = room->max + stat,
        .inverse = room->inverse + stat,
        .weights = room->scores + at,
        .grads = room->grads + at,
        .factors = drop ? room->factors : NULL,
        .row_stride = (ptrdiff_t)walk->plan->score_stride,
        .delta = room->delta + stat,
        .scale = scale,
    };

    if (drop) {
        mha_draw_factors(walk, keys);
    }
    k->score_grads(&grads);
}

mha_score_columns
mha_backward_tile(const mha_walk *walk, double scale)
{
    const mha_kernels *k = walk->problem->kernels;
    const mha_operand *grad_out = &walk->job->grads->grad_out;
    const mha_rows *tile = &walk->tile;
    const size_t value_dim = walk->problem->args->value_dim;
    const mha_score_columns columns = mha_score_tile(walk);
    /* Whole panels, as the values were packed; additive scores may start inside one. */
    const size_t from = columns.from / k->panel_width * k->panel_width;
    const mha_product product = {
        .rows = tile->rows,
        .cols = columns.from + columns.width - from,
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
    score_grads(walk, &columns, scale);
    return columns;
}
