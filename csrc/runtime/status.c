/*
 * status.c: the texts of the status numbers.
 *
 * The binding turns a status into an exception; these texts are what C callers and that exception show.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "mha.h"

const char *
mha_status_text(mha_status status)
{
    static const char *const texts[] = {
        [-MHA_OK] = "no error",
        [-MHA_ERR_NOMEM] = "out of memory",
        [-MHA_ERR_ARG] = "invalid argument to the C core",
        [-MHA_ERR_ISA] = "instruction set unknown, not compiled in, not on this CPU, or not that of a packed weight",
        [-MHA_ERR_SIZE] = "sizes too large: their product does not fit in memory",
        [-MHA_ERR_INTERRUPTED] = "interrupted",
        [-MHA_ERR_FORKED] = "forked during the call, whose other threads are in the parent alone: call it again",
    };
    return status <= MHA_OK && status >= MHA_ERR_FORKED ? texts[-status] : "unknown status";
}
