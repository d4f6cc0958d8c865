/* ref_internal.h - declarations of every operator's reference implementation. */
#ifndef HD_OPS_REF_REF_INTERNAL_H
#define HD_OPS_REF_REF_INTERNAL_H

#include "ops/fused_internal.h"
#include "ops/ops.h"

#define X(op) hd_##op##_fn hd_##op##_ref;
HD_OP_LIST(X)
#undef X

/* What --precision official rounds: rows of x in products (ops/x_format.h); queries, keys and weights of
 * attention, queries and keys of the indexer to bfloat16, as the GPU's kernels do. */
#define REF_OFFICIAL_LIST(X) \
    OPS_OFFICIAL_LIST(X)     \
    X(linear_heads)          \
    X(attention)             \
    X(attention_naive)       \
    X(indexer_topk)

#define X(op) hd_##op##_fn hd_##op##_ref_official;
REF_OFFICIAL_LIST(X)
#undef X

/* The nearest bfloat16, ties to even. */
static inline float ops_bf16(float x) {
    return hd_bf16_to_f32(hd_f32_to_bf16(x));
}

/* x [n], or if it is to be narrowed the nearest bfloat16 numbers in room, which may be x. */
static inline const float *ops_narrowed(const float *x, int32_t n, bool narrows, float *room) {
    if (!narrows) return x;
    for (int32_t i = 0; i < n; i++) room[i] = ops_bf16(x[i]);
    return room;
}

/* out = the numbers of a format that are nearest to x, which may be out. */
void ops_round_columns(hd_group_format f, float *out, const float *x, int32_t cols);

/* Returns an entry: where it lies if it is float32, else decoded to room [width]. */
const float *ops_read_entry(const hd_paged *p, int32_t seq, int32_t entry, float *room);

/* Where a float32 entry is made: at its place if the pool is float32, else in room [width], of which
 * ops_write_entry() takes it to its place. */
float *ops_entry_room(const hd_paged *p, int32_t seq, int32_t entry, float *room);
void ops_write_entry(const hd_paged *p, int32_t seq, int32_t entry, const float *from);

/* Keeps the n choices of a row. */
void ops_replay_row(const hd_replay_log *log, int32_t row, const int32_t *choice, int32_t n);

/* One row of moe_topk, and the number of scratch floats it needs. */
void ops_moe_topk_row(const hd_moe_topk_args *a, int32_t row, float *scratch);
int32_t ops_moe_topk_scratch(const hd_router_rule *rule);

/* What resident does but for the copies; returns how many there are. Then one of them. */
int32_t ops_resident_plan(hd_stream *s, const hd_resident_args *a);
void ops_resident_fetch(const hd_resident_args *a, int32_t i);

/* Returns the choice j of a token that follows choice `last` in order of expert number; last
 * -1: the first. */
int32_t ops_next_choice(const int32_t *expert, int32_t top_k, int32_t last);

/* The slot of assignment i. */
static inline int32_t ops_slot_of(const hd_moe_permute_args *a, int32_t i) {
    const int32_t expert = a->expert[i], n = a->n_choices;
    if (!a->slot) return expert;
    return n == 1 ? a->slot[expert] : a->slot[(int64_t)expert * n + i / a->top_k % n];
}

/* Places assignment i, number `row` of its expert, where moe_split says. */
static inline void ops_place(const hd_moe_permute_args *a, const hd_split_graph *g, int32_t i,
                             int32_t row) {
    const int32_t slot = hd_split_slot(g, a->first, a->expert[i], row);
    const int32_t at = a->offset[slot] + row - a->first[slot];
    a->assignment[at] = i;
    a->place[i] = at;
}

/* Counts token i, which must not be negative. */
void ops_count_token(const hd_count_tokens_args *a, int32_t i);

#endif
