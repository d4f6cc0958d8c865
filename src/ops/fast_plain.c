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

static void read_row(int8_t *code, float *scale, const fast_product *p, int32_t j) {
    const uint8_t *src = fast_row(p, j);
    memset(code + p->n, 0, (size_t)(fast_padded_groups(p) * p->group - p->n));
    fast_read_scales(scale, p, j);
    if (p->w->type == HD_E2M1) {
        read_e2m1_numbers(code, src, p->n);
        return;
    }
    for (int32_t g = 0, c = 0; c < p->n; g++, c += p->group) {
        const int32_t n = hd_min_i32(p->group, p->n - c);
        const uint32_t largest = largest_code(src + c, n);
        const uint32_t e = largest < 8 ? 1 : largest >> 3;
        read_e4m3_numbers(code + c, src + c, n, e);
        scale[g] *= largest == 0x7f ? NAN : hd_f32_from_bits((e + 114) << 23);
    }
}

/* ---- products ---- */

/* A step's sums of first halves of blocks, then of second ones. */
static void dots(int32_t sum[8], const int8_t *x, int64_t x_stride, const int8_t *w) {
    for (int32_t b = 0; b < 8; b++) {
        const int8_t *xb = x + b % 4 * x_stride + b / 4 * 16, *wb = w + b % 4 * 32 + b / 4 * 16;
        sum[b] = 0;
        for (int32_t i = 0; i < 16; i++) sum[b] += (int32_t)xb[i] * wb[i];
    }
}

/* The blocks of a step; `scale` is W's, from this step on. */
static float add_step(float sum, const fast_x *x, int32_t at, const int8_t *w,
                      const float *scale, int32_t group) {
    int32_t half[8];
    float part = 0.0f;
    dots(half, x->code + at * FAST_BLOCK, (int64_t)x->side * FAST_BLOCK, w);
    for (int32_t b = 0; b < FAST_STEP / FAST_BLOCK; b++) {
        const float by = x->scale[at + b * x->side];
        if (group == 128) {
            const float product = (float)(half[b] + half[b + 4]) * by;
            part = b ? part + product : product;
        } else if (group == 32) {
            const float product = (float)(half[b] + half[b + 4]) * scale[b];
            sum = sum + product * by;
        } else {
            const float first = (float)half[b] * scale[2 * b];
            const float second = (float)half[b + 4] * scale[2 * b + 1];
            const float product = first + second;
            sum = sum + product * by;
        }
    }
    return group == 128 ? sum + part * scale[0] : sum;
}

static void multiply(const fast_product *p) {
    const int32_t per_step = FAST_STEP / p->group, steps = fast_padded_groups(p) / per_step;
    int8_t *w = (int8_t *)p->panel;
    for (int32_t j = 0; j < p->n_w; j++) {
        read_row(w, p->scales, p, j);
        for (int32_t i = 0; i < p->n_x; i++) {
            const fast_x *x = p->x;
            int32_t at =
                (i / x->side * x->blocks + p->x_col / FAST_BLOCK) * x->side + i % x->side;
            float *out = p->out + i * p->out_stride + j, sum = p->more ? *out : 0.0f;
            for (int32_t s = 0; s < steps; s++, at += FAST_STEP / FAST_BLOCK * x->side) {
                sum =
                    add_step(sum, x, at, w + s * FAST_STEP, p->scales + s * per_step, p->group);
            }
            *out = sum;
        }
    }
}

const fast_kernels fast_plain = {.quantize = quantize_row, .multiply = multiply};
