/* model.h - a family's layers, and one forward pass over a batch.
 *
 * A layer is a table of stages, functions over the state of one micro-batch; model code is
 * written once as if for one micro-batch, and the driver runs one straight through or
 * several interleaved at the stages marked as yield points (design D3). */
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
    int32_t rows;        /* rows of one micro-batch */
    int32_t logits;      /* rows of one micro-batch that want logits */
    int32_t positions;   /* the longest sequence, prompt and output together */
    int32_t expert_rows; /* rows of one micro-batch that the experts here may get, where experts
                            are spread over ranks; 0: as many as this rank's own choices */
} hd_model_limits;

enum { HD_MAX_MICRO = 4 };

/* Told what comes next, for measuring. part: "mla", "csa", "moe", ... of a layer, or "step";
 * stage: of the stage lists. Both are static text. */
typedef struct hd_probe {
    void *ctx;
    void (*at)(void *ctx, const char *part, const char *stage);
} hd_probe;

/* Where a model runs. All of it must outlive the model. */
typedef struct hd_model_env {
    const hd_model_spec *spec;
    const hd_weights *weights;
    const hd_ops *ops;
    hd_device *device;
    hd_stream *stream;
    const hd_comm *exchange; /* NULL with weights of a single rank */
    const hd_probe *probe;   /* NULL: nobody asks */
    hd_mla_form mla;         /* of long prompts; naive needs ops that have it, and an MLA that
                                    sees all latents (V2, V3) */
} hd_model_env;

/* n_micro: how many micro-batches one step may hold, each with its own activations. */
hd_status hd_model_open(hd_model **out, const hd_model_env *env, const hd_model_limits *limits,
                        int32_t n_micro, hd_err *err);
void hd_model_close(hd_model *m); /* NULL is fine */

size_t hd_model_bytes(const hd_model *m); /* activations of all micro-batches, scratch of ops */

/* Runs n_micro uploaded batches through all layers and queues their logits. The batches must
 * not share sequences. Then hd_model_logits(m, i) is [n_logits, vocab] of batch i, device
 * memory, until the next step. */
void hd_model_step(hd_model *m, const hd_kv *kv, hd_batch *const batches[], int32_t n_micro);

/* Draft logits of MTP layer 0: row t predicts the token after next_tokens[t], which must be known
 * by now and uploaded. The first draft continues the last hd_model_step() and takes the same
 * batches, with logit_rows chosen anew. `again` drafts one token further: row i of the batch
 * continues logit row i of the draft before. Replaces hd_model_logits(). Sources: DeepSeek-V3
 * report, section 2.2; models.md 2.5 and 2.14. */
void hd_model_draft(hd_model *m, const hd_kv *kv, hd_batch *const batches[], int32_t n_micro,
                    bool again);

const float *hd_model_logits(const hd_model *m, int32_t micro);

/* Rows that every expert of the spec's layers has computed since open, [n_layers, n_experts],
 * zero in dense layers; device memory, NULL without experts. Drafts are not counted. */
const int64_t *hd_model_expert_rows(const hd_model *m);

#endif
