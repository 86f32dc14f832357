/*
 * pyconfig_posix.h: stands for the pyconfig.h of a 64-bit Linux or macOS that we have no Python of.
 *
 * What configure would measure there, the compiler for that system tells: its own macros where it has them, and numbers
 * that tools/wheels/sizes.c asserts where it has not.  Beyond sizes, CPython's public headers ask for these few words
 * only.
 */
#ifndef Py_PYCONFIG_H
#define Py_PYCONFIG_H

#define SIZEOF_SHORT __SIZEOF_SHORT__
#define SIZEOF_INT __SIZEOF_INT__
#define SIZEOF_LONG __SIZEOF_LONG__
#define SIZEOF_LONG_LONG __SIZEOF_LONG_LONG__
#define SIZEOF_FLOAT __SIZEOF_FLOAT__
#define SIZEOF_DOUBLE __SIZEOF_DOUBLE__
#define SIZEOF_LONG_DOUBLE __SIZEOF_LONG_DOUBLE__
#define SIZEOF_VOID_P __SIZEOF_POINTER__
#define SIZEOF_UINTPTR_T __SIZEOF_POINTER__
#define SIZEOF_SIZE_T __SIZEOF_SIZE_T__
#define SIZEOF_WCHAR_T __SIZEOF_WCHAR_T__
#define SIZEOF__BOOL 1
#define SIZEOF_OFF_T 8
#define SIZEOF_TIME_T 8
#define SIZEOF_PID_T 4
#define SIZEOF_PTHREAD_T 8
#define ALIGNOF_LONG __SIZEOF_LONG__
#define ALIGNOF_SIZE_T __SIZEOF_SIZE_T__
#define ALIGNOF_MAX_ALIGN_T 16
#if defined(__APPLE__)
#define SIZEOF_FPOS_T 8
#define _DARWIN_C_SOURCE 1
#else
#define SIZEOF_FPOS_T 16
#define _GNU_SOURCE 1
#define _FILE_OFFSET_BITS 64
#endif

#define HAVE_FORK 1
#define HAVE_PTHREAD_H 1
#define HAVE_SYS_STAT_H 1
#define HAVE_SYS_TYPES_H 1
#define HAVE_THREAD_LOCAL 1
#define HAVE_WCHAR_H 1
#define WITH_DOC_STRINGS 1
#define WITH_PYMALLOC 1
#define WITH_THREAD 1

#endif /* Py_PYCONFIG_H */
