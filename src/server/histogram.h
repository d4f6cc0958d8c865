/* histogram.h - histograms on a logarithmic scale that any thread may add to. There are
 * sixteen buckets per doubling, so a bucket is at most 6 % wide. Any list of Prometheus
 * edges and any quantile can be computed from it. Readers use a copy, so that their values
 * are consistent while other threads add. */
#ifndef HD_SERVER_HISTOGRAM_H
#define HD_SERVER_HISTOGRAM_H

#include <stdatomic.h>
#include <stdint.h>

enum { HISTOGRAM_BUCKETS = 60 * 16, HISTOGRAM_MARKS = 12 };

typedef struct histogram {
    atomic_uint_fast64_t counts[HISTOGRAM_BUCKETS];
    atomic_uint_fast64_t sum;
} histogram;

typedef struct histogram_copy {
    uint64_t counts[HISTOGRAM_BUCKETS];
    uint64_t n, sum;
} histogram_copy;

void histogram_add(histogram *h, int64_t value, uint64_t times); /* below 0 counts as 0 */
void histogram_read(const histogram *h, histogram_copy *out);

uint64_t histogram_below(const histogram_copy *c, double edge); /* values up to edge */
double histogram_quantile(const histogram_copy *c, double q);   /* 0 when empty */

/* A sliding window: the counts since the oldest of the last HISTOGRAM_MARKS marks. All zero
 * is an empty one. Only one thread may use it. */
typedef struct histogram_window {
    histogram_copy marks[HISTOGRAM_MARKS];
    uint64_t n_marked;
} histogram_window;

void histogram_mark(histogram_window *w, const histogram *h);
void histogram_read_window(const histogram_window *w, const histogram *h, histogram_copy *out);

#endif
