/* int16_gemm_loops_internal.h - int16 GEMM: x and W become 16-bit integers, segment by
 * segment. Their integer sums are exact; only those are multiplied by scales and become
 * floats. Small M reads W row after row as stored; large M converts a tile of it.
 *
 * The including file defines for its instruction set: words, a register of WORDS integers;
 * totals and floats, registers of LANES sums; sizes, the range of a group of FP8; functions
 * that convert W to words and add their products and totals; TILE_X and TILE_W, rows that
 * fill its registers; FEW, the rows of x, at most eight, up to which no tile is used. */
#ifndef HD_OPS_CPU_INT16_GEMM_LOOPS_INTERNAL_H
#define HD_OPS_CPU_INT16_GEMM_LOOPS_INTERNAL_H

#include <math.h>
#include <stdbool.h>

#include "ops/cpu/gemm_fast_rows_internal.h"

enum {
    GROUP = 16 * LANES, /* columns that one register of totals sums */
    PARTS = GROUP / WORDS,
    SETS = FAST_SUMS / LANES, /* sets of a row's sums, which groups use in turn */
    CYCLE = SETS * GROUP,     /* columns after which the first set is used again */
    ROW_SUMS = FAST_ROWS * FAST_SUMS,
    LIMIT = 8191,  /* magnitude of x, at most: 16 products with the largest of W fit 31 bits */
    NEAR_X = 8192, /* elements of x that stay in the L1 cache */
    TILE_GROUPS = FAST_COLS / GROUP,
    AHEAD = 8192 /* bytes of W prefetched ahead */
};

/* A segment of x whose magnitudes are all below it counts as zero. */
static const float least_x = 0x1p-100f;

INLINE int32_t group_bytes(kind k) {
    return GROUP / FAST_SEGMENT * segment_bytes(k);
}

/* Returns the parts that one read_chunk makes. */
INLINE int32_t chunk_parts(kind k) {
    return k.type == HD_E2M1 ? 4 : 2;
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

/* Compares magnitudes by their bits, so that NaN is the largest. */
INLINE float largest_of(const float *x) {
    const __m256i unsign = _mm256_set1_epi32(INT32_MAX);
    __m256i top = _mm256_setzero_si256();
    for (int32_t i = 0; i < FAST_SEGMENT; i += 8) {
        const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + i));
        top = _mm256_max_epu32(top, _mm256_and_si256(bits, unsign));
    }
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(four));
}

/* Rounds a segment, of which n columns exist. Returns its divisor. */
INLINE float round_segment(int32_t int16[FAST_SEGMENT], const float *x, int32_t n) {
    float end[FAST_SEGMENT];
    if (n < FAST_SEGMENT) {
        memset(end, 0, sizeof end);
        if (n > 0) memcpy(end, x, (size_t)n * sizeof *x);
        x = end;
    }
    const float largest = largest_of(x);
    const float by = largest < least_x ? 0.0f : (float)LIMIT / largest;
    for (int32_t i = 0; i < FAST_SEGMENT; i += 8) {
        const __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(by));
        _mm256_storeu_si256((__m256i *)(void *)(int16 + i), _mm256_cvtps_epi32(y));
    }
    return largest / (float)LIMIT;
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

/* Computes the sums of a group with n_x rows of x. */
INLINE void add_group(totals *sum, const tables *t, const uint16_t *const *x, int32_t n_x,
                      const uint8_t *src, sizes size, bool large, kind k) {
    const int32_t parts = chunk_parts(k);
    UNROLL for (int32_t i = 0; i < n_x; i++) sum[i] = no_totals();
    UNROLL for (int32_t q = 0; q < PARTS; q += parts) {
        words w[4];
        read_chunk(w, t, src, q / parts, size, large, k);
        UNROLL for (int32_t i = 0; i < n_x; i++) {
            UNROLL for (int32_t u = 0; u < parts; u++) {
                sum[i] = add_products(sum[i], w[u], load_words(x[i] + (q + u) * WORDS));
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
    totals part[FEW];
    UNROLL for (int32_t b = 0; b < group_bytes(k); b += HD_CACHE_LINE) {
        _mm_prefetch((const char *)m->want + b, _MM_HINT_T0);
    }
    const place from = m->left < GROUP ? fill_group(p, m->at, m->left, k) : m->at;
    const sizes size = sizes_of(from.src, k);
    if (k.type == HD_E4M3 && are_large(size)) {
        apart();
        add_group(part, t, m->x, n_x, from.src, size, true, k);
    } else {
        add_group(part, t, m->x, n_x, from.src, size, false, k);
    }
    const floats spread = spread_scales(from.scale, size, k);
    UNROLL for (int32_t i = 0; i < n_x; i++) {
        const float *x_scale = m->x_scale + i * (p->x_stride / FAST_SEGMENT);
        sum[i] = add_totals(sum[i], part[i], spread, spread_x_scales(x_scale, k));
        m->x[i] += GROUP;
    }
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
    switch (p->n_x) {
#define ROWS(n)                                               \
    case n:                                                   \
        if ((n) <= FEW) small_m_rows(p, t, row, n_w, (n), k); \
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

/* ---- large-M GEMM: a converted tile ---- */

INLINE void read_group(uint16_t *to, const tables *t, const uint8_t *src, sizes size,
                       bool large, kind k) {
    const int32_t parts = chunk_parts(k);
    UNROLL for (int32_t q = 0; q < PARTS; q += parts) {
        words w[4];
        read_chunk(w, t, src, q / parts, size, large, k);
        UNROLL for (int32_t u = 0; u < parts; u++) store_words(to + (q + u) * WORDS, w[u]);
    }
}

/* Converts columns from c on of n_w <= FAST_ROWS rows, while the next tile is prefetched.
 * Returns the number of groups. */
INLINE int32_t read_tile(const fast_product *p, const tables *t, int32_t row, int32_t n_w,
                         int32_t c, kind k) {
    const bool last = c + FAST_COLS >= p->w->cols;
    const int32_t n = hd_min_i32(FAST_COLS, p->w->cols - c);
    fast_space *s = p->space;
    for (int32_t j = 0; j < n_w; j++) {
        place at = {place_of(p, row + j, c, k), s->row_scale[j] + c / k.block};
        const uint8_t *want =
            last ? row_at(p, row + FAST_ROWS + j) : place_of(p, row + j, c + FAST_COLS, k);
        uint16_t *to = s->tile + j * FAST_COLS;
        float *spread = s->spread + j * LANES; /* [TILE_GROUPS, FAST_ROWS, LANES] */
        for (int32_t left = n; left > 0; left -= GROUP, to += GROUP) {
            UNROLL for (int32_t b = 0; b < group_bytes(k); b += HD_CACHE_LINE) {
                _mm_prefetch((const char *)want + b, _MM_HINT_T0);
            }
            want += group_bytes(k);
            const place from = left < GROUP ? fill_group(p, at, left, k) : at;
            const sizes size = sizes_of(from.src, k);
            if (k.type == HD_E4M3 && are_large(size)) {
                apart();
                read_group(to, t, from.src, size, true, k);
            } else {
                read_group(to, t, from.src, size, false, k);
            }
            store_floats(spread, spread_scales(from.scale, size, k));
            at = next_group(at, k);
            spread += FAST_ROWS * LANES;
        }
    }
    return (int32_t)hd_ceil_div(n, GROUP);
}

/* Multiplies n_x rows of x from the i-th on, at column c, with the tile's rows j .. j +
 * TILE_W - 1. */
INLINE void multiply_block(const fast_product *p, int32_t i, int32_t n_x, int32_t j, int32_t c,
                           int32_t groups, kind k) {
    fast_space *s = p->space;
    const int64_t stride = p->x_stride, x_segments = stride / FAST_SEGMENT;
    const uint16_t *x = s->x + i * stride + c, *w = s->tile + j * FAST_COLS;
    const float *spread = s->spread + j * LANES;
    const float *x_scale = s->x_scale + i * x_segments + c / FAST_SEGMENT;
    for (int32_t g = 0; g < groups; g++, x += GROUP, w += GROUP) {
        totals part[TILE_X][TILE_W];
        UNROLL for (int32_t a = 0; a < n_x; a++) {
            UNROLL for (int32_t b = 0; b < TILE_W; b++) part[a][b] = no_totals();
        }
        UNROLL for (int32_t q = 0; q < PARTS; q++) {
            words row[TILE_X];
            UNROLL for (int32_t a = 0; a < n_x; a++) {
                row[a] = load_words(x + a * stride + q * WORDS);
            }
            UNROLL for (int32_t b = 0; b < TILE_W; b++) {
                const words y = hold(load_words(w + b * FAST_COLS + q * WORDS));
                UNROLL for (int32_t a = 0; a < n_x; a++) {
                    part[a][b] = add_products(part[a][b], y, row[a]);
                }
            }
        }
        UNROLL for (int32_t a = 0; a < n_x; a++) {
            const floats of_x = spread_x_scales(x_scale + a * x_segments, k);
            float *to = s->sums + (i + a) * ROW_SUMS + j * FAST_SUMS + g % SETS * LANES;
            UNROLL for (int32_t b = 0; b < TILE_W; b++, to += FAST_SUMS) {
                store_floats(to, add_totals(load_floats(to), part[a][b],
                                            load_floats(spread + b * LANES), of_x));
            }
        }
        spread += FAST_ROWS * LANES;
        x_scale += GROUP / FAST_SEGMENT;
    }
}

/* Multiplies all rows of x with the n_w rows of the tile; sums of its unused rows are
 * ignored. */
INLINE void multiply_tile(const fast_product *p, int32_t n_w, int32_t c, int32_t groups,
                          kind k) {
    int32_t i = 0;
    for (; i + TILE_X <= p->n_x; i += TILE_X) {
        for (int32_t j = 0; j < n_w; j += TILE_W) {
            multiply_block(p, i, TILE_X, j, c, groups, k);
        }
    }
    for (; i < p->n_x; i++) {
        for (int32_t j = 0; j < n_w; j += TILE_W) multiply_block(p, i, 1, j, c, groups, k);
    }
}

/* A function of its own, because the tables that convert tiles would take registers. */
OUTLINE void multiply_e4m3_tile(const fast_product *p, int32_t n_w, int32_t c, int32_t groups) {
    multiply_tile(p, n_w, c, groups, (kind){HD_E4M3, FAST_SEGMENT});
}

OUTLINE void multiply_e2m1_tile(const fast_product *p, int32_t n_w, int32_t c, int32_t groups) {
    multiply_tile(p, n_w, c, groups, (kind){HD_E2M1, 0}); /* for any block size */
}

INLINE void multiply_tiles(const fast_product *p, const tables *t, int32_t row, int32_t n_w,
                           kind k) {
    read_scales(p, row, n_w);
    memset(p->space->sums, 0, (size_t)(p->n_x * ROW_SUMS) * sizeof *p->space->sums);
    for (int32_t c = 0; c < p->w->cols; c += FAST_COLS) {
        const int32_t groups = read_tile(p, t, row, n_w, c, k);
        if (k.type == HD_E4M3) {
            multiply_e4m3_tile(p, n_w, c, groups);
        } else {
            multiply_e2m1_tile(p, n_w, c, groups);
        }
    }
}

/* ---- reduction ---- */

/* Reduces eight rows of W, all by the same tree: (0 + 1) + (2 + 3), (4 + 5) + (6 + 7), and
 * these. */
INLINE __m256 reduce_eight(const float *sums, kind k) {
    __m256 four[2];
    UNROLL for (int32_t h = 0; h < 2; h++, sums += 4 * FAST_SUMS) {
        const __m256 low = _mm256_hadd_ps(halve(sums, k), halve(sums + FAST_SUMS, k)),
                     high = _mm256_hadd_ps(halve(sums + 2 * FAST_SUMS, k),
                                           halve(sums + 3 * FAST_SUMS, k));
        four[h] = _mm256_hadd_ps(low, high);
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20),
                         _mm256_permute2f128_ps(four[0], four[1], 0x31));
}

INLINE void reduce(float *out, const float *sums, int32_t n, kind k) {
    for (int32_t j = 0; j < n; j += 8) {
        float eight[8];
        _mm256_storeu_ps(eight, reduce_eight(sums + j * FAST_SUMS, k));
        memcpy(out + j, eight, (size_t)hd_min_i32(8, n - j) * sizeof *eight);
    }
}

INLINE void multiply_kind(const fast_product *p, kind k) {
    const tables t = make_tables();
    for (int32_t row = 0; row < p->n_w; row += FAST_ROWS) {
        const int32_t n_w = hd_min_i32(FAST_ROWS, p->n_w - row);
        fetch_scales(p, row + FAST_ROWS, FAST_ROWS);
        if (p->n_x <= FEW) {
            small_m(p, &t, row, n_w, k);
        } else {
            multiply_tiles(p, &t, row, n_w, k);
        }
        for (int32_t i = 0; i < p->n_x; i++) {
            reduce(p->out + i * p->out_stride + row, p->space->sums + i * ROW_SUMS, n_w, k);
        }
    }
}

OUTLINE void multiply_e4m3(const fast_product *p) {
    multiply_kind(p, (kind){HD_E4M3, FAST_SEGMENT});
}

OUTLINE void multiply_e2m1_16(const fast_product *p) {
    multiply_kind(p, (kind){HD_E2M1, 16});
}

OUTLINE void multiply_e2m1_32(const fast_product *p) {
    multiply_kind(p, (kind){HD_E2M1, 32});
}

static void multiply(const fast_product *p) {
    if (p->w->type == HD_E4M3) {
        multiply_e4m3(p);
    } else if (p->w->block_cols == 16) {
        multiply_e2m1_16(p);
    } else {
        multiply_e2m1_32(p);
    }
}

#endif
