/* model.h - the transformer: a family's layers, and one forward pass over a batch.
 *
 * A layer is a table of stages, functions over the state of one micro-batch. Model code is
 * written for one micro-batch. The driver runs one micro-batch straight through, or
 * interleaves several at stages marked as yield points (design D3). */
#ifndef HD_MODEL_MODEL_H
#define HD_MODEL_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"
#include "kv/kv.h"
#include "model/batch.h"
#include "comm/comm.h"
#include "ops/ops.h"
#include "weights/spec.h"
#include "weights/weights.h"

typedef struct hd_model hd_model;

typedef struct hd_model_limits {
    int32_t rows;      /* rows of one micro-batch */
    int32_t logits;    /* rows of one micro-batch that need logits */
    int32_t positions; /* the longest sequence, prompt and output together */
    /* rows of one micro-batch that the experts of this rank may receive under expert
     * parallelism; 0: at most this rank's own choices */
    int32_t expert_rows;
} hd_model_limits;

enum { HD_MAX_MICRO = HD_COMM_MAX_INFLIGHT };

/* A profiling callback before each stage. part: "mla", "csa", "moe", ... of a layer, or
 * "step"; stage: a name of the stage lists. Both are static text. */
typedef struct hd_probe {
    void *ctx;
    void (*at)(void *ctx, const char *part, const char *stage);
} hd_probe;

/* The queues of a step: what stages compute, what they exchange with other ranks, and what
 * they copy. A stage names its lane. */
typedef enum hd_lane { HD_LANE_COMPUTE, HD_LANE_COMM, HD_LANE_COPY, HD_N_LANES } hd_lane;

/* What a model runs with. All of it must outlive the model. */
typedef struct hd_model_env {
    const hd_model_spec *spec;
    const hd_weights *weights;
    const hd_ops *ops;
    hd_device *device;
    hd_stream *stream; /* the compute lane; a step begins and ends on it */
    /* The other lanes; NULL: the same stream. Streams of their own overlap with `stream`, are
     * ordered by events where a micro-batch changes its lane, and fail through `stream`.
     * Only `stream` gets scratch for operators from the model. */
    hd_stream *comm_stream, *copy_stream;
    const hd_comm *comm;   /* NULL if the weights are complete (one rank) */
    const hd_probe *probe; /* NULL: no profiling */
    /* for long prompts; naive needs operators that support it, and an MLA that reads all
     * latents (V2, V3) */
    hd_mla_form mla;
} hd_model_env;

/* Opens a model and allocates its activations. n_micro: how many micro-batches one step may
 * contain, each with its own activations. */
hd_status hd_model_open(hd_model **out, const hd_model_env *env, const hd_model_limits *limits,
                        int32_t n_micro, hd_err *err);
void hd_model_close(hd_model *m); /* NULL is fine */

/* activations of all micro-batches, and scratch of operators */
size_t hd_model_bytes(const hd_model *m);

/* Runs the forward pass of n_micro uploaded batches through all layers and queues their
 * logits. The batches must not share sequences. hd_model_logits(m, i) is then [n_logits,
 * vocab] of batch i, in device memory, until the next step. */
void hd_model_step(hd_model *m, const hd_kv *kv, hd_batch *const batches[], int32_t n_micro);

/* Computes draft logits with MTP layer 0: row t predicts the token after next_tokens[t],
 * which must be known and uploaded. The first draft continues the last hd_model_step() and
 * takes the same batches, with new logit_rows. `again` drafts one token further: row i of
 * the batch continues logits row i of the draft before. It replaces hd_model_logits().
 * Sources: DeepSeek-V3 report, section 2.2; models.md 2.5 and 2.14. */
void hd_model_draft(hd_model *m, const hd_kv *kv, hd_batch *const batches[], int32_t n_micro,
                    bool again);

const float *hd_model_logits(const hd_model *m, int32_t micro);

/* Returns the rows of this rank that chose each expert since open, [n_layers, n_experts], zero
 * in dense layers. Device memory; NULL without experts. Drafts are not counted. */
const int64_t *hd_model_expert_rows(const hd_model *m);

/* Returns how many ranks of the tensor-parallel group divide its rows in MLPs and MoE; 1: every
 * rank computes, and counts, all of them. */
int32_t hd_model_row_parts(const hd_model *m);

#endif
