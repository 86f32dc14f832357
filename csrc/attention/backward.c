/*
 * backward.c: gradients of attention, dot-product and additive, without a Q x K buffer.
 *
 * Weights are computed again, tile by tile, from the row statistics of the forward pass, kept as the
 * pair (max, sum): their logarithm in one number would lose digits.  Per tile, with P the weights:
 *     dV += (P F)^T G,  dP = G V^T,  dS = P (F dP - delta),  dQ += dS K,  dK += dS^T Q
 * where F are the dropout factors, G the gradient of the output and delta_i = G_i . O_i.
 *
 * The keys are cut into spans of MHA_SPAN_BLOCKS blocks from key 0 on, each with a gradient of q of its own, and
 * these are added up in order: so the bits depend neither on threads nor on batch size nor on keys behind
 * the lengths.  A task is one key head of one item, with all its spans in turn; where heads are few, a task
 * is one span, and several run side by side.
 */
#include "backward.h"

#include "runtime/common.h"
#include "runtime/threads.h"

#include <string.h>

/* Where the gradient of q of this head goes: the caller's array, or the span's own (of the worker, or in a round). */
static mha_operand
grad_q_rows(const mha_plan *plan, const mha_room *room, size_t span, size_t item, size_t head)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const mha_result *q = &plan->grads->grad_q;

    if (plan->n_spans == 1) {
        return (mha_operand){mha_result_at(k, q, item, head, 0), 0, 0, q->row_stride};
    }
    const size_t row = (item * args->heads + head) * args->queries, abreast = span % plan->spans_abreast;
    const char *own = plan->partials + abreast * plan->partial_bytes + row * args->head_dim * k->itemsize;
    return (mha_operand){plan->spans_abreast == 1 ? room->span_grad_q : own, 0, 0, (ptrdiff_t)args->head_dim};
}

/* dV += (P F)^T G, or dK += dS^T Q (= if nothing is there yet), described: rows are keys, depth is queries. */
static mha_product
product_of_queries(const mha_plan *plan, const mha_rows *tile, const mha_room *room, const mha_key_block *block,
                   int of_values, int overwrite)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const mha_operand *rows = of_values ? &plan->grads->grad_out : &args->q;
    const mha_result *result = of_values ? &plan->grads->grad_v : &plan->grads->grad_k;

    return (mha_product){
        .rows = block->keys.last - block->keys.first,
        .cols = of_values ? args->value_dim : args->head_dim,
        .depth = tile->rows,
        .a = mha_score_at(plan, block, of_values ? room->scores : room->grads, 0, block->keys.first),
        .a_row = 1,
        .a_step = (ptrdiff_t)plan->score_stride,
        .b = {.data = mha_operand_at(k, rows, tile->item, tile->head, tile->query),
              .layout = MHA_ROWS,
              .stride = rows->row_stride},
        .c = mha_result_at(k, result, tile->item, tile->key_head, block->keys.first),
        .c_row = result->row_stride,
        .accumulate = !overwrite,
        .scale = &plan->one,
    };
}

static void
add_query_grads(const mha_plan *plan, const mha_walk *walk, const mha_operand *grad_q, int overwrite)
{
    const mha_rows *tile = &walk->tile;
    const mha_room *room = walk->room;
    const mha_key_block *block = &walk->block;
    mha_product product;

    mha_describe_product(plan, tile, block, room->grads, walk->dense_rows, 0, &product);
    product.c = (void *)(uintptr_t)mha_operand_at(plan->kernels, grad_q, 0, 0, tile->query);
    product.c_row = grad_q->row_stride;
    product.accumulate = !overwrite;
    mha_guarded_product(plan, tile, room, block, &product, 0);
}

static void
add_additive_grads(const mha_plan *plan, const mha_rows *tile, const mha_room *room,
                   const mha_key_block *block, const mha_operand *grad_q, void *grad_w)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const mha_additive_grads grads = {
        .rows = tile->rows,
        .keys = block->keys.last - block->keys.first,
        .phase = block->keys.first - block->first_key,
        .depth = args->head_dim,
        .q = mha_operand_at(k, &args->q, tile->item, tile->head, tile->query),
        .k = mha_operand_at(k, &args->k, tile->item, tile->key_head, block->keys.first),
        .w = args->additive_weights,
        .q_row = args->q.row_stride,
        .k_row = args->k.row_stride,
        .grads = mha_score_at(plan, block, room->grads, 0, block->keys.first),
        .grads_row = (ptrdiff_t)plan->score_stride,
        .grad_q = (void *)(uintptr_t)mha_operand_at(k, grad_q, 0, 0, tile->query),
        .grad_k = mha_result_at(k, &plan->grads->grad_k, tile->item, tile->key_head, block->keys.first),
        .grad_w = grad_w,
        .grad_q_row = grad_q->row_stride,
        .grad_k_row = plan->grads->grad_k.row_stride,
    };
    k->additive_grads(&grads);
}

static void
clear_rows(const mha_kernels *k, char *first, ptrdiff_t row_stride, size_t rows, size_t cols)
{
    for (size_t i = 0; i < rows; i++) {
        memset(first + (ptrdiff_t)i * row_stride * (ptrdiff_t)k->itemsize, 0, cols * k->itemsize);
    }
}

/* Queries without keys that got the mean of all values: each value j gets F[j]/K of their gradient. */
static void
add_uniform_rows(const mha_plan *plan, const mha_rows *head, const mha_room *room, mha_interval keys)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;

    for (size_t i = 0; i < args->queries && !mha_interrupted(); i++) {
        if (args->empty_rows != MHA_EMPTY_UNIFORM || mha_read(k, room->sum, i) != 0) {
            continue;
        }
        const mha_interval mean = mha_mean_keys(plan, head, i), mine = mha_interval_meet(mean, keys);
        for (size_t first = mha_block_start(plan, mine.first); first < mine.last; first += plan->key_block) {
            const mha_key_block block = {.first_key = first, .keys = mha_block_keys(plan, mine, first)};
            mha_rows row = *head;
            row.query = i;
            row.rows = 1;
            row.row_keys = NULL;
            row.keys = block.keys;
            k->fill(block.keys.last - first, 1.0 / (double)(mean.last - mean.first), room->scores);
            if (args->dropout > 0) {
                mha_drop_weights(plan, &row, room, &block);
            }
            const mha_product product = product_of_queries(plan, &row, room, &block, 1, 0);
            k->product(&product); /* nothing is hidden from this row: an infinite gradient arrives */
        }
    }
}

/* Which gradients a tile is the first to give something to: it stores where the others add, and nothing is cleared. */
typedef struct {
    int keys, queries;
} overwriting;

/* The tile of queries against the block of keys where the walk stands. */
static void
backward_block(const mha_plan *plan, mha_walk *walk, const mha_operand *grad_q, void *grad_w, overwriting overwrite)
{
    const mha_attention_args *args = plan->args;
    const mha_room *room = walk->room;
    const mha_rows *tile = &walk->tile;
    const mha_key_block *block = &walk->block;

    mha_backward_tile(plan, tile, room, &walk->block, args->scale);
    if (plan->keeps_slopes) { /* not before: what is added to a capped score has no slope */
        const size_t at = block->from * plan->kernels->itemsize;
        plan->kernels->apply_slopes(tile->rows, block->width, room->grads + at, room->slopes + at,
                                    (ptrdiff_t)plan->score_stride);
    }
    const mha_product values = product_of_queries(plan, tile, room, block, 1, overwrite.keys);
    mha_guarded_product(plan, tile, room, block, &values, 1);
    if (args->additive_weights != NULL) {
        add_additive_grads(plan, tile, room, block, grad_q, grad_w);
        return;
    }
    const mha_product keys = product_of_queries(plan, tile, room, block, 0, overwrite.keys);
    mha_guarded_product(plan, tile, room, block, &keys, 1);
    add_query_grads(plan, walk, grad_q, overwrite.queries);
}

/* Adds a span's gradient of q of one head to the caller's. */
static void
add_span(const mha_plan *plan, const mha_room *room, size_t span, size_t item, size_t head)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const mha_operand q = grad_q_rows(plan, room, span, item, head);

    for (size_t i = 0; i < args->queries && plan->n_spans > 1; i++) {
        char *out = mha_result_at(k, &plan->grads->grad_q, item, head, i);
        if (span == 0) {
            memset(out, 0, args->head_dim * k->itemsize);
        }
        k->add_row(args->head_dim, mha_operand_at(k, &q, 0, 0, i), out, 1);
    }
}

/* All queries of one head against the keys of one span; is_first: no other head has been there. */
static void
backward_head(const mha_plan *plan, const mha_rows *head, const mha_room *room, mha_interval span_keys,
              size_t span, int is_first, void *grad_w)
{
    const mha_attention_args *args = plan->args;
    const mha_operand grad_q = grad_q_rows(plan, room, span, head->item, head->head);
    const mha_interval seen = mha_interval_meet(head->keys, span_keys);
    const int stores = plan->same_visibility && seen.first < seen.last;
    mha_walk walk;

    if (span == 0 || plan->group > 1 || plan->spans_abreast > 1) { /* else they stand there since the span before */
        mha_backward_rows(plan, head, room);
    }
    if (!stores || args->additive_weights != NULL) {
        clear_rows(plan->kernels, (char *)(uintptr_t)grad_q.data, grad_q.row_stride, args->queries, args->head_dim);
    }
    mha_walk_start(&walk, plan, head, room, 1, span_keys);
    while (mha_walk_next(&walk)) {
        const overwriting overwrite = {stores && is_first && walk.tile.query == 0,
                                       stores && walk.block.first_key == span_keys.first};
        backward_block(plan, &walk, &grad_q, grad_w, overwrite);
    }
    add_uniform_rows(plan, head, room, span_keys);
    if (plan->spans_abreast == 1) {
        add_span(plan, room, span, head->item, head->head);
    }
}

/* Zero gradients of keys first .. last - 1 of the task's key head. */
static void
clear_keys(const mha_plan *plan, const mha_rows *task, const mha_result *grad, size_t cols, size_t first,
           size_t last)
{
    const mha_kernels *k = plan->kernels;

    if (first < last) {
        clear_rows(k, mha_result_at(k, grad, task->item, task->key_head, first), grad->row_stride, last - first, cols);
    }
}

/* All heads that share a key head against one span of its keys. */
static void
run_span(const mha_plan *plan, const mha_rows *task, const mha_room *room, size_t span, void *grad_w)
{
    const mha_attention_args *args = plan->args;
    const size_t span_keys = MHA_SPAN_BLOCKS * plan->key_block;
    const mha_interval all = {0, args->keys}, mine = {span * span_keys, (span + 1) * span_keys};
    const mha_interval keys = mha_interval_meet(mine, all), seen = mha_interval_meet(task->keys, keys);
    /* Where all queries see the same keys, the first tile of queries writes all of these, and the others add. */
    const int written = plan->same_visibility && args->queries > 0 && seen.first < seen.last;
    const size_t unseen = written ? seen.last : keys.first;

    clear_keys(plan, task, &plan->grads->grad_k, args->head_dim, args->additive_weights != NULL ? keys.first : unseen,
               keys.last);
    clear_keys(plan, task, &plan->grads->grad_v, args->value_dim, unseen, keys.last);
    for (size_t g = 0; g < plan->group; g++) {
        mha_rows head;
        mha_describe_head(task, g, &head);
        backward_head(plan, &head, room, keys, span, g == 0, grad_w);
    }
}

/* One span of this round, or all spans in turn. */
static void
run_task(void *context, size_t task_number, unsigned worker)
{
    const mha_plan *plan = context;
    const mha_attention_args *args = plan->args;
    const int in_turn = plan->spans_abreast == 1;
    const size_t head = task_number / plan->spans_abreast;
    const size_t first = in_turn ? 0 : plan->first_span + task_number % plan->spans_abreast;
    const size_t last = in_turn ? plan->n_spans : mha_min(first + 1, plan->n_spans);
    const mha_room *room = &plan->rooms[worker];
    mha_rows task;

    mha_describe_task(plan, head, room, &task);
    char *grad_w = plan->grad_w + (in_turn ? head : head * plan->n_spans + first) * plan->grad_w_bytes;

    if (first < last) {
        plan->kernels->fill(args->additive_weights != NULL ? args->head_dim : 0, 0, grad_w);
    }
    for (size_t span = first; span < last; span++) {
        run_span(plan, &task, room, span, grad_w);
    }
}

/* The gradients of q of one head from the spans of this round, added up in order. */
static void
join_spans(void *context, size_t task, unsigned worker)
{
    const mha_plan *plan = context;
    const size_t heads = plan->args->heads, last = mha_min(plan->first_span + plan->spans_abreast, plan->n_spans);

    (void)worker;
    for (size_t span = plan->first_span; span < last; span++) {
        add_span(plan, NULL, span, task / heads, task % heads);
    }
}

/* --- The call ---------------------------------------------------------------------------------- */

void
mha_backward_run(mha_plan *plan, const mha_attention_grads *grads, const mha_scratch *scratch)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    void *grad_w = grads->grad_additive_weights;

    plan->grads = grads;
    mha_plan_place(plan, scratch);
    for (plan->first_span = 0; plan->first_span < plan->n_spans; plan->first_span += plan->spans_abreast) {
        mha_parallel_for(plan->n_tasks, plan->n_workers, run_task, plan);
        if (plan->spans_abreast == 1) {
            break; /* the tasks went through all spans */
        }
        mha_parallel_for(args->batch * args->heads, plan->n_workers, join_spans, plan);
    }
    if (grad_w != NULL && args->additive_weights != NULL) {
        k->fill(args->head_dim, 0, grad_w);
        for (size_t i = 0; i < plan->n_grad_w; i++) {
            k->add_row(args->head_dim, plan->grad_w + i * plan->grad_w_bytes, grad_w, 1);
        }
    }
    mha_score_grads_run(plan);
}

mha_status
mha_attention_backward(const mha_attention_args *args, const mha_attention_grads *grads)
{
    mha_plan plan;
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    mha_status status =
        args->row_max != NULL && args->row_sum != NULL ? mha_backward_plan_init(&plan, args, &scratch) : MHA_ERR_ARG;

    if (status == MHA_OK) {
        status = mha_scratch_open(&scratch);
    }
    if (status != MHA_OK) {
        return status;
    }
    mha_backward_run(&plan, grads, &scratch);
    mha_scratch_close(&scratch);
    return mha_interrupt_status();
}
