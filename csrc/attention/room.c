/*
 * room.c: how large the buffers of a worker are, and where they lie: the list in mha_room_lay_out says both.
 */
#include "room.h"

#include <string.h>

#include "runtime/scratch.h"

enum { N_PARTS = sizeof(mha_room) / sizeof(uintptr_t) };
_Static_assert(sizeof(mha_room) == N_PARTS * sizeof(uintptr_t), "a room is a list of addresses");

/* Where a part begins, counted from the room's base. */
MHA_INLINE void *
add(mha_scratch *room, size_t count, size_t itemsize)
{
    return (void *)(uintptr_t)mha_scratch_add(room, count, itemsize);
}

/* Numbers of the packed panels, or of the exponentials of additive scores (mha_additive). */
static size_t
panel_numbers(const mha_plan *plan, const mha_attention_args *args, const mha_kernels *k, size_t keys)
{
    const size_t features = args->head_dim;

    if (args->additive_weights != NULL) {
        return (plan->tile_rows + 4) * (mha_round_up(features, k->lanes) + k->lanes);
    }
    switch (plan->way) {
    case MHA_WAY_PACKED: return keys * features;
    case MHA_WAY_IN_PLACE: return k->panel_width * features;
    case MHA_WAY_COLUMNS: return mha_round_up(plan->tile_rows, k->panel_width) * features;
    default: return 0;
    }
}

size_t
mha_room_lay_out(const mha_problem *problem, const mha_plan *plan, mha_room *layout)
{
    const mha_attention_args *args = problem->args;
    const mha_kernels *k = problem->kernels;
    const size_t number = k->itemsize;
    const int backward = problem->pass == MHA_PASS_BACKWARD, by_columns = plan->way == MHA_WAY_COLUMNS;
    const size_t keys = mha_round_up(mha_min(plan->key_block, args->keys), k->panel_width);
    const size_t features = mha_round_up(args->head_dim, k->lanes), values = mha_round_up(args->value_dim, k->lanes);
    const size_t tile = plan->tile_rows, in_tile = backward ? 0 : tile, stride = plan->score_stride;
    const size_t task = plan->task_queries * plan->task_heads, in_task = backward ? 0 : task;
    const size_t joined = args->keys > plan->key_block ? values : 0;
    const size_t masked_rows = mha_hides_single_keys(problem) ? mha_max(keys, tile) : 0;
    mha_scratch at = MHA_SCRATCH_EMPTY;

    layout->panels = add(&at, panel_numbers(plan, args, k, keys), number);
    layout->value_panels = add(&at, backward ? keys * args->value_dim : 0, number);
    layout->dense_rows = add(&at, plan->copies_rows ? keys * (backward ? features : values) : 0, number);
    layout->visible_rows = add(&at, masked_rows * mha_max(features, values), number);
    layout->scores = add(&at, (by_columns ? args->keys : tile) * stride, number);
    layout->factors = add(&at, args->dropout > 0 ? tile * stride : 0, number);
    layout->grads = add(&at, backward ? tile * stride : 0, number);
    layout->slopes = add(&at, backward && args->softcap > 0 ? tile * stride : 0, number);
    layout->block_out = add(&at, in_tile * values, number);
    layout->ends = add(&at, by_columns ? stride : 0, number);
    layout->max = add(&at, task, number);
    layout->sum = add(&at, task, number);
    layout->sum_compensation = add(&at, in_task, number);
    layout->inverse = add(&at, task, number);
    layout->delta = add(&at, backward ? task : 0, number);
    layout->out_compensation = add(&at, in_task * joined, number);
    layout->rescale = add(&at, in_tile, number);
    layout->factor = add(&at, in_tile, number);
    layout->block_max = add(&at, in_tile, number);
    layout->block_sum = add(&at, in_tile, number);
    layout->mean = add(&at, backward ? 0 : values, number);
    layout->mean_compensation = add(&at, backward ? 0 : joined, number);
    layout->table =
        add(&at, backward && args->relative_bias != NULL ? 2 * args->relative_reach + 1 : 0, sizeof(double));
    layout->row_keys = add(&at, by_columns ? task : plan->task_queries, sizeof(mha_interval));
    return at.total_bytes;
}

void
mha_room_place(const mha_room *layout, const char *base, mha_room *room)
{
    uintptr_t at[N_PARTS];

    memcpy(at, layout, sizeof(at));
    for (size_t i = 0; i < N_PARTS; i++) {
        at[i] += (uintptr_t)base;
    }
    memcpy(room, at, sizeof(at));
}
