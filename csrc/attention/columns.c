/*
 * columns.c: attention over few keys, in which a row of scores is a vector or two.
 *
 * The work per head is then little more than the two products, and the scores stand transposed, a row for
 * each key: softmax_columns.inc says why.  So queries fill the lanes, and those of one head may be too few: a
 * task gathers runs, each some queries of one head of one item, and their columns stand side by side.
 * Queries are packed instead of keys, and the product with the values reads the weights by columns, which costs
 * nothing.  All additions are those of forward.c, in the same order.
 */
#include "forward.h"

#include "empty_rows.h"

/* average_row takes one sum over all keys of a row, other tiles one per part: the same bits, for there is one part. */
_Static_assert(MHA_SHORT_KEYS <= MHA_VALUE_PART, "short rows have several parts");

/* The runs of a task: run i's columns begin at runs[i].place. */
typedef struct {
    mha_rows runs[MHA_GATHERED];
    size_t n, columns; /* how many runs, and queries in all */
    size_t keys;       /* what any query sees lies before this key */
    int has_ends;      /* not all columns see all of these keys: room->ends says how many */
} gathered;

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

/* Describes the task's runs, and writes the ends: early, for a vector load of numbers just stored would wait. */
static void
gather(const mha_walk *walk, size_t task, gathered *all)
{
    const mha_attention_args *args = walk->problem->args;
    const size_t first = task * walk->plan->task_heads;
    const size_t n_runs = args->batch * args->heads * walk->plan->tasks_per_head;

    all->n = mha_min(walk->plan->task_heads, n_runs - first);
    all->columns = all->keys = 0;
    all->has_ends = !walk->problem->same_visibility || args->additive_weights != NULL;
    for (size_t i = 0; i < all->n; i++) {
        mha_rows *run = &all->runs[i];

        mha_describe_rows(walk, first + i, all->columns, run);
        all->columns += run->rows;
        all->has_ends |= i > 0 && run->keys.last != all->keys;
        all->keys = mha_max(all->keys, run->keys.last);
    }
    for (size_t i = 0; all->has_ends && i < all->n; i++) {
        const mha_rows *run = &all->runs[i];

        for (size_t j = 0; j < run->rows; j++) {
            write_end(walk, run->place + j, run->row_keys != NULL ? run->row_keys[j].last : run->keys.last);
        }
    }
}

/* Makes the run the tile that the walk stands at: all its keys are one block. */
static void
stand_at(mha_walk *walk, const mha_rows *run)
{
    mha_copy_rows(&walk->tile, run);
    walk->block.keys.first = run->keys.first;
    walk->block.keys.last = run->keys.last;
}

/* Scores of the run's queries (columns) against its keys (rows), in whole vectors: the next run's come later. */
static void
score_run(const mha_walk *walk, const mha_rows *run)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_room *room = walk->room;
    const mha_product product = {
        .rows = run->keys.last,
        .cols = mha_round_up(run->rows, k->lanes),
        .depth = args->head_dim,
        .part = MHA_SCORE_PART,
        .a = mha_operand_at(k, &args->k, run->item, run->key_head, 0),
        .a_row = args->k.row_stride,
        .a_step = 1,
        .b = {.data = room->panels, .layout = MHA_PANELS},
        .c = room->scores + run->place * k->itemsize,
        .c_row = (ptrdiff_t)walk->plan->score_stride,
        .scale = &walk->problem->scale,
    };

    k->pack_panels(mha_operand_at(k, &args->q, run->item, run->head, run->query), args->q.row_stride, 0, run->rows,
                   args->head_dim, room->panels);
    k->product(&product);
}

/* Additive scores of a run of one query. */
static void
score_additive(const mha_walk *walk, const mha_rows *run)
{
    mha_additive additive = mha_describe_additive(walk, run, run->keys);

    additive.scores = walk->room->scores + run->place * walk->problem->kernels->itemsize;
    additive.scores_step = (ptrdiff_t)walk->plan->score_stride;
    walk->problem->kernels->additive_scores(&additive);
}

/* Columns behind the last: a score of 0 for each key, or for one if there are ends.  No lane works with old memory. */
static void
fill_lanes(const mha_walk *walk, const gathered *all)
{
    const mha_kernels *k = walk->problem->kernels;
    const size_t n = mha_round_up(all->columns, k->lanes) - all->columns, keys = all->has_ends ? 1 : all->keys;
    const size_t row_bytes = walk->plan->score_stride * k->itemsize;
    char *behind = walk->room->scores + all->columns * k->itemsize;

    for (size_t j = 0; n > 0 && j < keys; j++) {
        k->fill(n, 0, behind + j * row_bytes);
    }
    for (size_t i = 0; all->has_ends && i < n; i++) {
        write_end(walk, all->columns + i, 1);
    }
}

static void
score(const mha_walk *walk, const gathered *all)
{
    for (size_t i = 0; i < all->n; i++) {
        if (walk->problem->args->additive_weights != NULL) {
            score_additive(walk, &all->runs[i]);
        } else {
            score_run(walk, &all->runs[i]);
        }
    }
    if (all->n > 1 || all->has_ends) { /* else the one run's product filled them */
        fill_lanes(walk, all);
    }
}

/* Takes the softmax of all columns, and writes the weights if they are wanted.  Returns 1 if a row is empty. */
static int
softmax(const mha_walk *walk, const gathered *all)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_room *room = walk->room;
    const mha_softmax_columns softmax = {
        .queries = all->columns,
        .keys = all->keys,
        .ends = all->has_ends ? room->ends : NULL,
        .scores = room->scores,
        .scores_row = (ptrdiff_t)walk->plan->score_stride,
        .max = room->max,
        .sum = room->sum,
        .inverse = room->inverse,
    };
    const int has_empty = k->softmax_columns(&softmax);

    if (args->weights != NULL) { /* runs are numbered as rows of the weights */
        k->weights_columns(&softmax, args->keys, mha_weights_at(walk->problem, &all->runs[0], 0));
    }
    return has_empty;
}

/*
 * A run of one query: its weights, which are a column, times its values.  (By the product, 64 items took 1.15 of the
 * time with 10 keys of 32 numbers, 128 items 1.03 with 9 keys of 256: additive attention, AMD EPYC of family 26,
 * AVX-512.)
 */
static void
average_row(const mha_walk *walk, const mha_rows *run)
{
    const mha_attention_args *args = walk->problem->args;
    const mha_kernels *k = walk->problem->kernels;
    const mha_average average = {
        .keys = run->keys.last,
        .cols = args->value_dim,
        .weights = walk->room->scores + run->place * k->itemsize,
        .weights_step = (ptrdiff_t)walk->plan->score_stride,
        .values = mha_operand_at(k, &args->v, run->item, run->key_head, 0),
        .values_row = args->v.row_stride,
        .scale = walk->room->inverse + run->place * k->itemsize,
        .out = mha_result_at(k, &args->out, run->item, run->head, run->query),
    };
    k->average_row(&average);
}

/* The run's weights times its values. */
static void
average_run(mha_walk *walk, const mha_rows *run)
{
    const mha_kernels *k = walk->problem->kernels;
    const mha_result *out = &walk->problem->args->out;
    mha_product product;

    stand_at(walk, run);
    mha_describe_product(walk, walk->room->scores + run->place * k->itemsize, 1, &product);
    product.a_row = 1;
    product.a_step = (ptrdiff_t)walk->plan->score_stride;
    product.c = mha_result_at(k, out, run->item, run->head, run->query);
    product.c_row = out->row_stride;
    product.scale = mha_statistics_at(walk, run, walk->room->inverse);
    product.scale_step = 1;
    mha_guarded_product(walk, &product, 0);
}

void
mha_columns_task(void *context, size_t task, unsigned worker)
{
    const mha_attention_job *job = context;
    gathered all;
    mha_walk walk;

    if (job->problem.watched && mha_interrupted()) {
        return;
    }
    mha_walk_init(&walk, job, &job->rooms[worker]);
    walk.block.first_key = 0;
    walk.dense_rows = NULL;
    gather(&walk, task, &all);
    score(&walk, &all);
    const int has_empty = softmax(&walk, &all);
    for (size_t i = 0; i < all.n; i++) {
        if (all.runs[i].rows == 1) {
            average_row(&walk, &all.runs[i]);
        } else {
            average_run(&walk, &all.runs[i]);
        }
    }
    for (size_t i = 0; i < all.n && (has_empty || job->row_max != NULL || job->problem.args->lse != NULL); i++) {
        mha_finish_rows(&walk, &all.runs[i], has_empty);
    }
}
