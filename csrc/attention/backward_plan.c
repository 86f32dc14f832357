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

mha_status
mha_backward_plan_init(mha_plan *plan, const mha_attention_args *args, mha_scratch *scratch)
{
    const mha_status status = mha_plan_describe(plan, args, MHA_PASS_BACKWARD);

    if (status != MHA_OK) {
        return status;
    }
    const mha_kernels *k = plan->kernels;
    const size_t heads = args->batch * args->kv_heads;
    plan->way = args->additive_weights == NULL ? MHA_WAY_PACKED : MHA_WAY_ADDITIVE;
    plan->key_block = KEY_BLOCK;
    plan->tile_rows = TILES_HIGH * k->tile_rows;
    plan->score_stride = mha_round_up(mha_min(KEY_BLOCK, args->keys), k->panel_width) + k->lanes;
    plan->factor_rows = args->dropout > 0 ? mha_factor_rows(plan) : 0;
    plan->copies_rows = plan->way == MHA_WAY_PACKED && args->queries >= MHA_COPY_QUERIES;
    plan->keeps_slopes = args->softcap > 0;
    plan->task_queries = mha_max(args->queries, 1);
    plan->task_heads = 1;
    plan->tasks_per_head = 1;

    plan->n_spans = mha_max(mha_ceil_div(args->keys, KEY_BLOCK * MHA_SPAN_BLOCKS), 1);
    plan->spans_abreast =
        heads > 0 && heads < ENOUGH_TASKS ? mha_min(mha_ceil_div(ENOUGH_TASKS, heads), plan->n_spans) : 1;
    const int has_key_grads = args->keys > 0 && args->head_dim + args->value_dim > 0;
    plan->n_tasks = args->queries > 0 || has_key_grads ? heads * plan->spans_abreast : 0;
    plan->work = 2.5 * mha_attention_work(args); /* five products for two */
    plan->n_workers = mha_threads_for(mha_max(plan->n_tasks, args->queries), plan->work);

    plan->partial_bytes = args->batch * args->heads * args->queries * args->head_dim * k->itemsize;
    plan->partial_at = mha_scratch_add(scratch, plan->spans_abreast > 1 ? plan->spans_abreast : 0, plan->partial_bytes);
    plan->grad_w_bytes = mha_round_up(args->additive_weights != NULL ? args->head_dim * k->itemsize : 0, MHA_ALIGN);
    plan->n_grad_w = plan->n_tasks == 0 ? 0 : plan->spans_abreast == 1 ? heads : heads * plan->n_spans;
    plan->grad_w_at = mha_scratch_add(scratch, plan->n_grad_w, plan->grad_w_bytes);
    mha_plan_rooms(plan, scratch);
    return MHA_OK;
}
