/* bench_rank_internal.h - measurements of the steps of one emulated rank. */
#ifndef HD_CLI_BENCH_BENCH_RANK_INTERNAL_H
#define HD_CLI_BENCH_BENCH_RANK_INTERNAL_H

#include <stdbool.h>
#include <stdio.h>

#include "ops/profile/op_profiler.h"
#include "weights/parallel_config.h"

/* Limits of the device, per second. */
typedef struct rank_limits {
    const char *from;                /* how that is known */
    double bytes, flops, flops_8bit; /* flops_8bit: of products with 8-bit operands */
} rank_limits;

typedef struct rank_memory {
    double weights, activations, kv[2];
    double host; /* HiSparse's entries */
} rank_memory;

typedef struct rank_report {
    const char *family, *table, *routing, *exchange;
    char device[256];
    hd_parallel_config parallel;
    int32_t rank, layers, of_layers;
    int32_t batch, prompt, chunk, context, drafts; /* prompt 0: decode steps */
    int32_t rows, expert_rows;                     /* of a step; received in it */
    int32_t steps;      /* timed steps; the figures below are medians or means */
    double accepted;    /* tokens of a sequence per step, on average */
    bool graphs;        /* steps were captured and launched as a graph */
    int32_t launches;   /* kernels and copies of that graph */
    double step;        /* seconds of a step as an engine runs it; of prompts, alone */
    double device_step; /* device time of a step alone; 0: not known */
    double ahead_step;  /* device time in steps of an engine, */
    double gap, host;   /* and between them; host time in each */
    double ahead; /* share of steps with a chunk that were queued while the one before ran */
    /* between steps with a chunk of which the host is not ahead; 0: not known */
    double alone_gap;
    double kernels;        /* the sum of all operators */
    double distinct;       /* experts of a layer with rows, in a step alone */
    double ahead_distinct; /* and in a step of an engine */
    int32_t exchanges;     /* with other ranks in a step, and how long each took in */
    /* the run whose figures these are; all 0: there was none */
    int32_t exchange_us, dispatch_ns, combine_ns;
    double charged_step, charged_device_step;
    int32_t overlap; /* and those in so many micro-batches; 0: there was none */
    double overlapped_step, overlapped_device_step, overlapped_activations;
    double fetched; /* of the entries that rows selected in an engine's steps, with HiSparse */
    rank_memory memory;
    rank_limits limits;
    hd_op_profiler profiler; /* of `passes` steps */
    int32_t passes;
} rank_report;

void rank_report_print(const rank_report *r, FILE *to);
void rank_report_print_json(const rank_report *r, FILE *to);

#endif
