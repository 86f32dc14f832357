/*
 * rows.c: rows of queries before and after their key blocks: where their statistics stand, what
 * those get that saw no key, and the statistics that the caller asked for.
 */
#include "walk.h"

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
 * The mean of these values, summed in the same order as any row: d2l's answer, over all K, for a query
 * without keys.  `row` is that query, whose own weights are dropped where there is dropout.
 */
static void
mean_of_values(const mha_plan *plan, const mha_rows *row, mha_interval keys, const mha_room *room)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const mha_scalar inverse = mha_scalar_from(k, 1.0 / (double)(keys.last - keys.first));

    for (size_t first = mha_block_start(plan, keys.first); first < keys.last; first += plan->key_block) {
        const mha_key_block block = {.first_key = first, .keys = mha_block_keys(plan, keys, first)};
        mha_product product;
        const mha_merge merge = {
            .rows = 1,
            .cols = args->value_dim,
            .first = first <= keys.first,
            .out = room->mean,
            .block = room->block_out,
            .compensation = room->mean_compensation,
            .rescale = &plan->one,
            .factor = &plan->one,
            .inverse = block.keys.last == keys.last ? &inverse : NULL,
        };

        mha_describe_product(plan, row, &block, room->scores, NULL, 1, &product);
        product.c = room->block_out;
        k->fill(block.keys.last - first, 1, room->scores); /* from the block's first key on */
        if (args->dropout > 0) {
            mha_drop_weights(plan, row, room, &block);
        }
        k->product(&product);
        k->merge_rows(&merge);
    }
}

void
mha_add_sinks(const mha_plan *plan, const mha_rows *tile, const char *max, char *sum)
{
    if (plan->args->sinks != NULL) {
        const size_t at = tile->head * plan->kernels->itemsize;
        plan->kernels->add_sinks(tile->rows, (const char *)plan->args->sinks + at, max, sum);
    }
}

/* A row without keys, where there is a sink, has that alone: a sum of exp(0). */
static void
leave_to_sink(const mha_plan *plan, const mha_rows *task, const mha_rows *rows, size_t row, const mha_room *room)
{
    const mha_kernels *k = plan->kernels;
    const size_t at = row * k->itemsize;

    if (plan->args->sinks != NULL) {
        k->fill(1, mha_read(k, plan->args->sinks, rows->head), mha_statistics_at(plan, task, rows, room->max) + at);
        k->fill(1, 1, mha_statistics_at(plan, task, rows, room->sum) + at);
    }
}

/* Rows that saw no key: zeros, or the mean of all values and weights of 1/K. */
static void
fill_empty_rows(const mha_plan *plan, const mha_rows *task, const mha_rows *rows, const mha_room *room)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const char *sum = mha_statistics_at(plan, task, rows, room->sum);
    const int uniform = args->empty_rows == MHA_EMPTY_UNIFORM && args->keys > 0 && args->sinks == NULL;
    mha_interval have_mean = {0, 0};

    for (size_t i = 0; i < rows->rows && !mha_interrupted(); i++) { /* each may be a sum over all keys */
        char *out = mha_result_at(k, &args->out, rows->item, rows->head, rows->query + i);
        if (mha_read(k, sum, i) != 0) { /* NaN is no empty row */
            continue;
        }
        if (args->weights != NULL && !plan->weights_later) {
            mha_fill_empty_weights(plan, rows, i);
        }
        if (!uniform) {
            memset(out, 0, args->value_dim * k->itemsize);
            leave_to_sink(plan, task, rows, i, room);
            continue;
        }
        const mha_interval keys = mha_mean_keys(plan, rows, i);
        if (have_mean.first != keys.first || have_mean.last != keys.last || args->dropout > 0) {
            mha_rows row = *rows;
            row.query += i;
            row.rows = 1;
            mean_of_values(plan, &row, keys, room);
            have_mean = keys;
        }
        memcpy(out, room->mean, args->value_dim * k->itemsize);
    }
}

static void
write_statistics(const mha_plan *plan, const mha_rows *task, const mha_rows *rows, const mha_room *room)
{
    const mha_kernels *k = plan->kernels;
    const size_t at = mha_row_index(plan, rows) * k->itemsize, n_bytes = rows->rows * k->itemsize;
    const char *max = mha_statistics_at(plan, task, rows, room->max);
    const char *sum = mha_statistics_at(plan, task, rows, room->sum);

    if (plan->row_max != NULL) {
        memcpy((char *)plan->row_max + at, max, n_bytes);
        memcpy((char *)plan->row_sum + at, sum, n_bytes);
    }
    if (plan->args->lse != NULL) {
        char *lse = (char *)plan->args->lse + at;
        k->logsumexp(rows->rows, max, sum, lse);
        for (size_t i = 0; plan->args->sinks != NULL && i < rows->rows; i++) {
            if (mha_read(k, sum, i) == HUGE_VAL) { /* a sink so large that there is nothing beside it */
                k->fill(1, mha_read(k, plan->args->sinks, rows->head), lse + i * k->itemsize);
            }
        }
    }
}

void
mha_clear_statistics(const mha_plan *plan, const mha_room *room)
{
    plan->kernels->fill(plan->group * plan->task_queries, 0, room->max);
    plan->kernels->fill(plan->group * plan->task_queries, 0, room->sum);
}

void
mha_finish_task(const mha_plan *plan, const mha_rows *task, const mha_room *room, int has_empty)
{
    for (size_t g = 0; g < plan->group; g++) {
        mha_rows rows;
        mha_describe_head(task, g, &rows);
        if (has_empty) {
            fill_empty_rows(plan, task, &rows, room);
        }
        write_statistics(plan, task, &rows, room);
    }
}
