/* sample_internal.h - arithmetic of the sampler, identical in every version of the operator.
 *
 * A probability is an integer multiple of 2^-40 of the largest one. Sums of such weights are
 * exact in 64 bits. The order of summation and the number of threads, lanes or parts
 * therefore cannot change a token (design D8), and a draw cannot exceed a rounded sum. Plain
 * float32 operations without fused multiply-add compute the same bits everywhere. */
#ifndef HD_OPS_REF_SAMPLE_INTERNAL_H
#define HD_OPS_REF_SAMPLE_INTERNAL_H

#include <math.h>
#include <string.h>

#include "base/dtype.h"
#include "base/philox.h"
#include "ops/ops.h"

#ifdef __clang__ /* gcc does not fuse in ISO C */
#pragma STDC FP_CONTRACT OFF
#endif

/* Returns a row's mask; NULL: all tokens are allowed. */
static inline const uint32_t *ops_argmax_mask(const hd_argmax_args *a, int32_t row) {
    if (!a->mask || a->mask_row[row] < 0) return NULL;
    return a->mask + a->mask_row[row] * (((int64_t)a->vocab + 31) / 32);
}

enum { OPS_DRAW_TOKEN = 1 }; /* high counter word of token draws */

/* Scores below this have weight 0: e^-30 < 2^-41. */
#define OPS_LEAST_SCALED (-30.0f)

static inline uint32_t ops_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* 1 / temperature, finite so that 0 times it stays 0. */
static inline float ops_inverse_temperature(float temperature) {
    const float inverse = 1.0f / temperature;
    return inverse < 0x1.fffffep127f ? inverse : 0x1.fffffep127f;
}

/* Returns a score relative to the largest, divided by the temperature: in [OPS_LEAST_SCALED,
 * 0], monotone in y. */
static inline float ops_scaled(float y, float max, float inverse) {
    const float z = (y - max) * inverse;
    return z > OPS_LEAST_SCALED ? z : OPS_LEAST_SCALED;
}

/* exp(z) in units of 2^-40, rounded; 0 for OPS_LEAST_SCALED. z = n ln 2 + f with |f| <= ln 2
 * / 2; the series of exp(f) ends below float32 precision. Adding `shift` rounds to an
 * integer, which is then in the last bits; 2^12 does the same for 2^-40. */
static inline uint64_t ops_weight(float z) {
    const float shift = 0x1.8p23f, ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
    const float shifted = z * 0x1.715476p0f + shift;
    const float n = shifted - shift;
    const float f = (z - n * ln2_high) - n * ln2_low;
    float e = 1.0f / 5040.0f;
    e = e * f + 1.0f / 720.0f;
    e = e * f + 1.0f / 120.0f;
    e = e * f + 1.0f / 24.0f;
    e = e * f + 1.0f / 6.0f;
    e = e * f + 0.5f;
    e = e * f + 1.0f;
    e = e * f + 1.0f;
    const uint32_t power = (ops_bits(shifted) - ops_bits(shift)) << 23;
    const double fixed = (double)hd_f32_from_bits(ops_bits(e) + power) + 0x1p12;
    uint64_t bits;
    memcpy(&bits, &fixed, sizeof bits);
    return bits - 0x40b0000000000000u; /* the bits of 2^12 */
}

/* Computes z = scaled y, and their weights. Every instruction set compiles this one loop. */
static inline void ops_weigh(float *restrict z, uint64_t *restrict weight,
                             const float *restrict y, int32_t n, float max, float inverse) {
    for (int32_t i = 0; i < n; i++) z[i] = ops_scaled(y[i], max, inverse);
    for (int32_t i = 0; i < n; i++) weight[i] = ops_weight(z[i]);
}

/* max * inverse + log(total), where total sums the weights relative to max; 0 if no token is
 * possible, so that log-probabilities stay -inf. */
static inline double ops_log_total(float max, float inverse, uint64_t total) {
    return total ? (double)max * (double)inverse + log((double)total * 0x1p-40) : 0.0;
}

/* The product of two floats is exact, so that inverse 1 changes nothing. Certainty is 0, never
 * -0, which a score of -0 would give. */
static inline float ops_logprob(float y, float inverse, double log_total) {
    return (float)((double)y * (double)inverse - log_total) + 0.0f;
}

static inline hd_logprob_mode ops_logprob_mode(const hd_sampling *p) {
    return p->temperature > 0.0f ? p->logprob_mode : HD_LOGPROB_RAW;
}

/* Returns the token that a row takes without sampling, or -1. */
static inline int32_t ops_given(const hd_sample_args *a, int32_t row) {
    return a->given ? a->given[row] : -1;
}

/* Returns the draft that a row may take instead of sampling (relaxed acceptance), or -1. */
static inline int32_t ops_relaxed_draft(const hd_sample_args *a, int32_t row) {
    const hd_sampling *p = &a->params[a->slot[row]];
    return a->draft && p->relaxed_top > 0 && p->relaxed_delta > 0.0f ? a->draft[row] : -1;
}

/* Returns whether a token's probability is at least that of the largest one less delta;
 * weights are relative to the largest, at temperature 1. */
static inline bool ops_is_near(uint64_t weight, uint64_t total, float delta) {
    return (double)weight + (double)delta * (double)total >= 0x1p40;
}

/* Returns the penalized score of a token that occurs `output` times in the output; seen: it
 * is in prompt or output. */
static inline float ops_penalized(const hd_sampling *p, float y, bool seen, int32_t output) {
    const float repetition = p->repetition_penalty;
    if (seen && repetition != 0.0f) y = y > 0.0f ? y / repetition : y * repetition;
    if (output > 0) {
        y -= p->frequency_penalty * (float)output;
        y -= p->presence_penalty;
    }
    return y;
}

/* Returns the weight that the most probable tokens must reach for top_p of total (nucleus
 * sampling). */
static inline uint64_t ops_nucleus(float top_p, uint64_t total) {
    const uint64_t need = (uint64_t)ceil((double)top_p * (double)total);
    return need < 1 ? 1 : need > total ? total : need;
}

/* Returns the lowest score that min_p keeps, relative to the largest. */
static inline float ops_least(float min_p) {
    return min_p >= 1.0f ? 0.0f : min_p > 0.0f ? (float)log((double)min_p) : -INFINITY;
}

/* Returns a random number in [0, total): floor(u * total) of a u in [0, 1) with 64 bits. */
static inline uint64_t ops_draw(uint64_t seed, int32_t position, uint64_t total) {
    const hd_philox x = hd_philox_at(seed, OPS_DRAW_TOKEN, (uint64_t)position);
    const uint64_t low = (uint32_t)total, high = total >> 32;
    const uint64_t middle = x.v[0] * low + (x.v[1] * low >> 32);
    const uint64_t mirror = x.v[1] * high + (uint32_t)middle;
    return x.v[0] * high + (middle >> 32) + (mirror >> 32);
}

#endif
