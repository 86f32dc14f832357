/*
 * test_backward.c: gradients of attention, projections and whole layers against the textbook and against differences,
 * on drawn sizes, strides and masks, for every instruction set of this CPU and both number types.
 *
 *     test_backward [quick]
 *
 * Results are NaN before each call, so that what is not written shows; the core's own memory is full of subnormal
 * numbers, of which no call may take notice; the number of threads changes no bit.
 */
#include "textbook_backward.h"

/* --- Attention ------------------------------------------------------------------------------- */

static void
test_draw(mha_dtype dtype, size_t draw, size_t most)
{
    state = draw * 7919 + 29;
    backward_call b = with_backward(draw_call(dtype, most));
    const size_t item = size_of(dtype);
    void *serial[N_GRADS];

    mha_threads_set(1);
    CHECK(run_both(&b) == MHA_OK, "backward, draw %zu", draw);
    CHECK(subnormals_met() == NULL, "%s %s draw %zu: %s", mha_isa_name(mha_isa_active()),
          dtype == MHA_F64 ? "float64" : "float32", draw, subnormals_met());
    for (int i = 0; i < N_GRADS; i++) {
        serial[i] = copy_of(b.got[i], b.n[i] * item);
        for (size_t n = 0; n < b.n[i]; n++) {
            const double got = get(dtype, b.got[i], n), exact = b.exact[i][n];
            if (!(fabs(got - exact) <= backward_tolerance(&b))) {
                CHECK(0, "%s %s draw %zu, %s[%zu]: %.9g, should be %.9g", mha_isa_name(mha_isa_active()),
                      dtype == MHA_F64 ? "float64" : "float32", draw, grad_names[i], n, got, exact);
                break;
            }
        }
    }
    mha_threads_set(3);
    CHECK(mha_attention_backward(&b.call.args, &b.grads) == MHA_OK, "three threads, draw %zu", draw);
    for (int i = 0; i < N_GRADS; i++) {
        CHECK(memcmp(serial[i], b.got[i], b.n[i] * item) == 0, "three threads change %s, draw %zu", grad_names[i],
              draw);
    }
    free_all();
}

/* A bias shared by items, heads, queries or keys: its gradient is the sum of what the whole one's would be. */
static void
test_broadcast_bias(mha_dtype dtype, size_t draw)
{
    state = draw * 31 + 7;
    attention_call call = draw_call(dtype, 140);
    mha_attention_args *a = &call.args;
    const size_t H = a->heads, Q = a->queries, K = a->keys, kept = draw % 8;
    const size_t rows = kept & 1 ? Q : 1, cols = kept & 2 ? K : 1, heads = kept & 4 ? H : 1, n = heads * rows * cols;
    call.bias = numbers(dtype, n, 1.0);
    a->bias = (mha_mask){call.bias, 0, kept & 4 ? (ptrdiff_t)(rows * cols) : 0, kept & 1 ? (ptrdiff_t)cols : 0,
                         kept & 2 ? 1 : 0};
    backward_call b = with_backward(call);
    void *narrow = memset(allocate(n * size_of(dtype)), 0xff, n * size_of(dtype));
    double *sums = allocate(n * sizeof *sums);
    b.grads.grad_bias = (mha_mask_result){narrow, 0, b.call.args.bias.head_stride, b.call.args.bias.query_stride,
                                          b.call.args.bias.key_stride};
    CHECK(run_both(&b) == MHA_OK, "broadcast bias, draw %zu", draw);
    memset(sums, 0, n * sizeof *sums);
    for (size_t i = 0; i < b.n[OF_BIAS]; i++) {
        const size_t h = i / K / Q, q = i / K % Q, k = i % K;
        sums[((kept & 4 ? h : 0) * rows + (kept & 1 ? q : 0)) * cols + (kept & 2 ? k : 0)] += b.exact[OF_BIAS][i];
    }
    for (size_t i = 0; i < n && Q * K > 0; i++) {
        const double tolerance = backward_tolerance(&b) * (double)(1 + H * Q * K / n);
        CHECK(fabs(get(dtype, narrow, i) - sums[i]) <= tolerance,
              "broadcast bias, draw %zu [%zu]: %.9g, should be %.9g", draw, i, get(dtype, narrow, i), sums[i]);
    }
    free_all();
}

/* --- Projections -------------------------------------------------------------------------------- */

static void
test_linear(mha_dtype dtype, size_t draw)
{
    state = draw * 104729 + 5;
    const int copied = draw % 8 == 1; /* many rows that lie far apart are */
    const size_t rows = copied ? 48 + below(300) : draw_size(130), outputs = copied ? 64 + below(65) : draw_size(130);
    const size_t inputs = copied ? 128 + below(65) : draw_size(300), gap = copied ? 1024 : below(3);
    void *x = numbers(dtype, rows * (inputs + gap), 1.0), *weight = numbers(dtype, outputs * inputs, 1.0);
    void *grad_y = numbers(dtype, rows * (outputs + gap), 1.0);
    void *grad_x = numbers(dtype, rows * inputs, 1.0), *grad_weight = numbers(dtype, outputs * inputs, 1.0);
    void *grad_bias = numbers(dtype, outputs, 1.0);
    const mha_linear_grads grads =
        linear_grads(dtype, rows, outputs, inputs, (const void *[]){x, weight, grad_y}, inputs + gap, outputs + gap,
                     (void *[]){grad_x, grad_weight, grad_bias});
    /* n products of numbers below 1, each rounded: as in test_attention.c. */
    const double unit = dtype == MHA_F64 ? DBL_EPSILON : FLT_EPSILON;
    const double tolerance = 4 * unit * (2 + (double)(rows + outputs));

    CHECK(mha_linear_backward(&grads) == MHA_OK, "linear backward, draw %zu", draw);
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = 0; i < inputs; i++) {
            double sum = 0;
            for (size_t o = 0; o < outputs; o++) {
                sum += get(dtype, grad_y, r * (outputs + gap) + o) * get(dtype, weight, o * inputs + i);
            }
            CHECK(fabs(get(dtype, grad_x, r * inputs + i) - sum) <= tolerance, "grad_x, draw %zu", draw);
        }
    }
    for (size_t o = 0; o < outputs; o++) {
        double column = 0;
        for (size_t i = 0; i <= inputs; i++) { /* the last is the bias */
            double sum = 0;
            for (size_t r = 0; r < rows; r++) {
                const double g = get(dtype, grad_y, r * (outputs + gap) + o);
                sum += i < inputs ? g * get(dtype, x, r * (inputs + gap) + i) : 0;
                column += i < inputs ? 0 : g;
            }
            CHECK(i == inputs || fabs(get(dtype, grad_weight, o * inputs + i) - sum) <= tolerance,
                  "grad_weight, draw %zu", draw);
        }
        CHECK(fabs(get(dtype, grad_bias, o) - column) <= tolerance, "grad_bias, draw %zu", draw);
    }
    free_all();
}

/* --- Parts of the keys ------------------------------------------------------------------------------- */

enum { ITEMS = 9, ROWS = 5, KEYS = 1300, DIM = 6, N_OF_PARTS = 3 };

typedef struct {
    mha_attention_args args;
    mha_attention_grads grads;
    void *operands[4], *results[N_OF_PARTS], *stats[3]; /* q, k, v, grad_out; grad_q, grad_k, grad_v; out, max, sum */
} parts_call;

/* Items first .. first + n - 1 of a call. */
static void
run_items(const parts_call *c, size_t first, size_t n, void *const *results)
{
    const size_t item = size_of(c->args.dtype), rows = first * c->args.heads * ROWS * item;
    const size_t keys = first * KEYS * DIM * item;
    const ptrdiff_t head = ROWS * DIM, q = (ptrdiff_t)c->args.heads * head, k = KEYS * DIM;
    mha_attention_args a = c->args;

    a.batch = n;
    a.visible.valid_lens += first;
    a.q = (mha_operand){(char *)c->operands[0] + rows * DIM, q, head, DIM};
    a.k = (mha_operand){(char *)c->operands[1] + keys, k, k, DIM};
    a.v = (mha_operand){(char *)c->operands[2] + keys, k, k, DIM};
    a.out = (mha_result){(char *)c->stats[0] + rows * DIM, q, head, DIM};
    a.row_max = (char *)c->stats[1] + rows;
    a.row_sum = (char *)c->stats[2] + rows;
    const mha_attention_grads grads = {
        .out = {a.out.data, q, head, DIM},
        .grad_out = {(char *)c->operands[3] + rows * DIM, q, head, DIM},
        .grad_q = {(char *)results[0] + rows * DIM, q, head, DIM},
        .grad_k = {(char *)results[1] + keys, k, k, DIM},
        .grad_v = {(char *)results[2] + keys, k, k, DIM},
    };
    CHECK(mha_attention_forward(&a) == MHA_OK && mha_attention_backward(&a, &grads) == MHA_OK, "parts");
}

/*
 * Many keys: those of few heads are shared out, those of many are not.  An item alone has the bits it has among nine,
 * whether or not its heads share the keys.
 */
static void
test_parts(mha_dtype dtype, int additive, size_t heads)
{
    static const int64_t lens[ITEMS] = {KEYS, 1, 511, 512, 513, 1024, 0, 900, KEYS};
    const size_t item = size_of(dtype), n_keys = ITEMS * KEYS * DIM;
    const size_t n[N_OF_PARTS] = {ITEMS * heads * ROWS * DIM, n_keys, n_keys};
    parts_call c = {.args = attention_sizes(dtype, 0, heads, 1, ROWS, KEYS, DIM, DIM)};
    void *w = numbers(dtype, DIM, 1.0), *alone[N_OF_PARTS];

    for (int i = 0; i < 4; i++) {
        c.operands[i] = numbers(dtype, n[i % 3], 1.0);
    }
    for (int i = 0; i < N_OF_PARTS; i++) {
        c.results[i] = numbers(dtype, n[i], 1.0);
        c.stats[i] = numbers(dtype, n[0], 1.0);
        alone[i] = numbers(dtype, n[i], 1.0);
    }
    c.args.scale = &(const double){0.5};
    c.args.empty_rows = MHA_EMPTY_UNIFORM;
    c.args.visible = (mha_visibility){.valid_lens = lens, .lens_per_batch = 1};
    c.args.additive_weights = additive ? w : NULL;
    run_items(&c, 0, ITEMS, c.results);
    for (size_t first = 0; first < ITEMS; first++) {
        run_items(&c, first, 1, alone);
    }
    for (int i = 0; i < N_OF_PARTS; i++) {
        CHECK(memcmp(alone[i], c.results[i], n[i] * item) == 0, "%s, gradient %d: other bits alone than among %d items",
              mha_isa_name(mha_isa_active()), i, ITEMS);
    }
    free_all();
}

/* --- Layers --------------------------------------------------------------------------------------- */

/* Everything a layer reads that has a gradient: inputs, weights, biases, additive weights, the bias of scores. */
enum {
    N_INPUTS = 3,
    N_WEIGHTS = 4,
    N_PARTS = N_INPUTS + 2 * N_WEIGHTS + 2,
    OF_SCORES = N_PARTS - 1,
    OF_ADDITIVE = N_PARTS - 2
};

typedef struct {
    mha_layer_args args;
    mha_layer_grads grads;
    size_t n[N_PARTS], n_out;
    double *x[N_PARTS]; /* the numbers, kept in double */
    void *narrow[N_PARTS], *got[N_PARTS], *grad_out, *kept[8];
    mha_linear *linears[N_WEIGHTS];
} layer_call;

/* Strides of a mask over all scores, each axis of which may be shared. */
static mha_mask
drawn_mask(const mha_attention_args *a, const void *data)
{
    const ptrdiff_t keys = (ptrdiff_t)a->keys, matrix = (ptrdiff_t)a->queries * keys;

    return (mha_mask){data, below(2) ? matrix * (ptrdiff_t)a->heads : 0, below(2) ? matrix : 0, below(3) ? keys : 0,
                      below(4) ? 1 : 0};
}

/* Masks of numbers for all scores, of which an axis of stride 0 uses the first ones. */
static void
draw_layer_masks(layer_call *c)
{
    mha_attention_args *a = &c->args.attention;
    const size_t scores = a->batch * a->heads * a->queries * a->keys;

    if (below(2)) {
        uint8_t *keep = allocate(scores);
        for (size_t i = 0; i < scores; i++) {
            keep[i] = below(4) != 0;
        }
        a->keep_mask = drawn_mask(a, keep);
    }
    if (below(2)) {
        a->bias = drawn_mask(a, c); /* its numbers: later */
        c->n[OF_SCORES] = scores;
    }
}

/* Angles for more rows than there are; of each item, or of all. */
static void
draw_turns(layer_call *c, size_t pairs)
{
    const mha_attention_args *a = &c->args.attention;
    const size_t rows = a->queries + a->keys;
    double *angles = numbers(MHA_F64, a->batch * rows * pairs, 3.0);
    void *cosines = allocate(a->batch * rows * pairs * size_of(a->dtype));
    void *sines = allocate(a->batch * rows * pairs * size_of(a->dtype));
    const ptrdiff_t stride = below(2) ? (ptrdiff_t)(rows * pairs) : 0;
    const int turns = below(2) != 0;

    for (size_t i = 0; i < a->batch * rows * pairs; i++) {
        set(a->dtype, cosines, i, cos(angles[i]));
        set(a->dtype, sines, i, sin(angles[i]));
    }
    for (int i = MHA_QUERIES; i <= MHA_KEYS; i++) {
        if (turns && c->linears[i]->weight != NULL) {
            c->args.inputs[i].turn = (mha_turn){cosines, sines, pairs, stride};
        }
    }
}

static void
describe_layer(layer_call *c, mha_dtype dtype, size_t draw)
{
    mha_layer_args *a = &c->args;
    const int additive = (int)below(3) == 0,
              has[N_WEIGHTS] = {below(4) != 0, below(4) != 0, !additive && below(4) != 0, !additive && below(3) != 0};
    const size_t kv_heads = additive ? 1 : 1 + below(3), group = additive ? 1 : 1 + below(3), heads = kv_heads * group;
    const size_t head_dim = 2 * (1 + below(6)), hiddens = heads * head_dim, shared = kv_heads * head_dim;

    a->attention = (mha_attention_args){.dtype = dtype,
                                        .batch = 1 + below(3),
                                        .queries = 1 + below(9),
                                        .keys = 1 + below(70),
                                        .heads = heads,
                                        .kv_heads = kv_heads};
    a->inputs[0].size = has[0] ? 1 + below(20) : hiddens;
    a->inputs[1].size = has[1] ? 1 + below(20) : shared;
    a->inputs[2].size = has[2] ? 1 + below(20) : kv_heads * (1 + below(9));
    const size_t sizes[N_INPUTS] = {a->inputs[0].size, a->inputs[1].size, a->inputs[2].size};
    const size_t value_features = has[2] ? kv_heads * (1 + draw % 7) : a->inputs[2].size;
    const size_t context = value_features * group;
    const size_t outputs[N_WEIGHTS] = {hiddens, shared, value_features, has[3] ? 1 + below(20) : context};

    c->linears[0] = &a->inputs[0].W;
    c->linears[1] = &a->inputs[1].W;
    c->linears[2] = &a->inputs[2].W;
    c->linears[3] = &a->W_o;
    for (size_t i = 0; i < N_WEIGHTS; i++) {
        const size_t in = i < N_INPUTS ? sizes[i] : context;
        *c->linears[i] =
            (mha_linear){has[i] ? c : NULL, NULL, outputs[i], in, MHA_WEIGHT_PACKED, 0, 0}; /* packed: later */
        c->n[N_INPUTS + i] = has[i] ? outputs[i] * in : 0;
        c->n[N_INPUTS + N_WEIGHTS + i] = has[i] ? outputs[i] : 0;
    }
    c->n[0] = a->attention.batch * a->attention.queries * sizes[0];
    c->n[1] = a->attention.batch * a->attention.keys * sizes[1];
    c->n[2] = a->attention.batch * a->attention.keys * sizes[2];
    c->n[OF_ADDITIVE] = additive ? hiddens : 0;
    c->n_out = a->attention.batch * a->attention.queries * outputs[3];
    a->attention.visible = (mha_visibility){NULL, 0, (mha_causal)below(3), MHA_NO_LIMIT, MHA_NO_LIMIT, 0, 0};
    if (below(2)) {
        int64_t *lens = allocate(a->attention.batch * sizeof *lens);
        for (size_t i = 0; i < a->attention.batch; i++) {
            lens[i] = (int64_t)below(a->attention.keys + 2);
        }
        a->attention.visible.valid_lens = lens;
        a->attention.visible.lens_per_batch = 1;
    }
    a->attention.empty_rows = below(2) ? MHA_EMPTY_UNIFORM : MHA_EMPTY_ZERO;
    draw_layer_masks(c);
    draw_turns(c, head_dim / 2);
}

/* The loss sum(out * grad_out) for the numbers in c->x. */
static double
run_layer_forward(layer_call *c)
{
    mha_layer_args *a = &c->args;
    double loss = 0;

    for (int i = 0; i < N_PARTS; i++) {
        for (size_t j = 0; j < c->n[i]; j++) {
            set(a->attention.dtype, c->narrow[i], j, c->x[i][j]);
        }
    }
    a->inputs[0].rows = (mha_operand){c->narrow[0], (ptrdiff_t)(a->attention.queries * a->inputs[0].size), 0,
                                      (ptrdiff_t)a->inputs[0].size};
    a->inputs[1].rows = (mha_operand){c->narrow[1], (ptrdiff_t)(a->attention.keys * a->inputs[1].size), 0,
                                      (ptrdiff_t)a->inputs[1].size};
    a->inputs[2].rows = (mha_operand){c->narrow[2], (ptrdiff_t)(a->attention.keys * a->inputs[2].size), 0,
                                      (ptrdiff_t)a->inputs[2].size};
    a->attention.additive_weights = c->n[OF_ADDITIVE] > 0 ? c->narrow[OF_ADDITIVE] : NULL;
    a->attention.bias.data = c->n[OF_SCORES] > 0 ? c->narrow[OF_SCORES] : NULL;
    for (int i = 0; i < N_WEIGHTS; i++) {
        mha_linear *w = c->linears[i];
        if (w->weight != NULL) {
            *w = packed_linear(a->attention.dtype, w->out_features, w->in_features, c->narrow[N_INPUTS + i],
                               w->in_features, c->narrow[N_INPUTS + N_WEIGHTS + i]);
        }
    }
    CHECK(mha_layer_forward(a) == MHA_OK, "layer forward");
    for (size_t i = 0; i < c->n_out; i++) {
        loss += get(a->attention.dtype, a->out, i) * get(a->attention.dtype, c->grad_out, i);
    }
    return loss;
}

static void
place_layer(layer_call *c)
{
    mha_layer_args *a = &c->args;
    const size_t item = size_of(a->attention.dtype), queries = a->attention.batch * a->attention.queries,
                 keys = a->attention.batch * a->attention.keys;
    const size_t rows = queries * a->attention.heads;
    const size_t kept[8] = {c->n_out,
                            queries * a->inputs[0].W.out_features,
                            keys * a->inputs[1].W.out_features,
                            keys * a->inputs[2].W.out_features,
                            queries * a->W_o.in_features,
                            rows,
                            rows,
                            0};
    void **places[8] = {&a->out,     &a->inputs[0].projected, &a->inputs[1].projected, &a->inputs[2].projected,
                        &a->context, &a->attention.row_max,   &a->attention.row_sum,   &a->attention.weights};

    for (int i = 0; i < 7; i++) {
        *places[i] = c->kept[i] = memset(allocate(kept[i] * item), 0xff, kept[i] * item);
    }
    for (int i = 0; i < N_PARTS; i++) {
        c->x[i] = numbers(MHA_F64, c->n[i], 0.7);
        c->narrow[i] = allocate(c->n[i] * item);
        c->got[i] = memset(allocate(c->n[i] * item), 0xff, c->n[i] * item);
    }
    c->grad_out = numbers(a->attention.dtype, c->n_out, 1.0);
    c->grads =
        (mha_layer_grads){.forward = a,
                          .grad_out = c->grad_out,
                          .attention = {.grad_additive_weights = c->n[OF_ADDITIVE] > 0 ? c->got[OF_ADDITIVE] : NULL}};
    if (c->n[OF_SCORES] > 0) { /* places that the bias does not use have no gradient */
        const mha_mask *bias = &a->attention.bias;
        memset(c->got[OF_SCORES], 0, c->n[OF_SCORES] * item);
        c->grads.attention.grad_bias = (mha_mask_result){c->got[OF_SCORES], bias->batch_stride, bias->head_stride,
                                                         bias->query_stride, bias->key_stride};
    }
    for (int i = 0; i < N_INPUTS; i++) {
        const size_t n_rows = i == 0 ? a->attention.queries : a->attention.keys;
        const size_t size = i == 0 ? a->inputs[0].size : i == 1 ? a->inputs[1].size : a->inputs[2].size;
        c->grads.grad_inputs[i] = (mha_result){c->got[i], (ptrdiff_t)(n_rows * size), 0, (ptrdiff_t)size};
    }
    for (int i = 0; i < N_WEIGHTS; i++) {
        if (c->linears[i]->weight != NULL) {
            c->grads.weight[i] = c->narrow[N_INPUTS + i];
            c->grads.grad_weight[i] = c->got[N_INPUTS + i];
            c->grads.grad_bias[i] = c->got[N_INPUTS + N_WEIGHTS + i];
        }
    }
}

/* Central differences along a drawn direction in each part at a time; h^2 and rounding / h are both some 1e-10. */
static void
check_differences(layer_call *c, size_t draw)
{
    const double h = 1e-5;

    for (int i = 0; i < N_PARTS; i++) {
        double *direction = numbers(MHA_F64, c->n[i], 1.0), expected = 0, loss[2];
        for (size_t j = 0; j < c->n[i]; j++) {
            expected += direction[j] * get(MHA_F64, c->got[i], j);
        }
        for (int side = 0; side < 2; side++) {
            for (size_t j = 0; j < c->n[i]; j++) {
                c->x[i][j] += (side ? -2 : 1) * h * direction[j];
            }
            loss[side] = run_layer_forward(c);
        }
        for (size_t j = 0; j < c->n[i]; j++) {
            c->x[i][j] += h * direction[j];
        }
        const double slope = (loss[0] - loss[1]) / (2 * h);
        CHECK(fabs(slope - expected) <= 1e-7 * (1 + fabs(expected)) * sqrt(1 + (double)c->n[i]),
              "%s layer draw %zu, part %d: slope %.12g, gradient %.12g", mha_isa_name(mha_isa_active()), draw, i, slope,
              expected);
    }
}

static void
test_layer(size_t draw)
{
    layer_call calls[2] = {0};

    for (int type = MHA_F32; type <= MHA_F64; type++) {
        layer_call *c = &calls[type];
        state = draw * 523 + 11;
        describe_layer(c, (mha_dtype)type, draw);
        place_layer(c);
        run_layer_forward(c);
        CHECK(mha_layer_backward(&c->grads) == MHA_OK, "layer backward, draw %zu", draw);
    }
    for (int i = 0; i < N_PARTS; i++) { /* the same gradients, to float32's rounding of sums of a few hundred terms */
        for (size_t j = 0; j < calls[0].n[i]; j++) {
            const double a = get(MHA_F32, calls[0].got[i], j), b = get(MHA_F64, calls[1].got[i], j);
            if (!(fabs(a - b) <= 3e-4 * (1 + fabs(b)))) {
                CHECK(0, "%s layer draw %zu, part %d [%zu]: float32 %.9g, float64 %.9g", mha_isa_name(mha_isa_active()),
                      draw, i, j, a, b);
                break;
            }
        }
    }
    check_differences(&calls[MHA_F64], draw);
    free_all();
}

int
main(int argc, char **argv)
{
    const int quick = is_quick(argc, argv);

    mha_set_allocator(allocate_subnormals, free);
    FOR_EACH_ISA (isa) {
        for (int dtype = MHA_F32; dtype <= MHA_F64; dtype++) {
            for (size_t draw = 0; draw < (quick ? 40 : 200); draw++) {
                test_draw((mha_dtype)dtype, draw, draw % 10 == 0 ? 600 : 140);
            }
            for (size_t draw = 0; draw < (quick ? 8 : 40); draw++) {
                test_broadcast_bias((mha_dtype)dtype, draw);
                test_linear((mha_dtype)dtype, draw);
            }
        }
        for (int kind = 0; kind < 4; kind++) {
            test_parts(kind & 1 ? MHA_F64 : MHA_F32, kind >> 1, 1);
            test_parts(kind & 1 ? MHA_F64 : MHA_F32, kind >> 1, 2);
        }
        for (size_t draw = 0; draw < (quick ? 20 : 100); draw++) {
            test_layer(draw);
        }
        printf("%-7s %s\n", mha_isa_name(isa), n_failed ? "see above" : "agrees with the textbook");
    }
    return report();
}
