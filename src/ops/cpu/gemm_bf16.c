/* gemm_bf16.c - bfloat16 GEMM (--precision fast) with AVX-512's dot products, which add the
 * two products of a pair one after the other, the second one first, and round after each.
 * Small M reads W row after row as stored; large M dequantizes a tile of it. */
#include "ops/cpu/e4m3_vbmi_internal.h"
#include "ops/cpu/gemm_fast_rows_internal.h"
#include "ops/cpu/dot_bf16_internal.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

enum {
    PARTS = 4,       /* registers of a bf16 segment */
    FEW = 8,         /* rows of x up to which no tile is used */
    NEAR_X = 8192,   /* elements of x that stay in the L1 cache beside column ranges of W, */
    INT16_X = 12288, /* and of one row of x beside complete rows, which suits memory best; */
    PIECE_X = 1024,  /* a longer row is divided into pieces */
    TILE_X = 3,      /* rows of x and of W whose accumulators fill the registers */
    TILE_W = 4,
    TILE_SEGMENTS = FAST_COLS / FAST_SEGMENT,
    AHEAD = 8192 /* bytes of W prefetched ahead */
};

/* ---- x ---- */

/* Returns the column of a segment that is element i of x, so that W need not be reordered. */
INLINE int32_t column_of(int32_t i, hd_dtype type) {
    const int32_t part = i / PART, word = i % PART;
    switch (type) {
    case HD_E4M3: /* e4m3_halves */
        return part / 2 * 64 + word / 8 * 16 + part % 2 * 8 + word % 8;
    case HD_E2M1: /* one of the codes of each 16 bits (nibbles) */
        return 4 * word + part;
    default:
        return i;
    }
}

static void round_row(uint16_t *to, float *scale, const float *from, int32_t n, hd_dtype type) {
    (void)scale;
    uint16_t order[FAST_SEGMENT];
    for (int32_t i = 0; i < FAST_SEGMENT; i++) order[i] = (uint16_t)column_of(i, type);
    for (int32_t c = 0; c < n; c += FAST_SEGMENT) {
        __m512i part[PARTS];
        UNROLL for (int32_t q = 0; q < PARTS; q++) {
            part[q] = round_part(from + c + PART * q, n - c - PART * q);
        }
        UNROLL for (int32_t q = 0; q < PARTS; q++) {
            const __m512i column = _mm512_loadu_si512(order + PART * q);
            const __m512i low = _mm512_permutex2var_epi16(part[0], column, part[1]),
                          high = _mm512_permutex2var_epi16(part[2], column, part[3]);
            const __mmask32 second = _mm512_test_epi16_mask(column, _mm512_set1_epi16(64));
            _mm512_storeu_si512(to + c + PART * q, _mm512_mask_mov_epi16(low, second, high));
        }
    }
}

/* ---- W ---- */

typedef struct tables {
    e4m3_table e4m3;
    __m512i e2m1; /* a lookup reads five bits; the highest belongs to another code */
} tables;

INLINE tables make_tables(void) {
    return (tables){make_e4m3_table(),
                    _mm512_broadcast_i64x4(_mm256_setr_epi16(
                        0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                        (short)0x8000, (short)0xbf00, (short)0xbf80, (short)0xbfc0,
                        (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0c0))};
}

/* Pads the n columns at the end of a row to a complete segment. */
OUTLINE const uint8_t *fill_up(const fast_product *p, const uint8_t *src, int32_t n) {
    uint8_t *end = p->space->end;
    memset(end, 0, sizeof p->space->end);
    memcpy(end, src, (size_t)(n * hd_dtype_bits(p->w->type) / 8));
    return end;
}

/* Dequantizes a segment to bf16. */
INLINE void read_segment(__m512i part[PARTS], const tables *t, const uint8_t *src, kind k) {
    if (k.type == HD_E2M1) {
        const __m512i codes = _mm512_loadu_si512(src);
        part[0] = _mm512_permutexvar_epi16(codes, t->e2m1);
        part[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), t->e2m1);
        part[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), t->e2m1);
        part[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), t->e2m1);
    } else if (k.type == HD_E4M3) {
        const e4m3_pairs low = bf16_of_e4m3(&t->e4m3, _mm512_loadu_si512(src)),
                         high = bf16_of_e4m3(&t->e4m3, _mm512_loadu_si512(src + 64));
        part[0] = low.first;
        part[1] = low.second;
        part[2] = high.first;
        part[3] = high.second;
    } else {
        UNROLL for (int32_t q = 0; q < PARTS; q++) part[q] = _mm512_loadu_si512(src + 64 * q);
    }
}

INLINE __m512 add_segment(__m512 sum, __m512 part, __m512 scale, bool scaled) {
    return scaled ? _mm512_fmadd_ps(part, scale, sum) : _mm512_add_ps(sum, part);
}

/* ---- scales ---- */

/* Returns how many scales the columns of a lane have, one after the other. */
INLINE int32_t spans_of(kind k) {
    return is_fine(k) ? 2 : 1;
}

/* Returns the scales by which the sums of a segment's span are multiplied. */
INLINE __m512 spread_scales(const float *at, int32_t span, kind k) {
    if (k.type == HD_E4M3) {
        const __m512 low = _mm512_set1_ps(at[span * 2]);
        return k.block == 32
                   ? _mm512_mask_blend_ps(0xff00, low, _mm512_set1_ps(at[span * 2 + 1]))
                   : low;
    }
    if (k.block == 32) {
        const __m512i block = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        return _mm512_permutexvar_ps(block, _mm512_castps128_ps512(_mm_loadu_ps(at)));
    }
    if (k.block == 16) {
        const __m512i block = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        return _mm512_permutexvar_ps(block, _mm512_castps256_ps512(_mm256_loadu_ps(at)));
    }
    return _mm512_set1_ps(1.0f);
}

/* The same for FP4's scales as stored, for codes that are_plain accepts. A code is shifted
 * to a float's exponent (E4M3: exponent and fraction), which is 120 too low; `by` corrects
 * it. */
INLINE __m512 spread_codes(const uint8_t *at, __m512 by, kind k) {
    if (k.block == 32) {
        uint32_t four;
        memcpy(&four, at, sizeof four);
        const __m512i place = _mm512_setr_epi32(0x00808080, 0x00808080, 0x00808080, 0x00808080,
                                                0x01808080, 0x01808080, 0x01808080, 0x01808080,
                                                0x02808080, 0x02808080, 0x02808080, 0x02808080,
                                                0x03808080, 0x03808080, 0x03808080, 0x03808080);
        const __m512i high = _mm512_shuffle_epi8(_mm512_set1_epi32((int32_t)four), place);
        return _mm512_castsi512_ps(_mm512_srli_epi32(high, 1));
    }
    uint64_t eight;
    memcpy(&eight, at, sizeof eight);
    const __m512i place = _mm512_setr_epi32(0x00808080, 0x00808080, 0x01808080, 0x01808080,
                                            0x02808080, 0x02808080, 0x03808080, 0x03808080,
                                            0x04808080, 0x04808080, 0x05808080, 0x05808080,
                                            0x06808080, 0x06808080, 0x07808080, 0x07808080);
    const __m512i high = _mm512_shuffle_epi8(_mm512_set1_epi64((int64_t)eight), place);
    return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_srli_epi32(high, 4)), by);
}

/* Returns whether spread_codes is valid for the scales of n rows: not for signs, NaN and
 * subnormals, nor if a segment's codes end with a row. */
INLINE bool are_plain(const fast_product *p, int32_t row, int32_t n, kind k) {
    const hd_weight *w = p->w;
    const hd_dtype type = k.block == 32 ? HD_E8M0 : HD_E4M3;
    if (w->scale_type != type || w->block_rows != 1 || w->cols % FAST_SEGMENT != 0)
        return false;
    if (type == HD_E8M0 ? w->global != 1.0f : !(w->global * 0x1p120f < INFINITY)) return false;
    const int64_t bytes = n * scale_row_bytes(p);
    const uint8_t *at = (const uint8_t *)w->scale + (p->row + row) * scale_row_bytes(p);
    const __m512i one = _mm512_set1_epi8(1);
    __mmask64 odd = 0;
    for (int64_t b = 0; b < bytes; b += 64) {
        const __mmask64 live =
            bytes - b < 64 ? ((__mmask64)1 << (bytes - b)) - 1 : ~(__mmask64)0;
        const __m512i code = _mm512_mask_loadu_epi8(_mm512_set1_epi8(8), live, at + b);
        if (type == HD_E8M0) { /* 0 and 255 */
            odd |= _mm512_cmplt_epu8_mask(_mm512_add_epi8(code, one), _mm512_set1_epi8(2));
        } else { /* 1 to 7, 127 and more */
            odd |= _mm512_cmplt_epu8_mask(_mm512_sub_epi8(code, one), _mm512_set1_epi8(7)) |
                   _mm512_cmpge_epu8_mask(code, _mm512_set1_epi8(127));
        }
    }
    return odd == 0;
}

/* ---- small-M GEMM ---- */

/* Columns [col, col + n) of a row of W, and its scales there: floats, or FP4 codes. */
typedef struct stretch {
    const uint8_t *src, *want; /* `want`: bytes to prefetch meanwhile */
    const void *scale;
    int32_t row, col, n;
} stretch;

/* Multiplies with n_x rows of x; n_x and k are compile-time constants. */
INLINE void small_m_row(const fast_product *p, const tables *t, const stretch *m, int32_t n_x,
                        kind k) {
    const int32_t bytes = segment_bytes(k);
    const __m512 by = _mm512_set1_ps(p->w->global * 0x1p120f);
    float *sums = p->space->sums + m->row % FAST_ROWS * FAST_SUMS;
    const uint8_t *src = m->src, *want = m->want, *code = m->scale;
    const float *each = m->scale;
    const uint16_t *x[FEW];
    __m512 sum[FEW];
    UNROLL for (int32_t i = 0; i < n_x; i++) {
        x[i] = p->space->x + i * p->x_stride + m->col;
        sum[i] =
            m->col ? _mm512_loadu_ps(sums + i * FAST_ROWS * FAST_SUMS) : _mm512_setzero_ps();
    }
    for (int32_t left = m->n; left > 0; left -= FAST_SEGMENT, src += bytes, want += bytes) {
        __m512i w[PARTS];
        /* W streams through, x stays in the cache */
        UNROLL for (int32_t b = 0; b < bytes; b += HD_CACHE_LINE) {
            _mm_prefetch((const char *)want + b, _MM_HINT_NTA);
        }
        if (left < FAST_SEGMENT) src = fill_up(p, src, left);
        read_segment(w, t, src, k);
        UNROLL for (int32_t span = 0; span < spans_of(k); span++) {
            const int32_t parts = PARTS / spans_of(k);
            const __m512 spread = k.type == HD_E2M1 ? spread_codes(code, by, k)
                                  : k.block         ? spread_scales(each, span, k)
                                                    : by;
            UNROLL for (int32_t i = 0; i < n_x; i++) {
                __m512 part = _mm512_setzero_ps();
                UNROLL for (int32_t q = 0; q < parts; q++) {
                    part = add_pairs(part, w[span * parts + q],
                                     _mm512_loadu_si512(x[i] + PART * q));
                }
                sum[i] = add_segment(sum[i], part, spread, k.block > 0);
                x[i] += PART * parts;
            }
        }
        if (k.type == HD_E2M1) code += FAST_SEGMENT / k.block;
        if (k.type == HD_E4M3) each += FAST_SEGMENT / k.block;
    }
    UNROLL for (int32_t i = 0; i < n_x; i++) {
        _mm512_storeu_ps(sums + i * FAST_ROWS * FAST_SUMS, sum[i]);
    }
}

/* Multiplies n_w <= FAST_ROWS rows of W, in column ranges for which x stays in the L1 cache. */
INLINE void small_m_rows(const fast_product *p, const tables *t, int32_t row, int32_t n_w,
                         int32_t n_x, kind k) {
    const int32_t cols = p->w->cols, segments = (int32_t)hd_ceil_div(cols, FAST_SEGMENT);
    const int32_t near = n_x > 1           ? NEAR_X / n_x / FAST_SEGMENT
                         : cols <= INT16_X ? segments
                                           : PIECE_X / FAST_SEGMENT;
    const int32_t stretches = (int32_t)hd_ceil_div(segments, near);
    const int32_t wide = (int32_t)hd_ceil_div(segments, stretches) * FAST_SEGMENT;
    const int32_t bytes = wide / FAST_SEGMENT * segment_bytes(k);
    const int32_t ahead = hd_min_i32(n_w, (int32_t)hd_ceil_div(AHEAD, bytes));
    if (k.type == HD_E4M3) read_scales(p, row, n_w);
    for (int32_t c = 0; c < cols; c += wide) {
        const int32_t first = k.block ? c / k.block : 0;
        for (int32_t j = 0; j < n_w; j++) {
            stretch m = {.src = place_of(p, row + j, c, k),
                         .row = row + j,
                         .col = c,
                         .n = hd_min_i32(wide, cols - c)};
            m.want = stretches == 1 ? m.src + AHEAD
                                    : place_ahead(p, row, n_w, j + ahead, c, wide, k);
            if (k.type == HD_E4M3) m.scale = p->space->row_scale[j] + first;
            if (k.type == HD_E2M1) {
                m.scale = (const uint8_t *)p->w->scale +
                          (p->row + row + j) * scale_row_bytes(p) + first;
            }
            small_m_row(p, t, &m, n_x, k);
        }
    }
}

INLINE void small_m(const fast_product *p, const tables *t, int32_t row, int32_t n_w, kind k) {
    switch (small_m_count(p->n_x, k)) {
#define ROWS(n)                                                        \
    case n:                                                            \
        if (has_small_m((n), k)) small_m_rows(p, t, row, n_w, (n), k); \
        break;
        ROWS(1)
        ROWS(2)
        ROWS(3)
        ROWS(4)
        ROWS(5)
        ROWS(6)
        ROWS(7)
#undef ROWS
    default:
        small_m_rows(p, t, row, n_w, FEW, k);
    }
}

/* ---- large-M GEMM: a dequantized tile ---- */

/* Dequantizes columns from c on of n_w <= FAST_ROWS rows. Returns the number of segments. */
INLINE int32_t read_tile(const fast_product *p, const tables *t, int32_t row, int32_t n_w,
                         int32_t c, kind k) {
    const int32_t bytes = segment_bytes(k), first = c / FAST_SEGMENT;
    const int32_t n = hd_min_i32(FAST_COLS, p->w->cols - c);
    const int32_t segments = (int32_t)hd_ceil_div(n, FAST_SEGMENT);
    fast_space *s = p->space;
    for (int32_t j = 0; j < n_w; j++) {
        const uint8_t *src = row_at(p, row + j) + first * bytes;
        const float *scale = p->space->row_scale[j];
        uint16_t *to = s->tile + j * FAST_COLS;
        for (int32_t g = 0; g < segments; g++, src += bytes, to += FAST_SEGMENT) {
            __m512i w[PARTS];
            const int32_t left = n - g * FAST_SEGMENT;
            read_segment(w, t, left < FAST_SEGMENT ? fill_up(p, src, left) : src, k);
            UNROLL for (int32_t q = 0; q < PARTS; q++) {
                _mm512_storeu_si512(to + PART * q, w[q]);
            }
            if (!k.block) continue;
            UNROLL for (int32_t span = 0; span < spans_of(k); span++) {
                const __m512 spread =
                    spread_scales(scale + (first + g) * (FAST_SEGMENT / k.block), span, k);
                const int32_t at = (j * TILE_SEGMENTS + g) * spans_of(k) + span;
                _mm512_storeu_ps(s->spread + at * FAST_SUMS, spread);
            }
        }
    }
    return segments;
}

/* Prefetches cache lines [first, end) of the tile that begins in this row and column. */
INLINE void fetch_tile(const fast_product *p, int32_t row, int32_t c, int32_t first,
                       int32_t end, kind k) {
    /* cache lines of a row */
    const int32_t lines = TILE_SEGMENTS * segment_bytes(k) / HD_CACHE_LINE;
    const uint8_t *src = row_at(p, row) + c / FAST_SEGMENT * segment_bytes(k);
    for (int32_t i = first; i < end; i++) {
        _mm_prefetch((const char *)src + i / lines * p->row_bytes + i % lines * HD_CACHE_LINE,
                     _MM_HINT_T0);
    }
}

/* Multiplies n_x rows of x from the i-th on, at column c, with the tile's rows j .. j +
 * TILE_W - 1. */
INLINE void multiply_block(const fast_product *p, int32_t i, int32_t n_x, int32_t j, int32_t c,
                           int32_t segments, int32_t spans, bool scaled) {
    fast_space *s = p->space;
    const int32_t parts = PARTS / spans; /* of a span */
    const int64_t stride = p->x_stride;
    float *sums = s->sums + (i * FAST_ROWS + j) * FAST_SUMS;
    const uint16_t *x = s->x + i * stride + c, *w = s->tile + j * FAST_COLS;
    const float *spread = s->spread + j * TILE_SEGMENTS * spans * FAST_SUMS;
    __m512 sum[TILE_X][TILE_W], part[TILE_X][TILE_W];
    UNROLL for (int32_t a = 0; a < n_x; a++) {
        UNROLL for (int32_t b = 0; b < TILE_W; b++) {
            sum[a][b] = c ? _mm512_loadu_ps(sums + (a * FAST_ROWS + b) * FAST_SUMS)
                          : _mm512_setzero_ps();
        }
    }
    for (int32_t g = 0; g < segments; g++, x += FAST_SEGMENT, w += FAST_SEGMENT) {
        UNROLL for (int32_t q = 0; q < PARTS; q++) {
            const bool first = q % parts == 0;
            __m512i row[TILE_W];
            UNROLL for (int32_t b = 0; b < TILE_W; b++) {
                row[b] = _mm512_loadu_si512(w + b * FAST_COLS + PART * q);
            }
            UNROLL for (int32_t a = 0; a < n_x; a++) {
                const __m512i pairs = _mm512_loadu_si512(x + a * stride + PART * q);
                UNROLL for (int32_t b = 0; b < TILE_W; b++) {
                    part[a][b] =
                        add_pairs(first ? _mm512_setzero_ps() : part[a][b], row[b], pairs);
                }
            }
            if (q % parts < parts - 1) continue;
            UNROLL for (int32_t b = 0; b < TILE_W; b++) {
                const int32_t at = (b * TILE_SEGMENTS + g) * spans + q / parts;
                const __m512 by = _mm512_loadu_ps(spread + at * FAST_SUMS);
                UNROLL for (int32_t a = 0; a < n_x; a++) {
                    sum[a][b] = add_segment(sum[a][b], part[a][b], by, scaled);
                }
            }
        }
    }
    UNROLL for (int32_t a = 0; a < n_x; a++) {
        UNROLL for (int32_t b = 0; b < TILE_W; b++) {
            _mm512_storeu_ps(sums + (a * FAST_ROWS + b) * FAST_SUMS, sum[a][b]);
        }
    }
}

INLINE void multiply_rows(const fast_product *p, int32_t i, int32_t j, int32_t c,
                          int32_t segments, int32_t spans, bool scaled) {
    switch (p->n_x - i) {
    case 1:
        multiply_block(p, i, 1, j, c, segments, spans, scaled);
        break;
    case 2:
        multiply_block(p, i, 2, j, c, segments, spans, scaled);
        break;
    default:
        multiply_block(p, i, TILE_X, j, c, segments, spans, scaled);
    }
}

/* A function of its own, because the tables of all kinds of matrices would take registers. */
OUTLINE void multiply_scaled(const fast_product *p, int32_t i, int32_t j, int32_t c,
                             int32_t segments) {
    multiply_rows(p, i, j, c, segments, 1, true);
}

OUTLINE void multiply_scaled_twice(const fast_product *p, int32_t i, int32_t j, int32_t c,
                                   int32_t segments) {
    multiply_rows(p, i, j, c, segments, 2, true);
}

OUTLINE void multiply_plain(const fast_product *p, int32_t i, int32_t j, int32_t c,
                            int32_t segments) {
    multiply_rows(p, i, j, c, segments, 1, false);
}

/* Multiplies all rows of x with n_w <= FAST_ROWS rows of W; sums of the tile's unused rows
 * are ignored. The next tile is prefetched a few lines at a time, as many at once would
 * stall. */
INLINE void multiply_tiles(const fast_product *p, const tables *t, int32_t row, int32_t n_w,
                           kind k) {
    const int64_t blocks = hd_ceil_div(p->n_x, TILE_X) * hd_ceil_div(n_w, TILE_W);
    const int32_t lines = FAST_ROWS * TILE_SEGMENTS * segment_bytes(k) / HD_CACHE_LINE;
    const int32_t each = (int32_t)hd_ceil_div(lines, blocks);
    if (k.block) read_scales(p, row, n_w);
    for (int32_t c = 0; c < p->w->cols; c += FAST_COLS) {
        const int32_t segments = read_tile(p, t, row, n_w, c, k);
        const bool last = c + FAST_COLS >= p->w->cols;
        int32_t line = 0;
        for (int32_t i = 0; i < p->n_x; i += TILE_X) {
            for (int32_t j = 0; j < n_w; j += TILE_W, line += each) {
                fetch_tile(p, last ? row + FAST_ROWS : row, last ? 0 : c + FAST_COLS, line,
                           hd_min_i32(lines, line + each), k);
                if (spans_of(k) == 2) {
                    multiply_scaled_twice(p, i, j, c, segments);
                } else if (k.block) {
                    multiply_scaled(p, i, j, c, segments);
                } else {
                    multiply_plain(p, i, j, c, segments);
                }
            }
        }
    }
}

/* ---- reduction ---- */

/* Reduces the sums of FAST_ROWS rows of W, of which n exist. */
INLINE void reduce(float *out, const float *sums, int32_t n) {
    __m512 v[FAST_ROWS];
    UNROLL for (int32_t j = 0; j < FAST_ROWS; j++) v[j] = _mm512_loadu_ps(sums + j * FAST_SUMS);
    _mm512_mask_storeu_ps(out, first_lanes(n), reduce_sums(v));
}

INLINE void multiply_kind(const fast_product *p, kind k) {
    const tables t = make_tables();
    for (int32_t row = 0; row < p->n_w; row += FAST_ROWS) {
        const int32_t n_w = hd_min_i32(FAST_ROWS, p->n_w - row);
        /* far apart, so the hardware prefetcher misses them */
        for (int32_t i = 0; i < p->n_x; i++) {
            _mm_prefetch((const char *)(p->out + i * p->out_stride + row), _MM_HINT_T0);
        }
        fetch_scales(p, row + FAST_ROWS, FAST_ROWS);
        if (p->n_x <= FEW && (k.type != HD_E2M1 || are_plain(p, row, n_w, k))) {
            small_m(p, &t, row, n_w, k);
        } else {
            multiply_tiles(p, &t, row, n_w, k);
        }
        for (int32_t i = 0; i < p->n_x; i++) {
            reduce(p->out + i * p->out_stride + row, p->space->sums + i * FAST_ROWS * FAST_SUMS,
                   n_w);
        }
    }
}

OUTLINE void multiply_bf16(const fast_product *p) {
    multiply_kind(p, (kind){HD_BF16, 0});
}

OUTLINE void multiply_e4m3(const fast_product *p) {
    multiply_kind(p, (kind){HD_E4M3, 128});
}

OUTLINE void multiply_e4m3_32(const fast_product *p) {
    multiply_kind(p, (kind){HD_E4M3, 32});
}

OUTLINE void multiply_e2m1_16(const fast_product *p) {
    multiply_kind(p, (kind){HD_E2M1, 16});
}

OUTLINE void multiply_e2m1_32(const fast_product *p) {
    multiply_kind(p, (kind){HD_E2M1, 32});
}

static void multiply(const fast_product *p) {
    if (p->w->type == HD_BF16) {
        multiply_bf16(p);
    } else if (p->w->type == HD_E4M3 && p->w->block_cols == 32) {
        multiply_e4m3_32(p);
    } else if (p->w->type == HD_E4M3) {
        multiply_e4m3(p);
    } else if (p->w->block_cols == 16) {
        multiply_e2m1_16(p);
    } else {
        multiply_e2m1_32(p);
    }
}

const fast_kernels fast_bf16 = {.round = round_row, .multiply = multiply, .takes_bf16 = true};
