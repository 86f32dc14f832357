/*
 * call.c: a call from its arguments to its end: what it owns, refusals, the status translator and the decision when to
 * let other threads run.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

/* --- Beginning and end ----------------------------------------------------------------------- */

PyObject *
mha_py_run(const mha_py_entry *entry, PyObject *module, PyObject *const *args, Py_ssize_t n_args)
{
    PyObject *values[MHA_PY_MAX_ARGS], *result;
    mha_py_call call; /* not zeroed: `owned` is large */

    if (n_args < entry->least || n_args > entry->most) {
        PyErr_Format(PyExc_TypeError, "%s() takes %d to %d arguments, got %zd", entry->name, entry->least, entry->most,
                     n_args);
        return NULL;
    }
    for (int i = 0; i < entry->most; i++) {
        values[i] = i < n_args ? args[i] : NULL;
    }
    call.function = entry->name;
    call.state = PyModule_GetState(module);
    call.detached = NULL;
    call.failed = call.has_tensors = call.n_owned = 0;
    const mha_isa before = mha_isa_own(mha_isa_active()); /* one for all of the call: another thread may select one */
    result = entry->run(&call, values);
    (void)mha_isa_own(before);
    while (call.n_owned > 0) {
        Py_DECREF(call.owned[--call.n_owned]);
    }
    if (call.failed) {
        Py_CLEAR(result);
    }
    return result;
}

PyObject *
mha_py_own(mha_py_call *call, void *object)
{
    if (object != NULL && call->n_owned < MHA_PY_MAX_OWNED) {
        call->owned[call->n_owned++] = object;
        return object;
    }
    if (object != NULL) {
        Py_DECREF((PyObject *)object);
        PyErr_Format(PyExc_RuntimeError, "%s: more than %d objects are in use", call->function, MHA_PY_MAX_OWNED);
    }
    call->failed = 1;
    return NULL;
}

/* --- Refusals ---------------------------------------------------------------------------------- */

PyObject *
mha_py_ask(mha_py_call *call, const char *question, const char *format, ...)
{
    va_list parts;

    va_start(parts, format);
    /* First, as it takes references; an exception that is there already comes from what made them. */
    PyObject *args = Py_VaBuildValue(format, parts);
    va_end(parts);
    PyObject *name = args == NULL ? NULL : PyUnicode_FromString("mha_c._arguments.core_refusals");
    PyObject *words = name == NULL ? NULL : PyImport_GetModule(name); /* mha_c has imported it */
    PyObject *function = words == NULL ? NULL : PyObject_GetAttrString(words, question);
    PyObject *answer = function == NULL ? NULL : PyObject_CallObject(function, args);

    Py_XDECREF(function);
    Py_XDECREF(words);
    Py_XDECREF(name);
    Py_XDECREF(args);
    if (answer != NULL && PyExceptionInstance_Check(answer)) {
        PyErr_SetObject((PyObject *)Py_TYPE(answer), answer);
        Py_CLEAR(answer);
    } else if (answer == Py_None || (answer == NULL && !PyErr_Occurred())) {
        /* Another thread changed what was refused, no memory was left to say why, or the interpreter is ending. */
        PyErr_Format(function != NULL && answer == NULL ? PyExc_MemoryError : PyExc_RuntimeError, "%s", question);
        Py_CLEAR(answer);
    }
    call->failed = call->failed || answer == NULL;
    return answer;
}

void
mha_py_type_error(mha_py_call *call, PyObject *value, const char *name, const char *expected)
{
    mha_py_refuse(call, "kind", "(Oss)", value, name, expected);
}

void
mha_py_check(mha_py_call *call, mha_status status, const char *what)
{
    PyObject *const kind = status == MHA_ERR_NOMEM                           ? PyExc_MemoryError
                           : status == MHA_ERR_FORKED                        ? PyExc_RuntimeError
                           : status == MHA_ERR_ISA || status == MHA_ERR_SIZE ? PyExc_ValueError
                                                                             : PyExc_SystemError; /* our own bug */

    if (status != MHA_OK && !PyErr_Occurred()) { /* else signal_came has what a handler raised */
        PyErr_Format(kind, "%s: %s%s", what, status == MHA_ERR_SIZE ? "too large: " : "", mha_status_text(status));
    }
    call->failed = call->failed || status != MHA_OK;
}

/* --- While the core works ------------------------------------------------------------------------ */

/* One or two microseconds of vector arithmetic: to let the interpreter go and to get it back takes as long. */
#define DETACH_FROM_WORK 5e4

/* A few milliseconds: calls as short as that are over before anybody could have asked. */
#define WATCH_FROM_WORK 1e8

/*
 * Signal handlers run in the main thread alone: a call of another thread has nobody to ask.  A handler may run, and
 * raise KeyboardInterrupt, in the Python of this very question: that exception stays, and the call is given up.  A
 * TypeError comes when Python ends and modules are emptied.
 */
static int
is_main_thread(void)
{
    PyObject *threading = PyImport_ImportModule("threading");
    PyObject *thread = threading == NULL ? NULL : PyObject_CallMethod(threading, "main_thread", NULL);
    PyObject *ident = thread == NULL ? NULL : PyObject_GetAttrString(thread, "ident");
    const int is_main = ident != NULL ? PyLong_AsUnsignedLong(ident) == PyThread_get_thread_ident()
                                      : threading != NULL && !PyErr_ExceptionMatches(PyExc_TypeError);

    if (!is_main) {
        PyErr_Clear();
    }
    Py_XDECREF(ident);
    Py_XDECREF(thread);
    Py_XDECREF(threading);
    return is_main;
}

static int
signal_came(void *saved)
{
    PyEval_RestoreThread(saved);
    const int came = PyErr_Occurred() != NULL || PyErr_CheckSignals() != 0;

    (void)PyEval_SaveThread();
    return came;
}

void
mha_py_limit_threads(const mha_py_call *call)
{
    PyObject *limit = call->has_tensors ? call->state->objects[MHA_PY_TORCH_THREADS] : NULL;
    PyObject *n = limit != NULL ? PyObject_CallFunctionObjArgs(limit, NULL) : NULL;
    const unsigned long allowed = n == NULL ? 0 : PyLong_AsUnsignedLong(n);

    mha_threads_limit_own(PyErr_Occurred() || allowed > INT_MAX ? 0 : (unsigned)allowed);
    if (call->has_tensors) {
        mha_py_here_are_tensors();
    }
    PyErr_Clear(); /* no answer is no limit */
    Py_XDECREF(n);
}

void
mha_py_detach(mha_py_call *call, double work)
{
    if (work < DETACH_FROM_WORK) {
        return; /* far too little to be shared among threads */
    }
    mha_py_limit_threads(call);
    const int watch = work >= WATCH_FROM_WORK && is_main_thread();

    call->failed = call->failed || PyErr_Occurred() != NULL;
    call->detached = PyEval_SaveThread();
    if (watch) {
        mha_interrupt_watch(signal_came, call->detached);
    }
}

void
mha_py_attach(mha_py_call *call, mha_status status)
{
    if (call->detached != NULL) {
        mha_interrupt_watch(NULL, NULL);
        PyEval_RestoreThread(call->detached);
        call->detached = NULL;
        mha_threads_limit_own(0);
    }
    mha_py_check(call, status, call->function);
}
