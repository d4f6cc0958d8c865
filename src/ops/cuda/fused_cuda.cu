/* fused_cuda.cu - fused operators: several products of the same rows in one launch where few rows
 * have them in common, sums with norms, norms with rotations; the others as the operators that they
 * stand for. */
#include "ops/cuda/fused_internal.cuh"
#include "ops/fused_internal.h"

/* ---- products: one by one, but for what multiply_several() takes ---- */

static void linear_set(hd_stream *s, const hd_linear_set_args *a, int products,
                       hd_linear_fn *linear) {
    const uint32_t done = multiply_several(s, a, (1u << a->n) - 1, products);
    for (int32_t i = 0; i < a->n; i++) {
        const hd_linear_args one = ops_set_linear(a, i);
        if (!(done >> i & 1)) linear(s, &one);
    }
    hd_cuda_check(s, "linear_set");
}

void hd_linear_set_cuda(hd_stream *s, const hd_linear_set_args *a) {
    linear_set(s, a, EXACT, hd_linear_cuda);
}

void hd_linear_set_cuda_fast(hd_stream *s, const hd_linear_set_args *a) {
    linear_set(s, a, FAST, hd_linear_cuda_fast);
}

void hd_linear_set_cuda_cublaslt(hd_stream *s, const hd_linear_set_args *a) {
    linear_set(s, a, FAST, hd_linear_cuda_cublaslt);
}

void multiply_gated(hd_stream *s, const hd_linear_swiglu_args *a, hd_linear_set_fn *set) {
    const hd_swiglu_args activation = ops_linear_swiglu(a);
    hd_linear_set_args both = {};
    both.out[0] = a->gate;
    both.out[1] = a->up;
    both.x = a->x;
    both.w[0] = a->gate_w;
    both.w[1] = a->up_w;
    both.n = 2;
    both.rows = a->rows;
    set(s, &both);
    hd_swiglu_cuda(s, &activation);
}

void hd_linear_swiglu_cuda(hd_stream *s, const hd_linear_swiglu_args *a) {
    multiply_gated(s, a, hd_linear_set_cuda);
}

void hd_linear_swiglu_cuda_fast(hd_stream *s, const hd_linear_swiglu_args *a) {
    multiply_gated(s, a, hd_linear_set_cuda_fast);
}

void hd_linear_swiglu_cuda_cublaslt(hd_stream *s, const hd_linear_swiglu_args *a) {
    multiply_gated(s, a, hd_linear_set_cuda_cublaslt);
}

void multiply_gated_experts(hd_stream *s, const hd_grouped_swiglu_args *a,
                            hd_grouped_gemm_fn *grouped, int products) {
    const hd_grouped_gemm_args gate = ops_gate_grouped(a, false);
    const hd_grouped_gemm_args up = ops_gate_grouped(a, true);
    const hd_swiglu_args activation = ops_grouped_swiglu(a);
    if (products == 0 || !multiply_two_tables(s, &gate, &up, products)) {
        grouped(s, &gate);
        grouped(s, &up);
    }
    hd_swiglu_cuda(s, &activation);
}

void hd_grouped_swiglu_cuda(hd_stream *s, const hd_grouped_swiglu_args *a) {
    multiply_gated_experts(s, a, hd_grouped_gemm_cuda, EXACT);
}

void hd_grouped_swiglu_cuda_fast(hd_stream *s, const hd_grouped_swiglu_args *a) {
    multiply_gated_experts(s, a, hd_grouped_gemm_cuda_fast, FAST);
}
