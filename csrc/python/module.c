/*
 * module.c: the extension module mha_c._core: method table, state and slots, and the only
 * file that imports NumPy's C API.
 *
 * Multi-phase initialisation; there are no C types, and no Python objects in C globals but the kept memory of
 * torch/blocks.c.  Sub-interpreters are refused because NumPy refuses them.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#define MHA_PY_IMPORTS_NUMPY
#include "args.h"

#if !defined(METH_FASTCALL) /* in the limited API from 3.10 on; 3.9 has the same convention under the same number */
#define METH_FASTCALL 0x0080
#endif

#define ENTER(name, least, most) \
    static PyObject *enter_##name(PyObject *module, PyObject *const *args, Py_ssize_t n_args) \
    { \
        static const mha_py_entry entry = {#name, py_##name, least, most}; \
        return mha_py_run(&entry, module, args, n_args); \
    }
#define METHOD(name, least, most) {#name, (PyCFunction)(void (*)(void))enter_##name, METH_FASTCALL, NULL},

MHA_PY_FUNCTIONS(ENTER)
static PyMethodDef methods[] = {MHA_PY_FUNCTIONS(METHOD){NULL, NULL, 0, NULL}};

static int
core_exec(PyObject *module)
{
    mha_py_state *state = PyModule_GetState(module);
    mha_isa widest = MHA_ISA_SCALAR; /* the widest that this CPU offers; Python may ask for another one later */

    if (PyArray_ImportNumPyAPI() < 0) {
        return -1;
    }
    *state = (mha_py_state){.exchange = NULL};
    for (int i = 0; i < MHA_N_ISAS; i++) {
        PyObject *const name = PyUnicode_InternFromString(mha_isa_name((mha_isa)i));

        if (name == NULL) {
            return -1;
        }
        state->objects[MHA_PY_ISA_NAMES + i] = name;
        widest = mha_isa_available((mha_isa)i) ? (mha_isa)i : widest;
    }
    return mha_isa_select(widest) == MHA_OK ? 0 : -1;
}

/* Nothing that is kept leads back to the module, so that there are no cycles for Python to find. */
static void
core_free(void *module)
{
    mha_py_state *state = PyModule_GetState(module);

    for (int i = 0; i < MHA_PY_N_OBJECTS && state != NULL; i++) {
        Py_CLEAR(state->objects[i]);
    }
}

#define DOC "The compiled core of mha_c: private, use mha_c.functional and the layers."

/* abi3t, the stable ABI of 3.15 for both kinds of Python, has slots in the place of a static PyModuleDef. */
#ifdef Py_TARGET_ABI3T
PyABIInfo_VAR(abi);

static PySlot slots[] = {
    PySlot_STATIC_DATA(Py_mod_name, "mha_c._core"),
    PySlot_STATIC_DATA(Py_mod_doc, DOC),
    PySlot_STATIC_DATA(Py_mod_abi, &abi),
    PySlot_SIZE(Py_mod_state_size, sizeof(mha_py_state)),
    PySlot_STATIC_DATA(Py_mod_methods, methods),
    PySlot_FUNC(Py_mod_exec, core_exec),
    PySlot_FUNC(Py_mod_state_free, core_free),
    PySlot_DATA(Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED),
    PySlot_DATA(Py_mod_gil, Py_MOD_GIL_NOT_USED),
    PySlot_END,
};

PyMODEXPORT_FUNC
PyModExport__core(void)
{
    return slots;
}
#else
static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)core_exec},
#ifdef Py_mod_multiple_interpreters /* Python 3.12 */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_mod_gil /* Python 3.13; `make free-threaded` is the proof */
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "mha_c._core", .m_doc = DOC,        .m_size = sizeof(mha_py_state),
    .m_methods = methods,  .m_slots = slots,        .m_free = core_free,
};

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}
#endif
