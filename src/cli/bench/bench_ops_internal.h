/* bench_ops_internal.h - measurements of a run of `hadal bench ops`. */
#ifndef HD_CLI_BENCH_BENCH_OPS_INTERNAL_H
#define HD_CLI_BENCH_BENCH_OPS_INTERNAL_H

#include <stdio.h>

#include "ops/profile/op_profiler.h"

/* One kind of step; the profile is that of its median run. */
typedef struct ops_phase {
    const char *name;
    int32_t rows;   /* of activations in a step */
    double seconds; /* of the step, with the time between operators */
    hd_op_profiler profiler;
} ops_phase;

enum { OPS_PREFILL, OPS_DECODE, OPS_N_PHASES };

typedef struct ops_report {
    const char *family, *table;
    int32_t layers, of_layers, threads, context, repeat;
    double weight_bytes;
    double read, flops; /* of this machine, per second */
    ops_phase phase[OPS_N_PHASES];
} ops_report;

void ops_report_print(const ops_report *r, FILE *to);
void ops_report_print_json(const ops_report *r, FILE *to);

#endif
