/*
 * test_values.c: inputs whose answer is known to the bit, wherever in a tile they stand.  Every instruction set, both
 * types.
 *
 *     test_values [quick]
 *
 * One score far above the others: the output is that key's value, exactly, for every number of keys and every place.
 * Equal scores: the exact mean.  Scores that overflow to -inf: an empty row.  NaN or infinity in one number of q, k, v
 * or the output's gradient: it reaches whoever sees it and nobody else, forward and backward.
 */
#include "kernels/dispatch.h"
#include "drawn.h"

enum { MOST_KEYS = 700, VALUES = 3 };

static mha_dtype dtype;
static const double one = 1; /* a scale */

static mha_attention_args
plain_call(size_t queries, size_t keys, size_t head_dim, size_t value_dim)
{
    mha_attention_args a = one_head(dtype, queries, keys, head_dim, value_dim);

    a.scale = &one;
    return a;
}

/* --- One key that counts ------------------------------------------------------------------------ */

static void
check_one_key(size_t keys, size_t hot, double top, double rest, const void *values)
{
    const size_t item = size_of(dtype);
    mha_attention_args a = plain_call(1, keys, 1, VALUES);
    void *q = allocate(item), *k = allocate(keys * item), *out = allocate(VALUES * item);
    void *weights = allocate(keys * item), *stats = allocate(3 * item);

    set(dtype, q, 0, 1.0);
    for (size_t j = 0; j < keys; j++) {
        set(dtype, k, j, j == hot ? top : rest);
    }
    place(&a, q, k, values, out);
    a.weights = weights;
    a.row_max = stats;
    a.row_sum = (char *)stats + item;
    a.lse = (char *)stats + 2 * item;
    CHECK(mha_attention_forward(&a) == MHA_OK, "one key");
    CHECK(memcmp(out, (const char *)values + hot * VALUES * item, VALUES * item) == 0,
          "%s, key %zu of %zu: not its value", mha_isa_name(mha_isa_active()), hot, keys);
    CHECK(get(dtype, stats, 0) == top && get(dtype, stats, 1) == 1 && get(dtype, stats, 2) == top,
          "%s, key %zu of %zu: max %g, sum %g, lse %g", mha_isa_name(mha_isa_active()), hot, keys, get(dtype, stats, 0),
          get(dtype, stats, 1), get(dtype, stats, 2));
    for (size_t j = 0; j < keys; j++) {
        CHECK(get(dtype, weights, j) == (j == hot), "key %zu of %zu: weight %zu", hot, keys, j);
    }
}

static void
test_one_key(int quick)
{
    void *values = numbers(dtype, MOST_KEYS * VALUES, 1.0);

    for (size_t keys = 1; keys <= 130; keys += quick ? 17 : 1) {
        for (size_t hot = 0; hot < keys; hot++) {
            check_one_key(keys, hot, 1000, 0, values);
        }
    }
    for (size_t hot = 0; hot < MOST_KEYS; hot += quick ? 61 : 13) { /* several blocks of keys */
        check_one_key(MOST_KEYS, hot, 1000, 0, values);
        check_one_key(MOST_KEYS, hot, -1000, -9000, values);
    }
    free_all();
}

/* Zero scores and whole-numbered values: 2^n keys give the exact mean, whatever the order of the sum. */
static void
test_mean(void)
{
    const size_t item = size_of(dtype);

    for (size_t keys = 1; keys <= 4096; keys *= 2) {
        mha_attention_args a = plain_call(2, keys, 3, 5);
        void *zeros = allocate(keys * 3 * item), *v = allocate(keys * 5 * item), *out = allocate(2 * 5 * item);
        double sums[5] = {0};
        memset(zeros, 0, keys * 3 * item);
        for (size_t i = 0; i < keys * 5; i++) {
            const double value = (double)below(2001) - 1000;
            set(dtype, v, i, value);
            sums[i % 5] += value;
        }
        void *q = allocate(2 * 3 * item);
        memset(q, 0, 2 * 3 * item);
        place(&a, q, zeros, v, out);
        CHECK(mha_attention_forward(&a) == MHA_OK, "mean");
        for (size_t i = 0; i < 10; i++) {
            CHECK(get(dtype, out, i) == sums[i % 5] / (double)keys, "%zu keys: not the mean", keys);
        }
    }
    free_all();
}

/* One weight of 1, and in every later block of keys one that is less than half of its last digit: none of them is lost.
 */
static void
test_tiny_blocks(void)
{
    enum { BLOCK = 512, BLOCKS = 64, KEYS = BLOCK * BLOCKS };
    const size_t item = size_of(dtype);
    const double unit = dtype == MHA_F32 ? FLT_EPSILON : DBL_EPSILON, score = log(unit / 4);
    mha_attention_args a = plain_call(1, KEYS, 1, 1);
    void *q = allocate(item), *k = allocate(KEYS * item), *v = allocate(KEYS * item), *results = allocate(3 * item);

    set(dtype, q, 0, 1.0);
    for (size_t j = 0; j < KEYS; j++) {
        set(dtype, k, j, j == 0 ? 0.0 : j % BLOCK == 7 ? score : -1e4);
        set(dtype, v, j, 1.0);
    }
    place(&a, q, k, v, results);
    a.row_max = (char *)results + item;
    a.row_sum = (char *)results + 2 * item;
    CHECK(mha_attention_forward(&a) == MHA_OK, "tiny blocks");
    /* The score is rounded, which changes each of these exponentials by some twenty roundings of its own size. */
    const double sum = 1 + BLOCKS * unit / 4;
    CHECK(fabs(get(dtype, results, 2) - sum) <= unit, "%s: 1 and %d times a quarter of its last digit is 1 + %g digits",
          mha_isa_name(mha_isa_active()), BLOCKS, (get(dtype, results, 2) - 1) / unit);
    free_all();
}

/*
 * Finite numbers whose scores overflow to -inf: their query is an empty row, beside one whose scores are all 0.  With
 * few keys, with many, and with lengths.
 */
static void
check_overflow(size_t keys, mha_empty empty_rows, const int64_t *lens)
{
    const size_t item = size_of(dtype);
    const double most = dtype == MHA_F32 ? 1e30 : 1e300;
    mha_attention_args a = plain_call(2, keys, 1, 1);
    void *q = allocate(2 * item), *k = allocate(keys * item), *v = allocate(keys * item), *results = allocate(2 * item);
    void *weights = allocate(2 * keys * item), *lse = allocate(2 * item);

    set(dtype, q, 0, 0.0);
    set(dtype, q, 1, most);
    for (size_t j = 0; j < keys; j++) {
        set(dtype, k, j, -most);
        set(dtype, v, j, 1.0);
    }
    place(&a, q, k, v, results);
    a.weights = weights;
    a.lse = lse;
    a.empty_rows = empty_rows;
    a.visible.valid_lens = lens;
    a.visible.lens_per_batch = 1;
    CHECK(mha_attention_forward(&a) == MHA_OK, "overflow");
    const double mean = get(dtype, results, 0), empty = get(dtype, results, 1); /* of ones: 1 but for rounding */
    CHECK(fabs(mean - 1) < 1e-5 && (empty_rows == MHA_EMPTY_ZERO ? empty == 0 : fabs(empty - 1) < 1e-5),
          "%s, %zu keys overflow: %g, %g", mha_isa_name(mha_isa_active()), keys, mean, empty);
    CHECK(isfinite(get(dtype, lse, 0)) && get(dtype, lse, 1) == -INFINITY, "%zu keys overflow: lse", keys);
    for (size_t j = 0; j < keys; j++) {
        const double seen = j < (lens != NULL ? (size_t)*lens : keys), weight = get(dtype, weights, keys + j);
        CHECK(empty_rows == MHA_EMPTY_ZERO ? weight == 0 : (weight > 0) == seen, "%zu keys overflow: weight %zu is %g",
              keys, j, weight);
    }
}

/* Dropout of half the weights: each factor is 0 or 2, whatever keys it begins and ends at, and none is written beside.
 */
static void
test_dropout_factors(void)
{
    enum { ROWS = 3, MOST = 300, GAP = 9 };
    const mha_kernels *k = mha_kernels_for(dtype);
    void *factors = allocate(ROWS * (MOST + GAP) * size_of(dtype));

    for (size_t n = 0; n < 600; n++) {
        const size_t key = n % 23, keys = n < 460 ? 1 + n / 23 : 1 + below(MOST);
        const mha_dropout drop = {.rows = ROWS,
                                  .keys = keys,
                                  .seed = n,
                                  .query = n,
                                  .key = key,
                                  .p = 0.5,
                                  .factors = factors,
                                  .factors_row = (ptrdiff_t)(keys + GAP)};
        for (size_t i = 0; i < ROWS * (keys + GAP); i++) {
            set(dtype, factors, i, -1.0);
        }
        k->dropout_factors(&drop);
        for (size_t i = 0; i < ROWS * (keys + GAP); i++) {
            const double x = get(dtype, factors, i);
            CHECK(i % (keys + GAP) < keys ? x == 0 || x == 2 : x == -1, "%s, keys %zu to %zu: factor [%zu][%zu] is %g",
                  k->isa, key, key + keys, i / (keys + GAP), i % (keys + GAP), x);
        }
    }
    free_all();
}

static void
test_overflow(void)
{
    for (size_t keys = 1; keys < 900; keys += keys < 70 ? 1 : 211) {
        const int64_t len = (int64_t)(keys + 1) / 2;
        for (int i = 0; i < 4; i++) {
            check_overflow(keys, i & 1 ? MHA_EMPTY_UNIFORM : MHA_EMPTY_ZERO, i & 2 ? &len : NULL);
        }
    }
    free_all();
}

/* --- Numbers that are none -------------------------------------------------------------------------- */

enum { Q = 21, K = 37, D = 9, DV = 11, N_OPERANDS = 4, N_RESULTS = 5 };

static const size_t rows_of_operand[N_OPERANDS] = {Q, K, K, Q}, cols_of_operand[N_OPERANDS] = {D, D, DV, DV};
static const size_t rows_of_result[N_RESULTS] = {Q, Q, Q, K, K}, cols_of_result[N_RESULTS] = {DV, K, D, D, DV};
static const char *const operand_names[N_OPERANDS] = {"q", "k", "v", "grad_out"};
static const char *const result_names[N_RESULTS] = {"out", "weights", "grad_q", "grad_k", "grad_v"};
static uint8_t keep[Q * K];

typedef struct {
    mha_attention_args args;
    void *operands[N_OPERANDS], *results[N_RESULTS], *w, *stats;
} call;

static call
new_call(int additive, int by_mask)
{
    static int64_t lens[Q];
    call c = {.args = plain_call(Q, K, D, DV)};

    for (size_t i = 0; i < N_OPERANDS; i++) {
        c.operands[i] = numbers(dtype, rows_of_operand[i] * cols_of_operand[i], 1.0);
    }
    for (size_t i = 0; i < N_RESULTS; i++) {
        c.results[i] = allocate(rows_of_result[i] * cols_of_result[i] * size_of(dtype));
    }
    c.stats = allocate(2 * Q * size_of(dtype));
    c.w = numbers(dtype, D, 1.0);
    c.args.additive_weights = additive ? c.w : NULL;
    for (size_t i = 0; i < Q; i++) {
        lens[i] = (int64_t)(i * 7 % (K + 1));
        for (size_t j = 0; j < K; j++) {
            keep[i * K + j] = by_mask ? (i * 5 + j * 3) % 7 != 0 : j < (size_t)lens[i];
        }
    }
    if (by_mask) {
        c.args.keep_mask = (mha_mask){keep, 0, 0, K, 1};
    } else {
        c.args.visible.valid_lens = lens;
        c.args.visible.lens_per_batch = Q;
    }
    place(&c.args, c.operands[0], c.operands[1], c.operands[2], c.results[0]);
    c.args.weights = c.results[1];
    c.args.row_max = c.stats;
    c.args.row_sum = (char *)c.stats + Q * size_of(dtype);
    return c;
}

static void
run_call(const call *c)
{
    const mha_attention_grads grads = {.out = {c->results[0], 0, 0, DV},
                                       .grad_out = {c->operands[3], 0, 0, DV},
                                       .grad_q = {c->results[2], 0, 0, D},
                                       .grad_k = {c->results[3], 0, 0, D},
                                       .grad_v = {c->results[4], 0, 0, DV}};

    CHECK(mha_attention_forward(&c->args) == MHA_OK && mha_attention_backward(&c->args, &grads) == MHA_OK, "a call");
}

/* Whether row `row` of a result may know of row `at` of an operand. */
static int
may_know(size_t result, size_t row, size_t operand, size_t at)
{
    const int is_of_query = operand == 0 || operand == 3;

    if (result < 3) { /* of a query: it knows itself and the keys it sees */
        return is_of_query ? row == at : keep[row * K + at];
    }
    for (size_t i = 0; i < Q; i++) { /* of a key: it knows the queries that see it, and through them their keys */
        if (keep[i * K + row] && (is_of_query ? i == at : keep[i * K + at])) {
            return 1;
        }
    }
    return 0;
}

static void
poison(call *c, void *const *clean, size_t operand, size_t at, size_t column, double value)
{
    const size_t index = at * cols_of_operand[operand] + column, item = size_of(dtype);
    const double before = get(dtype, c->operands[operand], index);

    set(dtype, c->operands[operand], index, value);
    run_call(c);
    for (size_t r = 0; r < N_RESULTS; r++) {
        const size_t row_bytes = cols_of_result[r] * item;
        for (size_t row = 0; row < rows_of_result[r]; row++) {
            const char *found = (const char *)c->results[r] + row * row_bytes;
            CHECK(may_know(r, row, operand, at) ||
                      memcmp(found, (const char *)clean[r] + row * row_bytes, row_bytes) == 0,
                  "%s: %g in %s[%zu][%zu] reaches %s[%zu]", mha_isa_name(mha_isa_active()), value,
                  operand_names[operand], at, column, result_names[r], row);
        }
    }
    /* And it is not swallowed: NaN stands in the output of every query that sees it. */
    for (size_t i = 0; i < Q && operand < 3; i++) {
        size_t n_nan = 0;
        for (size_t v = 0; v < DV; v++) {
            n_nan += isnan(get(dtype, c->results[0], i * DV + v)) != 0;
        }
        for (size_t j = 0; j < K; j++) {
            CHECK(keep[i * K + j] || get(dtype, c->results[1], i * K + j) == 0,
                  "%s: %g in %s[%zu][%zu]: weight of a hidden key", mha_isa_name(mha_isa_active()), value,
                  operand_names[operand], at, column);
        }
        const int sees_any = memchr(keep + i * K, 1, K) != NULL;
        CHECK(!isnan(value) || !sees_any || !may_know(0, i, operand, at) || n_nan > 0,
              "%s: NaN in %s[%zu][%zu] is lost", mha_isa_name(mha_isa_active()), operand_names[operand], at, column);
    }
    set(dtype, c->operands[operand], index, before);
}

static void
test_poison(int additive, int by_mask, size_t step)
{
    static const double values[] = {NAN, INFINITY, -INFINITY};
    call c = new_call(additive, by_mask);
    void *clean[N_RESULTS];
    size_t n = 0;

    run_call(&c);
    for (size_t r = 0; r < N_RESULTS; r++) {
        clean[r] = copy_of(c.results[r], rows_of_result[r] * cols_of_result[r] * size_of(dtype));
    }
    for (size_t operand = 0; operand < N_OPERANDS; operand++) {
        for (size_t i = 0; i < rows_of_operand[operand] * cols_of_operand[operand]; i += step) {
            poison(&c, clean, operand, i / cols_of_operand[operand], i % cols_of_operand[operand], values[n++ % 3]);
        }
    }
    free_all();
}

int
main(int argc, char **argv)
{
    const int quick = is_quick(argc, argv);

    mha_threads_set(1);
    FOR_EACH_ISA (isa) {
        for (int type = MHA_F32; type <= MHA_F64; type++) {
            dtype = (mha_dtype)type;
            test_one_key(quick);
            test_mean();
            test_dropout_factors();
            test_tiny_blocks();
            test_overflow();
            for (int kind = 0; kind < 4; kind++) {
                test_poison(kind & 1, kind & 2, quick ? 5 : 1);
            }
        }
    }
    return report();
}
