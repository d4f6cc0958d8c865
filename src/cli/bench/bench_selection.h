/* bench_selection.h - which entries rows select in steps of an emulated rank with HiSparse, in place of the
 * indexer's choice. How many of them a buffer lacks depends on what a step selects of what the steps before
 * it have, and random weights select at random. */
#ifndef HD_CLI_BENCH_BENCH_SELECTION_H
#define HD_CLI_BENCH_BENCH_SELECTION_H

#include "ops/ops.h"

typedef struct bench_selection bench_selection;

typedef struct bench_selection_options {
    const char *
        text; /* "uniform", "zipf=S": by the rank to the power of -S; "repeat=P": each as in the
                       * step before with probability P, else uniform */
    hd_device *device;
    hd_stream *stream;
    const hd_ops *ops;
    int32_t layers, rows, top_k, entries; /* that select; of a step; of a row; of a sequence */
    int32_t steps;                        /* that are told apart */
} bench_selection_options;

hd_status bench_selection_open(bench_selection **out, const bench_selection_options *o,
                               hd_err *err);
void bench_selection_close(bench_selection *b); /* NULL is fine */

/* The operator `resident` with these selections; of one bench_selection at a time. */
void bench_selection_install(bench_selection *b, hd_ops *ops);

void bench_selection_begin_step(bench_selection *b); /* NULL is fine */

#endif
