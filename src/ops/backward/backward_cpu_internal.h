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
    X(hc_post_back)             \
    X(hc_pre_back)              \
    X(cross_entropy)

#define X(op) void back_##op##_cpu(hd_stream *s, const hd_##op##_args *a, const ops_kernels *k);
HD_BACKWARD_CPU_LIST(X)
#undef X

#endif
