/* op_trace.h - an operator table that records calls with their shapes and computes nothing.
 *
 * It shows a forward pass as a list of operators, without the bytes of the weights. One table
 * is traced at a time, by one thread, on a device whose memory is host memory. */
#ifndef HD_OPS_PROFILE_OP_TRACE_H
#define HD_OPS_PROFILE_OP_TRACE_H

#include "ops/ops.h"

/* dim -1: a length that the call does not fix, such as the entries of a KV pool */
enum { HD_OP_TENSORS = 6, HD_OP_ATTRIBUTES = 3, HD_ANY_LENGTH = -1 };

/* An operand or a result, row-major. */
typedef struct hd_op_tensor {
    const char *name; /* as in the operator's argument struct; NULL ends a list */
    int32_t n_dims, dim[3];
    bool by_row; /* dim[0] counts rows of the step, or a multiple of them */
} hd_op_tensor;

typedef struct hd_op_attribute {
    const char *name; /* NULL ends the list */
    int32_t value;    /* 0: a flag, which is set */
} hd_op_attribute;

/* One call. Operators outside the forward pass (sampling, step) have their name only. */
typedef struct hd_op_call_shape {
    const char *op;
    const hd_weight *w; /* the stored matrix, the first one of several; NULL: none */
    hd_op_tensor in[HD_OP_TENSORS + 1], out[HD_OP_TENSORS + 1];
    hd_op_attribute attribute[HD_OP_ATTRIBUTES + 1];
} hd_op_call_shape;

typedef void hd_op_trace_fn(void *ctx, const hd_op_call_shape *call);

/* Fills `out` with operators that report each call to fn. act_type: of activations. */
void hd_op_trace_init(hd_ops *out, hd_dtype act_type, hd_op_trace_fn *fn, void *ctx);

#endif
