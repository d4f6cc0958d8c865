/* cpu_fast.c - cuts a product into what the kernels of --precision fast take: columns that lie
 * close by, rows of x as whole numbers once for all rows of W, and FAST_ROWS rows of W with
 * their scales. */
#include "base/checked.h"
#include "ops/cpu_internal.h"

_Static_assert((int)FAST_MOST_X == (int)OPS_X_ROWS, "a product's rows of x are cut at once");

/* Scratch of one worker. */
struct fast_space {
    uint8_t panel[FAST_ROWS * FAST_WIDE_COLS];
    float scales[FAST_GROUPS * FAST_ROWS], scale[FAST_ROWS * FAST_GROUPS];
    int8_t code[FAST_MOST_X * FAST_WIDE_COLS];
    float x_scale[FAST_MOST_X * FAST_WIDE_COLS / FAST_BLOCK];
    int32_t bias[FAST_MOST_X * FAST_WIDE_COLS / FAST_BLOCK * 2];
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

static const uint8_t *byte_at(const void *array, hd_dtype type, int64_t element) {
    return (const uint8_t *)array + element * hd_dtype_bits(type) / 8;
}

/* The groups' scales of columns [c, c + n) of a row, then zeros up to a whole step. FP4 is read
 * doubled, so half of each. */
static void read_scales(const ops_kernels *k, float *out, const hd_weight *w, int32_t row,
                        int32_t c, int32_t n, int32_t group) {
    const int32_t groups = (int32_t)hd_ceil_div(n, group);
    const int32_t padded = (int32_t)hd_ceil_div(n, FAST_STEP) * FAST_STEP / group;
    const float by = w->type == HD_E2M1 ? 0.5f * w->global : w->global;
    for (int32_t g = groups; g < padded; g++) out[g] = 0.0f;
    if (!w->scale) {
        for (int32_t g = 0; g < groups; g++) out[g] = 1.0f;
        return;
    }
    const int64_t per_row = hd_ceil_div(w->cols, w->block_cols);
    const int64_t first = (int64_t)(row / w->block_rows) * per_row + c / w->block_cols;
    k->decode[w->scale_type](out, byte_at(w->scale, w->scale_type, first), groups, &by,
                             INT32_MAX);
}

/* Rows [o, o + FAST_ROWS) of the product, columns from c on. */
static void multiply_rows(const ops_kernels *k, const ops_product *p, const fast_x *x,
                          fast_space *t, int32_t o, int32_t c) {
    const hd_weight *w = p->w;
    const int64_t bits = hd_dtype_bits(w->type), tile_bits = FAST_ROWS * w->cols * bits;
    const int64_t ahead = tile_bits > 8 * OPS_AHEAD ? tile_bits : 8 * OPS_AHEAD;
    const int32_t wide = x->side == 1 ? FAST_COLS : FAST_WIDE_COLS;
    fast_product f = {.out = p->out + o,
                      .out_stride = p->out_stride,
                      .more = c > 0,
                      .x = x,
                      .n_x = p->n_x,
                      .n_w = hd_min_i32(FAST_ROWS, p->n_rows - o),
                      .n = hd_min_i32(wide, w->cols - c),
                      .scale = t->scale,
                      .type = w->type,
                      .group = w->scale ? w->block_cols : FAST_STEP,
                      .ahead = (ahead + (FAST_ROWS - 1) * c * bits) / 8,
                      .panel = t->panel,
                      .scales = t->scales};
    for (int32_t j = 0; j < FAST_ROWS; j++) {
        const int32_t row = p->first_row + o + (j < f.n_w ? j : 0);
        f.src[j] = byte_at(w->data, w->type, (int64_t)row * w->cols + c);
        read_scales(k, t->scale + j * FAST_GROUPS, w, row, c, f.n, f.group);
    }
    k->fast->multiply(&f);
}

void ops_multiply_fast(const ops_kernels *k, const ops_product *p, fast_space *t) {
    const int32_t side = p->n_x == 1 ? 1 : FAST_SIDE;
    const int32_t wide = side == 1 ? FAST_COLS : FAST_WIDE_COLS;
    for (int32_t c = 0; c < p->w->cols; c += wide) {
        const int32_t n = hd_min_i32(wide, p->w->cols - c);
        const fast_x x = {.code = t->code,
                          .scale = t->x_scale,
                          .bias = t->bias,
                          .blocks =
                              (int32_t)hd_ceil_div(n, FAST_STEP) * (FAST_STEP / FAST_BLOCK),
                          .side = side};
        for (int32_t i = 0; i < p->n_x; i++) {
            k->fast->quantize(&x, i, p->x[i] + c, n, p->w->type);
        }
        for (int32_t o = 0; o < p->n_rows; o += FAST_ROWS) multiply_rows(k, p, &x, t, o, c);
    }
}
