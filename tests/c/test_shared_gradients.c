/*
 * test_shared_gradients.c: a layer whose queries, keys and values are one array may have their gradients added up in
 * one place.  For every set of projections and every way of sharing, dense and between other numbers, with and without
 * lengths: the sum of what the gradients are apart.  Every instruction set, both types.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "drawn.h"

enum { BATCH = 2, ROWS = 5, SIZE = 6, GAP = 3, N = BATCH * ROWS * SIZE, WIDE = BATCH * (ROWS + 1) * (SIZE + GAP) };

static mha_dtype dtype;
static int64_t lens[BATCH] = {4, 0};

/* A layer with W_q, W_k, W_v, W_o by the bits of `projected`. */
typedef struct {
    mha_layer_args args;
    mha_layer_grads grads;
} self_attention;

static void *
drawn(size_t n)
{
    return numbers(dtype, n, 1.0);
}

static mha_linear
projection(self_attention *s, int i)
{
    const void *weight = drawn(SIZE * SIZE);
    s->grads.weight[i] = weight;
    return packed_linear(dtype, SIZE, SIZE, weight, SIZE, drawn(SIZE));
}

static self_attention
new_layer(unsigned projected, int with_lengths)
{
    self_attention s = {0};
    mha_layer_args *a = &s.args;
    mha_linear *linears[4] = {&a->inputs[0].W, &a->inputs[1].W, &a->inputs[2].W, &a->W_o};
    void **kept[4] = {&a->inputs[0].projected, &a->inputs[1].projected, &a->inputs[2].projected, &a->context};

    *a = layer_sizes(dtype, BATCH, ROWS, ROWS, 2, (const size_t[]){SIZE, SIZE, SIZE});
    a->inputs[0].rows.data = a->inputs[1].rows.data = a->inputs[2].rows.data = drawn(N);
    if (with_lengths) {
        a->attention.visible.valid_lens = lens;
        a->attention.visible.lens_per_batch = 1;
    }
    for (int i = 0; i < 4; i++) {
        if (projected >> i & 1) {
            *linears[i] = projection(&s, i);
            *kept[i] = drawn(N);
        }
    }
    a->out = drawn(N);
    a->attention.row_max = drawn(N);
    a->attention.row_sum = drawn(N);
    s.grads.grad_out = drawn(N);
    CHECK(mha_layer_forward(a) == MHA_OK, "forward");
    return s;
}

static double
at(const mha_result *x, size_t i)
{
    const size_t item = i / (ROWS * SIZE), row = i / SIZE % ROWS, column = i % SIZE;

    return get(dtype, x->data, item * (size_t)x->batch_stride + row * (size_t)x->row_stride + column);
}

/* place[i] is which of three places the gradient of input i goes to. */
static void
check_sharing(self_attention *s, const int place[3], int wide, const char *doing)
{
    const mha_result layout =
        wide ? (mha_result){NULL, (ROWS + 1) * (SIZE + GAP), 0, SIZE + GAP} : (mha_result){NULL, ROWS * SIZE, 0, SIZE};
    const double tolerance =
        100 * (dtype == MHA_F32 ? FLT_EPSILON : DBL_EPSILON); /* some thirty terms of size 1, added in another order */
    mha_layer_grads apart = s->grads, shared = s->grads;
    void *ours[3], *theirs[3];

    apart.forward = shared.forward = &s->args;
    for (int i = 0; i < 3; i++) {
        ours[i] = numbers(dtype, WIDE, 1.0);
        theirs[i] = numbers(dtype, WIDE, 1.0);
        apart.grad_inputs[i] = (mha_result){theirs[i], ROWS * SIZE, 0, SIZE};
    }
    for (int i = 0; i < 3; i++) {
        shared.grad_inputs[i] = layout;
        shared.grad_inputs[i].data = ours[place[i]];
    }
    CHECK(mha_layer_backward(&apart) == MHA_OK && mha_layer_backward(&shared) == MHA_OK, "%s", doing);
    for (int i = 0; i < 3; i++) {
        for (size_t n = 0; n < N; n++) {
            double sum = 0;
            for (int j = 0; j < 3; j++) {
                sum += place[j] == place[i] ? at(&apart.grad_inputs[j], n) : 0;
            }
            const double found = at(&shared.grad_inputs[i], n);
            CHECK(fabs(found - sum) <= tolerance, "%s, %s, input %d [%zu]: %.9g, not %.9g",
                  mha_isa_name(mha_isa_active()), doing, i, n, found, sum);
        }
    }
}

static void
check_layers(void)
{
    static const int places[][3] = {{0, 1, 2}, {0, 0, 0}, {0, 0, 1}, {0, 1, 0}, {0, 1, 1}};
    char doing[80];

    for (unsigned variant = 0; variant < 32; variant++) {
        self_attention s = new_layer(variant & 15, (int)(variant >> 4));
        for (size_t p = 0; p < 10; p++) {
            snprintf(doing, sizeof doing, "projections %x, lengths %u, places %zu", variant & 15, variant >> 4, p);
            check_sharing(&s, places[p / 2], (int)(p % 2), doing);
        }
        free_all();
    }
}

int
main(void)
{
    FOR_EACH_ISA (isa) {
        for (int type = MHA_F32; type <= MHA_F64; type++) {
            dtype = (mha_dtype)type;
            check_layers();
        }
    }
    return report();
}
