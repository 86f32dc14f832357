/*
 * layer_call.h: what layer_forward, layer_forward_training, layer_backward, layer_gradients and explain_layer share:
 * their arguments, taken and checked in one place (args_layer.c), and what a forward call keeps of itself.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef MHA_PY_LAYER_CALL_H
#define MHA_PY_LAYER_CALL_H

#include "args.h"

/* The arguments: the projections are a tuple of four, or of nine (weights, their biases, w_v); the scorer is w_v. */
enum { MHA_PY_QUERIES, MHA_PY_KEYS, MHA_PY_VALUES, MHA_PY_LENS, MHA_PY_FOUR, MHA_PY_SCORER, MHA_PY_HEADS };
enum { MHA_PY_EMPTY = MHA_PY_HEADS + 1, MHA_PY_DROPOUT, MHA_PY_SEED, MHA_PY_N_LAYER };

/* W[0..3] are W_q, W_k, W_v, W_o, as in mha_layer_grads. */
enum { MHA_PY_W_Q, MHA_PY_W_K, MHA_PY_W_V, MHA_PY_W_O, MHA_PY_N_PROJECTIONS, MHA_PY_N_PARAMETERS = 9 };

typedef struct {
    mha_py_array queries, keys, values, w_v;
    mha_py_projection W[MHA_PY_N_PROJECTIONS];
    mha_py_lengths lengths;
    npy_intp heads, qk_features, value_features, out_features;
    mha_layer_args args; /* all but the outputs */
    double work;         /* multiply-adds of a forward call, roughly */
} mha_py_layer;

typedef enum {
    MHA_PY_PROJECTIONS, /* as mha_py_take_projection has them */
    MHA_PY_WEIGHTS      /* four dense (out_features, in_features) arrays, each or None, for the backward call */
} mha_py_projection_kind;

/* values: one for each of the names.  *layer is zeroed by the caller. */
int mha_py_take_layer(mha_py_call *call, PyObject *const *values, mha_py_projection_kind kind, mha_py_layer *layer);

/* From now on keys and values, `n_keys` rows of each, have been through their projections. */
void mha_py_use_projected(mha_py_layer *layer, npy_intp n_keys);

/* The forward call: (out, saved), or, in training, (out, saved, tape). */
PyObject *mha_py_run_layer(mha_py_call *call, mha_py_layer *layer, PyObject *const *values, int training);

/*
 * What a forward call keeps of itself, for attention_weights and, in training, for the backward call: the weights, or
 * queries and keys as they were scored (projected by the core, or copies of the inputs) with the row statistics; and in
 * training the projected values and the context, too.
 */
enum {
    MHA_PY_Q,
    MHA_PY_K,
    MHA_PY_V,
    MHA_PY_CONTEXT, /* what W_o was applied to; without W_o, a copy of the output */
    MHA_PY_ROW_MAX,
    MHA_PY_ROW_SUM,
    MHA_PY_N_TAPE_ARRAYS, /* layer_forward_training's third result: these, and behind them a copy of the lengths */
    MHA_PY_KEPT_WEIGHTS = MHA_PY_N_TAPE_ARRAYS,
    MHA_PY_N_KEPT_ARRAYS
};

typedef struct {
    const char *name;
    int rank, wanted; /* wanted: by this call */
    npy_intp dims[4];
    void **place; /* among the core's arguments; NULL: the core does not fill it in */
} mha_py_kept_array;

/* All of them for this layer, in the order of the enum. */
void mha_py_list_kept(mha_py_layer *layer, int training, mha_py_kept_array kept[MHA_PY_N_KEPT_ARRAYS]);

/* --- The backward call: py_layer_backward.c ------------------------------------------------------------------- */

/* The arguments, without what is needed. */
enum { MHA_PY_OF_GRAD_OUT, MHA_PY_OF_TAPE, MHA_PY_OF_QUERIES, MHA_PY_OF_KEYS, MHA_PY_OF_VALUES, MHA_PY_OF_WEIGHTS };
enum { MHA_PY_OF_W_V = MHA_PY_OF_WEIGHTS + 1, MHA_PY_OF_HEADS, MHA_PY_OF_EMPTY, MHA_PY_OF_DROPOUT, MHA_PY_OF_SEED };
enum { MHA_PY_N_BACKWARD = MHA_PY_OF_SEED + 1, MHA_PY_N_INPUTS = 3 };

typedef struct {
    int inputs[MHA_PY_N_INPUTS], weights[MHA_PY_N_PROJECTIONS], biases[MHA_PY_N_PROJECTIONS];
    int join;             /* gradients of inputs that are one object are added up in the first one's place */
    int scorer_as_weight; /* the gradient of w_v has the shape of the weight of an nn.Linear with one output */
} mha_py_needs;

typedef struct {
    PyArrayObject *inputs[MHA_PY_N_INPUTS], *weights[MHA_PY_N_PROJECTIONS], *biases[MHA_PY_N_PROJECTIONS], *w_v;
} mha_py_layer_grads;

/* A tuple of `n` truth values; not given: each is `otherwise`. */
int mha_py_take_needs(PyObject *value, const char *name, int n, int otherwise, int *needs);

/* Those that are needed, owned by the call; *made is zeroed by the caller. */
int mha_py_run_backward(mha_py_call *call, PyObject *const *values, const mha_py_needs *needs,
                        mha_py_layer_grads *made);

#endif /* MHA_PY_LAYER_CALL_H */
