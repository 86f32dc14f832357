/*
 * rows.c: statistics of rows of queries: those of an earlier call, what sinks add, and those that the caller asked for.
 */
#include "rows.h"

#include "runtime/common.h"

#include <math.h>
#include <string.h>

void
mha_load_statistics(const mha_walk *walk, const mha_rows *rows)
{
    const mha_kernels *k = walk->problem->kernels;
    const size_t at = mha_row_index(walk->problem, rows) * k->itemsize, n_bytes = rows->rows * k->itemsize;
    char *max = mha_statistics_at(walk, rows, walk->room->max), *sum = mha_statistics_at(walk, rows, walk->room->sum);

    memcpy(max, (const char *)walk->job->row_max + at, n_bytes);
    memcpy(sum, (const char *)walk->job->row_sum + at, n_bytes);
    k->invert_sums(rows->rows, max, sum, mha_statistics_at(walk, rows, walk->room->inverse));
}

const char *
mha_sink_of(const mha_walk *walk, const mha_rows *rows)
{
    const char *sinks = walk->problem->args->sinks;

    return sinks == NULL ? NULL : sinks + rows->head * walk->problem->kernels->itemsize;
}

void
mha_add_sinks(const mha_walk *walk, const mha_rows *rows, const char *max, char *sum)
{
    const char *sink = mha_sink_of(walk, rows);

    if (sink != NULL) {
        walk->problem->kernels->add_sinks(rows->rows, sink, max, sum);
    }
}

void
mha_write_statistics(const mha_walk *walk, const mha_rows *rows)
{
    const mha_kernels *k = walk->problem->kernels;
    const size_t n = rows->rows, at = mha_row_index(walk->problem, rows) * k->itemsize;
    const char *max = mha_statistics_at(walk, rows, walk->room->max);
    const char *sum = mha_statistics_at(walk, rows, walk->room->sum);
    const char *sink = mha_sink_of(walk, rows);

    if (walk->job->row_max != NULL) {
        memcpy((char *)walk->job->row_max + at, max, n * k->itemsize);
        memcpy((char *)walk->job->row_sum + at, sum, n * k->itemsize);
    }
    if (walk->problem->args->lse != NULL) {
        char *lse = (char *)walk->problem->args->lse + at;
        k->logsumexp(n, max, sum, lse);
        for (size_t i = 0; sink != NULL && i < n; i++) {
            if (mha_read(k, sum, i) == HUGE_VAL) { /* a sink so large that all else vanishes beside it */
                memcpy(lse + i * k->itemsize, sink, k->itemsize);
            }
        }
    }
}
