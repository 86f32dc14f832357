/*
 * score_grads.c: the gradients of what is added to scores: a bias, a head's relative biases, and its sink.
 *
 * The first two are dS, summed over the axes along which the bias is repeated, or by distance.  Whoever adds to a
 * number is in one task and comes in a fixed order: a tile of queries of all items and heads for a bias, all items of
 * one head for what the head has of its own.  The price is a second computation of dS, paid only by those who ask.
 */
#include "backward.h"

#include "runtime/common.h"
#include "runtime/threads.h"

#include <math.h>
#include <string.h>

/* Adds the gradients of one row's scores, those of the keys it sees in a block, to where they belong. */
typedef void (*add_row_fn)(const mha_plan *plan, const mha_rows *tile, size_t row, mha_interval keys,
                           const char *grads, double *table);

/* All gradients of these rows' scores, row by row. */
static void
visit_rows(const mha_plan *plan, const mha_rows *rows, const mha_room *room, add_row_fn add)
{
    mha_walk walk;

    mha_walk_start(&walk, plan, rows, room, 1, rows->keys);
    while (mha_walk_next(&walk)) {
        mha_backward_tile(plan, &walk.tile, room, &walk.block, 1.0);
        for (size_t i = 0; i < walk.tile.rows; i++) {
            const mha_interval seen = mha_interval_meet(mha_row_keys(&walk.tile, i), walk.block.keys);
            if (seen.first < seen.last) {
                add(plan, &walk.tile, i, seen, mha_score_at(plan, &walk.block, room->grads, i, seen.first),
                    room->table);
            }
        }
    }
}

/* All queries of one head of one item. */
static void
describe_head(const mha_plan *plan, size_t item, size_t head, const mha_room *room, mha_rows *rows)
{
    mha_describe_task(plan, item * plan->args->kv_heads + head / plan->group, room, rows);
    rows->head = head;
}

/* --- A bias ------------------------------------------------------------------------------------ */

static char *
bias_grad_at(const mha_plan *plan, const mha_rows *tile, size_t row, size_t key)
{
    const mha_mask_result *x = &plan->grads->grad_bias;
    const mha_mask same = {x->data, x->batch_stride, x->head_stride, x->query_stride, x->key_stride};

    return (char *)(uintptr_t)mha_mask_at(&same, plan->kernels->itemsize, tile, row, key);
}

static void
add_to_bias(const mha_plan *plan, const mha_rows *tile, size_t row, mha_interval keys, const char *grads,
            double *table)
{
    (void)table;
    plan->kernels->add_row(keys.last - keys.first, grads, bias_grad_at(plan, tile, row, keys.first),
                             plan->grads->grad_bias.key_stride);
}

static void
clear_bias_rows(const mha_plan *plan, const mha_rows *tile)
{
    const size_t keys = plan->args->keys, n_at_once = plan->grads->grad_bias.key_stride == 1 ? keys : 1;

    for (size_t i = 0; i < tile->rows; i++) {
        for (size_t j = 0; j < keys; j += n_at_once) {
            memset(bias_grad_at(plan, tile, i, j), 0, n_at_once * plan->kernels->itemsize);
        }
    }
}

/* The queries first .. last - 1 of all heads of all items, tile by tile: their gradients cleared, or added. */
static void
bias_rows(const mha_plan *plan, size_t first, size_t last, const mha_room *room, int clear)
{
    const mha_attention_args *args = plan->args;
    const mha_mask_result *bias = &plan->grads->grad_bias;

    for (size_t number = 0; number < args->batch * args->heads && !mha_interrupted(); number++) {
        const size_t item = number / args->heads, head = number % args->heads;
        mha_rows rows, tile;

        if (clear && ((item > 0 && bias->batch_stride == 0) || (head > 0 && bias->head_stride == 0))) {
            continue;
        }
        describe_head(plan, item, head, room, &rows);
        for (size_t row = first; row < last; row += plan->tile_rows) {
            mha_describe_tile(plan, &rows, 0, row, &tile);
            if (clear) {
                clear_bias_rows(plan, &tile);
            } else {
                mha_backward_rows(plan, &tile, room);
                visit_rows(plan, &tile, room, add_to_bias);
            }
        }
    }
}

/* A tile of queries, or all of them if they share their biases. */
static void
bias_task(void *context, size_t task, unsigned worker)
{
    const mha_plan *plan = context;
    const size_t queries = plan->args->queries, tile = plan->tile_rows;
    const size_t step = plan->grads->grad_bias.query_stride == 0 ? queries : tile;
    const mha_room *room = &plan->rooms[worker];

    bias_rows(plan, task * step, mha_min((task + 1) * step, queries), room, 1);
    bias_rows(plan, task * step, mha_min((task + 1) * step, queries), room, 0);
}

/* --- What each head has of its own --------------------------------------------------------------- */

/* sums[0], sums[step], ... += n numbers. */
static void
add_numbers(const mha_kernels *k, const char *numbers, size_t n, double *sums, size_t step)
{
    for (size_t i = 0; i < n; i++) {
        sums[i * step] += mha_read(k, numbers, i);
    }
}

static void
add_by_distance(const mha_plan *plan, const mha_rows *tile, size_t row, mha_interval keys, const char *grads,
                double *table)
{
    const mha_kernels *k = plan->kernels;
    const mha_relative r = mha_relative_keys(plan, tile->query + row, keys);

    add_numbers(k, grads, r.near - keys.first, table, 0);
    add_numbers(k, grads + (r.near - keys.first) * k->itemsize, r.far - r.near, table + r.at, 1);
    add_numbers(k, grads + (r.far - keys.first) * k->itemsize, keys.last - r.far,
                table + 2 * plan->args->relative_reach, 0);
}

/* The sink's weights are exp(sink - max) / sum; their gradients -delta, for its value is 0. */
static double
sink_gradient(const mha_plan *plan, const mha_rows *head, const mha_room *room)
{
    const mha_kernels *k = plan->kernels;
    const double sink = mha_read(k, plan->args->sinks, head->head);
    double gradient = 0;

    for (size_t i = 0; i < head->rows; i++) {
        const double sum = mha_read(k, room->sum, i);
        const double share = sum == HUGE_VAL ? 1 : exp(sink - mha_read(k, room->max, i)) / sum;
        gradient -= share * mha_read(k, room->delta, i);
    }
    return gradient;
}

static void
head_task(void *context, size_t head, unsigned worker)
{
    const mha_plan *plan = context;
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const mha_room *room = &plan->rooms[worker];
    const size_t n_table = plan->grads->grad_relative_bias != NULL ? 2 * args->relative_reach + 1 : 0;
    double sink = 0;

    memset(room->table, 0, n_table * sizeof(double));
    for (size_t item = 0; item < args->batch && args->queries > 0; item++) {
        mha_rows rows;
        describe_head(plan, item, head, room, &rows);
        mha_backward_rows(plan, &rows, room);
        if (n_table > 0) {
            visit_rows(plan, &rows, room, add_by_distance);
        }
        if (plan->grads->grad_sinks != NULL) {
            sink += sink_gradient(plan, &rows, room);
        }
    }
    for (size_t i = 0; i < n_table; i++) {
        k->fill(1, room->table[i], (char *)plan->grads->grad_relative_bias + (head * n_table + i) * k->itemsize);
    }
    if (plan->grads->grad_sinks != NULL) {
        k->fill(1, sink, (char *)plan->grads->grad_sinks + head * k->itemsize);
    }
}

void
mha_score_grads_run(const mha_plan *plan)
{
    const mha_attention_args *args = plan->args;
    const mha_attention_grads *grads = plan->grads;
    const size_t tiles = mha_ceil_div(args->queries, plan->tile_rows);
    void *context = (void *)(uintptr_t)plan;

    if (grads->grad_bias.data != NULL) {
        mha_parallel_for(grads->grad_bias.query_stride == 0 ? mha_min(tiles, 1) : tiles, plan->n_workers, bias_task,
                         context);
    }
    if (grads->grad_relative_bias != NULL || grads->grad_sinks != NULL) {
        mha_parallel_for(args->heads, plan->n_workers, head_task, context);
    }
}
