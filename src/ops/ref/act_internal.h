/* act_internal.h - access to activations, pages and rings in CPU operators. */
#ifndef HD_OPS_REF_ACT_INTERNAL_H
#define HD_OPS_REF_ACT_INTERNAL_H

#include <math.h>

#include "ops/ops.h"

/* On the CPU an activation element is a float. */
static inline float *act(hd_rows t) {
    return (float *)t.data;
}

static inline const float *act_in(hd_rows t) {
    return (const float *)t.data;
}

/* Elements between rows of `width` elements. */
static inline int64_t stride_of(hd_rows t, int64_t width) {
    return t.stride ? t.stride : width;
}

static inline int64_t paged_row(const hd_paged *p, int32_t seq, int32_t entry) {
    const int64_t page = p->table[(int64_t)seq * p->table_stride + entry / p->page_entries];
    return page * p->page_entries + entry % p->page_entries;
}

/* Of float32. */
static inline float *paged_entry(const hd_paged *p, int32_t seq, int32_t entry) {
    return act(p->rows) + paged_row(p, seq, entry) * p->width;
}

/* Of any type. */
static inline uint8_t *paged_bytes(const hd_paged *p, int32_t seq, int32_t entry) {
    const size_t row = (size_t)paged_row(p, seq, entry);
    return (uint8_t *)p->rows.data + row * hd_paged_entry_bytes(p);
}

static inline float *ring_row(const hd_ring *r, int32_t seq, int32_t pos) {
    int64_t page = r->table[(int64_t)seq * r->table_stride + pos / r->page_tokens];
    return act(r->rows) + (page * r->ring + pos % r->ring) * r->width;
}

/* Returns the entries that a query at pos sees: complete blocks up to and including its
 * position. */
static inline int32_t visible_entries(int32_t pos, int32_t ratio) {
    return ratio ? (pos + 1) / ratio : 0;
}

/* Returns the first row of sequence `seq` at position `pos` or later, or the end of its rows.
 * No row can be further ahead than its position, and without gaps it is exactly there. */
static inline int32_t row_from(const hd_seqs *s, int32_t seq, int32_t pos) {
    int32_t low = s->first_row[seq], high = s->first_row[seq + 1];
    if (low == high || pos <= s->pos[low]) return low;
    if (pos - s->pos[low] < high - low) high = low + pos - s->pos[low];
    if (s->pos[high - 1] < pos) return high;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (s->pos[middle] < pos) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Returns the row of sequence `seq` at position `pos`, or -1 if the step has none. */
static inline int32_t row_at(const hd_seqs *s, int32_t seq, int32_t pos) {
    const int32_t row = row_from(s, seq, pos);
    return row < s->first_row[seq + 1] && s->pos[row] == pos ? row : -1;
}

/* The product is rounded to float32 first, as in every reference implementation; at long
 * range that decides the angle (models.md 2.1.4). */
static inline float rope_angle(int32_t pos, float freq) {
    return (float)pos * freq;
}

/* a . b, one product after the other, in float64. */
static inline double ops_dot64(const float *a, const float *b, int32_t n) {
    double sum = 0.0;
    for (int32_t i = 0; i < n; i++) sum += (double)a[i] * (double)b[i];
    return sum;
}

static inline float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

static inline float silu(float x) {
    return x * sigmoid(x);
}

static inline void rotate_pair(float *out, const float *x, int64_t first, int64_t second,
                               float c, float s) {
    float a = x[first], b = x[second];
    out[first] = a * c - b * s;
    out[second] = a * s + b * c;
}

#endif
