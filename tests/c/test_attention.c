/*
 * test_attention.c: attention, projections and whole layers of the C core against the textbook loops, on drawn sizes,
 * strides and masks, for every instruction set of this CPU and both number types.
 *
 *     test_attention [quick]
 *
 * Every operand lies in memory of exactly its own size, so that a build with AddressSanitizer sees any number read or
 * written beside it; keys that no query may see are NaN, and the core's own memory full of subnormal numbers, of which
 * no call may take notice.  Also: results do not depend on the number of threads, and
 * when the n-th allocation fails, for every n, the call says so and leaves its outputs alone.
 */
#include "asked.h"
#include "drawn.h"
#include "flags.h"
#include "textbook.h"

#define CHECK_NO_SUBNORMALS(what, draw) \
    CHECK(subnormals_met() == NULL, "%s %s %s, draw %zu: %s", mha_isa_name(mha_isa_active()), \
          dtype == MHA_F64 ? "float64" : "float32", what, draw, subnormals_met())

/* --- Attention ------------------------------------------------------------------------------- */

static void
test_draw(mha_dtype dtype, size_t draw, size_t most)
{
    state = draw * 7919 + 17;
    attention_call call = draw_call(dtype, most);
    const size_t item = size_of(dtype);
    const int with_weights = (int)below(2);

    call.args.weights = call.weights;
    CHECK(textbook_attention(&call.args) == MHA_OK, "reference, draw %zu", draw);
    void *exact = copy_of(call.out, call.n_out * item), *exact_lse = copy_of(call.lse, call.n_rows * item);
    void *exact_weights = copy_of(call.weights, call.n_weights * item);

    memset(call.out, 0xff, call.n_out * item); /* NaN everywhere: what is not written shows */
    memset(call.lse, 0xff, call.n_rows * item);
    memset(call.weights, 0xff, call.n_weights * item);
    call.args.weights = with_weights ? call.weights : NULL;
    mha_threads_set(1);
    forget_subnormals();
    CHECK(mha_attention_forward(&call.args) == MHA_OK, "forward, draw %zu", draw);
    CHECK_NO_SUBNORMALS("forward", draw);
    compare(dtype, call.out, exact, call.n_out, call.tolerance, "out", draw);
    compare(dtype, call.lse, exact_lse, call.n_rows, call.tolerance, "lse", draw);
    if (with_weights) {
        compare(dtype, call.weights, exact_weights, call.n_weights, call.tolerance, "weights", draw);
    }
    void *serial = copy_of(call.out, call.n_out * item);
    mha_threads_set(3);
    call.args.weights = NULL;
    CHECK(mha_attention_forward(&call.args) == MHA_OK, "three threads, draw %zu", draw);
    CHECK(memcmp(serial, call.out, call.n_out * item) == 0, "three threads change bits, draw %zu", draw);
    free_all();
}

/* Keys at and beyond the length are never read: NaN there changes nothing. */
static void
test_hidden_keys(mha_dtype dtype)
{
    enum { Q = 5, K = 70, D = 9, SEEN = 33 };
    static const int64_t lens[1] = {SEEN};
    void *q = numbers(dtype, Q * D, 1.0), *k = numbers(dtype, K * D, 1.0), *v = numbers(dtype, K * D, 1.0);
    void *out = numbers(dtype, Q * D, 1.0);
    for (size_t i = SEEN * D; i < K * D; i++) {
        set(dtype, k, i, NAN);
        set(dtype, v, i, NAN);
    }
    mha_attention_args args = one_head(dtype, Q, K, D, D);
    args.scale = &(const double){1};
    place(&args, q, k, v, out);
    args.visible.valid_lens = lens;
    args.visible.lens_per_batch = 1;
    CHECK(mha_attention_forward(&args) == MHA_OK, "hidden keys");
    for (size_t i = 0; i < Q * D; i++) {
        CHECK(!isnan(get(dtype, out, i)), "a hidden key was read");
    }
    free_all();
}

/* Few queries on many keys: threads share the key blocks of a task, and join them with the bits of one thread. */
static void
test_many_keys(mha_dtype dtype, size_t draw)
{
    state = draw * 97 + 13;
    const size_t Q = 1 + draw % 3, K = 3000 + below(3000), D = 1 + below(70), Dv = 1 + below(70), item = size_of(dtype);
    int64_t lens[1] = {(int64_t)(draw % 4 == 0 ? 0 : draw % 4 == 1 ? 700 : K)};
    void *q = numbers(dtype, Q * D, 1.0), *k = numbers(dtype, K * D, 1.0), *v = numbers(dtype, K * Dv, 1.0);
    void *out = numbers(dtype, Q * Dv, 1.0), *weights = numbers(dtype, Q * K, 1.0), *lse = numbers(dtype, Q, 1.0);
    mha_attention_args args = one_head(dtype, Q, K, D, Dv);
    args.scale = &(const double){0.5};
    place(&args, q, k, v, out);
    args.weights = draw % 2 ? weights : NULL;
    args.lse = lse;
    args.empty_rows = draw % 8 ? MHA_EMPTY_ZERO : MHA_EMPTY_UNIFORM;
    args.visible.valid_lens = lens;
    args.visible.lens_per_batch = 1;
    args.visible.causal = draw % 3 ? MHA_CAUSAL_NONE : MHA_CAUSAL_BOTTOM_RIGHT;
    const double tolerance = 16 * (dtype == MHA_F64 ? DBL_EPSILON : FLT_EPSILON) * (2 + 0.5 * (double)D);

    CHECK(textbook_attention(&args) == MHA_OK, "many keys, reference");
    void *exact = copy_of(out, Q * Dv * item), *exact_lse = copy_of(lse, Q * item);
    mha_threads_set(1);
    forget_subnormals();
    CHECK(mha_attention_forward(&args) == MHA_OK, "many keys");
    CHECK_NO_SUBNORMALS("many keys", draw);
    compare(dtype, out, exact, Q * Dv, tolerance, "many keys, out", draw);
    compare(dtype, lse, exact_lse, Q, tolerance, "many keys, lse", draw);
    void *alone = copy_of(out, Q * Dv * item), *alone_lse = copy_of(lse, Q * item), *w = copy_of(weights, Q * K * item);
    mha_threads_set(4);
    CHECK(mha_attention_forward(&args) == MHA_OK, "many keys, four threads");
    CHECK(memcmp(out, alone, Q * Dv * item) == 0 && memcmp(lse, alone_lse, Q * item) == 0 &&
              memcmp(weights, w, Q * K * item) == 0,
          "many keys: four threads change bits, draw %zu", draw);
    free_all();
}

/* --- Projections ------------------------------------------------------------------------------ */

static void
test_linear(mha_dtype dtype, size_t draw)
{
    state = draw * 104729 + 3;
    const size_t rows = draw_size(130), outputs = draw_size(513), inputs = draw_size(513), item = size_of(dtype);
    void *x = numbers(dtype, rows * inputs, 1.0), *weight = numbers(dtype, outputs * inputs, 1.0);
    void *bias = below(2) ? numbers(dtype, outputs, 1.0) : NULL, *y = allocate(rows * outputs * item);
    const mha_linear linear = packed_linear(dtype, outputs, inputs, weight, inputs, bias);
    memset(y, 0xff, rows * outputs * item);
    CHECK(mha_linear_forward(dtype, &linear, rows, x, (ptrdiff_t)inputs, y, (ptrdiff_t)outputs) == MHA_OK, "linear");
    /* Rounding of a sum of `inputs` products of at most 1: inputs^2 / 2 half units at worst, sqrt(inputs) typically. */
    const double unit = dtype == MHA_F64 ? DBL_EPSILON : FLT_EPSILON, tolerance = 4 * unit * (2 + (double)inputs);
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < outputs; j++) {
            double sum = bias ? get(dtype, bias, j) : 0.0;
            for (size_t p = 0; p < inputs; p++) {
                sum += get(dtype, x, i * inputs + p) * get(dtype, weight, j * inputs + p);
            }
            const double got = get(dtype, y, i * outputs + j);
            CHECK(fabs(got - sum) <= tolerance, "%s linear %zux%zux%zu [%zu][%zu]: %.9g, should be %.9g",
                  mha_isa_name(mha_isa_active()), rows, outputs, inputs, i, j, got, sum);
        }
    }
    free_all();
}

/* --- Failing memory ------------------------------------------------------------------------------ */

static void
test_failing_memory(mha_dtype dtype, size_t draw)
{
    state = draw * 31 + 5;
    attention_call call = draw_call(dtype, 520);
    const size_t n_bytes = call.n_out * size_of(dtype);
    void *before = copy_of(call.out, n_bytes);
    mha_set_allocator(counting_alloc, counting_free);
    for (size_t n = 0;; n++) {
        forget_asked();
        asked.fail_at = n;
        asked.for_ever = 1;
        const mha_status status = mha_attention_forward(&call.args);
        if (status == MHA_OK) {
            break;
        }
        CHECK(status == MHA_ERR_NOMEM, "allocation %zu fails: status %d", n, (int)status);
        CHECK(memcmp(before, call.out, n_bytes) == 0, "allocation %zu fails: outputs were touched", n);
        if (n == 20) {
            CHECK(0, "a call needs more than 20 allocations");
            break;
        }
    }
    mha_set_allocator(allocate_subnormals, free);
    free_all();
}

static void
test_status_texts(void)
{
    for (int status = -10; status <= 1; status++) {
        CHECK(mha_status_text((mha_status)status) != NULL, "status %d has no text", status);
    }
    CHECK(mha_isa_name((mha_isa)99) == NULL && !mha_isa_available((mha_isa)99), "ISA 99 exists");
    CHECK(mha_isa_select((mha_isa)99) == MHA_ERR_ISA, "ISA 99 can be selected");
    size_t size = 0;
    CHECK(mha_linear_packed_size(MHA_F32, SIZE_MAX / 2, 3, &size, &size) == MHA_ERR_SIZE, "a size overflows unnoticed");
}

int
main(int argc, char **argv)
{
    const int quick = is_quick(argc, argv);
    test_status_texts();
    mha_set_allocator(allocate_subnormals, free);
    FOR_EACH_ISA (isa) {
        for (int dtype = MHA_F32; dtype <= MHA_F64; dtype++) {
            for (size_t draw = 0; draw < (quick ? 60 : 400); draw++) {
                test_draw((mha_dtype)dtype, draw, draw % 10 == 0 ? 600 : 140);
            }
            for (size_t draw = 0; draw < (quick ? 10 : 40); draw++) {
                test_linear((mha_dtype)dtype, draw);
                test_failing_memory((mha_dtype)dtype, draw);
            }
            for (size_t draw = 0; draw < (quick ? 8 : 24); draw++) {
                test_many_keys((mha_dtype)dtype, draw);
            }
            test_hidden_keys((mha_dtype)dtype);
        }
        printf("%-7s %s\n", mha_isa_name(isa), n_failed ? "see above" : "agrees with the reference");
    }
    return report();
}
