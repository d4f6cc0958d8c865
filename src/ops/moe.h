/* moe.h - mixture of experts: top-k router, permutation, grouped GEMM, SwiGLU, combination. */
#ifndef HD_OPS_MOE_H
#define HD_OPS_MOE_H

#include "base/expert_table.h"
#include "base/router_rule.h"
#include "moe/split.h"
#include "ops/replay.h"
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
    hd_replay_log log;     /* keeps the experts; data NULL: nothing is kept */
    int32_t rows;
    hd_router_rule rule;
} hd_moe_topk_args;

#define HD_ROWS_moe_topk(T)

/* counts[e] = rows that chose expert e. */
typedef struct hd_moe_count_args {
    int32_t *counts;       /* [n_experts] */
    const int32_t *expert; /* [rows, top_k] */
    int32_t rows, top_k, n_experts;
} hd_moe_count_args;

#define HD_ROWS_moe_count(T)

/* Divides the rows of each expert over its slots so that the largest sum of a rank is as small as
 * possible (moe/split.h): rows of one source, or with `counts` of several, each of which has its part of
 * what goes to a slot. Rows of an expert go to its slots in order: to slot s from number first[s] on, of
 * this source's. All rows together are below 2^31. */
typedef struct hd_moe_split_args {
    int32_t *offset;       /* [n_slots + 1] as of moe_permute */
    int32_t *first;        /* [n_slots] */
    const int32_t *graph;  /* hd_split_graph of the layer's map */
    const int32_t *expert; /* [rows, top_k] of this source; not read with counts */
    /* [n_sources, n_experts] of moe_count, this one's at `source`; NULL: there is no other */
    const int32_t *counts;
    int32_t rows, top_k, n_sources, source;
    hd_split_shape shape;
} hd_moe_split_args;

#define HD_ROWS_moe_split(T)

/* Sorts the rows * top_k assignments (number t * top_k + j) by the slot of their expert; the
 * sort is stable. */
typedef struct hd_moe_permute_args {
    int32_t
        *offset; /* [n_slots + 1] first sorted place of each slot; with `first` it is read */
    int32_t *assignment;   /* [rows * top_k] the assignment at each sorted place */
    int32_t *place;        /* [rows * top_k] the sorted place of each assignment */
    const int32_t *expert; /* [rows, top_k] */
    /* [n_experts, n_choices] slots of each expert; row r takes number r % n_choices. NULL: the
     * expert's number */
    const int32_t *slot;
    /* offset, first and graph of moe_split, which slots are chosen by; NULL: by `slot` */
    const int32_t *first, *graph;
    /* += rows of each expert: load[p * load_stride + expert] for rows of phase p; or NULL */
    int64_t *load;
    const int32_t *phase;                    /* [rows] hd_row_phase; NULL: all 0 */
    int64_t load_stride;                     /* 0: all phases together */
    int32_t rows, top_k, n_experts, n_slots; /* n_slots >= n_experts */
    int32_t n_choices;                       /* 1 or more; read with slot */
    int32_t n_ranks;                         /* read with graph */
} hd_moe_permute_args;

HD_SPLIT_FN hd_split_shape hd_permute_shape(const hd_moe_permute_args *a) {
    const hd_split_shape s = {a->n_experts, a->n_slots, a->n_ranks};
    return s;
}

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

#define HD_ROWS_swiglu(T) T(out, STRIDED) T(gate, PLAIN) T(up, PLAIN)

/* Fused: two grouped_gemm with the same rows and swiglu, weighted by `weight` as there. */
typedef struct hd_grouped_swiglu_args {
    hd_rows out;      /* [n places, gate_w->shape.rows] */
    hd_rows gate, up; /* the same, overwritten with anything; gate may be out */
    hd_rows x;        /* [*, gate_w->shape.cols] */
    const hd_expert_table *gate_w, *up_w;
    const int32_t *offset, *assignment; /* as of grouped_gemm */
    const float *weight;                /* NULL: ones */
    int32_t top_k, n_places;
    float limit;
} hd_grouped_swiglu_args;

#define HD_ROWS_grouped_swiglu(T) T(out, STRIDED) T(gate, PLAIN) T(up, PLAIN) T(x, PLAIN)

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

#define HD_ROWS_moe_combine(T) T(out, STRIDED) T(y, PLAIN) T(shared, STRIDED)

#define HD_MOE_OPS(X) \
    X(moe_topk)       \
    X(moe_count)      \
    X(moe_split)      \
    X(moe_permute)    \
    X(grouped_gemm)   \
    X(swiglu)         \
    X(grouped_swiglu) \
    X(moe_combine)

HD_END_C

#endif
