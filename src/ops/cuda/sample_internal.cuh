/* sample_internal.cuh - the arithmetic of sample_internal.h on the device, step by step and unfused. */
#ifndef HD_OPS_CUDA_SAMPLE_INTERNAL_CUH
#define HD_OPS_CUDA_SAMPLE_INTERNAL_CUH

#include "ops/cuda/cuda_internal.cuh"

/* ---- base/philox.h on the device ---- */

/* The first two words of one counter. */
static __device__ __forceinline__ uint2 philox(uint64_t seed, uint32_t high, uint64_t low) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)low, c1 = (uint32_t)(low >> 32), c2 = high, c3 = 0;
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return make_uint2(c0, c1);
}

constexpr float LEAST_SCALED = -30.0f;
constexpr uint32_t DRAW_TOKEN = 1; /* high counter word of the draws of tokens */

typedef unsigned long long whole; /* what 64-bit atomics take */

static __device__ __forceinline__ bool is_broken(float logit) {
    return !(logit < CUDART_INF_F);
}

static __device__ __forceinline__ float inverse_temperature(float temperature) {
    const float inverse = __fdiv_rn(1.0f, temperature);
    return inverse < 0x1.fffffep127f ? inverse : 0x1.fffffep127f;
}

static __device__ __forceinline__ float scaled(float y, float max, float inverse) {
    const float z = __fmul_rn(__fsub_rn(y, max), inverse);
    return z > LEAST_SCALED ? z : LEAST_SCALED;
}

static __device__ __forceinline__ float step_of(float e, float f, float next) {
    return __fadd_rn(__fmul_rn(e, f), next);
}

static __device__ __forceinline__ whole weight_of(float z) {
    const float shift = 0x1.8p23f, ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
    const float shifted = __fadd_rn(__fmul_rn(z, 0x1.715476p0f), shift);
    const float n = __fsub_rn(shifted, shift);
    const float f = __fsub_rn(__fsub_rn(z, __fmul_rn(n, ln2_high)), __fmul_rn(n, ln2_low));
    float e = 1.0f / 5040.0f;
    e = step_of(e, f, 1.0f / 720.0f);
    e = step_of(e, f, 1.0f / 120.0f);
    e = step_of(e, f, 1.0f / 24.0f);
    e = step_of(e, f, 1.0f / 6.0f);
    e = step_of(e, f, 0.5f);
    e = step_of(e, f, 1.0f);
    e = step_of(e, f, 1.0f);
    const uint32_t power = (__float_as_uint(shifted) - __float_as_uint(shift)) << 23;
    const double fixed = __dadd_rn((double)__uint_as_float(__float_as_uint(e) + power), 0x1p12);
    return (whole)__double_as_longlong(fixed) - 0x40b0000000000000u;
}

static __device__ __forceinline__ double log_total(float max, float inverse, whole total) {
    if (total == 0) return 0.0;
    const double largest = __dmul_rn((double)max, (double)inverse);
    return __dadd_rn(largest, log(__dmul_rn((double)total, 0x1p-40)));
}

static __device__ __forceinline__ float logprob_at(float y, float inverse, double log_all) {
    return __fadd_rn((float)__dsub_rn(__dmul_rn((double)y, (double)inverse), log_all), 0.0f);
}

/* hd_has_penalty() on the device. */
static __device__ __forceinline__ bool has_penalty(const hd_sampling &p) {
    return (p.repetition_penalty != 0.0f && p.repetition_penalty != 1.0f) ||
           p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f;
}

static __device__ __forceinline__ float penalized(const hd_sampling &p, float y, bool seen,
                                                  int32_t output) {
    const float repetition = p.repetition_penalty;
    if (seen && repetition != 0.0f) {
        y = y > 0.0f ? __fdiv_rn(y, repetition) : __fmul_rn(y, repetition);
    }
    if (output > 0) {
        y = __fsub_rn(y, __fmul_rn(p.frequency_penalty, (float)output));
        y = __fsub_rn(y, p.presence_penalty);
    }
    return y;
}

static __device__ __forceinline__ whole nucleus(float top_p, whole total) {
    const whole need = (whole)ceil(__dmul_rn((double)top_p, (double)total));
    return need < 1 ? 1 : need > total ? total : need;
}

static __device__ __forceinline__ float least_of(float min_p) {
    return min_p >= 1.0f ? 0.0f : min_p > 0.0f ? (float)log((double)min_p) : -CUDART_INF_F;
}

/* A number in [0, total): floor(u * total) of a u in [0, 1) with 64 bits. */
static __device__ whole draw_below(uint64_t seed, int32_t position, whole total) {
    const uint2 x = philox(seed, DRAW_TOKEN, (uint64_t)position);
    const uint64_t low = (uint32_t)total, high = total >> 32;
    const uint64_t middle = x.x * low + (x.y * low >> 32);
    const uint64_t mirror = x.y * high + (uint32_t)middle;
    return x.x * high + (middle >> 32) + (mirror >> 32);
}

#endif
