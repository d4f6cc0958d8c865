/* moe.h - mixture of experts: top-k router, permutation, grouped GEMM, SwiGLU, combination. */
#ifndef HD_OPS_MOE_H
#define HD_OPS_MOE_H

#include "base/expert_table.h"
#include "base/router_rule.h"
#include "ops/types.h"

HD_BEGIN_C

/* Router: selects top_k experts per row and their weights; models.md 2.2, 2.3, 2.12. With
 * `table` the experts are table[token] and only the weights come from the scores. Experts
 * are in order of preference, the lower number first on a tie. */
typedef struct hd_moe_topk_args {
    int32_t *expert;       /* [rows, top_k] */
    float *weight;         /* [rows, top_k] */
    const float *logits;   /* [rows, n_experts] */
    const float *bias;     /* [n_experts] added for the selection only, or NULL */
    const int32_t *table;  /* [vocab, top_k] or NULL */
    const int32_t *tokens; /* [rows], read with table */
    int32_t rows;
    hd_router_rule rule;
} hd_moe_topk_args;

#define HD_ROWS_moe_topk(T)

/* Sorts the rows * top_k assignments (number t * top_k + j) by the slot of their expert; the
 * sort is stable. */
typedef struct hd_moe_permute_args {
    int32_t *offset;       /* [n_slots + 1] first sorted place of each slot */
    int32_t *assignment;   /* [rows * top_k] the assignment at each sorted place */
    int32_t *place;        /* [rows * top_k] the sorted place of each assignment */
    const int32_t *expert; /* [rows, top_k] */
    const int32_t *slot; /* [n_experts] slot of each expert, all different; NULL: its number */
    int64_t *load;       /* [n_experts] += number of rows of each expert; or NULL */
    const int32_t *live; /* [rows] 0: a padding row, which is not counted as load; or NULL */
    int32_t rows, top_k, n_experts, n_slots; /* n_slots >= n_experts */
} hd_moe_permute_args;

#define HD_ROWS_moe_permute(T)

/* Grouped GEMM: rows at places offset[s] .. offset[s + 1] - 1 times the matrix in slot s.
 * Place i reads row assignment[i] / top_k of x, or row i if assignment is NULL. The matrices'
 * addresses are read from the table when the operator runs. */
typedef struct hd_grouped_gemm_args {
    hd_rows out; /* [n places, w->shape.rows] */
    hd_rows x;   /* [*, w->shape.cols] */
    const hd_expert_table *w;
    const int32_t *offset, *assignment; /* offset: [w->n + 1] */
    /* n_places = rows * top_k, an upper bound that the host knows */
    int32_t top_k, n_places;
} hd_grouped_gemm_args;

#define HD_ROWS_grouped_gemm(T) T(out, PLAIN) T(x, PLAIN)

/* SwiGLU: out = silu(g) * u with g = min(gate, limit), u = clamp(up, -limit, limit) (limit
 * 0: no clamp). If weight is set, row r is also scaled by weight[assignment[r]], or by
 * weight[r] without assignment; models.md 2.1.3, 2.12. */
typedef struct hd_swiglu_args {
    hd_rows out; /* [rows, cols], may be gate */
    hd_rows gate, up;
    const float *weight; /* NULL: ones */
    const int32_t *assignment;
    int32_t rows, cols;
    float limit;
} hd_swiglu_args;

#define HD_ROWS_swiglu(T) T(out, PLAIN) T(gate, PLAIN) T(up, PLAIN)

/* Weighted sum of the experts' results: out[t] = shared[t] + sum over j of y[place[t * top_k
 * + j]] * weight[t * top_k + j]. It is summed in order of expert number, so that neither
 * the order of the choices nor the slots of the experts matter. */
typedef struct hd_moe_combine_args {
    hd_rows out;           /* [rows, cols], may be shared */
    hd_rows y;             /* [rows * top_k, cols] by sorted place */
    hd_rows shared;        /* [rows, cols] or none */
    const float *weight;   /* [rows, top_k] or NULL: ones (already applied) */
    const int32_t *expert; /* [rows, top_k] */
    const int32_t *place;  /* [rows, top_k] */
    int32_t rows, cols, top_k;
} hd_moe_combine_args;

#define HD_ROWS_moe_combine(T) T(out, PLAIN) T(y, PLAIN) T(shared, PLAIN)

#define HD_MOE_OPS(X) X(moe_topk) X(moe_permute) X(grouped_gemm) X(swiglu) X(moe_combine)

HD_END_C

#endif
