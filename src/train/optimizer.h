/* optimizer.h - AdamW and Muon over float32 master weights, with a rate schedule and clipping
 * by the global norm.
 *
 * All state is float32, in memory of the device whose operators change it (ops/optimizer.h). Norms are
 * sums in a fixed order, so the result does not depend on threads (design D8), nor on the device.
 * Formulas: docs/training.md. */
#ifndef HD_TRAIN_OPTIMIZER_H
#define HD_TRAIN_OPTIMIZER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "ops/backward.h"

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

/* What the optimizer runs on. */
typedef struct hd_optimizer_env {
    const hd_backward_ops *ops;
    hd_stream *stream; /* after hd_optimizer_reserve() */
    /* [hd_optimizer_sums(n)] of the largest n, device and host memory */
    double *sums, *host_sums;
} hd_optimizer_env;

/* Reserves the stream's scratch for hd_optimizer_step(). on_host: the stream is a CPU's. */
hd_status hd_optimizer_reserve(hd_stream *s, bool on_host, const hd_parameter *p, int32_t n,
                               hd_err *err);

int64_t hd_optimizer_sums(int64_t n);

/* *out = the sum of the squares of the gradients grad [n], in a fixed order. */
hd_status hd_optimizer_squares(double *out, const hd_optimizer_env *env, const float *grad,
                               int64_t n, hd_err *err);

/* Queues what changes the masters and moments by their gradients, whose squares of all ranks have the sum
 * `squares`. step: 0 for the first one. */
void hd_optimizer_step(const hd_optimizer_options *o, const hd_parameter *p, int32_t n,
                       int64_t step, double squares, const hd_optimizer_env *env,
                       hd_optimizer_report *report);

#endif
