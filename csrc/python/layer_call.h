/*
 * layer_call.h: what layer_forward, layer_backward, layer_step and explain_layer share: their arguments, taken and
 * checked in one place (args_layer.c), and what a forward call keeps of itself.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef MHA_PY_LAYER_CALL_H
#define MHA_PY_LAYER_CALL_H

#include "args.h"

/*
 * The arguments: the projections are a tuple of four, or of nine (weights, their biases, w_v); the scorer is w_v; the
 * heads are a number, or for layer_step a tuple (of queries, of keys).
 */
enum { MHA_PY_QUERIES, MHA_PY_KEYS, MHA_PY_VALUES, MHA_PY_LENS, MHA_PY_FOUR, MHA_PY_SCORER, MHA_PY_HEADS };
enum { MHA_PY_EMPTY = MHA_PY_HEADS + 1, MHA_PY_DROPOUT, MHA_PY_SEED, MHA_PY_N_LAYER };
enum { MHA_PY_N_INPUTS = 3 };

/* W[0..3] are W_q, W_k, W_v, W_o, as in mha_layer_grads; of nine parameters the next four are biases, the last w_v. */
enum { MHA_PY_W_Q, MHA_PY_W_K, MHA_PY_W_V, MHA_PY_W_O, MHA_PY_N_PROJECTIONS };
enum { MHA_PY_PARAMETER_W_V = 2 * MHA_PY_N_PROJECTIONS, MHA_PY_N_PARAMETERS };

enum { MHA_PY_N_TENSORS = MHA_PY_N_INPUTS + MHA_PY_N_PARAMETERS }; /* what may have gradients */

/* What stands in the tuple of options, in this order; entries at its end may be left out. */
enum { MHA_PY_CAUSAL, MHA_PY_KEEP_MASK, MHA_PY_BIAS, MHA_PY_TURN, MHA_PY_ROWS_OF, MHA_PY_LEFT, MHA_PY_RIGHT };
enum { MHA_PY_SCALE = MHA_PY_RIGHT + 1, MHA_PY_TERMS, MHA_PY_N_OPTIONS };

typedef struct {
    int any; /* 0: no tuple was given, and nothing else is looked at */
    mha_py_score_values scores;
    PyObject *turn, *rows;
} mha_py_options;

/* NULL, None or a tuple. */
mha_py_options mha_py_layer_options(mha_py_call *call, PyObject *tuple);

/* W_q, W_k and W_v as rows of one weight. */
typedef struct {
    mha_py_projection whole;         /* its weight.array is NULL if the three are weights of their own */
    int place;                       /* that of the joint weight among the parameters */
    int overlaps;                    /* rows have no order, or are used twice: gradients are added up row by row */
    npy_intp first[MHA_PY_N_INPUTS]; /* the rows from there on, unless */
    const int64_t *numbers[MHA_PY_N_INPUTS]; /* they are these */
} mha_py_joint;

typedef struct {
    mha_py_options options;
    mha_py_array queries, keys, values, w_v;
    int w_v_is_weight; /* w_v was given as the weight of an nn.Linear with one output, (1, h) */
    mha_py_projection W[MHA_PY_N_PROJECTIONS];
    mha_py_joint joint;
    mha_py_scores scores;
    int bias_rank;      /* as it was given; in `scores` it has an axis for heads */
    int counts_lengths; /* they are no user's, so no mask by mistake */
    npy_intp heads, kv_heads, qk_features, key_features, value_features, context_features, out_features;
    mha_layer_args args; /* all but the outputs; not to be moved */
    double work;         /* multiply-adds of a forward call, roughly */
} mha_py_layer;

/* values: one for each of the names; options: as mha_py_layer_options takes them.  *layer is zeroed by the caller. */
void mha_py_take_layer(mha_py_call *call, PyObject *const *values, PyObject *options, mha_py_layer *layer);

/* The last of its checks: lays the masks over the scores of so many keys; then draws the seed. */
void mha_py_place_layer(mha_py_call *call, PyObject *const *values, npy_intp n_keys, mha_py_layer *layer);

/* Turns W_q queries, and W_k keys, by (cosines, sines), which have a row for each of theirs. */
mha_turn mha_py_take_turn(mha_py_call *call, PyObject *value, npy_intp rows, const mha_py_layer *layer);

/*
 * args_joint.c: takes W_q, W_k and W_v as the options' rows of one weight, which, with its bias, is the first of these
 * among the parameters that there is.  Its gradients: point tells the core where to write the rows', join adds up those
 * that were not written to their places.
 */
void mha_py_take_joint(mha_py_call *call, PyObject *parameters, mha_py_layer *layer);
void mha_py_point_joint(mha_py_call *call, const mha_py_layer *layer, const mha_py_array *weight,
                        const mha_py_array *bias, mha_layer_grads *grads);
void mha_py_join_gradients(const mha_py_layer *layer, const mha_layer_grads *grads, const mha_py_array *weight,
                           const mha_py_array *bias);

/* Tells the core the sizes that the layer's inputs have now. */
void mha_py_note_sizes(mha_py_layer *layer);

/* From now on keys and values count as projected: `n_keys` rows of each. */
void mha_py_use_projected(mha_py_layer *layer, npy_intp n_keys);

/* The forward call: (out, kept). */
PyObject *mha_py_run_layer(mha_py_call *call, mha_py_layer *layer, PyObject *const *values, int training);

/*
 * What a forward call keeps of itself, a tuple in this order.  The first ten are enough for the attention weights:
 * the instruction set; the weights themselves, or queries and keys as they were scored (projected by the core, or
 * copies of the inputs), a copy of w_v and the row statistics; a copy of the lengths; two options.  A call in training
 * keeps more for the backward call: the projected values, what W_o was applied to (without W_o, a copy of the
 * output), and the seed.  The last entry belongs to the weights again: the options that they depend on, with copies of
 * the masks; without such options, a call that is not in training has only the first ten.  An entry that is not kept is
 * None.
 */
enum {
    MHA_PY_KEPT_ISA,
    MHA_PY_KEPT_WEIGHTS,
    MHA_PY_KEPT_Q,
    MHA_PY_KEPT_K,
    MHA_PY_KEPT_W_V,
    MHA_PY_KEPT_ROW_MAX,
    MHA_PY_KEPT_ROW_SUM,
    MHA_PY_KEPT_LENS,
    MHA_PY_KEPT_HEADS,
    MHA_PY_KEPT_EMPTY,
    MHA_PY_N_KEPT_FOR_WEIGHTS,
    MHA_PY_KEPT_V = MHA_PY_N_KEPT_FOR_WEIGHTS,
    MHA_PY_KEPT_CONTEXT,
    MHA_PY_KEPT_SEED,
    MHA_PY_KEPT_OPTIONS,
    MHA_PY_N_KEPT
};

typedef struct {
    const char *name;
    int rank, wanted; /* wanted: by this call */
    npy_intp dims[4];
    void **place; /* among the core's arguments; NULL: the core does not fill it in */
} mha_py_kept_array;

/* Describes the entries that are arrays of numbers, for this layer; of the others it says that none is wanted. */
void mha_py_list_kept(mha_py_layer *layer, int training, mha_py_kept_array kept[MHA_PY_N_KEPT]);

#endif /* MHA_PY_LAYER_CALL_H */
