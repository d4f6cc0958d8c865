/* quantiles.h - the usual figures of a set of measured values. */
#ifndef HD_BASE_QUANTILES_H
#define HD_BASE_QUANTILES_H

#include <stdint.h>

typedef struct hd_quantiles {
    double mean, median, p90, p95, p99, max; /* 0 without values */
    int64_t n;
} hd_quantiles;

/* Of sorted[n], n > 0; share is in [0, 1]. Linear between the two nearest ranks. */
double hd_percentile(const double *sorted, int64_t n, double share);

/* Sorts values[n]. */
hd_quantiles hd_quantiles_of(double *values, int64_t n);

#endif
