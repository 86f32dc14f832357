/*
 * columns.c: attention over few keys, in which a row of scores is a vector or two: tiles of one head, or single queries
 * of several items.
 *
 * The work per head is then little more than the two products, and the scores stand transposed, a row for
 * each key: softmax_columns.inc says why.  Queries are packed instead of keys, and the product with the
 * values reads the weights by columns, which costs nothing.  All additions are those of forward.c,
 * in the same order.
 */
#include "forward.h"

#include "empty_rows.h"

/* average_row takes one sum over all keys of a row, other tiles one per part: the same bits, for there is one part. */
_Static_assert(MHA_SHORT_KEYS <= MHA_VALUE_PART, "short rows have several parts");

/* Writes how many keys the query of column i sees, as a `real`: vectors of key numbers are compared with it. */
MHA_INLINE void
write_end(const mha_walk *walk, size_t i, size_t seen)
{
    const int few = (int)seen; /* an int becomes a float in one instruction */

    if (walk->problem->kernels->itemsize == sizeof(double)) {
        ((double *)(void *)walk->room->ends)[i] = few;
    } else {
        ((float *)(void *)walk->room->ends)[i] = (float)few;
    }
}

/*
 * Takes the softmax of n columns of `keys` scores (the first column is the tile's first row), and writes the weights if
 * they are wanted.  `ends` is NULL if all queries see all of these keys.  Returns 1 if a row is empty.
 */
static int
softmax_columns(const mha_walk *walk, size_t n, size_t keys, const char *ends)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_softmax_columns softmax = {
        .queries = n,
        .keys = keys,
        .ends = ends,
        .scores = walk->room->scores,
        .scores_row = (ptrdiff_t)walk->plan->score_stride,
        .max = mha_statistics_at(walk, walk->room->max),
        .sum = mha_statistics_at(walk, walk->room->sum),
        .inverse = mha_statistics_at(walk, walk->room->inverse),
    };
    const int has_empty = k->softmax_columns(&softmax);

    if (args->weights != NULL) {
        k->weights_columns(&softmax, args->keys, mha_weights_at(walk, 0));
    }
    return has_empty;
}

/* --- A tile of one head: its queries are the columns ----------------------------------------------- */

static void
write_ends(const mha_walk *walk)
{
    const mha_rows *tile = &walk->tile;
    const size_t columns = mha_round_up(tile->rows, walk->problem->kernels->lanes);

    for (size_t i = 0; i < columns; i++) { /* no lane behind the rows looks empty */
        write_end(walk, i, i < tile->rows ? tile->row_keys[i].last : tile->keys.last);
    }
}

/* Scores of the tile's queries (columns) against its keys (rows). */
static void
score_columns(const mha_walk *walk)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_rows *tile = &walk->tile;
    const mha_room *room = walk->room;
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
        .c_row = (ptrdiff_t)walk->plan->score_stride,
        .scale = &walk->problem->scale,
    };

    k->pack_panels(mha_operand_at(k, &args->q, tile->item, tile->head, tile->query), args->q.row_stride, 0, tile->rows,
                   args->head_dim, room->panels);
    k->product(&product);
}

int
mha_attend_columns(const mha_walk *walk)
{
    const mha_rows *tile = &walk->tile;
    const mha_result *out = &walk->problem->args->out;
    const char *ends = tile->row_keys != NULL ? walk->room->ends : NULL;
    mha_product product;

    if (ends != NULL) { /* early: a vector load of numbers just stored would wait */
        write_ends(walk);
    }
    score_columns(walk);
    const int has_empty = softmax_columns(walk, tile->rows, tile->keys.last, ends);
    mha_describe_product(walk, walk->room->scores, 1, &product);
    product.a_row = 1;
    product.a_step = (ptrdiff_t)walk->plan->score_stride;
    product.c = mha_result_at(walk->problem->kernels, out, tile->item, tile->head, tile->query);
    product.c_row = out->row_stride;
    product.scale = mha_statistics_at(walk, walk->room->inverse);
    product.scale_step = 1;
    mha_guarded_product(walk, &product, 0);
    return has_empty;
}

/* --- One query an item, as in a decoder: the columns are the rows of several items ------------------ */

/* The scores of the task's one row, as column `column`. */
static void
score_item(const mha_walk *walk, size_t column)
{
    mha_additive additive = mha_describe_additive(walk, &walk->task, walk->task.keys);

    additive.scores = walk->room->scores + column * walk->problem->kernels->itemsize;
    additive.scores_step = (ptrdiff_t)walk->plan->score_stride;
    walk->problem->kernels->additive_scores(&additive);
    write_end(walk, column, walk->task.keys.last);
}

/* Gives the columns behind the last row a score of 0 for one key, so that no lane works with what memory held. */
static void
fill_columns(const mha_walk *walk, size_t first)
{
    const mha_kernels *k = walk->problem->kernels;

    for (size_t i = first; i % k->lanes != 0; i++) {
        k->fill(1, 0, walk->room->scores + i * k->itemsize);
        write_end(walk, i, 1);
    }
}

/* The row's weights, which are column `column`, times its values. */
static void
average_item(const mha_walk *walk, const mha_rows *row, size_t column)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_average average = {
        .keys = row->keys.last,
        .cols = args->value_dim,
        .weights = walk->room->scores + column * k->itemsize,
        .weights_step = (ptrdiff_t)walk->plan->score_stride,
        .values = mha_operand_at(k, &args->v, row->item, row->key_head, 0),
        .values_row = args->v.row_stride,
        .scale = walk->room->inverse + column * k->itemsize,
        .out = mha_result_at(k, &args->out, row->item, row->head, 0),
    };
    k->average_row(&average);
}

void
mha_items_task(void *context, size_t number, unsigned worker)
{
    const mha_attention_job *job = context;
    const mha_attention_args *args = job->problem.args;
    const size_t itemsize = job->problem.kernels->itemsize, first = number * job->plan.task_heads;
    const size_t n = mha_min(job->plan.task_heads, args->batch * args->heads - first);
    mha_room room = job->rooms[worker];
    mha_rows rows[MHA_SHORT_ITEMS];
    mha_walk walk;

    mha_walk_init(&walk, job, &room);
    for (size_t i = 0; i < n; i++) {
        if (job->problem.watched && mha_interrupted()) {
            return;
        }
        mha_walk_describe_task(&walk, first + i);
        score_item(&walk, i);
        rows[i] = walk.task;
        rows[i].row_keys = NULL; /* `keys` says it for one row */
    }
    fill_columns(&walk, n);
    walk.task = rows[0];
    mha_walk_describe_head(&walk, 0);
    const int has_empty = softmax_columns(&walk, n, args->keys, room.ends);
    for (size_t i = 0; i < n; i++) {
        average_item(&walk, &rows[i], i);
    }
    for (size_t i = 0; i < n && (has_empty || job->row_max != NULL || args->lse != NULL); i++) {
        walk.task = rows[i];
        mha_finish_task(&walk, has_empty);
        room.max += itemsize; /* the next row's */
        room.sum += itemsize;
    }
}
