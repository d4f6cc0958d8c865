/* hybrid_internal.h - the stages that V4's and V4.1's attention have in common (hybrid.c). */
#ifndef HD_MODEL_HYBRID_INTERNAL_H
#define HD_MODEL_HYBRID_INTERNAL_H

#include "model/rows_internal.h"

/* All products of the layer's input, then those of the query's low rank; stores the window. */
void model_hybrid_project(const model_step *s, int32_t layer);

/* The same in two parts: what every position leaves, and the queries. */
void model_hybrid_keys(const model_step *s, int32_t layer);
void model_hybrid_queries(const model_step *s, int32_t layer);

/* Attends to the window and the entries that this kind of layer reads. */
void model_hybrid_attention(const model_step *s, int32_t layer);

/* o_low = W_oa per group of heads, after the rotation is undone at the query's position */
void model_hybrid_values(const model_step *s, int32_t layer);

#endif
