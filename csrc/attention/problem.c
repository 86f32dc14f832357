/*
 * problem.c: a call of attention before anything is chosen: its sizes checked, its heads folded, its facts noted.
 */
#include "problem.h"

#include "runtime/common.h"
#include "runtime/threads_interrupt.h"

#include <math.h>

static int
sizes_overflow(const mha_attention_args *args, size_t itemsize)
{
    const size_t widest = mha_max(args->head_dim, args->value_dim);
    size_t scores = args->batch, out = widest, keys = args->head_dim;

    return mha_mul_size(&scores, args->heads) < 0 || mha_mul_size(&scores, args->queries) < 0 ||
           mha_mul_size(&scores, itemsize * 4) < 0 || mha_mul_size(&out, scores) < 0 ||
           mha_mul_size(&keys, args->keys) < 0 || mha_mul_size(&keys, itemsize * 4) < 0 ||
           args->relative_reach > PTRDIFF_MAX / 64 / args->heads ||
           mha_max(mha_max(args->keys, args->queries), widest) > PTRDIFF_MAX / 64;
}

/* 1 if a part's places in a larger call are not too large, and its causal corner does not need that call's sizes. */
static int
origin_is_sane(const mha_attention_args *args)
{
    const mha_visibility *v = &args->visible;
    const size_t furthest = mha_max(mha_max(v->first_query, v->first_key), mha_max(args->first_item, args->first_head));

    return furthest <= MHA_LAST_PLACE &&
           (v->causal != MHA_CAUSAL_BOTTOM_RIGHT || (v->first_query == 0 && v->first_key == 0));
}

/* A cheap second look: the binding has checked all this in the user's words. */
static int
is_sane(const mha_attention_args *args)
{
    return (args->row_max == NULL) == (args->row_sum == NULL) && args->heads > 0 && args->kv_heads > 0 &&
           args->heads % args->kv_heads == 0 && mha_visibility_is_sane(&args->visible, args->queries) &&
           args->dropout >= 0 && args->dropout <= 1 && args->softcap >= 0 && origin_is_sane(args);
}

int
mha_has_operands(const mha_attention_args *args, mha_pass pass)
{
    const int has_queries = args->batch > 0 && args->heads > 0 && args->queries > 0;
    const int has_keys = args->batch > 0 && args->kv_heads > 0 && args->keys > 0;
    const int backward = pass == MHA_PASS_BACKWARD, weights = pass == MHA_PASS_WEIGHTS;

    return (args->q.data != NULL || !has_queries || args->head_dim == 0) &&
           (args->k.data != NULL || !has_keys || args->head_dim == 0) &&
           (args->v.data != NULL || !has_keys || args->value_dim == 0 || weights) &&
           (args->out.data != NULL || !has_queries || args->value_dim == 0 || weights || backward);
}

/* 1 if nothing depends on a head's number or a query's place.  (Bottom-right, the only query sees all keys.) */
static int
can_fold_heads(const mha_attention_args *args)
{
    mha_visibility visible = args->visible;

    if (visible.causal == MHA_CAUSAL_BOTTOM_RIGHT) {
        visible.causal = MHA_CAUSAL_NONE;
    }
    return args->queries == 1 && args->kv_heads > 0 && args->heads > args->kv_heads && is_sane(args) &&
           mha_same_for_all_queries(&visible) && args->additive_weights == NULL && args->relative_bias == NULL &&
           args->sinks == NULL && args->dropout == 0;
}

static void
fold_mask(mha_mask *mask, ptrdiff_t group)
{
    mask->query_stride = mask->head_stride;
    mask->head_stride *= group;
}

void
mha_fold_heads(const mha_attention_args *args, mha_attention_args *folded)
{
    *folded = *args;
    if (!can_fold_heads(args)) {
        return;
    }
    const ptrdiff_t group = (ptrdiff_t)(args->heads / args->kv_heads);
    folded->heads = args->kv_heads;
    folded->queries = (size_t)group;
    folded->visible.causal = MHA_CAUSAL_NONE;
    folded->q.row_stride = args->q.head_stride;
    folded->q.head_stride *= group;
    folded->out.row_stride = args->out.head_stride;
    folded->out.head_stride *= group;
    fold_mask(&folded->keep_mask, group);
    fold_mask(&folded->bias, group);
}

/* 1 if queries, keys and values are rows without numbers, and nothing else tells one key from another. */
static int
has_no_features(const mha_attention_args *args, double scale)
{
    return args->head_dim == 0 && args->value_dim == 0 && args->weights == NULL && args->keep_mask.data == NULL &&
           args->bias.data == NULL && args->relative_bias == NULL && args->sinks == NULL && isfinite(scale);
}

double
mha_attention_work(const mha_attention_args *args)
{
    const double scores = (double)args->batch * (double)args->heads * (double)args->queries * (double)args->keys;
    /* A tanh costs about eight multiply-adds, an exponential with its passes twenty. */
    const double per_score = (args->additive_weights != NULL ? 8.0 : 1.0) * (double)args->head_dim;

    return scores * (per_score + (double)args->value_dim + 20.0);
}

mha_status
mha_problem_describe(mha_problem *problem, const mha_kernels *kernels, const mha_attention_args *args, mha_pass pass)
{
    if (kernels == NULL || !is_sane(args)) {
        return MHA_ERR_ARG;
    }
    if (sizes_overflow(args, kernels->itemsize)) {
        return MHA_ERR_SIZE;
    }
    const double usual = args->additive_weights != NULL || args->head_dim == 0 ? 1 : 1 / sqrt((double)args->head_dim);
    const double scale = args->scale != NULL ? *args->scale : usual;

    *problem = (mha_problem){
        .pass = pass,
        .args = args,
        .kernels = kernels,
        .score_scale = scale,
        .scale = mha_scalar_from(kernels, scale),
        .one = mha_scalar_from(kernels, 1),
        .group = args->heads / args->kv_heads,
        .same_visibility = mha_same_for_all_queries(&args->visible),
        .counts_keys = pass != MHA_PASS_BACKWARD && has_no_features(args, scale),
        .watched = mha_interrupt_flag() != NULL,
        .work = (pass == MHA_PASS_BACKWARD ? 2.5 : 1.0) * mha_attention_work(args), /* five products, not two */
    };
    return MHA_OK;
}
