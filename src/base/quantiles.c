/* quantiles.c - see quantiles.h. */
#include "base/quantiles.h"

#include <stdlib.h>

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double hd_percentile(const double *sorted, int64_t n, double share) {
    const double at = share * (double)(n - 1);
    const int64_t low = (int64_t)at;
    const int64_t high = low + 1 < n ? low + 1 : low;
    return sorted[low] + (at - (double)low) * (sorted[high] - sorted[low]);
}

hd_quantiles hd_quantiles_of(double *values, int64_t n) {
    hd_quantiles q = {.n = n};
    double sum = 0;
    if (n == 0) return q;
    qsort(values, (size_t)n, sizeof *values, by_value);
    for (int64_t i = 0; i < n; i++) sum += values[i];
    q.mean = sum / (double)n;
    q.median = hd_percentile(values, n, 0.5);
    q.p90 = hd_percentile(values, n, 0.9);
    q.p95 = hd_percentile(values, n, 0.95);
    q.p99 = hd_percentile(values, n, 0.99);
    q.max = values[n - 1];
    return q;
}
