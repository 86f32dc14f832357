/*
 * test_projections.c: projections of whole numbers, forward, backward and into a cache, and softmax of equal scores:
 * every sum is exact, so a term lost or counted twice at any edge of a tile, panel or chunk shows.  And of real
 * numbers, whose bits tell the order of sums.  Every instruction set, both types.
 *
 *     test_projections [quick]
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "drawn.h"

static mha_dtype dtype;

/* A matrix of whole numbers in -3 .. 3, with a gap of NaN behind each row. */
typedef struct {
    size_t rows, cols, stride;
    int *whole; /* dense */
    void *data; /* rows `stride` apart */
} matrix;

static matrix
new_matrix(size_t rows, size_t cols, size_t gap)
{
    matrix m = {rows, cols, cols + gap, allocate(rows * cols * sizeof(int)), NULL};

    m.data = allocate(rows * m.stride * size_of(dtype));
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < m.stride; j++) {
            const int x = (int)(below(7)) - 3;
            if (j < cols) {
                m.whole[i * cols + j] = x;
            }
            set(dtype, m.data, i * m.stride + j, j < cols ? x : (double)NAN);
        }
    }
    return m;
}

/* Compares dense results, rows x cols, with sum_p a(i, p) b(p, j) + added[j]. */
static void
check_product(const char *what, const void *found, size_t rows, size_t cols, size_t depth, const int *a, size_t a_row,
              size_t a_step, const int *b, size_t b_step, size_t b_col, const int *added)
{
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < cols; j++) {
            long sum = added != NULL ? added[j] : 0;
            for (size_t p = 0; p < depth; p++) {
                sum += (long)a[i * a_row + p * a_step] * b[p * b_step + j * b_col];
            }
            CHECK(get(dtype, found, i * cols + j) == (double)sum,
                  "%s, %s, depth %zu: [%zu of %zu][%zu of %zu] is %g, not %ld", mha_isa_name(mha_isa_active()), what,
                  depth, i, rows, j, cols, get(dtype, found, i * cols + j), sum);
        }
    }
}

static void
check_projection(size_t rows, size_t outs, size_t ins)
{
    matrix x = new_matrix(rows, ins, rows % 3), weight = new_matrix(outs, ins, 0), bias = new_matrix(1, outs, 0);
    matrix grad_y = new_matrix(rows, outs, rows % 2);
    const size_t item = size_of(dtype);
    void *y = allocate(rows * outs * item), *grad_x = allocate(rows * ins * item);
    void *grad_weight = allocate(outs * ins * item), *grad_bias = allocate(outs * item);
    int *ones = allocate(rows * sizeof(int));

    const mha_linear linear = packed_linear(dtype, outs, ins, weight.data, ins, bias.data);
    CHECK(mha_linear_forward(dtype, &linear, rows, x.data, (ptrdiff_t)x.stride, y, (ptrdiff_t)outs) == MHA_OK,
          "forward");
    check_product("y", y, rows, outs, ins, x.whole, ins, 1, weight.whole, 1, ins, bias.whole);
    const mha_linear_grads grads =
        linear_grads(dtype, rows, outs, ins, (const void *[]){x.data, weight.data, grad_y.data}, x.stride,
                     grad_y.stride, (void *[]){grad_x, grad_weight, grad_bias});
    CHECK(mha_linear_backward(&grads) == MHA_OK, "backward");
    for (size_t i = 0; i < rows; i++) {
        ones[i] = 1;
    }
    check_product("grad_x", grad_x, rows, ins, outs, grad_y.whole, outs, 1, weight.whole, ins, 1, NULL);
    check_product("grad_weight", grad_weight, outs, ins, rows, grad_y.whole, 1, outs, x.whole, ins, 1, NULL);
    check_product("grad_bias", grad_bias, 1, outs, rows, ones, 0, 1, grad_y.whole, outs, 1, NULL);
    free_all();
}

/* A cache's new rows that count are the projected rows of x, or these as they are, and no other number changes. */
static void
check_append(size_t rows, size_t outs, size_t ins, int projected, int alike)
{
    enum { BATCH = 3, EMPTY = 99 };
    const int64_t before[BATCH] = {2, alike ? 2 : 0, alike ? 2 : 5};
    const int64_t counts[BATCH] = {(int64_t)rows, alike ? (int64_t)rows : 0, (int64_t)rows - !alike};
    const size_t room = rows + 6;
    matrix x = new_matrix(BATCH * rows, ins, rows % 3), weight = new_matrix(outs, ins, 0),
           bias = new_matrix(1, outs, 0);
    void *cache = allocate(BATCH * room * outs * size_of(dtype));

    for (size_t i = 0; i < BATCH * room * outs; i++) {
        set(dtype, cache, i, EMPTY);
    }
    const mha_linear copied = {.out_features = outs, .in_features = ins};
    const mha_linear linear = projected ? packed_linear(dtype, outs, ins, weight.data, ins, bias.data) : copied;
    mha_append append = append_of(dtype, &linear, BATCH, rows, x.data, cache, room, before, counts);

    append.x.row_stride = (ptrdiff_t)x.stride;
    append.x.batch_stride = (ptrdiff_t)(rows * x.stride);
    append.before_step = append.counts_step = !alike;
    CHECK(mha_linear_append(&append) == MHA_OK, "append");
    for (size_t i = 0; i < BATCH * room * outs; i++) {
        const size_t b = i / outs / room, row = i / outs % room - (size_t)before[b], j = i % outs;
        long wanted = EMPTY;
        if (row < (size_t)counts[b]) { /* of a row before the first: more than any count */
            const int *of_x = x.whole + (b * rows + row) * ins;
            wanted = projected ? bias.whole[j] : of_x[j];
            for (size_t p = 0; projected && p < ins; p++) {
                wanted += (long)of_x[p] * weight.whole[j * ins + p];
            }
        }
        CHECK(get(dtype, cache, i) == (double)wanted, "%s, append of %zu rows, %s: [%zu][%zd][%zu] is %g, not %ld",
              mha_isa_name(mha_isa_active()), rows, projected ? "projected" : "as they are", b, (ptrdiff_t)row, j,
              get(dtype, cache, i), wanted);
    }
    free_all();
}

/* A weight in rows, read as it lies by few rows of x and packed for many, gives the bits of one packed before. */
static void
check_layouts(size_t rows, size_t outs, size_t ins)
{
    const size_t item = size_of(dtype), stride = ins + rows % 4;
    void *x = numbers(dtype, rows * ins, 1.0), *weight = numbers(dtype, outs * stride, 1.0);
    void *bias = below(2) ? numbers(dtype, outs, 1.0) : NULL;
    void *y = allocate(rows * outs * item), *from_rows = allocate(rows * outs * item);

    for (size_t i = 0; i < outs; i++) {
        for (size_t j = ins; j < stride; j++) {
            set(dtype, weight, i * stride + j, (double)NAN);
        }
    }
    const mha_linear of_packed = packed_linear(dtype, outs, ins, weight, stride, bias);
    const mha_linear of_rows = {weight, bias, outs, ins, MHA_WEIGHT_ROWS, (ptrdiff_t)stride, 0};
    memset(from_rows, 0xff, rows * outs * item);
    CHECK(mha_linear_forward(dtype, &of_packed, rows, x, (ptrdiff_t)ins, y, (ptrdiff_t)outs) == MHA_OK, "packed");
    CHECK(mha_linear_forward(dtype, &of_rows, rows, x, (ptrdiff_t)ins, from_rows, (ptrdiff_t)outs) == MHA_OK, "rows");
    CHECK(memcmp(y, from_rows, rows * outs * item) == 0, "%s, %zu rows x %zu x %zu: other bits from a weight in rows",
          mha_isa_name(mha_isa_active()), rows, outs, ins);
    free_all();
}

/* Without a fused multiply-add the vectors of WebAssembly do what scalar does to each number, in the same order. */
static void
check_bits_of_scalar(size_t rows, size_t outs, size_t ins)
{
    const size_t sizes[] = {rows * outs, rows * ins, outs * ins, outs};
    void *x = numbers(dtype, rows * ins, 1.0), *weight = numbers(dtype, outs * ins, 1.0);
    void *bias = numbers(dtype, outs, 1.0), *grad_y = numbers(dtype, rows * outs, 1.0);
    const mha_isa isas[] = {MHA_ISA_SCALAR, MHA_ISA_WASM};
    void *found[2][4]; /* y, grad_x, grad_weight, grad_bias */

    for (int k = 0; k < 2; k++) {
        const mha_linear linear = {weight, bias, outs, ins, MHA_WEIGHT_ROWS, (ptrdiff_t)ins, 0};
        CHECK(mha_isa_select(isas[k]) == MHA_OK, "select %s", mha_isa_name(isas[k]));
        for (int i = 0; i < 4; i++) {
            found[k][i] = allocate(sizes[i] * size_of(dtype));
        }
        const mha_linear_grads grads =
            linear_grads(dtype, rows, outs, ins, (const void *[]){x, weight, grad_y}, ins, outs, &found[k][1]);
        CHECK(mha_linear_forward(dtype, &linear, rows, x, (ptrdiff_t)ins, found[k][0], (ptrdiff_t)outs) == MHA_OK, "y");
        CHECK(mha_linear_backward(&grads) == MHA_OK, "backward");
    }
    for (int i = 0; i < 4; i++) {
        CHECK(memcmp(found[0][i], found[1][i], sizes[i] * size_of(dtype)) == 0,
              "%zu rows x %zu x %zu: other bits than scalar's in result %d", rows, outs, ins, i);
    }
    free_all();
}

/* --- Softmax of equal scores ---------------------------------------------------------------------- */

static void
check_softmax(size_t keys, size_t valid, mha_empty empty_rows)
{
    const int64_t len = (int64_t)valid;
    const mha_visibility visible = {&len, 1, MHA_CAUSAL_NONE, MHA_NO_LIMIT, MHA_NO_LIMIT, 0, 0};
    void *x = allocate(2 * keys * size_of(dtype));

    for (size_t j = 0; j < 2 * keys; j++) {
        set(dtype, x, j, j % keys < valid ? -7.25 : (double)NAN);
    }
    CHECK(mha_masked_softmax(&(mha_masked_softmax_args){dtype, 1, 2, keys, x, visible, empty_rows, x}) == MHA_OK,
          "softmax");
    for (size_t j = 0; j < 2 * keys; j++) {
        const double all = empty_rows == MHA_EMPTY_UNIFORM ? 1.0 / (double)keys : 0.0;
        const double weight = valid == 0 ? all : j % keys < valid ? 1.0 / (double)valid : 0.0;
        const double rounded = dtype == MHA_F32 ? (double)(float)weight : weight;
        CHECK(get(dtype, x, j) == rounded, "%s, softmax of %zu of %zu: [%zu] is %.17g, not %.17g",
              mha_isa_name(mha_isa_active()), valid, keys, j, get(dtype, x, j), rounded);
    }
    free_all();
}

static void
run_all(int quick)
{
    /* Around the tiles' rows (4 .. 12), panels (16 .. 96), the rows per task, 128 rows of sums, 256 steps of depth. */
    static const size_t sizes[][3] = {{1, 1, 1},      {3, 33, 5},     {13, 97, 7}, {129, 17, 31},
                                      {256, 5, 64},   {257, 40, 63},  {7, 5, 513}, {520, 97, 3},
                                      {11, 300, 257}, {258, 387, 129}}; /* the last: gradients copy both sides, twice
                                                                           over the depth */

    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        check_projection(sizes[i][0], sizes[i][1], sizes[i][2]);
        check_layouts(sizes[i][0], sizes[i][1], sizes[i][2]);
    }
    for (size_t rows = 180; rows < 700; rows += 97) { /* one task, several, and so many that the call packs */
        check_layouts(rows, 40, 20);
        check_layouts(rows, 1 + below(40), 250 + below(20));
    }
    for (size_t rows = 1; rows < 14; rows++) { /* each register tile; depths of one chunk and of several */
        check_layouts(rows, 1 + below(200), 1 + below(rows % 2 ? 256 : 1100));
    }
    for (size_t rows = 1; rows < 4; rows++) {
        for (int alike = 0; alike < 2; alike++) {
            check_append(rows, 9, 9, 0, alike);
            check_append(rows, 5, 7, 1, alike);
        }
    }
    for (size_t n = 0; n < (quick ? 5 : 40); n++) {
        check_projection(1 + below(30), 1 + below(70), 1 + below(40));
        check_layouts(1 + below(400), 1 + below(70), 1 + below(300));
    }
    for (size_t keys = 1; keys < 70; keys += quick ? 7 : 1) {
        for (size_t valid = 0; valid <= keys; valid++) {
            check_softmax(keys, valid, valid % 2 ? MHA_EMPTY_ZERO : MHA_EMPTY_UNIFORM);
        }
        check_softmax(keys, 0, MHA_EMPTY_ZERO);
    }
}

int
main(int argc, char **argv)
{
    const int quick = is_quick(argc, argv);

    FOR_EACH_ISA (isa) {
        for (int type = MHA_F32; type <= MHA_F64; type++) {
            dtype = (mha_dtype)type;
            mha_threads_set(type == MHA_F32 ? 1 : 2);
            run_all(quick);
        }
    }
    for (int n = 0; n < 200 && mha_isa_available(MHA_ISA_WASM); n++) {
        dtype = n % 2 ? MHA_F64 : MHA_F32;
        check_bits_of_scalar(1 + below(n < 100 ? 12 : 300), 1 + below(100), 1 + below(n < 100 ? 600 : 100));
    }
    return report();
}
