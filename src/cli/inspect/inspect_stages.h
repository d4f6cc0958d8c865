/* inspect_stages.h - `hadal inspect --stages`: the forward pass as stages and operators. */
#ifndef HD_CLI_INSPECT_INSPECT_STAGES_H
#define HD_CLI_INSPECT_INSPECT_STAGES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "ops/profile/op_trace.h"
#include "weights/spec.h"

/* One operator of a stage; call.op NULL: the stage has none with one rank. */
typedef struct stage_op {
    const char *stage;
    hd_op_call_shape call; /* w: NULL */
    const char *role;      /* of the stored matrix, "Q_A"; NULL: none */
    int32_t rows, cols;    /* of the matrix */
    hd_dtype type;
} stage_op;

/* A list of stages that some layers share, or the start or the end of a pass. */
typedef struct stage_block {
    const char *part;    /* "mla", "moe", ...; "step" or "draft" */
    int32_t first_op, n; /* in stage_list.ops */
    int32_t *layers;     /* [n_layers] empty for the parts "step" and "draft" */
    int32_t n_layers;
} stage_block;

typedef struct stage_list {
    stage_op *ops;
    int32_t n_ops, ops_cap;
    stage_block *blocks; /* in the order of their first layer */
    int32_t n_blocks, blocks_cap;
} stage_list;

/* Rows of the traced step and those that need logits; dim[0] of a tensor by row is a multiple
 * of the former, or the latter. The rows of a draft block count as the latter, so they must not
 * be a multiple of the former. */
enum { STAGE_ROWS = 11, STAGE_LOGITS = 1 };

/* Runs one step, and one draft if the model has a drafter, on operators that compute
 * nothing. Reads no weights. Release out with stages_close, also after a failure. */
hd_status stages_open(stage_list *out, const hd_model_spec *spec, hd_err *err);
void stages_close(stage_list *l); /* an all-zero list is fine */

void stages_print_text(const stage_list *l, const hd_model_spec *spec);
hd_status stages_print_json(const stage_list *l, const hd_model_spec *spec, hd_err *err);

#endif
