/*
 * args.h: what every binding function shares: positional arguments, the array and length
 * borrowers, output allocation, error texts and the one status translator.
 *
 * Convention throughout: 0 or a new reference is success; -1 or NULL means that a Python
 * exception is set.  Names in messages are the caller's (q, queries, ...), passed down.
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

/* Everything the module keeps; one per module object, so no C globals. */
typedef struct {
    PyObject *shape_error; /* mha_c.ShapeError, a ValueError */
    PyObject *exchange, *tensor_type, *parameter_type; /* see args_tensors.c; NULL without torch */
    PyObject *is_neg; /* the name of a tensor's method */
} mha_py_state;

/* --- Arguments: args.c ------------------------------------------------------------- */

#define MHA_PY_MAX_ARGS 24

/* All functions are positional.  values[i] becomes the i-th argument (borrowed), NULL where the call ends before. */
int mha_py_arguments(const char *function, PyObject *const *args, Py_ssize_t n_args, int least, int most,
                     PyObject **values);

/* `name must be <expected>, got <type>`: sets TypeError and returns -1. */
int mha_py_type_error(PyObject *value, const char *name, const char *expected);

/* A real number that is not NaN: no bool, text, complex or array. */
int mha_py_real(PyObject *value, const char *name, double *number_ret);

/* A whole number >= least; what does not fit 64 bits becomes the largest that does. */
int mha_py_whole(PyObject *value, const char *name, int64_t least, int64_t *number_ret);

/* The position of a string in `choices`, which ends with NULL. */
int mha_py_choice(PyObject *value, const char *name, const char *const *choices, int *choice_ret);

int mha_py_empty_rows(PyObject *value, mha_empty *empty_ret);
int mha_py_probability(PyObject *value, const char *name, double *number_ret);
int mha_py_flag(PyObject *value, int *flag_ret); /* NULL: 0 */
int mha_py_seed(PyObject *value, uint64_t *seed_ret);

/* --- Errors and calls: args.c -------------------------------------------------------- */

/* Sets ShapeError with a PyUnicode_FromFormat text; always returns -1. */
int mha_py_shape_error(PyObject *module, const char *format, ...);

/* The only place that turns a status into an exception. */
int mha_py_check(mha_status status, const char *function);

/*
 * Let other threads run during a core call of `work` multiply-adds.  Below the threshold
 * nothing is released (NULL): a handful of microseconds is shorter than waiting to get
 * the interpreter back from a busy thread.
 */
PyThreadState *mha_py_detach(double work);
void mha_py_attach(PyThreadState *saved);

/* --- Arrays: args_arrays.c ----------------------------------------------------------- */

#define MHA_PY_MAX_RANK 4

/* A borrowed view of one operand: pointer and sizes are taken once and then trusted. */
typedef struct {
    const char *name;     /* in the caller's words */
    PyArrayObject *array; /* owned; mha_py_drop releases it */
    const void *data;
    int type; /* NPY_FLOAT32, NPY_FLOAT64 or NPY_BOOL */
    int rank;
    npy_intp shape[MHA_PY_MAX_RANK];
    ptrdiff_t stride[MHA_PY_MAX_RANK]; /* in numbers; dense for axes of length 0 or 1 */
} mha_py_array;

typedef enum {
    MHA_PY_ROWS,  /* last axis dense, the others with any stride */
    MHA_PY_DENSE, /* C-contiguous throughout */
    MHA_PY_LOOSE  /* any stride on any axis */
} mha_py_layout;

/*
 * float32 or float64 ndarray of rank 1..4 -> *array; copied only where `layout`, alignment,
 * byte order or an odd stride asks for it.  `like`, if given, fixes the type.
 */
int mha_py_take(mha_py_array *array, PyObject *value, const char *name, mha_py_layout layout, const mha_py_array *like);
void mha_py_drop(mha_py_array *array);

/* The same for one particular dtype, checked by the caller. */
int mha_py_take_as(mha_py_array *array, PyArrayObject *value, const char *name, int type, mha_py_layout layout);

/* A float32 or float64 ndarray of any rank (owned); TypeError with a hint otherwise. */
PyArrayObject *mha_py_floats(PyObject *value, const char *name);

/* The same, of like's type unless that is NULL; TypeError naming both otherwise. */
PyArrayObject *mha_py_floats_like(PyObject *value, const char *name, const mha_py_array *like);

/* The array as a dense, aligned, native one (new reference); a copy only if it is not. */
PyArrayObject *mha_py_dense(PyArrayObject *array, int type);

/* Rank check; `expected` is what the message shows, for example "(B, Q, features)". */
int mha_py_need_rank(PyObject *module, const mha_py_array *array, int rank, const char *expected);

/*
 * ShapeError unless a's axis and b's agree.  `what` is a format with one %zd, for example
 * "batch size %zd": `keys has batch size 3, but queries has 2: keys.shape = ...`.
 */
int mha_py_need_same(PyObject *module, const char *what, const mha_py_array *a, int axis_a, const mha_py_array *b,
                     int axis_b);

mha_operand mha_py_operand(const mha_py_array *array);
mha_dtype mha_py_dtype(const mha_py_array *array);
size_t mha_py_itemsize(int type);

/* ShapeError unless the shape is exactly this one: `grad_out has shape ..., expected ...`. */
int mha_py_need_shape(PyObject *module, const mha_py_array *array, int rank, const npy_intp *dims);

/* dims as a tuple, for %S in messages. */
PyObject *mha_py_shape(int rank, const npy_intp *dims);

/* Uninitialised or zeroed output; ValueError if its size wraps, MemoryError if it is not to be had. */
PyArrayObject *mha_py_new(const char *name, int rank, const npy_intp *dims, int type);
PyArrayObject *mha_py_zeros(const char *name, int rank, const npy_intp *dims, int type);

/* A dense output of rank 3 or 4 as the core takes it. */
mha_result mha_py_result(PyArrayObject *array);

/* The array or None, borrowed: for PyTuple_Pack and the like. */
PyObject *mha_py_borrow(PyArrayObject *array);

/* --- Tensors: args_tensors.c -------------------------------------------------------------- */

/* The tensors of a call, borrowed, and an array on the memory of each. */
typedef struct {
    PyObject *tensor[MHA_PY_MAX_ARGS], *array[MHA_PY_MAX_ARGS];
    int n;
} mha_py_views;

/*
 * Puts arrays in the place of tensors among the arguments.  BufferError if that cannot be (another device, layout
 * or type of number); *views is zeroed by the caller and dropped by it in either case.
 */
int mha_py_view_tensors(PyObject *module, PyObject **values, int n, mha_py_views *views);
PyObject *mha_py_view_tensor(PyObject *module, PyObject *value, mha_py_views *views); /* one: borrowed, or NULL */
void mha_py_drop_views(mha_py_views *views);

/* A new reference to a float result: a tensor on its memory if the call had tensors, else itself; None for NULL. */
PyObject *mha_py_answer(PyObject *module, PyArrayObject *array, const mha_py_views *views);
/* Several of them, as a tuple. */
PyObject *mha_py_answers(PyObject *module, PyArrayObject *const *arrays, int n, const mha_py_views *views);

/* --- Masks and lengths: args_masks.c, args_lengths.c ---------------------------------- */

/* bias of like's type, or, where like is NULL, a bool keep_mask; any strides. */
int mha_py_take_mask(PyObject *value, const char *name, const mha_py_array *like, mha_py_array *array);

/* Its strides over scores of shape (B, Q, K) or (B, H, Q, K), axes of length 1 repeated. */
int mha_py_broadcast(PyObject *module, const mha_py_array *array, int rank, const npy_intp *scores, mha_mask *mask_ret);

/* A private snapshot of valid_lens; array is NULL where all keys are valid. */
typedef struct {
    PyArrayObject *array; /* owned, int64, dense */
    const int64_t *data;
    size_t per_batch; /* 1, or the number of queries */
} mha_py_lengths;

int mha_py_take_lengths(PyObject *module, PyObject *value, npy_intp batch, npy_intp queries,
                        mha_py_lengths *lengths_ret);
void mha_py_drop_lengths(mha_py_lengths *lengths);
mha_visibility mha_py_visibility(const mha_py_lengths *lengths);

/* --- The arguments of attention: args_attention.c ----------------------------------------- */

/* q, k, v, w_v, valid_lens, keep_mask, bias, causal, window_left, window_right, scale, dropout, seed, empty_rows */
#define MHA_PY_N_ATTENTION 14

typedef struct {
    mha_py_array q, k, v, w_v, keep_mask, bias, relative_bias, sinks;
    mha_py_lengths lengths;
    npy_intp scores[4];      /* (B, Q, K) or (B, H, Q, K), as many axes as q has */
    npy_intp out_shape[4];   /* the same with Dv in the last place */
    mha_attention_args args; /* all but the outputs */
} mha_py_attention;

/* values: one for each of the names, NULL where not given.  *attention is zeroed by the caller. */
int mha_py_take_attention(PyObject *module, PyObject *const *values, mha_py_attention *attention);

/* None, or (item, head, query, key): where the call's first ones stand in a larger call of which it is a part. */
int mha_py_take_origin(PyObject *value, mha_attention_args *args);
/* None, or (relative_bias or None, softcap, sinks or None), once the rest is there. */
int mha_py_take_score_terms(PyObject *module, PyObject *value, mha_py_attention *attention);
void mha_py_drop_attention(mha_py_attention *attention);
double mha_py_attention_work(const mha_py_attention *attention); /* multiply-adds, roughly */

/* --- Projections: py_linear.c ----------------------------------------------------------- */

typedef struct {
    const char *name; /* W_q ... */
    mha_py_array weight, bias;
    mha_linear linear;
} mha_py_projection;

/* x (..., features) of any rank from 1 as rows (n, features): merged without copying where it can be. */
#define MHA_PY_MAX_AXES 64 /* NumPy's own limit is 32 or 64 */

typedef struct {
    mha_py_array rows;
    int rank; /* of x as it was given */
    npy_intp dims[MHA_PY_MAX_AXES];
} mha_py_rows;

int mha_py_take_rows(PyObject *module, PyObject *value, const char *name, const mha_py_array *like, mha_py_rows *rows);

/*
 * None; or (weight, bias or None) with a row-major (out_features, in_features) weight, read at the call; or
 * (packed, bias or None, (out_features, in_features)).  Never trusted for memory.
 */
int mha_py_take_projection(PyObject *module, PyObject *value, const char *name, const mha_py_array *like,
                           mha_py_views *views, mha_py_projection *projection);
void mha_py_drop_projection(mha_py_projection *projection);

/* --- The module's functions --------------------------------------------------------------- */

/* Described in mha_c/_core.pyi. */
typedef PyObject *mha_py_many(PyObject *module, PyObject *const *args, Py_ssize_t n_args);
typedef PyObject *mha_py_one(PyObject *module, PyObject *value); /* value NULL: takes nothing */

mha_py_many py_attention_forward, py_attention_backward, py_attention_weights;
mha_py_many py_masked_softmax, py_dropout_factors;
mha_py_many py_layer_forward, py_layer_forward_training, py_layer_backward;
mha_py_many py_linear, py_linear_backward, py_serve_tensors, py_layer_parts, py_same_numbers;
mha_py_many py_explain_attention, py_explain_layer, py_explain_linear;
mha_py_one py_pack_linear, py_exp, py_tanh;
mha_py_one py_explain_kernels, py_isas, py_isa, py_set_isa;
mha_py_one py_get_num_threads, py_set_num_threads, py_available_threads;

#endif /* MHA_PY_ARGS_H */
