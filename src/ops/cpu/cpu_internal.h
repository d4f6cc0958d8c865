/* cpu_internal.h - what the CPU operators share: they are written once, over the kernels of
 * an instruction set, and split their rows into tasks. A row does not know its task. */
#ifndef HD_OPS_CPU_CPU_INTERNAL_H
#define HD_OPS_CPU_CPU_INTERNAL_H

#include "ops/ref/act_internal.h"
#include "ops/cpu/kernels_internal.h"
#include "ops/ops.h"

#define X(op) void ops_##op##_cpu(hd_stream *s, const hd_##op##_args *a, const ops_kernels *k);
HD_OP_LIST(X)
#undef X

/* ---- rows into tasks ---- */

typedef struct ops_job ops_job;

/* Does rows [first, end) of job->args. */
typedef void ops_rows_fn(const ops_job *job, int32_t first, int32_t end, int32_t worker);

struct ops_job {
    hd_stream *stream;
    const ops_kernels *k;
    const void *args; /* the op's own */
    ops_rows_fn *fn;
    int32_t rows, per_task;
};

/* Runs the job's rows in tasks of per_task and returns when all are done. */
void ops_run_rows(const ops_job *job);

/* Rows that make a task worth handing out, when one takes about `steps` scalar steps. */
int32_t ops_rows_per_task(int64_t steps);

/* 1 / sqrt(mean(x^2) + eps) */
static inline float ops_inverse_rms(const ops_kernels *k, const float *x, int32_t n,
                                    float eps) {
    return (float)(1.0 / sqrt(k->square_sum(x, n) / n + (double)eps));
}

/* A stretch of a softmax: scores times scale into exp(score - *top), where *top now covers them,
 * and their sum into *total. Gives what sums from before shrink by. */
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
    OPS_STATE_BYTES = 1024 * 1024, /* scratch of an op that does not grow with its input */
    OPS_MAX_PARTS = 256            /* that one row's keys are cut into */
};

/* ---- stored matrices ---- */

enum {
    OPS_TILE_COLS = 512,                         /* columns decoded at once */
    OPS_TILE_STRIDE = OPS_TILE_COLS + OPS_LANES, /* so that rows differ in their cache sets */
    OPS_X_ROWS = 64,                             /* rows that share a decoded tile */
    OPS_WIDE_ROWS = 8, /* rows of W in a tile that many rows of x meet */
    OPS_MIX_ROWS = 8,  /* rows of a tile that is added up instead of multiplied */
    OPS_FEW_ROWS = 16, /* rows of x for which decoding into a tile does not pay */
    OPS_AHEAD = 8192,  /* bytes of W fetched ahead, at least; of 8, 32, 64, 128 KiB the best */
    OPS_SMALL_M_COLS = 4096, /* columns that they meet at once */
    OPS_LEAST_SMALL_M_COLS = 1024
};

/* Scratch of one worker for products and transposed products. */
typedef struct ops_tile {
    float w[OPS_MIX_ROWS * OPS_TILE_STRIDE];
    float acc[OPS_WIDE_ROWS * OPS_X_ROWS * OPS_LANES]; /* four rows of W after another */
} ops_tile;
_Static_assert(sizeof(ops_tile) <= OPS_STATE_BYTES, "it is a worker's scratch");

/* out[0 .. n) = columns [col, col + n) of a row of w; col and, but for the last stretch of a
 * row, n are multiples of OPS_LANES; n <= OPS_TILE_COLS. */
void ops_decode(const ops_kernels *k, float *out, const hd_weight *w, int32_t row, int32_t col,
                int32_t n);

/* Up to OPS_X_ROWS rows, or ops_fast_x_rows, against rows [first_row, first_row + n_rows) of w. */
typedef struct ops_product {
    float *out; /* [n_x, n_rows] */
    int64_t out_stride;
    const float *x[FAST_X_ROWS]; /* [n_x] pointers to [w->cols] */
    int32_t n_x, first_row, n_rows;
    const hd_weight *w;
    bool same_x; /* as in the product before, of this worker and this operator */
} ops_product;

/* Asks for the scales of n columns of n_w rows, from (row, col) and `ahead` elements on:
 * where every row has its own they are as many as every eighth byte, and nothing foresees them. */
void ops_fetch_scales(const hd_weight *w, int32_t row, int32_t col, int32_t n_w, int32_t n,
                      int64_t ahead);

void ops_multiply(const ops_kernels *k, const ops_product *p, ops_tile *tile);

/* ---- the same with x rounded: --precision fast ---- */

/* Whether products with w are computed so. */
bool ops_fast_takes(const ops_kernels *k, const hd_weight *w);

/* How many rows of x at most. */
int32_t ops_fast_x_rows(const hd_weight *w);

void ops_multiply_fast(const ops_kernels *k, const ops_product *p, fast_space *s);

#endif
