/*
 * status.c: the words for the numbers.
 *
 * The binding turns a status into an exception; these texts are what C callers and that exception show.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#include "mha.h"

const char *
mha_status_text(mha_status status)
{
    switch (status) {
    case MHA_OK:
        return "no error";
    case MHA_ERR_NOMEM:
        return "out of memory";
    case MHA_ERR_ARG:
        return "invalid argument to the C core";
    case MHA_ERR_ISA:
        return "instruction set unknown, not compiled in, or not offered by this CPU";
    case MHA_ERR_SIZE:
        return "sizes too large: their product does not fit in memory";
    case MHA_ERR_INTERRUPTED:
        return "interrupted";
    }
    return "unknown status";
}
