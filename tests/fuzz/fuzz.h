/*
 * fuzz.h: what the fuzz targets share.  REQUIRE ends the run with the place that failed, as a fuzzer expects.
 * SPDX-License-Identifier: BSD-3-Clause
 */
#ifndef FUZZ_H
#define FUZZ_H

#define CHOICES_FROM_BYTES
#include "textbook_backward.h"

#define REQUIRE(ok) \
    do { \
        if (!(ok)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #ok); \
            abort(); \
        } \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

/* From now on choices come from these bytes; the numbers follow from all of them.  Returns one of this CPU's ISAs. */
static mha_isa
start(const uint8_t *data, size_t n_bytes)
{
    mha_isa offered[MHA_N_ISAS];
    size_t n = 0;

    state = n_bytes;
    for (size_t i = 0; i < n_bytes; i++) {
        state = state * 31 + data[i];
    }
    choices = data;
    choices_end = data + n_bytes;
    n_failed = 0;
    for (mha_isa isa = MHA_ISA_SCALAR; isa < MHA_N_ISAS; isa++) {
        if (mha_isa_available(isa)) {
            offered[n++] = isa;
        }
    }
    return offered[below(n)];
}

#endif
