/*
 * columns.c: attention over few keys, in which a row of scores is a vector or two: tiles of one head, or single queries
 * of several items.
 *
 * The work per head is then little more than the two products, and the scores stand transposed, a row for
 * each key: softmax_columns.inc says why.  Queries are packed in place of keys, and the product with the
 * values reads the weights by columns, which costs nothing.  All additions are those of forward.c,
 * in the same order.
 */
#include "forward.h"

/* average_row takes one sum over all keys of a row, other tiles one a part: the same bits, if there is one part. */
_Static_assert(MHA_SHORT_KEYS <= MHA_VALUE_PART, "short rows have several parts");

/* Scores of the tile's queries (columns) against its keys (rows). */
static void
score_columns(const mha_plan *plan, const mha_rows *tile, const mha_room *room)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;
    const mha_product product = {
        .rows = tile->keys.last,
        .cols = mha_round_up(tile->rows, k->lanes),
        .depth = args->head_dim,
        .part = MHA_SCORE_PART,
        .a = mha_operand_at(k, &args->k, tile->item, tile->key_head, 0),
        .a_row = args->k.row_stride,
        .a_step = 1,
        .b = {.data = room->panels, .layout = MHA_PANELS},
        .c = room->scores,
        .c_row = (ptrdiff_t)plan->score_stride,
        .scale = &plan->scale,
    };

    k->pack_panels(mha_operand_at(k, &args->q, tile->item, tile->head, tile->query), args->q.row_stride, 0, tile->rows,
                   args->head_dim, room->panels);
    k->product(&product);
}

/* How many keys query i sees, as a number that compares with those of keys in vectors. */
MHA_INLINE void
write_end(const mha_plan *plan, char *ends, size_t i, size_t seen)
{
    const int few = (int)seen; /* which becomes a float in one instruction */

    if (plan->kernels->itemsize == sizeof(double)) {
        ((double *)(void *)ends)[i] = few;
    } else {
        ((float *)(void *)ends)[i] = (float)few;
    }
}

static void
write_ends(const mha_plan *plan, const mha_rows *tile, char *ends)
{
    const size_t lanes = mha_round_up(tile->rows, plan->kernels->lanes);

    for (size_t i = 0; i < lanes; i++) { /* no lane behind the rows looks empty */
        write_end(plan, ends, i, i < tile->rows ? tile->row_keys[i].last : tile->keys.last);
    }
}

/*
 * The softmax of `queries` columns of `keys` scores, whose statistics are those of the task from row `state` on; and
 * the weights, if they are wanted, from row `at` of the (B,H,Q) arrays on.  Returns 1 if a row is empty.
 */
static int
softmax_columns(const mha_plan *plan, const mha_room *room, size_t queries, size_t keys, const char *ends, size_t state,
                size_t at)
{
    const mha_kernels *k = plan->kernels;
    const size_t n_keys = plan->args->keys;
    const mha_softmax_columns softmax = {
        .queries = queries,
        .keys = keys,
        .ends = ends,
        .scores = room->scores,
        .scores_row = (ptrdiff_t)plan->score_stride,
        .max = room->max + state * k->itemsize,
        .sum = room->sum + state * k->itemsize,
        .inverse = room->inverse + state * k->itemsize,
    };
    const int has_empty = k->softmax_columns(&softmax);

    if (plan->args->weights != NULL) {
        k->weights_columns(&softmax, n_keys, (char *)plan->args->weights + at * n_keys * k->itemsize);
    }
    return has_empty;
}

int
mha_attend_columns(const mha_plan *plan, const mha_rows *task, const mha_rows *tile, const mha_room *room)
{
    const mha_kernels *k = plan->kernels;
    const mha_key_block block = {.keys = {0, tile->keys.last}};
    const char *ends = tile->row_keys != NULL ? room->ends : NULL;
    const size_t state = mha_row_in_task(plan, task, tile);

    if (ends != NULL) { /* some time before they are read as vectors */
        write_ends(plan, tile, room->ends);
    }
    score_columns(plan, tile, room);
    const int has_empty =
        softmax_columns(plan, room, tile->rows, tile->keys.last, ends, state, mha_row_index(plan, tile));
    mha_product product;
    mha_describe_product(plan, tile, &block, room->scores, NULL, 1, &product);
    product.a_row = 1;
    product.a_step = (ptrdiff_t)plan->score_stride;
    product.c = mha_result_at(k, &plan->args->out, tile->item, tile->head, tile->query);
    product.c_row = plan->args->out.row_stride;
    product.scale = room->inverse + state * k->itemsize;
    product.scale_step = 1;
    mha_guarded_product(plan, tile, room, &block, &product, 0);
    return has_empty;
}

/* --- One query an item, as in a decoder: the columns are the rows of several items ------------------ */

/* The rows of key head `number` of all items, whose first column is `column`: what they see, and their scores. */
static mha_rows
score_items(const mha_plan *plan, size_t number, size_t column, const mha_room *room)
{
    const mha_kernels *k = plan->kernels;
    mha_rows row;

    mha_describe_task(plan, number, room, &row);
    row.row_keys = NULL; /* of one row */
    for (size_t g = 0; g < plan->group; g++, row.head++) {
        mha_additive additive = mha_describe_additive(plan, &row, row.keys);

        additive.scores = room->scores + (column + g) * k->itemsize;
        additive.scores_step = (ptrdiff_t)plan->score_stride;
        k->additive_scores(&additive);
        write_end(plan, room->ends, column + g, row.keys.last);
    }
    row.head -= plan->group;
    return row;
}

/* The rows' weights, one column for each, times their values. */
static void
average_items(const mha_plan *plan, const mha_rows *task, size_t column, const mha_room *room)
{
    const mha_attention_args *args = plan->args;
    const mha_kernels *k = plan->kernels;

    for (size_t g = 0; g < plan->group; g++) {
        const size_t at = (column + g) * k->itemsize;
        const mha_average row = {
            .keys = task->keys.last,
            .cols = args->value_dim,
            .weights = room->scores + at,
            .weights_step = (ptrdiff_t)plan->score_stride,
            .values = mha_operand_at(k, &args->v, task->item, task->key_head, 0),
            .values_row = args->v.row_stride,
            .scale = room->inverse + at,
            .out = mha_result_at(k, &args->out, task->item, task->head + g, 0),
        };
        k->average_row(&row);
    }
}

/* The columns behind the last row: a score of 0 for one key, so that no lane works with what memory held. */
static void
fill_columns(const mha_plan *plan, size_t first, const mha_room *room)
{
    for (size_t i = first; i % plan->kernels->lanes != 0; i++) {
        plan->kernels->fill(1, 0, room->scores + i * plan->kernels->itemsize);
        write_end(plan, room->ends, i, 1);
    }
}

void
mha_items_task(void *context, size_t number, unsigned worker)
{
    const mha_plan *plan = context;
    const mha_attention_args *args = plan->args;
    const mha_room *room = &plan->rooms[worker];
    const size_t at_once = plan->task_heads / plan->group, first = number * at_once;
    const size_t n = mha_min(at_once, args->batch * args->kv_heads - first), rows = n * plan->group;
    mha_rows heads[MHA_SHORT_ITEMS];

    for (size_t i = 0; i < n; i++) {
        if (plan->watched && mha_interrupted()) {
            return;
        }
        heads[i] = score_items(plan, first + i, i * plan->group, room);
    }
    fill_columns(plan, rows, room);
    const int has_empty = softmax_columns(plan, room, rows, args->keys, room->ends, 0, first * plan->group);
    for (size_t i = 0; i < n; i++) {
        average_items(plan, &heads[i], i * plan->group, room);
    }
    for (size_t i = 0; i < n && (has_empty || plan->row_max != NULL || args->lse != NULL); i++) {
        mha_room own = *room;
        own.max += i * plan->group * plan->kernels->itemsize;
        own.sum += i * plan->group * plan->kernels->itemsize;
        mha_finish_task(plan, &heads[i], &own, has_empty);
    }
}
