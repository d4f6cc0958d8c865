/* op_shapes.h - shapes of operators in the released models: one table for `hadal bench ops`
 * and for the operator tests, which also compare it with the models' configs. */
#ifndef HD_CLI_BENCH_OP_SHAPES_H
#define HD_CLI_BENCH_OP_SHAPES_H

#include <stdint.h>

#include "base/dtype.h"
#include "weights/weights.h"

enum { OP_SHAPE_ROWS = 8, OP_SHAPE_ROLES = 2 };

/* What outs, cols, n and top_k mean:
 *
 *     linear        a stored matrix [outs, cols]
 *     linear_heads  a stored matrix [outs, cols] of n heads; top_k 1: transposed
 *     grouped_gemm  n experts [outs, cols], top_k per row
 *     attention_naive  a stored matrix [outs, cols] of n heads' keys and values
 *     attention     outs heads, keys of cols, n keys; top_k selected entries, 0: all
 *     indexer_topk  outs heads, keys of cols, n keys, the best top_k
 *     compress      n positions become an entry of cols
 *     resident      entries of cols, top_k of a row, of which outs of 100 are missing
 *     hc_*          n streams of cols
 *     moe_split     n experts on cols ranks, outs spare slots, top_k per row of each rank
 *     moe_*         rows of cols (moe_topk: experts; n groups), n experts, top_k per row
 *     others        rows of cols */
typedef struct op_shape {
    const char *name;   /* "V3 q_b" */
    const char *config; /* the model's config in tests/configs; NULL: of no model */
    const char *op;     /* name in HD_OP_LIST */
    hd_format format;   /* of the stored matrix */
    int32_t outs, cols, n, top_k;
    hd_role roles[OP_SHAPE_ROLES]; /* tensors whose rows, together, are the matrix */
    int32_t n_roles;
    int32_t parts;               /* the shape is one of so many equal parts; 0: all of it */
    int32_t rows[OP_SHAPE_ROWS]; /* that a benchmark measures; 0 ends the list */
} op_shape;

extern const op_shape op_shapes[];
extern const int32_t n_op_shapes;

#endif
