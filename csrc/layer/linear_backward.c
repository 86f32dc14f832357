/*
 * linear_backward.c: gradients of y = x W^T + bias: grad_x = G W, grad_W = G^T x, grad_bias = column sums
 * of G, where G is the gradient of y.
 *
 * The right sides, W and x, lie in rows as the product wants them, but a panel's width of each row is far from
 * that of the next: hundreds of such pieces fall on few sets of the caches.  So a block of the depth of each panel is
 * copied side by side by the first tile that meets it, asked for while the panel before it is multiplied; the columns
 * or rows of G are copied first, unless they lie close together; small operands are read where they are.
 */
#include "runtime/common.h"
#include "linear.h"
#include "runtime/threads.h"
#include "runtime/threads_interrupt.h"

#define DEPTH_BLOCK ((size_t)256)          /* as in linear.c */
#define COPY_STRIDE (DEPTH_BLOCK + 16)     /* of rows of the left side's copy: lines of all rows in all cache sets */
#define TASK_LEAST ((size_t)192)           /* rows of a result per task: what a copied panel is used for, */
#define TASK_USUAL ((size_t)384)           /* up to so many at least, and to so many where the second cache is large: */
#define TASK_MOST ((size_t)512)            /* see most_task_rows */
#define SMALL_BYTES ((size_t)16 * 1024)    /* a right side of so few bytes stays in the first cache, wherever it lies */
#define LONG_STRIDE ((size_t)512)          /* bytes; what lies closer together finds places in the cache */
#define FAR_STEP ((size_t)1024)            /* bytes between steps of a column; closer ones are read as they lie, */
#define FAR_ROWS ((size_t)4096)            /* and rows closer than this: a page, or all of them in one cache set */
#define FEW_ROWS ((size_t)48)              /* so few rows of a result are no use for a copy */
_Static_assert(FEW_ROWS >= MHA_COPYING_ROWS, "too few rows for a product that copies");
_Static_assert(COPY_STRIDE >= DEPTH_BLOCK + MHA_ALIGN / sizeof(float) - 1, "copy_rows writes whole vectors");
#define ASKED_DEPTH (16 * DEPTH_BLOCK)     /* after so much of a long depth a call is asked whether it was given up */

typedef struct {
    const mha_linear_grads *grads;
    const mha_kernels *kernels;
    void *const *grad_x_rows;
    const mha_linear_room *room;
    size_t task_rows[2], n_input_tasks; /* of grad_x, of grad_W */
    mha_scalar one;
} grads_job;

/* Whether a product of so many rows copies its right side of depth x cols numbers. */
static int
copies(const mha_kernels *k, size_t rows, size_t depth, size_t cols)
{
    return rows >= FEW_ROWS && cols * k->itemsize >= LONG_STRIDE && depth > SMALL_BYTES / (cols * k->itemsize);
}

static size_t
panel_bytes(const mha_kernels *k)
{
    return DEPTH_BLOCK * k->panel_width * k->itemsize;
}

/* What is copied behind `column` of the block of the depth from p on: the next panel, or the next block's first. */
static void
look_ahead(const mha_kernels *k, const mha_product *whole, size_t p, size_t column, mha_product *product)
{
    const int next_block = column + k->panel_width >= whole->cols;
    const size_t from = next_block ? p + product->depth : p, first = next_block ? 0 : column + k->panel_width;
    const ptrdiff_t at = (ptrdiff_t)from * whole->b_step + (ptrdiff_t)first;

    product->ahead = (const char *)whole->b + at * (ptrdiff_t)k->itemsize;
    product->ahead_row = whole->b_step;
    product->ahead_rows = mha_min(DEPTH_BLOCK, whole->depth - from);
}

/* A product whose right side lies in rows, a panel and a block of the depth at a time; a too, if far apart. */
static void
product_of_copies(const grads_job *job, mha_product product, char *memory)
{
    const mha_kernels *k = job->kernels;
    const mha_product whole = product;
    const ptrdiff_t itemsize = (ptrdiff_t)k->itemsize, width = (ptrdiff_t)k->panel_width;
    const int transposes = whole.a_row == 1 && (size_t)whole.a_step * k->itemsize >= FAR_STEP;
    const int copies_rows = whole.a_step == 1 && (size_t)whole.a_row * k->itemsize >= FAR_ROWS;
    char *a_copy = memory + panel_bytes(k);
    size_t p = 0;

    product.panel = memory;
    product.b_padded = 1;
    do { /* once even for depth 0, which gives zeros */
        const ptrdiff_t at = (ptrdiff_t)p;
        product.depth = mha_min(DEPTH_BLOCK, whole.depth - p);
        product.accumulate = p > 0 || whole.accumulate;
        product.a = (const char *)whole.a + at * whole.a_step * itemsize;
        if (transposes) {
            k->transpose_rows(product.depth, whole.rows, product.a, whole.a_step, a_copy, (ptrdiff_t)COPY_STRIDE);
        } else if (copies_rows) {
            k->copy_rows(whole.rows, product.depth, product.a, whole.a_row, a_copy, (ptrdiff_t)COPY_STRIDE);
        }
        if (transposes || copies_rows) {
            product.a = a_copy;
            product.a_row = (ptrdiff_t)COPY_STRIDE;
            product.a_step = 1;
        }
        for (size_t column = 0; column < whole.cols; column += k->panel_width) {
            const char *b = (const char *)whole.b + (at * whole.b_step + (ptrdiff_t)column) * itemsize;

            product.cols = mha_min(k->panel_width, whole.cols - column);
            product.c = whole.c == NULL ? NULL : (char *)whole.c + (ptrdiff_t)column * itemsize;
            product.c_column = column;
            product.copies_b = product.cols == k->panel_width && product.depth > 0;
            product.b = product.copies_b ? b : memory;
            product.b_step = product.copies_b ? whole.b_step : width;
            if (!product.copies_b) {
                k->copy_rows(product.depth, product.cols, b, whole.b_step, memory, width);
            }
            look_ahead(k, &whole, p, column, &product);
            k->product(&product);
        }
        p += product.depth;
    } while (p < whole.depth && !mha_interrupted());
}

/* A product of operands as they lie. */
static void
product_in_place(const grads_job *job, mha_product product)
{
    const mha_product whole = product;
    const ptrdiff_t itemsize = (ptrdiff_t)job->kernels->itemsize;
    size_t p = 0;

    do {
        const ptrdiff_t at = (ptrdiff_t)p * itemsize;
        product.depth = mha_min(ASKED_DEPTH, whole.depth - p);
        product.accumulate = p > 0 || whole.accumulate;
        product.a = (const char *)whole.a + at * whole.a_step;
        product.b = (const char *)whole.b + at * whole.b_step;
        job->kernels->product(&product);
        p += product.depth;
    } while (p < whole.depth && !mha_interrupted());
}

static void
run_product(const grads_job *job, mha_product product, unsigned worker)
{
    product.depth_block = DEPTH_BLOCK;
    product.b_group = (ptrdiff_t)job->kernels->panel_width;
    product.scale = &job->one;
    if (copies(job->kernels, product.rows, product.depth, product.cols)) {
        product_of_copies(job, product, job->room->memory + worker * job->room->bytes);
    } else {
        product_in_place(job, product);
    }
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
        .b = g->weight,
        .b_step = (ptrdiff_t)g->in_features,
        .c = job->grad_x_rows != NULL ? NULL : (char *)g->grad_x + first * g->in_features * (size_t)itemsize,
        .c_row = (ptrdiff_t)g->in_features,
        .c_rows = job->grad_x_rows != NULL ? job->grad_x_rows + first : NULL,
        .accumulate = g->add_to_grad_x,
    };
    run_product(job, product, worker);
}

/* Sums of so many columns of G: a vector of them at a time, as the kernel goes. */
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
        .b = g->x,
        .b_step = g->x_row_stride,
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

/*
 * What is copied of the left side, a block of the depth of all rows of a task, takes two fifths of the second cache at
 * most: with 2 MiB, 512 rows took 0.98 to 0.995 of the time of 384 (gradients of 4096 x 512 x 512 and 512 x 768 x 768),
 * 768 as long, and 1536, four fifths, 1.02.
 */
static size_t
most_task_rows(const mha_kernels *k)
{
    const size_t fit = mha_caches_active().second * 2 / 5 / (COPY_STRIDE * k->itemsize);

    return mha_min(mha_max(fit, TASK_USUAL), TASK_MOST);
}

/* Rows of a task: all threads have some, and every panel serves many. */
static size_t
rows_per_task(const mha_kernels *k, size_t rows)
{
    const size_t n_threads = mha_threads_get(), least = mha_max(mha_ceil_div(rows, n_threads), TASK_LEAST);
    size_t n_tasks = mha_ceil_div(rows, mha_min(least, most_task_rows(k)));

    if (n_tasks > n_threads) { /* as many for each of them */
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

    job->task_rows[0] = rows_per_task(job->kernels, grads->rows);
    job->task_rows[1] = rows_per_task(job->kernels, grads->out_features);
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
    /* Whatever the threads and the rows are when it runs: rows that nobody needs are left out then. */
    const size_t most = mha_min(mha_max(grads->rows, grads->out_features), most_task_rows(kernels));
    const size_t in = grads->in_features;

    if (copies(kernels, most, grads->out_features, in) || copies(kernels, most, grads->rows, in)) {
        const size_t bytes = panel_bytes(kernels) + COPY_STRIDE * most * kernels->itemsize;
        room->bytes = mha_max(room->bytes, bytes);
    }
    room->n_workers = n_workers > room->n_workers ? n_workers : room->n_workers;
}

void
mha_linear_grads_run(const mha_linear_grads *grads, void *const *grad_x_rows, const mha_linear_room *room)
{
    const mha_kernels *k = mha_kernels_for(grads->dtype);
    grads_job job = {.grads = grads, .kernels = k, .grad_x_rows = grad_x_rows, .room = room};
    const size_t n_tasks = count_tasks(grads, &job);
    const unsigned n_workers = workers_for(grads, n_tasks);

    job.one = mha_scalar_from(k, 1);
    mha_parallel_for(n_tasks, n_workers < room->n_workers ? n_workers : room->n_workers, run_task, &job);
}

mha_status
mha_linear_backward(const mha_linear_grads *grads)
{
    const mha_kernels *kernels = mha_kernels_for(grads->dtype);
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    mha_linear_room room = {.bytes = 0};
    mha_status status;

    if (kernels == NULL || grads->grad_y == NULL || grads->x == NULL || grads->weight == NULL) {
        return MHA_ERR_ARG;
    }
    mha_linear_grads_plan(kernels, grads, &room);
    (void)mha_scratch_add(&scratch, room.n_workers, room.bytes);
    status = mha_scratch_open(&scratch);
    if (status == MHA_OK) {
        room.memory = scratch.base;
        mha_linear_grads_run(grads, NULL, &room);
        mha_scratch_close(&scratch);
        status = mha_interrupt_status();
    }
    return status;
}
