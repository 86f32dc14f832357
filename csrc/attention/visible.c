/*
 * visible.c: lengths, causal corners and windows as one interval of keys per query.
 */
#include "visible.h"

#include "runtime/common.h"

/* Sizes fit int64_t: they count numbers in memory.  Saturating sums keep wild windows harmless. */
static int64_t
add_saturated(int64_t a, int64_t b)
{
    return b > 0 && a > INT64_MAX - b ? INT64_MAX : b < 0 && a < INT64_MIN - b ? INT64_MIN : a + b;
}

static size_t
clamp(int64_t x, size_t limit)
{
    return x <= 0 ? 0 : (uint64_t)x < limit ? (size_t)x : limit;
}

int
mha_visibility_is_sane(const mha_visibility *visible, size_t queries)
{
    return (visible->valid_lens == NULL || visible->lens_per_batch == 1 || visible->lens_per_batch == queries) &&
           visible->window_left >= 0 && visible->window_right >= 0;
}

int64_t
mha_diagonal(const mha_visibility *visible, size_t queries, size_t keys, size_t query)
{
    const int64_t start = (int64_t)visible->first_query - (int64_t)visible->first_key;

    return (int64_t)query + start + (visible->causal == MHA_CAUSAL_BOTTOM_RIGHT ? (int64_t)keys - (int64_t)queries : 0);
}

MHA_INLINE mha_interval
visible_keys(const mha_visibility *visible, size_t queries, size_t keys, size_t item, size_t query)
{
    mha_interval seen = {0, keys};
    const int64_t diagonal = mha_diagonal(visible, queries, keys, query);

    if (visible->valid_lens != NULL) {
        const size_t index = visible->lens_per_batch == 1 ? item : item * queries + query;
        seen.last = clamp(add_saturated(visible->valid_lens[index], -(int64_t)visible->first_key), keys);
    }
    if (visible->causal != MHA_CAUSAL_NONE) {
        seen.last = mha_min(seen.last, clamp(diagonal + 1, keys));
    }
    if (visible->window_right > 0) {
        seen.last = mha_min(seen.last, clamp(add_saturated(diagonal, visible->window_right), keys));
    }
    if (visible->window_left > 0) {
        seen.first = clamp(add_saturated(diagonal + 1, -visible->window_left), keys);
    }
    if (seen.first >= seen.last) {
        seen.first = seen.last = 0;
    }
    return seen;
}

mha_interval
mha_visible_keys(const mha_visibility *visible, size_t queries, size_t keys, size_t item, size_t query)
{
    return visible_keys(visible, queries, keys, item, query);
}

static const mha_interval NOTHING_JOINED = {SIZE_MAX, 0}, EMPTY = {0, 0};

/* An empty interval does not count for where the keys start. */
MHA_INLINE mha_interval
join(mha_interval all, mha_interval x)
{
    return (mha_interval){mha_min(all.first, x.last == 0 ? SIZE_MAX : x.first), mha_max(all.last, x.last)};
}

mha_interval
mha_intervals_join(const mha_interval *intervals, size_t n)
{
    mha_interval all = NOTHING_JOINED;

    for (size_t i = 0; i < n; i++) {
        all = join(all, intervals[i]);
    }
    return all.last == 0 ? EMPTY : all;
}

mha_interval
mha_visible_rows(const mha_visibility *visible, size_t queries, size_t keys, size_t item, size_t query, size_t rows,
                 mha_interval *intervals)
{
    const mha_visibility v = *visible; /* a local copy, so that what does not change is computed once */
    mha_interval all = NOTHING_JOINED;

    for (size_t i = 0; i < rows; i++) {
        intervals[i] = visible_keys(&v, queries, keys, item, query + i);
        all = join(all, intervals[i]);
    }
    return all.last == 0 ? EMPTY : all;
}

int
mha_same_for_all_queries(const mha_visibility *visible)
{
    return (visible->valid_lens == NULL || visible->lens_per_batch == 1) && visible->causal == MHA_CAUSAL_NONE &&
           visible->window_left == 0 && visible->window_right == 0;
}

int
mha_sees_all_keys(const mha_visibility *visible)
{
    return visible->valid_lens == NULL && mha_same_for_all_queries(visible);
}

mha_interval
mha_visible_item(const mha_visibility *visible, size_t queries, size_t keys, size_t item, size_t *n_empty_ret)
{
    const size_t n = mha_same_for_all_queries(visible) ? mha_min(queries, 1) : queries;
    mha_interval all = NOTHING_JOINED;
    size_t n_empty = 0;

    for (size_t i = 0; i < n; i++) {
        const mha_interval seen = visible_keys(visible, queries, keys, item, i);
        n_empty += seen.last == 0;
        all = join(all, seen);
    }
    *n_empty_ret = n < queries ? n_empty * queries : n_empty;
    return all.last == 0 ? EMPTY : all;
}
