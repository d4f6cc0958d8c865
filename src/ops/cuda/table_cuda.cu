/* table_cuda.cu - the table of the CUDA operators. */
#include "ops/check_internal.h"
#include "ops/cuda/cuda_internal.cuh"

static const ops_types cuda_types = {1u << HD_F32, 1u << HD_F32 | 1u << HD_BF16 | 1u << HD_E4M3,
                                     1u << HD_F32 | 1u << HD_E4M3};

/* An entry of the table for every form of an operator. */
#define CHECKED(op, form)                                              \
    static void op##_##form(hd_stream *s, const hd_##op##_args *a) {   \
        if (ops_check_##op(s, &cuda_types, a)) hd_##op##_##form(s, a); \
    }
#define X(op) CHECKED(op, cuda)
HD_COMMON_OP_LIST(X)
#undef X
#define X(op) CHECKED(op, cuda_fast)
FAST_OP_LIST(X)
#undef X
#define X(op) CHECKED(op, cuda_official)
OPS_OFFICIAL_LIST(X)
#undef X
#define X(op) CHECKED(op, cuda_cublaslt)
CUBLASLT_OP_LIST(X)
#undef X

extern "C" void hd_ops_init_cuda(hd_ops *t, hd_precision precision, bool cublaslt) {
    *t = {};
    t->name = cublaslt                   ? "cuda, fast, not batch-invariant"
              : precision == HD_FAST     ? "cuda, fast"
              : precision == HD_OFFICIAL ? "cuda, official"
                                         : "cuda";
    t->act_type = HD_F32;
    t->kv_type = hd_cuda_kv_type(precision);
    t->precision = precision;
    t->exchange = &hd_exchange_ops_cuda;
    t->activations = cublaslt                   ? "bfloat16, FP8 in large products"
                     : precision == HD_FAST     ? "bfloat16"
                     : precision == HD_OFFICIAL ? "FP8, bfloat16 for NVFP4 and BF16 matrices"
                                                : "float32, as sums of three bfloat16";
#define X(op) t->op = op##_cuda;
    HD_COMMON_OP_LIST(X)
#undef X
    if (precision == HD_EXACT) return;
#define X(op) t->op = op##_cuda_fast;
    FAST_OP_LIST(X)
#undef X
    if (precision == HD_OFFICIAL) {
#define X(op) t->op = op##_cuda_official;
        OPS_OFFICIAL_LIST(X)
#undef X
    }
    if (!cublaslt) return;
#define X(op) t->op = op##_cuda_cublaslt;
    CUBLASLT_OP_LIST(X)
#undef X
}
