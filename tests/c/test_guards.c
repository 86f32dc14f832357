/*
 * test_guards.c: the core touches its operands and nothing beside them.
 *
 *     test_guards [quick | full]
 *
 * Every operand of every entry point, input, output and scratch, lies flush against a page that may not be touched:
 * first each begins where such a page ends, then each ends where one begins.  Head sizes and keys go from 1 to 130,
 * past every tile and tail; by default each size meets one of the other kind, `full` takes all 16900 pairs.  Both
 * types, every instruction set.  The two placements must also give the same bits.  Keys and values that no query may
 * see lie on the forbidden page itself, before the first visible one or behind the last.  And no call may meet a
 * subnormal number, which none of the operands is.
 */
#define _GNU_SOURCE
#include "cases.h"

static size_t n_cases;

/* --- Attention ----------------------------------------------------------------------------------- */

static uint64_t
run_attention_case(attention_case *c)
{
    mha_attention_args *a = &c->args;
    uint64_t hash = 0;

    CHECK(mha_attention_forward(a) == MHA_OK, "%s: forward", guard.doing);
    hash = hash_bits(hash, dtype, a->out.data, c->n_out);
    const uint64_t weights = hash_bits(0, dtype, a->weights, c->n_scores);
    memset(a->weights, 0xff, c->n_scores * size_of(dtype));
    CHECK(mha_attention_weights(a) == MHA_OK, "%s: weights", guard.doing);
    CHECK(hash_bits(0, dtype, a->weights, c->n_scores) == weights, "%s: weights differ when read later", guard.doing);
    hash = hash_bits(hash ^ weights, dtype, a->lse, c->n_rows);
    CHECK(mha_attention_backward(a, &c->grads) == MHA_OK, "%s: backward", guard.doing);
    hash = hash_bits(hash, dtype, c->grads.grad_q.data, c->n_q);
    hash = hash_bits(hash, dtype, c->grads.grad_k.data, c->n_k);
    hash = hash_bits(hash, dtype, c->grads.grad_v.data, c->n_v);
    if (c->grads.grad_additive_weights != NULL) {
        hash = hash_bits(hash, dtype, c->grads.grad_additive_weights, a->head_dim);
    }
    return hash;
}

static uint64_t
dot_product(size_t D, size_t K)
{
    attention_case c = attention_of(D, K, 0);
    return run_attention_case(&c);
}

static uint64_t
additive(size_t D, size_t K)
{
    attention_case c = attention_of(D, K, 1);
    return run_attention_case(&c);
}

static uint64_t
hidden_keys(size_t D, size_t K)
{
    const size_t Q = 1 + (D + K) % (K < 7 ? K : 7), Dv = MOST + 1 - D, hidden = guard.at_end ? 0 : K;
    const ptrdiff_t d = (ptrdiff_t)D, dv = (ptrdiff_t)Dv;
    const void *k = numbers(dtype, K * 2 * D), *v = numbers(dtype, K * 2 * Dv);
    attention_case c = {.args = attention_sizes(dtype, 1, 2, 2, Q, 2 * K, D, Dv),
                        .n_q = Q * 2 * D,
                        .n_k = 2 * K * 2 * D,
                        .n_v = 2 * K * 2 * Dv,
                        .n_out = Q * 2 * Dv,
                        .n_scores = 2 * Q * 2 * K,
                        .n_rows = 2 * Q};
    mha_attention_args *a = &c.args;

    a->scale = &QUARTER;
    a->row_max = room(dtype, c.n_rows);
    a->row_sum = room(dtype, c.n_rows);
    a->weights = room(dtype, c.n_scores);
    a->lse = room(dtype, c.n_rows);
    a->q = (mha_operand){numbers(dtype, c.n_q), 0, d, 2 * d};
    a->k = (mha_operand){rows_before(k, hidden * 2 * D), 0, d, 2 * d};
    a->v = (mha_operand){rows_before(v, hidden * 2 * Dv), 0, dv, 2 * dv};
    a->out = (mha_result){room(dtype, c.n_out), 0, dv, 2 * dv};
    if ((D + K) % 3 == 0) {
        a->additive_weights = numbers(dtype, D);
    }
    hide_keys(&a->visible, Q, K);
    c.grads = (mha_attention_grads){.out = {a->out.data, 0, dv, 2 * dv},
                                    .grad_out = {numbers(dtype, c.n_out), 0, dv, 2 * dv},
                                    .grad_q = {room(dtype, c.n_q), 0, d, 2 * d},
                                    .grad_k = {room(dtype, c.n_k), 0, d, 2 * d},
                                    .grad_v = {room(dtype, c.n_v), 0, dv, 2 * dv}};
    run_attention_case(&c);
    return 0; /* which keys are hidden depends on the placement, so the bits do too */
}

/* --- Projections, layers, softmax ---------------------------------------------------------------- */

/* Two items' rows behind one and two others, the second's without its last: each as mha_linear_forward gave it in y. */
static void
check_append(const mha_linear *linear, size_t rows, const void *x, const char *y)
{
    const size_t each = rows / 2, n = linear->out_features, bytes = n * size_of(dtype);
    const int64_t before[] = {1, 2}, counts[] = {(int64_t)each, (int64_t)each - 1};
    char *cache = room(dtype, 2 * (each + 1) * n);
    const mha_append append = append_of(dtype, linear, 2, each, x, cache, each + 1, before, counts);

    if (each == 0) {
        return;
    }
    CHECK(mha_linear_append(&append) == MHA_OK, "%s: append", guard.doing);
    for (size_t b = 0; b < 2; b++) {
        CHECK(memcmp(cache + (b * (each + 1) + (size_t)before[b]) * bytes, y + b * each * bytes,
                     (size_t)counts[b] * bytes) == 0,
              "%s: other bits where rows are appended", guard.doing);
    }
}

static uint64_t
linear(size_t D, size_t K)
{
    const size_t rows = 1 + (D * 5 + K) % 29;
    const ptrdiff_t d = (ptrdiff_t)D, k = (ptrdiff_t)K;
    const void *weight, *x = numbers(dtype, rows * D);
    void *y = room(dtype, rows * K);
    const mha_linear one = projection(K, D, &weight);
    CHECK(mha_linear_forward(dtype, &one, rows, x, d, y, k) == MHA_OK, "%s: forward", guard.doing);
    void *again = room(dtype, rows * K);
    const mha_linear in_rows = {weight, one.bias, K, D, MHA_WEIGHT_ROWS, d, 0};
    CHECK(mha_linear_forward(dtype, &in_rows, rows, x, d, again, k) == MHA_OK, "%s: in rows", guard.doing);
    CHECK(memcmp(y, again, rows * K * size_of(dtype)) == 0, "%s: other bits from a weight in rows", guard.doing);
    check_append(&in_rows, rows, x, y);
    void *const results[] = {room(dtype, rows * D), room(dtype, K * D), room(dtype, K)};
    const mha_linear_grads grads =
        linear_grads(dtype, rows, K, D, (const void *[]){x, weight, numbers(dtype, rows * K)}, D, K, results);
    CHECK(mha_linear_backward(&grads) == MHA_OK, "%s: backward", guard.doing);
    uint64_t hash = hash_bits(0, dtype, y, rows * K);
    hash = hash_bits(hash, dtype, grads.grad_x, rows * D);
    hash = hash_bits(hash, dtype, grads.grad_weight, K * D);
    return hash_bits(hash, dtype, grads.grad_bias, K);
}

static uint64_t
run_layer(layer_case *c)
{
    mha_layer_args *a = &c->args;
    const mha_layer_grads *g = &c->grads;

    c->grads.forward = a;
    CHECK(mha_layer_forward(a) == MHA_OK, "%s: forward", guard.doing);
    uint64_t hash = hash_bits(0, dtype, a->out, c->n_out);
    mha_layer_args alone = *a; /* nothing kept: all that is between lies in the core's own block */
    alone.inputs[0].projected = alone.inputs[1].projected = alone.inputs[2].projected = alone.context = NULL;
    alone.attention.row_max = alone.attention.row_sum = alone.attention.weights = NULL;
    CHECK(mha_layer_forward(&alone) == MHA_OK && hash == hash_bits(0, dtype, a->out, c->n_out),
          "%s: other bits if nothing is kept", guard.doing);
    mha_linear *const linears[4] = {&alone.inputs[0].W, &alone.inputs[1].W, &alone.inputs[2].W, &alone.W_o};
    for (int i = 0; i < 4; i++) {
        linears[i]->weight = g->weight[i];
        linears[i]->layout = MHA_WEIGHT_ROWS;
        linears[i]->row_stride = (ptrdiff_t)linears[i]->in_features;
    }
    CHECK(mha_layer_forward(&alone) == MHA_OK && hash == hash_bits(0, dtype, a->out, c->n_out),
          "%s: other bits from weights in rows", guard.doing);
    CHECK(mha_layer_backward(g) == MHA_OK, "%s: backward", guard.doing);
    hash = hash_bits(hash, dtype, g->grad_inputs[0].data, c->n_queries * a->inputs[0].size);
    hash = hash_bits(hash, dtype, g->grad_inputs[1].data, c->n_keys * a->inputs[1].size);
    return hash_bits(hash, dtype, g->grad_weight[0], a->inputs[0].W.out_features * a->inputs[0].size);
}

static uint64_t
layer(size_t D, size_t K)
{
    layer_case c = layer_of(D, K, (int)(D / 2 + K) % 2, 0);
    return run_layer(&c);
}

static uint64_t
layer_with_hidden_keys(size_t D, size_t K)
{
    layer_case c = layer_of(D, K, (int)(D + K) % 2, 1);
    run_layer(&c);
    return 0;
}

static uint64_t
softmax(size_t D, size_t K)
{
    const void *scores = numbers(dtype, 2 * D * K);
    void *out = room(dtype, 2 * D * K);
    int64_t *lens = guarded(2 * D * sizeof *lens);

    for (size_t i = 0; i < 2 * D; i++) {
        lens[i] = (int64_t)((i * 7 + K) % (K + 3)) - 1;
    }
    const mha_visibility visible = {lens, D, MHA_CAUSAL_NONE, MHA_NO_LIMIT, MHA_NO_LIMIT, 0, 0};
    const mha_masked_softmax_args args = {dtype, 2, D, K, scores, visible, MHA_EMPTY_UNIFORM, out};
    CHECK(mha_masked_softmax(&args) == MHA_OK, "%s", guard.doing);
    return hash_bits(0, dtype, out, 2 * D * K);
}

/* --- All of it ------------------------------------------------------------------------------------ */

static const struct {
    const char *name;
    uint64_t (*run)(size_t D, size_t K);
} operations[] = {
    {"attention", dot_product},
    {"additive attention", additive},
    {"hidden keys", hidden_keys},
    {"linear", linear},
    {"layer", layer},
    {"layer with hidden keys", layer_with_hidden_keys},
    {"masked softmax", softmax},
};

static void
run_case(size_t D, size_t K)
{
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
        uint64_t hash[2];
        for (int at_end = 0; at_end < 2; at_end++) {
            snprintf(guard.doing, sizeof guard.doing, "%s, %s, %s, head size %zu, %zu keys, operands at the %s",
                     operations[i].name, mha_isa_name(mha_isa_active()), dtype == MHA_F64 ? "float64" : "float32", D, K,
                     at_end ? "end" : "start");
            guarded_reset(at_end);
            random_state = D * 1000 + K;
            forget_subnormals();
            hash[at_end] = operations[i].run(D, K);
            CHECK(subnormals_met() == NULL, "%s: %s", guard.doing, subnormals_met());
        }
        CHECK(hash[0] == hash[1], "%s: where operands lie changes bits", guard.doing);
        n_cases += 2;
    }
}

/* Around every multiple of a vector or panel, and the far end. */
static const size_t corners[] = {1, 2, 7, 9, 16, 17, 31, 33, 64, 65, 127, 130};
enum { N_CORNERS = sizeof corners / sizeof *corners };

static void
run_sizes(const char *how_many)
{
    const int quick = strcmp(how_many, "quick") == 0, full = strcmp(how_many, "full") == 0;

    for (size_t a = 1; a <= MOST; a++) {
        for (size_t b = 1; full && b <= MOST; b++) {
            run_case(a, b);
        }
        if (!full && (!quick || a % 13 == 0)) { /* each size with a corner of the other kind, which take turns */
            run_case(a, corners[a % N_CORNERS]);
            run_case(corners[a * 5 % N_CORNERS], a);
        }
    }
}

/* That the pages are closed: before and behind an operand. */
static void
check_guards(void)
{
    for (int at_end = 0; at_end < 2; at_end++) {
        guarded_reset(at_end);
        const volatile char *x = guarded(5);
        CHECK(is_closed(x + (at_end ? 5 : -1)), "the page %s an operand can be read", at_end ? "behind" : "before");
    }
}

int
main(int argc, char **argv)
{
    guarded_start();
    check_guards();
    mha_threads_set(1);
    FOR_EACH_ISA (isa) {
        for (int type = MHA_F32; type <= MHA_F64; type++) {
            dtype = (mha_dtype)type;
            run_sizes(argc > 1 ? argv[1] : "");
        }
        printf("%-7s %zu calls, no fault\n", mha_isa_name(isa), n_cases);
    }
    return report();
}
