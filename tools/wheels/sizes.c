/*
 * sizes.c: what pyconfig.h and NumPy's configuration say of the C types, held against the compiler: compiled with the
 * binding for every platform by build.py, and no code.
 *
 * Those headers may have been made for another system than the one compiled for (Windows' without MS_WIN64, a
 * cross-compiler's host); layouts would then be wrong in silence.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "python/args.h"

#include <stdio.h>
#include <sys/types.h>
#include <time.h>
#include <wchar.h>

#define SIZE_IS(type, size) _Static_assert(sizeof(type) == (size), #size " is not this compiler's: wrong pyconfig.h?")

SIZE_IS(void *, SIZEOF_VOID_P);
SIZE_IS(size_t, SIZEOF_SIZE_T);
SIZE_IS(short, SIZEOF_SHORT);
SIZE_IS(int, SIZEOF_INT);
SIZE_IS(long, SIZEOF_LONG);
SIZE_IS(long long, SIZEOF_LONG_LONG);
SIZE_IS(float, SIZEOF_FLOAT);
SIZE_IS(double, SIZEOF_DOUBLE);
SIZE_IS(wchar_t, SIZEOF_WCHAR_T);
SIZE_IS(_Bool, SIZEOF__BOOL);
SIZE_IS(time_t, SIZEOF_TIME_T);
SIZE_IS(off_t, SIZEOF_OFF_T);
SIZE_IS(fpos_t, SIZEOF_FPOS_T);
#if defined(SIZEOF_UINTPTR_T) /* Windows' header leaves these out */
SIZE_IS(uintptr_t, SIZEOF_UINTPTR_T);
SIZE_IS(long double, SIZEOF_LONG_DOUBLE);
SIZE_IS(pid_t, SIZEOF_PID_T);
#endif
#if defined(SIZEOF_PTHREAD_T)
#include <pthread.h>
SIZE_IS(pthread_t, SIZEOF_PTHREAD_T);
#endif
SIZE_IS(Py_ssize_t, SIZEOF_SIZE_T);
SIZE_IS(Py_hash_t, SIZEOF_SIZE_T);

SIZE_IS(npy_short, NPY_SIZEOF_SHORT);
SIZE_IS(npy_int, NPY_SIZEOF_INT);
SIZE_IS(npy_long, NPY_SIZEOF_LONG);
SIZE_IS(npy_longlong, NPY_SIZEOF_LONGLONG);
SIZE_IS(npy_float, NPY_SIZEOF_FLOAT);
SIZE_IS(npy_double, NPY_SIZEOF_DOUBLE);
SIZE_IS(npy_longdouble, NPY_SIZEOF_LONGDOUBLE);
SIZE_IS(npy_intp, NPY_SIZEOF_INTP);
SIZE_IS(npy_intp, NPY_SIZEOF_PY_INTPTR_T);
SIZE_IS(void *, NPY_SIZEOF_INTP);
SIZE_IS(wchar_t, NPY_SIZEOF_WCHAR_T);
