/* gemm_cpu.c - GEMMs on the CPU: linear, per head, grouped (MoE experts). A tile of the
 * stored matrix is dequantized once and multiplied with all rows of a block. Small M is
 * bound by memory, large M by fused multiply-adds. */
#include <limits.h>
#include <stdatomic.h>
#include <string.h>

#include "base/checked.h"
#include "base/memory.h"
#include "ops/cpu/cpu_internal.h"

/* Rows of W in a task: enough work to schedule, and few enough that a narrow matrix still
 * feeds every thread. */
enum { TASK_STEPS = 262144, MAX_TASK_ROWS = 64 };

enum { NARROW_TASKS = 8 }; /* of a worker, at least, where tasks may be larger */

/* Of a transposed GEMM: tasks per worker, at least, and rows of x in a task, at most. */
enum { TRANSPOSED_TASKS = 2, TRANSPOSED_ROWS = 512 };

/* With --precision fast every task rounds its rows of x, so tasks are as large as keeps all
 * threads busy to the end. */
enum {
    FAST_TASKS = 4 /* tasks per worker, at least */,
    MAX_FAST_ROWS = 1024,
    LEAST_FAST_ROWS = 32
};

/* ---- dequantization ---- */

static const uint8_t *byte_at(const void *array, hd_dtype type, int64_t element) {
    return (const uint8_t *)array + element * hd_dtype_bits(type) / 8;
}

void ops_dequantize(const ops_kernels *k, float *out, const hd_weight *w, int32_t row,
                    int32_t col, int32_t n) {
    static const float one = 1.0f;
    const uint8_t *src = byte_at(w->data, w->type, (int64_t)row * w->cols + col);
    if (!w->scale) {
        ops_dequantizer(k, w->type)(out, src, n, &one, INT_MAX);
        return;
    }
    if (w->block_cols % OPS_LANES != 0) { /* no known checkpoint has this */
        for (int32_t c = 0; c < n; c++) out[c] = hd_weight_at(w, row, col + c);
        return;
    }
    /* A row of scales is dequantized like a stored row, with `global` as its scale. */
    float scale[OPS_TILE_COLS / OPS_LANES + 1];
    const int64_t per_row = hd_ceil_div(w->cols, w->block_cols);
    const int32_t block = col / w->block_cols, last = (col + n - 1) / w->block_cols;
    ops_dequantizer(k, w->scale_type)(
        scale,
        byte_at(w->scale, w->scale_type, (int64_t)(row / w->block_rows) * per_row + block),
        last - block + 1, &w->global, INT_MAX);
    const int32_t head = hd_min_i32(n, w->block_cols - col % w->block_cols);
    ops_dequantizer(k, w->type)(out, src, head, scale, w->block_cols);
    if (head == n) return;
    ops_dequantizer(k, w->type)(out + head, byte_at(src, w->type, head), n - head, scale + 1,
                                w->block_cols);
}

/* ---- GEMM ---- */

/* Dequantizes scales of rows [row, row + n_w) for columns [col, col + n), which begin with a
 * block, into `to`. scale[j] points to those of row + j, or of `row` for unused rows.
 * Returns false if a block is no multiple of OPS_LANES. */
static bool decode_scales(const ops_kernels *k, float *to, const float *scale[OPS_TILE_ROWS],
                          const hd_weight *w, int32_t row, int32_t n_w, int32_t col,
                          int32_t n) {
    for (int32_t j = 0; j < OPS_TILE_ROWS; j++) scale[j] = to;
    if (!w->scale) {
        to[0] = 1.0f;
        return true;
    }
    if (w->block_cols % OPS_LANES != 0 || col % w->block_cols != 0) return false;
    const int32_t per_row = (int32_t)hd_ceil_div(w->cols, w->block_cols);
    const int32_t n_blocks = (int32_t)hd_ceil_div(n, w->block_cols);
    const int32_t first = row / w->block_rows, last = (row + n_w - 1) / w->block_rows;
    const int64_t at = (int64_t)first * per_row + col / w->block_cols;
    if (n_blocks == per_row) { /* rows of scales are contiguous */
        ops_dequantizer(k, w->scale_type)(to, byte_at(w->scale, w->scale_type, at),
                                          (last - first + 1) * per_row, &w->global, INT_MAX);
    }
    for (int32_t i = 0; i <= last - first && n_blocks < per_row; i++) {
        ops_dequantizer(k, w->scale_type)(
            to + i * n_blocks, byte_at(w->scale, w->scale_type, at + (int64_t)i * per_row),
            n_blocks, &w->global, INT_MAX);
    }
    for (int32_t j = 1; j < n_w && last > first; j++) {
        scale[j] = to + ((row + j) / w->block_rows - first) * n_blocks;
    }
    return true;
}

void ops_fetch_scales(const hd_weight *w, int32_t row, int32_t col, int32_t n_w, int32_t n,
                      int64_t ahead) {
    if (!w->scale || w->block_rows != 1) return;
    const int64_t from = (int64_t)row * w->cols + (int64_t)n_w * col + ahead;
    const uint8_t *src = byte_at(w->scale, w->scale_type, from / w->block_cols);
    const uint8_t *end = byte_at(src, w->scale_type, (int64_t)n_w * n / w->block_cols);
    for (; src < end; src += HD_CACHE_LINE) __builtin_prefetch(src);
}

/* Returns the columns that n_x rows of x use at once, so that x stays in the cache while the
 * rows of W stream through. It is a multiple of the block size: no checkpoint's blocks are
 * wider than the least. */
static int32_t small_m_cols(const ops_kernels *k, int32_t n_x) {
    const int32_t cols = k->small_m_near / n_x;
    if (cols >= OPS_SMALL_M_COLS) return OPS_SMALL_M_COLS;
    return hd_max_i32(OPS_LEAST_SMALL_M_COLS, cols - cols % OPS_LEAST_SMALL_M_COLS);
}

/* Small-M GEMM of rows [row, row + n_w) of W without a dequantized tile, as far as complete
 * lanes reach. Returns the first column that is left. */
static int32_t small_m(const ops_kernels *k, const ops_product *p, ops_tile *tile, int32_t row,
                       int32_t n_w) {
    const hd_weight *w = p->w;
    const int32_t end = w->cols - w->cols % OPS_LANES;
    const int64_t bits = hd_dtype_bits(w->type), tile_bits = OPS_TILE_ROWS * w->cols * bits;
    const int64_t ahead = tile_bits > 8 * OPS_AHEAD ? tile_bits : 8 * OPS_AHEAD;
    if (!k->small_m[w->type] || p->n_x > k->small_m_rows) return 0;
    const int32_t most = small_m_cols(k, p->n_x);
    for (int32_t c = 0; c < end; c += most) {
        const float *x[OPS_FEW_ROWS];
        ops_small_m_args m = {.acc = tile->acc,
                              .x = x,
                              .n_x = p->n_x,
                              .scaled = w->scale != NULL,
                              .block = w->scale ? w->block_cols : INT_MAX,
                              .n = hd_min_i32(most, end - c),
                              .ahead = (ahead + 3 * c * bits) / 8};
        for (int32_t i = 0; i < p->n_x; i++) x[i] = p->x[i] + c;
        for (int32_t j = 0; j < OPS_TILE_ROWS; j++) {
            const int32_t r = row + (j < n_w ? j : 0); /* spare sums: row 0 */
            m.src[j] = byte_at(w->data, w->type, (int64_t)r * w->cols + c);
        }
        if (!decode_scales(k, tile->w, m.scale, w, row, n_w, c, m.n)) return c;
        ops_fetch_scales(w, row, c, n_w, m.n, ahead / bits);
        if (!k->small_m[w->type](&m)) return c;
    }
    return end;
}

/* Prefetches the next tile of n columns of this row, or of the row n_w rows further on. */
static void fetch_next(const hd_weight *w, int32_t row, int32_t n_w, int32_t c, int32_t n) {
    const int64_t from =
        c + n < w->cols ? (int64_t)row * w->cols + c + n : (int64_t)(row + n_w) * w->cols;
    const uint8_t *src = byte_at(w->data, w->type, from), *end = byte_at(src, w->type, n);
    for (; src < end; src += HD_CACHE_LINE) __builtin_prefetch(src);
}

/* Dequantizes n columns from c on of rows [row, row + n_w); spare rows are the first again. */
static void decode_tile(const ops_kernels *k, const float *w[OPS_WIDE_ROWS],
                        const hd_weight *from, ops_tile *tile, int32_t row, int32_t n_w,
                        int32_t c, int32_t n) {
    for (int32_t j = 0; j < OPS_WIDE_ROWS; j++) {
        float *to = tile->w + (j < n_w ? j : 0) * OPS_TILE_STRIDE;
        if (j < n_w) {
            fetch_next(from, row + j, n_w, c, n);
            ops_dequantize(k, to, from, row + j, c, n);
        }
        w[j] = to;
    }
}

/* Large-M GEMM of columns from c on, through a dequantized tile. If few rows of x use it at
 * a time, they are still in the cache for its second half. */
static void multiply_tile(const ops_kernels *k, const ops_product *p, ops_tile *tile,
                          int32_t row, int32_t n_w, int32_t c) {
    const int32_t n = hd_min_i32(OPS_TILE_COLS, p->w->cols - c);
    const float *w[OPS_WIDE_ROWS];
    decode_tile(k, w, p->w, tile, row, n_w, c, n);
    for (int32_t i = 0; i < p->n_x; i += k->near_rows) {
        const int32_t n_x = hd_min_i32(k->near_rows, p->n_x - i);
        for (int32_t j = 0; j < n_w; j += OPS_TILE_ROWS) {
            float *acc = tile->acc + (j * OPS_X_ROWS + i * OPS_TILE_ROWS) * OPS_LANES;
            k->dots(acc, p->x + i, n_x, c, w + j, n);
        }
    }
}

/* Whether a GEMM of many rows keeps its sums in registers until they are reduced: columns are one tile. */
static bool is_narrow(const ops_kernels *k, const hd_weight *w) {
    return k->score && w->cols <= OPS_TILE_COLS;
}

/* Such a GEMM. */
static void multiply_narrow(const ops_kernels *k, const ops_product *p, ops_tile *tile) {
    for (int32_t o = 0; o < p->n_rows; o += OPS_WIDE_ROWS) {
        const int32_t n_w = hd_min_i32(OPS_WIDE_ROWS, p->n_rows - o), cols = p->w->cols;
        const float *w[OPS_WIDE_ROWS];
        decode_tile(k, w, p->w, tile, p->first_row + o, n_w, 0, cols);
        for (int32_t i = 0; i < p->n_x; i += k->near_rows) {
            for (int32_t j = 0; j < n_w; j += OPS_TILE_ROWS) {
                k->score(&(ops_scores){.out = p->out + i * p->out_stride + o + j,
                                       .q = p->x + i,
                                       .key = w + j,
                                       .out_stride = p->out_stride,
                                       .n_q = hd_min_i32(k->near_rows, p->n_x - i),
                                       .n_keys = hd_min_i32(OPS_TILE_ROWS, n_w - j),
                                       .cols = cols});
            }
        }
    }
}

void ops_multiply(const ops_kernels *k, const ops_product *p, ops_tile *tile) {
    if (p->n_x > k->small_m_rows && is_narrow(k, p->w)) {
        multiply_narrow(k, p, tile);
        return;
    }
    const int32_t wide = p->n_x > k->small_m_rows ? OPS_WIDE_ROWS : OPS_TILE_ROWS;
    const int32_t sums = OPS_TILE_ROWS * OPS_LANES; /* sums of a row of x */
    for (int32_t o = 0; o < p->n_rows; o += wide) {
        const int32_t n_w = hd_min_i32(wide, p->n_rows - o);
        for (int32_t j = 0; j < n_w; j += OPS_TILE_ROWS) {
            memset(tile->acc + j * OPS_X_ROWS * OPS_LANES, 0,
                   (size_t)(p->n_x * sums) * sizeof tile->acc[0]);
        }
        for (int32_t c = small_m(k, p, tile, p->first_row + o, n_w); c < p->w->cols;
             c += OPS_TILE_COLS) {
            multiply_tile(k, p, tile, p->first_row + o, n_w, c);
        }
        for (int32_t j = 0; j < n_w; j += OPS_TILE_ROWS) {
            k->reduce(p->out + o + j, p->out_stride, tile->acc + j * OPS_X_ROWS * OPS_LANES,
                      p->n_x, hd_min_i32(OPS_TILE_ROWS, n_w - j));
        }
    }
}

/* The division of the GEMM of n_x rows and n_rows of w into tasks. */
typedef struct grid {
    int32_t x_rows;   /* rows of x in a task */
    int32_t w_rows;   /* rows of W in a task */
    int32_t w_chunks; /* tasks along W */
    int32_t x_blocks; /* tasks along x */
    /* order of the tasks: what neighbouring tasks share stays in the cache */
    bool x_first;
} grid;

static int32_t chunk_of(const grid *g, int32_t task) {
    return g->x_first ? task / g->x_blocks : task % g->w_chunks;
}

/* Returns the first row of x of a task. */
static int32_t first_of(const grid *g, int32_t task) {
    return g->x_rows * (g->x_first ? task % g->x_blocks : task / g->w_chunks);
}

static int64_t task_rows(int32_t n_x, int32_t cols) {
    const int32_t block = hd_min_i32(n_x, OPS_X_ROWS);
    int64_t rows = TASK_STEPS / ((int64_t)hd_max_i32(block, 1) * hd_max_i32(cols, 1));
    rows = rows > MAX_TASK_ROWS ? MAX_TASK_ROWS : rows - rows % OPS_TILE_ROWS;
    return rows < OPS_TILE_ROWS ? OPS_TILE_ROWS : rows;
}

static int64_t fast_task_rows(const hd_stream *s, int64_t all_rows) {
    const int64_t rows = all_rows / (FAST_TASKS * (int64_t)hd_stream_workers(s));
    if (rows > MAX_FAST_ROWS) return MAX_FAST_ROWS;
    return rows < FAST_ROWS ? FAST_ROWS : rows - rows % FAST_ROWS;
}

/* Returns at most `most` rows, but the same number in all tasks of a matrix. */
static int64_t even_rows(int64_t rows, int64_t most) {
    const int64_t each = hd_ceil_div(rows, hd_ceil_div(rows, most));
    return hd_ceil_div(each, FAST_ROWS) * FAST_ROWS;
}

/* GEMMs whose sums stay in registers may have more rows of x in a task, if many tasks are left: they
 * dequantize W as many times fewer. */
static void enlarge_tasks(grid *g, const hd_stream *s, int32_t n_x, int32_t times) {
    const int64_t tasks = NARROW_TASKS * (int64_t)hd_stream_workers(s);
    while (g->x_rows * 2 <= FAST_X_ROWS &&
           (int64_t)g->w_chunks * g->x_blocks * times / 2 >= tasks) {
        g->x_rows *= 2;
        g->x_blocks = (int32_t)hd_ceil_div(n_x, g->x_rows);
    }
}

/* `times`: number of such GEMMs that share the threads. */
static grid cut(const hd_stream *s, const ops_kernels *k, const hd_weight *w, int32_t n_x,
                int32_t n_rows, int32_t times) {
    const bool fast = ops_fast_takes(k, w);
    const int32_t x_rows = fast ? ops_fast_x_rows(w) : OPS_X_ROWS;
    const int64_t x_blocks = hd_ceil_div(n_x, x_rows);
    const int64_t rows = fast ? even_rows(n_rows, fast_task_rows(s, n_rows * x_blocks * times))
                              : task_rows(n_x, w->cols);
    grid g = {.x_rows = x_rows,
              .w_rows = (int32_t)rows,
              .w_chunks = (int32_t)hd_ceil_div(n_rows, rows),
              .x_blocks = (int32_t)x_blocks,
              .x_first = fast};
    if (!fast && is_narrow(k, w)) enlarge_tasks(&g, s, n_x, times);
    return g;
}

static ops_tile *tile_of(hd_stream *s, int32_t worker) {
    return hd_stream_scratch(s, worker, sizeof(ops_tile));
}

static void multiply(hd_stream *s, int32_t worker, const ops_kernels *k, const ops_product *p) {
    if (ops_fast_takes(k, p->w)) {
        ops_multiply_fast(k, p, hd_stream_scratch(s, worker, sizeof(fast_space)));
    } else {
        ops_multiply(k, p, tile_of(s, worker));
    }
}

typedef struct linear_job {
    hd_stream *stream;
    const ops_kernels *k;
    const hd_linear_args *a;
    grid g;
    _Atomic int32_t *next_row; /* next row of W for a worker to take */
} linear_job;

/* Describes rows of W and of x as a product. */
static ops_product linear_product(const hd_linear_args *a, int32_t o, int32_t n_rows,
                                  int32_t first, int32_t n_x) {
    const int64_t out_stride = stride_of(a->out, a->w->rows);
    ops_product p = {.out = act(a->out) + first * out_stride + o,
                     .out_stride = out_stride,
                     .n_x = n_x,
                     .first_row = o,
                     .n_rows = n_rows,
                     .w = a->w};
    for (int32_t i = 0; i < p.n_x; i++) {
        p.x[i] = act_in(a->x) + (first + i) * stride_of(a->x, a->w->cols);
    }
    return p;
}

static void linear_task(const void *arg, int32_t task, int32_t worker) {
    const linear_job *job = arg;
    const hd_linear_args *a = job->a;
    const int32_t o = chunk_of(&job->g, task) * job->g.w_rows;
    const int32_t first = first_of(&job->g, task);
    const ops_product p = linear_product(a, o, hd_min_i32(job->g.w_rows, a->w->rows - o), first,
                                         hd_min_i32(job->g.x_rows, a->rows - first));
    multiply(job->stream, worker, job->k, &p);
}

/* Takes rows of W for a worker, fewer towards the end: 0 if none are left. */
static int32_t take_rows(const linear_job *job, int32_t *first) {
    const int32_t pieces = 2 * hd_stream_workers(job->stream);
    int32_t n, o = atomic_load_explicit(job->next_row, memory_order_relaxed);
    do {
        const int32_t left = job->a->w->rows - o, fair = left / pieces;
        n = hd_min_i32(left, hd_max_i32(LEAST_FAST_ROWS, fair - fair % FAST_ROWS));
    } while (n > 0 && !atomic_compare_exchange_weak_explicit(job->next_row, &o, o + n,
                                                             memory_order_relaxed,
                                                             memory_order_relaxed));
    *first = o;
    return n;
}

/* Rounds all rows of x once, then multiplies rows of W until none are left. */
static void linear_share(const void *arg, int32_t task, int32_t worker) {
    const linear_job *job = arg;
    (void)task;
    bool again = false;
    for (int32_t o, n; (n = take_rows(job, &o)) > 0; again = true) {
        ops_product p = linear_product(job->a, o, n, 0, job->a->rows);
        p.same_x = again;
        multiply(job->stream, worker, job->k, &p);
    }
}

void ops_linear_cpu(hd_stream *s, const hd_linear_args *a, const ops_kernels *k) {
    _Atomic int32_t next_row = 0;
    linear_job job = {s, k, a, cut(s, k, a->w, a->rows, a->w->rows, 1), &next_row};
    if (ops_fast_takes(k, a->w) && job.g.x_blocks == 1) {
        hd_stream_tasks(s, hd_stream_workers(s), linear_share, &job);
    } else {
        hd_stream_tasks(s, job.g.w_chunks * job.g.x_blocks, linear_task, &job);
    }
}

/* ---- linear_heads: one matrix per head ---- */

typedef struct heads_job {
    hd_stream *stream;
    const ops_kernels *k;
    const hd_linear_heads_args *a;
    grid g; /* grid of one head; chunks along columns if transposed */
} heads_job;

/* The part of a head that one task computes. */
typedef struct heads_task {
    int32_t head, chunk, first, n_x;
    const float *x; /* row `first` of this head */
    float *out;
    int64_t x_row, out_row; /* elements between rows */
} heads_task;

static heads_task locate(const heads_job *job, int32_t task) {
    const hd_linear_heads_args *a = job->a;
    const int32_t per_head = job->g.w_chunks * job->g.x_blocks;
    heads_task t = {.head = task / per_head,
                    .chunk = chunk_of(&job->g, task % per_head),
                    .first = first_of(&job->g, task % per_head)};
    t.n_x = hd_min_i32(job->g.x_rows, a->rows - t.first);
    t.x_row = stride_of(a->x, (int64_t)a->heads * a->x_head);
    t.out_row = stride_of(a->out, (int64_t)a->heads * a->out_head);
    t.x = act_in(a->x) + t.first * t.x_row + (int64_t)t.head * a->x_head;
    t.out = act(a->out) + t.first * t.out_row + (int64_t)t.head * a->out_head;
    return t;
}

static void heads_plain_task(const void *arg, int32_t task, int32_t worker) {
    const heads_job *job = arg;
    const hd_linear_heads_args *a = job->a;
    const heads_task t = locate(job, task);
    const int32_t o = t.chunk * job->g.w_rows;
    ops_product p = {.out = t.out + o,
                     .out_stride = t.out_row,
                     .n_x = t.n_x,
                     .first_row = a->first_row + t.head * a->head_rows + o,
                     .n_rows = hd_min_i32(job->g.w_rows, a->n_rows - o),
                     .w = a->w};
    for (int32_t i = 0; i < p.n_x; i++) p.x[i] = t.x + i * t.x_row;
    multiply(job->stream, worker, job->k, &p);
}

/* Dequantizes n rows of W from `row` on, columns [col, col + cols), as rows of the tile.
 * Rows of a block share their scales. The following rows are prefetched one at a time, as
 * much at once would stall. */
static void decode_rows(const ops_kernels *k, ops_tile *tile, const hd_weight *w, int32_t row,
                        int32_t n, int32_t col, int32_t cols) {
    float scale[OPS_TILE_COLS / OPS_LANES + 1];
    const float *of_row[OPS_TILE_ROWS]; /* all of them point to `scale` */
    const int32_t per_scale = w->scale ? w->block_rows : INT_MAX;
    const int64_t bytes = (int64_t)cols * hd_dtype_bits(w->type) / 8;
    bool known = false;
    for (int32_t j = 0; j < n; j++) {
        const int64_t at = (int64_t)(row + j) * w->cols + col;
        const uint8_t *src = byte_at(w->data, w->type, at);
        const uint8_t *next = byte_at(w->data, w->type, at + (int64_t)OPS_MIX_ROWS * w->cols);
        for (int64_t b = 0; b < bytes; b += HD_CACHE_LINE) __builtin_prefetch(next + b);
        if (j == 0 || (row + j) % per_scale == 0) {
            known = decode_scales(k, scale, of_row, w, row + j, 1, col, cols);
        }
        float *to = tile->w + j * OPS_TILE_STRIDE;
        if (known) {
            ops_dequantizer(k, w->type)(to, src, cols, scale,
                                        w->scale ? w->block_cols : INT_MAX);
        } else {
            ops_dequantize(k, to, w, row + j, col, cols);
        }
    }
}

/* out = sum over rows i of W of x[i] * W[i, :], a range of columns at a time */
static void heads_transposed_task(const void *arg, int32_t task, int32_t worker) {
    const heads_job *job = arg;
    const hd_linear_heads_args *a = job->a;
    const heads_task t = locate(job, task);
    const int32_t col = t.chunk * OPS_TILE_COLS;
    const int32_t cols = hd_min_i32(OPS_TILE_COLS, a->w->cols - col);
    ops_tile *tile = tile_of(job->stream, worker);
    for (int32_t r = 0; r < t.n_x; r++) {
        memset(t.out + r * t.out_row + col, 0, (size_t)cols * sizeof *t.out);
    }
    for (int32_t i = 0; i < a->n_rows; i += OPS_MIX_ROWS) {
        const int32_t n = hd_min_i32(OPS_MIX_ROWS, a->n_rows - i);
        const float *row[OPS_MIX_ROWS];
        decode_rows(job->k, tile, a->w, a->first_row + t.head * a->head_rows + i, n, col, cols);
        for (int32_t j = 0; j < n; j++) row[j] = tile->w + j * OPS_TILE_STRIDE;
        job->k->mix(&(ops_mix){.out = t.out + col,
                               .coef = t.x + i,
                               .row = row,
                               .out_stride = t.out_row,
                               .coef_stride = t.x_row,
                               .n_out = t.n_x,
                               .n_rows = n,
                               .cols = cols});
    }
}

/* The more rows of x a task has, the fewer times rows of W are dequantized. */
static void cut_transposed(grid *g, const hd_stream *s, const hd_linear_heads_args *a) {
    const int64_t chunks = hd_ceil_div(a->w->cols, OPS_TILE_COLS);
    const int64_t tasks = TRANSPOSED_TASKS * (int64_t)hd_stream_workers(s);
    const int64_t fair = a->rows * chunks * a->heads / tasks / OPS_X_ROWS * OPS_X_ROWS;
    g->w_chunks = (int32_t)chunks;
    g->x_rows = (int32_t)(fair < OPS_X_ROWS        ? OPS_X_ROWS
                          : fair > TRANSPOSED_ROWS ? TRANSPOSED_ROWS
                                                   : fair);
    g->x_blocks = (int32_t)hd_ceil_div(a->rows, g->x_rows);
}

void ops_linear_heads_cpu(hd_stream *s, const hd_linear_heads_args *a, const ops_kernels *k) {
    heads_job job = {s, k, a, cut(s, k, a->w, a->rows, a->n_rows, a->heads)};
    if (a->transpose) cut_transposed(&job.g, s, a);
    hd_stream_tasks(s, a->heads * job.g.w_chunks * job.g.x_blocks,
                    a->transpose ? heads_transposed_task : heads_plain_task, &job);
}

/* ---- grouped GEMM: one matrix per expert ---- */

typedef struct grouped_job {
    hd_stream *stream;
    const ops_kernels *k;
    const hd_grouped_gemm_args *a;
    grid g; /* grid of an expert; it may have further blocks of x */
} grouped_job;

static int32_t blocks_of(const hd_grouped_gemm_args *a, int32_t x_rows, int32_t expert) {
    return (int32_t)hd_ceil_div(a->offset[expert + 1] - a->offset[expert], x_rows);
}

static void grouped_task(const void *arg, int32_t task, int32_t worker) {
    const grouped_job *job = arg;
    const grid *g = &job->g;
    const hd_grouped_gemm_args *a = job->a;
    int32_t expert = 0, block = task / g->w_chunks;
    while (block >= blocks_of(a, g->x_rows, expert)) block -= blocks_of(a, g->x_rows, expert++);
    const hd_weight *w = &a->w->slots[expert];
    const int32_t o = task % g->w_chunks * g->w_rows;
    const int32_t first = a->offset[expert] + block * g->x_rows;
    ops_product p = {.out = act(a->out) + (int64_t)first * w->rows + o,
                     .out_stride = w->rows,
                     .n_x = hd_min_i32(g->x_rows, a->offset[expert + 1] - first),
                     .first_row = o,
                     .n_rows = hd_min_i32(g->w_rows, w->rows - o),
                     .w = w};
    for (int32_t i = 0; i < p.n_x; i++) {
        const int32_t place = first + i;
        const int32_t row = a->assignment ? a->assignment[place] / a->top_k : place;
        p.x[i] = act_in(a->x) + (int64_t)row * w->cols;
    }
    multiply(job->stream, worker, job->k, &p);
}

void ops_grouped_gemm_cpu(hd_stream *s, const hd_grouped_gemm_args *a, const ops_kernels *k) {
    const int32_t n_slots = a->w->n;
    if (n_slots == 0) return;
    int32_t used = 0, n_blocks = 0;
    for (int32_t e = 0; e < n_slots; e++) used += a->offset[e + 1] > a->offset[e];
    const int32_t typical = hd_max_i32(1, a->n_places / n_slots);
    const hd_weight *shape = &a->w->shape;
    grouped_job job = {s, k, a, cut(s, k, shape, typical, shape->rows, used)};
    for (int32_t e = 0; e < n_slots; e++) n_blocks += blocks_of(a, job.g.x_rows, e);
    hd_stream_tasks(s, n_blocks * job.g.w_chunks, grouped_task, &job);
}
