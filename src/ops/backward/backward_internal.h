/* backward_internal.h - declarations of the reference backward operators. */
#ifndef HD_OPS_BACKWARD_BACKWARD_INTERNAL_H
#define HD_OPS_BACKWARD_BACKWARD_INTERNAL_H

#include "ops/backward.h"

#define X(op) hd_##op##_fn hd_##op##_ref;
HD_BACKWARD_OP_LIST(X)
#undef X

/* Row r of hc_pre_back; its part of the gradients of scale and base is added to dscale[3] and
 * dbase[n], NULL: left out. */
void back_hc_pre_row(const hd_hc_pre_back_args *a, int32_t r, float *dscale, float *dbase);

/* optimizer_ref.c: one block of sum_squares, of at most HD_SQUARES_BLOCK elements or, of Muon, a matrix;
 * elements of adamw; matrix `at` of muon, with scratch of hd_muon_scratch(). */
double back_square_sum(const float *x, int64_t n);
void back_adamw_range(const hd_adamw_args *a, int64_t begin, int64_t end);
void back_muon_matrix(const hd_muon_args *a, int32_t at, float *scratch);

#endif
