/* cpu_hc.c - V4's hyper-connections across threads; models.md 2.8. A task takes a block of
 * rows, so that `fn` is read once per block. */
#include <string.h>

#include "base/checked.h"
#include "ops/cpu_internal.h"

enum { BLOCK_ROWS = 8, MAX_VALUES = 2 * HD_MAX_HC + HD_MAX_HC * HD_MAX_HC, STRETCH = 256 };

/* Scratch of one worker. */
typedef struct hc_state {
    ops_tile tile;
    float m[BLOCK_ROWS * MAX_VALUES]; /* [rows of the block, values] */
    float streams[HD_MAX_HC * STRETCH];
} hc_state;
_Static_assert(sizeof(hc_state) <= OPS_STATE_BYTES, "it is a worker's scratch");

/* m[i, :] = fn x_i / rms(x_i) for n_x rows of x, each all streams wide. */
static void mix_values(const ops_kernels *k, const float *x, int32_t n_x, const float *fn,
                       int32_t n_values, int32_t wide, float eps, hc_state *s) {
    const hd_weight w = {
        .data = fn, .type = HD_F32, .rows = n_values, .cols = wide, .global = 1.0f};
    ops_product p = {
        .out = s->m, .out_stride = n_values, .n_x = n_x, .n_rows = n_values, .w = &w};
    for (int32_t i = 0; i < n_x; i++) p.x[i] = x + (int64_t)i * wide;
    ops_multiply(k, &p, &s->tile);
    for (int32_t i = 0; i < n_x; i++) {
        const float scale = ops_inverse_rms(k, p.x[i], wide, eps);
        for (int32_t v = 0; v < n_values; v++) s->m[i * n_values + v] *= scale;
    }
}

/* out = sum of pre[i] * stream i */
static void weigh_streams(const ops_kernels *k, float *out, const float *x, const float *pre,
                          int32_t hc, int32_t cols) {
    const float *stream[HD_MAX_HC];
    for (int32_t i = 0; i < hc; i++) stream[i] = x + (int64_t)i * cols;
    memset(out, 0, (size_t)cols * sizeof *out);
    k->mix(&(ops_mix){
        .out = out, .coef = pre, .row = stream, .n_out = 1, .n_rows = hc, .cols = cols});
}

/* Every row, or every column, over its sum plus eps. */
static void balance_rows(float *comb, int32_t hc, float eps) {
    for (int32_t i = 0; i < hc; i++) {
        float sum = eps;
        for (int32_t j = 0; j < hc; j++) sum += comb[i * hc + j];
        for (int32_t j = 0; j < hc; j++) comb[i * hc + j] /= sum;
    }
}

static void balance_columns(float *comb, int32_t hc, float eps) {
    float sum[HD_MAX_HC] = {0};
    for (int32_t i = 0; i < hc * hc; i++) sum[i % hc] += comb[i];
    for (int32_t i = 0; i < hc * hc; i++) comb[i] /= sum[i % hc] + eps;
}

static void sinkhorn(const ops_kernels *k, float *comb, int32_t hc, int32_t iters, float eps) {
    for (int32_t i = 0; i < hc; i++) {
        float *row = comb + (int64_t)i * hc;
        const float sum = k->exp_sum(row, hc, k->max(row, hc));
        for (int32_t j = 0; j < hc; j++) row[j] = row[j] / sum + eps;
    }
    balance_columns(comb, hc, eps);
    for (int32_t n = 1; n < iters; n++) {
        balance_rows(comb, hc, eps);
        balance_columns(comb, hc, eps);
    }
}

static void pre_row(const hd_hc_pre_args *a, const ops_kernels *k, int32_t row,
                    const float *m) {
    const int32_t hc = a->hc;
    float pre[HD_MAX_HC], *comb = a->comb + (int64_t)row * hc * hc;
    for (int32_t i = 0; i < hc; i++) {
        pre[i] = sigmoid(m[i] * a->scale[0] + a->base[i]) + a->eps;
        a->post[(int64_t)row * hc + i] =
            2.0f * sigmoid(m[hc + i] * a->scale[1] + a->base[hc + i]);
    }
    for (int32_t v = 0; v < hc * hc; v++) {
        comb[v] = m[2 * hc + v] * a->scale[2] + a->base[2 * hc + v];
    }
    sinkhorn(k, comb, hc, a->iters, a->eps);
    weigh_streams(k, act(a->out) + (int64_t)row * a->cols,
                  act_in(a->x) + (int64_t)row * hc * a->cols, pre, hc, a->cols);
}

static void pre_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    const hd_hc_pre_args *a = job->args;
    const int32_t wide = a->hc * a->cols, n_values = 2 * a->hc + a->hc * a->hc;
    hc_state *s = hd_stream_scratch(job->stream, worker, sizeof *s);
    mix_values(job->k, act_in(a->x) + (int64_t)first * wide, end - first, a->fn, n_values, wide,
               a->norm_eps, s);
    for (int32_t r = first; r < end; r++) {
        pre_row(a, job->k, r, s->m + (r - first) * n_values);
    }
}

static int32_t block_rows(const hd_stream *s, int32_t rows) {
    const int32_t fair = (int32_t)hd_ceil_div(rows, hd_stream_workers(s));
    return hd_max_i32(1, hd_min_i32(BLOCK_ROWS, fair));
}

void ops_hc_pre_cpu(hd_stream *s, const hd_hc_pre_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = pre_rows,
                            .rows = a->rows,
                            .per_task = block_rows(s, a->rows)});
}

/* A stretch of columns of one row: the streams are copied aside, then mixed in place. */
static void post_stretch(const hd_hc_post_args *a, const ops_kernels *k, int32_t row,
                         const float *coef, int32_t col, float *aside) {
    const int32_t hc = a->hc, n = hd_min_i32(STRETCH, a->cols - col);
    float *x = act(a->x) + (int64_t)row * hc * a->cols + col;
    const float *term[HD_MAX_HC + 1] = {act_in(a->y) + (int64_t)row * a->cols + col};
    for (int32_t i = 0; i < hc; i++) {
        float *stream = x + (int64_t)i * a->cols;
        memcpy(aside + i * STRETCH, stream, (size_t)n * sizeof *aside);
        memset(stream, 0, (size_t)n * sizeof *stream);
        term[i + 1] = aside + i * STRETCH;
    }
    k->mix(&(ops_mix){.out = x,
                      .coef = coef,
                      .row = term,
                      .out_stride = a->cols,
                      .coef_stride = hc + 1,
                      .n_out = hc,
                      .n_rows = hc + 1,
                      .cols = n});
}

static void post_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    const hd_hc_post_args *a = job->args;
    const int32_t hc = a->hc;
    hc_state *s = hd_stream_scratch(job->stream, worker, sizeof *s);
    for (int32_t r = first; r < end; r++) {
        const float *post = a->post + (int64_t)r * hc, *comb = a->comb + (int64_t)r * hc * hc;
        float coef[HD_MAX_HC * (HD_MAX_HC + 1)]; /* [hc, post then a column of comb] */
        for (int32_t j = 0; j < hc; j++) {
            coef[j * (hc + 1)] = post[j];
            for (int32_t i = 0; i < hc; i++) coef[j * (hc + 1) + 1 + i] = comb[i * hc + j];
        }
        for (int32_t c = 0; c < a->cols; c += STRETCH) {
            post_stretch(a, job->k, r, coef, c, s->streams);
        }
    }
}

void ops_hc_post_cpu(hd_stream *s, const hd_hc_post_args *a, const ops_kernels *k) {
    ops_run_rows(
        &(ops_job){.stream = s,
                   .k = k,
                   .args = a,
                   .fn = post_rows,
                   .rows = a->rows,
                   .per_task = ops_rows_per_task((int64_t)a->hc * (a->hc + 1) * a->cols)});
}

static void head_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    const hd_hc_head_args *a = job->args;
    const int32_t hc = a->hc, wide = hc * a->cols;
    hc_state *s = hd_stream_scratch(job->stream, worker, sizeof *s);
    const float *x = act_in(a->x) + (int64_t)first * wide;
    mix_values(job->k, x, end - first, a->fn, hc, wide, a->norm_eps, s);
    for (int32_t r = first; r < end; r++, x += wide) {
        float *pre = s->m + (r - first) * hc;
        for (int32_t i = 0; i < hc; i++) {
            pre[i] = sigmoid(pre[i] * a->scale[0] + a->base[i]) + a->eps;
        }
        weigh_streams(job->k, act(a->out) + (int64_t)r * a->cols, x, pre, hc, a->cols);
    }
}

void ops_hc_head_cpu(hd_stream *s, const hd_hc_head_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = head_rows,
                            .rows = a->rows,
                            .per_task = block_rows(s, a->rows)});
}
