/* model.h - the transformer: a family's layers, and one forward pass over a batch.
 *
 * A layer is a table of stages, functions over the state of one micro-batch. Model code is
 * written for one micro-batch. The driver runs a step as one micro-batch straight through, or cuts it
 * into several and interleaves them at stages marked as yield points (design D3). */
#ifndef HD_MODEL_MODEL_H
#define HD_MODEL_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/prefetch.h"
#include "device/device.h"
#include "kv/kv.h"
#include "model/batch.h"
#include "model/expert_stage.h"
#include "comm/comm.h"
#include "ops/ops.h"
#include "weights/spec.h"
#include "weights/weights.h"

typedef struct hd_model hd_model;

typedef struct hd_model_limits {
    int32_t rows;      /* rows of a step */
    int32_t logits;    /* rows of a step that need logits */
    int32_t positions; /* the longest sequence, prompt and output together */
    /* rows of one micro-batch that the experts of this rank take at once under expert parallelism;
     * more come in further rounds. 0: as hd_model_expert_rows_of() says */
    int32_t expert_rows;
    int32_t n_micro; /* micro-batches as which steps run, up to HD_MAX_MICRO; 0 or 1: one */
    /* rows of an attention group from which a step is cut; 0: from n_micro on, and then no micro-batch has
     * more than its part of `rows` */
    int32_t micro_from;
    bool keeps_slots; /* of the choices of a step, on a host: hd_model_own_choices() has them */
} hd_model_limits;

/* A choice with the slot that its row went to; -1 if it is not known. Sums of floats keep it up to
 * HD_MOST_CHOICE. */
#define HD_CHOICE(expert, slot, n_experts) (((slot) + 1) * (n_experts) + (expert))
enum { HD_MOST_CHOICE = 1 << 24 };

/* Rows that may arrive at a rank's experts: if every row of all ranks chose these only; and what
 * memory is reserved for: twice the mean of the ranks, and HD_LEAST_EXPERT_ROWS if so many may. */
enum { HD_LEAST_EXPERT_ROWS = 256 };
int64_t hd_model_most_expert_rows(const hd_parallel_config *l, int32_t rows, int32_t top_k);
int32_t hd_model_expert_rows_of(const hd_parallel_config *l, int32_t rows, int32_t top_k);

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
    /* The other lanes of steps in several micro-batches; NULL: the same stream. Streams of their own
     * overlap with `stream`, are ordered by events where a micro-batch changes its lane, and fail
     * through `stream`. Only `stream` gets scratch for operators from the model. */
    hd_stream *comm_stream, *copy_stream;
    /* For parts of a block that need not follow each other, in steps of few rows; NULL: none do.
     * The model gives it scratch. With a probe, only captured steps use it. */
    hd_stream *beside_stream;
    /* of these weights, whose experts are elsewhere; NULL: all are resident */
    hd_expert_stage *stage;
    const hd_comm *comm;   /* NULL if the weights are complete (one rank) */
    const hd_probe *probe; /* NULL: no profiling */
    /* for long prompts; naive needs operators that support it, and an MLA that reads all
     * latents (V2, V3) */
    hd_mla_form mla;
    hd_expert_split split; /* of rows over copies of experts; the same on all ranks */
    /* Rows for each rank from which context parallelism divides a step, the same on all ranks;
     * 0: HD_LEAST_CP_PART */
    int32_t cp_part;
} hd_model_env;

enum { HD_LEAST_CP_PART = 4 };

/* Opens a model and allocates its activations. */
hd_status hd_model_open(hd_model **out, const hd_model_env *env, const hd_model_limits *limits,
                        hd_err *err);
void hd_model_close(hd_model *m); /* NULL is fine */

/* activations of all micro-batches, and scratch of operators */
size_t hd_model_bytes(const hd_model *m);

/* Returns n_micro for a batch that is about to be uploaded, whose rows and group_rows are set: 1 for few
 * rows, and where layers drop rows or windows are rebuilt. All ranks say the same. */
int32_t hd_model_n_micro(const hd_model *m, const hd_batch *batch);

/* Runs the forward pass of an uploaded batch through all layers, and queues its logits.
 * hd_model_logits(m) is then [n_logits, vocab], in device memory, until the next step. No bit depends on
 * the micro-batches. */
void hd_model_step(hd_model *m, const hd_kv *kv, const hd_batch *batch);

/* Computes draft logits with the MTP layer: row t predicts the token after next_tokens[t],
 * which must be known and uploaded. The first draft continues the last hd_model_step() and
 * takes the same batch, with new logit_rows. `again` drafts one token further: row i of
 * the batch continues logits row i of the draft before. It replaces hd_model_logits().
 * Sources: DeepSeek-V3 report, section 2.2; models.md 2.5 and 2.14. */
void hd_model_draft(hd_model *m, const hd_kv *kv, const hd_batch *batch, bool again);

/* DSpark, after hd_model_step() of the same batch: writes the KV entries that the stages
 * have of its rows. */
void hd_model_absorb(hd_model *m, const hd_kv *kv, const hd_batch *batch);

/* Runs the stages over draft blocks (hd_batch_make_block): the first row of a block is the
 * last token, which no step has computed, and the others hold the filler token. The entries of their
 * positions are written again by the steps that compute them. Computes logits of all places
 * without the tokens before; hd_model_draft_place() completes one place. */
void hd_model_draft_block(hd_model *m, const hd_kv *kv, const hd_batch *batch);

/* Logits and confidences of one draft of some sequences, in device memory. */
typedef struct hd_draft_logits {
    const float *logits;     /* [n, vocab] */
    const float *confidence; /* [n] log-odds that it is accepted, if those before are */
} hd_draft_logits;

/* Completes place `place` of the first n of n_seqs blocks: before [n] in
 * device memory are the tokens before the draft. Once per place. */
hd_draft_logits hd_model_draft_place(hd_model *m, int32_t place, const int32_t *before,
                                     int32_t n, int32_t n_seqs);

/* Of the rows of V4.1's Engram tables, which are asked for when a step begins; any thread. A row
 * counts with its scales as two pieces. All 0 where no table is read in place. */
hd_prefetch_stats hd_model_engram_stats(const hd_model *m);

const float *hd_model_logits(const hd_model *m);

/* Returns how many rows of this rank chose each expert since open: [HD_N_ROW_PHASES, n_layers,
 * n_experts] of steps, then [n_mtp, n_experts] of all drafts; zero in dense layers. Device
 * memory; NULL without experts. Padding is not counted. A rank counts the rows that it computes,
 * which etp ranks do with each. */
const int64_t *hd_model_expert_rows(const hd_model *m);
int64_t hd_model_n_expert_rows(const hd_model_spec *spec); /* numbers in it */

/* Returns the experts that the last step chose: [rows, top_k] of each MoE
 * layer, one after the other, then of each draft since. Device memory. */
const int32_t *hd_model_choices(const hd_model *m);
/* Returns how many of them are the step's, without drafts. */
int64_t hd_model_n_choices(const hd_model *m, int32_t rows);
/* Returns the layers of the drafter that run: one MTP layer, or all stages of DSpark. */
int32_t hd_model_n_draft_layers(const hd_model_spec *spec, const hd_weights *w);
/* Returns whether this rank chooses the experts of all rows of its batch and of no others. */
bool hd_model_routes_all(const hd_model *m);
/* On a host: writes the choices of all rows, or of those that this rank owns if it does not choose for all, of a
 * pass of the batch and so many layers, into out [layers, rows, top_k]; the others' stay as they are. They are
 * HD_CHOICE(), of which a sum over ranks keeps the bits. at: where the pass's begin in hd_model_choices(). Returns
 * where the next draft's do. */
int64_t hd_model_own_choices(hd_model *m, const hd_batch *b, int64_t at, int32_t layers,
                             float *out);

#endif
