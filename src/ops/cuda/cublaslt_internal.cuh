/* cublaslt_internal.cuh - products of many rows by cuBLASLt (cublaslt_cuda.cu): who else needs to know. */
#ifndef HD_OPS_CUDA_CUBLASLT_INTERNAL_CUH
#define HD_OPS_CUDA_CUBLASLT_INTERNAL_CUH

#include "ops/cuda/gemm_transposed_internal.cuh"

/* Multiplies as many of the first rows of all heads as the library takes; gives how many. None where
 * there are few, where the matrix is of another kind, or where the library has no algorithm. */
int32_t cublaslt_multiply(hd_stream *s, const heads_job &h, const hd_weight *w);

#endif
