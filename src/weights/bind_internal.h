/* bind_internal.h - binds one tensor of the schema to its bytes: format, scales, checks. */
#ifndef HD_WEIGHTS_BIND_INTERNAL_H
#define HD_WEIGHTS_BIND_INTERNAL_H

#include "weights/safetensors.h"
#include "weights/spec.h"
#include "weights/weights.h"

typedef struct weights_bound {
    hd_weight weight;            /* vectors: one row */
    const hd_format_row *format; /* NULL: a table of integers, or dummy weights */
    const hd_tensor *data, *scale, *global;
} weights_bound;

/* names.c: finds the tensor of d, alone or as part of a tensor that stacks all experts; or
 * NULL. */
const hd_tensor *weights_find_tensor(const hd_checkpoint *c, const hd_model_spec *spec,
                                     const hd_tensor_decl *d);

/* Determines how d is stored (plain, FP8, FP4, NVFP4), from the dtype of its data and the
 * tensors beside it, and checks shapes and types. data is the result of weights_find_tensor.
 * Scale values are not read. */
hd_status weights_bind(weights_bound *out, const hd_checkpoint *c, const hd_model_spec *spec,
                       const hd_tensor_decl *d, const hd_tensor *data, hd_err *err);

/* values.c */
hd_status weights_check_scales(const hd_checkpoint *c, const weights_bound *b, hd_err *err);
hd_status weights_check_values(const hd_checkpoint *c, const weights_bound *b, hd_err *err);

/* Returns whether a tensor is used in float32 (norms, biases and the like). */
bool weights_is_small(const hd_tensor_decl *d);

/* Fails with "FILE: tensor NAME: reason". */
HD_PRINTF(4, 5)
hd_status weights_misfit(const hd_checkpoint *c, const hd_tensor *t, hd_err *err,
                         const char *fmt, ...);

#endif
