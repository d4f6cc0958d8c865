/* gemm_bf16_internal.cuh - products of many rows of x, rounded to bfloat16, with stored matrices, on
 * Hopper: gemm_bf16_sm90.cu, and gemm_heads_sm90.cu for a small matrix of each head.
 *
 * Each returns false if it did nothing, since the form, the GPU, the number of rows or the room do not fit. */
#ifndef HD_OPS_CUDA_GEMM_BF16_INTERNAL_CUH
#define HD_OPS_CUDA_GEMM_BF16_INTERNAL_CUH

#include "ops/cuda/gemm_transposed_internal.cuh"

/* Computes products of the same rows of x with n matrices of the same columns and form, of which more than
 * one have one head each. Outputs have the bits of mma_internal.cuh. Rows in bfloat16 lie in the stream's
 * scratch, behind x if x does too. */
bool multiply_bf16(hd_stream *s, const heads_job *h, const hd_weight *const *w, int32_t n);

/* The same of 128 outputs of each head. */
bool multiply_values(hd_stream *s, const heads_job &h, const hd_weight *w);

/* With the transpose of 128 stored rows of each head, and the bits of gemm_transposed_internal.cuh. */
bool multiply_absorbed(hd_stream *s, const heads_job &h, const hd_weight *w);

#endif
