/*
 * replay.c: runs a fuzz target on inputs given as hexadecimal lines on standard input; no fuzzer is needed.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int
main(void)
{
    static char line[4096];
    size_t n_inputs = 0;

    while (fgets(line, sizeof line, stdin) != NULL) {
        const size_t n = strcspn(line, "\n") / 2;
        uint8_t *data = malloc(n + 1); /* exactly its own size, for the sanitizer */
        for (size_t i = 0; i < n; i++) {
            unsigned byte = 0;
            if (data == NULL || sscanf(line + 2 * i, "%2x", &byte) != 1) {
                return 2;
            }
            data[i] = (uint8_t)byte;
        }
        LLVMFuzzerTestOneInput(data, n);
        free(data);
        n_inputs++;
    }
    printf("%zu inputs\n", n_inputs);
    return n_inputs == 0;
}
