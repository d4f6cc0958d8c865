/* sched_internal.h - a request on its way, and the queue it waits in. */
#ifndef HD_SCHED_SCHED_INTERNAL_H
#define HD_SCHED_SCHED_INTERNAL_H

#include "sched/draft_depth.h"
#include "sched/sched.h"

/* tokens[n_tokens] are known (prompt, then output), tokens[n_done] of them are computed. Past
 * the prompt exactly one known token is not computed yet; drafts lie behind it. */
typedef struct sched_seq {
    hd_sched_request r; /* prompt and stop_ids point into this seq's own memory */
    uint64_t arrival;
    int32_t *tokens; /* [n_prompt + max_new + HD_MAX_DRAFTS] */
    int32_t n_tokens, n_done;
    int32_t n_drafts, n_cached;
    int32_t want_drafts; /* in this turn */
    int32_t n_scored;    /* prompt tokens from r.score_from on that have their score */
    sched_acceptance chances;
    int32_t slot; /* -1: waits */
    bool cancelled;
    struct sched_seq *leader;      /* waits for it to pass its prompt; NULL: for nobody */
    int32_t n_followers;           /* that wait for this one */
    struct sched_seq *prev, *next; /* in the queue */
} sched_seq;

typedef struct sched_queue {
    sched_seq *first, *last; /* in order of importance */
    int32_t n;
} sched_queue;

hd_status sched_seq_open(sched_seq **out, const hd_sched_request *r, hd_err *err);
void sched_seq_close(sched_seq *q);

/* Higher priority, then earlier arrival. */
bool sched_before(const sched_seq *a, const sched_seq *b);

void sched_queue_put(sched_queue *w, sched_seq *q);
void sched_queue_take(sched_queue *w, sched_seq *q);
sched_seq *sched_queue_find(const sched_queue *w, uint64_t id);

#endif
