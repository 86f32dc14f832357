/*
 * needed.c: which rows of keys and values an item of a layer needs: those that some query sees.  Neither the others'
 * projections are computed, nor do they give anything to gradients: what stands in padding may be NaN.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer.h"

#include "attention/operands.h"
#include "runtime/common.h"

#include <math.h>
#include <string.h>

/* What masks say of one row of scores. */
typedef struct {
    const mha_attention_args *args;
    mha_rows row;      /* of one query */
    mha_interval keys; /* what it sees, masks apart */
} score_row;

/* seen[j] |= keep[j * stride], for n of them; 1 if any of these is kept. */
static int
mark_kept(const uint8_t *keep, ptrdiff_t stride, size_t n, uint8_t *restrict seen)
{
    uint8_t any = 0;

    if (stride == 0) {
        any = n > 0 ? *keep : 0;
        if (any) {
            memset(seen, 1, n);
        }
        return any != 0;
    }
    if (stride == 1) {
        for (size_t j = 0; j < n; j++) {
            seen[j] |= keep[j];
            any |= keep[j];
        }
        return any != 0;
    }
    for (size_t j = 0; j < n; j++) {
        seen[j] |= keep[(ptrdiff_t)j * stride];
        any |= keep[(ptrdiff_t)j * stride];
    }
    return any != 0;
}

/* 1 if the biases of all keys that the row would see are -inf. */
static int
is_biased_away(const score_row *at)
{
    const mha_attention_args *a = at->args;
    const size_t itemsize = a->dtype == MHA_F64 ? sizeof(double) : sizeof(float);

    for (size_t j = at->keys.first; j < at->keys.last; j++) {
        const char *bias = mha_mask_at(&a->bias, itemsize, &at->row, 0, j);
        const double number =
            a->dtype == MHA_F64 ? *(const double *)(const void *)bias : (double)*(const float *)(const void *)bias;
        const int kept = a->keep_mask.data == NULL || *mha_mask_at(&a->keep_mask, 1, &at->row, 0, j) != 0;

        if (kept && !(number == -HUGE_VAL)) {
            return 0;
        }
    }
    return 1;
}

/* Marks the keys that the item's rows of scores see; returns 1 if some row sees none. */
static int
look_at_rows(const mha_attention_args *a, size_t item, uint8_t *seen)
{
    const int wants_empty = a->empty_rows == MHA_EMPTY_UNIFORM && a->bias.data != NULL;
    const int per_head = (seen != NULL && a->keep_mask.head_stride != 0) || (wants_empty && a->bias.head_stride != 0);
    const int alike = mha_same_for_all_queries(&a->visible) && a->keep_mask.query_stride == 0 &&
                      (!wants_empty || a->bias.query_stride == 0);
    const size_t n_queries = alike ? mha_min(a->queries, 1) : a->queries, n_heads = per_head ? a->heads : 1;
    int has_empty = 0;

    for (size_t number = 0; number < n_heads * n_queries; number++) {
        score_row at = {.args = a, .row = {.item = item, .head = number / n_queries, .query = number % n_queries}};

        at.keys = mha_visible_keys(&a->visible, a->queries, a->keys, item, at.row.query);
        if (seen == NULL) {
            has_empty |= at.keys.last == 0;
        } else {
            const uint8_t *keep = (const uint8_t *)mha_mask_at(&a->keep_mask, 1, &at.row, 0, at.keys.first);
            has_empty |= !mark_kept(keep, a->keep_mask.key_stride, at.keys.last - at.keys.first, seen + at.keys.first);
        }
        has_empty |= wants_empty && is_biased_away(&at);
    }
    return has_empty;
}

void
mha_layer_needed(const mha_layer_job *job, size_t item, uint8_t *seen, mha_needed needed[MHA_N_INPUTS])
{
    const mha_attention_args *a = &job->args->attention;
    const mha_needed all_keys = {{0, a->keys}, NULL};
    size_t n_empty = 0;

    needed[MHA_QUERIES] = (mha_needed){{0, a->queries}, NULL};
    needed[MHA_KEYS] = all_keys;
    if (!mha_sees_all_keys(&a->visible)) {
        needed[MHA_KEYS].rows = mha_visible_item(&a->visible, a->queries, a->keys, item, &n_empty);
    }
    if (seen != NULL) {
        memset(seen, 0, a->keys);
        n_empty += (size_t)look_at_rows(a, item, a->keep_mask.data != NULL ? seen : NULL);
        needed[MHA_KEYS].seen = a->keep_mask.data != NULL ? seen : NULL;
    }
    /* An empty row is the mean of all values. */
    needed[MHA_VALUES] = n_empty == 0 || a->empty_rows != MHA_EMPTY_UNIFORM ? needed[MHA_KEYS] : all_keys;
}

/* 1 if these are all of n rows. */
static int
is_all(const mha_needed *needed, size_t n)
{
    return needed->rows.first == 0 && needed->rows.last == n &&
           (needed->seen == NULL || memchr(needed->seen, 0, n) == NULL);
}

/* 1 if some row of keys may be hidden from all queries: by an interval, or by a mask. */
static int
may_hide(const mha_attention_args *a)
{
    return !mha_sees_all_keys(&a->visible) || a->keep_mask.data != NULL;
}

/* 1 if masks tell which rows are needed. */
static int
looks_at_masks(const mha_attention_args *a)
{
    return a->keep_mask.data != NULL || (may_hide(a) && a->empty_rows == MHA_EMPTY_UNIFORM && a->bias.data != NULL);
}

void
mha_layer_take_needed(mha_layer_job *job, mha_scratch *scratch)
{
    const mha_attention_args *a = &job->args->attention;

    job->needed = mha_scratch_take(scratch, may_hide(a) ? a->batch : 0, 2 * sizeof(mha_needed));
    job->seen = mha_scratch_take(scratch, looks_at_masks(a) ? a->batch : 0, a->keys);
}

void
mha_layer_find_needed(mha_layer_job *job)
{
    const mha_attention_args *a = &job->args->attention;
    int all_keys = 1, all_values = 1;

    for (size_t b = 0; may_hide(a) && b < a->batch; b++) {
        mha_needed needed[MHA_N_INPUTS];

        mha_layer_needed(job, b, looks_at_masks(a) ? job->seen + b * a->keys : NULL, needed);
        job->needed[b] = needed[MHA_KEYS];
        job->needed[a->batch + b] = needed[MHA_VALUES];
        all_keys = all_keys && is_all(&needed[MHA_KEYS], a->keys);
        all_values = all_values && is_all(&needed[MHA_VALUES], a->keys);
    }
    job->inputs[MHA_KEYS].needed = all_keys ? NULL : job->needed;
    job->inputs[MHA_VALUES].needed = all_values ? NULL : job->needed + a->batch;
}
