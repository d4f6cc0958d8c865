/* fast_loops_internal.h - products in whole numbers in portable C: what the other instruction
 * sets must equal to the bit. Compiled once as it is and once for AVX2. */
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
    return largest / 127.0f;
}

static inline void quantize_row(const fast_x *x, int32_t row, const float *from, int32_t n,
                                hd_dtype type) {
    (void)type;
    for (int32_t b = 0; b < x->blocks; b++) {
        const int32_t at = (row / x->side * x->blocks + b) * x->side + row % x->side;
        float block[FAST_BLOCK] = {0};
        const int32_t live = hd_min_i32(FAST_BLOCK, n - b * FAST_BLOCK);
        if (live > 0) memcpy(block, from + b * FAST_BLOCK, (size_t)live * sizeof *block);
        x->scale[at] = quantize_block(x->code + at * FAST_BLOCK, block);
    }
}

/* ---- W ---- */

/* Signed numbers of one row into [FAST_COLS]; scales of its groups. */
static inline void read_e2m1(int8_t *out, const uint8_t *src, int32_t n) {
    static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    for (int32_t i = 0; i < n; i += 2) {
        out[i] = doubled[src[i / 2] & 15];
        out[i + 1] = doubled[src[i / 2] >> 4];
    }
}

static inline float read_e4m3_group(int8_t *out, const uint8_t *src, int32_t n) {
    uint32_t largest = 0;
    for (int32_t i = 0; i < n; i++) {
        const uint32_t magnitude = src[i] & 0x7fu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const uint32_t e = largest < 8 ? 1 : largest >> 3;
    for (int32_t i = 0; i < n; i++) {
        const uint32_t m = src[i] & 0x7fu;
        const int32_t v =
            (m < 8 && e < 8 ? fast_e4m3_least[e][m] : fast_e4m3[m + 8 * (15 - e)]) -
            FAST_E4M3_OFFSET;
        out[i] = (int8_t)(src[i] & 0x80u ? -v : v);
    }
    return largest == 0x7f ? NAN : hd_f32_from_bits((e + 114) << 23);
}

static inline void read_row(int8_t *code, float *scale, const fast_product *p, int32_t j) {
    const float *from = p->scale + (int64_t)j * FAST_GROUPS;
    const int32_t groups = (int32_t)hd_ceil_div(p->n, p->group);
    memset(code + p->n, 0, (size_t)(p->x->blocks * FAST_BLOCK - p->n));
    if (p->type == HD_E2M1) {
        read_e2m1(code, p->src[j], p->n);
        memcpy(scale, from, (size_t)groups * sizeof *scale);
        memset(scale + groups, 0, (size_t)(FAST_GROUPS - groups) * sizeof *scale);
        return;
    }
    for (int32_t g = 0; g < groups; g++) {
        const int32_t c = g * p->group;
        scale[g] =
            from[g] * read_e4m3_group(code + c, p->src[j] + c, hd_min_i32(p->group, p->n - c));
    }
}

/* ---- products ---- */

static inline float whole_dot(const int8_t *restrict x, const int8_t *restrict w, int32_t n) {
    int32_t sum = 0;
    for (int32_t i = 0; i < n; i++) sum += (int32_t)x[i] * w[i];
    return (float)sum;
}

/* The blocks that share a step. Bound by what fast_x.scale says of x and `scale` of W. */
static inline float add_step(float sum, const fast_x *x, int32_t at, const int8_t *w,
                             const float *scale, int32_t group) {
    float part = 0.0f;
    for (int32_t b = 0; b < FAST_STEP / FAST_BLOCK; b++) {
        const int32_t block = at + b * x->side;
        const int8_t *code = x->code + block * FAST_BLOCK;
        const float by = x->scale[block];
        w += b ? FAST_BLOCK : 0;
        if (group == 128) {
            const float product = whole_dot(code, w, FAST_BLOCK) * by;
            part = b ? part + product : product;
        } else if (group == 32) {
            const float product = whole_dot(code, w, FAST_BLOCK) * scale[b];
            sum = sum + product * by;
        } else {
            const float first = whole_dot(code, w, 16) * scale[2 * b];
            const float second = whole_dot(code + 16, w + 16, 16) * scale[2 * b + 1];
            const float product = first + second;
            sum = sum + product * by;
        }
    }
    return group == 128 ? sum + part * scale[0] : sum;
}

static inline void multiply_rows(const fast_product *p) {
    const int32_t steps = p->x->blocks * FAST_BLOCK / FAST_STEP;
    const int32_t per_step = FAST_STEP / p->group;
    int8_t *w = (int8_t *)p->panel;
    for (int32_t j = 0; j < p->n_w; j++) {
        read_row(w, p->scales, p, j);
        for (int32_t i = 0; i < p->n_x; i++) {
            const fast_x *x = p->x;
            int32_t at = i / x->side * x->blocks * x->side + i % x->side;
            float *out = p->out + i * p->out_stride + j, sum = p->more ? *out : 0.0f;
            for (int32_t s = 0; s < steps; s++, at += FAST_STEP / FAST_BLOCK * x->side) {
                sum =
                    add_step(sum, x, at, w + s * FAST_STEP, p->scales + s * per_step, p->group);
            }
            *out = sum;
        }
    }
}

#endif
