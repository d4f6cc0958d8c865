/* trainer_internal.h - what trainer.c, lead.c, deal.c and crew.c share: one rank's trainer. */
#ifndef HD_TRAIN_TRAINER_INTERNAL_H
#define HD_TRAIN_TRAINER_INTERNAL_H

#include "comm/local.h"
#include "train/exchange.h"
#include "train/trainer.h"

typedef struct train_crew train_crew; /* crew.c */

/* Of the batch's logits rows, and of the MTP layer's: [rows] each, one after another. */
typedef struct loss_rows {
    int32_t *target, *draft_rows, *draft_target;
    float *factor, *entropy_factor, *temperature, *draft_factor;
    float *logprob, *entropy, *draft_logprob, *divergence; /* results */
} loss_rows;

struct hd_trainer {
    hd_trainer_options o;
    hd_ops ops;
    hd_backward_ops back_ops;
    hd_device *device;
    hd_stream *stream;
    hd_optimizer_env optimizer; /* with a stream of its own, for its scratch */
    hd_model *model;
    hd_backward *backward;
    hd_kv *kv;
    hd_batch batch;
    hd_parameters *parameters;
    int64_t steps;
    int32_t page_tokens, seq_pages;
    int32_t *pages;   /* [seq_pages] */
    loss_rows in, at; /* the host's, and the device's */
    int32_t n_drafts; /* of this batch */
    int32_t *routes;  /* [layers, rows of the batch, top_k] */
    int32_t *keys;    /* [layers with an indexer, rows, index_topk]; NULL: never given */
    /* [layers, experts] rows that chose an expert: since the last step, and before a batch */
    int64_t *selected, *selected_before;
    int64_t *expert_rows; /* of hd_model_expert_rows(), on the host */
    int64_t n_selected;
    double divergence; /* of the indexers, a sum over so many rows */
    int64_t divergence_rows;
    train_ranks ranks;
    train_crew *crew;          /* of rank 0, if the others are threads; else NULL */
    hd_replay_count *replayed; /* of rank 0: [n_ranks], what the others counted */
};

/* ---- trainer.c: one rank ---- */

/* Opens a rank. world: that of the threads of one process, or NULL. */
hd_status trainer_open_rank(hd_trainer **out, const hd_trainer_options *o, hd_comm_local *world,
                            hd_err *err);

/* Refuses sequences that the model cannot have. */
hd_status trainer_check(const hd_trainer *t, const hd_train_sequence *s, int32_t n,
                        hd_err *err);

/* Runs this rank's sequences. */
hd_status trainer_run(hd_trainer *t, const hd_train_sequence *s, int32_t n, bool accumulates,
                      hd_err *err);

int32_t trainer_pages(const hd_trainer *t);  /* of the pool of each KV group */
int32_t trainer_layers(const hd_trainer *t); /* that have pages */

/* ---- crew.c: the other ranks as threads ---- */

hd_status train_crew_open(train_crew **out, const hd_trainer_options *o, hd_err *err);
hd_comm_local *train_crew_world(const train_crew *c); /* NULL of NULL */

/* Threads of rank o->rank, of those of the process. */
int32_t train_crew_threads(const hd_trainer_options *o);

/* NULL is fine. */
void train_crew_abort(train_crew *c); /* rank 0 has not opened */
void train_crew_close(train_crew *c); /* after the last order or an abort */

/* ---- lead.c ---- */

typedef struct trainer_text {
    char text[200];
} trainer_text;

/* Why a rank ends the work of all. */
trainer_text trainer_reason(int32_t rank, const hd_err *err);

/* Waits until every rank has opened. */
hd_status trainer_await_ranks(hd_trainer *t, hd_err *err);

/* Rank 0 tells the others that no order follows. */
void trainer_dismiss(hd_trainer *t);

#endif
