/* table_backward_cuda.cu - the table of CUDA backward operators. */
#include "ops/backward/backward_cuda_internal.cuh"

void hd_backward_init_cuda(hd_backward_ops *t) {
#define X(op) t->op = hd_##op##_cuda;
    HD_BACKWARD_OP_LIST(X)
#undef X
    t->linear_back = hd_linear_back_cuda;
}
