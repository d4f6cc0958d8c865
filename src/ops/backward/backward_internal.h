/* backward_internal.h - declarations of the reference backward operators. */
#ifndef HD_OPS_BACKWARD_BACKWARD_INTERNAL_H
#define HD_OPS_BACKWARD_BACKWARD_INTERNAL_H

#include "ops/backward.h"

#define X(op) hd_##op##_fn hd_##op##_ref;
HD_BACKWARD_OP_LIST(X)
X(attention_naive_back)
#undef X

/* Row r of hc_pre_back; its part of the gradients of scale and base is added to dscale[3] and
 * dbase[n], NULL: left out. */
void back_hc_pre_row(const hd_hc_pre_back_args *a, int32_t r, float *dscale, float *dbase);

#endif
