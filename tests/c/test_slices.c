/*
 * test_slices.c: a batch that goes through the layer in slices gives, to the bit, what its items give one by one, in
 * every output, for every kind of input layout and lengths; without memory it fails and writes nothing.
 *
 *     test_slices [quick]
 *
 * not emulated: slices are cut by plain C, and what is called for each of them other programs try there
 */
#include "asked.h"
#include "drawn.h"
#include "mha_explain.h"

enum { BATCH = 23, ROWS = 97, SIZE = 40, FEATURES = 48, HEADS = 3 };

/* All outputs of a call, in one piece of memory so that they can be compared at once. */
typedef struct {
    size_t sizes[8]; /* numbers for one item: out, q, k, v, context, max, sum, weights */
    char *parts[8];
    char *memory;
    size_t n_bytes;
} outputs;

static mha_dtype dtype;

static outputs
make_outputs(void)
{
    const size_t rows = ROWS * FEATURES, stats = HEADS * ROWS;
    outputs o = {.sizes = {rows, rows, rows, rows, rows, stats, stats, stats * ROWS}};

    for (int i = 0; i < 8; i++) {
        o.n_bytes += BATCH * o.sizes[i] * size_of(dtype);
    }
    o.memory = allocate(o.n_bytes);
    memset(o.memory, 7, o.n_bytes);
    for (size_t i = 0, at = 0; i < 8; at += BATCH * o.sizes[i++] * size_of(dtype)) {
        o.parts[i] = o.memory + at;
    }
    return o;
}

/* `wanted` has a bit for each of the optional outputs. */
static void
point_outputs(mha_layer_args *a, const outputs *o, size_t item, unsigned wanted)
{
    void *at[8];

    for (unsigned i = 0; i < 8; i++) {
        at[i] = i == 0 || wanted >> i & 1 ? o->parts[i] + item * o->sizes[i] * size_of(dtype) : NULL;
    }
    a->out = at[0];
    a->inputs[0].projected = at[1];
    a->inputs[1].projected = at[2];
    a->inputs[2].projected = at[3];
    a->context = at[4];
    a->attention.row_max = at[5];
    a->attention.row_sum = at[6];
    a->attention.weights = at[7];
}

static mha_linear
packed(size_t out_features, size_t in_features)
{
    void *weight = numbers(dtype, out_features * in_features, 0.3);

    return packed_linear(dtype, out_features, in_features, weight, in_features, numbers(dtype, out_features, 1.0));
}

/* Item number `item` of the call, alone. */
static void
run_alone(const mha_layer_args *all, size_t item, const outputs *o, unsigned wanted)
{
    const ptrdiff_t bytes = (ptrdiff_t)size_of(dtype);
    mha_layer_args a = *all;
    mha_operand *inputs[] = {&a.inputs[0].rows, &a.inputs[1].rows, &a.inputs[2].rows};

    a.attention.batch = 1;
    for (int i = 0; i < 3; i++) {
        inputs[i]->data = (const char *)inputs[i]->data + (ptrdiff_t)item * inputs[i]->batch_stride * bytes;
    }
    if (a.attention.visible.valid_lens != NULL) {
        a.attention.visible.valid_lens += item * a.attention.visible.lens_per_batch;
    }
    if (a.attention.keep_mask.data != NULL) {
        a.attention.keep_mask.data =
            (const char *)a.attention.keep_mask.data + (ptrdiff_t)item * a.attention.keep_mask.batch_stride;
        a.attention.bias.data =
            (const char *)a.attention.bias.data + (ptrdiff_t)item * a.attention.bias.batch_stride * bytes;
    }
    for (int i = 0; i < MHA_N_INPUTS && a.inputs[i].turn.cos != NULL; i++) {
        mha_turn *turn = &a.inputs[i].turn;
        turn->cos = (const char *)turn->cos + (ptrdiff_t)item * turn->batch_stride * bytes;
        turn->sin = (const char *)turn->sin + (ptrdiff_t)item * turn->batch_stride * bytes;
    }
    point_outputs(&a, o, item, wanted);
    CHECK(mha_layer_forward(&a) == MHA_OK, "item %zu", item);
}

static void
check_call(const mha_layer_args *all, unsigned wanted, const char *what)
{
    outputs sliced = make_outputs(), alone = make_outputs();
    mha_layer_args a = *all;
    mha_layer_facts facts = {0};

    point_outputs(&a, &sliced, 0, wanted);
    CHECK(mha_layer_explain(&a, &facts) == MHA_OK && facts.n_slices > 1 && facts.slice_items < BATCH, "%s: not sliced",
          what);
    mha_set_allocator(no_memory, free);
    CHECK(mha_layer_forward(&a) == MHA_ERR_NOMEM, "%s: no memory", what);
    mha_set_allocator(NULL, NULL);
    CHECK(memcmp(sliced.memory, alone.memory, sliced.n_bytes) == 0, "%s: wrote before it failed", what);
    CHECK(mha_layer_forward(&a) == MHA_OK, "%s: sliced", what);
    for (size_t item = 0; item < BATCH; item++) {
        run_alone(all, item, &alone, wanted);
    }
    CHECK(memcmp(sliced.memory, alone.memory, sliced.n_bytes) == 0, "%s, %s, %u threads: other bits in slices", what,
          mha_isa_name(mha_isa_active()), mha_threads_get());
}

/* Weights over several key blocks are a second pass, which wants statistics: nobody's, if the caller has none. */
static void
check_weights_alone(const mha_layer_args *all, const void *x, const void *keys)
{
    enum { ITEMS = 2, QUERIES = 20, KEYS = 700, STATS = ITEMS * HEADS * QUERIES, OUT = ITEMS * QUERIES * FEATURES };
    const size_t n_bytes = (OUT + STATS * KEYS) * size_of(dtype);
    char *alone = allocate(n_bytes), *beside = allocate(n_bytes), *stats = allocate(2 * STATS * size_of(dtype));
    mha_layer_args a = *all;

    a.attention.batch = ITEMS;
    a.attention.queries = QUERIES;
    a.attention.keys = KEYS;
    a.inputs[0].rows = (mha_operand){x, QUERIES * SIZE, 0, SIZE};
    a.inputs[1].rows = (mha_operand){keys, KEYS * SIZE, 0, SIZE};
    a.inputs[2].rows = (mha_operand){x, KEYS * SIZE, 0, SIZE};
    a.attention.visible.valid_lens = NULL;
    a.out = alone;
    a.attention.weights = alone + OUT * size_of(dtype);
    CHECK(mha_layer_forward(&a) == MHA_OK, "weights alone");
    a.out = beside;
    a.attention.weights = beside + OUT * size_of(dtype);
    a.attention.row_max = stats;
    a.attention.row_sum = stats + STATS * size_of(dtype);
    CHECK(mha_layer_forward(&a) == MHA_OK, "weights beside statistics");
    CHECK(memcmp(alone, beside, n_bytes) == 0, "%s: other weights without statistics", mha_isa_name(mha_isa_active()));
}

/*
 * One query an item on additive scores, and a last slice of one item, which goes by rows where the others go by
 * columns: debug builds see in every slice that it does not take more memory than there is.
 */
static void
check_last_item(size_t keys)
{
    enum { MOST = 6000, WIDE = 40 };
    void *x = numbers(dtype, MOST * keys * WIDE, 1.0), *w = numbers(dtype, WIDE, 1.0);
    char *out = allocate(MOST * WIDE * size_of(dtype)), *last = allocate(WIDE * size_of(dtype));
    mha_layer_args a = layer_sizes(dtype, MOST, 1, keys, 1, (const size_t[]){WIDE, WIDE, WIDE});
    mha_layer_facts facts = {0};

    a.inputs[0].rows.data = a.inputs[1].rows.data = a.inputs[2].rows.data = x;
    a.inputs[0].W = packed(WIDE, WIDE);
    a.inputs[1].W = packed(WIDE, WIDE);
    a.attention.additive_weights = w;
    a.out = out;
    for (size_t beyond = 1; beyond > 0; a.attention.batch -= beyond) {
        CHECK(mha_layer_explain(&a, &facts) == MHA_OK && facts.n_slices > 1, "no last slice of one item");
        beyond = (a.attention.batch - 1) % facts.slice_items;
    }
    CHECK(mha_layer_forward(&a) == MHA_OK, "all items");
    const size_t before = a.attention.batch - 1, bytes = size_of(dtype);
    a.inputs[0].rows.data = (const char *)x + before * WIDE * bytes;
    a.inputs[1].rows.data = a.inputs[2].rows.data = (const char *)x + before * keys * WIDE * bytes;
    a.attention.batch = 1;
    a.out = last;
    CHECK(mha_layer_forward(&a) == MHA_OK, "the last item");
    CHECK(memcmp(out + before * WIDE * bytes, last, WIDE * bytes) == 0, "%zu keys: other bits in the last slice", keys);
}

/* A mask of each item's keys and queries, a bias of each item's keys, angles of each item's rows. */
static void
mask_and_turn(mha_layer_args *a)
{
    const size_t pairs = FEATURES / HEADS / 2, n = BATCH * ROWS * ROWS;
    uint8_t *keep = allocate(n);

    for (size_t i = 0; i < n; i++) { /* keys that no query of their item sees, too */
        keep[i] = i % 7 != 0 && i % ROWS % 11 != i / (ROWS * ROWS) % 11;
    }
    a->attention.keep_mask = (mha_mask){keep, ROWS * ROWS, 0, ROWS, 1};
    a->attention.bias = (mha_mask){numbers(dtype, BATCH * ROWS, 1.0), ROWS, 0, 0, 1};
    for (int i = MHA_QUERIES; i <= MHA_KEYS; i++) {
        a->inputs[i].turn = (mha_turn){numbers(dtype, BATCH * ROWS * pairs, 1.0),
                                       numbers(dtype, BATCH * ROWS * pairs, 1.0), pairs, (ptrdiff_t)(ROWS * pairs)};
    }
}

int
main(int argc, char **argv)
{
    const int quick = is_quick(argc, argv);
    int64_t lens[BATCH * ROWS];

    for (size_t i = 0; i < BATCH * ROWS; i++) {
        lens[i] = (int64_t)(i * 31 % (ROWS + 3)) - 1;
    }
    FOR_EACH_ISA (isa) {
        for (int round = 0; round < (quick ? 4 : 8); round++) {
            dtype = round % 2 ? MHA_F64 : MHA_F32;
            mha_threads_set(1 + round / 2 % 2);
            void *x = numbers(dtype, BATCH * ROWS * SIZE * 2, 1.0), *keys = numbers(dtype, BATCH * ROWS * SIZE, 1.0);
            mha_layer_args a = layer_sizes(dtype, BATCH, ROWS, ROWS, HEADS, (const size_t[]){SIZE, SIZE, SIZE});
            a.inputs[0].rows = (mha_operand){x, 2 * ROWS * SIZE, 0, 2 * SIZE}; /* every other row */
            a.inputs[1].rows = (mha_operand){keys, SIZE, 0, BATCH * SIZE};     /* the book's decoder: time first */
            a.inputs[2].rows.data = x;
            a.inputs[0].W = packed(FEATURES, SIZE);
            a.inputs[1].W = packed(FEATURES, SIZE);
            a.inputs[2].W = packed(FEATURES, SIZE);
            a.W_o = packed(FEATURES, FEATURES);
            a.attention.visible = (mha_visibility){.valid_lens = lens, .lens_per_batch = round % 4 < 2 ? 1 : ROWS};
            a.attention.empty_rows = (round / 2 + round / 4) % 2 ? MHA_EMPTY_UNIFORM : MHA_EMPTY_ZERO;
            check_weights_alone(&a, x, keys);
            check_last_item(1);
            check_last_item(5);
            check_call(&a, 0xff, "all outputs");
            check_call(&a, 0x62, "q and statistics");
            a.attention.visible.valid_lens = NULL;
            check_call(&a, 0, "the output alone");
            mask_and_turn(&a);
            check_call(&a, 0xff, "masked and turned");
            check_call(&a, 0, "masked and turned, the output alone");
            a.attention.queries = 0;
            a.out = x; /* where nothing is written */
            CHECK(mha_layer_forward(&a) == MHA_OK, "no queries");
            free_all();
        }
    }
    mha_threads_set(1);
    return report();
}
