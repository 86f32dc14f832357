/*
 * blocks.c: memory that begins on a cache line: of packed weights, and of large results that become tensors; what is
 * large is kept for later calls.  That saves 5 of 12.5 ms of a training step of 64,8,37,64 (Xeon with AVX-512).
 *
 * A step frees its gradients and makes them again.  malloc gives so much memory back to the system each time, and the
 * system clears new pages for the next step.  So the last freed blocks, together at most KEPT_BYTES, wait here for a
 * result of nearly their size.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "python/args.h"

#include <stdatomic.h>
#include <stdint.h>

#define LARGE_BYTES ((size_t)64 * 1024)       /* of smaller ones malloc keeps enough by itself */
#define KEPT_BYTES ((size_t)64 * 1024 * 1024) /* as glibc's malloc, once it has met blocks of 32 MiB */
#define N_KEPT 128                            /* a step of a model frees the gradients of all layers */
#define LINE ((size_t)64)

/*
 * A block is an array of bytes: NumPy gets the memory, counts it, and asks for huge pages.
 * `busy` is never set in the child of a fork: Python without a global lock forks while all other threads stand still,
 * and no thread stands still between setting and clearing `busy`; with the lock, no other thread runs during a fork.
 */
static struct {
    atomic_flag busy;
    PyArrayObject *blocks[N_KEPT]; /* the one that was freed first in front */
    size_t sizes[N_KEPT];          /* read for all of them, unlike the blocks themselves */
    size_t n, bytes;
} kept = {.busy = ATOMIC_FLAG_INIT};

static PyArrayObject *
remove_kept(size_t i)
{
    PyArrayObject *block = kept.blocks[i];

    kept.bytes -= kept.sizes[i];
    kept.n--;
    for (; i < kept.n; i++) {
        kept.blocks[i] = kept.blocks[i + 1];
        kept.sizes[i] = kept.sizes[i + 1];
    }
    return block;
}

/* A kept block with room for so many bytes, not much larger; NULL if there is none, or another thread looks. */
static PyArrayObject *
take_kept(size_t bytes)
{
    PyArrayObject *block = NULL;
    size_t best = N_KEPT;

    if (atomic_flag_test_and_set_explicit(&kept.busy, memory_order_acquire)) {
        return NULL;
    }
    for (size_t i = 0; i < kept.n; i++) {
        const size_t size = kept.sizes[i];
        if (size >= bytes && size <= bytes + bytes / 8 && (best == N_KEPT || size < kept.sizes[best])) {
            best = i;
        }
    }
    if (best < N_KEPT) {
        block = remove_kept(best);
    }
    atomic_flag_clear_explicit(&kept.busy, memory_order_release);
    return block;
}

/* Keeps the block of a result that is gone, in the place of the oldest ones. */
static void
keep(PyObject *capsule)
{
    PyArrayObject *block = PyCapsule_GetPointer(capsule, NULL), *dropped[N_KEPT + 1];
    const size_t bytes = (size_t)PyArray_DIM(block, 0);
    size_t n_dropped = 0;

    if (bytes < LARGE_BYTES || bytes > KEPT_BYTES ||
        atomic_flag_test_and_set_explicit(&kept.busy, memory_order_acquire)) {
        Py_DECREF((PyObject *)block);
        return;
    }
    while (kept.n == N_KEPT || kept.bytes + bytes > KEPT_BYTES) {
        dropped[n_dropped++] = remove_kept(0);
    }
    kept.blocks[kept.n] = block;
    kept.sizes[kept.n++] = bytes;
    kept.bytes += bytes;
    atomic_flag_clear_explicit(&kept.busy, memory_order_release);
    while (n_dropped > 0) {
        Py_DECREF((PyObject *)dropped[--n_dropped]);
    }
}

int
mha_py_is_large(size_t bytes)
{
    return bytes >= LARGE_BYTES && bytes < (size_t)NPY_MAX_INTP - LINE;
}

PyObject *
mha_py_new_block(size_t bytes, void **start)
{
    const npy_intp size = (npy_intp)(bytes + LINE);
    PyArrayObject *block = take_kept((size_t)size);
    PyObject *capsule;

    block = block != NULL ? block : (PyArrayObject *)PyArray_EMPTY(1, (npy_intp *)&size, NPY_UINT8, 0);
    if (block == NULL) {
        return NULL;
    }
    *start = (void *)(((uintptr_t)PyArray_DATA(block) + LINE - 1) / LINE * LINE);
    capsule = PyCapsule_New(block, NULL, keep);
    if (capsule == NULL) {
        Py_DECREF((PyObject *)block);
    }
    return capsule;
}

PyObject *
mha_py_new_on_line(int rank, const npy_intp *dims, const npy_intp *strides, int type, size_t bytes)
{
    void *start;
    PyObject *block = mha_py_new_block(bytes, &start), *array;

    if (block == NULL) {
        return NULL;
    }
    array = PyArray_NewFromDescr(&PyArray_Type, PyArray_DescrFromType(type), rank, (npy_intp *)dims,
                                 (npy_intp *)strides, start, NPY_ARRAY_CARRAY, NULL);
    if (array == NULL) {
        Py_DECREF(block);
    } else if (PyArray_SetBaseObject((PyArrayObject *)array, block) < 0) { /* it has taken the block even so */
        Py_CLEAR(array);
    }
    return array;
}
