/*
 * tile.c: one tile of query rows against one block of keys: scores with every kind of mask applied, dropout, and
 * products that keep hidden values out.
 */
#include "attention.h"

#include "runtime/common.h"

#include <float.h>
#include <string.h>

/*
 * Rows so many bytes apart, as those of one head among the features of all, share few sets of the first cache: tiles of
 * so many queries read them more than once, and from a copy.  For more queries a copy costs 1 %, and vectors that cross
 * a line, as most do of NumPy's large arrays, 4 to 7 % (Xeon with AVX-512, 1,12,512,64 and 1,4,512,128).
 */
#define FAR_ROWS ((size_t)1024)
#define COPY_QUERIES ((size_t)48)
#define ALIGN_QUERIES ((size_t)256)

char *
mha_result_at(const mha_kernels *kernels, const mha_result *x, size_t item, size_t head, size_t row)
{
    const ptrdiff_t offset = (ptrdiff_t)item * x->batch_stride + (ptrdiff_t)head * x->head_stride +
                             (ptrdiff_t)row * x->row_stride;
    return (char *)x->data + offset * (ptrdiff_t)kernels->itemsize;
}

const char *
mha_operand_at(const mha_kernels *kernels, const mha_operand *x, size_t item, size_t head, size_t row)
{
    const mha_result same = {(void *)(uintptr_t)x->data, x->batch_stride, x->head_stride, x->row_stride};

    return mha_result_at(kernels, &same, item, head, row);
}

mha_interval
mha_row_keys(const mha_rows *tile, size_t row)
{
    return tile->row_keys != NULL ? tile->row_keys[row] : tile->keys;
}

mha_interval
mha_mean_keys(const mha_plan *plan, const mha_rows *tile, size_t row)
{
    const mha_attention_args *args = plan->args;
    const mha_interval seen = mha_row_keys(tile, row), all = {0, args->keys};

    const int masked = args->keep_mask.data != NULL || args->bias.data != NULL || args->relative_bias != NULL;

    return seen.first < seen.last && !masked ? seen : all;
}

/*
 * Scores against packed keys.  Panels are whole: they start at the first that holds a visible key, and go on to a full
 * vector.
 */
static void
dot_scores(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena, mha_key_block *block)
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
    if (plan->keys_in_rows) { /* as they lie: none but the visible ones */
        product.cols = end - first;
        product.b.data = mha_operand_at(k, &args->k, tile->item, tile->key_head, block->keys.first);
        product.b.layout = MHA_COLUMNS;
        product.b.stride = args->k.row_stride;
        product.b.panel = arena->packed_keys;
        product.c = arena->scores + first * k->itemsize;
    } else {
        product.b.data = arena->packed_keys + block->from * args->head_dim * k->itemsize;
        product.b.layout = MHA_PANELS;
        product.c = arena->scores + block->from * k->itemsize;
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
additive_scores(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena, mha_key_block *block)
{
    const mha_kernels *k = plan->kernels;
    mha_additive additive = mha_describe_additive(plan, tile, block->keys);
    const size_t first = block->keys.first - block->first_key, end = block->keys.last - block->first_key;

    block->from = first / k->lanes * k->lanes;
    block->visible = end - block->from;
    block->width = mha_round_up(block->visible, k->lanes);
    additive.scores = arena->scores + first * k->itemsize;
    additive.scores_row = (ptrdiff_t)plan->score_stride;
    additive.scores_step = 1;
    k->additive_scores(&additive);
}

/* Address of the mask's element for (row of the tile, key). */
static const char *
mask_at(const mha_mask *mask, size_t itemsize, const mha_rows *tile, size_t row, size_t key)
{
    const ptrdiff_t offset = (ptrdiff_t)tile->item * mask->batch_stride +
                             (ptrdiff_t)tile->head * mask->head_stride +
                             (ptrdiff_t)(tile->query + row) * mask->query_stride +
                             (ptrdiff_t)key * mask->key_stride;
    return (const char *)mask->data + offset * (ptrdiff_t)itemsize;
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
cap_scores(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena, const mha_key_block *block)
{
    const size_t at = block->from * plan->kernels->itemsize;
    const mha_cap cap = {
        .rows = tile->rows,
        .cols = block->width,
        .scores = arena->scores + at,
        .slopes = plan->keeps_slopes ? arena->slopes + at : NULL,
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
        k->add_bias(scores, n, mask_at(&args->bias, k->itemsize, tile, row, keys.first), args->bias.key_stride);
    }
    if (terms & KEEP_MASK) {
        k->keep_keys(scores, n, (const uint8_t *)mask_at(&args->keep_mask, 1, tile, row, keys.first),
                     args->keep_mask.key_stride);
    }
}

/* Keys that all rows meet before the next ones: of a mask whose keys lie apart, a cache line may serve many rows. */
static size_t
keys_at_once(const mha_attention_args *args, const mha_key_block *block, int terms)
{
    const ptrdiff_t bias = terms & BIAS ? args->bias.key_stride : 0;
    const ptrdiff_t keep = terms & KEEP_MASK ? args->keep_mask.key_stride : 0;

    return (bias != 0 && bias != 1) || (keep != 0 && keep != 1) ? 32 : block->keys.last - block->keys.first;
}

static void
apply_by_rows(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena, const mha_key_block *block, int terms)
{
    const size_t itemsize = plan->kernels->itemsize, step = keys_at_once(plan->args, block, terms);
    mha_interval keys = block->keys;

    for (; terms && keys.first < block->keys.last; keys.first += step) {
        keys.last = mha_min(keys.first + step, block->keys.last);
        for (size_t i = 0; i < tile->rows; i++) {
            const mha_interval seen = mha_interval_meet(mha_row_keys(tile, i), keys);
            const size_t at = i * plan->score_stride + seen.first - block->first_key;
            if (seen.first < seen.last) {
                apply_to_row(plan, tile, i, seen, arena->scores + at * itemsize, terms);
            }
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
apply_terms(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena, const mha_key_block *block)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const mha_mask *bias = &args->bias, *keep = &args->keep_mask;
    const size_t first = block->keys.first, n = block->keys.last - first;
    const ptrdiff_t stride = (ptrdiff_t)plan->score_stride;
    char *scores = arena->scores + (first - block->first_key) * k->itemsize;
    int terms = (args->relative_bias != NULL ? RELATIVE_BIAS : 0) | (bias->data != NULL ? BIAS : 0) |
                (keep->data != NULL ? KEEP_MASK : 0);

    if (terms & BIAS && lies_by_keys(bias)) {
        apply_by_rows(plan, tile, arena, block, terms & RELATIVE_BIAS);
        k->add_bias_by_keys(tile->rows, n, scores, stride, mask_at(bias, k->itemsize, tile, 0, first),
                            bias->key_stride);
        terms &= KEEP_MASK;
    }
    if (terms & KEEP_MASK && lies_by_keys(keep)) {
        apply_by_rows(plan, tile, arena, block, terms & ~KEEP_MASK);
        k->keep_by_keys(tile->rows, n, scores, stride, (const uint8_t *)mask_at(keep, 1, tile, 0, first),
                        keep->key_stride);
        return;
    }
    apply_by_rows(plan, tile, arena, block, terms);
}

/* What the ends of rows hide: all that lies outside of the keys that a row sees. */
static void
hide_ends(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena, const mha_key_block *block)
{
    const mha_kernels *k = plan->kernels;

    for (size_t i = 0; i < tile->rows; i++) {
        const mha_interval seen = mha_interval_meet(mha_row_keys(tile, i), block->keys);
        const size_t n = seen.last - seen.first, start = block->first_key + block->from;
        if (n != block->visible) {
            k->hide_keys(arena->scores + (i * plan->score_stride + block->from) * k->itemsize, block->visible,
                         n > 0 ? seen.first - start : 0, n > 0 ? seen.last - start : 0);
        }
    }
}

void
mha_score_tile(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena, mha_key_block *block)
{
    if (plan->args->additive_weights != NULL) {
        additive_scores(plan, tile, arena, block);
    } else {
        dot_scores(plan, tile, arena, block);
    }
    if (plan->args->softcap > 0) {
        cap_scores(plan, tile, arena, block);
    }
    apply_terms(plan, tile, arena, block);
    if (!plan->same_visibility) {
        hide_ends(plan, tile, arena, block);
    }
}

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
    return plan->args->keep_mask.data == NULL || *mask_at(&plan->args->keep_mask, 1, tile, row, key) != 0;
}

/*
 * The product row by row, with the rows of b that its row may not see replaced by 0.  For the rare
 * block that holds NaN or infinity: 0 * NaN would leak from hidden keys into rows that hide them.
 */
static void
product_of_visible(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena, const mha_key_block *block,
                   const mha_product *all, int rows_are_keys)
{
    const size_t itemsize = plan->kernels->itemsize, row_bytes = all->cols * itemsize;

    for (size_t i = 0; i < all->rows; i++) {
        mha_product one = *all;
        for (size_t j = 0; j < all->depth; j++) {
            const size_t query = rows_are_keys ? j : i, key = block->keys.first + (rows_are_keys ? i : j);
            char *b = arena->masked_values + j * row_bytes;
            if (row_sees(plan, tile, query, key)) {
                const ptrdiff_t at = (ptrdiff_t)j * all->b.stride * (ptrdiff_t)itemsize;
                memcpy(b, (const char *)all->b.data + at, row_bytes);
            } else {
                memset(b, 0, row_bytes);
            }
        }
        one.rows = 1;
        one.a = (const char *)all->a + (ptrdiff_t)i * all->a_row * (ptrdiff_t)itemsize;
        one.b = (mha_right){.data = arena->masked_values, .layout = MHA_ROWS, .stride = (ptrdiff_t)all->cols};
        one.c = (char *)all->c + (ptrdiff_t)i * all->c_row * (ptrdiff_t)itemsize;
        one.scale = (const char *)all->scale + i * all->scale_step * itemsize;
        plan->kernels->product(&one);
    }
}

void
mha_guarded_product(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena, const mha_key_block *block,
                    const mha_product *product, int rows_are_keys)
{
    const mha_kernels *k = plan->kernels;
    const int ragged = is_ragged(plan, tile, block);

    /* What is added to must be known to stay sound before.  Else a first row tells afterwards: each meets all of b. */
    if (ragged && product->accumulate &&
        !k->all_finite(product->depth, product->cols, product->b.data, product->b.stride)) {
        product_of_visible(plan, tile, arena, block, product, rows_are_keys);
        return;
    }
    k->product(product);
    if (ragged && !product->accumulate && !k->all_finite(1, product->cols, product->c, 0)) {
        product_of_visible(plan, tile, arena, block, product, rows_are_keys);
    }
}

size_t
mha_factor_rows(const mha_plan *plan)
{
    const size_t fit = mha_caches_active().first / 3 / (plan->score_stride * plan->kernels->itemsize);

    return mha_min(mha_max(fit, 1), plan->tile_rows);
}

void
mha_dropout_tile(const mha_plan *plan, const mha_rows *tile, mha_interval keys, char *factors)
{
    const mha_attention_args *args = plan->args;
    const mha_dropout dropout = {
        .rows = tile->rows,
        .keys = keys.last - keys.first,
        .seed = args->seed,
        .item = plan->first_item + args->first_item + tile->item,
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
mha_describe_key_product(const mha_plan *plan, const mha_rows *tile, const mha_key_block *block, const char *numbers,
                         const mha_operand *rows, size_t cols, mha_product *product)
{
    const mha_kernels *k = plan->kernels;
    const size_t first = block->keys.first - block->first_key;
    *product = (mha_product){
        .rows = tile->rows,
        .cols = cols,
        .depth = block->keys.last - block->keys.first,
        .part = MHA_GRAD_PART,
        .first_step = first,
        .a = numbers + first * k->itemsize,
        .a_row = (ptrdiff_t)plan->score_stride,
        .a_step = 1,
        .b = {.data = mha_operand_at(k, rows, tile->item, tile->key_head, block->keys.first),
              .layout = MHA_ROWS,
              .stride = rows->row_stride},
        .scale = &plan->one,
    };
}

mha_copying
mha_copying_of(const mha_plan *plan, const mha_operand *rows, size_t cols)
{
    const size_t stride = (size_t)(rows->row_stride < 0 ? -rows->row_stride : rows->row_stride);

    if (plan->args->queries >= COPY_QUERIES && stride > cols && stride * plan->kernels->itemsize >= FAR_ROWS) {
        return MHA_COPY_ALWAYS;
    }
    return plan->args->queries >= ALIGN_QUERIES ? MHA_COPY_MISALIGNED : MHA_COPY_NEVER;
}

void
mha_read_dense_rows(const mha_plan *plan, const char *dense_rows, const mha_key_block *block, size_t cols,
                    mha_product *product)
{
    const size_t row = mha_round_up(cols, plan->kernels->lanes), first = block->keys.first - block->first_key;

    if (dense_rows != NULL) {
        product->b.data = dense_rows + first * row * plan->kernels->itemsize;
        product->b.stride = (ptrdiff_t)row;
        product->b.padded = 1;
    }
}

void
mha_describe_value_product(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena,
                           const mha_key_block *block, mha_product *product)
{
    mha_describe_key_product(plan, tile, block, arena->scores, &plan->args->v, plan->args->value_dim, product);
    product->part = MHA_VALUE_PART;
}

void
mha_drop_weights(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena, const mha_key_block *block)
{
    const mha_kernels *k = plan->kernels;
    const size_t first = block->keys.first - block->first_key, at_once = plan->factor_rows;
    mha_rows some = *tile;

    for (size_t row = 0; row < tile->rows; row += at_once) {
        some.query = tile->query + row;
        some.rows = mha_min(at_once, tile->rows - row);
        mha_dropout_tile(plan, &some, block->keys, arena->factors);
        k->multiply_rows(some.rows, block->keys.last - block->keys.first,
                         arena->scores + (row * plan->score_stride + first) * k->itemsize, arena->factors,
                         (ptrdiff_t)plan->score_stride);
    }
}
