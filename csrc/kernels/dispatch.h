/*
 * dispatch.h: which kernel table is active.  An entry of the core asks once, in the thread of its call, and hands the
 * table down: another thread may select another instruction set meanwhile.
 */
#ifndef MHA_DISPATCH_H
#define MHA_DISPATCH_H

#include "kernels.h"
#include "mha.h"

/* The active table for this number type; NULL for a value that is no mha_dtype. */
const mha_kernels *mha_kernels_for(mha_dtype dtype);

/* A number of either type, so that kernels can be handed a pointer to it. */
typedef union {
    float f32;
    double f64;
} mha_scalar;

mha_scalar mha_scalar_from(const mha_kernels *kernels, double value);
double mha_read(const mha_kernels *kernels, const void *numbers, size_t i);

#endif
