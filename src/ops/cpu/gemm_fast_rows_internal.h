/* gemm_fast_rows_internal.h - --precision fast: addresses of a matrix's stored rows and
 * scales, and their prefetching. */
#ifndef HD_OPS_CPU_GEMM_FAST_ROWS_INTERNAL_H
#define HD_OPS_CPU_GEMM_FAST_ROWS_INTERNAL_H

#include <immintrin.h>
#include <string.h>

#include "base/checked.h"
#include "base/memory.h"
#include "ops/cpu/gemm_fast_internal.h"
#include "ops/cpu/inline_internal.h"

/* The storage format of a matrix; a compile-time constant where used. */
typedef struct kind {
    hd_dtype type;
    int32_t block; /* columns that share a scale; 0: no scales */
} kind;

INLINE int32_t segment_bytes(kind k) {
    return k.type == HD_E2M1 ? 64 : k.type == HD_E4M3 ? 128 : 256;
}

INLINE bool is_fine(kind k) {
    return k.type == HD_E4M3 && k.block == 32;
}

/* Small M has code for every number of rows of x. For FP8 in blocks of 32 it has code for 1, 2, 4 and 8 of
 * them, which keeps the program small: what it computes of further rows is not read. */
INLINE int32_t small_m_count(int32_t n_x, kind k) {
    return !is_fine(k) || n_x < 3 ? n_x : n_x <= 4 ? 4 : 8;
}

INLINE bool has_small_m(int32_t n_x, kind k) {
    return small_m_count(n_x, k) == n_x;
}

INLINE const uint8_t *row_at(const fast_product *p, int32_t row) {
    return (const uint8_t *)p->w->data + (p->row + row) * p->row_bytes;
}

INLINE const uint8_t *place_of(const fast_product *p, int32_t row, int32_t c, kind k) {
    return row_at(p, row) + c / FAST_SEGMENT * segment_bytes(k);
}

/* Returns the address to prefetch, `ahead` rows after row j of n_w. Rows are read side by
 * side in ranges of n columns, now from c on. After the last row it is in the next range,
 * after the last range in the next rows. */
INLINE const uint8_t *place_ahead(const fast_product *p, int32_t row, int32_t n_w, int32_t j,
                                  int32_t c, int32_t n, kind k) {
    if (j < n_w) return place_of(p, row + j, c, k);
    return c + n < p->w->cols ? place_of(p, row + j - n_w, c + n, k)
                              : place_of(p, row + j, 0, k);
}

/* ---- scales ---- */

INLINE int64_t scale_row_bytes(const fast_product *p) {
    const hd_weight *w = p->w;
    return hd_ceil_div(w->cols, w->block_cols) * hd_dtype_bits(w->scale_type) / 8;
}

/* Dequantizes scales of rows [row, row + n), each padded with zeros to fast_scales, as far
 * as they differ; row_scale[j] points to those of row + j. */
OUTLINE void read_scales(const fast_product *p, int32_t row, int32_t n) {
    const hd_weight *w = p->w;
    const int32_t all = fast_scales(w);
    fast_space *s = p->space;
    float *to = s->scale;
    if (!w->scale) {
        for (int32_t i = 0; i < all; i++) to[i] = 1.0f;
        for (int32_t j = 0; j < n; j++) s->row_scale[j] = to;
        return;
    }
    const int32_t there = (int32_t)hd_ceil_div(w->cols, w->block_cols);
    const int32_t first = (p->row + row) / w->block_rows;
    int32_t r = 0, in_block = (p->row + row) % w->block_rows;
    for (int32_t j = 0; j < n; j++) {
        s->row_scale[j] = to + r * all;
        if (j + 1 == n || ++in_block < w->block_rows) continue;
        in_block = 0;
        r++;
    }
    const uint8_t *src = (const uint8_t *)w->scale + first * scale_row_bytes(p);
    if (there == all) {
        p->read_scales(to, src, (r + 1) * all, &w->global, INT32_MAX);
        return;
    }
    for (; r >= 0; r--, to += all, src += scale_row_bytes(p)) {
        p->read_scales(to, src, there, &w->global, INT32_MAX);
        for (int32_t i = there; i < all; i++) to[i] = 0.0f;
    }
}

/* Prefetches the scales of later rows. They are few bytes a row, which the hardware
 * prefetcher misses. */
INLINE void fetch_scales(const fast_product *p, int32_t row, int32_t n) {
    const hd_weight *w = p->w;
    if (!w->scale || w->block_rows != 1) return;
    const int64_t bytes = scale_row_bytes(p);
    const char *at = (const char *)w->scale + (p->row + row) * bytes;
    for (int64_t b = 0; b < n * bytes; b += HD_CACHE_LINE) _mm_prefetch(at + b, _MM_HINT_T0);
}

#endif
