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
    FAST_COLS = 2048,       /* columns of x at hand, of one row */
    FAST_WIDE_COLS = 1024,  /* and of several */
    FAST_SIDE = 8,          /* rows of x that lie side by side */
    FAST_MOST_X = 64,       /* rows of x at hand */
    FAST_E4M3_OFFSET = 128, /* what makes numbers from FP8 and FP4 unsigned */
    FAST_E2M1_OFFSET = 12,
    FAST_GROUPS = FAST_COLS / 16 /* most scales of a row of W at once */
};

/* FP8 elements of a group become multiples of 2^(e - 13), where e is the exponent field of the
 * largest one (at least 1): element code m is fast_e4m3[m + 8 * (15 - e)], or, of codes below 8
 * where e is below 8, fast_e4m3_least[e][m]. */
extern const uint8_t fast_e4m3[256];
extern const uint8_t fast_e4m3_least[8][8];

/* Rows of x. Block b of row r has the number ((r / side) * blocks + b) * side + r % side; how its
 * numbers lie within is the instruction set's affair. */
typedef struct fast_x {
    int8_t *code;  /* [blocks, FAST_BLOCK] */
    float *scale;  /* [blocks]; NaN where x is not finite */
    int32_t *bias; /* [blocks, 2] of each half: what W's offset adds to a sum, negated */
    int32_t blocks, side;
} fast_x;

/* Rows of x, from column 0 of fast_x, times up to FAST_ROWS rows of W. */
typedef struct fast_product {
    float *out; /* [n_x, n_w] */
    int64_t out_stride;
    bool more; /* add to out */
    const fast_x *x;
    int32_t n_x, n_w, n;           /* n: columns, even */
    const uint8_t *src[FAST_ROWS]; /* spare ones repeat the first */
    const float *scale;            /* [FAST_ROWS, FAST_GROUPS]; spare ones too */
    hd_dtype type;                 /* E4M3 or E2M1 */
    int32_t group;                 /* columns of a scale: 128 of E4M3, 16 or 32 of E2M1 */
    int64_t ahead;                 /* bytes from src[0] to what will be wanted next */
    uint8_t *panel;                /* [FAST_ROWS * FAST_WIDE_COLS] and */
    float *scales;                 /* [FAST_GROUPS * FAST_ROWS] of space, aligned to 64 */
} fast_product;

typedef struct fast_kernels {
    /* n floats, then zeros, as row `row` of x, for a matrix of this type. */
    void (*quantize)(const fast_x *x, int32_t row, const float *from, int32_t n, hd_dtype type);
    void (*multiply)(const fast_product *p);
} fast_kernels;

extern const fast_kernels fast_plain, fast_avx2, fast_vnni;

/* Adding and taking away this rounds to a whole number, ties to even. */
#define FAST_ROUND 0x1.8p23f

/* A block whose largest element is smaller counts as zero, and one with this or more as not
 * finite; as bits of a float. */
enum { FAST_TINY = 0x0d800000 /* 2^-100 */, FAST_HUGE = 0x7f800000 };

#endif
