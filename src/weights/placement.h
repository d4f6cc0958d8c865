/* placement.h - which slice of which tensor a rank holds, for any parallel layout.
 *
 * A layout says how the ranks of a world share the work; a plan applies it to a schema and
 * gives every tensor one rectangle per rank. Cuts fall on whole heads, output groups, experts
 * and quantization blocks. What cannot be cut so is refused before a byte is read, with the
 * tensor and the numbers. The loader reads rectangles, the budget adds their bytes up. */
#ifndef HD_WEIGHTS_PLACEMENT_H
#define HD_WEIGHTS_PLACEMENT_H

#include <stdint.h>

#include "base/status.h"
#include "weights/spec.h"
#include "weights/summary.h"
#include "weights/weights.h"

/* Every field is at least 1. The world has tp * dp ranks, numbered with tp fastest:
 *
 *     attention    dp groups of tp consecutive ranks; heads are cut over a group
 *     experts      etp consecutive ranks share an expert, ep such groups share the experts,
 *                  and all of it repeats world / (ep * etp) times
 *     dense MLPs   groups of dense_tp consecutive ranks; 1 is data parallel (shared experts
 *                  follow them)
 *     output head  groups of head_tp consecutive ranks cut the vocabulary */
typedef struct hd_layout {
    int32_t tp, dp;
    int32_t ep, etp;
    int32_t dense_tp, head_tp;
} hd_layout;

hd_layout hd_layout_single(void); /* one rank */
int32_t hd_layout_world(const hd_layout *l);
hd_status hd_layout_check(const hd_layout *l, hd_err *err);

/* Where a rank stands in each of the groups. */
typedef struct hd_rank_place {
    int32_t tp, dp, ep, etp, dense, head;
} hd_rank_place;

hd_rank_place hd_layout_place(const hd_layout *l, int32_t rank);

typedef struct hd_slice {
    int32_t row0, rows; /* rows 0: this rank holds nothing of the tensor */
    int32_t col0, cols;
} hd_slice;

typedef struct hd_plan_args {
    const hd_layout *layout;
    int32_t rank;
    const hd_model_spec *spec;
    const hd_schema *schema;
    const hd_stored_format *formats; /* [schema->n] as found; NULL: as the config declares */
    int32_t n_mtp;                   /* MTP layers to hold, 0 .. spec->n_mtp */
} hd_plan_args;

typedef struct hd_plan {
    hd_slice *slices; /* [n], one per tensor of the schema; owned */
    int32_t n;
    int32_t head0, n_heads;     /* attention heads of this rank */
    int32_t expert0, n_experts; /* routed experts of this rank, in every MoE layer */
    hd_summary held;            /* bytes of this rank by part */
} hd_plan;

/* Duplicates are held by nobody: the main tensor serves. *out is the caller's. */
hd_status hd_plan_open(hd_plan *out, const hd_plan_args *a, hd_err *err);
void hd_plan_close(hd_plan *p);

#endif
