/* sched.h - who runs in this turn.
 *
 * One turn listens, admits, builds a step, runs it and settles: decode rows first, then chunks
 * of prompts while the row budget lasts. The scheduler owns tokens and pages and knows no
 * tensors; time is an argument; there are no threads. All of it is deterministic.
 *
 * Promises (tests/sched):
 *   - the KV pools are never exceeded: a request that does not fit waits, and under pressure
 *     the least important one is retracted: it goes back to the queue with all its tokens and
 *     resumes with the same text;
 *   - order: higher priority first, then arrival; nobody is overtaken by a later arrival of the
 *     same priority, at admission or in building a step, unless it follows a request that is
 *     not past its prompt yet;
 *   - every running request that is past its prompt advances in every turn;
 *   - the first of the most important requests is never retracted, so there is always progress;
 *   - every accepted request gets exactly one finishing event. */
#ifndef HD_SCHED_SCHED_H
#define HD_SCHED_SCHED_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "runner/runner.h"
#include "kv/cache.h"

typedef struct hd_sched hd_sched;

typedef enum hd_finish {
    HD_FINISH_NONE,
    HD_FINISH_STOP,    /* a stop id, which is the last token of the event */
    HD_FINISH_LENGTH,  /* max_new tokens */
    HD_FINISH_ABORT,   /* cancelled */
    HD_FINISH_TIMEOUT, /* waited too long in the queue */
    HD_FINISH_ERROR    /* the device or this request's computation failed */
} hd_finish;

enum { HD_SCHED_AUTO_DRAFTS = -1 };

typedef struct hd_sched_request {
    uint64_t id;           /* the caller's, unique among the living */
    const int32_t *prompt; /* [n_prompt], copied */
    int32_t n_prompt;
    int32_t max_new;
    int32_t priority;        /* higher first */
    uint64_t follows;        /* id of a request of the same prompt that shall compute it first;
                                not admitted before that has, or has ended; 0: none */
    int32_t draft_tokens;    /* at most HD_MAX_DRAFTS; HD_SCHED_AUTO_DRAFTS: as many as pay */
    int32_t score_from;      /* prompt tokens from here on, at least 1, are scored; 0: none */
    uint64_t salt;           /* prefixes are shared among equal salts only */
    int64_t queue_until_ns;  /* give up when not admitted by then; 0: wait for ever */
    const int32_t *stop_ids; /* [n_stop], copied: end of sequence and the user's own */
    int32_t n_stop;
} hd_sched_request;

/* Tokens of one request, as they become final; what is pointed at is valid during the call. */
typedef struct hd_sched_event {
    uint64_t id;
    const int32_t *tokens;  /* [n] */
    const float *logprobs;  /* [n] */
    const int32_t *top_ids; /* [n, HD_MAX_TOP_LOGPROBS] or NULL, as in hd_seq_output */
    const float *top_logprobs;
    int32_t n;
    const float *scores; /* [n_score] of prompt tokens score_at, score_at + 1, ... */
    const int32_t *score_top_ids;
    const float *score_top_logprobs;
    int32_t n_prompt_logprobs, score_at;
    hd_finish finish;              /* NONE: more will follow */
    hd_status status;              /* ERROR: of this request's computation, or of the runner */
    int32_t n_cached;              /* prompt tokens that were not computed again */
    int32_t n_accepted, n_drafted; /* of this event's step */
} hd_sched_event;

typedef struct hd_sched_hooks {
    void *ctx;
    /* A request got a running slot, or gives it up (retracted or finished). */
    void (*enter)(void *ctx, uint64_t id, int32_t slot, const int32_t *tokens, int32_t n);
    void (*leave)(void *ctx, uint64_t id, int32_t slot);
    void (*event)(void *ctx, const hd_sched_event *event);
} hd_sched_hooks;

typedef struct hd_sched_options {
    hd_cache_options cache; /* n_leases: requests that run at a time */
    int32_t step_rows;      /* rows of one step, drafts included */
    int32_t chunk_rows;     /* prompt rows of one request in one step */
    int32_t sample_rows;    /* rows of one step that choose or score tokens; 0: as many as the
                               running requests may choose at */
    int32_t queue_limit;
    int32_t ahead; /* positions by which the pages of decoding requests reach further than the
                      step needs, where there are pages: for runners that are a step ahead */
    int32_t max_positions; /* longest sequence, prompt and output */
} hd_sched_options;

typedef struct hd_sched_stats {
    int32_t waiting, running;
    int64_t steps, rows, finished, retracted, drafted, accepted;
} hd_sched_stats;

/* step_rows must leave room for one row and its drafts of every running request, and so must
 * choice_rows. */
hd_status hd_sched_open(hd_sched **out, const hd_sched_options *options,
                        const hd_runner *runner, const hd_sched_hooks *hooks, hd_err *err);
void hd_sched_close(hd_sched *s); /* NULL is fine; living requests get no event */

/* Refuses what can never run (HD_EINVAL) and a full queue (HD_EAGAIN). */
hd_status hd_sched_submit(hd_sched *s, const hd_sched_request *r, hd_err *err);

/* The request finishes with ABORT at the next turn, unless it has finished. */
void hd_sched_cancel(hd_sched *s, uint64_t id);

/* Ends what was cancelled or waited too long, and computes nothing: all that may happen while
 * the owner pauses. A turn begins with it. */
void hd_sched_process_aborts(hd_sched *s, int64_t now_ns);

/* All that runs goes back to the queue and keeps its tokens. */
void hd_sched_retract_all(hd_sched *s);

/* One turn. HD_EAGAIN: nothing could be computed. Any other error: the runner failed, and every
 * request has got its ERROR event. */
hd_status hd_sched_step(hd_sched *s, int64_t now_ns, hd_err *err);

bool hd_sched_idle(const hd_sched *s); /* nothing waits and nothing runs */
hd_sched_stats hd_sched_read_stats(const hd_sched *s);

/* While it is idle: all slots and pages must be back. HD_EINVAL: they are not, err says what is
 * missing; then all are taken back, and cached prefixes are forgotten. HD_ENOMEM: no memory to
 * look. */
hd_status hd_sched_audit(hd_sched *s, hd_err *err);

typedef struct hd_sched_progress {
    uint64_t id;
    int32_t n_done, n_known; /* tokens computed, of those known: prompt and output so far */
    int32_t n_cached;
} hd_sched_progress;

/* The i-th running request, the most important first; i is below stats.running. */
hd_sched_progress hd_sched_running(const hd_sched *s, int32_t i);

const hd_cache *hd_sched_cache(const hd_sched *s);
void hd_sched_flush_cache(hd_sched *s);

#endif
