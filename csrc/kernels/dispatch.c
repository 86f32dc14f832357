/*
 * dispatch.c: the compiled instruction sets, and the one in use.
 *
 * No table is used before the CPU was asked whether it has the instructions.
 */
#include "dispatch.h"

#include "runtime/cpu.h"

static const char *const names[MHA_N_ISAS] = {"scalar", "neon", "wasm", "avx2", "avx512"};

/* By mha_dtype; without tables an instruction set is not compiled in. */
static const mha_kernels *const tables[MHA_N_ISAS][2] = {
    [MHA_ISA_SCALAR] = {&mha_kernels_f32_scalar, &mha_kernels_f64_scalar},
#if MHA_HAVE_NEON
    [MHA_ISA_NEON] = {&mha_kernels_f32_neon, &mha_kernels_f64_neon},
#endif
#if MHA_HAVE_WASM
    [MHA_ISA_WASM] = {&mha_kernels_f32_wasm, &mha_kernels_f64_wasm},
#endif
#if MHA_HAVE_X86
    [MHA_ISA_AVX2] = {&mha_kernels_f32_avx2, &mha_kernels_f64_avx2},
    [MHA_ISA_AVX512] = {&mha_kernels_f32_avx512, &mha_kernels_f64_avx512},
#endif
};

/* Scalar until somebody selects: correct everywhere, whatever runs before start-up has chosen. */
static _Atomic mha_isa active = MHA_ISA_SCALAR;

static _Thread_local mha_isa own = MHA_N_ISAS; /* of this thread's calls alone; MHA_N_ISAS: the active one */

static int
is_isa(mha_isa isa)
{
    return (unsigned)isa < (unsigned)MHA_N_ISAS;
}

const char *
mha_isa_name(mha_isa isa)
{
    return is_isa(isa) ? names[isa] : NULL;
}

int
mha_isa_compiled(mha_isa isa)
{
    return is_isa(isa) && tables[isa][MHA_F32] != NULL;
}

int
mha_isa_available(mha_isa isa)
{
    return mha_isa_compiled(isa) && mha_cpu_offers(isa);
}

mha_isa
mha_isa_active(void)
{
    return own != MHA_N_ISAS ? own : active;
}

mha_isa
mha_isa_own(mha_isa isa)
{
    mha_isa *const mine = &own; /* a thread's variable is looked up by a call */
    const mha_isa before = *mine;

    /* Whether the CPU has it is asked only if that is not known: a virtual machine takes microseconds to answer. */
    *mine = isa == before || isa == active || mha_isa_available(isa) ? isa : MHA_N_ISAS;
    return before;
}

mha_status
mha_isa_select(mha_isa isa)
{
    if (!mha_isa_available(isa)) {
        return MHA_ERR_ISA;
    }
    active = isa;
    return MHA_OK;
}

const mha_kernels *
mha_kernels_for(mha_dtype dtype)
{
    return dtype == MHA_F32 || dtype == MHA_F64 ? tables[mha_isa_active()][dtype] : NULL;
}

mha_scalar
mha_scalar_from(const mha_kernels *kernels, double value)
{
    mha_scalar s = {0};

    if (kernels->itemsize == sizeof(double)) {
        s.f64 = value;
    } else {
        s.f32 = (float)value;
    }
    return s;
}

double
mha_read(const mha_kernels *kernels, const void *numbers, size_t i)
{
    return kernels->itemsize == sizeof(double) ? ((const double *)numbers)[i] : (double)((const float *)numbers)[i];
}
