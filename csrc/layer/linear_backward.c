/*
 * linear_backward.c: gradients of y = x W^T + bias: grad_x = G W, grad_W = G^T x, grad_bias = column sums
 * of G, where G is the gradient of y.
 *
 * The right sides, W and x, lie in rows, as the product wants them.  But a row's part of a panel is far from the next
 * row's, and hundreds of such parts share few sets of the caches.  So each depth block of a panel is copied side by
 * side first, and each panel is prefetched while the one before it is multiplied.  Columns or rows
 * of G are copied first, unless they lie close together.  Small operands are read in place.
 */
#include "runtime/common.h"
#include "linear.h"
#include "runtime/threads.h"
#include "runtime/threads_interrupt.h"

#define COPY_STRIDE (MHA_LINEAR_DEPTH + MHA_LEFT_GAP) /* of rows of the left side's copy */
#define TASK_LEAST ((size_t)192)           /* the fewest rows of a result per task: they share a copied panel */
#define TASK_MOST ((size_t)384)            /* the most rows per task: 408 KiB of floats in the left side's copy */
#define SMALL_BYTES ((size_t)16 * 1024)    /* a right side of so few bytes stays in the first cache, wherever it lies */
#define LONG_STRIDE ((size_t)512)          /* bytes of a row; shorter ones find places in the cache */
#define FAR_STEP ((ptrdiff_t)1024)         /* bytes between steps of a column; closer ones are read in place */
#define FAR_ROWS ((ptrdiff_t)4096)         /* bytes, a page: rows so far apart share one cache set; closer: in place */
#define ASKED_DEPTH (4 * MHA_LINEAR_DEPTH) /* after so many steps of a long depth, was the call interrupted? */

typedef struct {
    const mha_linear_grads *grads;
    const mha_kernels *kernels;
    const mha_linear_room *room;
    size_t task_rows[2], n_input_tasks; /* rows per task of grad_x and of grad_W; tasks of grad_x, which come first */
    mha_scalar one;
} grads_job;

/* Whether a product of so many rows copies its right side of depth x cols numbers. */
static int
copies(const mha_kernels *k, size_t rows, size_t depth, size_t cols)
{
    const size_t row_bytes = cols * k->itemsize;

    return rows >= MHA_LINEAR_FEW_ROWS && row_bytes >= LONG_STRIDE && depth > SMALL_BYTES / row_bytes;
}

static size_t
panel_bytes(const mha_kernels *k)
{
    return MHA_LINEAR_DEPTH * k->panel_width * k->itemsize;
}

/* Completes the product's description and computes it, in several calls if its depth is long. */
static void
run_product(const grads_job *job, mha_product product, unsigned worker)
{
    const ptrdiff_t itemsize = (ptrdiff_t)job->kernels->itemsize;
    const size_t depth = product.depth;
    const int is_column = product.a_row == 1 && product.a_step * itemsize >= FAR_STEP;
    const int is_far_row = product.a_step == 1 && product.a_row * itemsize >= FAR_ROWS;
    size_t done = 0;

    product.depth_block = MHA_LINEAR_DEPTH;
    product.scale = &job->one;
    product.b.layout = MHA_ROWS;
    if (copies(job->kernels, product.rows, depth, product.cols)) {
        product.b.panel = job->room->memory + worker * job->room->bytes;
        product.b.far = 1;
        product.a_room = is_column || is_far_row ? (char *)product.b.panel + panel_bytes(job->kernels) : NULL;
    }
    do { /* once even for depth 0, which gives zeros */
        product.depth = mha_min(ASKED_DEPTH, depth - done);
        job->kernels->product(&product);
        product.accumulate = 1;
        product.a = (const char *)product.a + (ptrdiff_t)product.depth * product.a_step * itemsize;
        product.b.data = (const char *)product.b.data + (ptrdiff_t)product.depth * product.b.stride * itemsize;
        done += product.depth;
    } while (done < depth && !mha_interrupted());
}

/* Rows of grad_x = G W. */
static void
input_grads(const grads_job *job, size_t first, size_t rows, unsigned worker)
{
    const mha_linear_grads *g = job->grads;
    const ptrdiff_t itemsize = (ptrdiff_t)job->kernels->itemsize;
    const mha_product product = {
        .rows = rows,
        .cols = g->in_features,
        .depth = g->out_features,
        .a = (const char *)g->grad_y + (ptrdiff_t)first * g->grad_y_row_stride * itemsize,
        .a_row = g->grad_y_row_stride,
        .a_step = 1,
        .b = {.data = g->weight, .stride = (ptrdiff_t)g->in_features},
        .c = (char *)g->grad_x + first * g->in_features * (size_t)itemsize,
        .c_row = (ptrdiff_t)g->in_features,
        .accumulate = g->add_to_grad_x,
    };
    run_product(job, product, worker);
}

/* Sums of `columns` columns of G: a vector of columns at a time, as the kernel takes them. */
static void
bias_grads(const grads_job *job, size_t first, size_t columns)
{
    const mha_linear_grads *g = job->grads;
    const mha_kernels *k = job->kernels;

    for (size_t j = 0; j < columns && !mha_interrupted(); j += k->lanes) {
        const size_t at = (first + j) * k->itemsize;
        k->column_sums(g->rows, mha_min(k->lanes, columns - j), (const char *)g->grad_y + at, g->grad_y_row_stride,
                       (char *)g->grad_bias + at);
    }
}

/* Rows of grad_W = G^T x, and the elements of grad_bias that belong to them. */
static void
weight_grads(const grads_job *job, size_t first, size_t rows, unsigned worker)
{
    const mha_linear_grads *g = job->grads;
    const size_t itemsize = job->kernels->itemsize;
    const mha_product product = {
        .rows = rows,
        .cols = g->in_features,
        .depth = g->rows,
        .a = (const char *)g->grad_y + first * itemsize,
        .a_row = 1,
        .a_step = g->grad_y_row_stride,
        .b = {.data = g->x, .stride = g->x_row_stride},
        .c = g->grad_weight == NULL ? NULL : (char *)g->grad_weight + first * g->in_features * itemsize,
        .c_row = (ptrdiff_t)g->in_features,
    };

    if (g->grad_bias != NULL) {
        bias_grads(job, first, rows);
    }
    if (g->grad_weight != NULL) {
        run_product(job, product, worker);
    }
}

static void
run_task(void *context, size_t task, unsigned worker)
{
    const grads_job *job = context;
    const mha_linear_grads *g = job->grads;

    if (task < job->n_input_tasks) {
        const size_t rows = job->task_rows[0], first = task * rows;
        input_grads(job, first, mha_min(rows, g->rows - first), worker);
    } else {
        const size_t rows = job->task_rows[1], first = (task - job->n_input_tasks) * rows;
        weight_grads(job, first, mha_min(rows, g->out_features - first), worker);
    }
}

/* Rows of a task: all threads have some, and every panel serves many. */
static size_t
rows_per_task(size_t rows)
{
    const size_t n_threads = mha_threads_get(), least = mha_max(mha_ceil_div(rows, n_threads), TASK_LEAST);
    size_t n_tasks = mha_ceil_div(rows, mha_min(least, TASK_MOST));

    if (n_tasks > n_threads) { /* equally many for each thread */
        n_tasks = mha_min(mha_round_up(n_tasks, n_threads), mha_ceil_div(rows, TASK_LEAST));
    }

    return mha_ceil_div(rows, mha_max(n_tasks, 1));
}

/* Tasks of grad_x, and then those of the weight. */
static size_t
count_tasks(const mha_linear_grads *grads, grads_job *job)
{
    const int wants_weight = grads->grad_weight != NULL || grads->grad_bias != NULL;
    const int wants_input = grads->grad_x != NULL && grads->in_features > 0;

    job->task_rows[0] = rows_per_task(grads->rows);
    job->task_rows[1] = rows_per_task(grads->out_features);
    job->n_input_tasks = wants_input && grads->rows > 0 ? mha_ceil_div(grads->rows, job->task_rows[0]) : 0;
    return job->n_input_tasks +
           (wants_weight && grads->out_features > 0 ? mha_ceil_div(grads->out_features, job->task_rows[1]) : 0);
}

static unsigned
workers_for(const mha_linear_grads *grads, size_t n_tasks)
{
    return mha_threads_for(n_tasks, 2 * (double)grads->rows * (double)grads->in_features * (double)grads->out_features);
}

void
mha_linear_grads_plan(const mha_kernels *kernels, const mha_linear_grads *grads, mha_linear_room *room)
{
    grads_job job = {.kernels = kernels};
    const unsigned n_workers = workers_for(grads, count_tasks(grads, &job));
    /* Enough for any number of threads and rows at run time, when rows that nobody needs are left out. */
    const size_t most = mha_min(mha_max(grads->rows, grads->out_features), TASK_MOST);
    const size_t in = grads->in_features;

    if (copies(kernels, most, grads->out_features, in) || copies(kernels, most, grads->rows, in)) {
        const size_t bytes = panel_bytes(kernels) + COPY_STRIDE * most * kernels->itemsize;
        room->bytes = mha_max(room->bytes, bytes);
    }
    room->n_workers = n_workers > room->n_workers ? n_workers : room->n_workers;
}

void
mha_linear_grads_run(const mha_kernels *kernels, const mha_linear_grads *grads, const mha_linear_room *room)
{
    grads_job job = {.grads = grads, .kernels = kernels, .room = room};
    const size_t n_tasks = count_tasks(grads, &job);
    const unsigned n_workers = workers_for(grads, n_tasks);

    job.one = mha_scalar_from(kernels, 1);
    mha_parallel_for(n_tasks, n_workers < room->n_workers ? n_workers : room->n_workers, run_task, &job);
}

mha_status
mha_linear_backward(const mha_linear_grads *grads)
{
    const mha_kernels *kernels = grads == NULL ? NULL : mha_kernels_for(grads->dtype);
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    mha_linear_room room = {.bytes = 0};
    mha_status status;

    if (kernels == NULL || (grads->grad_y == NULL && grads->rows > 0 && grads->out_features > 0) ||
        (grads->x == NULL && grads->rows > 0 && grads->in_features > 0) ||
        (grads->weight == NULL && grads->out_features > 0 && grads->in_features > 0)) {
        return MHA_ERR_ARG;
    }
    mha_linear_grads_plan(kernels, grads, &room);
    (void)mha_scratch_add(&scratch, room.n_workers, room.bytes);
    status = mha_scratch_open(&scratch);
    if (status == MHA_OK) {
        room.memory = scratch.base;
        mha_linear_grads_run(kernels, grads, &room);
        mha_scratch_close(&scratch);
        status = mha_interrupt_status();
    }
    return status;
}
