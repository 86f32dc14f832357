/*
 * empty_rows.c: what rows of queries get that saw no key: the mean of all values and weights of 1/K, or zeros.
 */
#include "empty_rows.h"

#include "runtime/common.h"
#include "values.h"

#include <string.h>

mha_interval
mha_mean_keys(const mha_walk *walk, const mha_rows *rows, size_t row)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_interval seen = mha_row_keys(rows, row), all = {0, args->keys};
    const int masked = args->keep_mask.data != NULL || args->bias.data != NULL || args->relative_bias != NULL;

    return seen.first < seen.last && !masked ? seen : all;
}

/*
 * The mean of the values of `keys`, summed in the same order as any row: d2l's answer, over all K, for a query
 * without keys.  That query is row `row` of `rows`; with dropout, its own weights are dropped.
 */
static void
mean_of_values(const mha_walk *walk, const mha_rows *rows, size_t row, mha_interval keys)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_room *room = walk->room;
    const mha_scalar inverse = mha_scalar_from(k, 1.0 / (double)(keys.last - keys.first));
    mha_walk one;

    mha_walk_start_row(&one, walk, rows, row, keys);
    while (mha_walk_next(&one)) {
        const mha_interval here = one.block.keys;
        mha_product product;
        const mha_merge merge = {
            .rows = 1,
            .cols = args->value_dim,
            .first = here.first == keys.first,
            .out = room->mean,
            .block = room->block_out,
            .compensation = room->mean_compensation,
            .rescale = &walk->problem->one,
            .factor = &walk->problem->one,
            .inverse = here.last == keys.last ? &inverse : NULL,
        };

        mha_describe_product(&one, room->scores, 1, &product);
        product.c = room->block_out;
        k->fill(here.last - one.block.first_key, 1, room->scores); /* from the block's first key on */
        mha_drop_weights(&one);
        k->product(&product);
        k->merge_rows(&merge);
    }
}

void
mha_fill_empty_weights(const mha_walk *walk, const mha_rows *rows, size_t row)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_interval keys = mha_mean_keys(walk, rows, row);
    const size_t n = keys.last - keys.first;
    char *weights = mha_weights_at(walk->problem, rows, row);

    k->fill(args->keys, 0, weights);
    if (args->empty_rows == MHA_EMPTY_UNIFORM && args->sinks == NULL) {
        k->fill(n, 1.0 / (double)n, weights + keys.first * k->itemsize);
    }
}

/* Those of the rows that saw no key: zeros, or the mean of all values and weights of 1/K. */
static void
fill_empty_rows(const mha_walk *walk, const mha_rows *rows)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    char *max = mha_statistics_at(walk, rows, walk->room->max), *sum = mha_statistics_at(walk, rows, walk->room->sum);
    const char *sink = mha_sink_of(walk, rows);
    const int has_mean = args->keys > 0 && args->value_dim > 0 && sink == NULL; /* rows of no numbers have no address */
    const int uniform = args->empty_rows == MHA_EMPTY_UNIFORM && has_mean;
    mha_interval have_mean = {0, 0};

    for (size_t i = 0; i < rows->rows; i++) {
        char *out = mha_result_at(k, &args->out, rows->item, rows->head, rows->query + i);
        if (mha_read(k, sum, i) != 0) { /* a row whose sum is NaN is not empty */
            continue;
        }
        if (args->weights != NULL && !walk->plan->weights_later) {
            mha_fill_empty_weights(walk, rows, i);
        }
        if (uniform) {
            const mha_interval keys = mha_mean_keys(walk, rows, i);
            if (have_mean.first != keys.first || have_mean.last != keys.last || args->dropout > 0) {
                mean_of_values(walk, rows, i, keys);
                have_mean = keys;
            }
            memcpy(out, walk->room->mean, args->value_dim * k->itemsize);
            continue;
        }
        k->fill(args->value_dim, 0, out);
        if (sink != NULL) { /* a row without keys has the sink alone: a sum of exp(0) */
            memcpy(max + i * k->itemsize, sink, k->itemsize);
            k->fill(1, 1, sum + i * k->itemsize);
        }
    }
}

void
mha_finish_rows(const mha_walk *walk, const mha_rows *rows, int has_empty)
{
    if (has_empty) {
        fill_empty_rows(walk, rows);
    }
    mha_write_statistics(walk, rows);
}

void
mha_finish_task(const mha_walk *walk, int has_empty)
{
    for (size_t g = 0; g < walk->problem->group; g++) {
        mha_rows rows;

        mha_describe_head(walk, g, &rows);
        mha_finish_rows(walk, &rows, has_empty);
    }
}
