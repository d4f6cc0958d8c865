/* ref_internal.h - every op's reference, declared from the one list. */
#ifndef HD_OPS_REF_INTERNAL_H
#define HD_OPS_REF_INTERNAL_H

#include "ops/ops.h"

#define X(op) hd_##op##_fn hd_##op##_ref;
HD_OP_LIST(X)
#undef X

#endif
