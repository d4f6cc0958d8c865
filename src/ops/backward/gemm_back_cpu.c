/* gemm_back_cpu.c - gradients of GEMMs over the kernels of an instruction set. A task owns rows
 * of the result. Sums add row after row to what is stored, as the reference does, so that
 * neither threads nor blocks change a bit. */
#include <string.h>

#include "base/checked.h"
#include "ops/backward/backward_cpu_internal.h"

enum {
    OUT_ROWS = 64,                 /* rows of dw in a task, at most */
    SUM_ROWS = OPS_TRANSPOSE_KEYS, /* rows that are added between two loads of dw */
    TASKS = 3 /* of a worker, at least, unless they have fewer than LEAST_ROWS rows */
};

/* Rows of dw in a task, of n_rows in each of n matrices. */
static int32_t task_rows(const hd_stream *s, int32_t n_rows, int32_t n) {
    enum { LEAST_ROWS = 16 };
    const int64_t fair = (int64_t)n_rows * n / (TASKS * (int64_t)hd_stream_workers(s));
    const int32_t rows = fair > OUT_ROWS ? OUT_ROWS : (int32_t)fair - (int32_t)fair % 4;
    return hd_max_i32(LEAST_ROWS, rows);
}

/* dw[i, c] += left[r, i] * right[r][c] for i < n_rows <= OUT_ROWS and r < rows <= SUM_ROWS */
static void add_outer(const ops_kernels *k, float *dw, const float *left, int64_t left_row,
                      const float *const *right, int32_t rows, int32_t n_rows, int32_t cols) {
    float coef[OUT_ROWS * SUM_ROWS];
    const float *of[SUM_ROWS]; /* the last one again for those that are missing */
    for (int32_t r = 0; r < SUM_ROWS; r++) of[r] = left + hd_min_i32(r, rows - 1) * left_row;
    k->transpose(coef, of, n_rows);
    for (int32_t at = 0; at < cols; at += OPS_TILE_COLS) {
        k->mix(&(ops_mix){.out = dw + at,
                          .coef = coef,
                          .row = right,
                          .out_stride = cols,
                          .coef_stride = SUM_ROWS,
                          .at = at,
                          .n_out = n_rows,
                          .n_rows = rows,
                          .cols = hd_min_i32(OPS_TILE_COLS, cols - at)});
    }
}

/* ---- one matrix, or heads ---- */

typedef struct weight_job {
    const hd_weight_grad_args *a;
    const ops_kernels *k;
    int32_t out_rows; /* rows of dw in a task */
    int32_t per_head; /* tasks */
} weight_job;

static void weight_task(const void *arg, int32_t task, int32_t worker) {
    const weight_job *job = arg;
    const hd_weight_grad_args *a = job->a;
    const int32_t h = task / job->per_head, i = task % job->per_head * job->out_rows;
    const int64_t left_row = stride_of(a->left, (int64_t)a->heads * a->left_head);
    const int64_t right_row = stride_of(a->right, (int64_t)a->heads * a->right_head);
    const float *left = act_in(a->left) + (int64_t)h * a->left_head + i;
    const float *right = act_in(a->right) + (int64_t)h * a->right_head;
    float *dw = a->dw + (a->first_row + (int64_t)h * a->head_rows + i) * a->cols;
    const float *row[SUM_ROWS];
    (void)worker;
    for (int32_t r = 0; r < a->rows; r += SUM_ROWS) {
        const int32_t n = hd_min_i32(SUM_ROWS, a->rows - r);
        for (int32_t j = 0; j < n; j++) row[j] = right + (r + j) * right_row;
        add_outer(job->k, dw, left + r * left_row, left_row, row, n,
                  hd_min_i32(job->out_rows, a->n_rows - i), a->cols);
    }
}

void back_weight_grad_cpu(hd_stream *s, const hd_weight_grad_args *a, const ops_kernels *k) {
    const int32_t rows = task_rows(s, a->n_rows, a->heads);
    const weight_job job = {a, k, rows, (int32_t)hd_ceil_div(a->n_rows, rows)};
    hd_stream_tasks(s, a->heads * job.per_head, weight_task, &job);
}

/* ---- experts ---- */

typedef struct grouped_job {
    const hd_grouped_weight_grad_args *a;
    const ops_kernels *k;
    int32_t out_rows; /* rows of dw in a task */
    int32_t per_slot; /* tasks */
} grouped_job;

static void grouped_task(const void *arg, int32_t task, int32_t worker) {
    const grouped_job *job = arg;
    const hd_grouped_weight_grad_args *a = job->a;
    const int32_t e = task / job->per_slot, i = task % job->per_slot * job->out_rows;
    float *dw = a->dw + ((int64_t)e * a->n_rows + i) * a->cols;
    const float *row[SUM_ROWS];
    (void)worker;
    for (int32_t p = a->offset[e]; p < a->offset[e + 1]; p += SUM_ROWS) {
        const int32_t n = hd_min_i32(SUM_ROWS, a->offset[e + 1] - p);
        for (int32_t j = 0; j < n; j++) {
            const int64_t at = a->assignment ? a->assignment[p + j] / a->top_k : p + j;
            row[j] = act_in(a->x) + at * a->cols;
        }
        add_outer(job->k, dw, act_in(a->g) + (int64_t)p * a->n_rows + i, a->n_rows, row, n,
                  hd_min_i32(job->out_rows, a->n_rows - i), a->cols);
    }
}

void back_grouped_weight_grad_cpu(hd_stream *s, const hd_grouped_weight_grad_args *a,
                                  const ops_kernels *k) {
    const int32_t rows = task_rows(s, a->n_rows, a->n_slots);
    const grouped_job job = {a, k, rows, (int32_t)hd_ceil_div(a->n_rows, rows)};
    hd_stream_tasks(s, a->n_slots * job.per_slot, grouped_task, &job);
}

/* ---- through the experts' matrices ---- */

typedef struct through_job {
    const hd_grouped_gemm_back_args *a;
    const ops_kernels *k;
    hd_stream *s;
    int32_t per_slot; /* tasks: chunks of columns */
} through_job;

static void through_task(const void *arg, int32_t task, int32_t worker) {
    const through_job *job = arg;
    const hd_grouped_gemm_back_args *a = job->a;
    const int32_t e = task / job->per_slot, col = task % job->per_slot * OPS_TILE_COLS;
    const hd_weight *w = &a->w->slots[e];
    const int32_t cols = hd_min_i32(OPS_TILE_COLS, w->cols - col);
    const int32_t first = a->offset[e], n = a->offset[e + 1] - first;
    if (n == 0) return;
    ops_tile *tile = hd_stream_scratch(job->s, worker, sizeof *tile);
    const float *row[OPS_MIX_ROWS];
    float *dx = a->dx + (int64_t)first * w->cols + col;
    for (int32_t p = 0; p < n; p++) {
        memset(dx + (int64_t)p * w->cols, 0, (size_t)cols * sizeof *dx);
    }
    for (int32_t i = 0; i < w->rows; i += OPS_MIX_ROWS) {
        const int32_t n_rows = hd_min_i32(OPS_MIX_ROWS, w->rows - i);
        for (int32_t j = 0; j < n_rows; j++) {
            float *to = tile->w + j * OPS_TILE_STRIDE;
            ops_dequantize(job->k, to, w, i + j, col, cols);
            row[j] = to;
        }
        job->k->mix(&(ops_mix){.out = dx,
                               .coef = act_in(a->g) + (int64_t)first * w->rows + i,
                               .row = row,
                               .out_stride = w->cols,
                               .coef_stride = w->rows,
                               .n_out = n,
                               .n_rows = n_rows,
                               .cols = cols});
    }
}

void back_grouped_gemm_back_cpu(hd_stream *s, const hd_grouped_gemm_back_args *a,
                                const ops_kernels *k) {
    const through_job job = {a, k, s, (int32_t)hd_ceil_div(a->w->shape.cols, OPS_TILE_COLS)};
    hd_stream_tasks(s, a->w->n * job.per_slot, through_task, &job);
}
