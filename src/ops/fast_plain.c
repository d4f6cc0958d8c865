/* fast_plain.c - products in whole numbers in portable C, and the table of FP8 that all share. */
#include "ops/fast_loops_internal.h"

/* (8 + m) 2^(k - 12) for m < 8, rounded to even, and the offset. */
#define NORMAL_7  128, 128, 128, 128, 128, 128, 128, 128 /* and all below */
#define NORMAL_8  128, 129, 129, 129, 129, 129, 129, 129
#define NORMAL_9  129, 129, 129, 129, 130, 130, 130, 130
#define NORMAL_10 130, 130, 130, 131, 131, 131, 132, 132
#define NORMAL_11 132, 132, 133, 134, 134, 134, 135, 136
#define NORMAL_12 136, 137, 138, 139, 140, 141, 142, 143
#define NORMAL_13 144, 146, 148, 150, 152, 154, 156, 158
#define NORMAL_14 160, 164, 168, 172, 176, 180, 184, 188
#define NORMAL_15 192, 200, 208, 216, 224, 232, 240, 248

/* m 2^(4 - e): subnormal numbers. */
#define LEAST_1 128, 136, 144, 152, 160, 168, 176, 184
#define LEAST_2 128, 132, 136, 140, 144, 148, 152, 156
#define LEAST_3 128, 130, 132, 134, 136, 138, 140, 142
#define LEAST_4 128, 129, 130, 131, 132, 133, 134, 135
#define LEAST_5 128, 128, 129, 130, 130, 130, 131, 132
#define LEAST_6 128, 128, 128, 129, 129, 129, 130, 130
#define LEAST_7 128, 128, 128, 128, 128, 129, 129, 129

/* Codes beyond the largest exponent are not asked for. */
/* clang-format off */
_Alignas(64) const uint8_t fast_e4m3[16][128] = {
    {0},
    {LEAST_1, NORMAL_15},
    {LEAST_2, NORMAL_14, NORMAL_15},
    {LEAST_3, NORMAL_13, NORMAL_14, NORMAL_15},
    {LEAST_4, NORMAL_12, NORMAL_13, NORMAL_14, NORMAL_15},
    {LEAST_5, NORMAL_11, NORMAL_12, NORMAL_13, NORMAL_14, NORMAL_15},
    {LEAST_6, NORMAL_10, NORMAL_11, NORMAL_12, NORMAL_13, NORMAL_14, NORMAL_15},
    {LEAST_7, NORMAL_9, NORMAL_10, NORMAL_11, NORMAL_12, NORMAL_13, NORMAL_14, NORMAL_15},
    {NORMAL_7, NORMAL_8, NORMAL_9, NORMAL_10, NORMAL_11, NORMAL_12, NORMAL_13, NORMAL_14,
     NORMAL_15},
    {NORMAL_7, NORMAL_7, NORMAL_8, NORMAL_9, NORMAL_10, NORMAL_11, NORMAL_12, NORMAL_13,
     NORMAL_14, NORMAL_15},
    {NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_8, NORMAL_9, NORMAL_10, NORMAL_11, NORMAL_12,
     NORMAL_13, NORMAL_14, NORMAL_15},
    {NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_8, NORMAL_9, NORMAL_10, NORMAL_11,
     NORMAL_12, NORMAL_13, NORMAL_14, NORMAL_15},
    {NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_8, NORMAL_9, NORMAL_10,
     NORMAL_11, NORMAL_12, NORMAL_13, NORMAL_14, NORMAL_15},
    {NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_8, NORMAL_9,
     NORMAL_10, NORMAL_11, NORMAL_12, NORMAL_13, NORMAL_14, NORMAL_15},
    {NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_8,
     NORMAL_9, NORMAL_10, NORMAL_11, NORMAL_12, NORMAL_13, NORMAL_14, NORMAL_15},
    {NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_7, NORMAL_7,
     NORMAL_8, NORMAL_9, NORMAL_10, NORMAL_11, NORMAL_12, NORMAL_13, NORMAL_14, NORMAL_15},
};
/* clang-format on */

static void multiply(const fast_product *p) {
    static const fast_loops loops = {read_e2m1_numbers, read_e4m3_numbers, largest_code, dots};
    multiply_rows(p, &loops);
}

const fast_kernels fast_plain = {.quantize = quantize_row, .multiply = multiply};
