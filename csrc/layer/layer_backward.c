/*
 * layer_backward.c: gradients of a whole layer: back through W_o, through attention, through W_q, W_k, W_v.
 *
 * Rows of keys and values that no query saw get gradient 0 and give none to the weights: they are
 * left out, not multiplied by 0, for what stands in padding may be NaN.
 */
#include "layer.h"

#include "attention/backward.h"
#include "attention/operands.h"
#include "runtime/common.h"
#include "linear.h"
#include "runtime/threads.h"
#include "turn.h"

#include <string.h>

enum { W_O = MHA_N_INPUTS };

#define TURNED_ROWS ((size_t)64) /* of a task */
#define WORK_PER_TURN 8.0        /* a number that is turned costs about so many multiply-adds of a product */

typedef struct {
    mha_layer_job layer;
    const mha_layer_grads *grads;
    mha_linear_room room;         /* for the gradients of projections */
    int is_direct[MHA_N_INPUTS];  /* attention writes this input's gradient to its place */
    int is_written[MHA_N_INPUTS]; /* something has been written to its place */
    /* Scratch memory. */
    char *context;                 /* gradient of what W_o is applied to */
    char *projected[MHA_N_INPUTS]; /* gradients of the projected inputs */
    char *rows, *row_grads;        /* needed rows of an input side by side; gradients of their projections */
    char *grad_rows;               /* the gradients of these rows */
} backward_job;

static mha_linear_grads
linear_grads(const backward_job *job, int which, size_t rows, const void *x, ptrdiff_t x_row, const void *grad_y)
{
    const mha_linear *linear = mha_layer_linear(job->layer.args, which);
    const mha_linear_grads grads = {
        .dtype = job->layer.args->attention.dtype,
        .rows = rows,
        .out_features = linear->out_features,
        .in_features = linear->in_features,
        .x = x,
        .weight = job->grads->weight[which],
        .grad_y = grad_y,
        .x_row_stride = x_row,
        .grad_y_row_stride = (ptrdiff_t)linear->out_features,
        .grad_weight = job->grads->grad_weight[which],
        .grad_bias = job->grads->grad_bias[which],
    };
    return grads;
}

static void
plan_projections(backward_job *job)
{
    const mha_layer_job *layer = &job->layer;

    for (int i = 0; i <= W_O; i++) {
        const mha_attention_args *a = &layer->args->attention;
        const size_t rows = i == W_O ? a->queries : layer->inputs[i].rows;
        mha_linear_grads grads = linear_grads(job, i, a->batch * rows, NULL, 0, NULL);

        grads.grad_x = job; /* any address but NULL: grad_x is wanted */
        mha_linear_grads_plan(layer->kernels, &grads, &job->room);
    }
}

/* 1 if the forward call has moved rows without a projection, and kept none of them for this one. */
static int
is_copied(const mha_layer_path *in)
{
    return in->moves && in->given->projected == NULL;
}

/* Lays out scratch memory, as in layer.c: called once to measure it, and once more when it has an address. */
static void
lay_out(backward_job *job, mha_scratch *scratch)
{
    const mha_layer_args *a = job->layer.args;
    const size_t itemsize = job->layer.kernels->itemsize, batch = a->attention.batch;
    size_t n_rows = 0, widest = 0, widest_projected = 0;

    for (int i = 0; i < MHA_N_INPUTS; i++) {
        mha_layer_path *in = &job->layer.inputs[i];
        job->projected[i] = mha_scratch_take(scratch, batch * in->rows, in->features * itemsize);
        if (is_copied(in)) {
            in->projected = mha_scratch_take(scratch, batch * in->rows, in->features * itemsize);
        }
        if (in->given->W.weight != NULL) {
            n_rows = mha_max(n_rows, batch * in->rows);
            widest = mha_max(widest, in->given->size);
            widest_projected = mha_max(widest_projected, in->features);
        }
    }
    mha_layer_take_needed(&job->layer, scratch);
    if (a->W_o.weight != NULL) {
        job->context = mha_scratch_take(scratch, batch * a->attention.queries, a->W_o.in_features * itemsize);
    }
    job->rows = mha_scratch_take(scratch, n_rows, widest * itemsize);
    job->row_grads = mha_scratch_take(scratch, n_rows, widest_projected * itemsize);
    job->grad_rows = mha_scratch_take(scratch, n_rows, widest * itemsize);
    job->room.memory = mha_scratch_take(scratch, job->room.n_workers, job->room.bytes);
}

/* Back through W_o: returns the gradient of the attention output. */
static const void *
output_projection(const backward_job *job)
{
    const mha_layer_args *a = job->layer.args;

    if (a->W_o.weight == NULL) {
        return job->grads->grad_out;
    }
    mha_linear_grads grads = linear_grads(job, W_O, a->attention.batch * a->attention.queries, a->context,
                                          (ptrdiff_t)a->W_o.in_features, job->grads->grad_out);
    grads.grad_x = job->context;
    mha_linear_grads_run(job->layer.kernels, &grads, &job->room);
    return grads.grad_x;
}

static mha_result
dense_by_heads(size_t rows, size_t features, size_t heads, void *data)
{
    return (mha_result){data, (ptrdiff_t)(rows * features), (ptrdiff_t)(features / heads), (ptrdiff_t)features};
}

static int
is_projected(const backward_job *job, int i)
{
    return job->layer.inputs[i].given->W.weight != NULL;
}

static int
share_gradient(const backward_job *job, int i, int j)
{
    const mha_result *grads = job->grads->grad_inputs;

    return grads[i].data != NULL && grads[i].data == grads[j].data;
}

/* 1 if nothing is yet where the gradient of input i goes (inputs may share a place); notes that now something is. */
static int
is_first(backward_job *job, int i)
{
    for (int j = 0; j < MHA_N_INPUTS; j++) {
        if (job->is_written[j] && share_gradient(job, i, j)) {
            return 0;
        }
    }
    job->is_written[i] = 1;
    return 1;
}

/* Where attention writes the gradient of input i: straight to its place if it is not projected.  Call in order of i. */
static mha_result
gradient_of(backward_job *job, int i)
{
    const mha_result *grad = &job->grads->grad_inputs[i];
    const mha_layer_path *in = &job->layer.inputs[i];
    mha_result result = dense_by_heads(in->rows, in->features, mha_layer_heads(job->layer.args, i), job->projected[i]);

    job->is_direct[i] = !is_projected(job, i) && grad->data != NULL && is_first(job, i);
    if (job->is_direct[i]) {
        result.data = grad->data;
        result.batch_stride = grad->batch_stride;
        result.row_stride = grad->row_stride;
    }
    return result;
}

static mha_attention_grads
attention_grads(backward_job *job, const void *grad_context)
{
    const mha_layer_args *a = job->layer.args;
    const size_t features = mha_layer_context_features(a, job->layer.inputs[MHA_VALUES].features);
    const mha_result out =
        dense_by_heads(a->attention.queries, features, a->attention.heads, a->W_o.weight != NULL ? a->context : a->out);
    mha_attention_grads grads = job->grads->attention;

    grads.out = (mha_operand){out.data, out.batch_stride, out.head_stride, out.row_stride};
    grads.grad_out = grads.out;
    grads.grad_out.data = grad_context;
    grads.grad_q = gradient_of(job, MHA_QUERIES);
    grads.grad_k = gradient_of(job, MHA_KEYS);
    grads.grad_v = gradient_of(job, MHA_VALUES);
    return grads;
}

/* Adds gradients of inputs without projection that attention could not write: another one is in their place. */
static void
add_shared(const backward_job *job)
{
    const mha_kernels *k = job->layer.kernels;

    for (int i = 0; i < MHA_N_INPUTS; i++) {
        const mha_layer_path *in = &job->layer.inputs[i];
        const mha_result *grad = &job->grads->grad_inputs[i];
        const size_t rows = in->features > 0 ? job->layer.args->attention.batch * in->rows : 0;

        if (grad->data == NULL || is_projected(job, i) || job->is_direct[i]) {
            continue;
        }
        for (size_t r = 0; r < rows; r++) {
            k->add_row(in->features, job->projected[i] + r * in->features * k->itemsize,
                       mha_result_at(k, grad, r / in->rows, 0, r % in->rows), 1);
        }
    }
}

/* Where the gradient of a row of input i goes, or NULL. */
static char *
grad_row_at(const backward_job *job, int i, size_t item, size_t row)
{
    const mha_result *grad = &job->grads->grad_inputs[i];

    return grad->data == NULL ? NULL : mha_result_at(job->layer.kernels, grad, item, 0, row);
}

/* 1 if the row of the item gives something to gradients. */
static int
is_needed(const mha_layer_path *in, size_t item, size_t row)
{
    const mha_needed *needed = in->needed == NULL ? NULL : &in->needed[item];

    return needed == NULL ||
           (row >= needed->rows.first && row < needed->rows.last && (needed->seen == NULL || needed->seen[row] != 0));
}

/*
 * Copies an input's needed rows and the gradients of their projections side by side; how many.  If theirs will be added
 * to gradients that are there, these are copied too.
 */
static size_t
gather(const backward_job *job, int i, int add)
{
    const mha_layer_path *in = &job->layer.inputs[i];
    const mha_kernels *k = job->layer.kernels;
    const size_t in_bytes = in->given->size * k->itemsize, out_bytes = in->features * k->itemsize;
    size_t n = 0;

    for (size_t b = 0; b < job->layer.args->attention.batch; b++) {
        for (size_t t = 0; t < in->rows; t++) {
            if (is_needed(in, b, t)) {
                memcpy(job->rows + n * in_bytes, mha_operand_at(k, &in->given->rows, b, 0, t), in_bytes);
                memcpy(job->row_grads + n * out_bytes, job->projected[i] + (b * in->rows + t) * out_bytes, out_bytes);
                if (add) {
                    memcpy(job->grad_rows + n * in_bytes, grad_row_at(job, i, b, t), in_bytes);
                }
                n++;
            }
        }
    }
    return n;
}

/* Copies the gradients of these rows to their places.  Unless they were added, the other rows' gradients become 0. */
static void
spread(const backward_job *job, int i, int add)
{
    const mha_layer_path *in = &job->layer.inputs[i];
    const size_t row_bytes = in->given->size * job->layer.kernels->itemsize;
    const char *from = job->grad_rows;

    for (size_t b = 0; b < job->layer.args->attention.batch; b++) {
        for (size_t t = 0; t < in->rows; t++) {
            if (is_needed(in, b, t)) {
                memcpy(grad_row_at(job, i, b, t), from, row_bytes);
                from += row_bytes;
            } else if (!add) {
                memset(grad_row_at(job, i, b, t), 0, row_bytes);
            }
        }
    }
}

/* Back through the projection of an input: its rows are read in place if all are needed and evenly spaced. */
static void
project_input(backward_job *job, int i)
{
    const mha_layer_path *in = &job->layer.inputs[i];
    const mha_result *grad = &job->grads->grad_inputs[i];
    const ptrdiff_t in_features = (ptrdiff_t)in->given->size;
    const mha_operand *x = &in->given->rows;
    const int add = !is_first(job, i);
    const int is_dense =
        grad->data == NULL ||
        (grad->row_stride == in_features && mha_layer_is_even(&job->layer, in, grad->batch_stride, grad->row_stride));
    const int in_place =
        in->needed == NULL && is_dense && mha_layer_is_even(&job->layer, in, x->batch_stride, x->row_stride);
    const size_t rows = in_place ? job->layer.args->attention.batch * in->rows : gather(job, i, add);
    mha_linear_grads grads = in_place ? linear_grads(job, i, rows, x->data, x->row_stride, job->projected[i])
                                      : linear_grads(job, i, rows, job->rows, in_features, job->row_grads);

    grads.grad_x = in_place || grad->data == NULL ? grad->data : job->grad_rows;
    grads.add_to_grad_x = add;
    mha_linear_grads_run(job->layer.kernels, &grads, &job->room);
    if (grads.grad_x == job->grad_rows) {
        spread(job, i, add);
    }
}

/* 1 if all is there that the gradients are made of, and no gradient is wanted of what is not there. */
static int
is_complete(const mha_layer_grads *grads)
{
    const mha_layer_args *a = grads->forward;
    const mha_attention_args *attention = &a->attention;
    const mha_attention_grads *wanted = &grads->attention;
    int complete = grads->grad_out != NULL && attention->row_max != NULL && attention->row_sum != NULL;

    for (int i = 0; i <= W_O; i++) {
        const int has_weight = mha_layer_linear(a, i)->weight != NULL;
        const void *kept = i == W_O ? a->context : a->inputs[i].projected;

        complete = complete && (has_weight ? kept != NULL && grads->weight[i] != NULL
                                           : grads->grad_weight[i] == NULL && grads->grad_bias[i] == NULL);
    }
    return complete && (a->W_o.weight != NULL || a->out != NULL) &&
           (wanted->grad_additive_weights == NULL || attention->additive_weights != NULL) &&
           (wanted->grad_bias.data == NULL || attention->bias.data != NULL) &&
           (wanted->grad_relative_bias == NULL || attention->relative_bias != NULL) &&
           (wanted->grad_sinks == NULL || attention->sinks != NULL);
}

/* The gradients of turned rows become those of the rows as W_q, or W_k, gave them: rows of one task. */
static void
turn_task(void *context, size_t task, unsigned worker)
{
    const backward_job *job = context;
    const int i = (int)(task % 2); /* queries, keys */
    const mha_layer_path *in = &job->layer.inputs[i];
    const size_t first = task / 2 * TURNED_ROWS, rows = job->layer.args->attention.batch * in->rows;

    (void)worker;
    if (first < rows) {
        mha_turn_back(&in->given->turn, job->layer.args->attention.dtype, in->rows,
                      (mha_interval){first, mha_min(first + TURNED_ROWS, rows)}, in->features, job->projected[i]);
    }
}

static void
turn_back(backward_job *job)
{
    const mha_attention_args *a = &job->layer.args->attention;
    const mha_layer_path *in = job->layer.inputs;
    const size_t n_tasks = 2 * mha_ceil_div(a->batch * mha_max(a->queries, a->keys), TURNED_ROWS);

    if (in[MHA_QUERIES].given->turn.cos != NULL || in[MHA_KEYS].given->turn.cos != NULL) {
        const double numbers = (double)n_tasks * (double)TURNED_ROWS * (double)in[MHA_QUERIES].features;
        mha_parallel_for(n_tasks, mha_threads_for(n_tasks, WORK_PER_TURN * numbers), turn_task, job);
    }
}

mha_status
mha_layer_backward(const mha_layer_grads *grads)
{
    backward_job job = {.grads = grads};
    mha_layer_job *layer = &job.layer;
    mha_scratch *scratch = &layer->scratch;

    if (grads == NULL || grads->forward == NULL || !mha_layer_has_inputs(grads->forward) || !is_complete(grads)) {
        return MHA_ERR_ARG;
    }
    const mha_kernels *kernels = mha_kernels_for(grads->forward->attention.dtype);
    mha_status status = mha_layer_describe(layer, kernels, grads->forward);

    if (status == MHA_OK) {
        status = mha_attention_init(&layer->attention_job, kernels, &layer->attention, MHA_PASS_BACKWARD, scratch);
    }
    if (status != MHA_OK) {
        return status;
    }
    plan_projections(&job);
    mha_scratch own = *scratch;
    lay_out(&job, scratch);
    status = mha_scratch_open(scratch);
    if (status != MHA_OK) {
        return status;
    }
    own.base = scratch->base;
    lay_out(&job, &own);
    mha_layer_place_inputs(layer);
    for (int i = 0; i < MHA_N_INPUTS; i++) {
        const mha_layer_path *in = &layer->inputs[i];
        if (is_copied(in)) {
            mha_layer_copy_rows(layer, in, 0, layer->args->attention.batch * in->rows);
        }
    }
    const mha_attention_grads attention = attention_grads(&job, output_projection(&job));
    mha_attention_place(&layer->attention_job, scratch);
    mha_backward_run(&layer->attention_job, &attention);
    turn_back(&job);
    add_shared(&job);
    for (int i = 0; i < MHA_N_INPUTS; i++) {
        if (is_projected(&job, i)) {
            project_input(&job, i);
        }
    }
    mha_scratch_close(scratch);
    return mha_interrupt_status();
}
