/* histogram.h - counts of values on a logarithmic scale, written from any thread.
 *
 * Sixteen buckets per doubling, so a bucket is at most 6 % wide: any list of Prometheus edges
 * and any quantile can be read from it. */
#ifndef HD_SERVER_HISTOGRAM_H
#define HD_SERVER_HISTOGRAM_H

#include <stdatomic.h>
#include <stdint.h>

enum { HISTOGRAM_BUCKETS = 60 * 16 };

typedef struct histogram {
    atomic_uint_fast64_t counts[HISTOGRAM_BUCKETS];
    atomic_uint_fast64_t n, sum;
} histogram;

void histogram_add(histogram *h, int64_t value, uint64_t times); /* below 0 counts as 0 */
uint64_t histogram_below(const histogram *h, double edge);       /* values up to edge */
double histogram_quantile(const histogram *h, double q);         /* 0 when empty */

#endif
