/* kernels_internal.h - the inner loops (microkernels) of the CPU operators, per instruction
 * set.
 *
 * The operators above them (*_cpu.c) are written once. The order of every sum depends on the
 * data alone (design D8). A dot product is OPS_LANES partial sums, column c in sum c mod
 * OPS_LANES, in order of c, reduced by one tree. A mix adds its rows one after another. The
 * piece, block or thread that computes an element therefore does not matter. AVX2 and
 * AVX-512 take the same fused steps in the same order and compute the same bits; the plain
 * kernels round products and sums separately. */
#ifndef HD_OPS_CPU_KERNELS_INTERNAL_H
#define HD_OPS_CPU_KERNELS_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "ops/cpu/gemm_fast_internal.h"

enum {
    OPS_LANES = 16,
    OPS_TILE_ROWS = 4,      /* rows of W that dots takes at once */
    OPS_TRANSPOSE_KEYS = 32 /* keys of the indexer in one transposed block */
};

/* out[j, c] += sum over i of coef[j, i] * row[i][at + c], adding row after row */
typedef struct ops_mix {
    float *out;              /* [n_out, cols] */
    const float *coef;       /* [n_out, n_rows] */
    const float *const *row; /* [n_rows] */
    int64_t out_stride, coef_stride, at;
    int32_t n_out, n_rows, cols;
} ops_mix;

/* Dequantizes: out[i] = element i of a stored row times scale[i / block]. block is a
 * multiple of OPS_LANES. src needs no alignment, and out is not written past n. */
typedef void ops_dequantize_fn(float *out, const uint8_t *src, int32_t n, const float *scale,
                               int32_t block);

/* Small-M GEMM: up to OPS_TILE_ROWS stored rows with a few rows of x. The bits are those of
 * dequantize followed by dots. */
typedef struct ops_small_m_args {
    float *acc;            /* [n_x, OPS_TILE_ROWS, OPS_LANES] */
    const float *const *x; /* [n_x] first columns */
    int32_t n_x;
    const uint8_t *src[OPS_TILE_ROWS];
    const float *scale[OPS_TILE_ROWS]; /* one per block */
    bool scaled;                       /* false: all scales are 1 */
    int32_t block, n;                  /* columns; multiples of OPS_LANES */
    int64_t ahead;                     /* distance in bytes from src to what is prefetched */
} ops_small_m_args;

/* Returns false, with nothing done, if these bytes need the dequantized tile. */
typedef bool ops_small_m_fn(const ops_small_m_args *m);

/* Indexer: score[u] = sum over h of weight[h] * scale * max(0, q[h] . key u), for transposed
 * keys. Each key's products are added one after another, and then its heads. */
typedef struct ops_index {
    float *score;        /* [OPS_TRANSPOSE_KEYS] */
    const float *keys;   /* [width, OPS_TRANSPOSE_KEYS] */
    const float *q;      /* [heads, width] */
    const float *weight; /* [heads] */
    float scale;
    int32_t heads, width;
} ops_index;

/* Dot products, as attention's scores: out[i, j] = q[i] . key[j]. The bits are those of dots
 * followed by reduce. */
typedef struct ops_scores {
    float *out;               /* [n_q, n_keys] */
    const float *const *q;    /* [n_q] */
    const float *const *key;  /* [OPS_TILE_ROWS], also if n_keys is less */
    const float *const *next; /* [OPS_TILE_ROWS] keys to prefetch, or NULL */
    int64_t out_stride;
    int32_t n_q, n_keys, cols;
} ops_scores;

/* Computes the scaled scores of y and their integer weights: sample_internal.h. */
typedef void ops_weigh_fn(float *z, uint64_t *weight, const float *y, int32_t n, float max,
                          float inverse);

typedef struct ops_kernels {
    /* The sum of squares in double: norms cost little, and their error would reach every
     * element of a row and decide near ties later. */
    double (*square_sum)(const float *x, int32_t n);
    /* acc[i, j, lane] += x[i][at + c] * w[j][c] for c < n: the partial sums of n_x times
     * OPS_TILE_ROWS dot products. A long row may come in pieces of a multiple of OPS_LANES. */
    void (*dots)(float *acc, const float *const *x, int32_t n_x, int64_t at,
                 const float *const *w, int32_t n);
    /* out[i * out_stride + j] = acc[i, j, :] reduced, for j < n_w <= OPS_TILE_ROWS */
    void (*reduce)(float *out, int64_t out_stride, const float *acc, int32_t n_x, int32_t n_w);
    void (*mix)(const ops_mix *m);
    void (*score)(const ops_scores *s);      /* NULL: use dots and reduce */
    float (*max)(const float *x, int32_t n); /* -inf if n is 0 */
    /* x = exp(x - shift) in place; returns the sum */
    float (*exp_sum)(float *x, int32_t n, float shift);
    /* out = out * down + sum */
    void (*blend)(float *out, const float *sum, float down, int32_t n);
    /* out[c, u] = row[u][c] for OPS_TRANSPOSE_KEYS rows */
    void (*transpose)(float *out, const float *const *row, int32_t cols);
    void (*index_scores)(const ops_index *x);
    ops_weigh_fn *weigh;
    ops_dequantize_fn
        *dequantize[HD_N_DTYPES];         /* by element type; NULL: that of the plain kernels */
    ops_small_m_fn *small_m[HD_N_DTYPES]; /* NULL: always use the dequantized tile */
    /* rows of x, at most OPS_FEW_ROWS, up to which small_m is faster than the tile */
    int32_t small_m_rows;
    int32_t small_m_near;     /* elements of x used at once with stored rows, about */
    int32_t near_rows;        /* rows of x that use a tile together */
    const fast_kernels *fast; /* NULL: exact precision */
    const fast_attention_kernels *fast_attention;
} ops_kernels;

extern const ops_kernels ops_kernels_plain;
extern const ops_kernels ops_kernels_avx2;
extern const ops_kernels ops_kernels_avx512; /* needs AVX2 too */
extern const ops_kernels ops_kernels_vbmi;   /* the same with byte lookups */
/* Kernels of --precision fast: */
extern const ops_kernels ops_kernels_int16; /* AVX2 with int16 GEMM, */
extern const ops_kernels ops_kernels_vnni;  /* AVX-512 with int16 GEMM by VNNI, */
extern const ops_kernels ops_kernels_bf16;  /* AVX-512 with bf16 GEMM */

/* An instruction set without a kernel of its own for a type dequantizes with the plain one,
 * which computes the same bits. */
static inline ops_dequantize_fn *ops_dequantizer(const ops_kernels *k, hd_dtype type) {
    return k->dequantize[type] ? k->dequantize[type] : ops_kernels_plain.dequantize[type];
}

ops_weigh_fn ops_weigh_plain, ops_weigh_avx2, ops_weigh_avx512;

/* AVX2 functions that AVX-512 would not make faster are shared. */
double ops_square_sum_avx2(const float *x, int32_t n);
void ops_reduce_avx2(float *out, int64_t out_stride, const float *acc, int32_t n_x,
                     int32_t n_w);
float ops_max_avx2(const float *x, int32_t n);
float ops_exp_sum_avx2(float *x, int32_t n, float shift);
float ops_exp_sum_avx512(float *x, int32_t n, float shift);
void ops_blend_avx2(float *out, const float *sum, float down, int32_t n);
void ops_blend_avx512(float *out, const float *sum, float down, int32_t n);
void ops_transpose_avx2(float *out, const float *const *row, int32_t cols);
void ops_index_scores_avx2(const ops_index *x);
void ops_index_scores_avx512(const ops_index *x);
ops_dequantize_fn ops_dequantize_f32_avx2, ops_dequantize_f16_avx2, ops_dequantize_bf16_avx2,
    ops_dequantize_e4m3_avx2, ops_dequantize_e8m0_avx2, ops_dequantize_e2m1_avx2,
    ops_dequantize_e4m3_vbmi;

ops_small_m_fn ops_small_m_f32_avx2, ops_small_m_bf16_avx2, ops_small_m_e4m3_avx2,
    ops_small_m_e2m1_avx2;
ops_small_m_fn ops_small_m_f32_avx512, ops_small_m_bf16_avx512, ops_small_m_e4m3_avx512,
    ops_small_m_e2m1_avx512, ops_small_m_e4m3_vbmi, ops_small_m_e2m1_vbmi;

#endif
