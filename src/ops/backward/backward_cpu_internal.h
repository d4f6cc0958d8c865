/* backward_cpu_internal.h - the backward operators that are written over the kernels of an
 * instruction set (ops/cpu/). */
#ifndef HD_OPS_BACKWARD_BACKWARD_CPU_INTERNAL_H
#define HD_OPS_BACKWARD_BACKWARD_CPU_INTERNAL_H

#include "ops/backward/backward_internal.h"
#include "ops/cpu/cpu_internal.h"

#define HD_BACKWARD_CPU_LIST(X) \
    X(weight_grad)              \
    X(grouped_weight_grad)      \
    X(grouped_gemm_back)        \
    X(swiglu_back)              \
    X(rms_norm_back)            \
    X(attention_back)           \
    X(attention_naive_back)     \
    X(indexer_back)             \
    X(hc_post_back)             \
    X(hc_pre_back)              \
    X(cross_entropy)            \
    X(sum_squares)              \
    X(adamw)                    \
    X(muon)

#define X(op) void back_##op##_cpu(hd_stream *s, const hd_##op##_args *a, const ops_kernels *k);
HD_BACKWARD_CPU_LIST(X)
#undef X

/* <a, b>, as OPS_LANES partial sums. */
static inline float back_dot(const float *restrict a, const float *restrict b, int32_t n) {
    float part[OPS_LANES] = {0}, sum = 0.0f;
    int32_t i = 0;
    for (; i + OPS_LANES <= n; i += OPS_LANES) {
        for (int32_t u = 0; u < OPS_LANES; u++) part[u] += a[i + u] * b[i + u];
    }
    for (; i < n; i++) sum += a[i] * b[i];
    for (int32_t u = 0; u < OPS_LANES; u++) sum += part[u];
    return sum;
}

#endif
