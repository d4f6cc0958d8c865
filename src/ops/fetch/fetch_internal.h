/* fetch_internal.h - the parts of moe_fetch that the reference and the CPU share. */
#ifndef HD_OPS_FETCH_FETCH_INTERNAL_H
#define HD_OPS_FETCH_FETCH_INTERNAL_H

#include "ops/ref/ref_internal.h"

/* What moe_fetch does but for the copies, rows of the host included; returns how many experts they are
 * of. Then one of their HD_EXPERT_MATRICES matrices each, number i of all; then what they took. */
int32_t ops_fetch_plan(const hd_moe_fetch_args *a);
void ops_fetch_matrix(const hd_moe_fetch_args *a, int32_t i);
void ops_fetch_timed(const hd_moe_fetch_args *a);

#endif
