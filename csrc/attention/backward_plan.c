/*
 * backward_plan.c: how a backward pass (backward.c) is cut into tasks, and its scratch memory.
 */
#include "backward.h"

#include "runtime/common.h"
#include "runtime/threads.h"

#define KEY_BLOCK ((size_t)256)  /* two packed panels sets and two tiles of scores share the cache */
_Static_assert(KEY_BLOCK % MHA_GRAD_PART == 0, "a key block cuts a part");
#define TILES_HIGH ((size_t)8)   /* register tiles in a tile of queries: the depth of the dK and dV products */
/* Fewer heads than this, and their keys are cut into tasks as well. */
#define ENOUGH_TASKS ((size_t)8)

static double
backward_work(const mha_attention_args *args)
{
    const double scores = (double)args->batch * (double)args->heads * (double)args->queries * (double)args->keys;

    return scores * (3.0 * (double)args->head_dim + 2.0 * (double)args->value_dim + 40.0);
}

static void
plan_arena(mha_backward_plan *b, mha_scratch *scratch)
{
    mha_plan *plan = &b->plan;
    const mha_attention_args *args = plan->args;
    const size_t keys = mha_round_up(mha_min(plan->key_block, args->keys), plan->kernels->panel_width);
    const size_t tile = plan->tile_rows * plan->score_stride;
    const size_t widest = mha_max(args->head_dim, args->value_dim);
    const mha_arena_sizes sizes = {
        .packed_keys = args->additive_weights == NULL ? keys * args->head_dim : 0,
        .packed_values = keys * args->value_dim,
        .dense_rows = plan->copies_rows == MHA_COPY_NEVER
                          ? 0
                          : keys * mha_round_up(args->head_dim, plan->kernels->lanes),
        .scores = tile,
        .grads = tile,
        .slopes = plan->keeps_slopes ? tile : 0,
        .factors = plan->factor_rows * plan->score_stride,
        .masked_values = mha_hides_single_keys(plan) ? mha_max(keys, plan->tile_rows) * widest : 0,
        .max = args->queries,
        .sum = args->queries,
        .inverse = args->queries,
        .delta = args->queries,
        .span_grad_q = b->n_spans > 1 && b->spans_abreast == 1 ? args->queries * args->head_dim : 0,
        .row_keys = args->queries,
        .visible = plan->tile_rows,
    };

    mha_plan_arenas(plan, &sizes, scratch);
}

mha_status
mha_backward_plan_init(mha_backward_plan *b, const mha_attention_args *args, mha_scratch *scratch)
{
    mha_plan *plan = &b->plan;
    const mha_status status = mha_plan_describe(plan, args);

    b->grads = NULL;
    if (status != MHA_OK) {
        return status;
    }
    const mha_kernels *k = plan->kernels;
    const size_t heads = args->batch * args->kv_heads;
    plan->key_block = KEY_BLOCK;
    plan->tile_rows = TILES_HIGH * k->tile_rows;
    plan->score_stride = mha_round_up(mha_min(KEY_BLOCK, args->keys), k->panel_width) + k->lanes;
    plan->factor_rows = args->dropout > 0 ? mha_factor_rows(plan) : 0;
    plan->task_queries = mha_max(args->queries, 1);
    plan->tasks_per_head = 1;
    plan->packs_keys = args->additive_weights == NULL;
    plan->packs_values = 1;
    plan->copies_rows = plan->packs_keys ? mha_copying_of(plan, &args->k, args->head_dim) : MHA_COPY_NEVER;
    plan->keeps_slopes = args->softcap > 0;

    b->n_spans = mha_max(mha_ceil_div(args->keys, KEY_BLOCK * MHA_SPAN_BLOCKS), 1);
    b->spans_abreast = heads > 0 && heads < ENOUGH_TASKS ? mha_min(mha_ceil_div(ENOUGH_TASKS, heads), b->n_spans) : 1;
    const int has_key_grads = args->keys > 0 && args->head_dim + args->value_dim > 0;
    plan->n_tasks = args->queries > 0 || has_key_grads ? heads * b->spans_abreast : 0;
    plan->n_workers = mha_threads_for(mha_max(plan->n_tasks, args->queries), backward_work(args));

    b->partial_bytes = args->batch * args->heads * args->queries * args->head_dim * k->itemsize;
    b->partial_at = mha_scratch_add(scratch, b->spans_abreast > 1 ? b->spans_abreast : 0, b->partial_bytes);
    b->weights_bytes = mha_round_up(args->additive_weights != NULL ? args->head_dim * k->itemsize : 0, MHA_ALIGN);
    b->n_weights = plan->n_tasks == 0 ? 0 : b->spans_abreast == 1 ? heads : heads * b->n_spans;
    b->weights_at = mha_scratch_add(scratch, b->n_weights, b->weights_bytes);
    b->table_bytes = args->relative_bias != NULL ? (2 * args->relative_reach + 1) * sizeof(double) : 0;
    b->table_bytes = mha_round_up(b->table_bytes, MHA_ALIGN);
    b->tables_at = mha_scratch_add(scratch, plan->n_workers, b->table_bytes);
    plan_arena(b, scratch);
    return MHA_OK;
}
