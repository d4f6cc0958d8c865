/* fast_loops_internal.h - products in whole numbers in portable C: what the other instruction
 * sets must equal to the bit. AVX2 puts its own loops in place of
 * some. */
#ifndef HD_OPS_FAST_LOOPS_INTERNAL_H
#define HD_OPS_FAST_LOOPS_INTERNAL_H

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "ops/fast_internal.h"

#ifdef __clang__ /* gcc does not fuse in ISO C */
#pragma STDC FP_CONTRACT OFF
#endif

/* ---- x ---- */

static inline uint32_t largest_bits(const float *x, int32_t n) {
    uint32_t largest = 0;
    for (int32_t i = 0; i < n; i++) {
        const uint32_t bits = hd_f32_bits(x[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Gives the block's scale. */
static inline float quantize_block(int8_t *restrict code, const float *restrict x) {
    const uint32_t bits = largest_bits(x, FAST_BLOCK);
    if (bits < FAST_TINY || bits >= FAST_HUGE) {
        memset(code, 0, FAST_BLOCK);
        return bits < FAST_TINY ? 0.0f : NAN;
    }
    const float largest = hd_f32_from_bits(bits), inverse = 127.0f / largest;
    for (int32_t i = 0; i < FAST_BLOCK; i++) {
        code[i] = (int8_t)hd_f32_bits(x[i] * inverse + FAST_ROUND);
    }
    return largest * FAST_PART;
}

static inline void quantize_row(const fast_x *x, int32_t row, const float *from, int32_t n,
                                int32_t group) {
    (void)group;
    for (int32_t b = 0; b < x->blocks; b++) {
        const int32_t at = (row / x->side * x->blocks + b) * x->side + row % x->side;
        float block[FAST_BLOCK] = {0};
        const int32_t live = hd_min_i32(FAST_BLOCK, n - b * FAST_BLOCK);
        if (live > 0) memcpy(block, from + b * FAST_BLOCK, (size_t)live * sizeof *block);
        x->scale[at] = quantize_block(x->code + at * FAST_BLOCK, block);
    }
}

/* ---- W ---- */

/* What an instruction set has its own words for; constants where multiply_rows is inlined. */
typedef struct fast_loops {
    /* n numbers of FP4, even, or of a group of FP8 at exponent e. */
    void (*read_e2m1)(int8_t *out, const uint8_t *src, int32_t n);
    void (*read_e4m3)(int8_t *out, const uint8_t *src, int32_t n, uint32_t e);
    uint32_t (*largest_e4m3)(const uint8_t *src, int32_t n); /* magnitude code */
    /* A step's sums of first halves of blocks, then of second ones. */
    void (*dots)(int32_t sum[8], const int8_t *x, int64_t x_stride, const int8_t *w);
} fast_loops;

static inline uint32_t largest_code(const uint8_t *src, int32_t n) {
    uint32_t largest = 0;
    for (int32_t i = 0; i < n; i++) {
        const uint32_t magnitude = src[i] & 0x7fu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

static inline void read_e2m1_numbers(int8_t *out, const uint8_t *src, int32_t n) {
    static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    for (int32_t i = 0; i < n; i += 2) {
        out[i] = doubled[src[i / 2] & 15];
        out[i + 1] = doubled[src[i / 2] >> 4];
    }
}

static inline void read_e4m3_numbers(int8_t *out, const uint8_t *src, int32_t n, uint32_t e) {
    for (int32_t i = 0; i < n; i++) {
        const int32_t v = fast_e4m3[e][src[i] & 0x7fu] - FAST_E4M3_OFFSET;
        out[i] = (int8_t)(src[i] & 0x80u ? -v : v);
    }
}

static inline void read_row(int8_t *code, float *scale, const fast_product *p, int32_t j,
                            const fast_loops *loops) {
    const uint8_t *src = fast_row(p, j);
    memset(code + p->n, 0, (size_t)(fast_padded_groups(p) * p->group - p->n));
    fast_read_scales(scale, p, j);
    if (p->w->type == HD_E2M1) {
        loops->read_e2m1(code, src, p->n);
        return;
    }
    for (int32_t g = 0, c = 0; c < p->n; g++, c += p->group) {
        const int32_t n = hd_min_i32(p->group, p->n - c);
        const uint32_t largest = loops->largest_e4m3(src + c, n);
        const uint32_t e = largest < 8 ? 1 : largest >> 3;
        loops->read_e4m3(code + c, src + c, n, e);
        scale[g] *= largest == 0x7f ? NAN : hd_f32_from_bits((e + 114) << 23);
    }
}

/* ---- products ---- */

static inline void dots(int32_t sum[8], const int8_t *x, int64_t x_stride, const int8_t *w) {
    for (int32_t b = 0; b < 8; b++) {
        const int8_t *xb = x + b % 4 * x_stride + b / 4 * 16, *wb = w + b % 4 * 32 + b / 4 * 16;
        sum[b] = 0;
        for (int32_t i = 0; i < 16; i++) sum[b] += (int32_t)xb[i] * wb[i];
    }
}

/* The blocks of a step; `scale` is W's, from this step on. */
static inline float add_step(float sum, const fast_x *x, int32_t at, const int8_t *w,
                             const float *scale, int32_t group, const fast_loops *loops) {
    int32_t half[8];
    float part = 0.0f;
    loops->dots(half, x->code + at * FAST_BLOCK, (int64_t)x->side * FAST_BLOCK, w);
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

static inline void multiply_rows(const fast_product *p, const fast_loops *loops) {
    const int32_t per_step = FAST_STEP / p->group, steps = fast_padded_groups(p) / per_step;
    int8_t *w = (int8_t *)p->panel;
    for (int32_t j = 0; j < p->n_w; j++) {
        read_row(w, p->scales, p, j, loops);
        for (int32_t i = 0; i < p->n_x; i++) {
            const fast_x *x = p->x;
            int32_t at =
                (i / x->side * x->blocks + p->x_col / FAST_BLOCK) * x->side + i % x->side;
            float *out = p->out + i * p->out_stride + j, sum = p->more ? *out : 0.0f;
            for (int32_t s = 0; s < steps; s++, at += FAST_STEP / FAST_BLOCK * x->side) {
                sum = add_step(sum, x, at, w + s * FAST_STEP, p->scales + s * per_step,
                               p->group, loops);
            }
            *out = sum;
        }
    }
}

#endif
