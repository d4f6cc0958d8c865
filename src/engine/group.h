/* group.h - what the front has of an attention group: its mailbox, and its state as last
 * published; and the router, which chooses the group of a request. */
#ifndef HD_ENGINE_GROUP_H
#define HD_ENGINE_GROUP_H

#include "base/status.h"
#include "engine/engine.h"
#include "moe/record.h"
#include "sched/sched.h"
#include "weights/update.h"

/* What is wanted of the recording of experts, guarded by the lock. */
typedef struct engine_record_wish {
    bool start, stop; /* in this order */
    hd_record_mode mode;
    uint64_t requests, number; /* so far; of the last record that began */
} engine_record_wish;

/* The mailbox: what submitting threads send to a step thread. */
typedef struct engine_mail {
    uint64_t *submitted, *cancelled; /* ids of requests; ids of choices */
    int32_t n_submitted, n_cancelled;
    hd_page_job *jobs, **last_job; /* in their order; last_job: where the next one goes */
    bool flush, retract;
    uint64_t retract_pause;    /* the pause that asked for it last */
    bool rebalance;            /* plan at the next look */
    engine_record_wish record; /* of the first group */
} engine_mail;

/* What the front has of an attention group: all guarded by the lock. */
typedef struct engine_group {
    engine_mail mail;
    hd_engine_stats stats;     /* as of its last step, like the following */
    hd_sched_progress *places; /* [n_places] running choices */
    int32_t n_places;
    int64_t *loads;          /* [n_loads] expert loads as last published, */
    int64_t loads_ns;        /* at this time */
    uint64_t rested_pauses;  /* pauses that its step thread has reached */
    uint64_t rounds;         /* rounds (rounds.c) that it has ended */
    uint64_t records_obeyed; /* requests to record */
    bool idle;               /* it has nothing to do */
    bool parked;             /* its step failed; it waits for recovery */
    int64_t look_ns;         /* when it wants a round though it is idle; 0: never */
    int64_t load;            /* tokens to compute soon, by the router's estimate */
    int32_t n_living;        /* choices submitted to it whose last step output was not taken */
} engine_group;

/* What the first leader tells all leaders before a round. */
typedef struct engine_order {
    uint64_t number, pauses;
    uint64_t weights; /* which ones: see hd_page_job */
    bool paused, closing;
    bool moves; /* of experts come before the step */
    /* The record that is made from this round on; 0: none. Before the step leaders join the rows of the
     * last steps, or sum their counts since a record began, which ends. */
    uint64_t record, record_requests;
    hd_record_mode record_mode;
    bool joins_rows, sums_counts;
    /* In this round nothing is computed, and no rank reads weights until the next one. */
    bool rest;
    bool retract; /* all running requests, first */
    bool renewed; /* the weights are others than in the last round */
} engine_order;

/* What the step thread shall do between two steps: new weights, or memory to give back. */
typedef struct engine_update {
    hd_weights_update *weights; /* NULL: only the version's name changes */
    const char *version;        /* a name that the engine keeps, or NULL */
    uint32_t release, resume;   /* hd_memory bits */
    bool retract;               /* running requests are computed anew */
    bool posted, done;          /* waits for the step thread; was done */
    int64_t begun_ns;           /* when the ranks began to rest */
    hd_err err;
} engine_update;

typedef struct engine_request engine_request; /* engine_internal.h */

/* ---- groups.c; open makes mailboxes for max_living choices, close accepts all zeros ---- */

hd_status engine_groups_open(hd_engine *e, int32_t running, hd_err *err);
void engine_groups_close(hd_engine *e);

bool engine_mail_open(engine_mail *m, int32_t max_living);
void engine_mail_close(engine_mail *m);

/* ---- pages.c: the caller holds the lock ---- */

/* Puts a request into its group's mailbox, or has it wait for pages. server: or NULL. */
void engine_deliver(hd_engine *e, engine_request *r, const hd_request *g);
void engine_stop_fetching(hd_engine *e, engine_request *r); /* if it waits, it is cancelled */

/* Ends all jobs of a list with HD_EPEER, and empties it. */
void engine_fail_jobs(hd_page_job **first);

/* ---- router.c ---- */

typedef struct engine_router engine_router;

hd_status engine_router_open(engine_router **out, const hd_engine *e, int64_t pages,
                             hd_err *err);
void engine_router_close(engine_router *t); /* NULL is fine */

/* Hashes the pages of a prompt: without the lock. */
typedef struct engine_prefix {
    uint64_t *hashes; /* [n] of all tokens up to the end of each page; free() it */
    int32_t n;
} engine_prefix;
hd_status engine_prefix_of(engine_prefix *out, const hd_engine *e, uint64_t salt,
                           const int32_t *tokens, int32_t n_tokens, hd_err *err);

/* Chooses r->group and counts its load there. The caller holds the lock, as for the following. */
void engine_route(hd_engine *e, engine_request *r, const engine_prefix *prefix);
/* The groups are others: chooses again, for the choices that are left. */
void engine_route_again(hd_engine *e, engine_request *r);
/* The prompt is computed; a choice has ended. */
void engine_route_prompt_done(hd_engine *e, engine_request *r);
void engine_route_choice_done(hd_engine *e, engine_request *r);
void engine_router_flush(engine_router *t); /* NULL is fine */

#endif
