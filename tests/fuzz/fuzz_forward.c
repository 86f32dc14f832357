/*
 * fuzz_forward.c: any sizes, strides, masks and options against the textbook loops, and instruction set against
 * instruction set.
 *
 * A fuzzer's bytes choose what tests/c/drawn.h draws.  Results must be written everywhere, within rounding of the
 * textbook's, the same bits with and without weights, for one thread and three, and when weights are asked for later.
 * With dropout, which the textbook does not know, instruction sets are compared instead.
 */
#include "fuzz.h"

static void
compare_numbers(const attention_call *call, const void *ours, const void *exact, size_t n, double tolerance)
{
    for (size_t i = 0; i < n; i++) {
        const double a = get(call->args.dtype, ours, i), b = get(call->args.dtype, exact, i);
        REQUIRE(a == b || fabs(a - b) <= tolerance);
    }
}

static void
run_forward(attention_call *call, int with_weights, unsigned n_threads)
{
    const size_t item = size_of(call->args.dtype);

    memset(call->out, 0xff, call->n_out * item); /* NaN: what is not written shows */
    memset(call->lse, 0xff, call->n_rows * item);
    memset(call->weights, 0xff, call->n_weights * item);
    call->args.weights = with_weights ? call->weights : NULL;
    mha_threads_set(n_threads);
    REQUIRE(mha_attention_forward(&call->args) == MHA_OK);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    const mha_isa isa = start(data, n_bytes);
    attention_call call = draw_call(below(2) ? MHA_F64 : MHA_F32, below(8) == 0 ? 600 : 140);
    const size_t item = size_of(call.args.dtype);
    void *stats = allocate(2 * call.n_rows * item);

    call.args.dropout = below(4) == 3 ? (double)below(65) / 64 : 0;
    call.args.seed = below(1000);
    REQUIRE(mha_isa_select(call.args.dropout > 0 ? MHA_ISA_SCALAR : isa) == MHA_OK);
    call.args.weights = call.weights;
    REQUIRE((call.args.dropout > 0 ? mha_attention_forward : textbook_attention)(&call.args) == MHA_OK);
    void *exact = copy_of(call.out, call.n_out * item), *exact_lse = copy_of(call.lse, call.n_rows * item);
    void *exact_weights = copy_of(call.weights, call.n_weights * item);

    REQUIRE(mha_isa_select(isa) == MHA_OK);
    run_forward(&call, 0, 1);
    void *first = copy_of(call.out, call.n_out * item);
    compare_numbers(&call, call.out, exact, call.n_out, call.tolerance / fmax(1 - call.args.dropout, 1e-2));
    compare_numbers(&call, call.lse, exact_lse, call.n_rows, call.tolerance);
    call.args.row_max = stats;
    call.args.row_sum = (char *)stats + call.n_rows * item;
    run_forward(&call, 1, 3);
    REQUIRE(memcmp(first, call.out, call.n_out * item) == 0);
    compare_numbers(&call, call.weights, exact_weights, call.n_weights, call.tolerance);
    void *weights = copy_of(call.weights, call.n_weights * item);
    memset(call.weights, 0xff, call.n_weights * item);
    REQUIRE(mha_attention_weights(&call.args) == MHA_OK);
    REQUIRE(memcmp(weights, call.weights, call.n_weights * item) == 0);
    free_all();
    return 0;
}
