/*
 * scores.c: scores of one tile of query rows against one block of keys, with every kind of mask applied.
 */
#include "scores.h"

#include "runtime/common.h"

#include <float.h>

/*
 * Scores against packed keys.  Panels are whole: they start at the first that holds a visible key, and go on to a full
 * vector.
 */
static void
dot_scores(const mha_plan *plan, const mha_rows *tile, const mha_room *room, mha_key_block *block)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const size_t first = block->keys.first - block->first_key, end = block->keys.last - block->first_key;

    block->from = first / k->panel_width * k->panel_width;
    block->visible = end - block->from;
    block->width = mha_round_up(block->visible, k->lanes);
    mha_product product = {
        .rows = tile->rows,
        .cols = block->width,
        .depth = args->head_dim,
        .part = MHA_SCORE_PART,
        .a = mha_operand_at(k, &args->q, tile->item, tile->head, tile->query),
        .a_row = args->q.row_stride,
        .a_step = 1,
        .c_row = (ptrdiff_t)plan->score_stride,
        .scale = &plan->scale,
    };
    if (plan->way == MHA_WAY_IN_PLACE) { /* as they lie: none but the visible ones */
        product.cols = end - first;
        product.b.data = mha_operand_at(k, &args->k, tile->item, tile->key_head, block->keys.first);
        product.b.layout = MHA_COLUMNS;
        product.b.stride = args->k.row_stride;
        product.b.panel = room->panels;
        product.c = room->scores + first * k->itemsize;
    } else {
        product.b.data = room->panels + block->from * args->head_dim * k->itemsize;
        product.b.layout = MHA_PANELS;
        product.c = room->scores + block->from * k->itemsize;
    }
    k->product(&product);
}

mha_additive
mha_describe_additive(const mha_plan *plan, const mha_rows *tile, mha_interval keys)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const mha_additive additive = {
        .rows = tile->rows,
        .keys = keys.last - keys.first,
        .depth = args->head_dim,
        .q = mha_operand_at(k, &args->q, tile->item, tile->head, tile->query),
        .k = mha_operand_at(k, &args->k, tile->item, tile->key_head, keys.first),
        .w = args->additive_weights,
        .q_row = args->q.row_stride,
        .k_row = args->k.row_stride,
        .scale = args->scale,
    };
    return additive;
}

static void
additive_scores(const mha_plan *plan, const mha_rows *tile, const mha_room *room, mha_key_block *block)
{
    const mha_kernels *k = plan->kernels;
    mha_additive additive = mha_describe_additive(plan, tile, block->keys);
    const size_t first = block->keys.first - block->first_key, end = block->keys.last - block->first_key;

    block->from = first / k->lanes * k->lanes;
    block->visible = end - block->from;
    block->width = mha_round_up(block->visible, k->lanes);
    additive.scores = mha_score_at(plan, block, room->scores, 0, block->keys.first);
    additive.scores_row = (ptrdiff_t)plan->score_stride;
    additive.scores_step = 1;
    k->additive_scores(&additive);
}

static size_t
clamp_key(int64_t key, mha_interval keys)
{
    return key <= (int64_t)keys.first ? keys.first : mha_min((size_t)key, keys.last);
}

mha_relative
mha_relative_keys(const mha_plan *plan, size_t query, mha_interval keys)
{
    const mha_attention_args *args = plan->args;
    const int64_t reach = (int64_t)args->relative_reach;
    const int64_t diagonal = mha_diagonal(&args->visible, args->queries, args->keys, query);
    const size_t near = clamp_key(diagonal - reach, keys);
    const size_t far = mha_max(clamp_key(diagonal + reach + 1, keys), near);

    return (mha_relative){near, far, near < far ? (size_t)((int64_t)near - diagonal + reach) : 0};
}

/* scores[0] is that of the first of these keys. */
static void
add_relative_bias(const mha_plan *plan, const mha_rows *tile, size_t row, mha_interval keys, char *scores)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const mha_relative r = mha_relative_keys(plan, tile->query + row, keys);
    const size_t last = 2 * args->relative_reach;
    const char *table = (const char *)args->relative_bias + tile->head * (last + 1) * k->itemsize;

    k->add_bias(scores, r.near - keys.first, table, 0);
    k->add_bias(scores + (r.near - keys.first) * k->itemsize, r.far - r.near, table + r.at * k->itemsize, 1);
    k->add_bias(scores + (r.far - keys.first) * k->itemsize, keys.last - r.far, table + last * k->itemsize, 0);
}

/* The smallest caps count as the smallest normal number: their inverse, which scores are multiplied by, is infinite. */
static double
sound_cap(const mha_plan *plan)
{
    const double least = plan->args->dtype == MHA_F32 ? FLT_MIN : DBL_MIN;

    return plan->args->softcap < least ? least : plan->args->softcap;
}

static void
cap_scores(const mha_plan *plan, const mha_rows *tile, const mha_room *room, const mha_key_block *block)
{
    const size_t at = block->from * plan->kernels->itemsize;
    const mha_cap cap = {
        .rows = tile->rows,
        .cols = block->width,
        .scores = room->scores + at,
        .slopes = plan->keeps_slopes ? room->slopes + at : NULL,
        .row_stride = (ptrdiff_t)plan->score_stride,
        .cap = sound_cap(plan),
    };
    plan->kernels->cap_scores(&cap);
}

/* What the caller adds to scores or hides of them, in the order in which that happens. */
enum { RELATIVE_BIAS = 1, BIAS = 2, KEEP_MASK = 4 };

static void
apply_to_row(const mha_plan *plan, const mha_rows *tile, size_t row, mha_interval keys, char *scores, int terms)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const size_t n = keys.last - keys.first;

    if (terms & RELATIVE_BIAS) {
        add_relative_bias(plan, tile, row, keys, scores);
    }
    if (terms & BIAS) {
        k->add_bias(scores, n, mha_mask_at(&args->bias, k->itemsize, tile, row, keys.first), args->bias.key_stride);
    }
    if (terms & KEEP_MASK) {
        k->keep_keys(scores, n, (const uint8_t *)mha_mask_at(&args->keep_mask, 1, tile, row, keys.first),
                     args->keep_mask.key_stride);
    }
}

static void
apply_by_rows(const mha_plan *plan, const mha_rows *tile, const mha_room *room, const mha_key_block *block, int terms)
{
    for (size_t i = 0; i < tile->rows && terms; i++) {
        const mha_interval seen = mha_interval_meet(mha_row_keys(tile, i), block->keys);
        if (seen.first < seen.last) {
            apply_to_row(plan, tile, i, seen, mha_score_at(plan, block, room->scores, i, seen.first), terms);
        }
    }
}

/* Does a key's part of the mask lie side by side for all queries, as that of a transposed array? */
static int
lies_by_keys(const mha_mask *mask)
{
    return mask->query_stride == 1 && mask->key_stride != 1;
}

/* What lies by keys meets all rows and keys of the tile in squares: what a row may not see is hidden afterwards. */
static void
apply_terms(const mha_plan *plan, const mha_rows *tile, const mha_room *room, const mha_key_block *block)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const mha_mask *bias = &args->bias, *keep = &args->keep_mask;
    const size_t first = block->keys.first, n = block->keys.last - first;
    const ptrdiff_t stride = (ptrdiff_t)plan->score_stride;
    char *scores = mha_score_at(plan, block, room->scores, 0, first);
    int terms = (args->relative_bias != NULL ? RELATIVE_BIAS : 0) | (bias->data != NULL ? BIAS : 0) |
                (keep->data != NULL ? KEEP_MASK : 0);

    if (terms & BIAS && lies_by_keys(bias)) {
        apply_by_rows(plan, tile, room, block, terms & RELATIVE_BIAS);
        k->add_bias_by_keys(tile->rows, n, scores, stride, mha_mask_at(bias, k->itemsize, tile, 0, first),
                            bias->key_stride);
        terms &= KEEP_MASK;
    }
    if (terms & KEEP_MASK && lies_by_keys(keep)) {
        apply_by_rows(plan, tile, room, block, terms & ~KEEP_MASK);
        k->keep_by_keys(tile->rows, n, scores, stride, (const uint8_t *)mha_mask_at(keep, 1, tile, 0, first),
                        keep->key_stride);
        return;
    }
    apply_by_rows(plan, tile, room, block, terms);
}

/* What the ends of rows hide: all that lies outside of the keys that a row sees. */
static void
hide_ends(const mha_plan *plan, const mha_rows *tile, const mha_room *room, const mha_key_block *block)
{
    const mha_kernels *k = plan->kernels;

    for (size_t i = 0; i < tile->rows; i++) {
        const mha_interval seen = mha_interval_meet(mha_row_keys(tile, i), block->keys);
        const size_t n = seen.last - seen.first, start = block->first_key + block->from;
        if (n != block->visible) {
            k->hide_keys(room->scores + (i * plan->score_stride + block->from) * k->itemsize, block->visible,
                         n > 0 ? seen.first - start : 0, n > 0 ? seen.last - start : 0);
        }
    }
}

void
mha_score_tile(const mha_plan *plan, const mha_rows *tile, const mha_room *room, mha_key_block *block)
{
    if (plan->way == MHA_WAY_ADDITIVE) {
        additive_scores(plan, tile, room, block);
    } else {
        dot_scores(plan, tile, room, block);
    }
    if (plan->args->softcap > 0) {
        cap_scores(plan, tile, room, block);
    }
    apply_terms(plan, tile, room, block);
    if (!plan->same_visibility) {
        hide_ends(plan, tile, room, block);
    }
}
