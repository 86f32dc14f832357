/*
 * core.c: the core as a page sees it.  JavaScript has no structs, so the page fills in one list of numbers, a field of
 * `call` each, by the names that playground_fields gives, and then asks for the call.  Pointers are numbers too: places
 * in the module's memory that playground_take has given.  The page checks arguments (core.js), the core sizes.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "mha.h"

#include <stdlib.h>

#define EXPORT(name) __attribute__((export_name(#name))) name

/* One item of the batch: q (queries, heads * head_dim), k and v alike; weights and row statistics by head. */
#define FIELDS(field) \
    field(queries) field(keys) field(heads) field(head_dim) field(value_dim) field(q) field(k) field(v) field(out) \
        field(additive_weights) field(scale) field(softcap) field(valid_lens) field(causal) field(window_left) \
            field(window_right) field(bias) field(uniform_rows) field(dropout) field(seed) field(item) field(weights) \
                field(row_max) field(row_sum) field(grad_out) field(grad_q) field(grad_k) field(grad_v)

#define AS_MEMBER(name) double name;
#define AS_TEXT(name) #name " "

static struct {
    FIELDS(AS_MEMBER)
} call;

const char *
EXPORT(playground_fields)(void)
{
    return FIELDS(AS_TEXT);
}

double *
EXPORT(playground_call)(void)
{
    return &call.queries;
}

void *
EXPORT(playground_take)(size_t n_bytes)
{
    return aligned_alloc(64, (n_bytes + 64) & ~(size_t)63);
}

void
EXPORT(playground_give)(void *memory)
{
    free(memory);
}

/* Kernels by number, as mha_isa has them; -1: the widest that this module holds. */
int
EXPORT(playground_start)(int isa)
{
    return (int)mha_isa_select(isa >= 0                          ? (mha_isa)isa
                               : mha_isa_available(MHA_ISA_WASM) ? MHA_ISA_WASM
                                                                 : MHA_ISA_SCALAR);
}

static void *
memory(double place)
{
    return (void *)(uintptr_t)place;
}

static mha_operand
read_rows(double place, double width)
{
    return (mha_operand){memory(place), 0, (ptrdiff_t)width, (ptrdiff_t)(width * call.heads)};
}

static mha_result
written_rows(double place, double width)
{
    return (mha_result){memory(place), 0, (ptrdiff_t)width, (ptrdiff_t)(width * call.heads)};
}

static mha_attention_args
arguments(void)
{
    mha_attention_args args = {
        .dtype = MHA_F32,
        .batch = 1,
        .heads = (size_t)call.heads,
        .kv_heads = (size_t)call.heads,
        .queries = (size_t)call.queries,
        .keys = (size_t)call.keys,
        .head_dim = (size_t)call.head_dim,
        .value_dim = (size_t)call.value_dim,
        .q = read_rows(call.q, call.head_dim),
        .k = read_rows(call.k, call.head_dim),
        .v = read_rows(call.v, call.value_dim),
        .out = written_rows(call.out, call.value_dim),
        .additive_weights = memory(call.additive_weights),
        .scale = &call.scale,
        .softcap = call.softcap,
        .visible = {.valid_lens = memory(call.valid_lens),
                    .lens_per_batch = (size_t)call.queries,
                    .causal = (mha_causal)call.causal,
                    .window_left = (int64_t)call.window_left + 1, /* -1: open */
                    .window_right = (int64_t)call.window_right + 1},
        .empty_rows = call.uniform_rows != 0 ? MHA_EMPTY_UNIFORM : MHA_EMPTY_ZERO,
        .dropout = call.dropout,
        .seed = (uint64_t)call.seed,
        .first_item = (size_t)call.item,
        .weights = memory(call.weights),
        .row_max = memory(call.row_max),
        .row_sum = memory(call.row_sum),
    };
    if (call.bias != 0) {
        args.bias = (mha_mask){memory(call.bias), 0, 0, (ptrdiff_t)call.keys, 1};
    }
    return args;
}

int
EXPORT(playground_forward)(void)
{
    const mha_attention_args args = arguments();
    return (int)mha_attention_forward(&args);
}

/* Of the call just made: `out`, row_max and row_sum are its results. */
int
EXPORT(playground_backward)(void)
{
    const mha_attention_args args = arguments();
    const mha_attention_grads grads = {
        .out = read_rows(call.out, call.value_dim),
        .grad_out = read_rows(call.grad_out, call.value_dim),
        .grad_q = written_rows(call.grad_q, call.head_dim),
        .grad_k = written_rows(call.grad_k, call.head_dim),
        .grad_v = written_rows(call.grad_v, call.value_dim),
    };
    return (int)mha_attention_backward(&args, &grads);
}

/* What the weights are multiplied by, 0 or 1 / (1 - dropout), where the weights would stand. */
int
EXPORT(playground_dropout_factors)(void)
{
    const mha_attention_args args = arguments();
    return (int)mha_dropout_factors(&args);
}

/* y = x weight^T, all dense. */
int
EXPORT(playground_linear)(size_t rows, size_t out_features, size_t in_features, const float *x, const float *weight,
                          float *y)
{
    const mha_linear linear = {.weight = weight,
                               .out_features = out_features,
                               .in_features = in_features,
                               .layout = MHA_WEIGHT_ROWS,
                               .row_stride = (ptrdiff_t)in_features};
    return (int)mha_linear_forward(MHA_F32, &linear, rows, x, (ptrdiff_t)in_features, y, (ptrdiff_t)out_features);
}

const char *
EXPORT(playground_status_text)(int status)
{
    return mha_status_text((mha_status)status);
}
