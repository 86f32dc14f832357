/*
 * py_system.c: instruction sets, threads.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "args.h"

#include <limits.h>

/* --- Instruction sets ------------------------------------------------------------------------ */

PyObject *
py_isas(mha_py_call *Py_UNUSED(call), PyObject *const *Py_UNUSED(values))
{
    PyObject *all = PyTuple_New(0);

    for (int i = 0; i < MHA_N_ISAS && all != NULL; i++) {
        if (mha_isa_compiled((mha_isa)i)) {
            PyObject *const before = all, *const available = mha_isa_available((mha_isa)i) ? Py_True : Py_False;
            PyObject *const one = Py_BuildValue("((sO))", mha_isa_name((mha_isa)i), available);

            all = one == NULL ? NULL : PySequence_Concat(before, one);
            Py_XDECREF(one);
            Py_DECREF(before);
        }
    }
    return all;
}

PyObject *
py_isa(mha_py_call *call, PyObject *const *Py_UNUSED(values))
{
    PyObject *const name = mha_py_active_isa(call);

    Py_INCREF(name);
    return name;
}

PyObject *
py_set_isa(mha_py_call *call, PyObject *const *values)
{
    PyObject *const name = values[0];

    for (int i = 0; i < MHA_N_ISAS && PyUnicode_Check(name); i++) {
        if (PyUnicode_CompareWithASCIIString(name, mha_isa_name((mha_isa)i)) == 0 && mha_isa_available((mha_isa)i)) {
            mha_py_check(call, mha_isa_select((mha_isa)i), call->function);
            Py_RETURN_NONE;
        }
    }
    mha_py_refuse(call, "isa", "(O)", name);
    return NULL;
}

/* --- Threads ------------------------------------------------------------------------------------- */

PyObject *
py_get_num_threads(mha_py_call *Py_UNUSED(call), PyObject *const *Py_UNUSED(values))
{
    return PyLong_FromUnsignedLong(mha_threads_get());
}

PyObject *
py_set_num_threads(mha_py_call *call, PyObject *const *values)
{
    PyObject *const n = mha_py_ask(call, "threads", "(Oi)", values[0], INT_MAX);

    if (n == NULL) {
        return NULL;
    }
    if (mha_py_flag(call, values[1])) {
        mha_threads_suggest((unsigned)PyLong_AsUnsignedLong(n));
    } else {
        mha_threads_set((unsigned)PyLong_AsUnsignedLong(n));
    }
    Py_DECREF(n);
    Py_RETURN_NONE;
}

PyObject *
py_has_team(mha_py_call *Py_UNUSED(call), PyObject *const *Py_UNUSED(values))
{
    return PyBool_FromLong(mha_threads_has_team());
}
