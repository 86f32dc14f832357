/*
 * fuzz_arguments.c: descriptors as an attacker would write them: sizes near every limit, lengths, windows and corners
 * of any value, dropout and options out of range.  Each call is refused, or touches nothing but its operands.
 *
 * Sizes that pass for small ones get real memory of exactly their size; of all others the status alone is asked for,
 * with an allocator that has none, so that no operand is looked at.
 */
#include "asked.h"
#include "fuzz.h"

enum { MOST = 40 };

static size_t
any_size(void)
{
    static const size_t wild[] = {SIZE_MAX,        SIZE_MAX / 2,    SIZE_MAX / 4,          (size_t)1 << 62,
                                  (size_t)1 << 40, (size_t)1 << 32, ((size_t)1 << 31) - 1, 65536};
    return below(6) ? below(MOST) : wild[below(8)] - below(3);
}

static int64_t
any_number(void)
{
    static const int64_t wild[] = {INT64_MIN, INT64_MAX, -1, 0, INT64_MAX / 2, INT64_MIN + 1, INT32_MAX, INT32_MIN};
    return below(3) ? (int64_t)below(MOST + 5) - 2 : wild[below(8)];
}

static const double half = 0.5; /* a scale */

static mha_attention_args
any_call(mha_dtype dtype)
{
    mha_attention_args a = {.dtype = dtype,
                            .batch = any_size(),
                            .kv_heads = any_size(),
                            .queries = any_size(),
                            .keys = any_size(),
                            .head_dim = any_size(),
                            .value_dim = any_size(),
                            .scale = &half};

    a.heads = below(3) ? a.kv_heads * (1 + below(3)) : any_size();
    a.visible =
        (mha_visibility){NULL, below(3) ? 1 : a.queries, (mha_causal)below(3), any_number(), any_number(), 0, 0};
    a.empty_rows = below(2) ? MHA_EMPTY_ZERO : MHA_EMPTY_UNIFORM;
    a.dropout = below(8) ? 0 : (double)below(40) / 16 - 0.5;
    return a;
}

static int
is_small(const mha_attention_args *a)
{
    return a->batch < 5 && a->heads < 13 && a->kv_heads < 13 && a->queries < MOST && a->keys < MOST &&
           a->head_dim < MOST && a->value_dim < MOST;
}

static void
run_small(mha_attention_args *a)
{
    const size_t B = a->batch, H = a->heads, G = a->kv_heads, Q = a->queries, K = a->keys;
    attention_call call = {
        .args = *a, .n_rows = B * H * Q, .n_out = B * H * Q * a->value_dim, .n_weights = B * H * Q * K};
    mha_attention_args *args = &call.args;

    call.q = numbers(a->dtype, B * H * Q * a->head_dim, 1.0);
    call.k = numbers(a->dtype, B * G * K * a->head_dim, 1.0);
    call.v = numbers(a->dtype, B * G * K * a->value_dim, 1.0);
    call.out = numbers(a->dtype, call.n_out, 1.0);
    call.weights = numbers(a->dtype, call.n_weights, 1.0);
    call.lse = numbers(a->dtype, call.n_rows, 1.0);
    args->q = lay_out(call.q, H, Q, a->head_dim, 0);
    args->k = lay_out(call.k, G, K, a->head_dim, 0);
    args->v = lay_out(call.v, G, K, a->value_dim, 0);
    const mha_operand out = lay_out(call.out, H, Q, a->value_dim, 0);
    args->out = (mha_result){call.out, out.batch_stride, out.head_stride, out.row_stride};
    args->weights = below(2) ? call.weights : NULL;
    args->lse = call.lse;
    if (below(3)) {
        const size_t n = B * (args->visible.lens_per_batch == 1 ? 1 : Q);
        call.lens = allocate(n * sizeof *call.lens);
        for (size_t i = 0; i < n; i++) {
            call.lens[i] = any_number();
        }
        args->visible.valid_lens = call.lens;
    }
    const int is_sane = H > 0 && G > 0 && H % G == 0 && a->dropout >= 0 && a->dropout <= 1 &&
                        a->visible.window_left >= 0 && a->visible.window_right >= 0;
    REQUIRE(mha_attention_forward(args) == (is_sane ? MHA_OK : MHA_ERR_ARG));
    if (is_sane) { /* a second look at what is documented to come out */
        backward_call b = with_backward(call);
        REQUIRE(mha_attention_forward(&b.call.args) == MHA_OK);
        REQUIRE(mha_attention_backward(&b.call.args, &b.grads) == MHA_OK);
        for (size_t i = 0; i < b.call.n_rows * K; i++) {
            const double weight = get(a->dtype, b.call.weights, i);
            REQUIRE(weight >= 0 && weight <= 1 + 8 * FLT_EPSILON);
        }
    }
    free_all();
}

static void
ask_sizes(mha_attention_args *a, mha_dtype dtype)
{
    const double number = 0;
    mha_attention_grads grads = {0};
    mha_layer_args layer = {
        .attention = *a,
        .inputs = {{.size = a->head_dim, .W = {below(2) ? &number : NULL, NULL, any_size(), a->head_dim}},
                   {.size = any_size(), .W = {below(2) ? &number : NULL, NULL, any_size(), any_size()}},
                   {.size = a->value_dim}},
        .W_o = {below(2) ? &number : NULL, NULL, any_size(), any_size()},
    };
    size_t size = 0, width = 0;

    mha_set_allocator(no_memory, free);
    a->row_max = a->row_sum = (void *)(uintptr_t)&number; /* never looked at: there is no memory for the call */
    a->weights = below(2) ? a->row_max : NULL;
    REQUIRE(mha_attention_forward(a) != MHA_OK);
    REQUIRE(mha_attention_backward(a, &grads) != MHA_OK);
    REQUIRE(mha_layer_forward(&layer) != MHA_OK);
    mha_set_allocator(NULL, NULL);
    const size_t n = any_size(), m = any_size();
    if (mha_linear_packed_size(dtype, n, m, &size, &width) == MHA_OK) {
        REQUIRE(m == 0 || n == 0 || (size / m >= n && size <= SIZE_MAX / size_of(dtype)));
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    REQUIRE(mha_isa_select(start(data, n_bytes)) == MHA_OK);
    mha_attention_args a = any_call(below(2) ? MHA_F64 : MHA_F32);

    mha_threads_set(1 + (unsigned)below(3));
    if (is_small(&a)) {
        run_small(&a);
    } else {
        ask_sizes(&a, a.dtype);
    }
    return 0;
}
