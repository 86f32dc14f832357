/*
 * py_explain.c: what a call would do: the facts of mha_*_explain as dicts.
 *
 * Each function takes the arguments of the call that it explains, checked by the same code, and gives the
 * core the same structs; where the call would allocate results, any address that is not NULL serves.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "layer_call.h" /* first: Python.h sets what system headers look at */

#include "mha_explain.h"

/* Where a record has which fact, and what it is; a group is a record within it. */
typedef struct field {
    const char *name;
    enum { COUNT, FLAG, SECONDS, WORD, GROUP } kind;
    size_t offset;
    const struct field *group;
} field;
#define FIELD(kind, record, name) {#name, kind, offsetof(record, name), NULL}
#define RECORD(record, name, fields) {#name, GROUP, offsetof(record, name), fields}
#define END {NULL}

/* By hand: clang-format writes a line for each. */
/* clang-format off */
#define OF(kind, name) FIELD(kind, mha_kernel_facts, name)
static const field kernel_fields[] = {
    OF(WORD, isa), OF(COUNT, itemsize), OF(COUNT, lanes), OF(COUNT, tile_rows), OF(COUNT, tile_columns), END
};
#undef OF
#define OF(kind, name) FIELD(kind, mha_share_facts, name)
static const field share_fields[] = {
    OF(COUNT, n_tasks), OF(COUNT, n_threads), OF(COUNT, most_threads), OF(WORD, reason), OF(SECONDS, seconds),
    OF(SECONDS, least_seconds), OF(SECONDS, least_each), END
};
#undef OF
static const field core_fields[] = {
    RECORD(mha_core_facts, float32, kernel_fields), RECORD(mha_core_facts, float64, kernel_fields),
    RECORD(mha_core_facts, share, share_fields), END
};
#define OF(kind, name) FIELD(kind, mha_attention_facts, name)
static const field attention_fields[] = {
    RECORD(mha_attention_facts, share, share_fields), RECORD(mha_attention_facts, kernels, kernel_fields),
    OF(COUNT, scratch_bytes), OF(COUNT, batch), OF(COUNT, heads), OF(COUNT, kv_heads), OF(COUNT, queries),
    OF(COUNT, keys), OF(COUNT, head_dim), OF(COUNT, value_dim), OF(COUNT, key_block), OF(COUNT, tile_queries),
    OF(COUNT, task_queries), OF(COUNT, task_heads), OF(COUNT, n_splits), OF(FLAG, by_columns), OF(FLAG, weights_again),
    OF(COUNT, n_tiles), OF(COUNT, n_tiles_all), OF(COUNT, most_blocks), END
};
#undef OF
#define OF(kind, name) FIELD(kind, mha_linear_facts, name)
static const field linear_fields[] = {
    OF(COUNT, rows), OF(COUNT, rows_needed), OF(COUNT, in_features), OF(COUNT, out_features), OF(COUNT, task_rows),
    RECORD(mha_linear_facts, share, share_fields), END
};
#undef OF
#define OF(kind, name) FIELD(kind, mha_layer_facts, name)
static const field layer_fields[] = {
    OF(COUNT, slice_items), OF(COUNT, n_slices), OF(COUNT, scratch_bytes),
    RECORD(mha_layer_facts, attention, attention_fields), END
};
#undef OF
/* clang-format on */

static PyObject *dict_of(const field *fields, const void *record);

static PyObject *
fact_of(const field *field, const void *record)
{
    const void *at = (const char *)record + field->offset;

    switch (field->kind) {
    case COUNT: return PyLong_FromSize_t(*(const size_t *)at);
    case FLAG: return PyBool_FromLong(*(const int *)at);
    case SECONDS: return PyFloat_FromDouble(*(const double *)at);
    case WORD: return PyUnicode_FromString(*(const char *const *)at);
    default: return dict_of(field->group, at);
    }
}

/* dict[name] = value, whose reference it takes; 0 and an exception if that fails, or if value is NULL. */
static int
put(PyObject *dict, const char *name, PyObject *value)
{
    const int done = value != NULL && PyDict_SetItemString(dict, name, value) == 0;

    Py_XDECREF(value);
    return done;
}

static PyObject *
dict_of(const field *fields, const void *record)
{
    PyObject *dict = PyDict_New();

    for (const field *field = fields; dict != NULL && field->name != NULL; field++) {
        if (!put(dict, field->name, fact_of(field, record))) {
            Py_CLEAR(dict);
        }
    }
    return dict;
}

/* The facts, unless the core refused. */
static PyObject *
told(mha_py_call *call, mha_status status, const field *fields, const void *record)
{
    mha_py_check(call, status, call->function);
    return call->failed ? NULL : dict_of(fields, record);
}

PyObject *
py_explain_kernels(mha_py_call *call, PyObject *const *Py_UNUSED(values))
{
    mha_core_facts facts;

    mha_kernels_explain(&facts);
    return told(call, MHA_OK, core_fields, &facts);
}

PyObject *
py_explain_attention(mha_py_call *call, PyObject *const *values)
{
    enum { WEIGHTS = MHA_PY_N_ATTENTION, LSE, TERMS };
    mha_py_attention attention = {0};
    mha_attention_facts facts;
    const int weights = mha_py_flag(call, values[WEIGHTS]), lse = mha_py_flag(call, values[LSE]);

    mha_py_take_attention(call, values, NULL, values[TERMS], &attention);
    attention.args.out.data = &attention;
    attention.args.weights = weights ? &attention : NULL;
    attention.args.lse = lse ? &attention : NULL;
    if (call->failed) {
        return NULL;
    }
    return told(call, mha_attention_explain(&attention.args, &facts), attention_fields, &facts);
}

/* Asks for the outputs that the call would ask for; returns how many bytes of them the layer keeps until the next. */
static double
want_kept(mha_py_layer *layer, int training)
{
    mha_py_kept_array kept[MHA_PY_N_KEPT];
    double bytes = 0;

    layer->args.out = layer;
    mha_py_list_kept(layer, training, kept);
    for (int i = 0; i < MHA_PY_N_KEPT; i++) {
        double size = (double)mha_py_itemsize(layer->queries.type);

        if (!kept[i].wanted) {
            continue;
        }
        for (int axis = 0; axis < kept[i].rank; axis++) {
            size *= (double)kept[i].dims[axis];
        }
        bytes += size;
        if (kept[i].place != NULL) {
            *kept[i].place = layer;
        }
    }
    return bytes;
}

/* Of the projections that the layer has. */
static PyObject *
projections_of(const mha_py_layer *layer, const mha_layer_facts *facts)
{
    static const char *const names[MHA_PY_N_PROJECTIONS] = {"W_q", "W_k", "W_v", "W_o"};
    const mha_linear *const linears[] = {&layer->args.W_q, &layer->args.W_k, &layer->args.W_v, &layer->args.W_o};
    PyObject *dict = PyDict_New();

    for (int i = 0; dict != NULL && i < MHA_PY_N_PROJECTIONS; i++) {
        if (linears[i]->weight != NULL && !put(dict, names[i], dict_of(linear_fields, &facts->projections[i]))) {
            Py_CLEAR(dict);
        }
    }
    return dict;
}

PyObject *
py_explain_layer(mha_py_call *call, PyObject *const *values)
{
    mha_py_layer layer = {0};
    mha_layer_facts facts;
    const int training = mha_py_flag(call, values[MHA_PY_N_LAYER]);

    mha_py_take_layer(call, values, &layer);
    if (call->failed) {
        return NULL;
    }
    const size_t kept_bytes = (size_t)want_kept(&layer, training);
    mha_py_limit_threads(call); /* as the call would */
    const mha_status status = mha_layer_explain(&layer.args, &facts);
    mha_threads_limit_own(0);
    PyObject *told_facts = told(call, status, layer_fields, &facts);
    if (told_facts != NULL &&
        !(put(told_facts, "projections", projections_of(&layer, &facts)) &&
          put(told_facts, "kept_bytes", PyLong_FromSize_t(kept_bytes)) &&
          put(told_facts, "kept", PyUnicode_FromString(layer.args.weights != NULL ? "weights" : "queries and keys")))) {
        Py_CLEAR(told_facts);
    }
    return told_facts;
}

PyObject *
py_explain_linear(mha_py_call *call, PyObject *const *values)
{
    mha_py_rows x = {.rank = 0};
    mha_py_projection projection = {.linear = {0}};
    mha_linear_facts facts;

    mha_py_take_rows(call, values[0], "x", NULL, &x);
    mha_py_take_projection(call, values[1], "projection", &x.rows, &projection);
    if (call->failed) {
        return NULL;
    }
    const mha_dtype dtype = mha_py_dtype(x.rows.type);
    const size_t rows = (size_t)x.rows.shape[0];
    return told(call, mha_linear_explain(dtype, &projection.linear, rows, &facts), linear_fields, &facts);
}
