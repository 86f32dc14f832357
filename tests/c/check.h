/*
 * check.h: what the test programs share: checks and their count, numbers of both types, and the instruction sets that
 * a program goes through.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <string.h>

#include "mha.h"

/* --- Checks ---------------------------------------------------------------------------------- */

static int n_failed;

#define CHECK(ok, ...) \
    do { \
        if (!(ok) && n_failed++ < 20) { \
            printf("failed: " __VA_ARGS__); \
            putchar('\n'); \
        } \
    } while (0)

/* For programs of a few checks: each says a line, held or not. */
static inline void
check(int ok, const char *name)
{
    printf("%s  %s\n", ok ? "ok  " : "FAIL", name);
    fflush(stdout);
    n_failed += !ok;
}

/* What main ends with: its exit status. */
static inline int
report(void)
{
    printf("%d checks failed\n", n_failed);
    return n_failed != 0;
}

static inline int
is_quick(int argc, char **argv)
{
    return argc > 1 && strcmp(argv[1], "quick") == 0;
}

/* --- Instruction sets ------------------------------------------------------------------------- */

/* The first one of FOR_EACH_ISA.  All that the CPU has, but under emulation (-DFIRST_ISA=...), where scalar would take
 * half of the time for what the native build asks of the same text. */
#ifndef FIRST_ISA
#define FIRST_ISA MHA_ISA_SCALAR
#endif

/* The first set from `isa` on that this CPU has, selected; MHA_N_ISAS: there is none. */
static inline mha_isa
select_from(mha_isa isa)
{
    while (isa < MHA_N_ISAS && !mha_isa_available(isa)) {
        isa++;
    }
    CHECK(isa == MHA_N_ISAS || mha_isa_select(isa) == MHA_OK, "select %s", mha_isa_name(isa));
    return isa;
}

#define FOR_EACH_ISA(isa) for (mha_isa isa = select_from(FIRST_ISA); isa < MHA_N_ISAS; isa = select_from(isa + 1))

/* --- Numbers and calls of both types ------------------------------------------------------------- */

static inline size_t
size_of(mha_dtype dtype)
{
    return dtype == MHA_F64 ? sizeof(double) : sizeof(float);
}

static inline double
get(mha_dtype dtype, const void *x, size_t i)
{
    return dtype == MHA_F64 ? ((const double *)x)[i] : ((const float *)x)[i];
}

static inline void
set(mha_dtype dtype, void *x, size_t i, double value)
{
    if (dtype == MHA_F64) {
        ((double *)x)[i] = value;
    } else {
        ((float *)x)[i] = (float)value;
    }
}

/* Dense attention of one head; place() gives it operands. */
static inline mha_attention_args
one_head(mha_dtype dtype, size_t queries, size_t keys, size_t head_dim, size_t value_dim)
{
    const ptrdiff_t d = (ptrdiff_t)head_dim, v = (ptrdiff_t)value_dim;

    return (mha_attention_args){.dtype = dtype,
                                .batch = 1,
                                .heads = 1,
                                .kv_heads = 1,
                                .queries = queries,
                                .keys = keys,
                                .head_dim = head_dim,
                                .value_dim = value_dim,
                                .q = {.row_stride = d},
                                .k = {.row_stride = d},
                                .v = {.row_stride = v},
                                .out = {.row_stride = v},
                                .visible = {NULL, 0, MHA_CAUSAL_NONE, MHA_NO_LIMIT, MHA_NO_LIMIT}};
}

static inline void
place(mha_attention_args *a, const void *q, const void *k, const void *v, void *out)
{
    a->q.data = q;
    a->k.data = k;
    a->v.data = v;
    a->out.data = out;
}

#endif
