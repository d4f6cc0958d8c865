/* ops.c - the reference table, and what the tables ask of a stream. */
#include "ops/ops.h"

#include "ops/cpu_internal.h"
#include "ops/ref_internal.h"

void hd_ops_init_ref(hd_ops *t) {
    *t = (hd_ops){.name = "ref",
                  .act_bytes = sizeof(float),
#define X(op) .op = hd_##op##_ref,
                  HD_OP_LIST(X)
#undef X
    };
}

size_t hd_ops_scratch_bytes(int32_t max_keys, int32_t max_cols) {
    return (size_t)OPS_STATE_BYTES + 16 * ((size_t)max_keys + (size_t)max_cols);
}
