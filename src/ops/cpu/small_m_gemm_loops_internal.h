/* small_m_gemm_loops_internal.h - small-M GEMM: dot products of stored rows with few rows of
 * x. Elements are dequantized in registers and multiplied there, without a tile of floats.
 * It takes the same steps in the same order as decode and dots, so the bits are the same.
 * The including file defines for its instruction set: lanes; `scaled`, which turns OPS_LANES
 * stored elements into floats times a scale, with functions that prepare and use it for each
 * format; and how many rows of x are processed at once. */
#ifndef HD_OPS_CPU_SMALL_M_GEMM_LOOPS_INTERNAL_H
#define HD_OPS_CPU_SMALL_M_GEMM_LOOPS_INTERNAL_H

#include "ops/cpu/small_m_gemm_internal.h"

#define UNROLL _Pragma("GCC unroll 4")

typedef scaled prepare_fn(float scale);
typedef lanes dequantize_fn(const uint8_t *src, scaled s);

/* Compile-time constants of a loop. */
typedef struct stored {
    int32_t bits;  /* bits of an element */
    int32_t block; /* columns */
    prepare_fn *prepare;
    dequantize_fn *dequantize;
} stored;

/* Multiplies n_w rows of W from w on with n_x rows of x from i on. */
static inline __attribute__((always_inline)) void small_m_rows(const ops_small_m_args *m,
                                                               stored f, int32_t w, int32_t n_w,
                                                               int32_t i, int32_t n_x) {
    const uint8_t *const *src = m->src + w;
    const float *const *x = m->x + i;
    float *acc = m->acc + (i * OPS_TILE_ROWS + w) * OPS_LANES;
    lanes sum[OPS_TILE_ROWS][OPS_TILE_ROWS]; /* sums of n_x rows */
    coming next = comes_next(m, f.bits, w, n_w, i, n_x);
    UNROLL for (int32_t k = 0; k < n_x; k++) {
        UNROLL for (int32_t j = 0; j < n_w; j++) {
            sum[k][j] = load_lanes(acc + (k * OPS_TILE_ROWS + j) * OPS_LANES);
        }
    }
    for (int32_t c = 0, block = 0; c < m->n; block++) {
        const int32_t end = m->n - c < f.block ? m->n : c + f.block;
        scaled scale[OPS_TILE_ROWS];
        UNROLL for (int32_t j = 0; j < n_w; j++) {
            scale[j] = f.prepare(m->scale[w + j][block]);
        }
        do {
            const int64_t at = (int64_t)c * f.bits / 8;
            if (at % 64 == 0) prefetch(&next);
            UNROLL for (int32_t j = 0; j < n_w; j++) {
                const lanes wide = f.dequantize(src[j] + at, scale[j]);
                UNROLL for (int32_t k = 0; k < n_x; k++) {
                    sum[k][j] = add_product(sum[k][j], load_lanes(x[k] + c), wide);
                }
            }
            c += OPS_LANES;
        } while (f.block > OPS_LANES && c < end);
    }
    UNROLL for (int32_t k = 0; k < n_x; k++) {
        UNROLL for (int32_t j = 0; j < n_w; j++) {
            store_lanes(acc + (k * OPS_TILE_ROWS + j) * OPS_LANES, sum[k][j]);
        }
    }
}

/* Multiplies all rows of W with n_x rows of x from i on: as many at a time as there are
 * registers for. */
static inline __attribute__((always_inline)) void small_m_some(const ops_small_m_args *m,
                                                               stored f, int32_t i,
                                                               int32_t n_x) {
    const int32_t n_w = small_m_w_rows(f.bits, n_x);
    for (int32_t w = 0; w < OPS_TILE_ROWS; w += n_w) small_m_rows(m, f, w, n_w, i, n_x);
}

static inline __attribute__((always_inline)) void small_m(const ops_small_m_args *m, stored f) {
    int32_t i = 0;
    for (; SMALL_M_X_ROWS >= 4 && i + 4 <= m->n_x; i += 4) small_m_some(m, f, i, 4);
    for (; SMALL_M_X_ROWS >= 3 && i + 3 <= m->n_x; i += 3) small_m_some(m, f, i, 3);
    for (; i + 2 <= m->n_x; i += 2) small_m_some(m, f, i, 2);
    if (i < m->n_x) small_m_some(m, f, i, 1);
}

static inline bool small_m_f32(const ops_small_m_args *m) {
    if (m->scaled) return false;
    small_m(m, (stored){32, INT32_MAX, no_scale, dequantize_f32});
    return true;
}

static inline bool small_m_bf16(const ops_small_m_args *m) {
    if (m->scaled) return false;
    small_m(m, (stored){16, INT32_MAX, no_scale, dequantize_bf16});
    return true;
}

static inline bool small_m_e4m3(const ops_small_m_args *m) {
    for (int32_t j = 0; j < OPS_TILE_ROWS; j++) {
        const bool known = j > 0 && m->scale[j] == m->scale[j - 1];
        if (!known && !e4m3_scales_fit(m->scale[j], m->n, m->block)) return false;
        if (e4m3_has_nan(m->src[j], m->n)) return false;
    }
    small_m(m, (stored){8, m->block, e4m3_scale, dequantize_e4m3});
    return true;
}

static inline __attribute__((always_inline)) bool small_m_e2m1(const ops_small_m_args *m,
                                                               dequantize_fn *dequantize) {
    if (m->block == 16) {
        small_m(m, (stored){4, 16, e2m1_scale, dequantize});
    } else if (m->block == 32) {
        small_m(m, (stored){4, 32, e2m1_scale, dequantize});
    } else {
        small_m(m, (stored){4, m->block, e2m1_scale, dequantize});
    }
    return true;
}

#endif
