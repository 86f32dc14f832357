/*
 * args.h: what every binding function shares: the call and what it owns, arguments, arrays and lengths as the core
 * takes them, outputs, refusals and the one status translator.
 *
 * Convention throughout: call->failed means that a Python exception is set.  From then on functions that take an
 * argument or make an output do nothing, and give zeros or NULL: an entry reads as a list, and looks once, before it
 * computes.  The first exception stays.  Code that uses an argument's sizes looks before: they mean nothing if the call
 * failed.  C decides what is safe for memory; mha_c/_arguments/core_refusals.py says why something is refused.
 * Only functions and types of the limited API; NumPy's C API is confined to this folder.
 */
#ifndef MHA_PY_ARGS_H
#define MHA_PY_ARGS_H

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>

#ifndef NPY_NO_DEPRECATED_API
#define NPY_NO_DEPRECATED_API NPY_1_21_API_VERSION
#endif
#ifndef NPY_TARGET_VERSION
#define NPY_TARGET_VERSION NPY_1_21_API_VERSION
#endif
#define PY_ARRAY_UNIQUE_SYMBOL mha_core_ARRAY_API
#ifndef MHA_PY_IMPORTS_NUMPY /* module.c alone defines it */
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "mha.h"

/* --- Calls: call.c ------------------------------------------------------------------------ */

#define MHA_PY_MAX_ARGS 24
#define MHA_PY_MAX_OWNED 128

/* What the module keeps, one set per module object: what it is given of torch (NULL without torch), and names. */
enum {
    MHA_PY_EXCHANGE, /* see torch/tensors.c */
    MHA_PY_TENSOR,
    MHA_PY_PARAMETER,
    MHA_PY_IS_NEG,        /* the method of a tensor, bound to any */
    MHA_PY_TORCH_THREADS, /* torch.get_num_threads */
    MHA_PY_N_OF_TORCH,
    MHA_PY_ISA_NAMES = MHA_PY_N_OF_TORCH, /* of all instruction sets: making one takes 4 % of the smallest call */
    MHA_PY_N_OBJECTS = MHA_PY_ISA_NAMES + MHA_N_ISAS
};
typedef struct {
    PyObject *objects[MHA_PY_N_OBJECTS];
    const struct dl_exchange *exchange; /* what objects[MHA_PY_EXCHANGE] holds, if it is a capsule */
} mha_py_state;

/*
 * One call of a function.  Whatever it comes to own, arrays and views on tensors, is noted here and released at its
 * end, however far it got.
 */
typedef struct {
    const char *function;
    mha_py_state *state;
    PyThreadState *detached; /* while other threads may run */
    int failed;              /* an exception is set */
    int has_tensors;         /* an argument is a tensor: then results are tensors, too */
    int n_owned;
    PyObject *owned[MHA_PY_MAX_OWNED];
} mha_py_call;

/*
 * What a function of the module does with its arguments: values[i] is argument i (borrowed), or NULL if the caller gave
 * fewer; all are positional.  mha_py_run begins and ends the call around it.
 */
typedef PyObject *mha_py_function(mha_py_call *call, PyObject *const *values);

typedef struct {
    const char *name;
    mha_py_function *run;
    int least, most; /* arguments */
} mha_py_entry;

PyObject *mha_py_run(const mha_py_entry *entry, PyObject *module, PyObject *const *args, Py_ssize_t n_args);

/* Takes over the reference and returns the object; if it is NULL or one too many: NULL, and the call failed. */
PyObject *mha_py_own(mha_py_call *call, void *object);

/*
 * Let other threads run during a core call of `work` multiply-adds, and come back with its status.  Below the threshold
 * the interpreter is not released: to wait for it again takes longer than such a call.  On tensors the core uses no
 * more threads than torch may: a limit for this call alone.
 */
void mha_py_limit_threads(const mha_py_call *call);
void mha_py_here_are_tensors(void); /* torch/team.c: whoever calls with tensors shares torch's threads */
void mha_py_detach(mha_py_call *call, double work);
void mha_py_attach(mha_py_call *call, mha_status status);

/* The only place that turns a status into an exception. */
void mha_py_check(mha_py_call *call, mha_status status, const char *what);

/*
 * Calls `question` of _arguments/core_refusals.py, with arguments built as by Py_BuildValue (`format` in brackets), and
 * returns its answer, a new reference.  If the answer is an exception, that is set, and NULL returned.
 */
PyObject *mha_py_ask(mha_py_call *call, const char *question, const char *format, ...);
#define mha_py_refuse(...) Py_XDECREF(mha_py_ask(__VA_ARGS__)) /* if only an exception can come */
void mha_py_type_error(mha_py_call *call, PyObject *value, const char *name, const char *expected);

/* --- Arguments that are no arrays: args.c ---------------------------------------------------- */

int mha_py_given(PyObject *value); /* neither left out nor None */

/* A real number that is not NaN: no bool, text, complex or array.  A probability is between 0 and 1. */
double mha_py_real(mha_py_call *call, PyObject *value, const char *name);
double mha_py_probability(mha_py_call *call, PyObject *value);

/* A whole number >= least; what does not fit 64 bits becomes the largest that does. */
int64_t mha_py_whole(mha_py_call *call, PyObject *value, const char *name, int64_t least);

/* The seed of dropout, a number or a function that draws one: 0 then, and it is drawn when all other arguments are
   known to be right, so that a refused call draws none. */
uint64_t mha_py_seed(mha_py_call *call, PyObject *value);
void mha_py_draw_seed(mha_py_call *call, PyObject *value, uint64_t *seed);

/* Which of two strings it is: 0 or 1. */
int mha_py_choice(mha_py_call *call, PyObject *value, const char *name, const char *first, const char *second);
mha_empty mha_py_empty_rows(mha_py_call *call, PyObject *value);
int mha_py_flag(mha_py_call *call, PyObject *value); /* NULL: 0 */

/* --- Arrays: args_arrays.c ----------------------------------------------------------- */

#define MHA_PY_MAX_RANK 4
#define MHA_PY_MAX_AXES 64 /* of what is not looked at: NumPy's own limit is 32 or 64 */

/* A borrowed view of one operand: pointer and sizes are taken once and then trusted. */
typedef struct {
    PyObject *array; /* or tensor, the caller's or the call's; NULL: none was given */
    const void *data;
    const char *name; /* in the caller's words */
    int type;         /* NumPy's number: once it is taken, NPY_FLOAT32, NPY_FLOAT64 or NPY_BOOL */
    int rank;         /* above MHA_PY_MAX_RANK, or 0, there are no sizes: no caller wants such a rank */
    npy_intp shape[MHA_PY_MAX_RANK];
    ptrdiff_t stride[MHA_PY_MAX_RANK]; /* in numbers; dense for axes of length 0 or 1 */
} mha_py_array;

typedef enum {
    MHA_PY_ROWS,  /* last axis dense, the others with any stride */
    MHA_PY_DENSE, /* C-contiguous throughout */
    MHA_PY_LOOSE  /* any stride on any axis */
} mha_py_layout;

/*
 * A float32 or float64 ndarray, or tensor -> *array; copied only where `layout`, alignment, byte order or an odd
 * stride asks for it.  `like`, if given, fixes the type.
 */
void mha_py_take(mha_py_call *call, PyObject *value, const char *name, mha_py_layout layout, const mha_py_array *like,
                 mha_py_array *array);
/* The numbers of such an array, dense and of this shape. */
void *mha_py_take_numbers(mha_py_call *call, PyObject *value, const char *name, int rank, const npy_intp *dims,
                          const mha_py_array *like);
/* mha_py_take in two steps: an array of any rank, then its layout (type: the array's own, checked by the caller). */
PyArrayObject *mha_py_floats(mha_py_call *call, PyObject *value, const char *name, const mha_py_array *like);
void mha_py_lay_out(mha_py_call *call, PyArrayObject *value, const char *name, mha_py_layout layout,
                    mha_py_array *array);
int mha_py_is_float(int type, const mha_py_array *like);
/* 1 if it lies as `layout` says.  Axes of length 0 or 1, whose stride means nothing, get that of a dense array. */
int mha_py_fits(mha_py_array *array, mha_py_layout layout);

/* ShapeError unless the rank, or the whole shape, is this; `expected` is what the message shows: "(B, Q, features)". */
void mha_py_need_rank(mha_py_call *call, const mha_py_array *array, int rank, const char *expected);
void mha_py_need_shape(mha_py_call *call, const mha_py_array *array, int rank, const npy_intp *dims);

mha_operand mha_py_operand(const mha_py_array *array);
/* Copies rows, which lie `stride` bytes apart, to where they lie side by side. */
void mha_py_copy_rows(char *to, const char *from, npy_intp rows, npy_intp row_bytes, ptrdiff_t stride);
mha_dtype mha_py_dtype(int type);
size_t mha_py_itemsize(int type);
PyObject *mha_py_or_none(const void *array);            /* borrowed */
PyObject *mha_py_active_isa(const mha_py_call *call);   /* its name; borrowed */
PyObject *mha_py_shape(int rank, const npy_intp *dims); /* dims as a tuple */

/* --- Results: results.c -------------------------------------------------------------------- */

/* Memory of the call's own: a dense array, uninitialised.  ValueError if its size wraps, else MemoryError. */
PyArrayObject *mha_py_new(mha_py_call *call, const char *name, int rank, const npy_intp *dims, int type);
void *mha_py_data(PyArrayObject *array); /* NULL of NULL */

/*
 * A result, uninitialised: what the caller gets, a tensor if the call had tensors, else an array; owned by the call
 * until it is the answer.  Dense, or with strides (in numbers) that leave no gaps.
 */
void mha_py_new_result(mha_py_call *call, const char *name, int rank, const npy_intp *dims, int type,
                       mha_py_array *result);
void mha_py_new_strided(mha_py_call *call, const char *name, int rank, const npy_intp *dims, const npy_intp *strides,
                        int type, mha_py_array *result);
void *mha_py_numbers(const mha_py_array *result);     /* where the core writes it; NULL of none */
double mha_py_count(const mha_py_array *result);      /* how many numbers; at most MHA_PY_MAX_RANK axes */
void mha_py_clear(const mha_py_array *result);        /* makes all of them 0, if there is one */
mha_result mha_py_result(const mha_py_array *result); /* a dense one of rank 3 or 4 as the core takes it */

/* A new reference to a result, None of none; NULL if the call failed. */
PyObject *mha_py_answer(const mha_py_call *call, const mha_py_array *result);
PyObject *mha_py_answers(const mha_py_call *call, const mha_py_array *results, int n);     /* as a tuple */
PyObject *mha_py_finish(mha_py_call *call, mha_status status, const mha_py_array *result); /* attaches before */

/* torch/blocks.c: memory that begins on a cache line; that of large results is kept for later.  An array on it, not
   owned yet (strides in bytes; NULL: dense); or the memory's owner, a new reference. */
int mha_py_is_large(size_t bytes);
PyObject *mha_py_new_on_line(int rank, const npy_intp *dims, const npy_intp *strides, int type, size_t bytes);
PyObject *mha_py_new_block(size_t bytes, void **start);

/* --- Tensors: torch/tensors.c -------------------------------------------------------------- */

/* For a tensor, an array on its memory (BufferError if that cannot be); anything else as it is.  Borrowed. */
PyObject *mha_py_viewed(mha_py_call *call, PyObject *value);

int mha_py_is_tensor(const mha_py_call *call, PyObject *value);
/* Where a tensor's numbers lie, and its sizes, as long as it is left alone; 0, and perhaps an exception, where torch
   has no quick answer. */
int mha_py_look_at(mha_py_call *call, PyObject *value, mha_py_array *array);

/* mha_py_take for a float tensor, without an array in between; returns 1, or 0 if that is not possible. */
int mha_py_take_tensor(mha_py_call *call, PyObject *value, const char *name, mha_py_layout layout,
                       const mha_py_array *like, mha_py_array *array);

/* Makes the tensor of a result of so many bytes, and notes it: a new reference, NULL and an exception. */
PyObject *mha_py_new_tensor(const mha_py_call *call, const npy_intp *dims, const npy_intp *strides, size_t bytes,
                            mha_py_array *result);

/* --- Masks and lengths: args_masks.c; terms of scores: args_scores.c
 * ---------------------------------------------------------- */

/* A bias of like's type, or, if like is NULL, a bool keep_mask; any strides.  Not given: array->array is NULL. */
void mha_py_take_mask(mha_py_call *call, PyObject *value, const char *name, const mha_py_array *like,
                      mha_py_array *array);

/* The mask over scores of shape (B, Q, K) or (B, H, Q, K): axes of length 1 broadcast; without an array, no mask. */
mha_mask mha_py_broadcast(mha_py_call *call, const mha_py_array *array, int rank, const npy_intp *scores);

/* A private snapshot of valid_lens; array is NULL where all keys are valid. */
typedef struct {
    PyArrayObject *array; /* the call's: int64, dense */
    const int64_t *data;
    size_t per_batch; /* 1, or the number of queries */
} mha_py_lengths;

/* keys: how many there are, for a warning of masks; 0 if the lengths are no user's. */
void mha_py_take_lengths(mha_py_call *call, PyObject *value, npy_intp batch, npy_intp queries, npy_intp keys,
                         mha_py_lengths *lengths);
void mha_py_see_lengths(const mha_py_lengths *lengths, mha_visibility *visible); /* the rest of *visible stays */

/*
 * What a call of attention, or of a layer, has beside its operands.  values: NULL or None where it is not given. terms:
 * (relative_bias or None, softcap, sinks or None).
 */
typedef struct {
    PyObject *causal, *keep_mask, *bias, *window_left, *window_right, *scale, *terms;
} mha_py_score_values;

typedef struct {
    mha_py_array keep_mask, bias, relative_bias, sinks;
    mha_py_lengths lengths;
    int rank;
    npy_intp shape[4]; /* of the scores: (B, Q, K) or (B, H, Q, K), as many axes as `rank` says */
    double scale;      /* the core's arguments point to it if one was given */
} mha_py_scores;

/* Reads all of them that are no arrays: a number may be an object whose methods run. */
void mha_py_take_score_numbers(mha_py_call *call, const mha_py_score_values *values, mha_py_scores *scores,
                               mha_attention_args *args);
/* Lays lengths and masks, which are taken, over the scores, whose shape is known, and takes the terms. */
void mha_py_place_scores(mha_py_call *call, const mha_py_score_values *values, const mha_py_array *like,
                         mha_py_scores *scores, mha_attention_args *args);

/*
 * A mask as the core takes it.  One whose queries lie side by side, as in a transposed array, is copied so that a
 * query's keys do.
 */
mha_mask mha_py_place_mask(mha_py_call *call, const mha_py_array *array, const mha_py_scores *scores);
/* Makes the mask a copy of the call's own, (B or 1, H or 1, Q or 1, K or 1), which is returned; NULL without a mask. */
PyArrayObject *mha_py_copy_mask(mha_py_call *call, const mha_py_scores *scores, int type, mha_mask *mask);
/* The gradient of a mask's shape: it is summed over the axes along which the mask broadcasts. */
mha_mask_result mha_py_mask_gradient(mha_py_call *call, const mha_py_array *gradient, const mha_py_scores *scores);

/* --- The arguments of attention: args_attention.c ----------------------------------------- */

/* q, k, v, w_v, valid_lens, keep_mask, bias, causal, window_left, window_right, scale, dropout, seed, empty_rows */
#define MHA_PY_N_ATTENTION 14

typedef struct {
    mha_py_array q, k, v, w_v;
    mha_py_scores scores;    /* as many axes as q has */
    npy_intp out_shape[4];   /* theirs with Dv in the last place */
    mha_attention_args args; /* all but the outputs; not to be moved */
    double work;             /* multiply-adds, roughly */
} mha_py_attention;

/*
 * values: one for each of the names, NULL if not given.  origin: None, or, for a part of a larger call, the places
 * (item, head, query, key) of its first ones in that call.  terms: None, or (relative_bias or None, softcap, sinks or
 * None).  *attention is zeroed by the caller.
 */
void mha_py_take_attention(mha_py_call *call, PyObject *const *values, PyObject *origin, PyObject *terms,
                           mha_py_attention *attention);

/* The row statistics of an earlier call, for those that read them. */
void mha_py_take_statistics(mha_py_call *call, PyObject *row_max, PyObject *row_sum, mha_py_attention *attention);

/* --- Projections: args_linear.c ----------------------------------------------------------- */

typedef struct {
    mha_py_array weight; /* its name: W_q ... */
    mha_linear linear;
} mha_py_projection;

/*
 * (weight, bias or None) with a row-major (out_features, in_features) weight, read at the call; or
 * (packed, bias or None, (out_features, in_features)).  Never trusted for memory.
 */
void mha_py_take_projection(mha_py_call *call, PyObject *value, const char *name, const mha_py_array *like,
                            mha_py_projection *projection);
void mha_py_take_in_rows(mha_py_call *call, PyObject *weight, PyObject *bias, const char *name,
                         const mha_py_array *like, mha_py_projection *projection); /* the first kind */

/* The shape of what pack_linear makes of such a weight for the active instruction set: (., width of a panel). */
void mha_py_packed_shape(mha_py_call *call, mha_dtype dtype, const mha_linear *linear, npy_intp shape[2]);

/* x (..., features) of any rank from 1 as rows (n, features): merged without copying where it can be. */
typedef struct {
    mha_py_array rows;
    int rank; /* of x as it was given */
    npy_intp dims[MHA_PY_MAX_AXES];
} mha_py_rows;

void mha_py_take_rows(mha_py_call *call, PyObject *value, const char *name, const mha_py_array *like,
                      mha_py_rows *rows);

/* --- The module's functions --------------------------------------------------------------- */

/* (name, fewest arguments, most), described in mha_c/_core.pyi: this list declares them and makes the method table. */
#define MHA_PY_FUNCTIONS(X) \
    X(attention_forward, 3, MHA_PY_N_ATTENTION + 5) \
    X(attention_backward, 6, MHA_PY_N_ATTENTION + 6) \
    X(attention_weights, 7, 8) \
    X(copy_operands, 2, 2) \
    X(masked_softmax, 3, 3) \
    X(dropout_factors, 3, 3) \
    X(layer_forward, 10, 12) \
    X(layer_step, 15, 17) \
    X(layer_backward, 13, 15) \
    X(layer_parts, 2, 2) \
    X(what_is_asked, 2, 2) \
    X(first_changed, 3, 3) \
    X(without_none, 1, 1) \
    X(with_none, 2, 2) \
    X(serve_tensors, 5, 5) \
    X(pack_linear, 1, 1) \
    X(linear, 2, 2) \
    X(linear_backward, 4, 4) \
    X(explain_attention, 3, MHA_PY_N_ATTENTION + 3) \
    X(explain_layer, 10, 12) \
    X(explain_linear, 2, 2) \
    X(explain_kernels, 0, 0) \
    X(isas, 0, 0) \
    X(isa, 0, 0) \
    X(set_isa, 1, 1) \
    X(get_num_threads, 0, 0) \
    X(set_num_threads, 1, 2) \
    X(has_team, 0, 0) \
    X(use_torch_threads, 1, 1)

#define MHA_PY_DECLARE(name, least, most) mha_py_function py_##name;
MHA_PY_FUNCTIONS(MHA_PY_DECLARE)

#endif /* MHA_PY_ARGS_H */
