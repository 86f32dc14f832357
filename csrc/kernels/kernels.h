/*
 * kernels.h: the table of kernels, one per instruction set and number type.
 *
 * MHA_KERNELS is the only list: it makes the members of the table, and the
 * initialisers in texts.inc.  A kernel that is not listed cannot be called; one that an ISA
 * lacks does not compile.  Kernels are straight-line: they check nothing and cannot fail.
 * `real` in the comments is float or double; strides and sizes count numbers.
 */
#ifndef MHA_KERNELS_H
#define MHA_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* How the right side of a product, b[p][j], lies. */
typedef enum {
    MHA_PANELS, /* packed: panel_width columns of all steps, step by step, and then the next panel */
    MHA_ROWS,   /* as rows of values lie: step p begins at data + p*stride */
    MHA_COLUMNS /* as rows of keys and weights lie: column j begins at data + j*stride; needs a_step 1, rows >= 1 */
} mha_layout;

/*
 * The right side.  If there is room for a panel, panel_width * min(depth_block, depth) numbers, each panel is copied
 * there, and tiles read it front to back.  MHA_COLUMNS needs that room.
 */
typedef struct {
    const void *data;
    mha_layout layout;
    ptrdiff_t stride; /* of MHA_ROWS and MHA_COLUMNS */
    int padded;       /* of MHA_ROWS: the last vector of columns may be read whole, as that of panels */
    int far;          /* the next panel is prefetched while rows meet this one; MHA_COLUMNS always prefetch */
    void *panel;      /* room for a panel, not of MHA_PANELS; NULL: all rows read b as it lies */
} mha_right;

/*
 * c[i][j] = scale_i * ((accumulate ? c[i][j] : 0) + sum_p a[i][p] b[p][j]) + bias[j]
 *
 * The sum over p runs in order within parts of `part` steps, and part sums are added in order.  Step p is step
 * first_step + p of a longer sum, and parts are counted from the start of that sum.  So a result depends on p alone,
 * never on how rows and columns were cut into tiles.  Short parts are what keeps long sums exact.
 * `depth_block`, a multiple of `part`, is for the cache alone: after so many steps the next columns follow.
 */
typedef struct {
    size_t rows, cols, depth;
    size_t depth_block, part; /* 0: as large as can be */
    size_t first_step;
    const void *a; /* a[i][p] at a + i*a_row + p*a_step: a transposed operand costs nothing */
    ptrdiff_t a_row, a_step;
    void *a_room; /* NULL, or, if a's numbers lie far apart, room to copy rows * (depth_block + MHA_LEFT_GAP) of them */
    mha_right b;
    void *c; /* row i at c + i*c_row */
    ptrdiff_t c_row;
    int accumulate;
    const void *scale; /* scale_i = scale[i * scale_step] */
    size_t scale_step; /* 0 or 1 */
    const void *bias;  /* cols numbers or NULL */
} mha_product;

/* Numbers behind each row of a copied left side: a vector may end there, and rows spread over all sets of a cache. */
#define MHA_LEFT_GAP ((size_t)16)

/* scores[i][j] = scale * sum_d w[d] tanh(q[i][d] + k[j][d]), for additive attention. */
typedef struct {
    size_t rows, keys, depth;
    const void *q, *k, *w;
    ptrdiff_t q_row, k_row;
    void *exps; /* room for rows + 4 rows of exponentials, of whole vectors and one more */
    void *scores;
    ptrdiff_t scores_row, scores_step;
    double scale;
} mha_additive;

/* A tile of scores on its way through the softmax. */
typedef struct {
    size_t rows;
    size_t visible; /* columns; what fills up the last vector behind them counts as hidden */
    size_t phase;   /* vectors from the block's first key to column 0: parts of sums are counted from that key */
    void *scores;   /* in: scores, -inf where hidden; out: exp(score - max) */
    ptrdiff_t scores_row;
    void *max, *sum; /* out, one per row: the largest score (-inf if all are hidden), and the sum */
} mha_softmax;

/* The most keys of rows whose softmax is taken by columns. */
#define MHA_SHORT_KEYS ((size_t)64)

/* The same with the scores transposed: row j holds key j of all queries, so lanes are queries. */
typedef struct {
    size_t queries, keys;
    const void *ends; /* NULL, or whole vectors: keys from ends[i] on are hidden from query i */
    void *scores;     /* whole vectors of queries */
    ptrdiff_t scores_row;
    void *max, *sum, *inverse; /* out, one per query: as from softmax_rows and then invert_sums */
} mha_softmax_columns;

/* One row: out[c] = scale * sum_j weights[j * weights_step] values[j][c]; at most 64 keys; additions as in product. */
typedef struct {
    size_t keys, cols;
    const void *weights, *values;
    ptrdiff_t weights_step, values_row;
    const void *scale;
    void *out;
} mha_average;

/*
 * out = (first ? 0 : out * rescale) + block * factor, then * inverse if that is not NULL; each row has its own factors.
 * `compensation` keeps what these sums lose to rounding, until the call that has `inverse`.
 */
typedef struct {
    size_t rows, cols;
    int first; /* 1: the first block, for which out, compensation, rescale and factor are not read */
    void *out;
    ptrdiff_t out_row;
    const void *block;
    ptrdiff_t block_row; /* of `compensation`, too */
    const void *rescale, *factor, *inverse;
    void *compensation;
} mha_merge;

/* Dropout factors of a tile: rows queries from `query` on, keys from `key` on. */
typedef struct {
    size_t rows, keys;
    uint64_t seed;
    size_t item, head, query, key;
    double p;
    void *factors;
    ptrdiff_t factors_row;
} mha_dropout;

/* score = cap * tanh(score / cap); slopes, if not NULL, get its derivative, which multiplies a score's gradient. */
typedef struct {
    size_t rows, cols; /* cols is a multiple of the lanes */
    void *scores, *slopes;
    ptrdiff_t row_stride; /* of both */
    double cap;
} mha_cap;

/*
 * A tile of scores, which become weights, and of gradients on their way back through the softmax; cols is a multiple
 * of the lanes.  Of the first `visible` columns those count whose score is above -inf.
 */
typedef struct {
    size_t rows, cols, visible;
    const void *max, *inverse; /* one per row */
    void *weights, *grads;     /* in: scores, dP; out: P * factors, dS * scale */
    const void *factors;       /* of dropout, or NULL */
    ptrdiff_t row_stride;      /* of all three */
    const void *delta;         /* one per row */
    double scale;
} mha_score_grads;

/* Gradients of a tile of additive scores, added to grad_q, grad_k, grad_w; `grads` includes the scale. */
typedef struct {
    size_t rows, keys, depth;
    size_t phase; /* place of the first key in its block: parts of sums over keys are counted from the block's start */
    const void *q, *k, *w;
    ptrdiff_t q_row, k_row;
    const void *grads;
    ptrdiff_t grads_row;
    void *grad_q, *grad_k, *grad_w;
    ptrdiff_t grad_q_row, grad_k_row;
} mha_additive_grads;

/* clang-format off */
#define MHA_KERNELS(X) \
    /* Rows first..end-1 of src, transposed into panels dst[panel][p][panel_width]; rows before `first` count as 0. */ \
    X(void, pack_panels, (const void *src, ptrdiff_t src_row, size_t first, size_t end, size_t depth, void *dst)) \
    /* Rows of cols numbers into rows dst_row apart; whole vectors are written, 0 behind the last number. */ \
    X(void, copy_rows, (size_t rows, size_t cols, const void *src, ptrdiff_t src_row, void *dst, ptrdiff_t dst_row)) \
    /* dst[j][i] = src[i][j]; whole vectors are written, 0 behind the last number. */ \
    X(void, transpose_rows, (size_t rows, size_t cols, const void *src, ptrdiff_t src_row, void *dst, \
                             ptrdiff_t dst_row)) \
    X(void, product, (const mha_product *product)) \
    X(void, additive_scores, (const mha_additive *tile)) \
    /* scores[j] += bias[j * step]; a key whose byte keep[j * step] is 0 becomes -inf. */ \
    X(void, add_bias, (void *scores, size_t n, const void *bias, ptrdiff_t step)) \
    X(void, keep_keys, (void *scores, size_t n, const uint8_t *keep, ptrdiff_t step)) \
    X(void, cap_scores, (const mha_cap *tile)) \
    X(void, softmax_rows, (const mha_softmax *tile)) \
    /* sum[i] += exp(*sink - max[i]), but in an empty row. */ \
    X(void, add_sinks, (size_t rows, const void *sink, const void *max, void *sum)) \
    /* Joins a block's statistics to those of earlier blocks: rescale and factor bring both to the common max. \
     * sum_compensation, 0 before the first join, keeps what the sums lose: many small weights beside a large one. */ \
    X(void, join_statistics, (size_t rows, void *max, void *sum, void *sum_compensation, const void *block_max, \
                              const void *block_sum, void *rescale, void *factor)) \
    /* As softmax_rows for transposed scores; returns 1 if some query's row is empty. */ \
    X(int, softmax_columns, (const mha_softmax_columns *tile)) \
    /* After softmax_columns: the weights, a row of `keys` numbers for each query, 0 behind the tile's keys. */ \
    X(void, weights_columns, (const mha_softmax_columns *tile, size_t keys, void *weights)) \
    /* inverse[i] = 1 / sum[i], 0 for an empty row, whose max becomes 0. Returns 1 if there is such a row. */ \
    X(int, invert_sums, (size_t rows, void *max, const void *sum, void *inverse)) \
    X(void, average_row, (const mha_average *row)) \
    X(void, merge_rows, (const mha_merge *merge)) \
    /* weights[j] = exp(scores[j] - max) * inverse. */ \
    X(void, weights_row, (size_t n, const void *scores, const void *max, const void *inverse, void *weights)) \
    /* out[j] = in[j] * factor for the first n of cols numbers, 0 for the rest. */ \
    X(void, scale_row, (size_t n, const void *in, const void *factor, size_t cols, void *out)) \
    X(void, fill, (size_t n, double value, void *out)) \
    /* lse[i] = max[i] + log(sum[i]), -inf for an empty row. */ \
    X(void, logsumexp, (size_t rows, const void *max, const void *sum, void *lse)) \
    /* 1 if every number of the rows is finite. */ \
    X(int, all_finite, (size_t rows, size_t cols, const void *x, ptrdiff_t x_row)) \
    /* Softmax over the first n of cols scores, in place; 0 behind them; all `empty` if no score is above -inf. */ \
    X(void, softmax_row, (void *row, size_t cols, size_t n, double empty)) \
    X(void, dropout_factors, (const mha_dropout *tile)) \
    /* x[i][j] *= factors[i][j], rows of both row_stride apart; what is 0 stays 0, whatever the factor. */ \
    X(void, multiply_rows, (size_t rows, size_t cols, void *x, const void *factors, ptrdiff_t row_stride)) \
    /* out[i] = sum_d a[i][d] b[i][d]. */ \
    X(void, row_dots, (size_t rows, size_t cols, const void *a, ptrdiff_t a_row, const void *b, ptrdiff_t b_row, \
                       void *out)) \
    X(void, score_grads, (const mha_score_grads *tile)) \
    X(void, column_sums, (size_t rows, size_t cols, const void *x, ptrdiff_t x_row, void *sums)) \
    /* y[j * step] += x[j]. */ \
    X(void, add_row, (size_t n, const void *x, void *y, ptrdiff_t step)) \
    X(void, additive_grads, (const mha_additive_grads *tile))
/* clang-format on */

#define MHA_KERNEL_MEMBER(result, name, parameters) result(*name) parameters;

typedef struct {
    const char *isa;
    size_t itemsize;
    size_t lanes;       /* numbers in a vector */
    size_t panel_width; /* columns of a packed panel */
    size_t tile_rows;   /* the most rows of a register tile */
    size_t tile_sums;   /* vectors of sums in a register tile */
    MHA_KERNELS(MHA_KERNEL_MEMBER)
} mha_kernels;

/* The compiled tables, see texts.inc; which of them exist is decided here alone. */
#if defined(__x86_64__)
#define MHA_HAVE_X86 1
#else
#define MHA_HAVE_X86 0
#endif
#if defined(__aarch64__)
#define MHA_HAVE_NEON 1
#else
#define MHA_HAVE_NEON 0
#endif
#if defined(__wasm__) && !defined(MHA_NO_SIMD128)
#define MHA_HAVE_WASM 1
#else
#define MHA_HAVE_WASM 0
#endif

extern const mha_kernels mha_kernels_f32_scalar, mha_kernels_f64_scalar;
#if MHA_HAVE_X86
extern const mha_kernels mha_kernels_f32_avx2, mha_kernels_f64_avx2;
extern const mha_kernels mha_kernels_f32_avx512, mha_kernels_f64_avx512;
#endif
#if MHA_HAVE_NEON
extern const mha_kernels mha_kernels_f32_neon, mha_kernels_f64_neon;
#endif
#if MHA_HAVE_WASM
extern const mha_kernels mha_kernels_f32_wasm, mha_kernels_f64_wasm;
#endif

#endif
