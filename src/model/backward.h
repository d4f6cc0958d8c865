/* backward.h - the backward pass of a model: from the loss at its logits to the gradients of its
 * parameters.
 *
 * The forward pass is hd_model_step()'s own: the same stages, operators and pages. It keeps the
 * residual at the input of every block, and where memory allows a block's activations. Backwards
 * each other block is computed again from there, to the same bits, and then its gradients. Every sequence of a batch is complete: it starts at
 * position 0 in empty pages. Formulas: docs/training.md. */
#ifndef HD_MODEL_BACKWARD_H
#define HD_MODEL_BACKWARD_H

#include "model/gradients.h"
#include "model/model.h"
#include "ops/backward.h"

typedef struct hd_backward hd_backward;

typedef struct hd_backward_options {
    /* the activations of the last blocks, as many as these bytes hold, are kept and not computed again: no
     * bit depends on it */
    int64_t keep_bytes;
    bool drafts;  /* losses may be those of the MTP layer, too, which the weights must have */
    bool indexer; /* and of the indexers, which the model must have */
} hd_backward_options;

/* Opens the backward pass of a model with one rank, one micro-batch, float32 activations and
 * MLA in the absorbed form; others are refused. m and ops must outlive it. */
hd_status hd_backward_open(hd_backward **out, hd_model *m, const hd_backward_ops *ops,
                           const hd_backward_options *o, hd_err *err);
void hd_backward_close(hd_backward *b); /* NULL is fine */

size_t hd_backward_bytes(const hd_backward *b); /* device memory */

/* The loss of the MTP layer, whose row t predicts the token after next_tokens[t]; device memory
 * unless it says otherwise. */
typedef struct hd_draft_loss {
    /* [n] of the batch, ascending; NULL: the layer is left out. With n 0 its experts' loads count */
    const int32_t *rows;
    const int32_t *host_rows; /* in host memory */
    const int32_t *target;
    const float *factor; /* derivative of the loss by -log p(target) */
    float *logprob;      /* receive log p(target) */
    int32_t n;
    bool detached; /* the main model, embedding and head included, gets no gradient */
} hd_draft_loss;

/* What the loss is of the logits rows of a batch; device memory, [n_logits]. */
typedef struct hd_loss {
    const int32_t *target;
    const float *factor;         /* derivative of the loss by -log p(target) */
    const float *entropy_factor; /* derivative by the negative entropy; NULL: zeros */
    const float *temperature;    /* NULL: ones */
    float *logprob, *entropy;    /* receive log p(target) and the entropy */
    hd_draft_loss drafts;        /* of hd_backward_step(); needs an MTP layer */
    /* [layers, rows, top_k] experts that are used in place of the routers' selection, forward and back;
     * NULL: none. Those of dense and hash layers are not read; the others exist. */
    const int32_t *routes;
    /* likewise [layers with an indexer, rows, index_topk] keys that are used in place of the indexers'
     * selection, ascending, then -1 */
    const int32_t *keys;
    /* of the indexers' loss, factor times the sum over rows and layers of KL(p || softmax(score)) over the
     * selected keys, where p is what attention gives them: gradients of the indexers alone; 0: none */
    float indexer;
    float *
        divergence; /* [rows] receives these of each row, summed over layers; needed with indexer */
} hd_loss;

/* Rows of MoE layers whose experts were given, rows of indexers whose keys were, and those of them for
 * which others would have been selected, since open. */
typedef struct hd_replay_count {
    int64_t routed, other_experts, indexed, other_keys;
} hd_replay_count;
hd_replay_count hd_backward_replayed(const hd_backward *b);

/* Queues the forward pass of an uploaded batch alone, for log-probabilities and entropies. Of
 * the loss, factor and entropy_factor are not read. */
void hd_backward_score(hd_backward *b, const hd_kv *kv, hd_batch *batch, const hd_loss *loss);

/* Queues forward and backward pass of an uploaded batch, and adds to the gradients. Log
 * probabilities are those of hd_backward_score(), bit for bit. What the MTP layer shares with the
 * main model is complete after hd_gradients_join_drafts(). */
void hd_backward_step(hd_backward *b, const hd_kv *kv, hd_batch *batch, const hd_loss *loss,
                      const hd_gradients *g);

#endif
