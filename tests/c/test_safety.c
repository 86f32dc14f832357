/*
 * test_safety.c: what the C API answers to a caller who left something out: a NULL where there are numbers, a gradient
 * of what is not there, a struct of zeros; and to one who gives nothing to compute, or changes the instruction set.
 *
 * Operands lie between forbidden pages (guarded.h): what must not be read or written is a fault.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#define _GNU_SOURCE
#include "asked.h"
#include "cases.h"
#include "mha_explain.h"

#include <math.h>
#include <string.h>
#include <time.h>

#define HUGE_COUNT ((size_t)1 << 40) /* of rows without numbers: to walk over them would take minutes */

#define REFUSES(call, status, what) \
    do { \
        const uint64_t before = hash_operands(); \
        CHECK((call) == (status), "%s: not refused", what); \
        CHECK(hash_operands() == before, "%s: refused, and something was written", what); \
    } while (0)

/* --- NULL ------------------------------------------------------------------------------------------- */

static void
check_no_arguments(void)
{
    size_t n = 0;

    guarded_reset(1);
    REFUSES(mha_attention_forward(NULL), MHA_ERR_ARG, "forward of nothing");
    REFUSES(mha_attention_weights(NULL), MHA_ERR_ARG, "weights of nothing");
    REFUSES(mha_attention_backward(NULL, NULL), MHA_ERR_ARG, "backward of nothing");
    REFUSES(mha_attention_explain(NULL, &(mha_attention_facts){0}), MHA_ERR_ARG, "explain nothing");
    REFUSES(mha_attention_explain(&(mha_attention_args){.dtype = dtype}, NULL), MHA_ERR_ARG, "explain to nowhere");
    REFUSES(mha_dropout_factors(NULL), MHA_ERR_ARG, "factors of nothing");
    REFUSES(mha_linear_forward(dtype, NULL, 1, &n, 1, &n, 1), MHA_ERR_ARG, "linear of nothing");
    REFUSES(mha_linear_append(NULL), MHA_ERR_ARG, "append nothing");
    REFUSES(mha_linear_backward(NULL), MHA_ERR_ARG, "linear backward of nothing");
    REFUSES(mha_linear_explain(dtype, NULL, 1, &(mha_linear_facts){0}), MHA_ERR_ARG, "explain no linear");
    REFUSES(mha_layer_forward(NULL), MHA_ERR_ARG, "layer of nothing");
    REFUSES(mha_layer_backward(NULL), MHA_ERR_ARG, "layer backward of nothing");
    REFUSES(mha_layer_explain(NULL, &(mha_layer_facts){0}), MHA_ERR_ARG, "explain no layer");
    REFUSES(mha_masked_softmax(NULL), MHA_ERR_ARG, "softmax of nothing");
    REFUSES(mha_linear_packed_size(dtype, 3, 3, NULL, &n), MHA_ERR_ARG, "packed size to nowhere");
    REFUSES(mha_linear_packed_size(dtype, 3, 3, &n, NULL), MHA_ERR_ARG, "packed width to nowhere");
    REFUSES(mha_linear_pack(dtype, 3, 3, NULL, 3, &n), MHA_ERR_ARG, "pack nothing");
    REFUSES(mha_linear_pack(dtype, 3, 3, &n, 3, NULL), MHA_ERR_ARG, "pack to nowhere");
}

#define OF(address) ((const void **)&(address)) /* where it stands, to put NULL there */

static void
check_attention_operands(void)
{
    for (int i = 0; i < 9; i++) {
        attention_case c = good_attention(0);
        mha_attention_args *a = &c.args;
        const void **const operands[] = {OF(a->q.data),           OF(a->k.data),           OF(a->v.data),
                                         OF(a->out.data),         OF(c.grads.out.data),    OF(c.grads.grad_out.data),
                                         OF(c.grads.grad_q.data), OF(c.grads.grad_k.data), OF(c.grads.grad_v.data)};

        CHECK(mha_attention_forward(a) == MHA_OK, "as it is");
        *operands[i] = NULL;
        if (i < 4) {
            REFUSES(mha_attention_forward(a), MHA_ERR_ARG, "forward without an operand");
        }
        if (i < 2) {
            REFUSES(mha_attention_weights(a), MHA_ERR_ARG, "weights without an operand");
        }
        if (i == 3) { /* neither reads it */
            CHECK(mha_attention_weights(a) == MHA_OK && mha_attention_backward(a, &c.grads) == MHA_OK, "without out");
        } else {
            REFUSES(mha_attention_backward(a, &c.grads), MHA_ERR_ARG, "backward without an operand");
        }
    }
    attention_case c = good_attention(0);
    REFUSES(mha_attention_backward(&c.args, NULL), MHA_ERR_ARG, "backward without gradients");
}

static void
check_layer_operands(void)
{
    for (int i = 0; i < 4; i++) {
        layer_case c = good_layer(0);
        const void **const operands[] = {OF(c.args.inputs[0].rows.data), OF(c.args.inputs[1].rows.data),
                                         OF(c.args.inputs[2].rows.data), OF(c.args.out)};

        c.grads.forward = &c.args;
        CHECK(mha_layer_forward(&c.args) == MHA_OK, "as it is");
        *operands[i] = NULL;
        REFUSES(mha_layer_forward(&c.args), MHA_ERR_ARG, "layer without an operand");
        if (i < 3) {
            REFUSES(mha_layer_backward(&c.grads), MHA_ERR_ARG, "layer backward without an operand");
        }
    }
    layer_case c = good_layer(0);
    c.grads.forward = NULL;
    REFUSES(mha_layer_backward(&c.grads), MHA_ERR_ARG, "layer backward of no forward call");
}

static void
check_other_operands(void)
{
    enum { OUT = 5, IN = 7, ROWS = 3, ROOM = 4 };
    const int64_t before = 1, counts = ROWS, too_many = ROWS + 1, negative = -1;
    const void *weight;

    guarded_reset(1);
    const mha_linear linear = projection(OUT, IN, &weight);
    const void *x = numbers(dtype, ROWS * IN);
    void *y = room(dtype, ROOM * OUT);
    REFUSES(mha_linear_forward(dtype, &linear, ROWS, NULL, IN, y, OUT), MHA_ERR_ARG, "linear without x");
    REFUSES(mha_linear_forward(dtype, &linear, ROWS, x, IN, NULL, OUT), MHA_ERR_ARG, "linear without y");
    const mha_append good = append_of(dtype, &linear, 1, ROWS, x, y, ROOM, &before, &counts);
    for (int i = 0; i < 11; i++) {
        mha_append bad = good;
        switch (i) {
        case 0: bad.x.data = NULL; break;
        case 1: bad.cache = NULL; break;
        case 2: bad.before = NULL; break;
        case 3: bad.counts = NULL; break;
        case 4: bad.counts = &too_many; break;
        case 5: bad.counts = &negative; break;
        case 6: bad.before = &negative; break;
        case 7: bad.room = ROOM - 1; break;
        case 8: bad.turn = (mha_turn){.cos = x, .pairs = 1}; break;
        case 9: bad.turn = (mha_turn){.cos = x, .sin = x, .pairs = OUT}; break;
        default: bad.room = 0; break;
        }
        REFUSES(mha_linear_append(&bad), MHA_ERR_ARG, "append with something missing, or without room");
    }
    CHECK(mha_linear_append(&good) == MHA_OK, "append");
    mha_append turned = append_of(dtype, &linear, 1, ROWS, x, y, ROOM, &before, &counts);
    turned.turn = (mha_turn){.cos = numbers(dtype, ROWS), .sin = numbers(dtype, ROWS), .pairs = 1};
    REFUSES(mha_linear_append(&turned), MHA_ERR_ARG, "pairs of an odd count of features");
    mha_masked_softmax_args softmax = {.dtype = dtype, .batch = 1, .queries = ROWS, .keys = IN, .scores = x, .out = y};
    softmax.out = NULL;
    REFUSES(mha_masked_softmax(&softmax), MHA_ERR_ARG, "softmax to nowhere");
    softmax.scores = NULL;
    softmax.out = y;
    REFUSES(mha_masked_softmax(&softmax), MHA_ERR_ARG, "softmax of NULL");
    softmax.scores = x;
    softmax.visible.valid_lens = &counts;
    REFUSES(mha_masked_softmax(&softmax), MHA_ERR_ARG, "softmax: lengths for neither items nor queries");
    const mha_attention_args factors = {.dtype = dtype, .batch = 1, .heads = 1, .queries = 2, .keys = 2};
    REFUSES(mha_dropout_factors(&factors), MHA_ERR_ARG, "factors to nowhere");
}

/* --- Gradients of what is not there, and gradients that must be written ------------------------------- */

static void
check_gradients_of_nothing(void)
{
    for (int i = 0; i < 4; i++) {
        attention_case c = good_attention(0);
        void *somewhere = room(dtype, c.n_scores);
        void **const wanted[] = {&c.grads.grad_additive_weights, &c.grads.grad_bias.data, &c.grads.grad_relative_bias,
                                 &c.grads.grad_sinks};

        c.args.bias = (mha_mask){.data = NULL};
        c.grads.grad_bias = (mha_mask_result){.data = NULL};
        CHECK(mha_attention_forward(&c.args) == MHA_OK && mha_attention_backward(&c.args, &c.grads) == MHA_OK, "good");
        *wanted[i] = somewhere;
        REFUSES(mha_attention_backward(&c.args, &c.grads), MHA_ERR_ARG, "the gradient of what is not there");
    }
    for (int i = 0; i < 3; i++) {
        layer_case c = good_layer(i < 2);
        void *somewhere = room(dtype, MOST * MOST);
        void **const wanted[] = {&c.grads.grad_weight[3], &c.grads.grad_bias[2],
                                 &c.grads.attention.grad_additive_weights};

        c.grads.forward = &c.args;
        CHECK(mha_layer_forward(&c.args) == MHA_OK && mha_layer_backward(&c.grads) == MHA_OK, "good layer");
        c.args.inputs[0].turn.cos = c.args.inputs[1].rows.data;
        REFUSES(mha_layer_forward(&c.args), MHA_ERR_ARG, "cosines without sines");
        REFUSES(mha_layer_backward(&c.grads), MHA_ERR_ARG, "a layer's gradient without sines");
        c.args.inputs[0].turn.cos = NULL;
        c.args.attention.kv_heads = c.args.attention.heads + 1;
        REFUSES(mha_layer_forward(&c.args), MHA_ERR_ARG, "more heads of keys than of queries");
        c.args.attention.kv_heads = c.args.attention.heads;
        *wanted[i] = somewhere;
        REFUSES(mha_layer_backward(&c.grads), MHA_ERR_ARG, "a layer's gradient of what is not there");
    }
}

/* A bias of one item that all share, of one query, of one key: it is there even if no item, query or key is. */
static void
check_bias_gradient(size_t batch, size_t queries, size_t keys, size_t value_dim)
{
    enum { H = 2, MANY = 3 };
    for (int shared = 0; shared < 8; shared++) {
        const size_t lengths[3] = {shared & 1 ? 1 : batch, shared & 2 ? 1 : queries, shared & 4 ? 1 : keys};
        const size_t n = lengths[0] * H * lengths[1] * lengths[2];
        const ptrdiff_t k = shared & 4 ? 0 : 1, q = shared & 2 ? 0 : (ptrdiff_t)lengths[2];
        const ptrdiff_t h = (ptrdiff_t)(lengths[1] * lengths[2]), b = shared & 1 ? 0 : H * h;
        const ptrdiff_t all = (ptrdiff_t)(MANY * MANY), dv = (ptrdiff_t)value_dim;

        guarded_reset(1);
        const void *x = numbers(dtype, 9 * MANY * MANY * MANY);
        const mha_operand rows = {x, all, MANY, MANY}, values = {x, all, MANY, dv};
        void *stats = memset(room(dtype, 9 * MANY * MANY), 0, 9 * MANY * MANY * size_of(dtype));
        char *grad = memset(room(dtype, n), 0xff, n * size_of(dtype));
        mha_attention_args args = attention_sizes(dtype, batch, H, H, queries, keys, MANY, value_dim);
        args.q = args.k = rows;
        args.v = values;
        args.bias = (mha_mask){x, b, h, q, k};
        args.row_max = args.row_sum = stats;
        const mha_result to = {room(dtype, 9 * MANY * MANY * MANY), all, MANY, MANY};
        const mha_attention_grads grads = {.out = values,
                                           .grad_out = values,
                                           .grad_q = to,
                                           .grad_k = to,
                                           .grad_v = to,
                                           .grad_bias = {grad, b, h, q, k}};
        CHECK(mha_attention_backward(&args, &grads) == MHA_OK, "backward");
        for (size_t i = 0; i < n; i++) {
            const double value = dtype == MHA_F64 ? ((double *)(void *)grad)[i] : (double)((float *)(void *)grad)[i];
            CHECK(value == 0, "bias gradient %zu of %zu is %g (%zu items, %zu queries, %zu keys)", i, n, value, batch,
                  queries, keys);
        }
    }
}

/* --- Zeros mean the plain case --------------------------------------------------------------------------- */

/* Beside the same call with everything said. */
static void
check_zeroed(int additive)
{
    enum { Q = 5, K = 7, D = 6 };
    const double usual = additive ? 1 : 1 / sqrt((double)D);

    guarded_reset(1);
    const mha_operand q = {numbers(dtype, Q * D), 0, 0, D}, k = {numbers(dtype, K * D), 0, 0, D};
    const void *w = additive ? numbers(dtype, D) : NULL;
    void *plain = room(dtype, Q * D), *said = room(dtype, Q * D);
    mha_attention_args left_out = attention_sizes(dtype, 1, 1, 1, Q, K, D, D);
    left_out.q = q;
    left_out.k = left_out.v = k;
    left_out.out = (mha_result){plain, 0, 0, D};
    left_out.additive_weights = w;
    mha_attention_args given = left_out;
    given.out.data = said;
    given.scale = &usual;
    given.visible = (mha_visibility){.window_left = K + Q, .window_right = K + Q}; /* everything is near */
    CHECK(mha_attention_forward(&left_out) == MHA_OK && mha_attention_forward(&given) == MHA_OK, "zeroed");
    CHECK(memcmp(plain, said, Q * D * size_of(dtype)) == 0, "zeros do not mean the plain case");
    given.visible.window_left = -1;
    REFUSES(mha_attention_forward(&given), MHA_ERR_ARG, "a negative window");
    const double none = 0; /* all keys alike */
    given.visible.window_left = 0;
    given.scale = &none;
    CHECK(mha_attention_forward(&given) == MHA_OK, "scale 0");
    CHECK(memcmp(plain, said, Q * D * size_of(dtype)) != 0, "a scale of 0 counts as none");
}

/* --- Nothing to compute ----------------------------------------------------------------------------------- */

/* The most that such a call may take: a second of this process, whatever others do meanwhile, and a mebibyte. */
#define TAKES_NOTHING(call, what) \
    do { \
        const clock_t start = clock(); \
        forget_asked(); \
        CHECK((call) == MHA_OK, "%s: refused", what); \
        CHECK(clock() - start < CLOCKS_PER_SEC, "%s: over a second for nothing", what); \
        CHECK(asked.n_bytes < (size_t)1 << 20, "%s: %zu bytes for nothing", what, (size_t)asked.n_bytes); \
    } while (0)

static void
check_nothing_to_compute(void)
{
    mha_attention_args queries = attention_sizes(dtype, 1, 1, 1, HUGE_COUNT, 3, 0, 0);
    mha_attention_args keys = attention_sizes(dtype, 1, 1, 1, 1, HUGE_COUNT, 0, 0);
    double number[2] = {0, 0};
    float of_float32;
    const mha_layer_args layer = {.attention = {.dtype = dtype,
                                                .batch = 1,
                                                .queries = 1,
                                                .keys = HUGE_COUNT,
                                                .heads = 1,
                                                .kv_heads = 1,
                                                .row_max = &number[0],
                                                .row_sum = &number[1]}};
    const mha_attention_grads no_grads = {.grad_sinks = NULL};
    const mha_attention_args factors = {
        .dtype = dtype, .batch = HUGE_COUNT, .heads = 1, .queries = 0, .keys = 5, .dropout = 0.5};
    const int64_t none = 0, all = (int64_t)HUGE_COUNT;
    const mha_append append = {
        .dtype = dtype, .batch = 1, .rows = HUGE_COUNT, .room = HUGE_COUNT, .before = &none, .counts = &all};
    mha_layer_args wide = layer;
    mha_attention_args items = keys;

    queries.visible.causal = MHA_CAUSAL_TOP_LEFT;
    mha_set_allocator(counting_alloc, counting_free);
    TAKES_NOTHING(mha_attention_forward(&queries), "queries without numbers");
    TAKES_NOTHING(mha_attention_forward(&keys), "keys without numbers");
    keys.row_max = &number[0];
    keys.row_sum = &number[1];
    TAKES_NOTHING(mha_attention_forward(&keys), "statistics of keys without numbers");
    memcpy(&of_float32, &number[1], sizeof of_float32);
    CHECK((dtype == MHA_F64 ? number[1] : (double)of_float32) == (double)HUGE_COUNT, "their sum");
    TAKES_NOTHING(mha_attention_backward(&keys, &no_grads), "gradients of keys without numbers");
    TAKES_NOTHING(mha_layer_forward(&layer), "a layer on keys without numbers");
    wide.out = number;
    TAKES_NOTHING(mha_layer_backward(&(mha_layer_grads){.forward = &wide, .grad_out = number}), "and its gradients");
    TAKES_NOTHING(mha_dropout_factors(&factors), "factors of no weights");
    TAKES_NOTHING(mha_linear_append(&append), "rows without numbers for a cache");
    TAKES_NOTHING(mha_linear_pack(dtype, HUGE_COUNT, 0, NULL, 0, NULL), "a weight without numbers");
    items.batch = HUGE_COUNT;
    items.queries = 100;
    items.keys = 50;
    TAKES_NOTHING(mha_attention_explain(&items, &(mha_attention_facts){0}), "what items without numbers take");
    wide.attention.batch = HUGE_COUNT / 64;
    wide.attention.keys = 3;
    TAKES_NOTHING(mha_layer_explain(&wide, &(mha_layer_facts){0}), "what a layer on such items takes");
    mha_set_allocator(guarded_alloc, guarded_free);
}

/* --- Another instruction set ---------------------------------------------------------------------------------- */

static size_t
panel_width(void)
{
    size_t n = 0, width = 0;

    CHECK(mha_linear_packed_size(dtype, 1, 1, &n, &width) == MHA_OK, "width");
    return width;
}

/* Weights packed for panels of one width, and kernels of another: refused by all that would read them. */
static void
check_packed_for_another(void)
{
    layer_case c = good_layer(0);
    const mha_isa before = mha_isa_active();
    const mha_linear one = c.args.inputs[0].W;
    const void *x = c.args.inputs[0].rows.data;
    void *y = room(dtype, c.n_queries * one.out_features);
    const int64_t none = 0, rows = 1;
    const mha_append append = append_of(dtype, &one, 1, 1, x, y, 1, &none, &rows);
    int n_other = 0;

    for (mha_isa isa = MHA_ISA_SCALAR; isa < MHA_N_ISAS; isa++) {
        if (mha_isa_select(isa) != MHA_OK) {
            continue;
        }
        const mha_status expected = panel_width() == one.panel_width ? MHA_OK : MHA_ERR_ISA;
        n_other += expected != MHA_OK;
        const uint64_t untouched = hash_operands();
        CHECK(mha_linear_forward(dtype, &one, 1, x, 1, y, 1) == expected, "linear for another set");
        CHECK(mha_linear_append(&append) == expected, "append for another set");
        CHECK(mha_layer_forward(&c.args) == expected, "layer for another set");
        CHECK(mha_linear_explain(dtype, &one, 1, &(mha_linear_facts){0}) == expected, "explain for another set");
        CHECK(mha_layer_explain(&c.args, &(mha_layer_facts){0}) == expected, "explain a layer for another set");
        CHECK(expected == MHA_OK || hash_operands() == untouched, "refused, and something was written");
    }
    CHECK(mha_isa_select(before) == MHA_OK, "back again");
    CHECK(n_other > 0 || mha_isa_available(MHA_ISA_AVX2) == 0, "no instruction set has other panels");
}

static mha_isa another; /* for a call that runs: its allocation selects it */

static void *
select_and_allocate(size_t n_bytes)
{
    CHECK(mha_isa_select(another) == MHA_OK, "select meanwhile");
    return guarded_alloc(n_bytes);
}

/* The same bits, and no byte elsewhere, if the instruction set changes after the call has measured its memory. */
static void
check_selected_meanwhile(mha_isa first, mha_isa second)
{
    for (int additive = 0; additive < 2; additive++) {
        CHECK(mha_isa_select(first) == MHA_OK, "first");
        layer_case c = good_layer(additive);
        c.grads.forward = &c.args;
        CHECK(mha_layer_forward(&c.args) == MHA_OK && mha_layer_backward(&c.grads) == MHA_OK, "undisturbed");
        const uint64_t undisturbed = hash_operands();
        another = second;
        mha_set_allocator(select_and_allocate, guarded_free);
        CHECK(mha_layer_forward(&c.args) == MHA_OK, "forward, disturbed");
        CHECK(mha_isa_select(first) == MHA_OK, "first again");
        CHECK(mha_layer_backward(&c.grads) == MHA_OK, "backward, disturbed");
        mha_set_allocator(guarded_alloc, guarded_free);
        CHECK(hash_operands() == undisturbed, "%s changed to %s: other bits", mha_isa_name(first),
              mha_isa_name(second));
    }
}

/* A thread's own set stays, whatever is selected. */
static void
check_own_isa(void)
{
    const mha_isa before = mha_isa_active();

    CHECK(mha_isa_own(before) == MHA_N_ISAS && mha_isa_active() == before, "own set");
    for (mha_isa isa = MHA_ISA_SCALAR; isa < MHA_N_ISAS; isa++) {
        CHECK(mha_isa_select(isa) != MHA_OK || mha_isa_active() == before, "%s selected", mha_isa_name(isa));
    }
    CHECK(mha_isa_own(MHA_ISA_SCALAR) == before && mha_isa_active() == MHA_ISA_SCALAR, "another own set");
    CHECK(mha_isa_own((mha_isa)1000) == MHA_ISA_SCALAR, "no set ends it");
    CHECK(mha_isa_select(before) == MHA_OK && mha_isa_active() == before, "back again");
}

int
main(void)
{
    guarded_start();
    for (int i = 0; i < 2; i++) {
        dtype = i == 0 ? MHA_F32 : MHA_F64;
        snprintf(guard.doing, sizeof guard.doing, "safety, type %d", i);
        check_no_arguments();
        check_attention_operands();
        check_layer_operands();
        check_other_operands();
        check_gradients_of_nothing();
        for (int nothing = 0; nothing < 4; nothing++) {
            check_bias_gradient(nothing == 0 ? 0 : 2, nothing == 1 ? 0 : 3, nothing == 2 ? 0 : 3, nothing == 3 ? 0 : 3);
        }
        check_zeroed(0), check_zeroed(1);
        check_nothing_to_compute();
        check_packed_for_another();
        for (mha_isa first = MHA_ISA_SCALAR; first < MHA_N_ISAS; first++) {
            for (mha_isa second = MHA_ISA_SCALAR; second < MHA_N_ISAS; second++) {
                const mha_isa before = mha_isa_active();
                if (mha_isa_available(first) && mha_isa_available(second)) {
                    check_selected_meanwhile(first, second);
                }
                CHECK(mha_isa_select(before) == MHA_OK, "back again");
            }
        }
        check_own_isa();
    }
    return report();
}
