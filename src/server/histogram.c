/* histogram.c - floating buckets: the exponent and four bits of the mantissa. */
#include "server/histogram.h"

#include <stddef.h>

enum { STEPS = 16 };

static size_t bucket_of(uint64_t v) {
    if (v < STEPS) return (size_t)v;
    const int exponent = 63 - __builtin_clzll(v); /* at least 4 */
    const size_t i = (size_t)(exponent - 3) * STEPS + (size_t)(v >> (exponent - 4)) - STEPS;
    return i < HISTOGRAM_BUCKETS ? i : HISTOGRAM_BUCKETS - 1;
}

/* The first value behind the bucket. */
static double end_of(size_t bucket) {
    if (bucket < STEPS) return (double)bucket + 1;
    const size_t exponent = bucket / STEPS + 3, mantissa = bucket % STEPS + STEPS;
    return (double)(mantissa + 1) * (double)(1ull << (exponent - 4));
}

void histogram_add(histogram *h, int64_t value, uint64_t times) {
    const uint64_t v = value < 0 ? 0 : (uint64_t)value;
    atomic_fetch_add_explicit(&h->counts[bucket_of(v)], times, memory_order_relaxed);
    atomic_fetch_add_explicit(&h->n, times, memory_order_relaxed);
    atomic_fetch_add_explicit(&h->sum, v * times, memory_order_relaxed);
}

uint64_t histogram_below(const histogram *h, double edge) {
    uint64_t n = 0;
    for (size_t i = 0; i < HISTOGRAM_BUCKETS && end_of(i) - 1 <= edge; i++) {
        n += atomic_load_explicit(&h->counts[i], memory_order_relaxed);
    }
    return n;
}

double histogram_quantile(const histogram *h, double q) {
    const uint64_t n = atomic_load_explicit(&h->n, memory_order_relaxed);
    uint64_t seen = 0;
    for (size_t i = 0; i < HISTOGRAM_BUCKETS; i++) {
        seen += atomic_load_explicit(&h->counts[i], memory_order_relaxed);
        if (n && (double)seen >= q * (double)n) return end_of(i);
    }
    return 0;
}
