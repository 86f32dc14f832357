/*
 * rows.c: rows of queries before and after their key blocks: where their statistics stand, what
 * a row that saw no key gets, and the statistics that the caller asked for.
 */
#include "values.h"

#include "runtime/common.h"

#include <math.h>
#include <string.h>

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
mha_mean_keys(const mha_walk *walk, size_t row)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_interval seen = mha_row_keys(walk, row), all = {0, args->keys};
    const int masked = args->keep_mask.data != NULL || args->bias.data != NULL || args->relative_bias != NULL;

    return seen.first < seen.last && !masked ? seen : all;
}

/*
 * The mean of the values of `keys`, summed in the same order as any row: d2l's answer, over all K, for a query
 * without keys.  That query is row `row` of the tile; with dropout, its own weights are dropped.
 */
static void
mean_of_values(const mha_walk *walk, size_t row, mha_interval keys)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_room *room = walk->room;
    const mha_scalar inverse = mha_scalar_from(k, 1.0 / (double)(keys.last - keys.first));
    mha_walk one;

    mha_walk_start_row(&one, walk, row, keys);
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
mha_load_statistics(const mha_walk *walk)
{
    const mha_kernels *k = walk->problem->kernels;
    const size_t at = mha_row_index(walk) * k->itemsize, n_bytes = walk->tile.rows * k->itemsize;
    char *max = mha_statistics_at(walk, walk->room->max), *sum = mha_statistics_at(walk, walk->room->sum);

    memcpy(max, (const char *)walk->job->row_max + at, n_bytes);
    memcpy(sum, (const char *)walk->job->row_sum + at, n_bytes);
    k->invert_sums(walk->tile.rows, max, sum, mha_statistics_at(walk, walk->room->inverse));
}

/* The sink of the tile's head, or NULL. */
static const char *
sink_of(const mha_walk *walk)
{
    const char *sinks = walk->problem->args->sinks;

    return sinks == NULL ? NULL : sinks + walk->tile.head * walk->problem->kernels->itemsize;
}

void
mha_add_sinks(const mha_walk *walk, const char *max, char *sum)
{
    const char *sink = sink_of(walk);

    if (sink != NULL) {
        walk->problem->kernels->add_sinks(walk->tile.rows, sink, max, sum);
    }
}

/* Rows of the tile that saw no key: zeros, or the mean of all values and weights of 1/K. */
static void
fill_empty_rows(const mha_walk *walk)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_rows *rows = &walk->tile;
    char *max = mha_statistics_at(walk, walk->room->max), *sum = mha_statistics_at(walk, walk->room->sum);
    const char *sink = sink_of(walk);
    const int uniform = args->empty_rows == MHA_EMPTY_UNIFORM && args->keys > 0 && sink == NULL;
    mha_interval have_mean = {0, 0};

    for (size_t i = 0; i < rows->rows; i++) {
        char *out = mha_result_at(k, &args->out, rows->item, rows->head, rows->query + i);
        if (mha_read(k, sum, i) != 0) { /* a row whose sum is NaN is not empty */
            continue;
        }
        if (args->weights != NULL && !walk->plan->weights_later) {
            mha_fill_empty_weights(walk, i);
        }
        if (uniform) {
            const mha_interval keys = mha_mean_keys(walk, i);
            if (have_mean.first != keys.first || have_mean.last != keys.last || args->dropout > 0) {
                mean_of_values(walk, i, keys);
                have_mean = keys;
            }
            memcpy(out, walk->room->mean, args->value_dim * k->itemsize);
            continue;
        }
        memset(out, 0, args->value_dim * k->itemsize);
        if (sink != NULL) { /* a row without keys has the sink alone: a sum of exp(0) */
            memcpy(max + i * k->itemsize, sink, k->itemsize);
            k->fill(1, 1, sum + i * k->itemsize);
        }
    }
}

/* The statistics of the tile's rows, as far as they were asked for. */
static void
write_statistics(const mha_walk *walk)
{
    const mha_kernels *k = walk->problem->kernels;
    const size_t n = walk->tile.rows, at = mha_row_index(walk) * k->itemsize;
    const char *max = mha_statistics_at(walk, walk->room->max), *sum = mha_statistics_at(walk, walk->room->sum);
    const char *sink = sink_of(walk);

    if (walk->job->row_max != NULL) {
        memcpy((char *)walk->job->row_max + at, max, n * k->itemsize);
        memcpy((char *)walk->job->row_sum + at, sum, n * k->itemsize);
    }
    if (walk->problem->args->lse != NULL) {
        char *lse = (char *)walk->problem->args->lse + at;
        k->logsumexp(n, max, sum, lse);
        for (size_t i = 0; sink != NULL && i < n; i++) {
            if (mha_read(k, sum, i) == HUGE_VAL) { /* a sink so large that all else vanishes beside it */
                memcpy(lse + i * k->itemsize, sink, k->itemsize);
            }
        }
    }
}

void
mha_finish_task(mha_walk *walk, int has_empty)
{
    for (size_t g = 0; g < walk->problem->group; g++) {
        mha_walk_describe_head(walk, g);
        if (has_empty) {
            fill_empty_rows(walk);
        }
        write_statistics(walk);
    }
}
