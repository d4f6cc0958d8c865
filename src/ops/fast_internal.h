/* fast_internal.h - matrix products in whole numbers: --precision fast. docs/numerics.md says
 * what is rounded and why every instruction set gives the same bits.
 *
 * x becomes 8-bit numbers with a scale per FAST_BLOCK columns, W 8-bit numbers with a scale per
 * group of columns: exactly so where it is FP4, rounded where it is FP8. Products within a
 * block, or a smaller group, are summed as whole numbers, which no order can change; the sums
 * of blocks are scaled and added in order of columns in float32, with every product and every
 * sum rounded apart. */
#ifndef HD_OPS_FAST_INTERNAL_H
#define HD_OPS_FAST_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/format.h"

enum {
    FAST_ROWS = 16,         /* rows of W that are multiplied together */
    FAST_BLOCK = 32,        /* columns of x that share a scale */
    FAST_STEP = 128,        /* columns that a loop takes at once; x is padded with zeros */
    FAST_COLS = 1024,       /* columns that a product takes at most */
    FAST_SIDE = 8,          /* rows of x that lie side by side */
    FAST_E4M3_OFFSET = 128, /* what makes numbers from FP8 and FP4 unsigned */
    FAST_E2M1_OFFSET = 12,
    FAST_GROUPS = FAST_COLS / 16 /* most scales of a row of W at once */
};

/* FP8 elements of a group become multiples of 2^(e - 13), where e is the exponent field of the
 * largest one, at least 1: what the code without its sign is then, and FAST_E4M3_OFFSET. */
extern const uint8_t fast_e4m3[16][128];

/* Rows of x. Block b of row r has the number ((r / side) * blocks + b) * side + r % side; how its
 * numbers lie within is the instruction set's affair. */
typedef struct fast_x {
    int8_t *code;  /* [blocks, FAST_BLOCK] */
    float *scale;  /* [blocks]; NaN where x is not finite */
    int32_t *bias; /* [blocks, 2]: what W's offset adds to a sum, negated: of the whole block,
                      or of each half where groups are halves */
    int32_t blocks, side;
} fast_x;

/* As ops_decode_fn. */
typedef void fast_decode_fn(float *out, const uint8_t *src, int32_t n, const float *scale,
                            int32_t block);

/* Rows of x times columns [col, col + n) of rows [row, row + n_w) of W. */
typedef struct fast_product {
    float *out; /* [n_x, n_w] */
    int64_t out_stride;
    bool more; /* add to out */
    const fast_x *x;
    int32_t x_col, n_x; /* x's column that meets col */
    const hd_weight *w;
    int32_t row, n_w, col, n;    /* col is a multiple of FAST_STEP, n <= FAST_COLS */
    int32_t group;               /* columns of a scale: 128 of E4M3, 16 or 32 of E2M1 */
    fast_decode_fn *read_scales; /* of their type */
    int64_t ahead;               /* bytes from (row, col) to what will be wanted next */
    uint8_t *panel;              /* [FAST_ROWS * FAST_COLS] and */
    float *scales;               /* [FAST_GROUPS * FAST_ROWS] and */
    float *scale_row;            /* [FAST_GROUPS] of space, aligned to 64 */
} fast_product;

typedef struct fast_kernels {
    /* n floats, then zeros, as row `row` of x, for a matrix whose scales have so many columns. */
    void (*quantize)(const fast_x *x, int32_t row, const float *from, int32_t n, int32_t group);
    void (*multiply)(const fast_product *p);
} fast_kernels;

extern const fast_kernels fast_plain, fast_avx2, fast_vnni;

/* Adding and taking away this rounds to a whole number, ties to even. */
#define FAST_ROUND 0x1.8p23f

/* A block's scale is its largest element times this. */
#define FAST_PART (1.0f / 127.0f)

/* A block whose largest element is smaller counts as zero, and one with this or more as not
 * finite; as bits of a float. */
enum { FAST_TINY = 0x0d800000 /* 2^-100 */, FAST_HUGE = 0x7f800000 };

static inline const uint8_t *fast_bytes(const void *array, hd_dtype type, int64_t element) {
    return (const uint8_t *)array + element * hd_dtype_bits(type) / 8;
}

static inline int64_t fast_row_bytes(const hd_weight *w) {
    return (int64_t)w->cols * hd_dtype_bits(w->type) / 8;
}

/* Row j of the product; rows that are not there repeat the first. */
static inline const uint8_t *fast_row(const fast_product *p, int32_t j) {
    const int64_t row = p->row + (j < p->n_w ? j : 0);
    return fast_bytes(p->w->data, p->w->type, row * p->w->cols + p->col);
}

/* Groups of a row, and of a row filled up to a whole step. */
static inline int32_t fast_groups(const fast_product *p) {
    return (p->n + p->group - 1) / p->group;
}

static inline int32_t fast_padded_groups(const fast_product *p) {
    return (p->n + FAST_STEP - 1) / FAST_STEP * (FAST_STEP / p->group);
}

/* The stored scales of row j. */
static inline const uint8_t *fast_scales(const fast_product *p, int32_t j) {
    const hd_weight *w = p->w;
    const int64_t per_row = (w->cols + w->block_cols - 1) / w->block_cols;
    const int64_t row = (p->row + (j < p->n_w ? j : 0)) / w->block_rows;
    return fast_bytes(w->scale, w->scale_type, row * per_row + p->col / w->block_cols);
}

/* FP4 is read doubled. */
static inline float fast_scale_by(const hd_weight *w) {
    return w->type == HD_E2M1 ? 0.5f * w->global : w->global;
}

/* The scales of row j, then zeros, as [fast_padded_groups]. */
static inline void fast_read_scales(float *out, const fast_product *p, int32_t j) {
    const int32_t groups = fast_groups(p), padded = fast_padded_groups(p);
    const float by = fast_scale_by(p->w);
    for (int32_t g = 0; g < groups; g++) out[g] = 1.0f;
    for (int32_t g = groups; g < padded; g++) out[g] = 0.0f;
    if (p->w->scale) p->read_scales(out, fast_scales(p, j), groups, &by, INT32_MAX);
}

#endif
