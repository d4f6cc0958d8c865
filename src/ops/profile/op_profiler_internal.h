/* op_profiler_internal.h - op cost: bytes and operations of one operator call (op_cost.c). */
#ifndef HD_OPS_PROFILE_OP_PROFILER_INTERNAL_H
#define HD_OPS_PROFILE_OP_PROFILER_INTERNAL_H

#include "ops/ops.h"

typedef struct op_cost {
    const hd_weight *w;
    int32_t rows, outs, ins;
    int32_t used; /* experts with rows */
    double bytes, flops;
} op_cost;

/* Reads integers where the operator reads them: in host memory, or in device memory through
 * its stream, which then waits. */
typedef struct ops_reader {
    hd_stream *stream; /* NULL: host memory */
    int32_t act_bytes;
    int32_t *copy; /* [cap] */
    int32_t cap;
} ops_reader;

#define X(op) op_cost ops_cost_##op(ops_reader *r, const hd_##op##_args *a);
HD_OP_LIST(X)
#undef X

#endif
