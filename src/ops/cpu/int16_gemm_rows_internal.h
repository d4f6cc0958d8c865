/* int16_gemm_rows_internal.h - int16 GEMM: rows of x and of W, group by group, and small M,
 * which reads W row after row as stored.
 *
 * Before this header the including file defines for its instruction set: words, a register
 * of WORDS integers; totals and floats, registers of LANES sums; sizes, the range of a group
 * of FP8; functions that convert W to words and add their products and totals; TILE_X and
 * TILE_W, rows that fill its registers; FEW, the rows of x, at most eight, up to which no
 * tile is used. */
#ifndef HD_OPS_CPU_INT16_GEMM_ROWS_INTERNAL_H
#define HD_OPS_CPU_INT16_GEMM_ROWS_INTERNAL_H

#include "ops/cpu/int16_gemm_values_internal.h"

enum {
    GROUP = 16 * LANES, /* columns that one register of totals sums */
    PARTS = GROUP / WORDS,
    SETS = FAST_SUMS / LANES, /* sets of a row's sums, which groups use in turn */
    CYCLE = SETS * GROUP,     /* columns after which the first set is used again */
    ROW_SUMS = FAST_ROWS * FAST_SUMS,
    NEAR_X = 8192, /* elements of x that stay in the L1 cache */
    AHEAD = 8192   /* bytes of W prefetched ahead */
};

INLINE int32_t group_bytes(kind k) {
    return GROUP / FAST_SEGMENT * segment_bytes(k);
}

/* Returns the parts that one read_chunk makes. */
INLINE int32_t chunk_parts(kind k) {
    return k.type == HD_E2M1 ? 4 : 2;
}

/* Returns how many scales the columns of a lane have, one after the other. */
INLINE int32_t spans_of(kind k) {
    return k.type == HD_E4M3 ? FAST_SEGMENT / k.block : 1;
}

/* ---- x ---- */

/* Reorders a group of x like read_chunk orders the elements of W, eight columns at a time.
 * FP8 has every other eight in the next part. FP4 has columns q and q + 4 in part q of four,
 * and the second of every two eights in the four parts after those. */
INLINE void arrange(uint16_t *to, const int32_t *int16, hd_dtype type) {
    const __m128i four_on = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    for (int32_t i = 0; i < GROUP / 8; i++) {
        const __m128i *at = (const __m128i *)(const void *)(int16 + 8 * i);
        const __m128i narrow = _mm_packs_epi32(_mm_loadu_si128(at), _mm_loadu_si128(at + 1));
        if (type == HD_E4M3) {
            const int32_t part = i % 16 / 4 * 2 + i % 2, lane = i / 16 * 16 + i % 4 / 2 * 8;
            memcpy(to + part * WORDS + lane, &narrow, sizeof narrow);
            continue;
        }
        uint32_t pair[4];
        _mm_storeu_si128((__m128i *)(void *)pair, _mm_shuffle_epi8(narrow, four_on));
        const int32_t lane = i % LANES / 4 * 4 + i / LANES * 2 + i % 4 / 2;
        for (int32_t q = 0; q < 4; q++) {
            memcpy(to + (i % 2 * 4 + q) * WORDS + lane * 2, pair + q, 4);
        }
    }
}

static void round_row(uint16_t *to, float *scale, const float *from, int32_t n, hd_dtype type) {
    for (int32_t c = 0; c < n; c += GROUP, to += GROUP) {
        int32_t int16[GROUP];
        for (int32_t i = 0; i < GROUP; i += FAST_SEGMENT) {
            *scale++ = round_segment(int16 + i, from + c + i, n - c - i);
        }
        arrange(to, int16, type);
    }
}

/* ---- W ---- */

/* A group of W and its scales. */
typedef struct place {
    const uint8_t *src;
    const float *scale;
} place;

INLINE place next_group(place at, kind k) {
    return (place){at.src + group_bytes(k), at.scale + GROUP / k.block};
}

/* Pads the n columns at the end of a row to a complete group; the padding has scale 0. */
INLINE place fill_group(const fast_product *p, place from, int32_t n, kind k) {
    fast_space *s = p->space;
    const int32_t there = (int32_t)hd_ceil_div(n, FAST_SEGMENT) * (FAST_SEGMENT / k.block);
    copy_filled(s->end, from.src, k.type == HD_E2M1 ? n / 2 : n, group_bytes(k));
    for (int32_t i = 0; i < GROUP / k.block; i++) {
        s->end_scale[i] = i < there ? from.scale[i] : 0.0f;
    }
    return (place){s->end, s->end_scale};
}

/* ---- small-M GEMM ---- */

/* Columns [col, col + n) of a row of W. */
typedef struct stretch {
    place at;
    const uint8_t *want; /* address to prefetch meanwhile */
    int32_t row, col, n;
} stretch;

/* Prevents loads that both branches need from being hoisted before the branch: there are few
 * registers. */
INLINE void apart(void) {
    __asm__ volatile("" ::: "memory");
}

/* Computes the sums of a span of a group with n_x rows of x. */
INLINE void add_span(totals *sum, const tables *t, const uint16_t *const *x, int32_t n_x,
                     const uint8_t *src, sizes size, bool large, int32_t span, kind k) {
    const int32_t parts = chunk_parts(k), all = PARTS / spans_of(k);
    UNROLL for (int32_t i = 0; i < n_x; i++) sum[i] = no_totals();
    UNROLL for (int32_t q = 0; q < all; q += parts) {
        words w[4];
        read_chunk(w, t, src, (span * all + q) / parts, size, large, k);
        UNROLL for (int32_t i = 0; i < n_x; i++) {
            const uint16_t *from = x[i] + (span * all + q) * WORDS;
            UNROLL for (int32_t u = 0; u < parts; u++) {
                sum[i] = add_products(sum[i], w[u], load_words(from + u * WORDS));
            }
        }
    }
}

/* The operands of a row of W and n_x rows of x. */
typedef struct small_m_args {
    place at;
    const uint8_t *want;
    const float *x_scale;
    const uint16_t *x[FEW];
    int32_t left; /* columns left */
} small_m_args;

/* Multiplies the next group; n_x and k are compile-time constants. */
INLINE void small_m_group(floats sum[FEW], const fast_product *p, const tables *t,
                          small_m_args *m, int32_t n_x, kind k) {
    UNROLL for (int32_t b = 0; b < group_bytes(k); b += HD_CACHE_LINE) {
        _mm_prefetch((const char *)m->want + b, _MM_HINT_T0);
    }
    const place from = m->left < GROUP ? fill_group(p, m->at, m->left, k) : m->at;
    const sizes size = sizes_of(from.src, k);
    /* not unrolled: the program would be larger by 40 KB */
    for (int32_t span = 0; span < spans_of(k); span++) {
        totals part[FEW];
        if (k.type == HD_E4M3 && are_large(size)) {
            apart();
            add_span(part, t, m->x, n_x, from.src, size, true, span, k);
        } else {
            add_span(part, t, m->x, n_x, from.src, size, false, span, k);
        }
        const floats spread = spread_scales(from.scale, size, span, k);
        UNROLL for (int32_t i = 0; i < n_x; i++) {
            const float *x_scale = m->x_scale + i * (p->x_stride / FAST_SEGMENT);
            sum[i] = add_totals(sum[i], part[i], spread, spread_x_scales(x_scale, k));
        }
    }
    UNROLL for (int32_t i = 0; i < n_x; i++) m->x[i] += GROUP;
    m->at = next_group(m->at, k);
    m->want += group_bytes(k);
    m->x_scale += GROUP / FAST_SEGMENT;
    m->left -= GROUP;
}

INLINE void small_m_row(const fast_product *p, const tables *t, const stretch *s, int32_t n_x,
                        kind k) {
    float *sums = p->space->sums + s->row % FAST_ROWS * FAST_SUMS;
    small_m_args m = {.at = s->at,
                      .want = s->want,
                      .x_scale = p->space->x_scale + s->col / FAST_SEGMENT,
                      .left = s->n};
    floats sum[SETS][FEW];
    UNROLL for (int32_t i = 0; i < n_x; i++) {
        m.x[i] = p->space->x + i * p->x_stride + s->col;
        UNROLL for (int32_t set = 0; set < SETS; set++) {
            sum[set][i] = s->col ? load_floats(sums + i * ROW_SUMS + set * LANES) : no_floats();
        }
    }
    while (m.left > 0) {
        small_m_group(sum[0], p, t, &m, n_x, k);
        if (SETS == 2 && m.left > 0) small_m_group(sum[SETS - 1], p, t, &m, n_x, k);
    }
    UNROLL for (int32_t i = 0; i < n_x; i++) {
        UNROLL for (int32_t set = 0; set < SETS; set++) {
            store_floats(sums + i * ROW_SUMS + set * LANES, sum[set][i]);
        }
    }
}

/* Multiplies n_w <= FAST_ROWS rows of W, in column ranges for which x stays in the L1 cache. */
INLINE void small_m_rows(const fast_product *p, const tables *t, int32_t row, int32_t n_w,
                         int32_t n_x, kind k) {
    const int32_t cols = p->w->cols, cycles = (int32_t)hd_ceil_div(cols, CYCLE);
    const int32_t stretches = (int32_t)hd_ceil_div(cycles, NEAR_X / n_x / CYCLE);
    const int32_t wide = (int32_t)hd_ceil_div(cycles, stretches) * CYCLE;
    const int32_t bytes = wide / FAST_SEGMENT * segment_bytes(k);
    const int32_t ahead = hd_min_i32(n_w, (int32_t)hd_ceil_div(AHEAD, bytes));
    read_scales(p, row, n_w);
    for (int32_t c = 0; c < cols; c += wide) {
        for (int32_t j = 0; j < n_w; j++) {
            stretch s = {
                .at = {place_of(p, row + j, c, k), p->space->row_scale[j] + c / k.block},
                .row = row + j,
                .col = c,
                .n = hd_min_i32(wide, cols - c)
            };
            s.want = stretches == 1 ? s.at.src + AHEAD
                                    : place_ahead(p, row, n_w, j + ahead, c, wide, k);
            small_m_row(p, t, &s, n_x, k);
        }
    }
}

INLINE void small_m(const fast_product *p, const tables *t, int32_t row, int32_t n_w, kind k) {
    switch (small_m_count(p->n_x, k)) {
#define ROWS(n)                                                                      \
    case n:                                                                          \
        if ((n) <= FEW && has_small_m((n), k)) small_m_rows(p, t, row, n_w, (n), k); \
        break;
        ROWS(1)
        ROWS(2)
        ROWS(3)
        ROWS(4)
        ROWS(5)
        ROWS(6)
        ROWS(7)
        ROWS(8)
#undef ROWS
    default:
        break;
    }
}

#endif
