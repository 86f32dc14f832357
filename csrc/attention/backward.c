/*
 * backward.c: gradients of attention, dot-product and additive, without a Q x K buffer.
 *
 * Weights are computed again, tile by tile, from the row statistics of the forward pass, kept as the
 * pair (max, sum): their logarithm in one number would lose digits.  Per tile, with P the weights:
 *     dV += (P F)^T G,  dP = G V^T,  dS = P (F dP - delta),  dQ += dS K,  dK += dS^T Q
 * where F are the dropout factors, G the gradient of the output and delta_i = G_i . O_i.
 *
 * The keys are cut into splits of MHA_SPLIT_BLOCKS blocks from key 0 on, each with a gradient of q of its own, and
 * these are added up in order: so the bits depend neither on threads nor on batch size nor on keys behind
 * the lengths.  A task is one split of one key head of one item; where heads are few, several of its splits run side
 * by side, in rounds.
 */
#include "backward.h"

#include "blocks.h"
#include "empty_rows.h"
#include "runtime/common.h"
#include "runtime/threads.h"

#include <string.h>

/* Where the gradient of q of the task's head goes: the caller's array, or, of several splits, the split's own. */
static mha_result
grad_q_rows(const mha_walk *walk, size_t split)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_result *q = &walk->job->grads->grad_q;
    const size_t head = walk->task.head;

    if (walk->plan->n_splits == 1) {
        return (mha_result){mha_result_at(k, q, walk->task.item, head, 0), 0, 0, q->row_stride};
    }
    const size_t row = (walk->task.item * args->heads + head) * args->queries;
    char *own = walk->job->partials + split % walk->plan->splits_abreast * walk->job->partial_bytes;
    return (mha_result){own + row * args->head_dim * k->itemsize, 0, 0, (ptrdiff_t)args->head_dim};
}

/* Describes dV += (P F)^T G, or dK += dS^T Q (= in place of +=, to overwrite): rows are keys, depth is queries. */
static mha_product
product_of_queries(const mha_walk *walk, int of_values, int overwrite)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_attention_grads *grads = walk->job->grads;
    const mha_kernels *k = walk->problem->kernels;
    const mha_rows *tile = &walk->tile;
    const mha_interval keys = walk->block.keys;
    const mha_operand *rows = of_values ? &grads->grad_out : &args->q;
    const mha_result *result = of_values ? &grads->grad_v : &grads->grad_k;

    return (mha_product){
        .rows = keys.last - keys.first,
        .cols = of_values ? args->value_dim : args->head_dim,
        .depth = tile->rows,
        .a = mha_score_at(walk, of_values ? walk->room->scores : walk->room->grads, 0, keys.first),
        .a_row = 1,
        .a_step = (ptrdiff_t)walk->plan->score_stride,
        .b = {.data = mha_operand_at(k, rows, tile->item, tile->head, tile->query),
              .layout = MHA_ROWS,
              .stride = rows->row_stride},
        .c = mha_result_at(k, result, tile->item, tile->key_head, keys.first),
        .c_row = result->row_stride,
        .accumulate = !overwrite,
        .scale = &walk->problem->one,
    };
}

static void
add_query_grads(const mha_walk *walk, const mha_result *grad_q, int overwrite)
{
    mha_product product;

    mha_describe_product(walk, walk->room->grads, 0, &product);
    product.c = mha_result_at(walk->problem->kernels, grad_q, 0, 0, walk->tile.query);
    product.c_row = grad_q->row_stride;
    product.accumulate = !overwrite;
    mha_guarded_product(walk, &product, 0);
}

static void
add_additive_grads(const mha_walk *walk, const mha_result *grad_q, void *grad_w)
{
    const mha_kernels *k = walk->problem->kernels;
    const mha_rows *tile = &walk->tile;
    const mha_interval keys = walk->block.keys;
    const mha_result *grad_k = &walk->job->grads->grad_k;
    const mha_additive scores = mha_describe_additive(walk, tile, keys);
    const mha_additive_grads grads = {
        .rows = scores.rows,
        .keys = scores.keys,
        .phase = keys.first - walk->block.first_key,
        .depth = scores.depth,
        .q = scores.q,
        .k = scores.k,
        .w = scores.w,
        .q_row = scores.q_row,
        .k_row = scores.k_row,
        .grads = mha_score_at(walk, walk->room->grads, 0, keys.first),
        .grads_row = (ptrdiff_t)walk->plan->score_stride,
        .grad_q = mha_result_at(k, grad_q, 0, 0, tile->query),
        .grad_k = mha_result_at(k, grad_k, tile->item, tile->key_head, keys.first),
        .grad_w = grad_w,
        .grad_q_row = grad_q->row_stride,
        .grad_k_row = grad_k->row_stride,
    };
    k->additive_grads(&grads);
}

static void
clear_rows(const mha_kernels *k, const mha_result *grad, size_t item, size_t head, mha_interval rows, size_t cols)
{
    for (size_t i = rows.first; i < rows.last && cols > 0; i++) {
        memset(mha_result_at(k, grad, item, head, i), 0, cols * k->itemsize);
    }
}

/* For queries without keys, which got the mean of all values: each value j of `keys` gets F[j]/K of their gradient. */
static void
add_uniform_rows(const mha_walk *walk, mha_interval keys)
{
    const mha_kernels *k = walk->problem->kernels;
    const mha_rows *rows = &walk->task;
    const size_t n = walk->problem->args->empty_rows == MHA_EMPTY_UNIFORM ? rows->rows : 0;

    for (size_t i = 0; i < n; i++) {
        if (mha_read(k, walk->room->sum, i) != 0) {
            continue;
        }
        const mha_interval mean = mha_mean_keys(walk, rows, i);
        mha_walk one;

        mha_walk_start_row(&one, walk, rows, i, mha_interval_meet(mean, keys));
        while (mha_walk_next(&one)) {
            k->fill(one.block.keys.last - one.block.first_key, 1.0 / (double)(mean.last - mean.first),
                    walk->room->scores);
            mha_drop_weights(&one);
            const mha_product product = product_of_queries(&one, 1, 0);
            k->product(&product); /* no guard: nothing is hidden from this row, infinite gradients arrive */
        }
    }
}

/*
 * Takes the tile of queries against the block of keys where the walk stands.  The first tile to give something to the
 * gradients of keys and values, or of queries, stores it; later tiles add theirs, so nothing need be cleared.
 */
static void
backward_block(const mha_walk *walk, const mha_result *grad_q, void *grad_w, int first_of_keys, int first_of_queries)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;

    const mha_score_columns columns = mha_backward_tile(walk, walk->problem->score_scale);
    if (args->softcap > 0) { /* not in mha_backward_tile: what is added to a capped score has no slope */
        const size_t at = columns.from * k->itemsize;
        k->multiply_rows(walk->tile.rows, columns.width, walk->room->grads + at, walk->room->slopes + at,
                         (ptrdiff_t)walk->plan->score_stride);
    }
    const mha_product values = product_of_queries(walk, 1, first_of_keys);
    mha_guarded_product(walk, &values, 1);
    if (args->additive_weights != NULL) {
        add_additive_grads(walk, grad_q, grad_w);
        return;
    }
    const mha_product keys = product_of_queries(walk, 0, first_of_keys);
    mha_guarded_product(walk, &keys, 1);
    add_query_grads(walk, grad_q, first_of_queries);
}

/* Adds a split's gradient of q of the task's head to the caller's. */
static void
add_split(const mha_walk *walk, size_t split)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_result q = grad_q_rows(walk, split);

    for (size_t i = 0; i < args->queries; i++) {
        char *out = mha_result_at(k, &walk->job->grads->grad_q, walk->task.item, walk->task.head, i);
        if (split == 0) {
            memset(out, 0, args->head_dim * k->itemsize);
        }
        k->add_row(args->head_dim, mha_result_at(k, &q, 0, 0, i), out, 1);
    }
}

/* All queries of one head of the group against the keys of one split; the room has the statistics of one head. */
static void
backward_head(const mha_walk *group, size_t group_head, mha_interval split_keys, size_t split, void *grad_w)
{
    const mha_attention_args *args = group->problem->args;
    const mha_interval seen = mha_interval_meet(group->task.keys, split_keys);
    const int stores = group->problem->same_visibility && seen.first < seen.last;
    mha_walk walk;

    mha_walk_init(&walk, group->job, group->room);
    mha_copy_rows(&walk.task, &group->task);
    walk.task.head += group_head;
    const mha_result grad_q = grad_q_rows(&walk, split);
    mha_backward_rows(&walk);
    if (!stores || args->additive_weights != NULL) {
        clear_rows(walk.problem->kernels, &grad_q, 0, 0, (mha_interval){0, args->queries}, args->head_dim);
    }
    mha_walk_start(&walk, 1, split_keys);
    while (mha_next_prepared(&walk)) {
        backward_block(&walk, &grad_q, grad_w, stores && group_head == 0 && walk.tile.query == 0,
                       stores && walk.block.first_key == split_keys.first);
    }
    add_uniform_rows(&walk, split_keys);
}

/* All heads that share a key head against one split of its keys. */
static void
run_split(const mha_walk *walk, size_t split, void *grad_w)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_attention_grads *grads = walk->job->grads;
    const mha_kernels *k = walk->problem->kernels;
    const size_t split_keys = MHA_SPLIT_BLOCKS * walk->plan->key_block;
    const size_t item = walk->task.item, key_head = walk->task.key_head;
    const mha_interval all = {0, args->keys}, mine = {split * split_keys, (split + 1) * split_keys};
    const mha_interval keys = mha_interval_meet(mine, all), seen = mha_interval_meet(walk->task.keys, keys);
    /* Where all queries see the same keys, the first tile of queries writes all their gradients; the others add. */
    const int written = walk->problem->same_visibility && args->queries > 0 && seen.first < seen.last;
    const mha_interval unwritten = {written ? seen.last : keys.first, keys.last};

    clear_rows(k, &grads->grad_k, item, key_head, args->additive_weights != NULL ? keys : unwritten, args->head_dim);
    clear_rows(k, &grads->grad_v, item, key_head, unwritten, args->value_dim);
    for (size_t g = 0; g < walk->problem->group; g++) {
        backward_head(walk, g, keys, split, grad_w);
    }
}

/* One split of this round. */
static void
run_task(void *context, size_t number, unsigned worker)
{
    const mha_attention_job *job = context;
    const mha_plan *plan = &job->plan;
    const mha_attention_args *args = job->problem.args;
    const size_t task = number / plan->splits_abreast, split = job->first_split + number % plan->splits_abreast;
    char *grad_w = job->grad_w == NULL ? NULL : job->grad_w + (task * plan->n_splits + split) * job->grad_w_bytes;
    mha_walk walk;

    if (split < plan->n_splits) {
        mha_walk_task(&walk, job, task, worker);
        job->problem.kernels->fill(args->additive_weights != NULL ? args->head_dim : 0, 0, grad_w);
        run_split(&walk, split, grad_w);
    }
}

/* The gradients of q of one head from the splits of this round, added up in order. */
static void
join_splits(void *context, size_t task, unsigned worker)
{
    const mha_attention_job *job = context;
    const size_t heads = job->problem.args->heads;
    const size_t last = mha_min(job->first_split + job->plan.splits_abreast, job->plan.n_splits);
    mha_walk walk;

    mha_walk_init(&walk, job, &job->rooms[worker]);
    walk.task.item = task / heads;
    walk.task.head = task % heads;
    for (size_t split = job->first_split; split < last; split++) {
        add_split(&walk, split);
    }
}

void
mha_backward_run(mha_attention_job *job, const mha_attention_grads *grads)
{
    const mha_attention_args *args = job->problem.args;
    const mha_plan *plan = &job->plan;
    const mha_kernels *k = job->problem.kernels;
    void *grad_w = grads->grad_additive_weights;

    job->grads = grads;
    for (job->first_split = 0; job->first_split < plan->n_splits; job->first_split += plan->splits_abreast) {
        mha_parallel_for(plan->n_tasks * plan->splits_abreast, plan->n_workers, run_task, job);
        if (plan->n_splits > 1) {
            mha_parallel_for(args->batch * args->heads, plan->n_workers, join_splits, job);
        }
    }
    if (grad_w != NULL && args->additive_weights != NULL) {
        k->fill(args->head_dim, 0, grad_w);
        for (size_t i = 0; i < job->n_grad_w; i++) {
            k->add_row(args->head_dim, job->grad_w + i * job->grad_w_bytes, grad_w, 1);
        }
    }
    mha_score_grads_run(job);
}
