/* table_cuda.cu - the table of the CUDA operators. */
#include "ops/cuda_internal.cuh"

extern "C" void hd_ops_init_cuda(hd_ops *t) {
    *t = {};
    t->name = "cuda";
    t->act_bytes = sizeof(cuda_act);
#define X(op) t->op = hd_##op##_cuda;
    HD_COMMON_OP_LIST(X)
#undef X
}
