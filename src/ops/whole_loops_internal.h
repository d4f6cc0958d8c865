/* whole_loops_internal.h - products in whole numbers: x and W become numbers of 16 bits, segment by
 * segment, whose sums are whole and exact; only those meet scales and become floats. Few rows of x
 * meet W as it lies, row after row; more meet a tile of it.
 *
 * Before it comes what an instruction set brings: words, a register of WORDS whole numbers, and
 * totals, one of their sums; what makes words of W and adds their products and totals; TILE_X and
 * TILE_W, rows that fill its registers. */
#ifndef HD_OPS_WHOLE_LOOPS_INTERNAL_H
#define HD_OPS_WHOLE_LOOPS_INTERNAL_H

#include <math.h>
#include <stdbool.h>

#include "ops/fast_rows_internal.h"

enum {
    PARTS = FAST_SEGMENT / WORDS,
    FEW = 4,   /* rows of x that do without a tile */
    LANES = 8, /* sums of a segment, and of a row of W */
    ROW_SUMS = FAST_ROWS * LANES,
    LIMIT = 8191,  /* of x: a sum of 16 products with the largest of W has 31 bits */
    NEAR_X = 8192, /* elements of x that stay in the first cache */
    TILE_SEGMENTS = FAST_COLS / FAST_SEGMENT,
    AHEAD = 8192 /* bytes of W that are fetched ahead */
};

/* A segment of x whose magnitudes are all below it is nothing. */
static const float least_x = 0x1p-100f;

/* What whole numbers of W are multiples of: those of FP4 and small FP8, and of larger FP8. */
static const float fine = 0x1p-9f, coarse = 0x1p-5f;

/* Parts that one read_chunk makes. */
INLINE int32_t chunk_parts(kind k) {
    return k.type == HD_E2M1 ? 4 : 2;
}

/* ---- x ---- */

/* Eight whole numbers from column c on. */
INLINE __m128i narrow(const int32_t *whole, int32_t c) {
    const __m128i *at = (const __m128i *)(const void *)(whole + c);
    return _mm_packs_epi32(_mm_loadu_si128(at), _mm_loadu_si128(at + 1));
}

/* A segment of x in the order that read_chunk leaves the elements of W in: of FP8 every other eight of
 * 16 columns; of FP4 in a lane of part p the columns p and p + 4 of eight. */
INLINE void arrange(uint16_t *to, const int32_t *whole, hd_dtype type) {
    if (type == HD_E4M3) {
        for (int32_t i = 0; i < FAST_SEGMENT; i += 8) {
            const int32_t part = i / WORDS, word = i % WORDS;
            const int32_t c = part / 2 * 2 * WORDS + word * 2 + part % 2 * 8;
            _mm_storeu_si128((__m128i *)(void *)(to + i), narrow(whole, c));
        }
        return;
    }
    const __m128i apart_by_four =
        _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    for (int32_t i = 0; i < FAST_SEGMENT / 8; i++) {
        const int32_t lane = i % (WORDS / 2), half = i / (WORDS / 2);
        const __m128i eight =
            _mm_shuffle_epi8(narrow(whole, four_of(lane, half) * 8), apart_by_four);
        uint32_t pair[4];
        _mm_storeu_si128((__m128i *)(void *)pair, eight);
        for (int32_t q = 0; q < 4; q++) {
            memcpy(to + (half * 4 + q) * WORDS + lane * 2, pair + q, sizeof *pair);
        }
    }
}

/* Magnitudes are compared by their bits, so that one that is not a number is the largest. */
INLINE float largest_of(const float *x) {
    const __m256i unsign = _mm256_set1_epi32(INT32_MAX);
    __m256i top = _mm256_setzero_si256();
    for (int32_t i = 0; i < FAST_SEGMENT; i += LANES) {
        const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + i));
        top = _mm256_max_epu32(top, _mm256_and_si256(bits, unsign));
    }
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(four));
}

static void round_row(uint16_t *to, float *scale, const float *from, int32_t n, hd_dtype type) {
    for (int32_t c = 0; c < n; c += FAST_SEGMENT, to += FAST_SEGMENT) {
        float end[FAST_SEGMENT];
        int32_t whole[FAST_SEGMENT];
        const float *x = from + c;
        if (n - c < FAST_SEGMENT) {
            memset(end, 0, sizeof end);
            x = memcpy(end, x, (size_t)(n - c) * sizeof *x);
        }
        const float largest = largest_of(x);
        const float by = largest < least_x ? 0.0f : (float)LIMIT / largest;
        for (int32_t i = 0; i < FAST_SEGMENT; i += LANES) {
            const __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(by));
            _mm256_storeu_si256((__m256i *)(void *)(whole + i), _mm256_cvtps_epi32(y));
        }
        arrange(to, whole, type);
        scale[c / FAST_SEGMENT] = largest / (float)LIMIT;
    }
}

/* ---- W ---- */

/* The scales of a segment's sums, as the stored elements want them. */
INLINE __m256 spread_scales(const float *at, kind k, float unit) {
    __m256 spread;
    if (k.type == HD_E4M3) {
        spread = _mm256_set1_ps(*at);
    } else if (k.block == 32) {
        spread = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(at)),
                                          _mm256_setr_epi32(0, 0, 2, 2, 1, 1, 3, 3));
    } else {
        spread = _mm256_permutevar8x32_ps(_mm256_loadu_ps(at),
                                          _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7));
    }
    return _mm256_mul_ps(spread, _mm256_set1_ps(unit));
}

INLINE float unit_of(magnitude size) {
    return size == SMALL ? fine : size == LARGE ? coarse : NAN;
}

/* ---- few rows of x ---- */

/* Columns [col, col + n) of a row of W, and its scales there. */
typedef struct stretch {
    const uint8_t *src, *want; /* `want`: what is fetched meanwhile */
    const float *scale;
    int32_t row, col, n;
} stretch;

/* Keeps what both branches want from being loaded before it is known which is taken: there are few
 * registers. */
INLINE void apart(void) {
    __asm__ volatile("" ::: "memory");
}

/* Sums of a segment with n_x rows of x. */
INLINE void add_segment(totals *sum, const tables *t, const uint16_t *const *x, int32_t n_x,
                        const uint8_t *src, bool small, kind k) {
    const int32_t parts = chunk_parts(k);
    UNROLL for (int32_t i = 0; i < n_x; i++) sum[i] = no_totals();
    UNROLL for (int32_t q = 0; q < PARTS; q += parts) {
        words w[4];
        read_chunk(w, t, src, q / parts, small, k);
        UNROLL for (int32_t i = 0; i < n_x; i++) {
            UNROLL for (int32_t u = 0; u < parts; u++) {
                sum[i] = add_products(sum[i], w[u], load_words(x[i] + (q + u) * WORDS));
            }
        }
    }
}

/* With n_x rows of x; n_x and k are constants here. */
INLINE void meet_row(const fast_product *p, const tables *t, const stretch *m, int32_t n_x,
                     kind k) {
    const int32_t bytes = segment_bytes(k), scales = fast_segment_scales(p->w);
    const int64_t x_segments = p->x_stride / FAST_SEGMENT;
    float *sums = p->space->sums + m->row % FAST_ROWS * LANES;
    const float *x_scale = p->space->x_scale + m->col / FAST_SEGMENT, *scale = m->scale;
    const uint8_t *src = m->src, *want = m->want;
    const uint16_t *x[FEW];
    __m256 sum[FEW];
    UNROLL for (int32_t i = 0; i < n_x; i++) {
        x[i] = p->space->x + i * p->x_stride + m->col;
        sum[i] = m->col ? _mm256_loadu_ps(sums + i * ROW_SUMS) : _mm256_setzero_ps();
    }
    for (int32_t left = m->n; left > 0; left -= FAST_SEGMENT) {
        totals part[FEW];
        UNROLL for (int32_t b = 0; b < bytes; b += HD_CACHE_LINE) {
            _mm_prefetch((const char *)want + b, _MM_HINT_T0);
        }
        const uint8_t *from = left < FAST_SEGMENT ? fill_up(p, src, left) : src;
        const magnitude size = k.type == HD_E4M3 ? magnitude_of(from) : SMALL;
        if (k.type == HD_E4M3 && size == SMALL) {
            apart();
            add_segment(part, t, x, n_x, from, true, k);
        } else {
            add_segment(part, t, x, n_x, from, false, k);
        }
        const __m256 spread = spread_scales(scale, k, unit_of(size));
        UNROLL for (int32_t i = 0; i < n_x; i++) {
            sum[i] = add_totals(sum[i], part[i], spread, x_scale[i * x_segments], k);
            x[i] += FAST_SEGMENT;
        }
        src += bytes;
        want += bytes;
        scale += scales;
        x_scale++;
    }
    UNROLL for (int32_t i = 0; i < n_x; i++) _mm256_storeu_ps(sums + i * ROW_SUMS, sum[i]);
}

/* n_w <= FAST_ROWS rows of W, in stretches of columns for which x stays in the first cache. */
INLINE void meet_rows(const fast_product *p, const tables *t, int32_t row, int32_t n_w,
                      int32_t n_x, kind k) {
    const int32_t cols = p->w->cols, segments = (int32_t)hd_ceil_div(cols, FAST_SEGMENT);
    const int32_t stretches = (int32_t)hd_ceil_div(segments, NEAR_X / n_x / FAST_SEGMENT);
    const int32_t wide = (int32_t)hd_ceil_div(segments, stretches) * FAST_SEGMENT;
    const int32_t bytes = wide / FAST_SEGMENT * segment_bytes(k);
    const int32_t ahead = hd_min_i32(n_w, (int32_t)hd_ceil_div(AHEAD, bytes));
    read_scales(p, row, n_w);
    for (int32_t c = 0; c < cols; c += wide) {
        for (int32_t j = 0; j < n_w; j++) {
            stretch m = {.src = place_of(p, row + j, c, k),
                         .scale = p->space->row_scale[j] +
                                  c / FAST_SEGMENT * fast_segment_scales(p->w),
                         .row = row + j,
                         .col = c,
                         .n = hd_min_i32(wide, cols - c)};
            m.want = stretches == 1 ? m.src + AHEAD
                                    : place_ahead(p, row, n_w, j + ahead, c, wide, k);
            meet_row(p, t, &m, n_x, k);
        }
    }
}

INLINE void meet(const fast_product *p, const tables *t, int32_t row, int32_t n_w, kind k) {
    switch (p->n_x) {
    case 1:
        meet_rows(p, t, row, n_w, 1, k);
        break;
    case 2:
        meet_rows(p, t, row, n_w, 2, k);
        break;
    case 3:
        meet_rows(p, t, row, n_w, 3, k);
        break;
    default:
        meet_rows(p, t, row, n_w, FEW, k);
    }
}

/* ---- a tile ---- */

INLINE void read_segment(uint16_t *to, const tables *t, const uint8_t *src, bool small,
                         kind k) {
    const int32_t parts = chunk_parts(k);
    UNROLL for (int32_t q = 0; q < PARTS; q += parts) {
        words w[4];
        read_chunk(w, t, src, q / parts, small, k);
        UNROLL for (int32_t u = 0; u < parts; u++) store_words(to + (q + u) * WORDS, w[u]);
    }
}

/* Columns from c on of n_w <= FAST_ROWS rows, while the same of the next tile are asked for. Gives how
 * many segments. */
INLINE int32_t read_tile(const fast_product *p, const tables *t, int32_t row, int32_t n_w,
                         int32_t c, kind k) {
    const int32_t bytes = segment_bytes(k), first = c / FAST_SEGMENT;
    const bool last = c + FAST_COLS >= p->w->cols;
    const int32_t n = hd_min_i32(FAST_COLS, p->w->cols - c);
    const int32_t segments = (int32_t)hd_ceil_div(n, FAST_SEGMENT);
    fast_space *s = p->space;
    for (int32_t j = 0; j < n_w; j++) {
        const uint8_t *src = row_at(p, row + j) + first * bytes;
        const uint8_t *want =
            last ? row_at(p, row + FAST_ROWS + j) : src + TILE_SEGMENTS * bytes;
        const float *scale = p->space->row_scale[j] + first * fast_segment_scales(p->w);
        uint16_t *to = s->tile + j * FAST_COLS;
        float *spread = s->spread + j * LANES; /* [TILE_SEGMENTS, FAST_ROWS, LANES] */
        for (int32_t left = n; left > 0; left -= FAST_SEGMENT, to += FAST_SEGMENT) {
            UNROLL for (int32_t b = 0; b < bytes; b += HD_CACHE_LINE) {
                _mm_prefetch((const char *)want + b, _MM_HINT_T0);
            }
            want += bytes;
            if (left < FAST_SEGMENT) src = fill_up(p, src, left);
            const magnitude size = k.type == HD_E4M3 ? magnitude_of(src) : SMALL;
            if (k.type == HD_E4M3 && size == SMALL) {
                apart();
                read_segment(to, t, src, true, k);
            } else {
                read_segment(to, t, src, false, k);
            }
            _mm256_storeu_ps(spread, spread_scales(scale, k, unit_of(size)));
            src += bytes;
            scale += fast_segment_scales(p->w);
            spread += ROW_SUMS;
        }
    }
    return segments;
}

/* n_x rows of x from the i-th on, at column c, and the tile's rows j .. j + TILE_W - 1. */
INLINE void multiply_block(const fast_product *p, int32_t i, int32_t n_x, int32_t j, int32_t c,
                           int32_t segments, kind k) {
    fast_space *s = p->space;
    const int64_t stride = p->x_stride, x_segments = stride / FAST_SEGMENT;
    const uint16_t *x = s->x + i * stride + c, *w = s->tile + j * FAST_COLS;
    const float *spread = s->spread + j * LANES;
    const float *x_scale = s->x_scale + i * x_segments + c / FAST_SEGMENT;
    float *to = s->sums + i * ROW_SUMS + j * LANES;
    for (int32_t g = 0; g < segments; g++, x += FAST_SEGMENT, w += FAST_SEGMENT) {
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
            add_tile_totals(to + a * ROW_SUMS, part[a], spread + g * ROW_SUMS,
                            x_scale[a * x_segments + g], k);
        }
    }
}

/* All rows of x and the n_w rows of the tile; of its spare rows nobody reads the sums. */
INLINE void multiply_tile(const fast_product *p, int32_t n_w, int32_t c, int32_t segments,
                          kind k) {
    int32_t i = 0;
    for (; i + TILE_X <= p->n_x; i += TILE_X) {
        for (int32_t j = 0; j < n_w; j += TILE_W) {
            multiply_block(p, i, TILE_X, j, c, segments, k);
        }
    }
    for (; i < p->n_x; i++) {
        for (int32_t j = 0; j < n_w; j += TILE_W) multiply_block(p, i, 1, j, c, segments, k);
    }
}

/* Apart from what reads tiles, whose tables would take registers. */
OUTLINE void multiply_e4m3_tile(const fast_product *p, int32_t n_w, int32_t c,
                                int32_t segments) {
    multiply_tile(p, n_w, c, segments, (kind){HD_E4M3, FAST_SEGMENT});
}

OUTLINE void multiply_e2m1_tile(const fast_product *p, int32_t n_w, int32_t c,
                                int32_t segments) {
    multiply_tile(p, n_w, c, segments, (kind){HD_E2M1, 0}); /* of any block */
}

INLINE void multiply_tiles(const fast_product *p, const tables *t, int32_t row, int32_t n_w,
                           kind k) {
    read_scales(p, row, n_w);
    memset(p->space->sums, 0, (size_t)(p->n_x * ROW_SUMS) * sizeof *p->space->sums);
    for (int32_t c = 0; c < p->w->cols; c += FAST_COLS) {
        const int32_t segments = read_tile(p, t, row, n_w, c, k);
        if (k.type == HD_E4M3) {
            multiply_e4m3_tile(p, n_w, c, segments);
        } else {
            multiply_e2m1_tile(p, n_w, c, segments);
        }
    }
}

/* ---- sums ---- */

/* Of eight rows of W, all by the same tree: (0 + 1) + (2 + 3), (4 + 5) + (6 + 7), and these. */
INLINE __m256 fold_eight(const float *sums) {
    __m256 four[2];
    UNROLL for (int32_t h = 0; h < 2; h++, sums += 4 * LANES) {
        const __m256 low = _mm256_hadd_ps(_mm256_loadu_ps(sums), _mm256_loadu_ps(sums + LANES)),
                     high = _mm256_hadd_ps(_mm256_loadu_ps(sums + 2 * LANES),
                                           _mm256_loadu_ps(sums + 3 * LANES));
        four[h] = _mm256_hadd_ps(low, high);
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20),
                         _mm256_permute2f128_ps(four[0], four[1], 0x31));
}

INLINE void fold(float *out, const float *sums, int32_t n) {
    for (int32_t j = 0; j < n; j += LANES) {
        float eight[LANES];
        _mm256_storeu_ps(eight, fold_eight(sums + j * LANES));
        memcpy(out + j, eight, (size_t)hd_min_i32(LANES, n - j) * sizeof *eight);
    }
}

INLINE void multiply_kind(const fast_product *p, kind k) {
    const tables t = make_tables();
    for (int32_t row = 0; row < p->n_w; row += FAST_ROWS) {
        const int32_t n_w = hd_min_i32(FAST_ROWS, p->n_w - row);
        fetch_scales(p, row + FAST_ROWS, FAST_ROWS);
        if (p->n_x <= FEW) {
            meet(p, &t, row, n_w, k);
        } else {
            multiply_tiles(p, &t, row, n_w, k);
        }
        for (int32_t i = 0; i < p->n_x; i++) {
            fold(p->out + i * p->out_stride + row, p->space->sums + i * ROW_SUMS, n_w);
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
