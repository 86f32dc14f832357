/*
 * mha.h: the C API of mha_c, attention mathematics on plain buffers.  Read this file first.
 *
 * Nothing here knows Python or NumPy.  Every entry point takes plain structs and returns a
 * status.  It never prints or aborts, keeps no pointer after it returns, and may be called
 * from any number of threads at once.  Sizes are counts of elements, never bytes, unless the
 * name ends in _bytes; strides are counts of elements, too, and may be zero or negative.
 * The last axis of every floating-point operand is dense (stride 1).
 *
 * Structs start from zeros: a member that is left out has its plain meaning (no mask, no limit, no dropout, the usual
 * scale).  A pointer may be NULL where a comment says so, and if its array has no elements; any other NULL, and a
 * gradient of an operand that is absent, is MHA_ERR_ARG, and nothing is written.
 *
 * mha_explain.h has the rest: what a call will do, and why.
 * Notation of the comments: B batch, H heads, Q queries, K keys, D head_dim, Dv value_dim.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef MHA_H
#define MHA_H

#include <stddef.h>
#include <stdint.h>

/* --- Status ------------------------------------------------------------------------ */

typedef enum {
    MHA_OK = 0,
    MHA_ERR_NOMEM = -1, /* scratch memory could not be allocated; outputs were not touched */
    MHA_ERR_ARG = -2,   /* a NULL or nonsensical argument: the caller has a bug */
    MHA_ERR_ISA = -3,   /* an instruction set unknown, not compiled in, not on this CPU, or not a packed weight's */
    MHA_ERR_SIZE = -4,  /* a product of sizes does not fit in memory's address range */
    MHA_ERR_INTERRUPTED = -5, /* the call stopped half-way, see mha_interrupt_watch; outputs are undefined */
    MHA_ERR_FORKED = -6       /* the call's watcher forked: the child has no helper threads; outputs are undefined */
} mha_status;

#if defined(__GNUC__)
#define MHA_MUST_CHECK __attribute__((warn_unused_result))
#else
#define MHA_MUST_CHECK
#endif

/* A short English text for a status; never NULL, never freed. */
const char *mha_status_text(mha_status status);

/* --- Instruction sets and threads ----------------------------------------------------------- */

/* Ordered by the width of vectors.  Scalar is in use until mha_isa_select is called. */
typedef enum { MHA_ISA_SCALAR, MHA_ISA_NEON, MHA_ISA_WASM, MHA_ISA_AVX2, MHA_ISA_AVX512, MHA_N_ISAS } mha_isa;

const char *mha_isa_name(mha_isa isa); /* "scalar", "neon", "wasm", "avx2", "avx512"; NULL if out of range */
int mha_isa_compiled(mha_isa isa);     /* 1 if this binary holds kernels for it */
int mha_isa_available(mha_isa isa);    /* 1 if compiled in and offered by this CPU and OS */
mha_isa mha_isa_active(void);

/*
 * Use the kernels of `isa` in calls that begin from now on; a running call keeps its kernels.  If `isa` is not
 * available: MHA_ERR_ISA, and nothing changes.  Weights whose panels have another width must be packed again.
 */
MHA_MUST_CHECK mha_status mha_isa_select(mha_isa isa);

/* The instruction set of this thread's own calls, whatever is selected; MHA_N_ISAS ends it.  Returns the one before. */
mha_isa mha_isa_own(mha_isa isa);

/*
 * The most threads that a call may use, the calling thread included: at least 1, and 1 until it is set.  Threads are
 * started at the first call that is large enough to gain from them, and results do not depend on their number.
 */
void mha_threads_set(unsigned n_threads);
unsigned mha_threads_get(void);

/* The same by nobody's choice: where a thread has a number of its own, that one counts, even if it is higher. */
void mha_threads_suggest(unsigned n_threads);

/* A number for calls of this thread only; 0 ends it.  Of this one and one that was set, the lower counts there. */
void mha_threads_limit_own(unsigned n_threads);

/*
 * A team of threads that the process has already, such as an OpenMP runtime's.  Such threads spin for a while after
 * work of their own: others beside them would wait for a CPU.
 */
typedef struct {
    /*
     * How many threads a region that the calling thread began now would have.  0: it must not begin one; 1: others have
     * their hands full, as it is inside a region, and it should do its work alone.
     */
    unsigned (*n_threads)(void);
    /*
     * Runs body(data) once on the calling thread and once on each other one, at the same time, and returns when all
     * have left it.  Where body returns 1, on the calling thread alone, the others are lost: this is the child of a
     * fork, and `run` must return without them.
     */
    void (*run)(int (*body)(void *data), void *data);
} mha_team;

/*
 * From now on calls run on the team, wherever it has as many threads as they want; NULL: on the core's own.  The child
 * of a fork has its own again.  Returns 1 if so; 0 if forks cannot be noticed, and nothing changes.
 */
int mha_threads_use_team(const mha_team *team);
int mha_threads_has_team(void);

/*
 * Lets calls of this thread be interrupted: from now on, each of them asks `check` about every 50 ms, between pieces of
 * its work.  Once `check` returns non-zero, the call frees its memory and ends with MHA_ERR_INTERRUPTED.  NULL: calls
 * cannot be interrupted.  Calls of this library that `check` itself makes are not watched.
 */
typedef int (*mha_interrupt_fn)(void *context);
void mha_interrupt_watch(mha_interrupt_fn check, void *context);

/* --- Operands ------------------------------------------------------------------------- */

typedef enum { MHA_F32, MHA_F64 } mha_dtype;

/* A read-only (B, H, rows, columns) operand: (b, h, r, c) is at b*batch_stride + h*head_stride + r*row_stride + c. */
typedef struct {
    const void *data;
    ptrdiff_t batch_stride, head_stride, row_stride;
} mha_operand;

/* The same layout, for a result, which is written. */
typedef struct {
    void *data;
    ptrdiff_t batch_stride, head_stride, row_stride;
} mha_result;

/* A mask or bias over the scores (B, H, Q, K); a stride of 0 broadcasts that axis.  data NULL: none. */
typedef struct {
    const void *data;
    ptrdiff_t batch_stride, head_stride, query_stride, key_stride;
} mha_mask;

/* Where the causal diagonal begins: query 0 at key 0 (top-left), or so that the last query sees the last key. */
typedef enum { MHA_CAUSAL_NONE, MHA_CAUSAL_TOP_LEFT, MHA_CAUSAL_BOTTOM_RIGHT } mha_causal;

/* The most that first_query, first_key, first_item and first_head may be: dropout counts in 32 bits, no sum wraps. */
#define MHA_LAST_PLACE (PTRDIFF_MAX / 4 < UINT32_MAX ? (size_t)(PTRDIFF_MAX / 4) : (size_t)UINT32_MAX)

#define MHA_NO_LIMIT ((int64_t)0) /* window_left, window_right: no limit on that side */

/*
 * Which keys a query may see, masks apart: one interval, the intersection of lengths, causal
 * corner and window.  Keys that no query of a tile sees are never read.  Zeroed: every query sees all keys.
 *
 *   valid_lens      NULL for all keys; else B lengths (lens_per_batch 1) or B*Q lengths
 *                   (lens_per_batch Q), clamped to 0..K.  They must not change during the call.
 *   window_left, window_right
 *                   how many keys a query may see to either side, its own position included: query i sees key j
 *                   when i - j < window_left and j - i < window_right, with i counted along the diagonal of
 *                   `causal` (top-left unless it says bottom-right); MHA_NO_LIMIT, which is 0: no limit there
 *   first_query, first_key
 *                   for a part of a larger call: the positions of query 0 and key 0 in it.  Lengths, causal corner and
 *                   window are then the larger call's (bottom-right needs its sizes: both 0).  At most MHA_LAST_PLACE
 */
typedef struct {
    const int64_t *valid_lens;
    size_t lens_per_batch;
    mha_causal causal;
    int64_t window_left, window_right;
    size_t first_query, first_key;
} mha_visibility;

/*
 * The output of a query that sees no key: the mean of all K values (d2l), or zeros (torch, ONNX).  A query whose
 * scores are all -inf counts as one; if no mask and no bias made them so, the mean is over the keys that it sees.
 */
typedef enum { MHA_EMPTY_ZERO, MHA_EMPTY_UNIFORM } mha_empty;

/* --- Attention --------------------------------------------------------------------------- */

/*
 * out = dropout(softmax(score(q, k) + bias)) v, one softmax per (batch, head, query) over the visible keys.
 *
 *   q (B,H,Q,D), k (B,Hkv,K,D), v (B,Hkv,K,Dv), out (B,H,Q,Dv).  Hkv divides H; query head h
 *   uses key head h / (H / Hkv).  Inputs may overlap each other, out may overlap nothing.
 *
 *   score       additive_weights NULL:  *scale * sum_d q[i,d] k[j,d]
 *               else (D numbers):       *scale * sum_d w[d] tanh(q[i,d] + k[j,d])
 *   scale       NULL: the usual one, 1 / sqrt(D) of dot products, 1 of additive scores
 *   softcap     above 0: the score becomes softcap * tanh(score / softcap), before anything is added to it
 *   relative_bias  of type `dtype`, H rows of 2 * relative_reach + 1.  The distance j - i of key and query, clipped
 *               to -relative_reach .. relative_reach, selects the one to add; i counts along the diagonal of `causal`
 *   sinks       H elements of `dtype`: one more logit per row, which takes its share of the weight but has no value.
 *               In a row without keys the sink takes all the weight: out 0, weights 0, whatever empty_rows says.
 *   keep_mask   bytes: 0 hides the key from the query, and the key's value then has no influence at all
 *   bias        of type `dtype`, added to the scaled score; a row of -inf throughout is a row without keys
 *   dropout     in 0..1: each weight is zeroed with that probability, the rest divided by
 *               1 - dropout; the decision is a pure function of (seed, b, h, i, j, dropout)
 *   first_item, first_head   for a part of a larger call: positions of item 0 and head 0 in it (those of query 0 and
 *               key 0 are visible.first_query and first_key).  Dropout then decides as the larger call would
 *
 * Optional outputs, each NULL or dense:
 *   weights     (B,H,Q,K), before dropout; exactly 0 for keys a query may not see
 *   row_max, row_sum   (B,H,Q), both or neither: the largest score m; the sum of exp(score - m) with the sink's term.
 *               mha_attention_weights rebuilds the weights from them.  (0, 0) for a row with neither keys nor sink
 *   lse         (B,H,Q): natural log of the sum of exp(score) with the sink's term; -inf for a row with neither
 *
 * Errors: MHA_ERR_ARG, MHA_ERR_SIZE, MHA_ERR_NOMEM; outputs are then untouched.
 * Results are bit-identical for every thread count, batch, cut of the queries and alignment.
 * Scratch memory does not grow with Q*K.
 */
typedef struct {
    mha_dtype dtype;
    size_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
    mha_operand q, k, v;
    mha_result out;
    const void *additive_weights;
    const double *scale; /* or NULL */
    mha_visibility visible;
    mha_mask keep_mask, bias;
    double softcap;            /* 0: none */
    const void *relative_bias; /* or NULL */
    size_t relative_reach;
    const void *sinks; /* or NULL */
    mha_empty empty_rows;
    double dropout;
    uint64_t seed;
    size_t first_item, first_head;
    void *weights, *row_max, *row_sum, *lse;
} mha_attention_args;

MHA_MUST_CHECK mha_status mha_attention_forward(const mha_attention_args *args);

/* About how many multiply-adds such a call takes, by its sizes alone; the number of threads depends on it. */
double mha_attention_work(const mha_attention_args *args);

/*
 * Fills args->weights with the weights of an earlier call, bit for bit, from its q, k, masks and
 * (row_max, row_sum); v and out are not read.
 */
MHA_MUST_CHECK mha_status mha_attention_weights(const mha_attention_args *args);

/* The gradient of a bias, added up over the axes of stride 0.  data NULL: not wanted. */
typedef struct {
    void *data;
    ptrdiff_t batch_stride, head_stride, query_stride, key_stride;
} mha_mask_result;

/*
 * Gradients of a loss with respect to q, k, v (and w, bias) of an earlier mha_attention_forward.
 *
 *   args        the arguments of that call.  row_max and row_sum, which it wrote, dropout and seed are
 *               read; its out, weights and lse are not
 *   out         (B,H,Q,Dv): what that call returned;  grad_out: the gradient of the loss with respect to `out`
 *   grad_q (B,H,Q,D), grad_k (B,Hkv,K,D), grad_v (B,Hkv,K,Dv): overwritten; exactly 0 for keys that
 *               no query may see.  They may overlap nothing.
 *   grad_additive_weights   D numbers, or NULL
 *   grad_bias   broadcast like bias, but with its own strides: an axis of stride 0 has one place.  All of it is
 *               written, even if there are no scores
 *   grad_relative_bias, grad_sinks   dense, like relative_bias and sinks, or NULL
 *
 * Scores are computed again tile by tile: no Q x K buffer.  Bit-identical for every thread count.
 */
typedef struct {
    mha_operand out, grad_out;
    mha_result grad_q, grad_k, grad_v;
    void *grad_additive_weights;
    mha_mask_result grad_bias;
    void *grad_relative_bias, *grad_sinks;
} mha_attention_grads;

MHA_MUST_CHECK mha_status mha_attention_backward(const mha_attention_args *args, const mha_attention_grads *grads);

/*
 * Fills args->weights with the factors by which a call with these sizes, dropout and seed multiplies its weights: 0 or
 * 1 / (1 - dropout).  Nothing else of args is read.
 */
MHA_MUST_CHECK mha_status mha_dropout_factors(const mha_attention_args *args);

/* --- Linear projections --------------------------------------------------------------------- */

/* How a weight is stored: packed for one ISA by mha_linear_pack, or in rows, as the caller has it. */
typedef enum { MHA_WEIGHT_PACKED, MHA_WEIGHT_ROWS } mha_weight_layout;

/*
 * y = x W^T + bias, the same bits for both layouts.  A weight packed once serves many calls.  Each task of a call reads
 * a weight in rows in place; a layer call with many tasks packs it into the call's own memory first.
 * mha_linear_packed_size gives the number of elements of a packed W (MHA_ERR_SIZE on overflow) and the width of its
 * panels; mha_linear_pack fills the panels from a row-major (out_features, in_features) W.  A packed weight comes with
 * that width, which tells for which kernels it is packed: others return MHA_ERR_ISA.
 */
typedef struct {
    const void *weight; /* NULL: no projection, the input is used as it is */
    const void *bias;   /* out_features numbers, or NULL */
    size_t out_features, in_features;
    mha_weight_layout layout;
    ptrdiff_t row_stride; /* of a weight in rows */
    size_t panel_width;   /* of a packed weight: what mha_linear_packed_size said when it was packed */
} mha_linear;

MHA_MUST_CHECK mha_status mha_linear_packed_size(mha_dtype dtype, size_t out_features, size_t in_features,
                                                 size_t *size_ret, size_t *width_ret);
MHA_MUST_CHECK mha_status mha_linear_pack(mha_dtype dtype, size_t out_features, size_t in_features, const void *weight,
                                          ptrdiff_t row_stride, void *packed);
MHA_MUST_CHECK mha_status mha_linear_forward(mha_dtype dtype, const mha_linear *linear, size_t rows, const void *x,
                                             ptrdiff_t x_row_stride, void *y, ptrdiff_t y_row_stride);

/* Multiply-adds of projecting `rows` rows of each item; 0 if there is no projection (weight NULL). */
double mha_linear_work(const mha_linear *linear, size_t batch, size_t rows);

/*
 * Rotary positions: features 2i and 2i + 1 of each head of row t of item b are turned by the angle whose cosine and
 * sine are number b * batch_stride + t * pairs + i.  cos NULL: nothing is turned.
 */
typedef struct {
    const void *cos, *sin;
    size_t pairs;           /* of a head */
    ptrdiff_t batch_stride; /* 0: the same angles for all items */
} mha_turn;

/*
 * The cache of a decoder is dense (batch, room, out_features), and has before[b * before_step] rows of item b already.
 * mha_linear_append projects the first counts[b * counts_step] of the item's `rows` new rows of x (without a projection
 * it copies them), turns them, and writes them after those.  A step is 1, or 0: one count for all items.  There must be
 * room.
 */
typedef struct {
    mha_dtype dtype;
    mha_linear linear;
    size_t batch, rows, in_features;
    mha_operand x; /* head_stride is not read */
    void *cache;
    size_t room;
    const int64_t *before, *counts;
    size_t before_step, counts_step;
    mha_turn turn; /* of the new rows */
} mha_append;

MHA_MUST_CHECK mha_status mha_linear_append(const mha_append *append);

/*
 * Gradients of y = x W^T + bias.  x (rows, in_features) and grad_y (rows, out_features) with the given
 * row strides, weight row-major dense.  grad_x dense (rows, in_features), grad_weight dense (out, in),
 * grad_bias out_features numbers: each is overwritten, or NULL if not wanted; with add_to_grad_x, grad_x is added to.
 */
typedef struct {
    mha_dtype dtype;
    size_t rows, out_features, in_features;
    const void *x, *weight, *grad_y;
    ptrdiff_t x_row_stride, grad_y_row_stride;
    void *grad_x, *grad_weight, *grad_bias;
    int add_to_grad_x;
} mha_linear_grads;

MHA_MUST_CHECK mha_status mha_linear_backward(const mha_linear_grads *grads);

/* --- Layers ----------------------------------------------------------------------------------- */

/* An input of a layer on its way to attention. */
typedef struct {
    mha_operand rows; /* (B, rows, size); head_stride is not read */
    size_t size;      /* features of a row */
    mha_linear W;     /* weight NULL: attention reads the rows as they are */
    mha_turn turn;    /* of what W gives, which it needs */
    void *projected;  /* optional output, dense: what attention reads, 0 in rows that no query sees; without W a copy */
    int reads_hidden; /* without W: rows that keep_mask alone hides may be read, and are not copied to leave them out */
} mha_layer_input;

enum { MHA_QUERIES, MHA_KEYS, MHA_VALUES, MHA_N_INPUTS };

/*
 * A whole layer in one call: out = W_o( attention( W_q queries, W_k keys, W_v values ) ).
 *
 *   attention   all that such a call has, but its operands and their head sizes, which follow from the inputs: q, k, v,
 *               out, head_dim and value_dim are not read.  Head h of the queries is columns h*D .. (h+1)*D of what
 *               attention reads of them; so keys and values have kv_heads heads
 *   inputs      queries (B,Q,.), keys (B,K,.), values (B,K,.).  MultiHeadAttention has all projections;
 *               AdditiveAttention has W_q, W_k and additive_weights; DotProductAttention has none.  A joint weight is
 *               three that lie in one another's neighbourhood.  Of keys and values, rows that no query sees are neither
 *               read nor projected (under MHA_EMPTY_UNIFORM, all values of an item with an empty row are)
 *   out         (B,Q,W_o.out_features), dense
 *   context     (B,Q,W_o.in_features) or NULL: what W_o is applied to; only with W_o
 */
typedef struct {
    mha_attention_args attention;
    mha_layer_input inputs[MHA_N_INPUTS];
    mha_linear W_o;
    void *out, *context;
} mha_layer_args;

MHA_MUST_CHECK mha_status mha_layer_forward(const mha_layer_args *args);

/* Like mha_attention_work, for a layer. */
double mha_layer_work(const mha_layer_args *args);

/*
 * Gradients of a whole layer.  `forward` has the arguments of the forward call, which must have been asked for what its
 * projections gave, context, row_max and row_sum: they are read here (and `out`, if there is no W_o).  Its packed
 * weights only say which projections exist.  weight[i], grad_weight[i], grad_bias[i] are W_q, W_k, W_v, W_o in order,
 * row-major dense.  Everything that is not NULL is overwritten.  grad_inputs are the gradients of queries, keys
 * and values; their rows are dense, head_stride is not read.  Inputs that are one array may share one gradient,
 * with the same strides: their gradients are summed in it.  Rows of keys and values that no query sees get
 * gradient 0 and add nothing to other gradients.  Of `attention`, the gradients of what is no operand are written:
 * additive weights, bias, relative bias, sinks.
 */
typedef struct {
    const mha_layer_args *forward;
    const void *grad_out; /* dense, like out */
    const void *weight[4];
    mha_result grad_inputs[MHA_N_INPUTS];
    void *grad_weight[4], *grad_bias[4];
    mha_attention_grads attention;
} mha_layer_grads;

MHA_MUST_CHECK mha_status mha_layer_backward(const mha_layer_grads *grads);

/* --- Masked softmax ----------------------------------------------------------------------------- */

/*
 * Softmax over the last axis of dense (batch, queries, keys) scores into dense `out` (may be the same
 * memory).  Each row's softmax is over the keys that `visible` (lengths only) lets it see; the others become 0.
 */
typedef struct {
    mha_dtype dtype;
    size_t batch, queries, keys;
    const void *scores;
    mha_visibility visible;
    mha_empty empty_rows;
    void *out;
} mha_masked_softmax_args;

MHA_MUST_CHECK mha_status mha_masked_softmax(const mha_masked_softmax_args *args);

/* --- Hooks for tests and probes ------------------------------------------------------------------- */

/*
 * Replace the one allocator of the core (NULL, NULL: back to the C library's).  For tests that make
 * allocations fail; not to be called while another call runs.
 */
typedef void *(*mha_alloc_fn)(size_t n_bytes);
typedef void (*mha_free_fn)(void *memory);
void mha_set_allocator(mha_alloc_fn alloc, mha_free_fn release);

#endif /* MHA_H */
