/* int16_gemm_loops_internal.h - int16 GEMM: x and W become 16-bit integers, segment by
 * segment. Their integer sums are exact; only those are multiplied by scales and become
 * floats. Small M reads W row after row as stored; large M converts a tile of it. The
 * including file defines what int16_gemm_rows_internal.h says. */
#ifndef HD_OPS_CPU_INT16_GEMM_LOOPS_INTERNAL_H
#define HD_OPS_CPU_INT16_GEMM_LOOPS_INTERNAL_H

#include "ops/cpu/int16_gemm_rows_internal.h"

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
        float *spread = s->spread + j * LANES; /* [TILE_GROUPS, spans, FAST_ROWS, LANES] */
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
            UNROLL for (int32_t span = 0; span < spans_of(k); span++) {
                store_floats(spread, spread_scales(from.scale, size, span, k));
                spread += FAST_ROWS * LANES;
            }
            at = next_group(at, k);
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
    const int32_t parts = PARTS / spans_of(k); /* of a span */
    const uint16_t *x = s->x + i * stride + c, *w = s->tile + j * FAST_COLS;
    const float *spread = s->spread + j * LANES;
    const float *x_scale = s->x_scale + i * x_segments + c / FAST_SEGMENT;
    for (int32_t g = 0; g < groups; g++, x += GROUP, w += GROUP) {
        totals part[TILE_X][TILE_W];
        UNROLL for (int32_t q = 0; q < PARTS; q++) {
            words row[TILE_X];
            UNROLL for (int32_t a = 0; a < n_x; a++) {
                row[a] = load_words(x + a * stride + q * WORDS);
                UNROLL for (int32_t b = 0; b < TILE_W; b++) {
                    if (q % parts == 0) part[a][b] = no_totals();
                }
            }
            UNROLL for (int32_t b = 0; b < TILE_W; b++) {
                const words y = hold(load_words(w + b * FAST_COLS + q * WORDS));
                UNROLL for (int32_t a = 0; a < n_x; a++) {
                    part[a][b] = add_products(part[a][b], y, row[a]);
                }
            }
            if (q % parts < parts - 1) continue;
            UNROLL for (int32_t a = 0; a < n_x; a++) {
                const floats of_x = spread_x_scales(x_scale + a * x_segments, k);
                float *to = s->sums + (i + a) * ROW_SUMS + j * FAST_SUMS + g % SETS * LANES;
                UNROLL for (int32_t b = 0; b < TILE_W; b++, to += FAST_SUMS) {
                    store_floats(to, add_totals(load_floats(to), part[a][b],
                                                load_floats(spread + b * LANES), of_x));
                }
            }
            spread += FAST_ROWS * LANES;
        }
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

OUTLINE void multiply_e4m3_32_tile(const fast_product *p, int32_t n_w, int32_t c,
                                   int32_t groups) {
    multiply_tile(p, n_w, c, groups, (kind){HD_E4M3, 32});
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
        if (is_fine(k)) {
            multiply_e4m3_32_tile(p, n_w, c, groups);
        } else if (k.type == HD_E4M3) {
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
    if (p->w->type == HD_E4M3 && p->w->block_cols == 32) {
        multiply_e4m3_32(p);
    } else if (p->w->type == HD_E4M3) {
        multiply_e4m3(p);
    } else if (p->w->block_cols == 16) {
        multiply_e2m1_16(p);
    } else {
        multiply_e2m1_32(p);
    }
}

#endif
