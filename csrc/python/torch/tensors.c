/*
 * tensors.c: takes torch tensors where ndarrays are expected, and gives results as tensors, without a line of Python in
 * between: a small layer's tensor.numpy() and torch.from_numpy() cost more than its arithmetic.
 *
 * torch 2.10 and later offer DLPack's exchange functions in a capsule (dlpack.h, DLPackExchangeAPI), older ones two
 * built-in functions: _to_dlpack, which makes a capsule for each tensor, and from_numpy.  mha_c.torch hands over what
 * there is with `serve_tensors`; `look` and `adopt` alone know the difference.  Nothing of torch is compiled in or
 * linked.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "python/args.h"

#include <stdint.h>

/* --- DLPack, as published: layout and order are its ABI ------------------------------------- */

typedef struct {
    uint32_t major, minor;
} dl_version;

typedef struct {
    void *data;
    int32_t device, device_id;
    int32_t rank;
    uint8_t type, bits;
    uint16_t lanes;
    int64_t *shape, *stride; /* in numbers */
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
    dl_version version;
    void *owner;
    void (*release)(struct dl_managed *self);
    uint64_t flags;
    dl_tensor tensor;
} dl_managed;

typedef struct dl_exchange {
    dl_version version;
    void *older;
    void (*allocate)(void); /* these two are not used, nor is what follows `look` */
    void (*share)(void);
    int (*adopt)(dl_managed *managed, void **tensor_ret); /* steals `managed`, see `adopt_shared` */
    int (*look)(void *tensor, dl_tensor *tensor_ret);     /* good while the tensor is left alone */
} dl_exchange;

enum { DL_CPU = 1, DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BOOL = 6, DL_MAJOR = 1 };

/* The pair of built-in functions: (torch._C._to_dlpack, torch.from_numpy). */
enum { LOOK, ADOPT, N_FUNCTIONS };

/* --- Which tensors ------------------------------------------------------------------------------- */

/*
 * The exchange functions, or NULL for the pair of built-in functions; NULL and an exception for anything else.  A
 * function in Python is refused: it could change the tensors of a call, and what it did wrong would show far from here.
 */
static const dl_exchange *
exchange_of(PyObject *value)
{
    const dl_exchange *exchange;

    if (PyTuple_Check(value) && PyTuple_Size(value) == N_FUNCTIONS && PyCFunction_Check(PyTuple_GetItem(value, LOOK)) &&
        PyCFunction_Check(PyTuple_GetItem(value, ADOPT))) {
        return NULL;
    }
    exchange = PyCapsule_GetPointer(value, "dlpack_exchange_api");
    if (exchange != NULL && exchange->version.major != DL_MAJOR) {
        PyErr_Format(PyExc_ValueError, "DLPack %u is unknown here", (unsigned)exchange->version.major);
        return NULL;
    }
    return exchange;
}

PyObject *
py_serve_tensors(mha_py_call *call, PyObject *const *values)
{
    const dl_exchange *exchange = exchange_of(values[MHA_PY_EXCHANGE]);
    PyObject *const is_neg = values[MHA_PY_IS_NEG];

    if (PyErr_Occurred()) {
        return NULL;
    }
    if (!PyCFunction_Check(is_neg) || PyCFunction_GetFlags(is_neg) != METH_NOARGS) {
        mha_py_type_error(call, is_neg, "is_neg", "torch's own method of any tensor");
        return NULL;
    }
    for (int i = 0; i < MHA_PY_N_OF_TORCH; i++) {
        PyObject *before = call->state->objects[i];

        Py_INCREF(values[i]);
        call->state->objects[i] = values[i];
        Py_XDECREF(before);
    }
    call->state->exchange = exchange;
    Py_RETURN_NONE;
}

/* --- Tensor to array ------------------------------------------------------------------------- */

/* NumPy's number for the type, or -1; whoever takes the array decides whether the type is allowed. */
static int
array_type(const dl_tensor *t)
{
    static const struct {
        uint8_t type, bits;
        int number;
    } types[] = {{DL_FLOAT, 32, NPY_FLOAT32}, {DL_FLOAT, 64, NPY_FLOAT64}, {DL_INT, 64, NPY_INT64},
                 {DL_INT, 32, NPY_INT32},     {DL_INT, 16, NPY_INT16},     {DL_INT, 8, NPY_INT8},
                 {DL_UINT, 8, NPY_UINT8},     {DL_BOOL, 8, NPY_BOOL},      {DL_FLOAT, 16, NPY_FLOAT16}};

    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]) && t->lanes == 1; i++) {
        if (types[i].type == t->type && types[i].bits == t->bits) {
            return types[i].number;
        }
    }
    return -1;
}

/*
 * DLPack does not say whether numbers are to be read with the other sign (as the imag of a conjugate).  Each tensor of
 * each call is asked, so torch's function is called itself: by way of its object the question takes twice as long.
 */
static int
is_negated(const mha_py_call *call, PyObject *tensor)
{
    PyObject *answer = PyCFunction_GetFunction(call->state->objects[MHA_PY_IS_NEG])(tensor, NULL);
    const int negated = answer == NULL ? -1 : PyObject_IsTrue(answer);

    Py_XDECREF(answer);
    return negated;
}

int
mha_py_is_tensor(const mha_py_call *call, PyObject *value)
{
    PyObject *const *kept = call->state->objects, *const type = (PyObject *)Py_TYPE(value);

    return type == kept[MHA_PY_TENSOR] || type == kept[MHA_PY_PARAMETER];
}

/* What DLPack says of the tensor, good until the end of the call; 0 if torch refuses, and an exception. */
static int
look(mha_py_call *call, PyObject *tensor, dl_tensor *found)
{
    PyObject *const served = call->state->objects[MHA_PY_EXCHANGE];
    PyObject *capsule;
    const dl_tensor *t;

    if (call->state->exchange != NULL) {
        return call->state->exchange->look(tensor, found) >= 0;
    }
    capsule = PyObject_CallFunctionObjArgs(PyTuple_GetItem(served, LOOK), tensor, NULL);
    t = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "dltensor"); /* what it points to begins with one */
    if (t == NULL) {
        Py_XDECREF(capsule);
        return 0;
    }
    *found = *t;
    return mha_py_own(call, capsule) != NULL;
}

/* Where a tensor without numbers begins: torch says NULL, which would tell the core that there is no array at all. */
static double nothing[1];

/* Where the tensor's numbers lie; 0, and no exception unless the call failed, if it has no memory that we can read. */
static int
read_tensor(mha_py_call *call, PyObject *tensor, mha_py_array *array)
{
    dl_tensor t = {0};
    size_t count = 1;
    int type;

    if (!look(call, tensor, &t) || (type = array_type(&t)) < 0 || t.device != DL_CPU || t.rank > MHA_PY_MAX_RANK ||
        (t.type == DL_FLOAT && is_negated(call, tensor) != 0)) {
        if (!call->failed) {
            PyErr_Clear();
        }
        return 0;
    }
    *array = (mha_py_array){.array = tensor, .type = type, .rank = t.rank};
    for (int i = 0; i < t.rank; i++) {
        array->shape[i] = (npy_intp)t.shape[i];
        array->stride[i] = (ptrdiff_t)t.stride[i];
        count *= (size_t)t.shape[i];
    }
    array->data = t.data != NULL ? (const char *)t.data + t.byte_offset : count == 0 ? (const char *)nothing : NULL;
    return array->data != NULL; /* else its numbers are zeros that have no memory */
}

int
mha_py_look_at(mha_py_call *call, PyObject *value, mha_py_array *array)
{
    return call->state->exchange != NULL && mha_py_is_tensor(call, value) && read_tensor(call, value, array);
}

PyObject *
mha_py_viewed(mha_py_call *call, PyObject *value)
{
    npy_intp bytes[MHA_PY_MAX_RANK];
    mha_py_array array;
    PyArrayObject *view;

    if (!mha_py_is_tensor(call, value)) {
        return value;
    }
    call->has_tensors = 1;
    if (!read_tensor(call, value, &array)) {
        PyErr_SetString(PyExc_BufferError, "the tensor has no plain memory of a type that NumPy knows");
        return mha_py_own(call, NULL);
    }
    for (int i = 0; i < array.rank; i++) {
        bytes[i] = array.stride[i] * (npy_intp)mha_py_itemsize(array.type);
    }
    view = (PyArrayObject *)mha_py_own(call, PyArray_New(&PyArray_Type, array.rank, array.shape, array.type, bytes,
                                                         (void *)(uintptr_t)array.data, 0, 0, NULL));
    if (view != NULL) {
        Py_INCREF(value);
        call->failed = PyArray_SetBaseObject(view, value) < 0;
    }
    return (PyObject *)view;
}

int
mha_py_take_tensor(mha_py_call *call, PyObject *value, const char *name, mha_py_layout layout, const mha_py_array *like,
                   mha_py_array *array)
{
    mha_py_array read;

    if (!mha_py_is_tensor(call, value) || !read_tensor(call, value, &read) || read.rank == 0 ||
        !mha_py_is_float(read.type, like) || (uintptr_t)read.data % mha_py_itemsize(read.type) != 0 ||
        !mha_py_fits(&read, layout)) {
        return 0;
    }
    *array = read;
    array->name = name;
    call->has_tensors = 1;
    return 1;
}

/* --- Results ----------------------------------------------------------------------------------------- */

typedef struct {
    dl_managed managed; /* owner: of the numbers, if they do not lie behind the sizes */
    int64_t sizes[];    /* the shape, then the strides: a result has as many axes as NumPy has */
} shared_result;

#define LINE ((size_t)64) /* where numbers begin: on a cache line */

/* Called when torch is done with the memory: on any thread, and perhaps after Python has ended. */
static void
release(dl_managed *managed)
{
    PyGILState_STATE gil;

    if (!Py_IsInitialized()) {
        return;
    }
    gil = PyGILState_Ensure();
    Py_XDECREF((PyObject *)managed->owner);
    PyMem_Free(managed);
    PyGILState_Release(gil);
}

/* The description, and the memory, of a tensor; NULL and an exception. */
static shared_result *
share(const npy_intp *dims, const npy_intp *strides, size_t bytes, mha_py_array *result)
{
    const size_t rank = (size_t)result->rank, sizes = sizeof(shared_result) + 2 * rank * sizeof(int64_t);
    const int is_large = mha_py_is_large(bytes);
    shared_result *shared = PyMem_Malloc(sizes + (is_large ? 0 : LINE + bytes));
    void *numbers;

    if (shared == NULL) {
        (void)PyErr_NoMemory();
        return NULL;
    }
    shared->managed = (dl_managed){.version = {DL_MAJOR, 0}, .release = release};
    if (is_large) {
        shared->managed.owner = mha_py_new_block(bytes, &numbers);
        if (shared->managed.owner == NULL) {
            PyMem_Free(shared);
            return NULL;
        }
    } else {
        numbers = (void *)(((uintptr_t)shared + sizes + LINE - 1) / LINE * LINE);
    }
    result->data = numbers;
    shared->managed.tensor = (dl_tensor){.data = numbers,
                                         .device = DL_CPU,
                                         .rank = result->rank,
                                         .type = DL_FLOAT,
                                         .bits = (uint8_t)(8 * mha_py_itemsize(result->type)),
                                         .lanes = 1,
                                         .shape = shared->sizes,
                                         .stride = shared->sizes + rank};
    for (size_t i = 0; i < rank; i++) {
        shared->sizes[i] = dims[i];
        shared->sizes[rank + i] = strides[i];
    }
    return shared;
}

/*
 * If torch fails after it has made a tensor, the tensor's end calls `release`; if it fails before, nobody does.
 * Nothing tells the two cases apart, so we do not call it: lost memory does less harm than what is freed twice.
 */
static PyObject *
adopt_shared(const dl_exchange *exchange, const npy_intp *dims, const npy_intp *strides, size_t bytes,
             mha_py_array *result)
{
    shared_result *shared = share(dims, strides, bytes, result);
    void *tensor = NULL;

    return shared == NULL || exchange->adopt(&shared->managed, &tensor) < 0 ? NULL : tensor;
}

/* From an array, by the built-in function; the tensor keeps the array. */
static PyObject *
adopt_array(PyObject *function, const npy_intp *dims, const npy_intp *strides, size_t bytes, mha_py_array *result)
{
    npy_intp in_bytes[MHA_PY_MAX_AXES];
    PyObject *array, *tensor;

    for (int i = 0; i < result->rank; i++) {
        in_bytes[i] = strides[i] * (npy_intp)mha_py_itemsize(result->type);
    }
    array = mha_py_is_large(bytes)
                ? mha_py_new_on_line(result->rank, dims, in_bytes, result->type, bytes)
                : PyArray_New(&PyArray_Type, result->rank, (npy_intp *)dims, result->type, in_bytes, NULL, 0, 0, NULL);
    if (array == NULL) {
        return NULL;
    }
    result->data = PyArray_DATA((PyArrayObject *)array);
    tensor = PyObject_CallFunctionObjArgs(function, array, NULL);
    Py_DECREF(array);
    return tensor;
}

PyObject *
mha_py_new_tensor(const mha_py_call *call, const npy_intp *dims, const npy_intp *strides, size_t bytes,
                  mha_py_array *result)
{
    if (call->state->exchange != NULL) {
        return adopt_shared(call->state->exchange, dims, strides, bytes, result);
    }
    return adopt_array(PyTuple_GetItem(call->state->objects[MHA_PY_EXCHANGE], ADOPT), dims, strides, bytes, result);
}
