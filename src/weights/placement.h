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
    const hd_stored_format *formats; /* [schema->n] as found; NULL: as the config declares */
    int32_t n_mtp;                   /* MTP layers to hold, 0 .. spec->n_mtp */
} hd_plan_args;

typedef struct hd_plan {
    hd_slice *slices; /* [n], one per tensor of the schema; owned */
    int32_t n;
    hd_shard shard;
    hd_summary held; /* bytes of this rank by part */
} hd_plan;

/* Duplicates are held by nobody: the main tensor serves. *out is the caller's. */
hd_status hd_plan_open(hd_plan *out, const hd_plan_args *a, hd_err *err);
void hd_plan_close(hd_plan *p);

#endif
