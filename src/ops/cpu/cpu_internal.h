/* cpu_internal.h - shared code of the CPU operators, which are written once over the kernels
 * of an instruction set. Operators divide their rows into tasks. A row's result does not
 * depend on its task. */
#ifndef HD_OPS_CPU_CPU_INTERNAL_H
#define HD_OPS_CPU_CPU_INTERNAL_H

#include <string.h>

#include "ops/ref/act_internal.h"
#include "ops/cpu/kernels_internal.h"
#include "ops/ops.h"

#define X(op) void ops_##op##_cpu(hd_stream *s, const hd_##op##_args *a, const ops_kernels *k);
HD_OP_LIST(X)
#undef X

/* ---- rows into tasks ---- */

typedef struct ops_job ops_job;

/* Computes rows [first, end) of job->args. */
typedef void ops_rows_fn(const ops_job *job, int32_t first, int32_t end, int32_t worker);

struct ops_job {
    hd_stream *stream;
    const ops_kernels *k;
    const void *args; /* the operator's argument struct */
    ops_rows_fn *fn;
    int32_t rows, per_task;
};

/* Runs the job's rows in tasks of per_task and returns when all are done. */
void ops_run_rows(const ops_job *job);

/* Returns the rows per task that make a task worth scheduling, if a row takes about `steps`
 * scalar steps. */
int32_t ops_rows_per_task(int64_t steps);

/* 1 / sqrt(mean(x^2) + eps) */
static inline float ops_inverse_rms(const ops_kernels *k, const float *x, int32_t n,
                                    float eps) {
    return (float)(1.0 / sqrt(k->square_sum(x, n) / n + (double)eps));
}

/* out[i] = x[i] * scale * weight[i], without the last factor if weight is NULL; out may be x. */
static inline void ops_scale(float *out, const float *x, const float *weight, float scale,
                             int32_t n) {
    typedef float vector __attribute__((vector_size(OPS_LANES * sizeof(float))));
    int32_t i = 0;
    for (; i + OPS_LANES <= n; i += OPS_LANES) {
        vector y, w;
        memcpy(&y, x + i, sizeof y);
        y *= scale;
        if (weight) {
            memcpy(&w, weight + i, sizeof w);
            y *= w;
        }
        memcpy(out + i, &y, sizeof y);
    }
    for (; i < n; i++) out[i] = weight ? x[i] * scale * weight[i] : x[i] * scale;
}

/* Softmax over a block: scores times scale become exp(score - *top), where *top now covers
 * them, and their sum is added to *total. Returns the factor by which earlier sums shrink. */
static inline float ops_soften(const ops_kernels *k, float *score, int32_t n, float scale,
                               float *top, float *total) {
    float down = 1.0f;
    for (int32_t i = 0; i < n; i++) score[i] *= scale;
    const float best = k->max(score, n);
    if (best > *top) {
        down = expf(*top - best);
        *top = best;
    }
    *total = *total * down + k->exp_sum(score, n, *top);
    return down;
}

enum {
    OPS_STATE_BYTES = 1280 * 1024, /* scratch of an operator, independent of its input */
    OPS_MAX_PARTS = 256            /* parts of one row's keys, at most */
};

/* ---- cached entries ---- */

/* As ops_read_entry(), with the same bits. */
const float *ops_entry_cpu(const ops_kernels *k, const hd_paged *p, int32_t seq, int32_t entry,
                           float *room);

/* ---- stored matrices ---- */

enum {
    OPS_TILE_COLS = 512, /* columns dequantized at once */
    /* padded, so that rows use different cache sets */
    OPS_TILE_STRIDE = OPS_TILE_COLS + OPS_LANES,
    OPS_X_ROWS = 64,   /* rows of x that share a dequantized tile */
    OPS_WIDE_ROWS = 8, /* rows of W in a tile of a large-M GEMM */
    OPS_MIX_ROWS = 64, /* rows of a tile that is summed, not multiplied */
    /* small-M GEMM: rows of x for which a dequantized tile does not pay */
    OPS_FEW_ROWS = 16,
    /* bytes of W prefetched ahead, at least; the best of 8, 32, 64, 128 KiB */
    OPS_AHEAD = 8192,
    OPS_SMALL_M_COLS = 4096, /* columns of a small-M GEMM at once */
    OPS_LEAST_SMALL_M_COLS = 1024
};

/* Scratch of one worker for GEMMs and transposed GEMMs. */
typedef struct ops_tile {
    float w[OPS_MIX_ROWS * OPS_TILE_STRIDE];
    float acc[OPS_WIDE_ROWS * OPS_X_ROWS * OPS_LANES]; /* in groups of four rows of W */
} ops_tile;
_Static_assert(sizeof(ops_tile) <= OPS_STATE_BYTES, "it is a worker's scratch");

/* Dequantizes out[0 .. n) = columns [col, col + n) of a row of w. col must be a multiple of
 * OPS_LANES, and n too, except at the end of a row; n <= OPS_TILE_COLS. */
void ops_dequantize(const ops_kernels *k, float *out, const hd_weight *w, int32_t row,
                    int32_t col, int32_t n);

/* GEMM of up to OPS_X_ROWS rows of x, ops_fast_x_rows, or FAST_X_ROWS of a narrow matrix, with rows
 * [first_row, first_row + n_rows) of w. */
typedef struct ops_product {
    float *out; /* [n_x, n_rows] */
    int64_t out_stride;
    const float *x[FAST_X_ROWS]; /* [n_x] pointers to [w->cols] */
    int32_t n_x, first_row, n_rows;
    const hd_weight *w;
    bool same_x; /* same x as in the previous product of this worker and operator */
} ops_product;

/* Prefetches the scales of n columns of n_w rows, from (row, col) and `ahead` elements on.
 * If every row has its own scales they are as many as every eighth byte, and the hardware
 * prefetcher misses them. */
void ops_fetch_scales(const hd_weight *w, int32_t row, int32_t col, int32_t n_w, int32_t n,
                      int64_t ahead);

void ops_multiply(const ops_kernels *k, const ops_product *p, ops_tile *tile);

/* ---- GEMM with rounded x: --precision fast ---- */

/* Returns whether GEMMs with w round x. */
bool ops_fast_takes(const ops_kernels *k, const hd_weight *w);

/* Returns the most rows of x per product. */
int32_t ops_fast_x_rows(const hd_weight *w);

void ops_multiply_fast(const ops_kernels *k, const ops_product *p, fast_space *s);

#endif
