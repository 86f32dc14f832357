/*
 * layer_call.h: the arguments that layer_forward, layer_forward_training and layer_backward share,
 * taken and checked in one place (args_layer.c), and what a layer's backward call needs (its tape).
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef MHA_PY_LAYER_CALL_H
#define MHA_PY_LAYER_CALL_H

#include "args.h"

/* queries, keys, values, valid_lens, projections, w_v, num_heads, empty_rows, dropout, seed */
#define MHA_PY_N_LAYER 10

/* W[0..3] are W_q, W_k, W_v, W_o, as in mha_layer_grads. */
enum { MHA_PY_W_Q, MHA_PY_W_K, MHA_PY_W_V, MHA_PY_W_O, MHA_PY_N_PROJECTIONS };
extern const char *const mha_py_projection_names[MHA_PY_N_PROJECTIONS];

typedef struct {
    mha_py_array queries, keys, values, w_v;
    mha_py_projection W[MHA_PY_N_PROJECTIONS];
    mha_py_lengths lengths;
    npy_intp heads, qk_features, value_features, out_features;
    mha_layer_args args; /* all but the outputs */
} mha_py_layer;

typedef enum {
    MHA_PY_PROJECTIONS, /* as mha_py_take_projection has them */
    MHA_PY_WEIGHTS      /* four dense (out_features, in_features) arrays, each or None, for the backward call */
} mha_py_projection_kind;

/* values: one for each of the names, tensors among them viewed already.  *layer is zeroed by the caller. */
int mha_py_take_layer(PyObject *module, PyObject *const *values, mha_py_projection_kind kind, mha_py_views *views,
                      mha_py_layer *layer);
void mha_py_drop_layer(mha_py_layer *layer);
double mha_py_layer_work(const mha_py_layer *layer); /* multiply-adds of a forward call, roughly */

/*
 * What a forward call keeps of itself, for attention_weights and, in training, for the backward call: the
 * weights, or queries and keys as they were scored, with the row statistics.
 */
typedef struct {
    int weights, queries, keys, statistics;
} mha_py_kept;

mha_py_kept mha_py_what_is_kept(const mha_py_layer *layer, int training); /* py_layer.c */

/* layer_forward_training's third result, a tuple of these; None where there is nothing to keep. */
enum {
    MHA_PY_TAPE_Q, /* projected queries, keys and values */
    MHA_PY_TAPE_K,
    MHA_PY_TAPE_V,
    MHA_PY_TAPE_CONTEXT, /* what W_o was applied to; without W_o, a copy of the output */
    MHA_PY_TAPE_MAX,     /* row statistics */
    MHA_PY_TAPE_SUM,
    MHA_PY_TAPE_LENS, /* a private copy of the lengths */
    MHA_PY_N_TAPE
};

#endif /* MHA_PY_LAYER_CALL_H */
