/*
 * backward_heads.c: the gradients of what each head has of its own: its table of relative biases, dS summed by
 * distance, and its sink, whose share of a row's weight takes from all others.
 *
 * A task is one head, of all items: whoever adds to a number is in it, in a fixed order.  Sums are double.  The table
 * costs a second computation of dS, paid only by those who ask for this gradient.
 */
#include "backward.h"

#include "runtime/common.h"
#include "runtime/threads.h"

#include <math.h>
#include <string.h>

/* sums[0], sums[step], ... += n numbers. */
static void
add_numbers(const mha_kernels *k, const char *numbers, size_t n, double *sums, size_t step)
{
    for (size_t i = 0; i < n; i++) {
        sums[i * step] += mha_read(k, numbers, i);
    }
}

static void
add_row_by_distance(const mha_plan *plan, const mha_rows *tile, size_t row, const mha_key_block *block,
                    const char *grads, double *table)
{
    const mha_kernels *k = plan->kernels;
    const mha_interval seen = mha_interval_meet(mha_row_keys(tile, row), block->keys);
    const char *at = grads + (row * plan->score_stride + seen.first - block->first_key) * k->itemsize;

    if (seen.first < seen.last) {
        const mha_relative r = mha_relative_keys(plan, tile->query + row, seen);
        add_numbers(k, at, r.near - seen.first, table, 0);
        add_numbers(k, at + (r.near - seen.first) * k->itemsize, r.far - r.near, table + r.at, 1);
        add_numbers(k, at + (r.far - seen.first) * k->itemsize, seen.last - r.far,
                    table + 2 * plan->args->relative_reach, 0);
    }
}

/* One head of one item. */
static void
add_table(const mha_backward_plan *b, const mha_rows *head, const mha_arena *arena, double *table)
{
    mha_walk walk;

    mha_walk_start(&walk, &b->plan, head, arena, 1, head->keys);
    while (mha_walk_next(&walk)) {
        mha_backward_tile(b, &walk.tile, arena, &walk.block, 1.0);
        for (size_t i = 0; i < walk.tile.rows; i++) {
            add_row_by_distance(&b->plan, &walk.tile, i, &walk.block, arena->grads, table);
        }
    }
}

/* The sink's weights are exp(sink - max) / sum; their gradients -delta, for its value is 0. */
static double
sink_gradient(const mha_plan *plan, const mha_rows *head, const mha_arena *arena)
{
    const mha_kernels *k = plan->kernels;
    const double sink = mha_read(k, plan->args->sinks, head->head);
    double gradient = 0;

    for (size_t i = 0; i < head->rows; i++) {
        const double sum = mha_read(k, arena->sum, i);
        const double share = sum == HUGE_VAL ? 1 : exp(sink - mha_read(k, arena->max, i)) / sum;
        gradient -= share * mha_read(k, arena->delta, i);
    }
    return gradient;
}

static void
head_task(void *context, size_t head_number, unsigned worker)
{
    const mha_backward_plan *b = context;
    const mha_plan *plan = &b->plan;
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const size_t n_table = 2 * args->relative_reach + 1;
    double *table = (double *)(void *)(b->memory + b->tables_at + worker * b->table_bytes), sink = 0;
    mha_arena arena;

    mha_plan_arena(plan, worker, &arena);
    memset(table, 0, b->table_bytes);
    for (size_t item = 0; item < args->batch && args->queries > 0; item++) {
        mha_rows head;
        mha_task_rows(plan, item * args->kv_heads + head_number / plan->group, &arena, &head);
        head.head = head_number;
        mha_backward_rows(b, &head, &arena);
        if (b->grads->grad_relative_bias != NULL) {
            add_table(b, &head, &arena, table);
        }
        if (b->grads->grad_sinks != NULL) {
            sink += sink_gradient(plan, &head, &arena);
        }
    }
    for (size_t i = 0; b->grads->grad_relative_bias != NULL && i < n_table; i++) {
        k->fill(1, table[i], (char *)b->grads->grad_relative_bias + (head_number * n_table + i) * k->itemsize);
    }
    if (b->grads->grad_sinks != NULL) {
        k->fill(1, sink, (char *)b->grads->grad_sinks + head_number * k->itemsize);
    }
}

void
mha_backward_heads(mha_backward_plan *b)
{
    mha_parallel_for(b->plan.args->heads, b->plan.n_workers, head_task, b);
}
