/*
 * test_interrupt.c: calls that are given up half-way.
 *
 *     test_interrupt
 *
 * Whoever watches a call is asked by its thread alone; once he says yes the call says MHA_ERR_INTERRUPTED, the core
 * holds no block, and the next call gives the bits of an untroubled one.  What he calls himself is not watched, and
 * the calls of other threads go on.
 *
 * build: runtime/threads_interrupt.c -DMHA_ASK_EVERY_NS=5000000
 * not emulated: nothing in it depends on the processor, and calls that must take long take longest there
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "asked.h"
#include "callers.h"
#include "check.h"
#include "mha.h"
#include "runtime/threads_clock.h"

enum { D = 64, FEW = 200 };

/* --- Calls: of so many rows that they take longer than it takes to be asked ---------------------------------- */

typedef struct {
    size_t rows;
    float *x, *out, *max, *sum, *grads;
    mha_attention_args args;
    mha_attention_grads backward;
} call;

static call
call_of(size_t rows)
{
    const ptrdiff_t all = (ptrdiff_t)(rows * D);
    call c = {
        .rows = rows,
        .x = malloc(rows * D * sizeof(float)),
        .out = malloc(rows * D * sizeof(float)),
        .max = malloc(rows * sizeof(float)),
        .sum = malloc(rows * sizeof(float)),
        .grads = malloc(3 * rows * D * sizeof(float)),
    };

    for (size_t i = 0; i < rows * D; i++) {
        c.x[i] = (float)(i * 7919 % 1009) / 1009.0f - 0.5f;
    }
    const mha_operand x = {c.x, all, all, D};
    c.args = one_head(MHA_F32, rows, rows, D, D);
    c.args.q = c.args.k = c.args.v = x;
    c.args.out = (mha_result){c.out, all, all, D};
    c.args.row_max = c.max;
    c.args.row_sum = c.sum;
    c.backward.out = (mha_operand){c.out, all, all, D};
    c.backward.grad_out = x;
    c.backward.grad_q = (mha_result){c.grads, all, all, D};
    c.backward.grad_k = (mha_result){c.grads + all, all, all, D};
    c.backward.grad_v = (mha_result){c.grads + 2 * all, all, all, D};
    return c;
}

static void
drop(call *c)
{
    free(c->x);
    free(c->out);
    free(c->max);
    free(c->sum);
    free(c->grads);
}

static call small;
static float right[FEW * D];

static void
check_small(const char *where)
{
    CHECK(mha_attention_forward(&small.args) == MHA_OK, "%s: the next call", where);
    CHECK(memcmp(small.out, right, sizeof right) == 0, "%s: the next call's bits", where);
}

/* --- Watchers ------------------------------------------------------------------------------------------ */

typedef struct {
    thread_id thread;
    int n_asked, yes_at;
} watcher;

static int
watch(void *context)
{
    watcher *w = context;

    CHECK(same_thread(this_thread(), w->thread), "asked by another thread");
    check_small("within the watcher");
    return ++w->n_asked == w->yes_at;
}

static void
check_interrupted(const char *name, mha_status status, const watcher *w)
{
    CHECK(status == MHA_ERR_INTERRUPTED, "%s: %s", name, mha_status_text(status));
    CHECK(w->n_asked == w->yes_at, "%s: asked %d times", name, w->n_asked);
    CHECK(asked.n_live == 0, "%s: %zu blocks are left", name, (size_t)asked.n_live);
    mha_interrupt_watch(NULL, NULL);
    check_small(name);
}

static mha_status
forward(const void *c)
{
    return mha_attention_forward(&((const call *)c)->args);
}

static mha_status
backward(const void *c)
{
    return mha_attention_backward(&((const call *)c)->args, &((const call *)c)->backward);
}

static mha_status
weight_gradient(const void *grads)
{
    return mha_linear_backward(grads);
}

/* Longer than until the next question: as Python's lock may take. */
static int
answer_late(void *n_asked)
{
    const int64_t asked_at = mha_now_ns();

    while (mha_now_ns() < asked_at + 2 * MHA_ASK_EVERY_NS) {
    }
    ++*(int *)n_asked;
    return 0;
}

/* The call works between two questions as long as it should, however long each answer takes. */
static void
check_late_answers(size_t rows)
{
    call c = call_of(rows);
    int n_asked = 0;
    const int64_t begun = mha_now_ns();

    mha_interrupt_watch(answer_late, &n_asked);
    CHECK(mha_attention_forward(&c.args) == MHA_OK, "a call whose watcher answers late");
    mha_interrupt_watch(NULL, NULL);
    CHECK(mha_now_ns() - begun >= 3 * (int64_t)n_asked * MHA_ASK_EVERY_NS,
          "asked %d times, more often than every %d ns", n_asked, MHA_ASK_EVERY_NS);
    drop(&c);
}

/* Asks a call three times at least?  The machine may have stood still during one: it is called twice. */
static int
is_long(mha_status (*function)(const void *), const void *arguments)
{
    int often = 1;

    for (int turn = 0; turn < 2 && often; turn++) {
        watcher w = {this_thread(), 0, -1};
        mha_interrupt_watch(watch, &w);
        CHECK(function(arguments) == MHA_OK, "a call whose watcher says no");
        mha_interrupt_watch(NULL, NULL);
        often = w.n_asked >= 3;
    }
    return often;
}

/*
 * Is the call given up when its watcher is asked for the yes_at-th time?  0 if it was over before: with as many rows it
 * took longer when the machine had more to do.
 */
static int
is_given_up(const char *name, mha_status (*function)(const void *), const void *arguments, int yes_at)
{
    watcher w = {this_thread(), 0, yes_at};

    mha_interrupt_watch(watch, &w);
    const mha_status status = function(arguments);
    if (w.n_asked < yes_at) {
        mha_interrupt_watch(NULL, NULL);
        CHECK(status == MHA_OK, "%s, asked %d times: %s", name, w.n_asked, mha_status_text(status));
        return 0;
    }
    check_interrupted(name, status, &w);
    return 1;
}

/* Rows of a call that takes long enough to be asked twice. */
static size_t
enough_rows(void)
{
    for (size_t rows = 1024;; rows *= 2) {
        call c = call_of(rows);
        const int enough = is_long(forward, &c);
        drop(&c);
        if (enough) {
            return rows;
        }
    }
}

/* 0 if some call was over before. */
static int
check_calls(size_t rows)
{
    call c = call_of(rows);
    int all = 1;

    for (int yes_at = 1; yes_at <= 2 && all; yes_at++) {
        all = is_given_up("forward", forward, &c, yes_at) && is_given_up("backward", backward, &c, yes_at);
    }
    drop(&c);
    return all;
}

static THREAD_FUNCTION
call_elsewhere(void *rows)
{
    call c = call_of(*(size_t *)rows);
    CHECK(mha_attention_forward(&c.args) == MHA_OK, "a call of another thread");
    drop(&c);
    return 0;
}

static void
check_other_threads(size_t rows)
{
    call c = call_of(rows);
    watcher w = {this_thread(), 0, 1};
    const thread_id other = start(call_elsewhere, &rows);

    mha_interrupt_watch(watch, &w);
    const mha_status status = mha_attention_forward(&c.args);
    CHECK(status == (w.n_asked > 0 ? MHA_ERR_INTERRUPTED : MHA_OK), "interrupted beside another call");
    mha_interrupt_watch(NULL, NULL);
    join(other);
    drop(&c);
}

/* One task of a weight's gradient is a sum over all rows, which here are one and the same. */
static void
check_weight_gradient(size_t in_features, size_t out_features, int with_weight)
{
    float *x = calloc(in_features, sizeof(float)), *grad_y = calloc(out_features, sizeof(float));
    float *weight = calloc(2 * in_features * out_features, sizeof(float)), *bias = calloc(out_features, sizeof(float));
    mha_linear_grads grads = {.dtype = MHA_F32,
                              .in_features = in_features,
                              .out_features = out_features,
                              .rows = 1024,
                              .x = x,
                              .grad_y = grad_y,
                              .weight = weight,
                              .grad_bias = bias,
                              .grad_weight = with_weight ? weight + in_features * out_features : NULL};
    const size_t most = (size_t)1 << 23;

    while (!is_long(weight_gradient, &grads) && grads.rows < most) {
        grads.rows *= 2;
    }
    while (!is_given_up("weight's gradient", weight_gradient, &grads, 1) && grads.rows < most) {
        grads.rows *= 2;
    }
    CHECK(grads.rows < most, "a gradient of %zu rows does not ask", grads.rows);
    free(x);
    free(grad_y);
    free(weight);
    free(bias);
}

int
main(void)
{
    mha_set_allocator(counting_alloc, counting_free);
    small = call_of(FEW);
    mha_threads_set(1);
    CHECK(mha_attention_forward(&small.args) == MHA_OK, "the first call");
    memcpy(right, small.out, sizeof right);
    for (unsigned threads = 1; threads <= 3; threads += 2) {
        mha_threads_set(threads);
        size_t rows = enough_rows();
        while (!check_calls(rows)) {
            rows *= 2;
        }
        check_other_threads(rows);
        check_late_answers(rows);
    }
    mha_threads_set(1);
    check_weight_gradient(128, 64, 1); /* of copies, */
    check_weight_gradient(32, 47, 1);  /* of operands as they lie, */
    check_weight_gradient(8, 2560, 0); /* and a bias's alone */
    return report();
}
