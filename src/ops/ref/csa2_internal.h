/* csa2_internal.h - parts of V4.1's references that tasks of the CPU operators run. */
#ifndef HD_OPS_REF_CSA2_INTERNAL_H
#define HD_OPS_REF_CSA2_INTERNAL_H

#include "ops/ops.h"

/* Words first .. end - 1 of every row of keep_rows. */
void ops_keep_words(const hd_keep_rows_args *a, int32_t first, int32_t end);

/* Rows of one sequence of group_latents. */
void ops_group_latents_seq(const hd_group_latents_args *a, int32_t seq);

/* One row of pool_topk; scratch of so many bytes for the keys that it sees. */
void ops_pool_topk_row(const hd_pool_topk_args *a, int32_t row, void *scratch);
size_t ops_pool_topk_scratch(int32_t keys);

/* Rows of one sequence of ngram_classes. */
void ops_ngram_classes_seq(const hd_ngram_classes_args *a, int32_t seq);

#endif
