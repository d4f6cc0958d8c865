/* optimizer.h - AdamW and Muon over float32 master weights, with a rate schedule and clipping
 * by the global norm.
 *
 * All state is float32. Every element is computed by one task from its own numbers, and norms
 * are sums in a fixed order, so the result does not depend on threads (design D8).
 * Formulas: docs/training.md. */
#ifndef HD_TRAIN_OPTIMIZER_H
#define HD_TRAIN_OPTIMIZER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "device/device.h"

typedef enum hd_update_kind {
    HD_UPDATE_ADAMW,
    HD_UPDATE_MUON,
    HD_UPDATE_BALANCE /* no gradient: the owner changes it, and the optimizer leaves it alone */
} hd_update_kind;

/* One trained matrix or vector, as the optimizer sees it. The owner holds the arrays: n elements of
 * the matrix, from `begin` on, which are all of them or this rank's part. */
typedef struct hd_parameter {
    const char *name;
    float *master;
    const float *grad;
    float *first;  /* AdamW's first moment, Muon's momentum; zero at the start */
    float *second; /* AdamW's second moment; NULL with Muon */
    int32_t rows, cols;
    int64_t begin, n; /* with Muon all or none */
    int32_t stack;    /* Muon: so many matrices of rows / stack rows each */
    hd_update_kind kind;
    bool decays; /* weight decay applies: matrices, not norms, biases and sinks */
} hd_parameter;

typedef enum hd_schedule_kind { HD_SCHEDULE_CONSTANT, HD_SCHEDULE_COSINE } hd_schedule_kind;

typedef struct hd_schedule {
    hd_schedule_kind kind;
    int64_t warmup; /* steps in which the rate rises linearly */
    int64_t steps;  /* of the whole run; read by the cosine */
    double last;    /* the rate at the end over the peak rate */
} hd_schedule;

/* Returns the rate of step 0, 1, ... over the peak rate. */
double hd_schedule_at(const hd_schedule *s, int64_t step);

typedef struct hd_optimizer_options {
    double rate;                /* peak rate of AdamW */
    double beta1, beta2, eps;   /* AdamW */
    double muon_rate, momentum; /* Muon */
    double decay;               /* decoupled: times the rate, of both */
    double clip;                /* largest global norm of the gradients; 0: no clipping */
    hd_schedule schedule;
} hd_optimizer_options;

typedef struct hd_optimizer_report {
    double norm;   /* global norm of the gradients of all ranks, before clipping */
    double factor; /* of the schedule */
    bool skipped;  /* a gradient was not finite: nothing changed */
} hd_optimizer_report;

/* Returns the bytes of scratch that hd_optimizer_step() needs for each worker of the stream. */
size_t hd_optimizer_scratch(const hd_parameter *p, int32_t n);

/* Returns the sum of the squares of the gradients, in a fixed order. */
double hd_optimizer_squares(const hd_parameter *p, int32_t n, hd_stream *s);

/* Changes the masters and moments by their gradients, whose squares of all ranks have the sum
 * `squares`. step: 0 for the first one. The stream's scratch must be as large as
 * hd_optimizer_scratch() says. */
void hd_optimizer_step(const hd_optimizer_options *o, const hd_parameter *p, int32_t n,
                       int64_t step, double squares, hd_stream *s, hd_optimizer_report *report);

#endif
