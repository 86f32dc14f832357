/*
 * test_visible.c: lengths, causal corners and windows as intervals, beside what the words mean: key j is visible to
 * query i if and only if every one of them lets it through.  All combinations of a few small sizes, and wild numbers.
 *
 *     test_visible [quick]
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "attention/visible.h"
#include "check.h"

#include <stdint.h>

enum { MOST_KEYS = 6, MOST_QUERIES = 4, ITEMS = 2 };

static long n_checked;

/* The meaning, word by word; `diagonal` is the key that stands on the query's diagonal. */
static int
lets_through(const mha_visibility *v, int64_t diagonal, int64_t length, int64_t key)
{
    return key < length && (v->causal == MHA_CAUSAL_NONE || key <= diagonal) &&
           (v->window_left == 0 || v->window_left > MOST_KEYS + MOST_QUERIES || diagonal - key < v->window_left) &&
           (v->window_right == 0 || v->window_right > MOST_KEYS + MOST_QUERIES || key - diagonal < v->window_right);
}

static void
fail(const mha_visibility *v, const char *what, size_t queries, size_t keys, mha_interval found)
{
    if (n_failed++ < 20) {
        printf("failed: %s, %zu queries, %zu keys, causal %d, window %lld %lld: [%zu, %zu)\n", what, queries, keys,
               (int)v->causal, (long long)v->window_left, (long long)v->window_right, found.first, found.last);
    }
}

/* One query; *seen_ret is what it must be. */
static void
check_query(const mha_visibility *v, size_t queries, size_t keys, size_t item, size_t query, mha_interval *seen_ret)
{
    const int64_t corner = v->causal == MHA_CAUSAL_BOTTOM_RIGHT ? (int64_t)keys - (int64_t)queries : 0;
    const size_t index = v->lens_per_batch == 1 ? item : item * queries + query;
    const int64_t length = v->valid_lens == NULL ? (int64_t)keys : v->valid_lens[index];
    mha_interval expected = {0, 0};

    for (size_t j = 0; j < keys; j++) {
        if (lets_through(v, (int64_t)query + corner, length, (int64_t)j)) {
            expected.first = expected.last == 0 ? j : expected.first;
            expected.last = j + 1;
        }
    }
    const mha_interval found = mha_visible_keys(v, queries, keys, item, query);
    if (found.first != expected.first || found.last != expected.last) {
        fail(v, "a query", queries, keys, found);
    }
    n_checked++;
    *seen_ret = expected;
}

static void
check_item(const mha_visibility *v, size_t queries, size_t keys, size_t item)
{
    mha_interval seen[MOST_QUERIES], expected = {0, 0};
    size_t n_empty = 0, n_empty_found = 99;
    int same = 1;

    for (size_t i = 0; i < queries; i++) {
        check_query(v, queries, keys, item, i, &seen[i]);
        if (seen[i].last == 0) {
            n_empty++;
        } else {
            expected.first = expected.last == 0 || seen[i].first < expected.first ? seen[i].first : expected.first;
            expected.last = seen[i].last > expected.last ? seen[i].last : expected.last;
        }
        same &= seen[i].first == seen[0].first && seen[i].last == seen[0].last;
    }
    const mha_interval joined = mha_intervals_join(seen, queries);
    const mha_interval found = mha_visible_item(v, queries, keys, item, &n_empty_found);
    if (joined.first != expected.first || joined.last != expected.last) {
        fail(v, "the join", queries, keys, joined);
    }
    if (found.first != expected.first || found.last != expected.last || n_empty_found != n_empty) {
        fail(v, "an item", queries, keys, found);
    }
    if (mha_same_for_all_queries(v) && (!same || expected.first != 0)) {
        fail(v, "not the same for all queries", queries, keys, found);
    }
    if (mha_sees_all_keys(v) && queries > 0 && expected.last != keys) {
        fail(v, "not all keys", queries, keys, found);
    }
}

static void
check_sizes(size_t queries, size_t keys)
{
    static const int64_t windows[] = {0, 1, 2, 3, 6, INT64_MAX - 1, INT64_MAX};
    static const int64_t lengths[] = {3, 0, 5, 1, -2, 6, INT64_MAX, INT64_MIN};
    const size_t n = sizeof(windows) / sizeof(windows[0]);
    const size_t per_batch[] = {0, 1, queries}; /* 0: no lengths */

    for (size_t choice = 0; choice < 3 * 3 * n * n; choice++) {
        const size_t lens = per_batch[choice % 3];
        const mha_visibility v = {
            .valid_lens = lens > 0 ? lengths : NULL,
            .lens_per_batch = lens,
            .causal = (mha_causal)(choice / 3 % 3),
            .window_left = windows[choice / 9 % n],
            .window_right = windows[choice / 9 / n],
        };
        for (size_t item = 0; item < ITEMS; item++) {
            check_item(&v, queries, keys, item);
        }
    }
}

static void
check_meet(void)
{
    for (size_t choice = 0; choice < 6 * 6 * 6 * 6; choice++) {
        const mha_interval a = {choice % 6, choice / 6 % 6}, b = {choice / 36 % 6, choice / 216};
        const mha_interval found = mha_interval_meet(a, b);
        for (size_t j = 0; j < 6; j++) {
            const int in_both = a.first <= j && j < a.last && b.first <= j && j < b.last;
            const int is_in = found.first <= j && j < found.last;
            if (in_both != is_in || (found.first >= found.last && found.last != 0)) {
                const mha_visibility none = {0};
                fail(&none, "what two intervals have in common", 0, 6, found);
            }
        }
    }
}

/* A part of a call sees what the whole call's queries see of its keys. */
static void
check_part(const mha_visibility *whole, size_t first_query, size_t first_key)
{
    mha_visibility part = *whole;
    int64_t lens[ITEMS * MOST_QUERIES];

    part.first_query = first_query;
    part.first_key = first_key;
    if (whole->lens_per_batch == MOST_QUERIES) { /* one for each query: the part has its own queries' */
        for (size_t i = 0; i < ITEMS * (MOST_QUERIES - first_query); i++) {
            const size_t rows = MOST_QUERIES - first_query;
            lens[i] = whole->valid_lens[i / rows * MOST_QUERIES + first_query + i % rows];
        }
        part.valid_lens = lens;
        part.lens_per_batch = MOST_QUERIES - first_query;
    }
    for (size_t item = 0; item < ITEMS; item++) {
        for (size_t i = first_query; i < MOST_QUERIES; i++) {
            const mha_interval all = mha_visible_keys(whole, MOST_QUERIES, MOST_KEYS, item, i);
            const mha_interval found =
                mha_visible_keys(&part, MOST_QUERIES - first_query, MOST_KEYS - first_key, item, i - first_query);
            for (size_t j = first_key; j < MOST_KEYS; j++) {
                if ((all.first <= j && j < all.last) != (found.first <= j - first_key && j - first_key < found.last)) {
                    fail(&part, "a part", MOST_QUERIES - first_query, MOST_KEYS - first_key, found);
                }
            }
            n_checked++;
        }
    }
}

static void
check_parts(void)
{
    static const int64_t windows[] = {0, 1, 2, 4, INT64_MAX / 4};
    static const int64_t lengths[] = {3, 0, 5, 1, -2, 6, INT64_MAX, INT64_MIN};
    const size_t per_batch[] = {0, 1, MOST_QUERIES};

    for (size_t choice = 0; choice < 3 * 2 * 5 * 5 * MOST_QUERIES * MOST_KEYS; choice++) {
        const size_t lens = per_batch[choice % 3], rest = choice / 150;
        const mha_visibility whole = {
            .valid_lens = lens > 0 ? lengths : NULL,
            .lens_per_batch = lens,
            .causal = choice / 3 % 2 ? MHA_CAUSAL_TOP_LEFT : MHA_CAUSAL_NONE,
            .window_left = windows[choice / 6 % 5],
            .window_right = windows[choice / 30 % 5],
        };
        check_part(&whole, rest % MOST_QUERIES, rest / MOST_QUERIES);
    }
}

int
main(void)
{
    for (size_t queries = 1; queries <= MOST_QUERIES; queries++) {
        for (size_t keys = 0; keys <= MOST_KEYS; keys++) {
            check_sizes(queries, keys);
        }
    }
    check_meet();
    check_parts();
    printf("%ld queries\n", n_checked);
    return report();
}
