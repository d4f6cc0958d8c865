/* inspect_internal.h - results of `hadal inspect`, for its two output formats. */
#ifndef HD_CLI_INSPECT_INSPECT_INTERNAL_H
#define HD_CLI_INSPECT_INSPECT_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "weights/safetensors.h"
#include "weights/spec.h"
#include "weights/summary.h"
#include "weights/weights.h"

typedef struct inspection {
    const char *path;
    const hd_model_spec *spec;
    const hd_schema *schema;
    const hd_weights *weights;       /* NULL: the config alone */
    const hd_checkpoint *checkpoint; /* NULL likewise */
    hd_summary summary;              /* as stored, or as the config declares */
    int32_t n_mtp;                   /* MTP layers that exist */
    int32_t n_missing, n_unknown, n_ignored;
    int64_t tensor_bytes; /* of every tensor in the files, known or not */
    hd_err problem;       /* code HD_OK: none */
} inspection;

/* Count layers of one kind among the main ones. */
int32_t inspect_count_attention(const hd_model_spec *s, hd_attention kind);
int32_t inspect_count_mlp(const hd_model_spec *s, hd_mlp kind);

/* "dense", "moe", "moe_hash"; "none", "fp8", "modelopt" */
const char *inspect_mlp_name(hd_mlp kind);
const char *inspect_quant_name(hd_quant_method method);

/* Routed experts, which may lie on disk or in host memory, and the bytes of all other weights. */
typedef struct inspect_elsewhere {
    int64_t experts, bytes, rest; /* experts: of all layers that exist; 0: none */
} inspect_elsewhere;

inspect_elsewhere inspect_count_elsewhere(const inspection *in);

/* One tensor as --tensors shows it. */
typedef struct inspect_row {
    const char *name, *dtype, *file, *role;
    int32_t rank, layer, expert; /* layer and expert: -1 without */
    int64_t shape[HD_MAX_RANK];
    int64_t bytes;
} inspect_row;

int32_t inspect_n_rows(const inspection *in);
inspect_row inspect_row_at(const inspection *in, int32_t i);

void inspect_print_text(const inspection *in, bool tensors);
hd_status inspect_print_json(const inspection *in, bool tensors, hd_err *err);

#endif
