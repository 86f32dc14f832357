/*
 * test_arguments.c: the core's second look at what it is given.  The binding has checked it all in the user's words;
 * these are the statuses that a C caller gets, and that no result is touched then.  Also: results that are not wanted.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#define _GNU_SOURCE
#include "cases.h"
#include "mha_explain.h"
#include "runtime/cpu.h"
#include "kernels/dispatch.h"

#include <math.h>

#define NO_DTYPE ((mha_dtype)2)
#define HALF (SIZE_MAX / 2)

/* --- Attention ------------------------------------------------------------------------------------- */

static void
attention_refused(attention_case *c, mha_status status, const char *what)
{
    const uint64_t before = hash_operands();

    CHECK(mha_attention_forward(&c->args) == status, "forward: %s", what);
    CHECK(mha_attention_weights(&c->args) == status, "weights: %s", what);
    CHECK(mha_attention_backward(&c->args, &c->grads) == status, "backward: %s", what);
    CHECK(mha_attention_explain(&c->args, &(mha_attention_facts){0}) == status, "explain: %s", what);
    CHECK(hash_operands() == before, "refused, and something was written: %s", what);
}

/* A good call with some fields of its arguments `a` changed. */
#define REFUSED(status, ...) \
    do { \
        attention_case c = good_attention(0); \
        mha_attention_args *a = &c.args; \
        __VA_ARGS__; \
        attention_refused(&c, status, #__VA_ARGS__); \
    } while (0)

static void
check_attention_arguments(void)
{
    int64_t lens[8] = {0};
    attention_case c = good_attention(0);

    CHECK(mha_attention_forward(&c.args) == MHA_OK && mha_attention_backward(&c.args, &c.grads) == MHA_OK, "as it is");
    REFUSED(MHA_ERR_ARG, a->dtype = NO_DTYPE);
    REFUSED(MHA_ERR_ARG, a->heads = 0);
    REFUSED(MHA_ERR_ARG, a->kv_heads = 0);
    REFUSED(MHA_ERR_ARG, a->heads = 3; a->kv_heads = 2);
    REFUSED(MHA_ERR_ARG, a->row_max = NULL);
    REFUSED(MHA_ERR_ARG, a->row_sum = NULL);
    REFUSED(MHA_ERR_ARG, a->dropout = -0.001);
    REFUSED(MHA_ERR_ARG, a->dropout = 1.001);
    REFUSED(MHA_ERR_ARG, a->dropout = (double)NAN);
    REFUSED(MHA_ERR_ARG, a->visible.valid_lens = lens; a->visible.lens_per_batch = a->queries + 1);
    REFUSED(MHA_ERR_ARG, a->visible.valid_lens = lens; a->visible.lens_per_batch = 0);
    REFUSED(MHA_ERR_ARG, a->first_item = MHA_LAST_PLACE + 1);
    REFUSED(MHA_ERR_ARG, a->first_head = MHA_LAST_PLACE + 1);
    REFUSED(MHA_ERR_ARG, a->visible.first_query = MHA_LAST_PLACE + 1);
    REFUSED(MHA_ERR_ARG, a->visible.first_key = MHA_LAST_PLACE + 1);
    c = good_attention(0);
    c.args.visible.causal = MHA_CAUSAL_TOP_LEFT;
    c.args.first_item = c.args.first_head = c.args.visible.first_query = c.args.visible.first_key = MHA_LAST_PLACE;
    CHECK(mha_attention_forward(&c.args) == MHA_OK, "a part in the last place");
    /* Without either of these two there is nothing to rebuild weights from, or to put them into. */
    c = good_attention(0);
    c.args.row_max = c.args.row_sum = NULL;
    CHECK(mha_attention_weights(&c.args) == MHA_ERR_ARG, "weights without statistics");
    CHECK(mha_attention_backward(&c.args, &c.grads) == MHA_ERR_ARG, "backward without statistics");
    c = good_attention(0);
    c.args.weights = NULL;
    CHECK(mha_attention_weights(&c.args) == MHA_ERR_ARG, "weights into nothing");
}

/* What has no numbers needs no address; and what nothing is added to is zero, for one number a head, too. */
static void
check_attention_of_nothing(void)
{
    attention_case c = good_attention(0);
    c.args.value_dim = 0;
    c.args.v.data = c.grads.out.data = c.grads.grad_out.data = NULL;
    c.args.out.data = c.grads.grad_v.data = NULL;
    CHECK(mha_attention_forward(&c.args) == MHA_OK && mha_attention_backward(&c.args, &c.grads) == MHA_OK,
          "values of no numbers");
    c = good_attention(0);
    c.args.queries = 0;
    c.args.q.data = c.grads.out.data = c.grads.grad_out.data = NULL;
    c.args.out.data = c.grads.grad_q.data = NULL;
    CHECK(mha_attention_forward(&c.args) == MHA_OK && mha_attention_backward(&c.args, &c.grads) == MHA_OK,
          "no queries");
    for (size_t head_dim = 1; head_dim <= 8; head_dim += 7) {
        guarded_reset(1);
        c = attention_of(head_dim, 0, 0);
        const size_t n_bytes = c.n_q * size_of(dtype);
        unsigned char *bytes = memset(c.grads.grad_q.data, 1, n_bytes);
        CHECK(mha_attention_forward(&c.args) == MHA_OK && mha_attention_backward(&c.args, &c.grads) == MHA_OK,
              "no keys, %zu numbers a head", head_dim);
        while (bytes < (unsigned char *)c.grads.grad_q.data + n_bytes && *bytes == 0) {
            bytes++;
        }
        CHECK(bytes == (unsigned char *)c.grads.grad_q.data + n_bytes, "no keys: a gradient of %zu numbers a head",
              head_dim);
    }
}

/* Each product of sizes on its own: of those before it none overflows. */
static void
check_attention_sizes(void)
{
    REFUSED(MHA_ERR_SIZE, a->batch = HALF + 2; a->heads = 2; a->kv_heads = 1);
    REFUSED(MHA_ERR_SIZE, a->batch = 2; a->queries = HALF);
    REFUSED(MHA_ERR_SIZE, a->batch = 1; a->heads = a->kv_heads = 1; a->queries = HALF / 4);
    REFUSED(MHA_ERR_SIZE, a->value_dim = HALF / 8);
    REFUSED(MHA_ERR_SIZE, a->head_dim = HALF / 8);
    REFUSED(MHA_ERR_SIZE, a->keys = HALF / 2);
    REFUSED(MHA_ERR_SIZE, a->keys = HALF / 16);
    REFUSED(MHA_ERR_SIZE, a->keys = HALF / 64 + 2; a->head_dim = 1);
    REFUSED(MHA_ERR_SIZE, a->head_dim = 0; a->keys = HALF / 64 + 2);
    REFUSED(MHA_ERR_SIZE, a->batch = 0; a->queries = HALF / 64 + 2);
}

/* --- Projections -------------------------------------------------------------------------------------- */

static void
check_linear_forward(void)
{
    enum { OUT = 5, IN = 7, ROWS = 3 };
    const void *weight;
    size_t size = 0, width = 0;

    guarded_reset(1);
    const mha_linear good = projection(OUT, IN, &weight), none = {NULL, NULL, OUT, IN, MHA_WEIGHT_ROWS, IN, 0};
    const void *x = numbers(dtype, ROWS * IN);
    void *y = room(dtype, ROWS * OUT), *packed = room(dtype, 1);
    const uint64_t before = hash_operands();

    CHECK(mha_linear_packed_size(NO_DTYPE, OUT, IN, &size, &width) == MHA_ERR_ARG, "packed size: type");
    CHECK(mha_linear_packed_size(dtype, SIZE_MAX, IN, &size, &width) == MHA_ERR_SIZE, "packed size: rounding up");
    CHECK(mha_linear_packed_size(dtype, HALF, IN, &size, &width) == MHA_ERR_SIZE, "packed size: product");
    CHECK(mha_linear_packed_size(dtype, HALF / 4, 1, &size, &width) == MHA_ERR_SIZE, "packed size: bytes");
    CHECK(size == 0 && width == 0, "packed size: refused, and written");
    CHECK(mha_linear_pack(NO_DTYPE, OUT, IN, weight, IN, packed) == MHA_ERR_ARG, "pack: type");
    CHECK(mha_linear_pack(dtype, HALF, IN, weight, IN, packed) == MHA_ERR_SIZE, "pack: sizes");
    CHECK(mha_linear_forward(NO_DTYPE, &good, ROWS, x, IN, y, OUT) == MHA_ERR_ARG, "linear: type");
    CHECK(mha_linear_forward(dtype, &none, ROWS, x, IN, y, OUT) == MHA_ERR_ARG, "linear: nothing packed");
    CHECK(mha_linear_explain(NO_DTYPE, &good, ROWS, &(mha_linear_facts){0}) == MHA_ERR_ARG, "linear, explained: type");
    CHECK(mha_linear_explain(dtype, &none, ROWS, &(mha_linear_facts){0}) == MHA_ERR_ARG,
          "linear, explained: nothing packed");
    CHECK(mha_linear_forward(dtype, &good, 0, x, IN, y, OUT) == MHA_OK, "linear: no rows");
    CHECK(hash_operands() == before, "linear: something was written");
    CHECK(mha_linear_forward(dtype, &good, ROWS, x, IN, y, OUT) == MHA_OK && hash_operands() != before, "linear");
}

static void
check_linear_append(void)
{
    enum { OUT = 5, IN = 7, BATCH = 2, ROWS = 3, ROOM = 6 };
    const int64_t before[] = {1, 3}, all = ROWS;
    const void *weight;

    guarded_reset(1);
    const mha_linear linear = projection(OUT, IN, &weight);
    mha_append good = append_of(dtype, &linear, BATCH, ROWS, numbers(dtype, BATCH * ROWS * IN),
                                room(dtype, BATCH * ROOM * OUT), ROOM, before, &all);
    good.counts_step = 0;
    const uint64_t untouched = hash_operands();
    mha_append bad = good;

    bad.dtype = NO_DTYPE;
    CHECK(mha_linear_append(&bad) == MHA_ERR_ARG, "append: type");
    bad = good;
    bad.in_features = IN - 1;
    CHECK(mha_linear_append(&bad) == MHA_ERR_ARG, "append: features");
    bad = good;
    bad.rows = HALF;
    CHECK(mha_linear_append(&bad) == MHA_ERR_SIZE, "append: how many rows");
    CHECK(hash_operands() == untouched, "append: something was written");
    CHECK(mha_linear_append(&good) == MHA_OK && hash_operands() != untouched, "append");
}

static void
check_linear_backward(void)
{
    enum { OUT = 5, IN = 7, ROWS = 3 };
    guarded_reset(1);
    const void *const read[] = {numbers(dtype, ROWS * IN), numbers(dtype, OUT * IN), numbers(dtype, ROWS * OUT)};
    void *const result[] = {room(dtype, ROWS * IN), room(dtype, OUT * IN), room(dtype, OUT)};
    const mha_linear_grads good = linear_grads(dtype, ROWS, OUT, IN, read, IN, OUT, result);
    const uint64_t before = hash_operands();
    mha_linear_grads bad[4] = {good, good, good, good}, nothing = good;

    bad[0].dtype = NO_DTYPE;
    bad[1].x = NULL;
    bad[2].weight = NULL;
    bad[3].grad_y = NULL;
    for (int i = 0; i < 4; i++) {
        CHECK(mha_linear_backward(&bad[i]) == MHA_ERR_ARG, "linear backward: bad argument %d", i);
    }
    nothing.grad_x = nothing.grad_weight = nothing.grad_bias = NULL;
    CHECK(mha_linear_backward(&nothing) == MHA_OK && hash_operands() == before, "linear backward: nothing is wanted");
    CHECK(mha_linear_backward(&good) == MHA_OK, "linear backward");
    const uint64_t all = hash_operands();
    for (int i = 0; i < 3; i++) { /* all but one: that one keeps what it has, the others come out the same */
        mha_linear_grads some = good;
        void **const wanted[3] = {&some.grad_x, &some.grad_weight, &some.grad_bias};
        *wanted[i] = NULL;
        CHECK(mha_linear_backward(&some) == MHA_OK && hash_operands() == all, "linear backward without result %d", i);
        some = nothing;
        *wanted[i] = memset(result[i], 0xff, 1);
        CHECK(mha_linear_backward(&some) == MHA_OK && hash_operands() == all, "linear backward: result %d alone", i);
    }
}

/* --- Layers ---------------------------------------------------------------------------------------------- */

static void
layer_refused(layer_case *c, mha_status status, const char *what)
{
    const uint64_t before = hash_operands();

    c->grads.forward = &c->args;
    CHECK(mha_layer_forward(&c->args) == status, "layer: %s", what);
    CHECK(mha_layer_explain(&c->args, &(mha_layer_facts){0}) == status, "layer, explained: %s", what);
    CHECK(mha_layer_backward(&c->grads) == status, "layer backward: %s", what);
    CHECK(hash_operands() == before, "layer refused, and something was written: %s", what);
}

/* Rows that are not there need no address; a single one does. */
static void
check_layer_of_few_rows(void)
{
    const struct {
        size_t batch, queries, keys;
    } sizes[] = {{0, 2, 2}, {2, 0, 2}, {2, 2, 0}, {1, 1, 1}};

    for (size_t i = 0; i < 3 * sizeof(sizes) / sizeof(sizes[0]); i++) {
        layer_case c = good_layer(0);
        const void **const rows[] = {&c.args.inputs[0].rows.data, &c.args.inputs[1].rows.data,
                                     &c.args.inputs[2].rows.data};
        const uint64_t before = hash_operands();

        c.args.attention.batch = sizes[i / 3].batch;
        c.args.attention.queries = sizes[i / 3].queries;
        c.args.attention.keys = sizes[i / 3].keys;
        *rows[i % 3] = NULL;
        const int has_rows =
            c.args.attention.batch * (i % 3 == 0 ? c.args.attention.queries : c.args.attention.keys) > 0;
        CHECK(mha_layer_forward(&c.args) == (has_rows ? MHA_ERR_ARG : MHA_OK), "layer of few rows, %zu", i);
        CHECK(!has_rows || hash_operands() == before, "layer of few rows, %zu: something was written", i);
    }
}

#define LAYER_REFUSED(status, ...) \
    do { \
        layer_case c = good_layer(0); \
        mha_layer_args *a = &c.args; \
        __VA_ARGS__; \
        layer_refused(&c, status, #__VA_ARGS__); \
    } while (0)

static void
check_layer_arguments(void)
{
    LAYER_REFUSED(MHA_ERR_ARG, a->attention.dtype = NO_DTYPE);
    LAYER_REFUSED(MHA_ERR_ARG, a->attention.heads = 0);
    LAYER_REFUSED(MHA_ERR_ARG, a->attention.heads = a->inputs[0].W.out_features + 1);
    LAYER_REFUSED(MHA_ERR_ARG, a->inputs[0].size++);
    LAYER_REFUSED(MHA_ERR_ARG, a->inputs[1].size++);
    LAYER_REFUSED(MHA_ERR_ARG, a->inputs[2].size++);
    LAYER_REFUSED(MHA_ERR_ARG, a->inputs[1].W.out_features += 2);
    LAYER_REFUSED(MHA_ERR_ARG, a->W_o.in_features++);
    LAYER_REFUSED(MHA_ERR_ARG, a->attention.dropout = 2);
    LAYER_REFUSED(MHA_ERR_SIZE, a->attention.batch = HALF);
    LAYER_REFUSED(MHA_ERR_SIZE, a->attention.queries = HALF);
}

/* Backward needs what forward may leave out. */
static void
check_layer_backward_needs(void)
{
    for (int i = 0; i < 12; i++) {
        layer_case c = good_layer(i == 11);
        mha_layer_args *a = &c.args;
        c.grads.forward = a;
        const void **const parts[] = {
            (const void **)&a->attention.row_max,
            (const void **)&a->attention.row_sum,
            (const void **)&a->inputs[0].projected,
            (const void **)&a->inputs[1].projected,
            (const void **)&a->inputs[2].projected,
            (const void **)&a->context,
            &c.grads.grad_out,
            &c.grads.weight[0],
            &c.grads.weight[1],
            &c.grads.weight[2],
            &c.grads.weight[3],
            (const void **)&a->out, /* of a layer without W_o */
        };
        CHECK(mha_layer_forward(a) == MHA_OK && mha_layer_backward(&c.grads) == MHA_OK, "layer backward, %d", i);
        const uint64_t before = hash_operands();
        *parts[i] = NULL;
        CHECK(mha_layer_backward(&c.grads) == MHA_ERR_ARG, "layer backward without part %d", i);
        CHECK(hash_operands() == before, "layer backward without part %d: something was written", i);
    }
}

/* Any gradient may be left out: it keeps what stood there, and the others have the same bits. */
static void
check_layer_wishes(int is_additive, int with_lengths)
{
    static const int64_t lens[2] = {5, 0};
    layer_case c = good_layer(is_additive);

    if (with_lengths) {
        c.args.attention.visible.valid_lens = lens;
        c.args.attention.visible.lens_per_batch = 1;
    }
    c.grads.forward = &c.args;
    CHECK(mha_layer_forward(&c.args) == MHA_OK && mha_layer_backward(&c.grads) == MHA_OK, "all gradients");
    const uint64_t all = hash_operands();
    for (int i = 0; i < 12; i++) {
        mha_layer_grads some = c.grads;
        void **const wanted[] = {&some.grad_inputs[0].data, &some.grad_inputs[1].data,
                                 &some.grad_inputs[2].data, &some.attention.grad_additive_weights,
                                 &some.grad_weight[0],      &some.grad_weight[1],
                                 &some.grad_weight[2],      &some.grad_weight[3],
                                 &some.grad_bias[0],        &some.grad_bias[1],
                                 &some.grad_bias[2],        &some.grad_bias[3]};
        *wanted[i] = NULL;
        CHECK(mha_layer_backward(&some) == MHA_OK && hash_operands() == all, "without gradient %d", i);
    }
}

/* --- The rest ------------------------------------------------------------------------------------------------ */

static void
check_masked_softmax(void)
{
    const mha_visibility all = {NULL, 0, MHA_CAUSAL_NONE, MHA_NO_LIMIT, MHA_NO_LIMIT, 0, 0};

    guarded_reset(1);
    void *x = numbers(dtype, 6);
    const uint64_t before = hash_operands();
    CHECK(mha_masked_softmax(&(mha_masked_softmax_args){NO_DTYPE, 1, 2, 3, x, all, MHA_EMPTY_ZERO, x}) == MHA_ERR_ARG,
          "softmax: type");
    CHECK(mha_masked_softmax(&(mha_masked_softmax_args){dtype, HALF, 0, 3, x, all, MHA_EMPTY_UNIFORM, x}) == MHA_OK,
          "softmax: no queries");
    CHECK(mha_masked_softmax(&(mha_masked_softmax_args){dtype, HALF, 2, 0, x, all, MHA_EMPTY_UNIFORM, x}) == MHA_OK,
          "softmax: no keys");
    CHECK(mha_masked_softmax(&(mha_masked_softmax_args){dtype, 0, 2, 3, x, all, MHA_EMPTY_UNIFORM, x}) == MHA_OK,
          "softmax: no items");
    CHECK(hash_operands() == before, "softmax: something was written");
}

static void
check_isas(void)
{
    const mha_isa before = mha_isa_active(), no_isa[] = {MHA_N_ISAS, (mha_isa)-1, (mha_isa)1000};

    for (size_t i = 0; i < 3; i++) {
        CHECK(mha_isa_name(no_isa[i]) == NULL, "the name of no instruction set");
        CHECK(!mha_isa_compiled(no_isa[i]) && !mha_isa_available(no_isa[i]) && !mha_cpu_offers(no_isa[i]), "no set");
        CHECK(mha_isa_select(no_isa[i]) == MHA_ERR_ISA && mha_isa_active() == before, "no set is selected");
    }
    for (mha_isa isa = MHA_ISA_SCALAR; isa < MHA_N_ISAS; isa++) {
        CHECK(mha_isa_name(isa) != NULL, "set %d has no name", (int)isa);
        CHECK(mha_isa_available(isa) == (mha_isa_compiled(isa) && mha_cpu_offers(isa)), "%s", mha_isa_name(isa));
        CHECK((mha_isa_select(isa) == MHA_OK) == mha_isa_available(isa), "%s selected", mha_isa_name(isa));
    }
    CHECK(mha_isa_select(before) == MHA_OK, "back again");
    CHECK(mha_kernels_for(NO_DTYPE) == NULL, "kernels of no type");
    CHECK(strcmp(mha_kernels_for(dtype)->isa, mha_isa_name(before)) == 0, "kernels of the active set");
}

int
main(void)
{
    guarded_start();
    for (int i = 0; i < 2; i++) {
        dtype = i == 0 ? MHA_F32 : MHA_F64;
        snprintf(guard.doing, sizeof guard.doing, "arguments, type %d", i);
        check_attention_arguments();
        check_attention_of_nothing();
        check_attention_sizes();
        check_linear_forward();
        check_linear_append();
        check_linear_backward();
        check_layer_arguments();
        check_layer_of_few_rows();
        check_layer_backward_needs();
        for (int variant = 0; variant < 4; variant++) {
            check_layer_wishes(variant & 1, variant >> 1);
        }
        check_masked_softmax();
        check_isas();
    }
    return report();
}
