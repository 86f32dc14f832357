/*
 * room.c: how large the buffers of a worker are, and where they lie: the list in mha_room_lay_out says both.  (Taken
 * from the scratch memory one by one, as all else, they made a call of 2 us take 1.03 of the time: it has few of them.)
 */
#include "room.h"

#include "runtime/common.h"

#define LARGEST ((size_t)PTRDIFF_MAX)

/* Takes the next `count` elements of `size` (at most MHA_ALIGN) bytes, behind what is used so far. */
MHA_INLINE void *
take(size_t *used, size_t count, size_t size)
{
    const size_t at = *used;

    if (count > 0) { /* a call has no use for most of the buffers */
        const size_t n_bytes = count > LARGEST / MHA_ALIGN ? LARGEST : mha_round_up(count * size, MHA_ALIGN);
        *used = mha_min(at, LARGEST) + n_bytes; /* once LARGEST, never less */
    }
    return (void *)(uintptr_t)at;
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
mha_room_lay_out(const mha_problem *problem, const mha_plan *plan, char *base, mha_room *room)
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
    size_t at = (uintptr_t)base;

    room->panels = take(&at, panel_numbers(plan, args, k, keys), number);
    room->value_panels = take(&at, backward ? keys * args->value_dim : 0, number);
    room->dense_rows = take(&at, plan->copies_rows ? keys * (backward ? features : values) : 0, number);
    room->visible_rows = take(&at, masked_rows * mha_max(features, values), number);
    room->scores = take(&at, (by_columns ? args->keys : tile) * stride, number);
    room->factors = take(&at, args->dropout > 0 ? tile * stride : 0, number);
    room->grads = take(&at, backward ? tile * stride : 0, number);
    room->slopes = take(&at, backward && args->softcap > 0 ? tile * stride : 0, number);
    room->block_out = take(&at, in_tile * values, number);
    room->ends = take(&at, by_columns ? stride : 0, number);
    room->max = take(&at, task, number);
    room->sum = take(&at, task, number);
    room->sum_compensation = take(&at, in_task, number);
    room->inverse = take(&at, task, number);
    room->delta = take(&at, backward ? task : 0, number);
    room->out_compensation = take(&at, in_task * joined, number);
    room->rescale = take(&at, in_tile, number);
    room->factor = take(&at, in_tile, number);
    room->block_max = take(&at, in_tile, number);
    room->block_sum = take(&at, in_tile, number);
    room->mean = take(&at, backward ? 0 : values, number);
    room->mean_compensation = take(&at, backward ? 0 : joined, number);
    room->table = take(&at, backward && args->relative_bias != NULL ? 2 * args->relative_reach + 1 : 0, sizeof(double));
    room->row_keys = take(&at, by_columns ? task : plan->task_queries, sizeof(mha_interval));
    return at - (uintptr_t)base;
}
