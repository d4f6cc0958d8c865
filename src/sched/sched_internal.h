/* sched_internal.h - the scheduler's state of one request, and the queue of waiting
 * requests. */
#ifndef HD_SCHED_SCHED_INTERNAL_H
#define HD_SCHED_SCHED_INTERNAL_H

#include "sched/draft_depth.h"
#include "sched/sched.h"

/* tokens[n_tokens] are known (prompt, then output); tokens[n_done] of them are computed.
 * After prefill exactly one known token is not computed yet; drafts follow it. */
typedef struct sched_seq {
    hd_sched_request r; /* prompt and stop_ids point into memory of this struct */
    uint64_t arrival;
    int32_t *tokens; /* [n_prompt + max_new + HD_MAX_DRAFTS] */
    int32_t n_tokens, n_done;
    int32_t n_cached;
    int32_t chunk;       /* rows of its last chunk; 0: none yet */
    int32_t next_rows;   /* rows that its next chunk was announced to have; 0: it was not */
    sched_drafts drafts; /* made by the last step; they follow the known tokens */
    int32_t want_drafts; /* draft depth for this step */
    int32_t n_reported;  /* prompt log-probabilities, from r.prompt_logprobs_from on */
    sched_acceptance acceptance;
    int32_t slot; /* -1: waiting */
    bool cancelled;
    bool asked, reading;           /* the disk tier was asked for its prefix; reads it */
    struct sched_seq *leader;      /* request whose prefill this one waits for; NULL: none */
    int32_t n_followers;           /* requests that wait for this one's prefill */
    struct sched_seq *prev, *next; /* neighbours in the queue */
} sched_seq;

/* Prompt tokens whose log-probability is still to be reported. It comes from the row before
 * each token. */
static inline int32_t sched_unreported(const sched_seq *q) {
    return q->r.prompt_logprobs_from ? q->r.n_prompt - q->r.prompt_logprobs_from - q->n_reported
                                     : 0;
}

static inline int32_t sched_next_reported(const sched_seq *q) {
    return q->r.prompt_logprobs_from + q->n_reported;
}

typedef struct sched_queue {
    sched_seq *first, *last; /* most important first */
    int32_t n;
} sched_queue;

hd_status sched_seq_open(sched_seq **out, const hd_sched_request *r, hd_err *err);
void sched_seq_close(sched_seq *q);

/* Returns whether a is more important than b: higher priority, then earlier arrival. */
bool sched_before(const sched_seq *a, const sched_seq *b);

void sched_queue_put(sched_queue *w, sched_seq *q);
void sched_queue_take(sched_queue *w, sched_seq *q);
sched_seq *sched_queue_find(const sched_queue *w, uint64_t id);

#endif
