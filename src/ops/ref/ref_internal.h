/* ref_internal.h - declarations of every operator's reference implementation. */
#ifndef HD_OPS_REF_REF_INTERNAL_H
#define HD_OPS_REF_REF_INTERNAL_H

#include "ops/ops.h"

#define X(op) hd_##op##_fn hd_##op##_ref;
HD_OP_LIST(X)
#undef X

/* One row of moe_topk, and the number of scratch floats it needs. */
void ops_moe_topk_row(const hd_moe_topk_args *a, int32_t row, float *scratch);
int32_t ops_moe_topk_scratch(const hd_router_rule *rule);

/* Returns the choice j of a token with the smallest place above `after`: its next expert in
 * order of number. */
int32_t ops_next_choice(const int32_t *place, int32_t top_k, int32_t after);

/* Counts token i, which must not be negative. */
void ops_count_token(const hd_count_tokens_args *a, int32_t i);

#endif
