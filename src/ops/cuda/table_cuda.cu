/* table_cuda.cu - the table of the CUDA operators. */
#include "ops/check_internal.h"
#include "ops/cuda/cuda_internal.cuh"

static const ops_types cuda_types = {1u << HD_F32, 1u << HD_F32 | 1u << HD_BF16 | 1u << HD_E4M3,
                                     1u << HD_F32 | 1u << HD_E4M3};

/* An entry of the table for every form of an operator. Forms ask for the path of the current device. */
#define CHECKED(op, form)                                            \
    static void op##_##form(hd_stream *s, const hd_##op##_args *a) { \
        if (!ops_check_##op(s, &cuda_types, a)) return;              \
        hd_cuda_stream(s);                                           \
        hd_##op##_##form(s, a);                                      \
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

static const char *name_of(hd_precision precision, bool cublaslt, bool generic) {
    if (cublaslt) {
        return generic ? "cuda generic, fast, not batch-invariant"
                       : "cuda, fast, not batch-invariant";
    }
    switch (precision) {
    case HD_FAST:
        return generic ? "cuda generic, fast" : "cuda, fast";
    case HD_OFFICIAL:
        return generic ? "cuda generic, official" : "cuda, official";
    case HD_EXACT:
    case HD_AUTO: /* of options alone */
        break;
    }
    return generic ? "cuda generic" : "cuda";
}

extern "C" void hd_ops_init_cuda(hd_ops *t, hd_precision precision, bool cublaslt,
                                 hd_cuda_path path) {
    const bool generic = path == HD_CUDA_GENERIC;
    *t = {};
    t->name = name_of(precision, cublaslt, generic);
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
    if (generic) t->attention_naive = nullptr;
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
