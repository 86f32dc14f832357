/*
 * attention.h: what the drivers of attention share: the plan of one call, its scratch memory, and
 * one tile of scores.  For this folder and csrc/layer.
 *
 * Shape of the work: a task is some queries of all heads that share one key head.  It walks over
 * key blocks (packed once per task), and in each over tiles of query rows.
 */
#ifndef MHA_ATTENTION_H
#define MHA_ATTENTION_H

#include "runtime/common.h"
#include "kernels/dispatch.h"
#include "mha.h"
#include "runtime/scratch.h"
#include "visible.h"

/* The products of a score are summed in parts of so many: half the error of one long sum, and it costs nothing. */
#define MHA_SCORE_PART ((size_t)32)

/* The products of an output are summed in parts of so many keys, those of a gradient in longer ones. */
#define MHA_VALUE_PART ((size_t)64)
#define MHA_GRAD_PART ((size_t)128)

/* Most single-query rows of different items that are scored by columns side by side. */
#define MHA_SHORT_ITEMS ((size_t)64)

/*
 * So many blocks of a row are joined by plain additions, whose errors grow with the square root of their number; the
 * blocks behind them keep what rounding loses.  By a block's place, so that a row does not depend on what follows.
 */
#define MHA_PLAIN_JOINS ((size_t)16)

/*
 * One worker's memory.  The list makes the members of the arena, of its sizes and of its offsets; the two plans, plan.c
 * and backward_plan.c, say how many numbers (or intervals, or counts) each has, and nothing where it has none.
 */
#define MHA_ARENA(X) \
    X(char, packed_keys)       /* a key block as panels, or a tile of queries where scores stand by columns */ \
    X(char, packed_values)     /* backward: the same of the values */ \
    X(char, dense_rows)        /* rows of a key block side by side: values, on the way back keys */ \
    X(char, scores)            /* tile_rows rows, score_stride apart */ \
    X(char, factors)           /* of dropout, like scores */ \
    X(char, grads)             /* backward: dP, then dS, like scores */ \
    X(char, slopes)            /* backward: of the capped scores, like scores */ \
    X(char, block_out)         /* tile_rows x padded value_dim: what one key block gives to the output */ \
    X(char, masked_values)     /* room to hide single rows of a key block, if something may hide single keys */ \
    X(char, max)               /* one per row of the task, and so the next four */ \
    X(char, sum) \
    X(char, sum_compensation) \
    X(char, inverse) \
    X(char, delta)             /* backward */ \
    X(char, out_compensation)  /* padded value_dim per row of the task: what sums over many blocks lose */ \
    X(char, rescale)           /* one per row of a tile, and so the next three */ \
    X(char, factor) \
    X(char, block_max) \
    X(char, block_sum) \
    X(char, ends)              /* one per column of scores: how many keys a query sees */ \
    X(char, mean)              /* padded value_dim: the mean of all values, for empty rows; what it loses */ \
    X(char, mean_compensation) \
    X(char, span_grad_q)       /* backward: one span's gradient of q of one head, where a task has several spans */ \
    X(mha_interval, row_keys)  /* one per query of the task */ \
    X(size_t, visible)         /* backward: one per row of a tile: how many keys of a block it sees */

#define MHA_ARENA_MEMBER(type, name) type *name;
#define MHA_ARENA_SIZE(type, name) size_t name;

typedef struct {
    MHA_ARENA(MHA_ARENA_MEMBER)
} mha_arena;

typedef struct {
    MHA_ARENA(MHA_ARENA_SIZE)
} mha_arena_sizes;

typedef enum {
    MHA_PLAN_FORWARD,
    MHA_PLAN_IN_TASK, /* forward inside a task of the caller's: one thread */
    MHA_PLAN_WEIGHTS  /* the weights pass alone, which goes by rows */
} mha_plan_use;

/* Are rows of a key block copied side by side, on whole vectors, before tiles multiply them? */
typedef enum {
    MHA_COPY_NEVER,
    MHA_COPY_MISALIGNED, /* where a vector of them would take two accesses, which only their address tells */
    MHA_COPY_ALWAYS
} mha_copying;

/* Everything about a call that does not change from task to task. */
typedef struct {
    mha_plan_use use;
    const mha_attention_args *args;
    const mha_kernels *kernels;
    mha_scalar scale, one;
    int same_visibility;     /* all queries of an item see the same keys: 0 .. length */
    size_t first_item; /* number of item 0 in the caller's batch, which its dropout depends on */
    size_t group;      /* query heads per key head */
    size_t key_block;  /* keys per block; a function of the head sizes only, never of the data */
    size_t score_stride; /* from one row of a tile's scores to the next */
    size_t tile_rows;  /* query rows per tile */
    size_t task_queries; /* queries per task */
    size_t tasks_per_head;   /* tasks per key head */
    size_t n_tasks;
    size_t n_splits;   /* > 1: few queries on many keys; so many key blocks of each task are tasks of their own */
    size_t partial_at, partial_bytes; /* what these leave behind for each block, see forward.c */
    int keys_in_rows;  /* one register tile of queries: keys are read where they lie, and once */
    int by_columns;    /* rows are short: scores stand transposed, see short.c */
    int by_items;      /* the same for one query an item, of several items at once */
    size_t heads_at_once; /* key heads per task: 1, or several by_items */
    int watched;       /* the call may be given up half-way, see runtime/threads_interrupt.h */
    double work;       /* multiply-adds of the call, roughly: what decides about threads */
    unsigned n_workers;
    int packs_keys, packs_values; /* what becomes of a key block before tiles meet it */
    mha_copying copies_rows; /* and of its values, on the way back of its keys */
    size_t factor_rows; /* of a tile that get their dropout factors, and use them, before the next do */
    int keeps_slopes; /* scores are capped, and the way back needs by how much */
    int weights_later; /* rows may span several blocks: weights are written by a second pass */
    void *row_max, *row_sum; /* the caller's, or scratch where the weights need them, or NULL */
    size_t row_keys_at;
    const mha_interval *row_keys; /* one per query, where those of all items see the same; else NULL: task by task */
    const char *memory; /* set by mha_plan_place once the scratch memory is there */
    size_t stats_at[2];
    mha_arena_sizes arena_at; /* offsets of the arena's members within a worker's share */
    size_t worker_bytes, first_worker;
} mha_plan;

/* Rows of queries: those of a task (of each of its heads, `head` is the first), of one of its heads, or of a tile. */
typedef struct {
    size_t item, head, key_head;
    size_t query, rows;    /* the first query and their number */
    const mha_interval *row_keys; /* what each of these rows sees; NULL: all see `keys` */
    mha_interval keys;     /* what any of them sees */
} mha_rows;

/*
 * A tile meets a key block: columns [from, from + width) of the scores, counted from the block's first
 * key; the first `visible` of them reach to the last visible key, the rest only fill a vector.
 */
typedef struct {
    size_t first_key;  /* of the block */
    mha_interval keys; /* of the block, as far as the tile sees them */
    size_t from, width, visible;
} mha_key_block;

/* 1 if two queries of an item may see different keys. */
MHA_INLINE int
mha_hides_single_keys(const mha_plan *plan)
{
    return plan->args->keep_mask.data != NULL || !plan->same_visibility;
}

/* What a plan that forward and backward have in common, and the checks. */
MHA_MUST_CHECK mha_status mha_plan_describe(mha_plan *plan, const mha_attention_args *args);

/*
 * One query a head, as in a decoder: the heads that share a key head are as good as its queries, which read each key
 * once, and where it lies.  *folded is the call so put, or *args where something tells heads from queries.
 */
void mha_fold_heads(const mha_attention_args *args, mha_attention_args *folded);

/*
 * A call's life: init checks the sizes and adds what it needs to `scratch` (operands need not
 * have addresses yet), the caller opens the scratch memory, place takes its share, run cannot fail.
 */
MHA_MUST_CHECK mha_status mha_plan_init(mha_plan *plan, const mha_attention_args *args, mha_plan_use use,
                                        mha_scratch *scratch);
void mha_plan_place(mha_plan *plan, const mha_scratch *scratch);
void mha_attention_run(const mha_plan *plan);

/* Room for a worker's arena of these sizes in plan->arena_at, for those of all workers and the plan's in `scratch`. */
void mha_plan_arenas(mha_plan *plan, const mha_arena_sizes *sizes, mha_scratch *scratch);

void mha_plan_arena(const mha_plan *plan, unsigned worker, mha_arena *arena);

/* The first key of the block that holds `key`. */
MHA_INLINE size_t
mha_block_start(const mha_plan *plan, size_t key)
{
    return key / plan->key_block * plan->key_block;
}

/* Those of `keys` that lie in the block at first_key. */
MHA_INLINE mha_interval
mha_block_keys(const mha_plan *plan, mha_interval keys, size_t first_key)
{
    const mha_interval block = {first_key, first_key + plan->key_block};

    return mha_interval_meet(block, keys);
}

/* Position of the tile's first row in the dense (B,H,Q) arrays. */
MHA_INLINE size_t
mha_row_index(const mha_plan *plan, const mha_rows *tile)
{
    return (tile->item * plan->args->heads + tile->head) * plan->args->queries + tile->query;
}

/* The keys that row `row` of the tile sees. */
mha_interval mha_row_keys(const mha_rows *tile, size_t row);

/*
 * The keys whose mean a row without weights gets under MHA_EMPTY_UNIFORM: all K; but if the row does see keys,
 * and no mask or bias hid them, their scores overflowed to -inf: then those, for nobody promised to have the rest.
 */
mha_interval mha_mean_keys(const mha_plan *plan, const mha_rows *tile, size_t row);

/* The weights of such a row: 1/n for each of those n keys, or zeros. */
void mha_fill_empty_weights(const mha_plan *plan, const mha_rows *tile, size_t row, char *weights);

/*
 * How a row's keys lie to its table of relative biases: those before `near` take its first number, those from `far` on
 * its last, and the key `near` takes number `at` and so on.
 */
typedef struct {
    size_t near, far, at;
} mha_relative;

mha_relative mha_relative_keys(const mha_plan *plan, size_t query, mha_interval keys);

/* Describes additive scores of the tile and these keys; the caller adds where to. */
mha_additive mha_describe_additive(const mha_plan *plan, const mha_rows *tile, mha_interval keys);

/* Scores of the tile against one block, masks applied, into arena->scores; *block says where. */
void mha_score_tile(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena, mha_key_block *block);

/*
 * kernels->product, but where a key is visible to one row of the tile and hidden from another, and b holds
 * NaN or infinity, no row is touched by what it may not see.  Rows of the product are the tile's rows
 * and its depth the block's keys, or the other way round if rows_are_keys.
 */
void mha_guarded_product(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena,
                         const mha_key_block *block, const mha_product *product, int rows_are_keys);

/*
 * What `factor_rows` shall be, by the plan's tile_rows and score_stride: factors and the scores that they are for take
 * two thirds of the first cache.  (With 48 KiB, 32 KiB of factors took 1.01 of the time of 16, and 8 KiB as
 * long.)
 */
size_t mha_factor_rows(const mha_plan *plan);

/* Dropout factors of the tile's rows and these keys, rows score_stride apart. */
void mha_dropout_tile(const mha_plan *plan, const mha_rows *tile, mha_interval keys, char *factors);

/*
 * Describes: numbers for the block's keys, laid out like scores, times rows of the keys or values, for the tile's
 * rows.  The caller adds where to (c, c_row) and, if the sums are to be scaled row by row, scale and scale_step.
 */
void mha_describe_key_product(const mha_plan *plan, const mha_rows *tile, const mha_key_block *block,
                              const char *numbers, const mha_operand *rows, size_t cols, mha_product *product);

/* Where rows of the key block were copied to `dense_rows` (else NULL), the product reads them there. */
void mha_read_dense_rows(const mha_plan *plan, const char *dense_rows, const mha_key_block *block, size_t cols,
                         mha_product *product);

/* When are these rows of keys or values worth a copy? */
mha_copying mha_copying_of(const mha_plan *plan, const mha_operand *rows, size_t cols);

/* The same for weights and values. */
void mha_describe_value_product(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena,
                                const mha_key_block *block, mha_product *product);

/* Once the sums are taken: dropped weights become 0, the others grow by 1 / (1 - p). */
void mha_drop_weights(const mha_plan *plan, const mha_rows *tile, const mha_arena *arena, const mha_key_block *block);

/* The tile's first row among those of its task: row r of head g is number g * task_queries + r. */
MHA_INLINE size_t
mha_task_row(const mha_plan *plan, const mha_rows *task, const mha_rows *tile)
{
    return (tile->head - task->head) * plan->task_queries + tile->query - task->query;
}

/* Has the call so many keys that some blocks are joined with compensation? */
MHA_INLINE int
mha_compensates(const mha_plan *plan)
{
    return plan->args->keys > MHA_PLAIN_JOINS * plan->key_block;
}

/* Tells the merge of the block at first_key whether to keep what it loses, in `compensation`. */
void mha_compensate_merge(const mha_plan *plan, size_t first_key, void *compensation, mha_merge *merge);

/* Where the tile's rows stand in the task's statistics. */
MHA_INLINE char *
mha_state_at(const mha_plan *plan, const mha_rows *task, const mha_rows *tile, char *numbers)
{
    return numbers + mha_task_row(plan, task, tile) * plan->kernels->itemsize;
}

/* After the last block: the sinks of these rows, which begin with the tile's, join their sums. */
void mha_add_sinks(const mha_plan *plan, const mha_rows *tile, const char *max, char *sum);

/* Before the first block: rows that no block will touch are empty rows. */
void mha_clear_statistics(const mha_plan *plan, const mha_arena *arena);

/* After the last block: rows that are empty, if there may be any, and the statistics that were asked for. */
void mha_finish_task(const mha_plan *plan, const mha_rows *task, const mha_arena *arena, int has_empty);

/* Where scores stand by columns (short.c): a tile from queries to output; returns 1 if one of its rows is empty. */
int mha_attend_columns(const mha_plan *plan, const mha_rows *task, const mha_rows *tile, const mha_arena *arena);

/* A task of a call by_items (short.c). */
void mha_attend_items(void *plan, size_t task, unsigned worker);

/* A task of the weights pass (weights.c): fills the task's rows of args->weights. */
void mha_weights_task(void *plan, size_t task, unsigned worker);

/* Address of element (item, head, row, 0) of an operand, and of a result. */
const char *mha_operand_at(const mha_kernels *kernels, const mha_operand *x, size_t item, size_t head, size_t row);
char *mha_result_at(const mha_kernels *kernels, const mha_result *x, size_t item, size_t head, size_t row);

#endif
