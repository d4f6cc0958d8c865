/* trainer.h - one model in training: scores sequences, adds up gradients, changes weights.
 *
 * With ranks it is data parallel: each computes a share of the sequences, and keeps masters and
 * moments of a slice of the parameters. Rank 0 is told what to do, as if it were alone, and tells the
 * others. They are threads over the same weights, or processes that hd_trainer_follow().
 *
 * The forward pass is that of serving, on the very weights: a trainer over the weights of an
 * engine computes, bit for bit, the log-probabilities that the engine reported. One thread
 * owns it. On a GPU the passes and the optimizer run there, and masters, moments and new weights stay. */
#ifndef HD_TRAIN_TRAINER_H
#define HD_TRAIN_TRAINER_H

#include "model/backward.h"
#include "train/parameters.h"

typedef struct hd_trainer hd_trainer;

/* Activations that are kept, and rows of a micro-batch, unless somebody says otherwise. */
enum { HD_KEEP_GIB = 2, HD_KEEP_GPU_GIB = 16 };
enum { HD_TRAIN_ROWS = 1024, HD_TRAIN_GPU_ROWS = 16384 };

typedef struct hd_trainer_options {
    const hd_model_spec *spec;
    const hd_weights *weights; /* updatable, one rank; must outlive the trainer, as spec */
    /* these weights if they are to be uploaded to the trainer's device, with which their memory there
     * goes; NULL: they are where it reads them */
    hd_weights *upload;
    const char *backend; /* cpu, cuda or auto (ops.h); NULL: cpu */
    /* of cached entries (ops.h): what attends reads them rounded, and gradients pass unrounded; HD_NONE:
     * float32, which alone a GPU has */
    hd_dtype kv_type;
    int32_t
        rows; /* of one micro-batch, 0: as above, or what the context needs; changes no bit */
    int32_t context;            /* tokens of the longest sequence, at most rows + 1 */
    int32_t threads;            /* of all ranks here; 0: one per core; changes no bit */
    int32_t rank, n_ranks;      /* n_ranks 0: 1; more need a CPU */
    const struct hd_comm *comm; /* to ranks of other processes; NULL: the others are threads */
    uint32_t frozen;            /* of hd_frozen_of() */
    /* of hd_backward_open(), of each rank; -1: as above; changes no bit */
    int64_t keep_bytes;
    bool scores_only;    /* nothing is trained: no masters, moments and gradients */
    bool gradients_only; /* no masters and moments; there are no steps */
    bool shapes_only;    /* nothing is computed: memory is never written (memory.h) */
    bool drafts;         /* the MTP layer is trained; the weights must have one */
    bool detached;  /* the loss of the MTP layer changes that layer alone, and nothing that it
                      shares with the main model */
    double balance; /* change of a router's bias per step, against its load; 0: none */
    /* coefficient of the indexers' own loss, which trains them: the mean over the rows of a call of
     * hd_trainer_accumulate() of KL(p || softmax(score)) over the selected keys, summed over layers, where p
     * is what attention gives them; 0: none. Needs one rank */
    double indexer;
    hd_update_kind matrices;
    hd_optimizer_options optimizer;
} hd_trainer_options;

/* keep_bytes of an option in GiB, -1 where it is not given. */
static inline int64_t hd_keep_bytes(int64_t gib) {
    return gib < 0 ? -1 : gib << 30;
}

hd_status hd_trainer_open(hd_trainer **out, const hd_trainer_options *o, hd_err *err);
void hd_trainer_close(hd_trainer *t); /* NULL is fine */

/* A sequence, and what the loss is of its tokens [first, n). */
typedef struct hd_train_sequence {
    const int32_t *tokens;
    int32_t n;         /* at most the context, at least 2 */
    int32_t first;     /* at least 1 */
    float temperature; /* 0: 1 */
    /* [n - first] derivatives of the loss by -log p of a token, and by the negative entropy of
     * its distribution; hd_trainer_score() does not read them. entropy_factor NULL: zeros */
    const float *factor, *entropy_factor;
    float *logprob, *entropy; /* [n - first] results */
    /* [n - first] the same of the MTP layer's predictions, and their log-probabilities. A token below
     * 2 has none. hd_trainer_accumulate() reads them with `drafts`; NULL: none */
    const float *draft_factor;
    float *draft_logprob;
    /* [n - 1, layers, top_k] experts that are used in place of the routers' selection; NULL: none.
     * All sequences of a call have them, or none. -1 in layers without routers. */
    const int32_t *routes;
    /* likewise [n - 1, layers with an indexer, index_topk] keys in place of the indexers' selection: of
     * each row as many as it sees, at most index_topk, ascending, then -1 */
    const int32_t *keys;
} hd_train_sequence;

/* Computes log-probabilities and entropies. */
hd_status hd_trainer_score(hd_trainer *t, const hd_train_sequence *s, int32_t n, hd_err *err);

/* The same, and adds to the gradients. Their bits depend on the order of the sequences, not on
 * how they are divided into calls and micro-batches. */
hd_status hd_trainer_accumulate(hd_trainer *t, const hd_train_sequence *s, int32_t n,
                                hd_err *err);

/* That mean, without the coefficient, of the rows since the last call. */
double hd_trainer_take_divergence(hd_trainer *t);

/* Completes the gradients since the last step, those of hd_parameters_all(). hd_trainer_step() does
 * it. */
hd_status hd_trainer_finish_gradients(hd_trainer *t, hd_err *err);

/* Changes the masters by the gradients since the last step, and clears those. *u receives the
 * new weights, which the caller applies (hd_weights_update_apply or hd_engine_update_weights)
 * and closes, before the next step; NULL if a gradient was not finite: then nothing changed. On a GPU they
 * are written in place, and whoever reads the host's copy fetches them (hd_weights_fetch). */
hd_status hd_trainer_step(hd_trainer *t, hd_weights_update **u, hd_optimizer_report *report,
                          hd_err *err);

/* The work of a rank other than 0, until rank 0 closes. own: the weights, which are changed in every
 * step; NULL: they are rank 0's. */
hd_status hd_trainer_follow(hd_trainer *t, hd_weights *own, hd_err *err);

/* Since open: rows whose experts or keys were given, and those where others would have been selected. */
hd_replay_count hd_trainer_replayed(const hd_trainer *t);

hd_parameters *hd_trainer_parameters(const hd_trainer *t); /* this rank's */

/* Masters and moments of all ranks, as complete parameters. */
typedef struct hd_whole_parameters {
    hd_parameter *all;
    int32_t n;
    float *block; /* owned, host memory; NULL: they are the trainer's own */
} hd_whole_parameters;
hd_status hd_trainer_gather(hd_trainer *t, hd_whole_parameters *out, hd_err *err);
void hd_whole_parameters_free(hd_whole_parameters *w); /* all zeros are fine */

/* Reads masters and moments of a checkpoint (state.h), which every rank must see at this path. */
hd_status hd_trainer_load(hd_trainer *t, const char *checkpoint, int64_t steps, hd_err *err);

/* Steps so far, those that were skipped included: the schedule's time. */
int64_t hd_trainer_steps(const hd_trainer *t);

hd_stream *hd_trainer_stream(const hd_trainer *t);

#endif
