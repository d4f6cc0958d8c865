/* fused_internal.cuh - products of several matrices in one launch. */
#ifndef HD_OPS_CUDA_FUSED_INTERNAL_CUH
#define HD_OPS_CUDA_FUSED_INTERNAL_CUH

#include "ops/cuda/cuda_internal.cuh"

/* Computes those of `left` that few rows have in common in one form, with `products` products for
 * one; returns them. Each has the bits that linear gives it. Bits count the matrices of a. */
uint32_t multiply_several(hd_stream *s, const hd_linear_set_args *a, uint32_t left,
                          int products);

/* Both products of the same rows, with `products` products for one; false: nothing was done, since experts
 * have many rows each or the tables differ in form. Each has the bits that grouped_gemm gives it. */
bool multiply_two_tables(hd_stream *s, const hd_grouped_gemm_args *a,
                         const hd_grouped_gemm_args *b, int products);

/* swiglu of two products of `set`, or of two `grouped` ones; products: those of one with which they may be
 * made in one launch, 0: they may not. */
void multiply_gated(hd_stream *s, const hd_linear_swiglu_args *a, hd_linear_set_fn *set);
void multiply_gated_experts(hd_stream *s, const hd_grouped_swiglu_args *a,
                            hd_grouped_gemm_fn *grouped, int products);

#endif
