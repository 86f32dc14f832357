/*
 * test_failures.c: what the core does when memory or threads are not to be had.
 *
 *     test_failures [quick]
 * build: -Wl,--wrap=pthread_create
 * not emulated: that memory and threads are not to be had is the same for every processor
 *
 * For every entry point that allocates, the N-th allocation fails, for every N, once and for ever after.  The call then
 * says MHA_ERR_NOMEM and has touched no operand; the core holds no block; the next call gives the bits of an untroubled
 * one.  Where threads cannot be started, or only some of them, results have the same bits as well.
 */
#define _GNU_SOURCE
#include <errno.h>
#if !defined(_WIN32)
#include <pthread.h>
#endif

#include "asked.h"
#include "cases.h"
#include "mha_explain.h"

/* --- Operations --------------------------------------------------------------------------------------- */

static struct {
    attention_case attention;
    layer_case layer;
} now;

static mha_status
forward(void)
{
    return mha_attention_forward(&now.attention.args);
}

static mha_status
weights(void)
{
    return mha_attention_weights(&now.attention.args);
}

static mha_status
backward(void)
{
    return mha_attention_backward(&now.attention.args, &now.attention.grads);
}

static mha_status
layer(void)
{
    return mha_layer_forward(&now.layer.args);
}

static mha_status
layer_backward(void)
{
    now.layer.grads.forward = &now.layer.args;
    return mha_layer_backward(&now.layer.grads);
}

/* Explaining writes no operand, but asks for memory as well. */
static mha_status
explain(void)
{
    return mha_attention_explain(&now.attention.args, &(mha_attention_facts){0});
}

static mha_status
explain_layer(void)
{
    return mha_layer_explain(&now.layer.args, &(mha_layer_facts){0});
}

/* Each, with those that have to run before it: its inputs are their results. */
static const struct {
    const char *name;
    mha_status (*run)(void), (*before)(void);
} operations[] = {
    {"forward", forward, NULL},
    {"weights", weights, forward},
    {"backward", backward, forward},
    {"layer", layer, NULL},
    {"layer backward", layer_backward, layer},
    {"explain", explain, NULL},
    {"explain layer", explain_layer, NULL},
};
enum { N_OPERATIONS = sizeof operations / sizeof *operations };

/* --- All operands before and after ----------------------------------------------------------------------- */

static char *saved[N_SLOTS];

static void
save_operands(void)
{
    for (size_t i = 0; i < guard.n_used; i++) {
        saved[i] = realloc(saved[i], guard.n_bytes[i] + 1);
        if (saved[i] == NULL) {
            exit(2);
        }
        memcpy(saved[i], operand(i), guard.n_bytes[i]);
    }
}

static int
operands_are_as_saved(void)
{
    int same = 1;

    for (size_t i = 0; i < guard.n_used; i++) {
        same &= memcmp(saved[i], operand(i), guard.n_bytes[i]) == 0;
    }
    return same;
}

static void
restore_operands(void)
{
    for (size_t i = 0; i < guard.n_used; i++) {
        memcpy(operand(i), saved[i], guard.n_bytes[i]);
    }
}

/* --- Memory ------------------------------------------------------------------------------------------------ */

static void
check_failing_memory(size_t number)
{
    const char *name = operations[number].name;
    mha_status (*const run)(void) = operations[number].run;

    forget_asked();
    CHECK(operations[number].before == NULL || operations[number].before() == MHA_OK, "%s before %s", name,
          guard.doing);
    save_operands();
    forget_asked();
    CHECK(run() == MHA_OK, "%s, %s", name, guard.doing);
    const uint64_t expected = hash_operands();
    const size_t n_allocations = asked.n_calls;
    CHECK(n_allocations > 0 && n_allocations < 10, "%s asks for memory %zu times", name, n_allocations);
    for (size_t n = 0; n < 2 * n_allocations; n++) {
        restore_operands();
        forget_asked();
        asked.fail_at = n / 2;
        asked.for_ever = (int)(n % 2);
        CHECK(run() == MHA_ERR_NOMEM, "%s, %s: allocation %zu fails unnoticed", name, guard.doing, n / 2);
        CHECK(operands_are_as_saved(), "%s, %s: allocation %zu fails, operands were touched", name, guard.doing, n / 2);
        CHECK(asked.n_live == 0, "%s, %s: allocation %zu fails, memory is lost", name, guard.doing, n / 2);
        forget_asked();
        CHECK(run() == MHA_OK && hash_operands() == expected, "%s, %s: the next call is wrong", name, guard.doing);
        CHECK(asked.n_live == 0, "%s, %s: memory is lost", name, guard.doing);
    }
}

/* --- Threads -------------------------------------------------------------------------------------------------- */

#if !defined(_WIN32) && !defined(MHA_NO_THREADS)

static int threads_left = -1; /* so many can be started; -1: no limit */
static int n_refused, n_started;

int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int __wrap_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
int
__wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument)
{
    if (threads_left == 0) {
        n_refused++;
        return EAGAIN;
    }
    threads_left -= threads_left > 0;
    n_started++;
    return __real_pthread_create(thread, attributes, start, argument);
}

static mha_status
run_all(void)
{
    mha_status status = MHA_OK;

    for (size_t i = 0; i < N_OPERATIONS && status == MHA_OK; i++) {
        status = operations[i].run();
    }
    return status;
}

/* Sizes well above what is worth a second thread (a layer with lengths, another without). */
static void
check_failing_threads(size_t D, const int *limits, size_t n_limits)
{
    mha_threads_set(1);
    guarded_reset(1);
    now.attention = attention_of(D, 127, 0);
    now.attention.args.dropout = 0;
    now.layer = layer_of(D, 127, 0, 0);
    CHECK(run_all() == MHA_OK, "one thread");
    const uint64_t expected = hash_operands();
    mha_threads_set(3);
    for (size_t i = 0; i < n_limits; i++) {
        threads_left = limits[i];
        n_refused = 0;
        for (int run = 0; run < 20; run++) { /* who does which task differs */
            CHECK(run_all() == MHA_OK && hash_operands() == expected, "%d threads can be started: other bits",
                  limits[i]);
        }
        CHECK((limits[i] < 0) == (n_refused == 0), "%d threads can be started, %d were refused", limits[i], n_refused);
    }
    CHECK(n_started == 2, "%d threads were started for 3 workers", n_started);
    mha_threads_set(1);
}
#endif

int
main(int argc, char **argv)
{
    const size_t n_sizes = is_quick(argc, argv) ? 4 : 24;

    guarded_start();
    mha_set_allocator(counting_alloc, counting_free);
#if !defined(_WIN32) && !defined(MHA_NO_THREADS) /* the linker puts our pthread_create in the place of theirs */
    /* Limits rise, since workers once started stay. */
    check_failing_threads(65, (const int[]){0, 1, -1}, 3);
    check_failing_threads(66, (const int[]){-1}, 1);
    check_failing_threads(20, (const int[]){-1}, 1);
#endif
    FOR_EACH_ISA (isa) {
        for (size_t i = 0; i < n_sizes * N_OPERATIONS * 2; i++) {
            const size_t D = 1 + i * 37 % MOST, K = 1 + i * 53 % MOST;
            dtype = i % 2 ? MHA_F64 : MHA_F32;
            snprintf(guard.doing, sizeof guard.doing, "%s, head size %zu, %zu keys", mha_isa_name(isa), D, K);
            guarded_reset(1);
            random_state = i;
            now.attention = attention_of(D, K, (int)(i / 2 % 2));
            now.layer = layer_of(D, K, (int)(i / 2 % 2), 0);
            check_failing_memory(i / 2 % N_OPERATIONS);
        }
    }
    for (size_t i = 0; i < N_SLOTS; i++) {
        free(saved[i]);
    }
    return report();
}
