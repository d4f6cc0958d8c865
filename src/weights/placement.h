/* placement.h - which slice of which tensor a rank holds, for any parallel config.
 *
 * A plan applies a parallel config to a schema: every tensor gets one rectangle per rank.
 * Boundaries fall on complete heads, output groups and experts, and those of columns on complete
 * quantization blocks. A tensor that cannot be sharded so is refused before any byte is read,
 * with its name and the numbers. The loader reads the rectangles; the memory budget adds up their bytes. */
#ifndef HD_WEIGHTS_PLACEMENT_H
#define HD_WEIGHTS_PLACEMENT_H

#include <stdint.h>

#include "base/status.h"
#include "weights/parallel_config.h"
#include "weights/spec.h"
#include "weights/summary.h"
#include "weights/weights.h"

typedef struct hd_slice {
    int32_t row0, rows; /* rows 0: this rank holds nothing of the tensor */
    int32_t col0, cols;
} hd_slice;

typedef struct hd_plan_args {
    const hd_parallel_config *parallel;
    int32_t rank;
    const hd_model_spec *spec;
    const hd_schema *schema;
    const hd_stored_format *formats; /* [schema->n] as stored; NULL: as the config declares */
    int32_t n_mtp;                   /* MTP layers to hold, 0 .. spec->n_mtp */
    bool no_experts;                 /* routed experts are held elsewhere */
} hd_plan_args;

typedef struct hd_plan {
    hd_slice *slices; /* [n], one per tensor of the schema; owned */
    int32_t n;
    hd_shard shard;
    hd_summary held; /* bytes of this rank by part */
} hd_plan;

/* Makes the plan of one rank. Duplicates are not held: the main tensor replaces them. The
 * caller owns *out. */
hd_status hd_plan_open(hd_plan *out, const hd_plan_args *a, hd_err *err);
void hd_plan_close(hd_plan *p);

#endif
