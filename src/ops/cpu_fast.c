/* cpu_fast.c - cuts a product into what the kernels of --precision fast take: columns that lie
 * close by, rows of x as whole numbers once for all rows of W, and FAST_ROWS rows of W with
 * their scales. */
#include "base/checked.h"
#include "ops/cpu_internal.h"

enum { X_BYTES = 256 * 1024, MOST_BLOCKS = X_BYTES / FAST_BLOCK };

/* Scratch of one worker. */
struct fast_space {
    uint8_t panel[FAST_ROWS * FAST_COLS];
    float scales[FAST_GROUPS * FAST_ROWS], scale_row[FAST_GROUPS];
    int8_t code[X_BYTES];
    float x_scale[MOST_BLOCKS];
    int32_t bias[MOST_BLOCKS * 2];
};
_Static_assert(sizeof(fast_space) <= OPS_STATE_BYTES, "it is a worker's scratch");

bool ops_fast_takes(const ops_kernels *k, const hd_weight *w) {
    if (!k->fast) return false;
    if (w->type == HD_E4M3) return !w->scale || w->block_cols == FAST_STEP;
    return w->type == HD_E2M1 && w->scale && (w->block_cols == 16 || w->block_cols == 32);
}

fast_space *ops_fast_space(hd_stream *s, int32_t worker) {
    return hd_stream_scratch(s, worker, sizeof(fast_space));
}

/* Rows [o, o + FAST_ROWS) of the product, columns [c, end), with x from column c on. */
static void multiply_rows(const ops_kernels *k, const ops_product *p, const fast_x *x,
                          fast_space *t, int32_t o, int32_t c, int32_t end) {
    const hd_weight *w = p->w;
    const int64_t bits = hd_dtype_bits(w->type), tile_bits = FAST_ROWS * w->cols * bits;
    const int64_t ahead = tile_bits > 8 * OPS_AHEAD ? tile_bits : 8 * OPS_AHEAD;
    fast_product f = {.out = p->out + o,
                      .out_stride = p->out_stride,
                      .x = x,
                      .n_x = p->n_x,
                      .w = w,
                      .row = p->first_row + o,
                      .n_w = hd_min_i32(FAST_ROWS, p->n_rows - o),
                      .group = w->scale ? w->block_cols : FAST_STEP,
                      .read_scales = k->decode[w->scale_type],
                      .panel = t->panel,
                      .scales = t->scales,
                      .scale_row = t->scale_row};
    for (f.col = c; f.col < end; f.col += f.n) {
        f.more = f.col > 0;
        f.x_col = f.col - c;
        f.n = hd_min_i32(FAST_COLS, end - f.col);
        f.ahead = (ahead + (FAST_ROWS - 1) * f.col * bits) / 8;
        ops_fetch_scales(w, f.row, f.col, FAST_ROWS, f.n, ahead / bits);
        k->fast->multiply(&f);
    }
}

void ops_multiply_fast(const ops_kernels *k, const ops_product *p, fast_space *t) {
    const int32_t cols = p->w->cols, side = p->n_x == 1 ? 1 : FAST_SIDE;
    const int32_t group = p->w->scale ? p->w->block_cols : FAST_STEP;
    const int32_t padded_x = (int32_t)hd_ceil_div(p->n_x, side) * side;
    const int32_t wide = X_BYTES / padded_x - X_BYTES / padded_x % FAST_STEP;
    for (int32_t c = 0; c < cols; c += wide) {
        const int32_t n = hd_min_i32(wide, cols - c);
        const fast_x x = {.code = t->code,
                          .scale = t->x_scale,
                          .bias = t->bias,
                          .blocks =
                              (int32_t)hd_ceil_div(n, FAST_STEP) * (FAST_STEP / FAST_BLOCK),
                          .side = side};
        const bool there = p->same_x && n == cols; /* or the last columns are */
        for (int32_t i = 0; i < p->n_x && !there; i++) {
            k->fast->quantize(&x, i, p->x[i] + c, n, group);
        }
        for (int32_t o = 0; o < p->n_rows; o += FAST_ROWS) {
            multiply_rows(k, p, &x, t, o, c, c + n);
        }
    }
}
