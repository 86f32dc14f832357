/*
 * fuzz_backward.c: gradients for any sizes, strides, masks and options against the textbook's, with dropout against
 * the scalar kernels'; the same bits for one thread and three.
 */
#include "fuzz.h"

static void
run_backward(backward_call *b, mha_isa isa, unsigned n_threads)
{
    const size_t item = size_of(b->call.args.dtype);

    REQUIRE(mha_isa_select(isa) == MHA_OK);
    mha_threads_set(n_threads);
    for (int i = 0; i < N_GRADS; i++) {
        memset(b->got[i], 0xff, b->n[i] * item);
    }
    REQUIRE(mha_attention_forward(&b->call.args) == MHA_OK);
    REQUIRE(mha_attention_backward(&b->call.args, &b->grads) == MHA_OK);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    const mha_isa isa = start(data, n_bytes);
    backward_call b = with_backward(draw_call(below(2) ? MHA_F64 : MHA_F32, below(8) == 0 ? 600 : 140));
    mha_attention_args *a = &b.call.args;
    const size_t item = size_of(a->dtype);
    void *first[N_GRADS];

    a->dropout = below(4) == 3 ? (double)below(65) / 64 : 0;
    a->seed = below(1000);
    if (a->dropout > 0) {
        run_backward(&b, MHA_ISA_SCALAR, 1);
        for (int i = 0; i < N_GRADS; i++) {
            for (size_t n = 0; n < b.n[i]; n++) {
                b.exact[i][n] = get(a->dtype, b.got[i], n);
            }
        }
    } else {
        REQUIRE(run_both(&b) == MHA_OK);
    }
    run_backward(&b, isa, 1);
    const double tolerance = backward_tolerance(&b) / fmax(1 - a->dropout, 1e-2);
    for (int i = 0; i < N_GRADS; i++) {
        first[i] = copy_of(b.got[i], b.n[i] * item);
        for (size_t n = 0; n < b.n[i]; n++) {
            REQUIRE(fabs(get(a->dtype, b.got[i], n) - b.exact[i][n]) <= tolerance);
        }
    }
    run_backward(&b, isa, 3);
    for (int i = 0; i < N_GRADS; i++) {
        REQUIRE(memcmp(first[i], b.got[i], b.n[i] * item) == 0);
    }
    free_all();
    return 0;
}
