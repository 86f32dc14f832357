/*
 * visible.h: every length, causal corner and window, reduced to one interval of keys per query.
 * The only place that knows what those words mean; drivers and kernels see intervals.
 */
#ifndef MHA_VISIBLE_H
#define MHA_VISIBLE_H

#include "mha.h"
#include "runtime/common.h"

/* Keys first .. last-1; empty as {0, 0}. */
typedef struct {
    size_t first, last;
} mha_interval;

/* 1 if lengths are for items or for all queries, and no window is negative. */
int mha_visibility_is_sane(const mha_visibility *visible, size_t queries);

/* The keys that query `query` of batch item `item` may see. */
mha_interval mha_visible_keys(const mha_visibility *visible, size_t queries, size_t keys, size_t item, size_t query);

/* The keys of each of `rows` queries from `query` on; returns the smallest interval that holds all of them. */
mha_interval mha_visible_rows(const mha_visibility *visible, size_t queries, size_t keys, size_t item, size_t query,
                              size_t rows, mha_interval *intervals);

/* The key at which a query stands on the diagonal of `causal`, counted from this call's key 0; it need not exist. */
int64_t mha_diagonal(const mha_visibility *visible, size_t queries, size_t keys, size_t query);

/* 1 if all queries of an item see the same keys, 0 .. length. */
int mha_same_for_all_queries(const mha_visibility *visible);

/* 1 if nothing is hidden from any query, whatever the sizes. */
int mha_sees_all_keys(const mha_visibility *visible);

/* The smallest interval that holds all n of them. */
mha_interval mha_intervals_join(const mha_interval *intervals, size_t n);

/* What the two have in common. */
MHA_INLINE mha_interval
mha_interval_meet(mha_interval a, mha_interval b)
{
    a.first = mha_max(a.first, b.first);
    a.last = mha_min(a.last, b.last);
    if (a.first >= a.last) {
        a.first = a.last = 0;
    }
    return a;
}

/*
 * The smallest interval that holds all keys that queries of the item see; *n_empty_ret: how many queries see none.
 */
mha_interval mha_visible_item(const mha_visibility *visible, size_t queries, size_t keys, size_t item,
                              size_t *n_empty_ret);

#endif
