/*
 * score_grads.c: the gradients of what is added to scores: a bias, a head's relative biases, and its sink.
 *
 * The first two are dS, summed over the axes along which the bias is broadcast, or by distance.  One task adds up all
 * terms of a number, in a fixed order: for a bias, a task is a tile of queries of all items and heads; for what a head
 * has of its own, all items of that head.  The price is that a call that asks for them computes dS a second time.
 */
#include "backward.h"

#include "blocks.h"
#include "runtime/common.h"
#include "runtime/threads.h"

#include <math.h>
#include <string.h>

/* Adds the gradients of the scores of one row of the tile, for those keys of the block that it sees. */
typedef void (*add_row_fn)(const mha_walk *walk, size_t row, mha_interval keys, const char *grads);

/* Calls `add` with the gradients of the scores of the task's rows, row by row. */
static void
visit_rows(mha_walk *walk, add_row_fn add)
{
    mha_walk_start(walk, 1, walk->task.keys);
    while (mha_next_prepared(walk)) {
        (void)mha_backward_tile(walk, 1.0);
        for (size_t i = 0; i < walk->tile.rows; i++) {
            const mha_interval seen = mha_row_keys_here(walk, i);
            if (seen.first < seen.last) {
                add(walk, i, seen, mha_score_at(walk, walk->room->grads, i, seen.first));
            }
        }
    }
}

/* 1 if some score has a gradient: without values an output has no numbers, and so nothing depends on the scores. */
static int
has_scores(const mha_attention_args *args)
{
    return args->batch > 0 && args->queries > 0 && args->keys > 0 && args->value_dim > 0;
}

/* A walk whose task is all queries of one head of one item. */
static void
walk_head(mha_walk *walk, const mha_attention_job *job, size_t head, size_t item, unsigned worker)
{
    mha_walk_task(walk, job, item * job->problem.args->kv_heads + head / job->problem.group, worker);
    walk->task.head = head;
}

/* --- A bias ------------------------------------------------------------------------------------ */

static char *
bias_grad_at(const mha_walk *walk, size_t row, size_t key)
{
    const mha_mask_result *x = &walk->job->grads->grad_bias;
    const mha_mask same = {x->data, x->batch_stride, x->head_stride, x->query_stride, x->key_stride};

    return (char *)(uintptr_t)mha_mask_at(&same, walk->problem->kernels->itemsize, &walk->tile, row, key);
}

static void
add_to_bias(const mha_walk *walk, size_t row, mha_interval keys, const char *grads)
{
    walk->problem->kernels->add_row(keys.last - keys.first, grads, bias_grad_at(walk, row, keys.first),
                                    walk->job->grads->grad_bias.key_stride);
}

/* Length of an axis of the gradient: an axis of stride 0 has one place, for however many scores. */
static size_t
places(size_t n_scores, ptrdiff_t stride)
{
    return stride == 0 ? 1 : n_scores;
}

/* Sets the gradient of these queries (the only one, if they share) to 0: for all items, heads and keys. */
static void
clear_bias(const mha_attention_job *job, size_t first, size_t last)
{
    const mha_attention_args *args = job->problem.args;
    const mha_mask_result *x = &job->grads->grad_bias;
    const size_t itemsize = job->problem.kernels->itemsize, heads = places(args->heads, x->head_stride);
    const size_t keys = places(args->keys, x->key_stride), at_once = x->key_stride == 1 ? mha_max(keys, 1) : 1;

    for (size_t number = 0; number < places(args->batch, x->batch_stride) * heads; number++) {
        for (size_t i = first; i < last; i++) {
            const ptrdiff_t row = (ptrdiff_t)(number / heads) * x->batch_stride +
                                  (ptrdiff_t)(number % heads) * x->head_stride + (ptrdiff_t)i * x->query_stride;

            for (size_t j = 0; j < keys; j += at_once) {
                const ptrdiff_t at = row + (ptrdiff_t)j * x->key_stride;

                memset((char *)x->data + at * (ptrdiff_t)itemsize, 0, at_once * itemsize);
            }
        }
    }
}

/* Adds the gradients of query tile `task` (of all queries, if they share), item by item, head by head. */
static void
add_bias_grads(const mha_attention_job *job, size_t task, unsigned worker)
{
    const mha_attention_args *args = job->problem.args;
    const int shared = job->grads->grad_bias.query_stride == 0;

    for (size_t number = 0; number < args->batch * args->heads && !mha_interrupted(); number++) {
        mha_walk walk;

        walk_head(&walk, job, number % args->heads, number / args->heads, worker);
        if (!shared) {
            mha_describe_tile(&walk, 0, task * job->plan.tile_rows, &walk.tile);
            walk.task = walk.tile;
            walk.task.place = 0; /* the room has these rows alone */
        }
        mha_backward_rows(&walk);
        visit_rows(&walk, add_to_bias);
    }
}

static void
bias_task(void *context, size_t task, unsigned worker)
{
    const mha_attention_job *job = context;
    const mha_attention_args *args = job->problem.args;
    const int shared = job->grads->grad_bias.query_stride == 0;
    const size_t first = task * job->plan.tile_rows;

    clear_bias(job, shared ? 0 : first, shared ? 1 : mha_min(first + job->plan.tile_rows, args->queries));
    if (has_scores(args)) {
        add_bias_grads(job, task, worker);
    }
}

/* --- What each head has of its own --------------------------------------------------------------- */

/* Adds n numbers to sums[0], sums[step], ...; with step 0 all of them to sums[0]. */
static void
add_numbers(const mha_kernels *k, const char *numbers, size_t n, double *sums, size_t step)
{
    for (size_t i = 0; i < n; i++) {
        sums[i * step] += mha_read(k, numbers, i);
    }
}

static void
add_by_distance(const mha_walk *walk, size_t row, mha_interval keys, const char *grads)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_relative r = mha_relative_keys(args, walk->tile.query + row, keys);
    double *table = walk->room->table;

    add_numbers(k, grads, r.near - keys.first, table, 0);
    add_numbers(k, grads + (r.near - keys.first) * k->itemsize, r.far - r.near, table + r.at, 1);
    add_numbers(k, grads + (r.far - keys.first) * k->itemsize, keys.last - r.far, table + 2 * args->relative_reach, 0);
}

/* The sink has weight w = exp(sink - max) / sum and value 0 in each row: its logit has the gradient w * (0 - delta). */
static double
sink_gradient(const mha_walk *walk)
{
    const mha_kernels *k = walk->problem->kernels;
    const mha_room *room = walk->room;
    const double sink = mha_read(k, walk->problem->args->sinks, walk->task.head);
    double gradient = 0;

    for (size_t i = 0; i < walk->task.rows; i++) {
        const double sum = mha_read(k, room->sum, i);
        const double share = sum == HUGE_VAL ? 1 : exp(sink - mha_read(k, room->max, i)) / sum;
        gradient -= share * mha_read(k, room->delta, i);
    }
    return gradient;
}

static void
head_task(void *context, size_t head, unsigned worker)
{
    const mha_attention_job *job = context;
    const mha_attention_args *args = job->problem.args;
    const mha_attention_grads *grads = job->grads;
    const mha_kernels *k = job->problem.kernels;
    const size_t n_table = grads->grad_relative_bias != NULL ? 2 * args->relative_reach + 1 : 0;
    double sink = 0, *table = job->rooms[worker].table;

    memset(table, 0, n_table * sizeof(double));
    for (size_t item = 0; has_scores(args) && item < args->batch; item++) {
        mha_walk walk;

        walk_head(&walk, job, head, item, worker);
        mha_backward_rows(&walk);
        if (n_table > 0) {
            visit_rows(&walk, add_by_distance);
        }
        if (grads->grad_sinks != NULL) {
            sink += sink_gradient(&walk);
        }
    }
    for (size_t i = 0; i < n_table; i++) {
        k->fill(1, table[i], (char *)grads->grad_relative_bias + (head * n_table + i) * k->itemsize);
    }
    if (grads->grad_sinks != NULL) {
        k->fill(1, sink, (char *)grads->grad_sinks + head * k->itemsize);
    }
}

void
mha_score_grads_run(const mha_attention_job *job)
{
    const mha_attention_grads *grads = job->grads;
    const size_t tiles = mha_ceil_div(job->problem.args->queries, job->plan.tile_rows);
    const unsigned n_workers = job->plan.n_workers;
    void *context = (void *)(uintptr_t)job;

    if (grads->grad_bias.data != NULL) {
        mha_parallel_for(grads->grad_bias.query_stride == 0 ? 1 : tiles, n_workers, bias_task, context);
    }
    if (grads->grad_relative_bias != NULL || grads->grad_sinks != NULL) {
        mha_parallel_for(job->problem.args->heads, n_workers, head_task, context);
    }
}
