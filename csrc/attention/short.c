/*
 * short.c: attention over few keys, in which a row of scores is a vector or two.
 *
 * The work per head is then little more than the two products, and the scores stand transposed, a row for
 * each key: softmax_columns.inc says why.  Queries are packed in place of keys, and the product with the
 * values reads the weights by columns, which costs nothing.  All additions are those of forward.c,
 * in the same order.
 */
#include "attention.h"

/* Scores of the tile's queries (columns) against its keys (rows). */
static void
score_columns(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const mha_product product = {
        .rows = tile->keys.last,
        .cols = mha_round_up(tile->rows, k->lanes),
        .depth = args->head_dim,
        .depth_block = SIZE_MAX,
        .part = MHA_SCORE_PART,
        .a = mha_operand_at(k, &args->k, tile->item, tile->key_head, 0),
        .a_row = args->k.row_stride,
        .a_step = 1,
        .b = arena->packed_keys,
        .b_step = (ptrdiff_t)k->panel_width,
        .b_group = (ptrdiff_t)(k->panel_width * args->head_dim),
        .b_padded = 1,
        .c = arena->scores,
        .c_row = (ptrdiff_t)plan->score_stride,
        .scale = &plan->scale,
    };

    k->pack_panels(mha_operand_at(k, &args->q, tile->item, tile->head, tile->query), args->q.row_stride, 0, tile->rows,
                   args->head_dim, arena->packed_keys);
    k->product(&product);
}

/* How many keys each query sees, as numbers that compare with those of keys in vectors. */
static void
write_ends(const mha_plan *plan, const mha_rows *tile, char *ends)
{
    const size_t lanes = mha_round_up(tile->rows, plan->kernels->lanes);

    for (size_t i = 0; i < lanes; i++) {
        /* Few: an int becomes a float in one instruction.  No lane behind the rows looks empty. */
        const int seen = (int)(i < tile->rows ? tile->row_keys[i].last : tile->keys.last);
        if (plan->kernels->itemsize == sizeof(double)) {
            ((double *)(void *)ends)[i] = seen;
        } else {
            ((float *)(void *)ends)[i] = (float)seen;
        }
    }
}

int
mha_attend_columns(const mha_plan *plan, const mha_rows *task, const mha_rows *tile, const mha_arena *arena)
{
    const mha_kernels *k = plan->kernels;
    const mha_key_block block = {.keys = {0, tile->keys.last}};
    char *inverse = mha_state_at(plan, task, tile, arena->inverse);
    const mha_softmax_columns softmax = {
        .queries = tile->rows,
        .keys = tile->keys.last,
        .ends = tile->row_keys != NULL ? arena->ends : NULL,
        .scores = arena->scores,
        .scores_row = (ptrdiff_t)plan->score_stride,
        .max = mha_state_at(plan, task, tile, arena->max),
        .sum = mha_state_at(plan, task, tile, arena->sum),
        .inverse = inverse,
    };
    mha_product product;

    if (tile->row_keys != NULL) { /* some time before they are read as vectors */
        write_ends(plan, tile, arena->ends);
    }
    score_columns(plan, tile, arena);
    const int has_empty = k->softmax_columns(&softmax);
    if (plan->args->weights != NULL) {
        const size_t keys = plan->args->keys, at = mha_row_index(plan, tile) * keys * k->itemsize;
        k->weights_columns(&softmax, keys, (char *)plan->args->weights + at);
    }
    mha_describe_value_product(plan, tile, arena, &block, &product);
    product.a_row = 1;
    product.a_step = (ptrdiff_t)plan->score_stride;
    product.c = mha_result_at(k, &plan->args->out, tile->item, tile->head, tile->query);
    product.c_row = plan->args->out.row_stride;
    product.scale = inverse;
    product.scale_step = 1;
    mha_guarded_product(plan, tile, arena, &block, &product, 0);
    return has_empty;
}
