/* backward_internal.h - declarations of the reference backward operators. */
#ifndef HD_OPS_BACKWARD_BACKWARD_INTERNAL_H
#define HD_OPS_BACKWARD_BACKWARD_INTERNAL_H

#include "ops/backward.h"

#define X(op) hd_##op##_fn hd_##op##_ref;
HD_BACKWARD_OP_LIST(X)
#undef X

#endif
