/* sched.h - continuous batching: admits requests, builds steps of decode and prefill rows.
 *
 * One step processes aborts, admits waiting requests, builds a batch, runs it and processes
 * its output. Decode rows come first, then prefill chunks while the row budget lasts
 * (chunked prefill). The scheduler owns tokens and pages and contains no tensor code. The
 * caller passes the time; there are no threads. It is deterministic.
 *
 * Guarantees (tests/sched):
 *   - The KV pools are never exceeded: a request that does not fit waits. Under memory
 *     pressure the least important request is retracted (preempted): it returns to the queue
 *     with all its tokens and resumes with the same text.
 *   - Order: higher priority first, then arrival. No later arrival of the same priority
 *     overtakes a request at admission or in building a step, unless that request follows
 *     another one whose prefill is not complete, or its prefix is being read from the disk, or its
 *     chunk has the rows that were announced for it, or prompts share the rows of a step whose time
 *     has a bound (prompt_ns).
 *   - Every running request whose prefill is complete advances in every step.
 *   - The first of the most important requests is never retracted, so there is always progress.
 *     Only a step that the runner gave up retracts all.
 *   - Every accepted request gets exactly one finishing event. */
#ifndef HD_SCHED_SCHED_H
#define HD_SCHED_SCHED_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "hadal_types.h"
#include "runner/runner.h"
#include "kv/cache.h"
#include "kv/disk_tier.h"

typedef struct hd_sched hd_sched;

typedef struct hd_sched_request {
    uint64_t id;           /* chosen by the caller, unique among unfinished requests */
    const int32_t *prompt; /* [n_prompt], copied */
    int32_t n_prompt;
    /* [n_output], copied: tokens that have been put out already, elsewhere. They are computed like
     * those of a request that was retracted; max_new counts them. */
    const int32_t *output;
    int32_t n_output;
    int32_t max_new;
    int32_t priority; /* higher is admitted first */
    /* Id of a request with the same prompt that computes the prefill for both (n > 1
     * choices). This request is not admitted before that prefill is complete or that request
     * has ended; 0: none. */
    uint64_t follows;
    /* Drafts per step, at most HD_MAX_DRAFTS. HD_DRAFTS_AUTO: draft_depth.h chooses. */
    int32_t draft_tokens;
    /* First prompt token, at least 1, whose log-probability is reported; 0: none. */
    int32_t prompt_logprobs_from;
    bool progress;          /* an event without tokens after each chunk of the prompt */
    uint64_t salt;          /* cached prefixes are shared among equal salts only */
    int64_t queue_until_ns; /* times out if it is not admitted by then; 0: no time limit */
    /* [n_stop], copied: end-of-sequence ids and the caller's stop ids */
    const int32_t *stop_ids;
    int32_t n_stop;
} hd_sched_request;

/* What one step adds to one request. All pointers are valid during the call only. */
typedef struct hd_sched_event {
    uint64_t id;
    hd_step_tokens step;
    hd_prompt_logprobs prompt; /* the next ones of those that are reported; n may be 0 */
    /* with HD_FINISH_ERROR: the status of this request's computation, or of the runner */
    hd_status status;
} hd_sched_event;

typedef struct hd_sched_hooks {
    void *ctx;
    /* A request enters a slot when it is admitted, and leaves it when it is retracted or
     * finished. */
    void (*slot_assigned)(void *ctx, uint64_t id, int32_t slot, const int32_t *tokens,
                          int32_t n);
    void (*slot_released)(void *ctx, uint64_t id, int32_t slot);
    void (*event)(void *ctx, const hd_sched_event *event);
    /* Before the event of a step that sampled tokens: the first n_done positions of the request
     * are computed, all those before its last token. pages: its FULL block table. May be NULL. */
    void (*computed)(void *ctx, uint64_t id, const int32_t *pages, int32_t n_done);
    /* After a step: the first n_done positions are computed, and their whole pages lie in the
     * prefix cache. May be NULL. */
    void (*committed)(void *ctx, uint64_t id, int32_t n_done);
    /* What hd_sched_read() asked for is read. */
    void (*read)(void *ctx, uint64_t id);
} hd_sched_hooks;

typedef struct hd_sched_options {
    hd_cache_options cache; /* max_seqs: requests that run at a time */
    int32_t step_rows;      /* rows of one batch, drafts included */
    int32_t chunk_rows;     /* prefill rows of one request in one step */
    /* Rows of one step that need logits (sampled tokens and prompt log-probabilities); 0: as
     * many as the running requests can sample at. */
    int32_t sample_rows;
    /* While several requests run, prompts get so many rows of a step that it is predicted to take so
     * long, divided among them (pace.h); 0: as many as fit. */
    int64_t prompt_ns;
    int32_t queue_limit;
    /* Positions beyond this step for which decoding requests reserve pages, if pages are
     * free. For runners that launch the next step before this one is processed (overlap
     * schedule). */
    int32_t ahead;
    int32_t max_positions; /* longest sequence, prompt and output */
    /* Drafts are made in blocks of so many: no step has more, and making any needs pages for
     * all. 0: one after the other, up to HD_MAX_DRAFTS. */
    int32_t draft_block;
    /* Bytes of a page copy between the device and host memory. With them the times of steps say
     * where reading a page is sooner than computing it; 0: every page is read. */
    size_t page_bytes[HD_N_KV_GROUPS];
    /* Pages on a disk; the caller's, opened for these pages and closed after the scheduler. NULL:
     * none. The runner runs copies without inputs then. */
    hd_disk_tier *disk;
    /* Other attention groups run steps at the same time: the runner runs also without inputs. */
    bool joins;
} hd_sched_options;

typedef struct hd_sched_stats {
    int32_t waiting, running;
    int64_t steps, rows, finished, retracted, drafted, accepted;
} hd_sched_stats;

/* Opens a scheduler. step_rows and sample_rows must each hold one row and its drafts of
 * every running request. */
hd_status hd_sched_open(hd_sched **out, const hd_sched_options *options,
                        const hd_runner *runner, const hd_sched_hooks *hooks, hd_err *err);
void hd_sched_close(hd_sched *s); /* NULL is fine; unfinished requests get no event */

/* Queues a request. Fails with HD_EINVAL for a request that can never run and with HD_EAGAIN
 * if the queue is full. */
hd_status hd_sched_submit(hd_sched *s, const hd_sched_request *r, hd_err *err);

/* Cancels a request: it finishes with ABORT in the next step, unless it has finished
 * already. */
void hd_sched_cancel(hd_sched *s, uint64_t id);

/* Finishes cancelled and timed-out requests and computes nothing. It is safe while the owner
 * is paused. Every step begins with it. */
void hd_sched_process_aborts(hd_sched *s, int64_t now_ns);

/* Retracts all running requests: they return to the queue and keep their tokens. */
void hd_sched_retract_all(hd_sched *s);

/* Ends every request with HD_FINISH_ERROR, and flushes the cache. */
void hd_sched_fail_all(hd_sched *s, hd_status status);

/* Runs one step. HD_EAGAIN: there was nothing to compute. Any other error: the runner
 * failed, and every request has received its ERROR event. */
hd_status hd_sched_step(hd_sched *s, int64_t now_ns, hd_err *err);

bool hd_sched_idle(const hd_sched *s); /* no request is waiting or running */
hd_sched_stats hd_sched_read_stats(const hd_sched *s);

/* Checks an idle scheduler for leaked slots and pages. HD_EINVAL: some are missing, err says
 * which; all are then freed and the prefix cache is flushed. HD_ENOMEM: no memory for the
 * check. */
hd_status hd_sched_audit(hd_sched *s, hd_err *err);

typedef struct hd_sched_progress {
    uint64_t id;
    /* tokens computed; tokens known, which are prompt and output so far */
    int32_t n_done, n_known;
    int32_t n_cached;
} hd_sched_progress;

/* Returns the i-th running request, most important first; i must be below stats.running. */
hd_sched_progress hd_sched_running(const hd_sched *s, int32_t i);

/* When a step is wanted although the scheduler is idle or nothing can be computed: by the disk
 * tier; 0: not before anything is submitted, or the tier wakes its owner. */
int64_t hd_sched_look_ns(const hd_sched *s);

/* Between steps its owner may move pages of other caches in and out. */
hd_cache *hd_sched_cache(const hd_sched *s);
/* Reads what only the disk tier has of a prefix for which no request waits, also where computing is
 * sooner. id: of no request. Returns false if there is nothing to read; otherwise tokens[n] must stay
 * until hooks.read(). */
bool hd_sched_read(hd_sched *s, uint64_t id, uint64_t salt, const int32_t *tokens, int32_t n,
                   int64_t now_ns);
/* Empties the prefix cache in memory; of the disk tier it waits for all transfers. */
void hd_sched_flush_cache(hd_sched *s);
/* See hd_cache_renew(). weights: a number for those of now, 0: as when it was opened. */
void hd_sched_renew_cache(hd_sched *s, uint64_t weights);

#endif
