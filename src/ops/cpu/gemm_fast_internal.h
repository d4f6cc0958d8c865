/* gemm_fast_internal.h - GEMMs with rounded x (--precision fast), in bfloat16 (gemm_bf16.c)
 * or int16 (int16_gemm_*.c). docs/numerics.md describes the arithmetic and the order of
 * sums.
 *
 * Columns are taken FAST_SEGMENT at a time. The sums of a segment (FP8 in blocks of 32: of a
 * part whose lanes have one scale each) are multiplied by the scales of W and added to the
 * row's FAST_SUMS accumulators. bf16 uses all of them; int16
 * has half as many, and even and odd segments use one half each. At a row's end one tree
 * reduces them. The order depends on the data alone (design D8). */
#ifndef HD_OPS_CPU_GEMM_FAST_INTERNAL_H
#define HD_OPS_CPU_GEMM_FAST_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"

enum {
    FAST_SEGMENT = 128, /* columns; x is padded with zeros to a multiple */
    FAST_SUMS = 16,     /* sums of a segment, and of a row, at most */
    FAST_ROWS = 16,     /* rows of W that are reduced together, or form a tile */
    FAST_COLS = 512,    /* columns of a tile, which stays in the L1 cache, */
    FAST_SPREADS = 8,   /* and registers of FAST_SUMS scales of its rows at most */
    FAST_X_ROWS = 128,  /* rows of x at most */
    FAST_X_BYTES = 640 * 1024,
    FAST_SCALES = 32 * 1024 /* scales of FAST_ROWS rows of W */
};

/* As ops_dequantize_fn. */
typedef void fast_decode_fn(float *out, const uint8_t *src, int32_t n, const float *scale,
                            int32_t block);

/* Scratch of one worker. */
typedef struct fast_space {
    uint16_t x[FAST_X_BYTES / 2]; /* rows of x, rounded, in the order of W's format, */
    float x_scale[FAST_X_BYTES / 2 / FAST_SEGMENT]; /* and of their segments */
    float sums[FAST_X_ROWS * FAST_ROWS * FAST_SUMS];
    uint16_t tile[FAST_ROWS * FAST_COLS];
    float spread[FAST_ROWS * FAST_SPREADS * FAST_SUMS]; /* the tile's scales */
    float scale[FAST_SCALES];
    const float *row_scale[FAST_ROWS]; /* pointers into `scale`, by row of W */
    uint8_t end[FAST_SEGMENT * 2];     /* a row's last columns, padded with zeros, */
    float end_scale[FAST_SUMS];        /* and their scales */
} fast_space;

/* GEMM of rows of x, which are in `space`, with rows [row, row + n_w) of W. */
typedef struct fast_product {
    float *out; /* [n_x, n_w] */
    int64_t out_stride;
    int32_t n_x;
    const hd_weight *w;
    int32_t row, n_w;
    int64_t row_bytes;           /* bytes of a row of W */
    int64_t x_stride;            /* elements */
    fast_decode_fn *read_scales; /* dequantizes scales of W's type */
    fast_space *space;
} fast_product;

typedef struct fast_kernels {
    /* Rounds n columns to a row of x, for a matrix of this type, and writes the divisors of
     * its segments; bf16 has no such scales. */
    void (*round)(uint16_t *to, float *scale, const float *from, int32_t n, hd_dtype type);
    void (*multiply)(const fast_product *p);
    bool takes_bf16; /* multiplies matrices of BF16 too */
} fast_kernels;

extern const fast_kernels fast_bf16, fast_int16_avx2, fast_int16_vnni;

/* ---- attention ---- */

enum {
    FAST_KEYS = 4,       /* keys that are scored together */
    FAST_MIX_ROWS = 64,  /* rows of a mix at most, */
    FAST_MIX_COLS = 128, /* and columns */
};

struct ops_scores;
struct ops_mix;

/* Buffers of rounded numbers. */
typedef struct fast_narrow {
    uint16_t *q, *key; /* [n_q, stride] and [FAST_KEYS, stride], as narrow leaves them */
    int32_t stride;
    uint16_t *pairs;   /* [FAST_MIX_ROWS, FAST_MIX_COLS] */
    uint16_t *weights; /* [n_out, FAST_MIX_ROWS] */
} fast_narrow;

typedef struct fast_attention_kernels {
    /* Rounds n columns to bf16, then pads with zeros to a multiple of 32. */
    void (*narrow)(uint16_t *to, const float *from, int32_t n);
    /* Like the float32 kernels, with rounded numbers; the queries are in n->q. */
    void (*score)(const struct ops_scores *s, const fast_narrow *n);
    void (*mix)(const struct ops_mix *m, const fast_narrow *n);
} fast_attention_kernels;

extern const fast_attention_kernels fast_attention_bf16;

/* Returns the scales of a segment of W; one if there are none. */
static inline int32_t fast_segment_scales(const hd_weight *w) {
    return w->scale ? FAST_SEGMENT / w->block_cols : 1;
}

/* Returns the scales of a row of W, padded to a complete segment. */
static inline int32_t fast_scales(const hd_weight *w) {
    return (w->cols + FAST_SEGMENT - 1) / FAST_SEGMENT * fast_segment_scales(w);
}

/* Stride of x in elements: an odd number of KB, so that column ranges of rows spread evenly
 * over the sets of an L1 cache. */
static inline int64_t fast_x_stride(int32_t cols) {
    return (((int64_t)cols + FAST_COLS - 1) / FAST_COLS | 1) * FAST_COLS;
}

#endif
