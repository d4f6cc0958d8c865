/* hc_cpu.c - V4's hyper-connections (mHC) across threads; models.md 2.8. A task computes a
 * block of rows, so that `fn` is read once per block. If there are few blocks, a task
 * computes a group of fn's values, and the last task of a block continues with all of them. */
#include <stdatomic.h>
#include <string.h>

#include "base/checked.h"
#include "ops/cpu/cpu_internal.h"
#include "ops/fused_internal.h"

enum {
    BLOCK_ROWS = 8,
    GROUP = OPS_TILE_ROWS, /* values of fn per task */
    MAX_VALUES = 2 * HD_MAX_HC + HD_MAX_HC * HD_MAX_HC,
    MAX_GROUPS = MAX_VALUES / GROUP,
    STRETCH = 256
};
_Static_assert(MAX_VALUES % GROUP == 0 && BLOCK_ROWS * GROUP * sizeof(float) % 64 == 0,
               "groups share no cache line");

/* Scratch of one worker; m belongs to a block, and other workers may write it too. */
typedef struct hc_state {
    ops_tile tile;
    float m[MAX_GROUPS * BLOCK_ROWS * GROUP]; /* [groups, BLOCK_ROWS, GROUP] */
    float streams[HD_MAX_HC * STRETCH];
    _Atomic int32_t left; /* unfinished groups of the block */
} hc_state;
_Static_assert(sizeof(hc_state) <= OPS_STATE_BYTES, "it is a worker's scratch");

/* Computes the values of all rows, m = fn x / rms(x), and then each row's output. */
typedef struct hc_job {
    hd_stream *stream;
    const ops_kernels *k;
    const void *args;
    void (*finish)(const void *args, const ops_kernels *k, int32_t row, const float *m);
    const float *x; /* [rows, wide] */
    hd_weight fn;   /* [values, wide] */
    float eps;
    int32_t rows, block_rows, groups, tasks_each; /* groups and tasks of a block */
} hc_job;

static hc_state *state_of(const hc_job *job, int32_t worker) {
    return hd_stream_scratch(job->stream, worker, sizeof(hc_state));
}

/* Group g of the values of rows [first, end). */
static void mix_values(const hc_job *job, int32_t first, int32_t end, int32_t g, hc_state *to,
                       ops_tile *tile) {
    ops_product p = {.out = to->m + g * BLOCK_ROWS * GROUP,
                     .out_stride = GROUP,
                     .n_x = end - first,
                     .first_row = g * GROUP,
                     .n_rows = hd_min_i32(GROUP, job->fn.rows - g * GROUP),
                     .w = &job->fn};
    for (int32_t i = 0; i < p.n_x; i++) p.x[i] = job->x + (int64_t)(first + i) * job->fn.cols;
    ops_multiply(job->k, &p, tile);
}

static void finish_row(const hc_job *job, int32_t row, const float *m) {
    const float *x = job->x + (int64_t)row * job->fn.cols;
    const float scale = ops_inverse_rms(job->k, x, job->fn.cols, job->eps);
    float values[MAX_VALUES];
    for (int32_t v = 0; v < job->fn.rows; v++) {
        values[v] = m[v / GROUP * BLOCK_ROWS * GROUP + v % GROUP] * scale;
    }
    job->finish(job->args, job->k, row, values);
}

static void hc_task(const void *arg, int32_t task, int32_t worker) {
    const hc_job *job = arg;
    const int32_t block = task / job->tasks_each, part = task % job->tasks_each;
    const int32_t first = block * job->block_rows;
    const int32_t end = hd_min_i32(first + job->block_rows, job->rows);
    const bool shared = job->tasks_each > 1;
    hc_state *to = state_of(job, shared ? block : worker);
    for (int32_t g = part; g < job->groups; g += job->tasks_each) {
        mix_values(job, first, end, g, to, &state_of(job, worker)->tile);
    }
    if (shared && atomic_fetch_sub_explicit(&to->left, 1, memory_order_acq_rel) > 1) return;
    for (int32_t r = first; r < end; r++) finish_row(job, r, to->m + (r - first) * GROUP);
}

static void run_job(hc_job *job) {
    const int32_t workers = hd_stream_workers(job->stream);
    const int32_t fair = (int32_t)hd_ceil_div(job->rows, workers);
    job->block_rows = hd_max_i32(1, hd_min_i32(BLOCK_ROWS, fair));
    job->groups = (int32_t)hd_ceil_div(job->fn.rows, GROUP);
    const int32_t blocks = (int32_t)hd_ceil_div(job->rows, job->block_rows);
    job->tasks_each = blocks < workers ? job->groups : 1;
    for (int32_t b = 0; b < blocks && job->tasks_each > 1; b++) {
        atomic_init(&state_of(job, b)->left, job->tasks_each);
    }
    hd_stream_tasks(job->stream, blocks * job->tasks_each, hc_task, job);
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

/* Divides every row, or every column, by its sum plus eps (Sinkhorn). */
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

/* Computes pre, post and comb of a row from its values. */
static void weigh_row(const hd_hc_pre_args *a, const ops_kernels *k, int32_t row,
                      const float *m, float *pre) {
    const int32_t hc = a->hc;
    float *comb = a->comb + (int64_t)row * hc * hc;
    for (int32_t i = 0; i < hc; i++) {
        pre[i] = sigmoid(m[i] * a->scale[0] + a->base[i]) + a->eps;
        a->post[(int64_t)row * hc + i] =
            2.0f * sigmoid(m[hc + i] * a->scale[1] + a->base[hc + i]);
    }
    for (int32_t v = 0; v < hc * hc; v++) {
        comb[v] = m[2 * hc + v] * a->scale[2] + a->base[2 * hc + v];
    }
    sinkhorn(k, comb, hc, a->iters, a->eps);
}

static void pre_row(const void *args, const ops_kernels *k, int32_t row, const float *m) {
    const hd_hc_pre_args *a = args;
    const int32_t hc = a->hc;
    float pre[HD_MAX_HC];
    weigh_row(a, k, row, m, pre);
    weigh_streams(k, act(a->out) + (int64_t)row * a->cols,
                  act_in(a->x) + (int64_t)row * hc * a->cols, pre, hc, a->cols);
}

static hd_weight matrix_of(const float *fn, int32_t values, int32_t wide) {
    return (hd_weight){
        .data = fn, .type = HD_F32, .rows = values, .cols = wide, .global = 1.0f};
}

void ops_hc_pre_cpu(hd_stream *s, const hd_hc_pre_args *a, const ops_kernels *k) {
    run_job(&(hc_job){.stream = s,
                      .k = k,
                      .args = a,
                      .finish = pre_row,
                      .x = act_in(a->x),
                      .fn = matrix_of(a->fn, 2 * a->hc + a->hc * a->hc, a->hc * a->cols),
                      .eps = a->norm_eps,
                      .rows = a->rows});
}

static void single_row(const void *args, const ops_kernels *k, int32_t row, const float *m) {
    const hd_hc_single_args *a = args;
    const hd_hc_pre_args coefficients = ops_single_pre(a);
    float *pre = a->pre + (int64_t)row * a->hc;
    for (int32_t i = 0; a->first && i < a->hc; i++) pre[i] = i == 0 ? 1.0f : 0.0f;
    weigh_streams(k, act(a->out) + (int64_t)row * a->cols,
                  act_in(a->x) + (int64_t)row * a->hc * a->cols, pre, a->hc, a->cols);
    weigh_row(&coefficients, k, row, m, pre);
}

void ops_hc_single_cpu(hd_stream *s, const hd_hc_single_args *a, const ops_kernels *k) {
    run_job(&(hc_job){.stream = s,
                      .k = k,
                      .args = a,
                      .finish = single_row,
                      .x = act_in(a->x),
                      .fn = matrix_of(a->fn, 2 * a->hc + a->hc * a->hc, a->hc * a->cols),
                      .eps = a->norm_eps,
                      .rows = a->rows});
}

static void mix_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    const hd_hc_mix_args *a = job->args;
    (void)worker;
    for (int64_t r = first; r < end; r++) {
        weigh_streams(job->k, act(a->out) + r * a->cols, act_in(a->x) + r * a->hc * a->cols,
                      a->pre + r * a->hc, a->hc, a->cols);
    }
}

void ops_hc_mix_cpu(hd_stream *s, const hd_hc_mix_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = mix_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task((int64_t)a->hc * a->cols)});
}

/* A range of columns of one row: the streams are copied, then mixed in place. */
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

static void head_row(const void *args, const ops_kernels *k, int32_t row, const float *m) {
    const hd_hc_head_args *a = args;
    float pre[HD_MAX_HC];
    for (int32_t i = 0; i < a->hc; i++) {
        pre[i] = sigmoid(m[i] * a->scale[0] + a->base[i]) + a->eps;
    }
    weigh_streams(k, act(a->out) + (int64_t)row * a->cols,
                  act_in(a->x) + (int64_t)row * a->hc * a->cols, pre, a->hc, a->cols);
}

void ops_hc_head_cpu(hd_stream *s, const hd_hc_head_args *a, const ops_kernels *k) {
    run_job(&(hc_job){.stream = s,
                      .k = k,
                      .args = a,
                      .finish = head_row,
                      .x = act_in(a->x),
                      .fn = matrix_of(a->fn, a->hc, a->hc * a->cols),
                      .eps = a->norm_eps,
                      .rows = a->rows});
}

static void mean_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    const hd_hc_mean_args *a = job->args;
    const float scale = 1.0f / (float)a->hc;
    (void)worker;
    for (int64_t r = first; r < end; r++) {
        const float *x = act_in(a->x) + r * a->hc * a->cols;
        float *out = act(a->out) + r * stride_of(a->out, a->cols);
        memcpy(out, x, (size_t)a->cols * sizeof *out);
        for (int32_t i = 1; i < a->hc; i++) {
            const float *stream = x + (int64_t)i * a->cols;
            for (int32_t c = 0; c < a->cols; c++) out[c] += stream[c];
        }
        for (int32_t c = 0; c < a->cols; c++) out[c] *= scale;
    }
}

void ops_hc_mean_cpu(hd_stream *s, const hd_hc_mean_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = mean_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task((int64_t)a->hc * a->cols)});
}
