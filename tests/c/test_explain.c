/*
 * test_explain.c: what mha_*_explain says a call will do is what it does: the memory it asks for, how the work is
 * shared, the tiles it walks over.
 *
 *     test_explain [quick]
 * SPDX-License-Identifier: BSD-3-Clause
 */
#define _GNU_SOURCE
#include "asked.h"
#include "cases.h"
#include "mha_explain.h"
#include "runtime/common.h"

#include <string.h>

/* --- The memory of a call -------------------------------------------------------------------------- */

static size_t
bytes_of_call(mha_status status, const char *what)
{
    const size_t n_bytes = asked.n_bytes - MHA_ALIGN; /* which scratch.c adds to reach an aligned address */

    CHECK(status == MHA_OK && asked.n_calls == 1, "%s, %s: status %d, %zu allocations", what, guard.doing, (int)status,
          (size_t)asked.n_calls);
    forget_asked();
    return n_bytes;
}

static void
check_attention(size_t D, size_t K, int additive, int wishes)
{
    attention_case c = attention_of(D, K, additive);
    mha_attention_args *args = &c.args;
    mha_attention_facts facts = {0};

    args->weights = wishes & 1 ? args->weights : NULL;
    args->row_max = wishes & 2 ? args->row_max : NULL;
    args->row_sum = wishes & 2 ? args->row_sum : NULL;
    args->lse = wishes & 4 ? args->lse : NULL;
    CHECK(mha_attention_explain(args, &facts) == MHA_OK, "explain, %s", guard.doing);
    forget_asked();
    const size_t n_bytes = bytes_of_call(mha_attention_forward(args), "forward"), block = facts.key_block;
    CHECK(n_bytes == facts.scratch_bytes, "%s: %zu bytes, %zu explained", guard.doing, n_bytes, facts.scratch_bytes);
    CHECK(strcmp(facts.kernels.isa, mha_isa_name(mha_isa_active())) == 0, "%s: isa", guard.doing);
    CHECK(facts.kernels.itemsize == size_of(dtype), "%s: type", guard.doing);
    CHECK(facts.n_tiles <= facts.n_tiles_all && facts.most_blocks * block < K + block, "%s: tiles", guard.doing);
    CHECK(facts.weights_again == (args->weights != NULL && K > block), "%s: weights", guard.doing);
    CHECK(facts.tile_queries <= args->queries && facts.task_queries <= args->queries, "%s: queries", guard.doing);
}

static void
check_layer(size_t D, size_t K, int additive)
{
    layer_case c = layer_of(D, K, additive, 0);
    mha_layer_facts facts = {0};

    c.args.context = D % 3 == 0 ? NULL : c.args.context;
    c.args.inputs[0].projected = K % 3 == 0 ? NULL : c.args.inputs[0].projected;
    CHECK(mha_layer_explain(&c.args, &facts) == MHA_OK, "explain, %s", guard.doing);
    forget_asked();
    const size_t n_bytes = bytes_of_call(mha_layer_forward(&c.args), "layer");
    CHECK(n_bytes == facts.scratch_bytes, "%s: %zu bytes, %zu explained", guard.doing, n_bytes, facts.scratch_bytes);
    CHECK(facts.attention.scratch_bytes == n_bytes, "%s: bytes of attention", guard.doing);
    CHECK(facts.projections[0].rows == c.n_queries, "%s: query rows", guard.doing);
    CHECK(facts.projections[1].rows == c.n_keys, "%s: key rows", guard.doing);
    CHECK(facts.projections[1].rows_needed <= c.n_keys, "%s: rows needed", guard.doing);
    CHECK((facts.projections[3].in_features > 0) == !additive, "%s: W_o", guard.doing);
}

/* --- Sharing ------------------------------------------------------------------------------------------ */

/* The longest table of a bias by distance is taken, and no longer one: its numbers are counted in ptrdiff_t. */
static void
check_reach(void)
{
    mha_attention_args args = attention_sizes(MHA_F32, 1, 2, 2, 5, 5, 8, 8);
    mha_attention_facts facts;

    args.scale = &(const double){1};
    args.relative_bias = &args; /* explaining looks at no operand */
    args.relative_reach = PTRDIFF_MAX / 64 / args.heads;
    CHECK(mha_attention_explain(&args, &facts) == MHA_OK, "the longest table");
    args.relative_reach++;
    CHECK(mha_attention_explain(&args, &facts) == MHA_ERR_SIZE, "a longer one");
}

/* Sizes alone: explaining looks at no operand. */
static mha_attention_facts
explain_sizes(size_t heads, size_t queries, size_t keys, mha_status status)
{
    mha_attention_args args = attention_sizes(MHA_F32, 1, heads, heads, queries, keys, 64, 64);
    mha_attention_facts facts = {0};

    args.scale = &(const double){1};
    CHECK(mha_attention_explain(&args, &facts) == status, "explain %zu, %zu, %zu", heads, queries, keys);
    return facts;
}

static int
reason_is(const mha_share_facts *share, const char *reason)
{
    return strcmp(share->reason, reason) == 0;
}

#if defined(MHA_NO_THREADS)
static void
check_threads(void)
{
    mha_threads_set(8);
    for (size_t n = 0; n < 600; n += 13) {
        const mha_attention_facts facts = explain_sizes(2, n, 200, MHA_OK);
        CHECK(facts.share.most_threads == 1 && facts.share.n_threads == 1 && reason_is(&facts.share, "all"),
              "%zu: no threads", n);
    }
    CHECK(explain_sizes(1, 1, 20000, MHA_OK).n_splits <= 1, "few queries on many keys: nobody to share them with");
}
#else
static void
check_threads(void)
{
    mha_core_facts core;

    mha_threads_set(8);
    mha_kernels_explain(&core);
    CHECK(core.float32.itemsize == sizeof(float) && core.float64.itemsize == sizeof(double), "types");
    CHECK(core.share.most_threads == 8 && core.share.n_threads == 1 && reason_is(&core.share, "one task"), "no work");
    for (size_t n = 1; n < 600; n += 13) {
        const mha_attention_facts facts = explain_sizes(2, n, 200, MHA_OK);
        const size_t n_threads = facts.share.n_threads, n_tasks = facts.share.n_tasks;
        const double work = facts.share.seconds;
        CHECK(n_threads >= 1 && n_threads <= 8 && n_threads <= mha_max(n_tasks, 1), "%zu", n);
        if (reason_is(&facts.share, "one task")) {
            CHECK(n_tasks <= 1 && n_threads == 1, "%zu: one task", n);
        } else if (reason_is(&facts.share, "little work")) {
            CHECK(work < facts.share.least_seconds && n_threads == 1, "%zu: little work", n);
        } else if (reason_is(&facts.share, "work")) {
            CHECK(work < (double)(n_threads + 1) * facts.share.least_each, "%zu: work", n);
        } else if (reason_is(&facts.share, "tasks")) {
            CHECK(n_threads == n_tasks, "%zu: tasks", n);
        } else {
            CHECK(reason_is(&facts.share, "all") && n_threads == 8, "%zu: all", n);
        }
    }
    const mha_attention_facts much = explain_sizes(4, 2000, 2000, MHA_OK);
    CHECK(reason_is(&much.share, "all") && much.task_queries < 2000, "much work");
    CHECK(explain_sizes(1, 1, 20000, MHA_OK).n_splits > 1, "few queries on many keys");
    mha_threads_set(1);
    CHECK(explain_sizes(4, 2000, 2000, MHA_OK).share.n_threads == 1, "one thread allowed");
}
#endif

static void
check_sharing(void)
{
    check_threads();
    check_reach();
    (void)explain_sizes(0, 5, 5, MHA_ERR_ARG);
    (void)explain_sizes(2, SIZE_MAX / 4, 5, MHA_ERR_SIZE);
}

int
main(int argc, char **argv)
{
    const size_t n_sizes = is_quick(argc, argv) ? 20 : 200;

    guarded_start();
    mha_set_allocator(counting_alloc, counting_free);
    FOR_EACH_ISA (isa) {
        for (size_t i = 0; i < n_sizes; i++) {
            const size_t D = 1 + i * 37 % MOST, K = 1 + i * 53 % MOST;
            dtype = i % 2 ? MHA_F64 : MHA_F32;
            snprintf(guard.doing, sizeof guard.doing, "%s, head size %zu, %zu keys", mha_isa_name(isa), D, K);
            guarded_reset(1);
            mha_threads_set(1 + i % 3);
            check_attention(D, K, (int)(i / 2 % 2), (int)(i % 8));
            check_layer(D, K, (int)(i / 2 % 2));
        }
        check_sharing();
    }
    return report();
}
