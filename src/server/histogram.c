/* histogram.c - buckets by floating-point format: the exponent and four bits of the
 * mantissa. */
#include "server/histogram.h"

#include <stddef.h>

enum { STEPS = 16 };

static size_t bucket_of(uint64_t v) {
    if (v < STEPS) return (size_t)v;
    const int exponent = 63 - __builtin_clzll(v); /* at least 4 */
    const size_t i = (size_t)(exponent - 3) * STEPS + (size_t)(v >> (exponent - 4)) - STEPS;
    return i < HISTOGRAM_BUCKETS ? i : HISTOGRAM_BUCKETS - 1;
}

/* Returns the first value above the bucket. */
static double end_of(size_t bucket) {
    if (bucket < STEPS) return (double)bucket + 1;
    const size_t exponent = bucket / STEPS + 3, mantissa = bucket % STEPS + STEPS;
    return (double)(mantissa + 1) * (double)(1ull << (exponent - 4));
}

void histogram_add(histogram *h, int64_t value, uint64_t times) {
    const uint64_t v = value < 0 ? 0 : (uint64_t)value;
    atomic_fetch_add_explicit(&h->counts[bucket_of(v)], times, memory_order_relaxed);
    atomic_fetch_add_explicit(&h->sum, v * times, memory_order_relaxed);
}

void histogram_read(const histogram *h, histogram_copy *out) {
    out->n = 0;
    out->sum = atomic_load_explicit(&h->sum, memory_order_relaxed);
    for (size_t i = 0; i < HISTOGRAM_BUCKETS; i++) {
        out->counts[i] = atomic_load_explicit(&h->counts[i], memory_order_relaxed);
        out->n += out->counts[i];
    }
}

uint64_t histogram_below(const histogram_copy *c, double edge) {
    uint64_t n = 0;
    for (size_t i = 0; i < HISTOGRAM_BUCKETS && end_of(i) - 1 <= edge; i++) n += c->counts[i];
    return n;
}

double histogram_quantile(const histogram_copy *c, double q) {
    uint64_t seen = 0;
    for (size_t i = 0; c->n && i < HISTOGRAM_BUCKETS; i++) {
        seen += c->counts[i];
        if ((double)seen >= q * (double)c->n) return end_of(i);
    }
    return 0;
}

void histogram_mark(histogram_window *w, const histogram *h) {
    histogram_read(h, &w->marks[w->n_marked++ % HISTOGRAM_MARKS]);
}

void histogram_read_window(const histogram_window *w, const histogram *h, histogram_copy *out) {
    histogram_read(h, out);
    if (w->n_marked < HISTOGRAM_MARKS) return; /* fewer marks than that since the start */
    const histogram_copy *oldest = &w->marks[w->n_marked % HISTOGRAM_MARKS];
    out->n -= oldest->n;
    out->sum -= oldest->sum;
    for (size_t i = 0; i < HISTOGRAM_BUCKETS; i++) out->counts[i] -= oldest->counts[i];
}
