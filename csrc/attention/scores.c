/*
 * scores.c: scores of one tile of query rows against one block of keys, with every kind of mask applied.
 */
#include "scores.h"

#include "runtime/common.h"

#include <float.h>
#include <math.h>

static void
dot_scores(const mha_walk *walk, const mha_score_columns *columns)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_rows *tile = &walk->tile;
    const mha_key_block *block = &walk->block;
    const mha_room *room = walk->room;
    mha_product product = {
        .rows = tile->rows,
        .cols = columns->width,
        .depth = args->head_dim,
        .part = MHA_SCORE_PART,
        .a = mha_operand_at(k, &args->q, tile->item, tile->head, tile->query),
        .a_row = args->q.row_stride,
        .a_step = 1,
        .c_row = (ptrdiff_t)walk->plan->score_stride,
        .scale = &walk->problem->scale,
    };
    if (walk->plan->way == MHA_WAY_IN_PLACE) { /* keys in place: only the visible ones */
        product.cols = block->keys.last - block->keys.first;
        product.b.data = mha_operand_at(k, &args->k, tile->item, tile->key_head, block->keys.first);
        product.b.layout = MHA_COLUMNS;
        product.b.stride = args->k.row_stride;
        product.b.panel = room->panels;
        product.c = mha_score_at(walk, room->scores, 0, block->keys.first);
    } else {
        product.b.data = room->panels + columns->from * args->head_dim * k->itemsize;
        product.b.layout = MHA_PANELS;
        product.c = room->scores + columns->from * k->itemsize;
    }
    k->product(&product);
}

mha_additive
mha_describe_additive(const mha_walk *walk, const mha_rows *rows, mha_interval keys)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;

    return (mha_additive){
        .rows = rows->rows,
        .keys = keys.last - keys.first,
        .depth = args->head_dim,
        .q = mha_operand_at(k, &args->q, rows->item, rows->head, rows->query),
        .k = mha_operand_at(k, &args->k, rows->item, rows->key_head, keys.first),
        .w = args->additive_weights,
        .q_row = args->q.row_stride,
        .k_row = args->k.row_stride,
        .exps = walk->room->panels,
        .scale = walk->problem->score_scale,
    };
}

static void
additive_scores(const mha_walk *walk)
{
    mha_additive additive = mha_describe_additive(walk, &walk->tile, walk->block.keys);

    additive.scores = mha_score_at(walk, walk->room->scores, 0, walk->block.keys.first);
    additive.scores_row = (ptrdiff_t)walk->plan->score_stride;
    additive.scores_step = 1;
    walk->problem->kernels->additive_scores(&additive);
}

static size_t
clamp_key(int64_t key, mha_interval keys)
{
    return key <= (int64_t)keys.first ? keys.first : mha_min((size_t)key, keys.last);
}

mha_relative
mha_relative_keys(const mha_attention_args *args, size_t query, mha_interval keys)
{
    const int64_t reach = (int64_t)args->relative_reach;
    const int64_t diagonal = mha_diagonal(&args->visible, args->queries, args->keys, query);
    const size_t near = clamp_key(diagonal - reach, keys);
    const size_t far = mha_max(clamp_key(diagonal + reach + 1, keys), near);

    return (mha_relative){near, far, near < far ? (size_t)((int64_t)near - diagonal + reach) : 0};
}

/* scores[0] is the score of the first of these keys. */
static void
add_relative_bias(const mha_walk *walk, size_t row, mha_interval keys, char *scores)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_relative r = mha_relative_keys(args, walk->tile.query + row, keys);
    const size_t last = 2 * args->relative_reach;
    const char *table = (const char *)args->relative_bias + walk->tile.head * (last + 1) * k->itemsize;

    k->add_bias(scores, r.near - keys.first, table, 0);
    k->add_bias(scores + (r.near - keys.first) * k->itemsize, r.far - r.near, table + r.at * k->itemsize, 1);
    k->add_bias(scores + (r.far - keys.first) * k->itemsize, keys.last - r.far, table + last * k->itemsize, 0);
}

static void
cap_scores(const mha_walk *walk, const mha_score_columns *columns)
{
    const mha_attention_args *args = walk->problem->args;
    const size_t at = columns->from * walk->problem->kernels->itemsize;
    /* Scores are multiplied by the cap's inverse.  For caps from `least` to 1 / least, both are normal numbers. */
    const double least = args->dtype == MHA_F32 ? FLT_MIN : DBL_MIN;
    const mha_cap cap = {
        .rows = walk->tile.rows,
        .cols = columns->width,
        .scores = walk->room->scores + at,
        .slopes = walk->problem->pass == MHA_PASS_BACKWARD ? walk->room->slopes + at : NULL,
        .row_stride = (ptrdiff_t)walk->plan->score_stride,
        .cap = args->softcap < least       ? least
               : args->softcap > 1 / least ? 1 / least
                                           : args->softcap,
    };
    walk->problem->kernels->cap_scores(&cap);
}

/* Adds to the scores of a row what the caller wants added, then hides the keys that the keep_mask hides. */
static void
apply_to_row(const mha_walk *walk, size_t row, mha_interval keys)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_mask *bias = &args->bias, *keep = &args->keep_mask;
    const mha_rows *tile = &walk->tile;
    const size_t n = keys.last - keys.first;
    char *scores = mha_score_at(walk, walk->room->scores, row, keys.first);

    if (args->relative_bias != NULL) {
        add_relative_bias(walk, row, keys, scores);
    }
    if (bias->data != NULL) {
        k->add_bias(scores, n, mha_mask_at(bias, k->itemsize, tile, row, keys.first), bias->key_stride);
    }
    if (keep->data != NULL) {
        k->keep_keys(scores, n, (const uint8_t *)mha_mask_at(keep, 1, tile, row, keys.first), keep->key_stride);
    }
}

static void
apply_masks(const mha_walk *walk)
{
    const mha_attention_args *args = walk->problem->args;
    const int any = args->relative_bias != NULL || args->bias.data != NULL || args->keep_mask.data != NULL;

    for (size_t i = 0; any && i < walk->tile.rows; i++) {
        const mha_interval seen = mha_row_keys_here(walk, i);

        if (seen.first < seen.last) {
            apply_to_row(walk, i, seen);
        }
    }
}

/* Hides, in each row, all keys outside the interval that the row sees. */
static void
hide_ends(const mha_walk *walk, const mha_score_columns *columns)
{
    const mha_kernels *k = walk->problem->kernels;
    const size_t start = walk->block.first_key + columns->from;

    for (size_t i = 0; i < walk->tile.rows; i++) {
        const mha_interval seen = mha_row_keys_here(walk, i);
        const size_t n = seen.last - seen.first;
        if (n != columns->visible) {
            const size_t first = n > 0 ? seen.first - start : 0, last = n > 0 ? seen.last - start : 0;
            char *row = mha_score_at(walk, walk->room->scores, i, start);
            k->fill(first, -HUGE_VAL, row);
            k->fill(columns->visible - last, -HUGE_VAL, row + last * k->itemsize);
        }
    }
}

/* From the first panel (of additive scores, vector) with a visible key on, to the end of a full vector. */
static mha_score_columns
columns_of(const mha_walk *walk)
{
    const mha_kernels *k = walk->problem->kernels;
    const mha_key_block *block = &walk->block;
    const size_t first = block->keys.first - block->first_key;
    const size_t from = first - first % (walk->plan->way == MHA_WAY_ADDITIVE ? k->lanes : k->panel_width);
    const size_t visible = block->keys.last - block->first_key - from;

    return (mha_score_columns){from, mha_round_up(visible, k->lanes), visible};
}

mha_score_columns
mha_score_tile(const mha_walk *walk)
{
    const mha_score_columns columns = columns_of(walk);

    if (walk->plan->way == MHA_WAY_ADDITIVE) {
        additive_scores(walk);
    } else {
        dot_scores(walk, &columns);
    }
    if (walk->problem->args->softcap > 0) {
        cap_scores(walk, &columns);
    }
    apply_masks(walk);
    if (!walk->problem->same_visibility) {
        hide_ends(walk, &columns);
    }
    return columns;
}
