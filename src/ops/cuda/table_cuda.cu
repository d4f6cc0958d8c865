/* table_cuda.cu - the table of the CUDA operators. */
#include "ops/cuda/cuda_internal.cuh"

extern "C" void hd_ops_init_cuda(hd_ops *t, hd_precision precision, bool cublaslt) {
    *t = {};
    t->name = cublaslt                   ? "cuda, fast, not batch-invariant"
              : precision == HD_FAST     ? "cuda, fast"
              : precision == HD_OFFICIAL ? "cuda, official"
                                         : "cuda";
    t->act_bytes = sizeof(cuda_act);
    t->precision = precision;
    t->activations = cublaslt                   ? "bfloat16, FP8 in large products"
                     : precision == HD_FAST     ? "bfloat16"
                     : precision == HD_OFFICIAL ? "FP8, bfloat16 for NVFP4 and BF16 matrices"
                                                : "float32, as sums of three bfloat16";
#define X(op) t->op = hd_##op##_cuda;
    HD_COMMON_OP_LIST(X)
#undef X
    if (precision == HD_EXACT) return;
#define X(op) t->op = hd_##op##_cuda_fast;
    FAST_OP_LIST(X)
#undef X
    if (precision == HD_OFFICIAL) {
#define X(op) t->op = hd_##op##_cuda_official;
        OFFICIAL_OP_LIST(X)
#undef X
    }
    if (!cublaslt) return;
#define X(op) t->op = hd_##op##_cuda_cublaslt;
    CUBLASLT_OP_LIST(X)
#undef X
}
