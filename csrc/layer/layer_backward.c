/*
 * layer_backward.c: gradients of a whole layer: back through W_o, through attention, through W_q, W_k, W_v.
 *
 * Rows of keys and values that no query saw get gradient 0 and give none to the weights: they are
 * left out, not multiplied by 0, for what stands in padding may be NaN.
 */
#include "layer.h"

#include "attention/backward.h"
#include "runtime/common.h"
#include "linear.h"

#include <string.h>

enum { W_O = MHA_N_INPUTS };

/* Offsets in scratch memory. */
typedef struct {
    mha_layer_job layer;
    const mha_layer_grads *grads;
    size_t context_at;                /* gradient of what W_o is applied to */
    size_t projected_at[MHA_N_INPUTS]; /* gradients of the projected inputs */
    size_t room_at;
    mha_linear_room room; /* for the gradients of projections */
    size_t rows_at, grads_at, pointers_at; /* needed rows side by side: inputs, gradients, destinations */
    char *memory;
} backward_job;

static mha_linear_grads
linear_grads(const backward_job *job, int which, size_t rows, const void *x, ptrdiff_t x_row, const void *grad_y)
{
    const mha_layer_args *a = job->layer.args;
    const mha_linear *linear[MHA_N_INPUTS + 1] = {&a->W_q, &a->W_k, &a->W_v, &a->W_o};
    const mha_linear_grads grads = {
        .dtype = a->dtype,
        .rows = rows,
        .out_features = linear[which]->out_features,
        .in_features = linear[which]->in_features,
        .x = x,
        .weight = job->grads->weight[which],
        .grad_y = grad_y,
        .x_row_stride = x_row,
        .grad_y_row_stride = (ptrdiff_t)linear[which]->out_features,
        .grad_weight = job->grads->grad_weight[which],
        .grad_bias = job->grads->grad_bias[which],
    };
    return grads;
}

static void
plan_memory(backward_job *job, mha_scratch *scratch)
{
    const mha_layer_args *a = job->layer.args;
    const size_t itemsize = job->layer.kernels->itemsize;
    size_t n_rows = 0, widest = 0, widest_projected = 0;

    job->layer.needed_at = mha_scratch_add(scratch, a->batch, 2 * sizeof(mha_interval));
    if (a->W_o.weight != NULL) {
        job->context_at = mha_scratch_add(scratch, a->batch * a->queries, a->W_o.in_features * itemsize);
    }
    for (int i = 0; i < MHA_N_INPUTS; i++) {
        const mha_layer_input *in = &job->layer.inputs[i];
        job->projected_at[i] = mha_scratch_add(scratch, a->batch * in->rows, in->features * itemsize);
        if (in->linear->weight != NULL) {
            n_rows = mha_max(n_rows, a->batch * in->rows);
            widest = mha_max(widest, in->linear->in_features);
            widest_projected = mha_max(widest_projected, in->features);
        }
    }
    job->rows_at = mha_scratch_add(scratch, n_rows, widest * itemsize);
    job->grads_at = mha_scratch_add(scratch, n_rows, widest_projected * itemsize);
    job->pointers_at = mha_scratch_add(scratch, n_rows, sizeof(void *));
    for (int i = 0; i <= MHA_N_INPUTS; i++) {
        const size_t rows = a->batch * (i == MHA_KEYS || i == MHA_VALUES ? a->keys : a->queries);
        mha_linear_grads grads = linear_grads(job, i, rows, NULL, 0, NULL);

        grads.grad_x = scratch; /* any address: it is asked for */
        mha_linear_grads_plan(job->layer.kernels, &grads, &job->room);
    }
    job->room_at = mha_scratch_add(scratch, job->room.n_workers, job->room.bytes);
}

/* Back through W_o: returns the gradient of the attention output. */
static const void *
output_projection(const backward_job *job)
{
    const mha_layer_args *a = job->layer.args;

    if (a->W_o.weight == NULL) {
        return job->grads->grad_out;
    }
    mha_linear_grads grads = linear_grads(job, W_O, a->batch * a->queries, a->context, (ptrdiff_t)a->W_o.in_features,
                                          job->grads->grad_out);
    grads.grad_x = job->memory + job->context_at;
    mha_linear_grads_run(&grads, NULL, &job->room);
    return grads.grad_x;
}

static mha_result
dense_by_heads(const backward_job *job, const mha_layer_input *in, void *data)
{
    const ptrdiff_t features = (ptrdiff_t)in->features;

    const ptrdiff_t head_dim = features / (ptrdiff_t)job->layer.args->num_heads;

    return (mha_result){data, (ptrdiff_t)in->rows * features, head_dim, features};
}

static int
is_projected(const backward_job *job, int i)
{
    return job->layer.inputs[i].linear->weight != NULL;
}

static int
share_gradient(const backward_job *job, int i, int j)
{
    const mha_result *grads = job->grads->grad_inputs;

    return grads[i].data != NULL && grads[i].data == grads[j].data;
}

/* Attention writes the gradients of inputs without projection, one of those that share a place straight to it. */
static int
is_written_by_attention(const backward_job *job, int i)
{
    int first = 0;

    while (first < i && (is_projected(job, first) || !share_gradient(job, first, i))) {
        first++;
    }
    return first == i && !is_projected(job, i) && job->grads->grad_inputs[i].data != NULL;
}

/* Whether something is there already when the projection of input i comes, which goes in order. */
static int
is_written_before(const backward_job *job, int i)
{
    for (int j = 0; j < MHA_N_INPUTS; j++) {
        if (j != i && share_gradient(job, i, j) && (j < i || !is_projected(job, j))) {
            return 1;
        }
    }
    return 0;
}

/* Where the gradient of a projected input goes. */
static mha_result
projected_grad(const backward_job *job, int i)
{
    const mha_layer_input *in = &job->layer.inputs[i];
    mha_result result = dense_by_heads(job, in, job->memory + job->projected_at[i]);

    if (is_written_by_attention(job, i)) {
        result.data = job->grads->grad_inputs[i].data;
        result.batch_stride = job->grads->grad_inputs[i].batch_stride;
        result.row_stride = job->grads->grad_inputs[i].row_stride;
    }
    return result;
}

static mha_attention_grads
attention_grads(const backward_job *job, const void *grad_context)
{
    const mha_layer_args *a = job->layer.args;
    void *context = a->W_o.weight != NULL ? a->context : a->out;
    mha_layer_input out = job->layer.inputs[MHA_VALUES];

    out.rows = a->queries;
    const mha_result strides = dense_by_heads(job, &out, context);
    const mha_attention_grads grads = {
        .out = {context, strides.batch_stride, strides.head_stride, strides.row_stride},
        .grad_out = {grad_context, strides.batch_stride, strides.head_stride, strides.row_stride},
        .grad_q = projected_grad(job, MHA_QUERIES),
        .grad_k = projected_grad(job, MHA_KEYS),
        .grad_v = projected_grad(job, MHA_VALUES),
        .grad_additive_weights = job->grads->grad_additive_weights,
    };
    return grads;
}

/* Where attention could not write the gradient of an input without projection because another one is there. */
static void
add_shared(const backward_job *job)
{
    const mha_kernels *k = job->layer.kernels;

    for (int i = 0; i < MHA_N_INPUTS; i++) {
        const mha_layer_input *in = &job->layer.inputs[i];
        const mha_result *grad = &job->grads->grad_inputs[i];
        const size_t rows = job->layer.args->batch * in->rows;

        if (grad->data == NULL || is_projected(job, i) || is_written_by_attention(job, i)) {
            continue;
        }
        for (size_t r = 0; r < rows; r++) {
            k->add_row(in->features, job->memory + job->projected_at[i] + r * in->features * k->itemsize,
                       mha_result_at(k, grad, r / in->rows, 0, r % in->rows), 1);
        }
    }
}

/* Back through the projection of an input all of whose rows count and are evenly spaced. */
static void
project_all(const backward_job *job, int i)
{
    const mha_layer_input *in = &job->layer.inputs[i];
    mha_linear_grads grads = linear_grads(job, i, job->layer.args->batch * in->rows, in->input->data,
                                          in->input->row_stride, job->memory + job->projected_at[i]);

    grads.grad_x = job->grads->grad_inputs[i].data;
    grads.add_to_grad_x = is_written_before(job, i);
    mha_linear_grads_run(&grads, NULL, &job->room);
}

/* The same with the needed rows, and their gradients, copied side by side. */
static void
project_needed(const backward_job *job, int i)
{
    const mha_layer_input *in = &job->layer.inputs[i];
    const mha_kernels *k = job->layer.kernels;
    const size_t in_bytes = in->linear->in_features * k->itemsize, out_bytes = in->features * k->itemsize;
    const mha_result *grad_x = &job->grads->grad_inputs[i];
    const int add = is_written_before(job, i);
    const char *projected = job->memory + job->projected_at[i];
    char *x = job->memory + job->rows_at, *grad_y = job->memory + job->grads_at;
    void **grad_rows = (void **)(void *)(job->memory + job->pointers_at);
    size_t n = 0;

    for (size_t b = 0; b < job->layer.args->batch; b++) {
        const mha_interval rows = in->needed != NULL ? in->needed[b] : (mha_interval){0, in->rows};
        for (size_t t = 0; t < in->rows; t++) {
            void *grad_row = grad_x->data != NULL ? mha_result_at(k, grad_x, b, 0, t) : NULL;
            if (t >= rows.first && t < rows.last) {
                memcpy(x + n * in_bytes, mha_operand_at(k, in->input, b, 0, t), in_bytes);
                memcpy(grad_y + n * out_bytes, projected + (b * in->rows + t) * out_bytes, out_bytes);
                grad_rows[n++] = grad_row;
            } else if (grad_row != NULL && !add) {
                memset(grad_row, 0, in_bytes);
            }
        }
    }
    mha_linear_grads grads = linear_grads(job, i, n, x, (ptrdiff_t)in->linear->in_features, grad_y);
    grads.grad_x = grad_x->data;
    grads.add_to_grad_x = add;
    mha_linear_grads_run(&grads, grad_rows, &job->room);
}

static void
input_projections(const backward_job *job)
{
    for (int i = 0; i < MHA_N_INPUTS; i++) {
        const mha_layer_input *in = &job->layer.inputs[i];
        const mha_result *grad = &job->grads->grad_inputs[i];
        const int dense =
            grad->data == NULL || (grad->row_stride == (ptrdiff_t)in->linear->in_features &&
                                   mha_layer_is_even(&job->layer, in, grad->batch_stride, grad->row_stride));
        if (!is_projected(job, i)) {
            continue;
        }
        if (in->needed == NULL && dense &&
            mha_layer_is_even(&job->layer, in, in->input->batch_stride, in->input->row_stride)) {
            project_all(job, i);
        } else {
            project_needed(job, i);
        }
    }
}

static int
is_complete(const mha_layer_grads *grads)
{
    const mha_layer_args *a = grads->forward;

    return grads->grad_out != NULL && a->row_max != NULL && a->row_sum != NULL &&
           (a->W_q.weight == NULL || (a->q_projected != NULL && grads->weight[MHA_QUERIES] != NULL)) &&
           (a->W_k.weight == NULL || (a->k_projected != NULL && grads->weight[MHA_KEYS] != NULL)) &&
           (a->W_v.weight == NULL || (a->v_projected != NULL && grads->weight[MHA_VALUES] != NULL)) &&
           (a->W_o.weight == NULL || (a->context != NULL && grads->weight[W_O] != NULL)) &&
           (a->W_o.weight != NULL || a->out != NULL);
}

mha_status
mha_layer_backward(const mha_layer_grads *grads)
{
    backward_job job = {.grads = grads};
    mha_layer_job *layer = &job.layer;
    mha_attention_job attention_job;
    mha_scratch scratch = MHA_SCRATCH_EMPTY;
    mha_status status = is_complete(grads) ? mha_layer_describe(layer, grads->forward) : MHA_ERR_ARG;

    if (status == MHA_OK) {
        status = mha_attention_init(&attention_job, &layer->attention, MHA_PASS_BACKWARD, &scratch);
    }
    if (status != MHA_OK) {
        return status;
    }
    plan_memory(&job, &scratch);
    status = mha_scratch_open(&scratch);
    if (status != MHA_OK) {
        return status;
    }
    job.memory = scratch.base;
    job.room.memory = scratch.base + job.room_at;
    mha_layer_place_inputs(layer, scratch.base + layer->needed_at);
    const mha_attention_grads attention = attention_grads(&job, output_projection(&job));
    mha_attention_place(&attention_job, &scratch);
    mha_backward_run(&attention_job, &attention);
    add_shared(&job);
    input_projections(&job);
    mha_scratch_close(&scratch);
    return mha_interrupt_status();
}
