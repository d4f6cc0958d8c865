/* table_backward.c - the tables of backward operators. */
#include "ops/backward/backward_internal.h"

void hd_backward_init_ref(hd_backward_ops *t) {
    *t = (hd_backward_ops){
#define X(op) .op = hd_##op##_ref,
        HD_BACKWARD_OP_LIST(X)
#undef X
    };
}
