/* attention_internal.cuh - attention from bfloat16 at the real models' widths, on sm_90a. */
#ifndef HD_OPS_CUDA_ATTENTION_INTERNAL_CUH
#define HD_OPS_CUDA_ATTENTION_INTERNAL_CUH

#include "ops/cuda/cuda_internal.cuh"

/* Whether attention_sm90() has these widths; the same for any number of rows. */
bool attention_fits_sm90(const hd_attention_args *a);
void attention_sm90(hd_stream *s, const hd_attention_args *a);

#endif
