/* kernels_internal.h - the inner loops of the CPU operators, once per instruction set.
 *
 * Everything above them (cpu_*.c) is written once. The order of every sum is fixed by the
 * data alone (design D8): a dot product is OPS_LANES partial sums, column c in sum c mod
 * OPS_LANES, in order of c, folded by one tree; a mix adds its rows one after another. So it
 * does not matter in which piece, block or thread an element is computed. AVX2 and AVX-512
 * follow the same order with the same fused steps and give the same bits; the plain ones
 * round products and sums apart. */
#ifndef HD_OPS_CPU_KERNELS_INTERNAL_H
#define HD_OPS_CPU_KERNELS_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "ops/cpu/gemm_fast_internal.h"

enum {
    OPS_LANES = 16,
    OPS_TILE_ROWS = 4,      /* rows of the right-hand side that dots takes at once */
    OPS_TRANSPOSE_KEYS = 32 /* keys of the indexer side by side */
};

/* out[j, c] += sum over i of coef[j, i] * row[i][at + c], adding row after row */
typedef struct ops_mix {
    float *out;              /* [n_out, cols] */
    const float *coef;       /* [n_out, n_rows] */
    const float *const *row; /* [n_rows] */
    int64_t out_stride, coef_stride, at;
    int32_t n_out, n_rows, cols;
} ops_mix;

/* out[i] = element i of a stored row times scale[i / block]; block is a multiple of
 * OPS_LANES, src needs no alignment and out may not be written past n. */
typedef void ops_decode_fn(float *out, const uint8_t *src, int32_t n, const float *scale,
                           int32_t block);

/* Up to OPS_TILE_ROWS stored rows against a few rows of x: as decode and dots one after the
 * other, to the bit. */
typedef struct ops_small_m_args {
    float *acc;            /* [n_x, OPS_TILE_ROWS, OPS_LANES] */
    const float *const *x; /* [n_x] first columns */
    int32_t n_x;
    const uint8_t *src[OPS_TILE_ROWS];
    const float *scale[OPS_TILE_ROWS]; /* one per block */
    bool scaled;                       /* false: all of them are 1 */
    int32_t block, n;                  /* columns; multiples of OPS_LANES */
    int64_t ahead;                     /* bytes from src to what will be wanted next */
} ops_small_m_args;

/* False: nothing was done, because these bytes want the long way. */
typedef bool ops_small_m_fn(const ops_small_m_args *m);

/* score[u] = sum over h of weight[h] * scale * max(0, q[h] . key u), for keys that were turned. Each
 * key's products are added one after another, and then its heads. */
typedef struct ops_index {
    float *score;        /* [OPS_TURN_KEYS] */
    const float *keys;   /* [width, OPS_TURN_KEYS] */
    const float *q;      /* [heads, width] */
    const float *weight; /* [heads] */
    float scale;
    int32_t heads, width;
} ops_index;

/* out[i, j] = q[i] . key[j], as dots and fold one after the other, to the bit. */
typedef struct ops_scores {
    float *out;               /* [n_q, n_keys] */
    const float *const *q;    /* [n_q] */
    const float *const *key;  /* [OPS_TILE_ROWS], also where n_keys is less */
    const float *const *next; /* [OPS_TILE_ROWS] keys that will be wanted next */
    int64_t out_stride;
    int32_t n_q, n_keys, cols;
} ops_scores;

/* The scaled scores of y and their weights, in whole numbers: sample_internal.h. */
typedef void ops_weigh_fn(float *z, uint64_t *weight, const float *y, int32_t n, float max,
                          float inverse);

typedef struct ops_kernels {
    /* The sum of squares in double: norms cost little, and their error would reach every
     * element of a row and decide near ties further on. */
    double (*square_sum)(const float *x, int32_t n);
    /* acc[i, j, lane] += x[i][at + c] * w[j][c] for c < n: the partial sums of n_x times
     * OPS_TILE_ROWS dot products. A long row may come in pieces of a multiple of OPS_LANES. */
    void (*dots)(float *acc, const float *const *x, int32_t n_x, int64_t at,
                 const float *const *w, int32_t n);
    /* out[i * out_stride + j] = the folded acc[i, j, :] for j < n_w <= OPS_TILE_ROWS */
    void (*reduce)(float *out, int64_t out_stride, const float *acc, int32_t n_x, int32_t n_w);
    void (*mix)(const ops_mix *m);
    void (*score)(const ops_scores *s);      /* NULL: dots and fold */
    float (*max)(const float *x, int32_t n); /* -inf of nothing */
    /* x = exp(x - shift) in place; gives the sum */
    float (*exp_sum)(float *x, int32_t n, float shift);
    /* out = out * down + sum */
    void (*blend)(float *out, const float *sum, float down, int32_t n);
    /* out[c, u] = row[u][c] for OPS_TURN_KEYS rows */
    void (*transpose)(float *out, const float *const *row, int32_t cols);
    void (*index_scores)(const ops_index *x);
    ops_weigh_fn *weigh;
    ops_decode_fn *decode[HD_N_DTYPES];   /* the float formats; NULL for the others */
    ops_small_m_fn *small_m[HD_N_DTYPES]; /* NULL: always the long way */
    int32_t small_m_rows;     /* of x, at most OPS_FEW_ROWS: for more the long way is faster */
    int32_t small_m_near;     /* elements of x that meet stored rows at once, about */
    int32_t near_rows;        /* of x that go through a tile together */
    const fast_kernels *fast; /* NULL: exact; likewise */
    const fast_attention_kernels *fast_attention;
} ops_kernels;

extern const ops_kernels ops_kernels_plain;
extern const ops_kernels ops_kernels_avx2;
extern const ops_kernels ops_kernels_avx512; /* needs AVX2 too */
extern const ops_kernels ops_kernels_vbmi;   /* the same with byte look-ups */
/* Those of --precision fast: */
extern const ops_kernels ops_kernels_int16; /* AVX2's, in whole numbers; */
extern const ops_kernels ops_kernels_vnni;  /* AVX-512's, with its dot products of those; */
extern const ops_kernels ops_kernels_bf16;  /* of bf16 */

ops_weigh_fn ops_weigh_plain, ops_weigh_avx2, ops_weigh_avx512;

/* What AVX-512 would not make faster is shared. */
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
ops_decode_fn ops_decode_f32_avx2, ops_decode_f16_avx2, ops_decode_bf16_avx2,
    ops_decode_e4m3_avx2, ops_decode_e8m0_avx2, ops_decode_e2m1_avx2, ops_decode_e4m3_vbmi;

ops_small_m_fn ops_small_m_f32_avx2, ops_small_m_bf16_avx2, ops_small_m_e4m3_avx2,
    ops_small_m_e2m1_avx2;
ops_small_m_fn ops_small_m_f32_avx512, ops_small_m_bf16_avx512, ops_small_m_e4m3_avx512,
    ops_small_m_e2m1_avx512, ops_small_m_e4m3_vbmi, ops_small_m_e2m1_vbmi;

#endif
