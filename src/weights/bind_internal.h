/* bind_internal.h - one tensor of the schema and where its bytes lie. */
#ifndef HD_WEIGHTS_BIND_INTERNAL_H
#define HD_WEIGHTS_BIND_INTERNAL_H

#include "weights/safetensors.h"
#include "weights/spec.h"
#include "weights/weights.h"

typedef struct weights_bound {
    hd_weight weight; /* vectors: one row */
    const hd_tensor *data, *scale, *global;
} weights_bound;

/* names.c: the tensor that is d, alone or as a part of all experts stacked in one; or NULL. */
const hd_tensor *weights_find_tensor(const hd_checkpoint *c, const hd_model_spec *spec,
                                     const hd_tensor_decl *d);

/* Finds out how d is stored, from the dtype of its data and from the tensors beside it, and
 * checks shapes and types. data is what weights_find_tensor gave. Scale values are not read. */
hd_status weights_bind(weights_bound *out, const hd_checkpoint *c, const hd_model_spec *spec,
                       const hd_tensor_decl *d, const hd_tensor *data, hd_err *err);

hd_status weights_check_scales(const hd_checkpoint *c, const weights_bound *b, hd_err *err);

/* values.c */
hd_status weights_check_values(const hd_checkpoint *c, const weights_bound *b, hd_err *err);

/* Whether a tensor is needed in float32 (norms, biases and the like). */
bool weights_is_small(const hd_tensor_decl *d);

/* The "FILE: tensor NAME: why" of this part. */
HD_PRINTF(4, 5)
hd_status weights_misfit(const hd_checkpoint *c, const hd_tensor *t, hd_err *err,
                         const char *fmt, ...);

#endif
