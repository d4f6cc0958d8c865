/* sched.c - one scheduler step: process aborts, admit, build the batch, run it, process
 * output.
 *
 * Running requests are kept in order of importance, so building a batch and choosing a
 * request to retract walk one array. A step does not allocate. */
#include "sched/sched.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "sched/load_costs.h"
#include "sched/pace.h"
#include "sched/sched_internal.h"

struct hd_sched {
    hd_sched_options o;
    hd_runner runner;
    hd_sched_hooks hooks;
    hd_cache *cache;
    sched_queue waiting;
    sched_seq **running; /* [n_running] most important first */
    int32_t n_running;
    int32_t *free_slots;
    int32_t n_free_slots;
    uint64_t arrivals;
    bool blocked; /* the first waiting request did not fit, and no request has left since */
    /* free or evictable pages required before admission is tried again */
    int32_t wanted[HD_N_KV_GROUPS];
    bool cancels;          /* a request was cancelled since the last step */
    int64_t next_deadline; /* no waiting request times out earlier */
    hd_seq_input *inputs;
    sched_seq **input_seqs; /* the request of each sequence input */
    hd_seq_output *outputs;
    int32_t n_inputs, n_rows;
    int32_t n_logits;      /* rows of the step that need logits */
    int32_t n_prompt_rows; /* of those, rows of prompts */
    int32_t depth;         /* of the step: drafts of a sequence at most */
    sched_pace pace;
    int32_t *wanted_rows; /* [max_seqs] of prompts */
    sched_draft_depth drafts;
    bool timed; /* the last step was decode only, and its duration counts for the draft depth */
    int64_t last_ns;
    sched_load_costs costs;
    bool copied;   /* copies were queued since the disk tier looked last */
    bool measured; /* the time since last_ns is that of a step, with so many copies before it */
    bool rebuilds; /* the step has rows that rebuild windows */
    int32_t n_copied[HD_N_KV_GROUPS];
    hd_sched_stats stats;
};

static int32_t max_drafts(const hd_sched *s) {
    return s->o.draft_block ? s->o.draft_block : HD_MAX_DRAFTS;
}

/* Positions beyond the rows that making this many drafts needs pages for. */
static int32_t draft_positions(const hd_sched *s, int32_t drafts) {
    return drafts ? hd_max_i32(drafts, s->o.draft_block) : 0;
}

/* The longest request must fit by itself; otherwise it could be retracted for ever. */
static hd_status check_options(const hd_sched_options *o, hd_err *err) {
    const hd_cache_options *c = &o->cache;
    /* rows of one request in a step, of a prompt or with drafts, and the next step's drafts */
    const int32_t rows = hd_max_i32(o->chunk_rows, HD_MAX_STEP_TOKENS) + HD_MAX_DRAFTS;
    const int32_t near = (int32_t)hd_ceil_div((int64_t)c->lookback + rows, c->page_tokens) + 1;
    if (o->chunk_rows < 1 || c->max_seqs < 1) {
        return HD_FAIL(err, HD_EINVAL, "chunks of %d rows and %d running requests: at least 1",
                       o->chunk_rows, c->max_seqs);
    }
    if (o->step_rows < c->max_seqs * HD_MAX_STEP_TOKENS) {
        return HD_FAIL(err, HD_EINVAL,
                       "a step of %d rows cannot hold %d running requests with %d drafts each",
                       o->step_rows, c->max_seqs, HD_MAX_DRAFTS);
    }
    if (o->sample_rows && o->sample_rows < c->max_seqs * HD_MAX_STEP_TOKENS) {
        return HD_FAIL(err, HD_EINVAL, "%d running requests cannot choose at %d rows",
                       c->max_seqs, o->sample_rows);
    }
    if (c->n_pages[HD_KV_FULL] < c->seq_pages) {
        return HD_FAIL(err, HD_EINVAL, "%d kv pages cannot hold one sequence of %d pages",
                       c->n_pages[HD_KV_FULL], c->seq_pages);
    }
    if (c->lookback && c->n_pages[HD_KV_WINDOW] < hd_min_i32(near, c->seq_pages)) {
        return HD_FAIL(err, HD_EINVAL,
                       "%d window pages cannot hold the rows of one request, which need %d",
                       c->n_pages[HD_KV_WINDOW], near);
    }
    return HD_OK;
}

static void free_all_slots(hd_sched *s) {
    const int32_t n = s->o.cache.max_seqs;
    for (int32_t i = 0; i < n; i++) s->free_slots[i] = n - 1 - i;
    s->n_free_slots = n;
}

hd_status hd_sched_open(hd_sched **out, const hd_sched_options *options,
                        const hd_runner *runner, const hd_sched_hooks *hooks, hd_err *err) {
    const size_t n = (size_t)options->cache.max_seqs;
    *out = NULL;
    HD_TRY(check_options(options, err));
    hd_sched *s = calloc(1, sizeof *s);
    if (!s) return HD_FAIL(err, HD_ENOMEM, "no memory for a scheduler");
    s->o = *options;
    if (!s->o.sample_rows) s->o.sample_rows = (int32_t)n * HD_MAX_STEP_TOKENS;
    sched_draft_depth_init(&s->drafts, max_drafts(s));
    s->pace.budget_ns = options->prompt_ns;
    s->costs.least_rows = options->cache.page_tokens;
    memcpy(s->costs.page_bytes, options->page_bytes, sizeof s->costs.page_bytes);
    s->runner = *runner;
    s->hooks = *hooks;
    s->running = calloc(n, sizeof(sched_seq *));
    s->input_seqs = calloc(n, sizeof(sched_seq *));
    s->free_slots = calloc(n, sizeof *s->free_slots);
    s->inputs = calloc(n, sizeof *s->inputs);
    s->outputs = calloc(n, sizeof *s->outputs);
    s->wanted_rows = calloc(n, sizeof *s->wanted_rows);
    hd_status st = HD_OK;
    if (!s->running || !s->input_seqs || !s->free_slots || !s->inputs || !s->outputs ||
        !s->wanted_rows) {
        st = HD_FAIL(err, HD_ENOMEM, "no memory for %zu running requests", n);
    }
    if (s->o.disk) s->o.cache.name_key = hd_disk_tier_key(s->o.disk);
    if (st == HD_OK) st = hd_cache_open(&s->cache, &s->o.cache, err);
    if (st != HD_OK) {
        hd_sched_close(s);
        return st;
    }
    if (s->o.disk) hd_disk_tier_attach(s->o.disk, s->cache);
    free_all_slots(s);
    *out = s;
    return HD_OK;
}

void hd_sched_close(hd_sched *s) {
    if (!s) return;
    for (sched_seq *q = s->waiting.first, *next; q; q = next) {
        next = q->next;
        sched_seq_close(q);
    }
    for (int32_t i = 0; i < s->n_running; i++) sched_seq_close(s->running[i]);
    if (s->o.disk && s->cache) hd_disk_tier_stop(s->o.disk);
    hd_cache_close(s->cache);
    free(s->running);
    free(s->input_seqs);
    free(s->free_slots);
    free(s->inputs);
    free(s->outputs);
    free(s->wanted_rows);
    free(s);
}

/* ---- submitting, finishing, retracting ---- */

static sched_seq *find(const hd_sched *s, uint64_t id) {
    for (int32_t i = 0; i < s->n_running; i++) {
        if (s->running[i]->r.id == id) return s->running[i];
    }
    return sched_queue_find(&s->waiting, id);
}

/* Followers can share the leader's pages as soon as its prefill is complete. */
static void follow(sched_seq *q, sched_seq *leader) {
    if (!leader || leader->n_tokens > leader->r.n_prompt) return;
    q->leader = leader;
    leader->n_followers++;
}

static void release_followers(hd_sched *s, sched_seq *leader) {
    for (sched_seq *q = s->waiting.first; q && leader->n_followers; q = q->next) {
        if (q->leader != leader) continue;
        q->leader = NULL;
        leader->n_followers--;
        s->blocked = false;
    }
}

/* The earlier of two deadlines; 0 is none. */
static int64_t earlier(int64_t a, int64_t b) {
    if (!a || !b) return a ? a : b;
    return a < b ? a : b;
}

hd_status hd_sched_submit(hd_sched *s, const hd_sched_request *r, hd_err *err) {
    const int64_t longest = (int64_t)r->n_prompt + r->max_new;
    const int64_t room = (int64_t)s->o.cache.seq_pages * s->o.cache.page_tokens - HD_MAX_DRAFTS;
    const int64_t limit = room < s->o.max_positions ? room : s->o.max_positions;
    if (r->n_prompt < 1) return HD_FAIL(err, HD_EINVAL, "the prompt is empty");
    if (r->max_new < 1)
        return HD_FAIL(err, HD_EINVAL, "max_tokens is %d; at least 1", r->max_new);
    if (r->n_output < 0 || r->n_output >= r->max_new) {
        return HD_FAIL(err, HD_EINVAL, "%d of %d output tokens are there already", r->n_output,
                       r->max_new);
    }
    if (longest > limit) {
        return HD_FAIL(err, HD_EINVAL,
                       "%d prompt tokens and %d output tokens exceed the context of %lld",
                       r->n_prompt, r->max_new, (long long)limit);
    }
    if (s->waiting.n >= s->o.queue_limit) {
        return HD_FAIL(err, HD_EAGAIN, "the queue is full: %d requests wait", s->waiting.n);
    }
    sched_seq *q;
    HD_TRY(sched_seq_open(&q, r, err));
    q->arrival = s->arrivals++;
    q->r.draft_tokens = hd_min_i32(q->r.draft_tokens, max_drafts(s));
    if (r->follows) follow(q, find(s, r->follows));
    if (!s->waiting.last || sched_before(q, s->waiting.last)) s->blocked = false;
    sched_queue_put(&s->waiting, q);
    s->next_deadline = earlier(s->next_deadline, q->r.queue_until_ns);
    return HD_OK;
}

void hd_sched_cancel(hd_sched *s, uint64_t id) {
    sched_seq *q = find(s, id);
    if (!q) return;
    q->cancelled = true;
    s->cancels = true;
}

/* Frees the slot and the pages of a request; its committed pages stay in the prefix cache. */
static void slot_released(hd_sched *s, sched_seq *q, bool end_of_step) {
    int32_t i = 0;
    while (s->running[i] != q) i++;
    s->n_running--;
    memmove(s->running + i, s->running + i + 1,
            (size_t)(s->n_running - i) * sizeof(sched_seq *));
    hd_cache_release(s->cache, q->slot, end_of_step);
    s->hooks.slot_released(s->hooks.ctx, q->r.id, q->slot);
    s->free_slots[s->n_free_slots++] = q->slot;
    q->slot = -1;
    q->n_done = 0;
    q->drafts = (sched_drafts){0};
    q->next_rows = 0;
    s->blocked = false;
}

static void finish(hd_sched *s, sched_seq *q, hd_sched_event *e) {
    const hd_finish_reason why = e->step.finish_reason;
    assert(why != HD_FINISH_NONE);
    if (q->slot >= 0) {
        slot_released(s, q, why == HD_FINISH_STOP || why == HD_FINISH_LENGTH);
    } else {
        sched_queue_take(&s->waiting, q);
        s->blocked = false; /* the first waiting request may be another one now */
    }
    if (q->leader) q->leader->n_followers--;
    if (q->reading) hd_disk_tier_cancel(s->o.disk, q->r.id);
    release_followers(s, q);
    s->stats.finished++;
    s->hooks.event(s->hooks.ctx, e);
    sched_seq_close(q);
}

/* status: of the request's computation, if that is the reason */
static void finish_without_tokens(hd_sched *s, sched_seq *q, hd_finish_reason reason,
                                  hd_status status) {
    hd_sched_event e = {
        .id = q->r.id,
        .step = {.finish_reason = reason, .n_cached = q->n_cached},
        .status = status
    };
    finish(s, q, &e);
}

static void fail(hd_sched *s, sched_seq *q, hd_status status) {
    finish_without_tokens(s, q, HD_FINISH_ERROR, status);
}

/* Scans the queue only if a request is cancelled or times out, so that a full queue does not
 * slow every step. */
static void process_aborts(hd_sched *s, int64_t now_ns) {
    if (!s->cancels && (!s->next_deadline || now_ns < s->next_deadline)) return;
    s->cancels = false;
    s->next_deadline = 0;
    for (sched_seq *q = s->waiting.first, *next; q; q = next) {
        next = q->next;
        if (q->cancelled) {
            finish_without_tokens(s, q, HD_FINISH_ABORT, HD_OK);
        } else if (q->r.queue_until_ns && now_ns >= q->r.queue_until_ns) {
            finish_without_tokens(s, q, HD_FINISH_TIMEOUT, HD_OK);
        } else {
            s->next_deadline = earlier(s->next_deadline, q->r.queue_until_ns);
        }
    }
    for (int32_t i = s->n_running - 1; i >= 0; i--) {
        sched_seq *q = s->running[i];
        if (q->cancelled) finish_without_tokens(s, q, HD_FINISH_ABORT, HD_OK);
    }
}

void hd_sched_process_aborts(hd_sched *s, int64_t now_ns) {
    s->timed = s->measured = false;
    process_aborts(s, now_ns);
}

static void retract(hd_sched *s, sched_seq *q) {
    slot_released(s, q, true); /* it continues where it ended */
    q->r.queue_until_ns = 0;   /* admitted: the queue timeout no longer applies */
    q->asked = false;
    sched_queue_put(&s->waiting, q);
    s->stats.retracted++;
}

void hd_sched_retract_all(hd_sched *s) {
    while (s->n_running) retract(s, s->running[s->n_running - 1]);
}

/* ---- admission ---- */

static int32_t pages_for(const hd_sched *s, int32_t tokens) {
    return (int32_t)hd_ceil_div(tokens, s->o.cache.page_tokens);
}

/* Pages of one KV group that are free or evictable. */
static int32_t room(const hd_sched *s, hd_kv_group group) {
    const hd_cache_stats c = hd_cache_read_stats(s->cache);
    return c.free[group] + c.evictable[group];
}

/* Counts the pages that are missing to admit q: all its known tokens, one page for growth,
 * and one page for growth of every running request. An admission must not cause a retraction
 * at once. first: position from which on it is computed, before `hit` where a window is rebuilt. */
static void count_missing(const hd_sched *s, const sched_seq *q, int32_t hit, int32_t first,
                          int32_t missing[HD_N_KV_GROUPS]) {
    const int32_t all = pages_for(s, q->n_tokens), size = s->o.cache.page_tokens;
    const int32_t known = all - hit / size;
    const int32_t chunk = hd_min_i32(all - first / size, pages_for(s, s->o.chunk_rows) + 1);
    missing[HD_KV_FULL] = known + 1 + s->n_running - room(s, HD_KV_FULL);
    missing[HD_KV_WINDOW] =
        s->o.cache.lookback ? chunk + 1 + s->n_running - room(s, HD_KV_WINDOW) : 0;
}

/* A request that runs alone always fits. */
static bool fits(const hd_sched *s, const int32_t missing[HD_N_KV_GROUPS]) {
    return s->n_running == 0 || (missing[HD_KV_FULL] <= 0 && missing[HD_KV_WINDOW] <= 0);
}

/* An admission attempt matches the whole prompt, so it is not repeated until pages are free. */
static void block(hd_sched *s, const int32_t missing[HD_N_KV_GROUPS]) {
    s->blocked = true;
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        s->wanted[l] = missing[l] > 0 ? room(s, (hd_kv_group)l) + missing[l] : 0;
    }
}

static bool still_blocked(const hd_sched *s) {
    return s->blocked && (room(s, HD_KV_FULL) < s->wanted[HD_KV_FULL] ||
                          room(s, HD_KV_WINDOW) < s->wanted[HD_KV_WINDOW]);
}

/* Tokens whose cached entries a request can use: prompt log-probabilities need computed rows. */
static int32_t usable_tokens(const sched_seq *q) {
    return sched_unreported(q) > 0 ? sched_next_reported(q) : q->n_tokens;
}

static void admit_one(hd_sched *s, sched_seq *q) {
    const int32_t slot = s->free_slots[s->n_free_slots - 1];
    const int32_t usable = usable_tokens(q);
    const int64_t declined = hd_cache_read_stats(s->cache).declined;
    int32_t hit, missing[HD_N_KV_GROUPS] = {0};
    if (hd_cache_resume(s->cache, slot, q->r.salt, q->tokens, usable, q->r.n_prompt, &hit) !=
        HD_OK) {
        missing[hd_cache_lacking(s->cache)] = 1;
        block(s, missing);
        return;
    }
    if (hd_cache_read_stats(s->cache).declined > declined) sched_load_costs_declined(&s->costs);
    count_missing(s, q, hit, hd_cache_first(s->cache, slot), missing);
    if (!fits(s, missing)) {
        hd_cache_release(s->cache, slot, false);
        block(s, missing);
        return;
    }
    s->n_free_slots--;
    sched_queue_take(&s->waiting, q);
    q->slot = slot;
    q->n_done = hd_cache_first(s->cache, slot);
    if (q->n_tokens == q->r.n_prompt) q->n_cached = hit;
    int32_t at = s->n_running++;
    for (; at > 0 && sched_before(q, s->running[at - 1]); at--) {
        s->running[at] = s->running[at - 1];
    }
    s->running[at] = q;
    s->hooks.slot_assigned(s->hooks.ctx, q->r.id, slot, q->tokens, q->n_tokens);
}

/* Returns the first waiting request that waits for no prefill of another and for no read. */
static sched_seq *next_to_admit(const hd_sched *s) {
    sched_seq *q = s->waiting.first;
    while (q && (q->leader || q->reading)) q = q->next;
    return q;
}

/* Asks the disk tier for the prefixes of the first requests that wait, each once. */
static void ask_disk(hd_sched *s) {
    enum { FIRST = 16 };
    sched_seq *q = s->waiting.first;
    for (int i = 0; i < FIRST && q && hd_disk_tier_has_room(s->o.disk); i++, q = q->next) {
        if (q->leader || q->asked) continue;
        q->asked = true;
        q->reading = hd_disk_tier_ask(s->o.disk, q->r.id, q->r.salt, q->tokens,
                                      usable_tokens(q), s->costs.row_ns, s->last_ns);
    }
}

/* Ends the waiting of those whose prefix is read. */
static void take_read(hd_sched *s) {
    uint64_t id;
    while (s->o.disk && (id = hd_disk_tier_ended(s->o.disk)) != 0) {
        sched_seq *q = sched_queue_find(&s->waiting, id);
        s->blocked = false;
        if (q)
            q->reading = false;
        else
            s->hooks.read(s->hooks.ctx, id);
    }
}

/* Takes what the disk tier has done since the last step. */
static void step_disk(hd_sched *s) {
    if (!s->o.disk) return;
    int32_t n_copies;
    hd_cache_copies(s->cache, &n_copies);
    if (n_copies == 0) hd_disk_tier_step(s->o.disk, s->last_ns, s->copied);
    s->copied = s->copied && n_copies;
    take_read(s);
    ask_disk(s);
    if (n_copies == 0) hd_disk_tier_step(s->o.disk, s->last_ns, false);
}

static void admit(hd_sched *s) {
    s->blocked = still_blocked(s);
    while (!s->blocked && s->n_free_slots) {
        sched_seq *q = next_to_admit(s);
        if (!q) return;
        admit_one(s, q);
    }
}

/* ---- building the batch ---- */

/* Reserves pages for q's next rows and retracts less important requests while there are too
 * few. Returns false if q itself is the least important and was retracted. */
static bool make_room(hd_sched *s, sched_seq *q, int32_t n_tokens) {
    while (hd_cache_extend(s->cache, q->slot, n_tokens) != HD_OK) {
        sched_seq *victim = s->running[s->n_running - 1];
        retract(s, victim);
        if (victim == q) return false;
    }
    return true;
}

static void add_input(hd_sched *s, sched_seq *q, int32_t rows, int32_t n_sample,
                      int32_t n_prompt_logprobs) {
    const int32_t slot = q->slot, want_drafts = n_sample ? q->want_drafts : 0;
    const hd_kv_ends ends = hd_cache_ends(s->cache, slot);
    s->rebuilds |= q->n_done < ends.rebuilt;
    s->input_seqs[s->n_inputs] = q;
    s->inputs[s->n_inputs++] = (hd_seq_input){
        .slot = slot,
        .tokens = q->tokens + q->n_done,
        .n = rows,
        .start = q->n_done,
        .n_sample = n_sample,
        .n_prompt_logprobs = n_prompt_logprobs,
        .after = n_sample ? -1 : q->tokens[q->n_done + rows],
        .want_drafts = want_drafts,
        .left = q->r.n_prompt + q->r.max_new - q->n_tokens,
        .ends = ends,
        .pages = {hd_cache_block_table(s->cache, slot, HD_KV_FULL),
                  hd_cache_block_table(s->cache, slot, HD_KV_WINDOW)},
        .n_pages = pages_for(s, q->n_done + rows + draft_positions(s, want_drafts))
    };
    s->n_rows += rows;
    s->n_logits += n_sample + n_prompt_logprobs;
}

/* Chooses how many of the drafts that were made are verified. Tokens beyond max_new would be
 * dropped. */
static void choose_verified(hd_sched *s, sched_seq *q) {
    const int32_t left = q->r.n_prompt + q->r.max_new - q->n_tokens;
    const bool fixed = q->r.draft_tokens != HD_DRAFTS_AUTO;
    const int32_t kept =
        fixed ? q->drafts.made : sched_draft_depth_keep(&s->drafts, &q->drafts);
    s->timed &= kept == q->drafts.made;
    q->drafts.verified = hd_min_i32(kept, left - 1);
}

/* Adds a decode row and its drafts. Pages are reserved for the drafts of the next step too. */
static void add_decode(hd_sched *s, sched_seq *q) {
    choose_verified(s, q);
    const int32_t rows = 1 + q->drafts.verified;
    const int32_t end = q->n_done + rows + draft_positions(s, q->want_drafts);
    if (make_room(s, q, end)) add_input(s, q, rows, rows, 0);
}

/* Returns how many of the next `rows` prefill rows report a prompt log-probability. */
static int32_t reported_by(const sched_seq *q, int32_t rows) {
    const int32_t left = sched_unreported(q);
    /* rows before the first reported token */
    const int32_t before = sched_next_reported(q) - 1 - q->n_done;
    return left > 0 ? hd_max_i32(0, hd_min_i32(left, rows - before)) : 0;
}

/* Steps that are launched ahead have as many rows of every sequence that samples as the deepest drafts
 * need. Returns how many the inputs lack. */
static int32_t lacking_rows(const hd_sched *s) {
    int32_t rows = 0;
    if (!s->o.ahead) return 0;
    for (int32_t i = 0; i < s->n_inputs; i++) {
        rows += s->depth - hd_max_i32(s->inputs[i].n_sample - 1, 0);
    }
    return rows;
}

/* Rows that a prompt may have in the step. announced: of prompts after it. If little is left, one that
 * comes gets a row, and the step is not launched ahead. */
static int32_t free_rows(const hd_sched *s, int32_t announced) {
    const int32_t rows = s->o.step_rows - s->n_rows - announced;
    const int32_t lacking = lacking_rows(s) + (s->o.ahead ? s->depth : 0);
    return rows > lacking ? rows - lacking : hd_min_i32(rows, 1);
}

/* Adds a prefill chunk. others: less important requests that may each sample at one row. */
static void add_chunk(hd_sched *s, sched_seq *q, int32_t budget, int32_t others) {
    const int32_t pending = q->n_tokens - q->n_done;
    int32_t rows = hd_min_i32(hd_min_i32(pending, s->o.chunk_rows), budget);
    if (q->next_rows) rows = q->next_rows;
    q->next_rows = 0;
    const int32_t excess = reported_by(q, rows) - (s->o.sample_rows - s->n_logits - others - 1);
    if (excess > 0) rows -= excess;
    if (rows <= 0) return; /* the logits rows of this step are used up */
    const bool last = rows == pending;
    const int32_t drafts = last ? draft_positions(s, q->want_drafts) : 0;
    if (!make_room(s, q, q->n_done + rows + drafts)) return;
    q->chunk = rows;
    add_input(s, q, rows, last ? 1 : 0, reported_by(q, rows));
}

static bool decodes(const sched_seq *q) {
    return q->n_tokens - q->n_done == 1 && q->n_tokens > q->r.n_prompt;
}

/* Chooses the draft depth of every request before pages are reserved. Returns the number of
 * requests whose prefill is not complete. */
static int32_t plan_drafts(hd_sched *s) {
    int32_t decoding = 0;
    bool automatic = false;
    for (int32_t i = 0; i < s->n_running; i++) {
        decoding += decodes(s->running[i]);
        automatic |= s->running[i]->r.draft_tokens == HD_DRAFTS_AUTO;
    }
    const int32_t depth =
        automatic ? sched_draft_depth_choose(&s->drafts, hd_max_i32(decoding, 1)) : 0;
    for (int32_t i = 0; i < s->n_running; i++) {
        sched_seq *q = s->running[i];
        const bool fixed = q->r.draft_tokens != HD_DRAFTS_AUTO;
        q->want_drafts =
            fixed ? q->r.draft_tokens : sched_draft_depth_of(&s->drafts, &q->acceptance, depth);
    }
    s->depth = 0;
    for (int32_t i = 0; i < s->n_running; i++) {
        const sched_seq *q = s->running[i];
        s->depth = hd_max_i32(s->depth, hd_max_i32(q->want_drafts, q->drafts.made));
    }
    s->timed = automatic && decoding == s->n_running;
    return s->n_running - decoding;
}

/* Reserves pages ahead of the step; no request is retracted for them. */
static void extend_ahead(hd_sched *s, hd_seq_input *w) {
    const int32_t most = s->o.cache.seq_pages * s->o.cache.page_tokens;
    const int32_t drafts = draft_positions(s, w->want_drafts);
    const int32_t end = hd_min_i32(w->start + w->n + drafts + s->o.ahead, most);
    if (hd_cache_extend(s->cache, w->slot, end) != HD_OK) return;
    w->n_pages = pages_for(s, end);
}

static int32_t announced_rows(const hd_sched *s) {
    int32_t rows = 0;
    for (int32_t i = 0; i < s->n_running; i++) rows += s->running[i]->next_rows;
    return rows;
}

/* Says how many rows the next step has of prompts that go on. They keep to it, whatever comes, so the
 * rows of others that it may have are counted in full. */
static void announce_chunks(hd_sched *s) {
    int32_t rows = 0; /* of the next step */
    for (int32_t i = 0; i < s->n_inputs; i++) {
        const hd_seq_input *w = &s->inputs[i];
        rows += w->n_sample && w->left != 1 ? 1 + s->depth : 0;
    }
    for (int32_t i = 0; i < s->n_inputs; i++) {
        sched_seq *q = s->input_seqs[i];
        hd_seq_input *w = &s->inputs[i];
        if (w->n_sample || w->n_prompt_logprobs || sched_unreported(q) > 0 ||
            w->start < w->ends.rebuilt)
            continue;
        const int32_t pending = q->n_tokens - q->n_done - w->n;
        const int32_t budget =
            s->o.step_rows - rows - s->depth - 1; /* a row for one that comes */
        const int32_t n = hd_min_i32(hd_min_i32(pending, s->o.chunk_rows), budget);
        const bool last = n == pending;
        const int32_t most = s->o.cache.seq_pages * s->o.cache.page_tokens;
        const int32_t after = last ? draft_positions(s, q->want_drafts) + s->o.ahead : 0;
        const int32_t end = hd_min_i32(w->start + w->n + n + after, most);
        if (n <= 0 || hd_cache_extend(s->cache, w->slot, end) != HD_OK) continue;
        w->n_pages = pages_for(s, end);
        w->n_next = q->next_rows = n;
        w->next_is_last = last;
        rows += n + s->depth;
    }
}

static int32_t paced_rows(const sched_seq *q) {
    return hd_min_i32(q->n_tokens - q->n_done, sched_pace_next(q->chunk));
}

static sched_shares share_rows(const hd_sched *s) {
    int32_t n = 0;
    for (int32_t i = 0; i < s->n_running; i++) {
        const sched_seq *q = s->running[i];
        if (!decodes(q)) s->wanted_rows[n++] = paced_rows(q);
    }
    return sched_shares_of(sched_pace_rows(&s->pace), s->wanted_rows, n);
}

/* Builds the batch. Retraction removes requests from the end of `running`, so a walk by
 * index stays valid: requests behind the index may vanish, those before it stay. */
static void build(hd_sched *s) {
    s->n_inputs = s->n_rows = s->n_logits = 0;
    s->rebuilds = false;
    int32_t prompts = plan_drafts(s);
    /* nobody waits for the prompt of a request that runs alone */
    const bool paced = s->n_running > 1 && sched_pace_rows(&s->pace) < INT32_MAX;
    sched_shares shares = {0};
    if (paced) shares = share_rows(s);
    for (int32_t i = 0; i < s->n_running; i++) {
        if (decodes(s->running[i])) add_decode(s, s->running[i]);
    }
    const int32_t decoded = s->n_rows;
    int32_t announced = announced_rows(s);
    bool full = false;
    for (int32_t i = 0; i < s->n_running; i++) {
        sched_seq *q = s->running[i];
        announced -= q->next_rows;
        if (decodes(q)) continue;
        int32_t budget = free_rows(s, announced);
        if (!q->next_rows && (full || budget <= 0)) continue;
        const bool free = !q->next_rows;
        if (paced) budget = hd_min_i32(budget, sched_shares_next(&shares, paced_rows(q)));
        const int32_t before = s->n_rows;
        add_chunk(s, q, budget, --prompts);
        full |= free && !paced && s->n_rows - before == budget;
    }
    s->n_prompt_rows = s->n_rows - decoded;
    /* A prefill chunk may have retracted a less important decode that was already added. */
    int32_t kept = 0;
    s->n_rows = 0;
    for (int32_t i = 0; i < s->n_inputs; i++) {
        if (s->input_seqs[i]->slot < 0) continue;
        s->n_rows += s->inputs[i].n;
        s->inputs[kept] = s->inputs[i];
        s->input_seqs[kept++] = s->input_seqs[i];
    }
    s->n_inputs = kept;
    for (int32_t i = 0; s->o.ahead && i < kept; i++) {
        if (s->inputs[i].n_sample) extend_ahead(s, &s->inputs[i]);
    }
    if (s->o.ahead && !paced) announce_chunks(s);
}

/* ---- processing output ---- */

static bool is_stop(const sched_seq *q, int32_t token) {
    for (int32_t i = 0; i < q->r.n_stop; i++) {
        if (q->r.stop_ids[i] == token) return true;
    }
    return false;
}

/* Appends sampled tokens; none remains in the step after one that ends the request. */
static void append(sched_seq *q, hd_step_tokens *step) {
    for (int32_t i = 0; i < step->n_tokens; i++) {
        q->tokens[q->n_tokens++] = step->tokens[i];
        if (is_stop(q, step->tokens[i])) {
            step->finish_reason = HD_FINISH_STOP;
        } else if (q->n_tokens == q->r.n_prompt + q->r.max_new) {
            step->finish_reason = HD_FINISH_LENGTH;
        }
        if (step->finish_reason != HD_FINISH_NONE) step->n_tokens = i + 1;
    }
}

static void commit(hd_sched *s, const sched_seq *q) {
    hd_cache_commit(s->cache, q->slot, q->tokens, q->n_done);
    if (s->hooks.committed) s->hooks.committed(s->hooks.ctx, q->r.id, q->n_done);
}

static void process_one(hd_sched *s, sched_seq *q, const hd_seq_input *w,
                        const hd_seq_output *c) {
    hd_sched_event e = {.id = q->r.id, .step = c->step, .prompt = c->prompt};
    hd_step_tokens *step = &e.step;
    if (c->status != HD_OK) {
        fail(s, q, c->status);
        return;
    }
    step->n_cached = q->n_cached;
    e.prompt.from = sched_next_reported(q);
    e.prompt.tokens = q->tokens + e.prompt.from;
    q->n_reported += w->n_prompt_logprobs;
    if (w->n_sample == 0) {
        const bool first = q->n_tokens == q->r.n_prompt; /* not computed again */
        q->n_done += w->n;
        /* what is cached stays so while its window is rebuilt */
        step->n_prefilled = hd_min_i32(hd_max_i32(q->n_done, q->n_cached), q->r.n_prompt);
        commit(s, q);
        if (w->n_prompt_logprobs || (q->r.progress && first)) s->hooks.event(s->hooks.ctx, &e);
        return;
    }
    step->n_prefilled = q->r.n_prompt;
    assert(step->n_tokens >= 1 && step->n_tokens <= w->n_sample);
    step->n_drafted = w->n_sample - 1;
    step->n_accepted = step->n_tokens - 1;
    append(q, step);
    /* Rows of rejected drafts do not count as computed. */
    q->n_done += w->n - w->n_sample + c->step.n_tokens;
    q->n_done = hd_min_i32(q->n_done, q->n_tokens - (step->finish_reason == HD_FINISH_NONE));
    commit(s, q);
    if (s->hooks.computed) {
        s->hooks.computed(s->hooks.ctx, q->r.id,
                          hd_cache_block_table(s->cache, q->slot, HD_KV_FULL), q->n_tokens - 1);
    }
    sched_draft_depth_verified(&s->drafts, &q->acceptance, &q->drafts, step->n_accepted);
    s->stats.drafted += step->n_drafted;
    s->stats.accepted += step->n_accepted;
    if (step->finish_reason != HD_FINISH_NONE) {
        finish(s, q, &e);
        return;
    }
    release_followers(s, q);
    q->drafts = (sched_drafts){.made = c->n_drafts, .n_confidence = c->n_confidence};
    memcpy(q->drafts.confidence, c->confidence, sizeof c->confidence);
    memcpy(q->tokens + q->n_tokens, c->drafts, (size_t)c->n_drafts * sizeof(int32_t));
    s->hooks.event(s->hooks.ctx, &e);
}

/* The content of device memory is unknown after a failure, so the prefix cache is flushed. */
void hd_sched_fail_all(hd_sched *s, hd_status status) {
    while (s->n_running) fail(s, s->running[0], status);
    while (s->waiting.first) fail(s, s->waiting.first, status);
    hd_sched_flush_cache(s);
    take_read(s); /* no step may follow */
}

/* Something that the step needed could not be read: the entries of its rows are undefined, and no
 * others. Who was not in it goes on. */
static void fail_inputs(hd_sched *s, hd_status status) {
    for (int32_t i = 0; i < s->n_inputs; i++) fail(s, s->input_seqs[i], status);
}

/* The runner can run again, but not with the entries that were cached. */
static void start_again(hd_sched *s) {
    hd_sched_retract_all(s);
    hd_sched_flush_cache(s);
    s->timed = false;
}

static void count_copies(hd_sched *s, const hd_page_copy *copies, int32_t n) {
    memset(s->n_copied, 0, sizeof s->n_copied);
    for (int32_t i = 0; i < n; i++) s->n_copied[copies[i].group]++;
}

/* Learns from the time of the step before. */
static void learn_times(hd_sched *s, int64_t now_ns) {
    const int64_t took = now_ns - s->last_ns;
    if (s->timed) sched_draft_depth_step_took(&s->drafts, took);
    if (s->measured) sched_load_costs_took(&s->costs, took, s->n_rows, s->n_copied);
    if (s->measured) sched_pace_took(&s->pace, took, s->n_prompt_rows);
    s->timed = s->measured = false;
    s->last_ns = now_ns;
    if (s->o.disk) s->costs.disk_byte_ns = hd_disk_tier_byte_ns(s->o.disk);
    const hd_cache_costs costs = sched_load_costs_of(&s->costs);
    hd_cache_set_costs(s->cache, &costs);
}

/* Copies pages that the device would otherwise keep for itself: when nothing is computed, to write them to
 * the disk; or at once. */
static void save_pages(hd_sched *s) {
    enum { MOST = 256 };
    if (s->o.cache.write_through) {
        if (s->n_inputs == 0 && !s->o.disk) return; /* they wait for the next step */
        for (int g = 0; g < HD_N_KV_GROUPS; g++) {
            hd_cache_save_unwritten(s->cache, (hd_kv_group)g, MOST);
        }
    } else if (s->n_inputs == 0 && s->o.disk) {
        hd_disk_tier_save(s->o.disk);
    }
}

hd_status hd_sched_step(hd_sched *s, int64_t now_ns, hd_err *err) {
    learn_times(s, now_ns);
    process_aborts(s, now_ns);
    step_disk(s);
    admit(s);
    build(s);
    save_pages(s);
    int32_t n_copies;
    const hd_page_copy *copies = hd_cache_copies(s->cache, &n_copies);
    if (s->n_inputs == 0 && !s->o.joins && !(s->o.disk && n_copies)) return HD_EAGAIN;
    s->copied = s->copied || n_copies;
    count_copies(s, copies, n_copies);
    hd_status st =
        s->runner.run(s->runner.ctx, copies, n_copies, s->inputs, s->n_inputs, s->outputs, err);
    hd_cache_copied(s->cache);
    s->stats.steps += s->n_inputs > 0;
    s->stats.rows += s->n_rows;
    if (st == HD_EAGAIN) {
        start_again(s);
        return HD_OK;
    }
    if (st == HD_EIO) {
        fail_inputs(s, st);
        return st;
    }
    if (st != HD_OK) {
        hd_sched_fail_all(s, st);
        return st;
    }
    for (int32_t i = 0; i < s->n_inputs; i++) {
        process_one(s, s->input_seqs[i], &s->inputs[i], &s->outputs[i]);
    }
    if (s->n_inputs == 0) return HD_EAGAIN;
    /* the caller may sleep before the next step; rows that rebuild windows take less than others */
    s->measured = !hd_sched_idle(s) && !s->rebuilds;
    s->timed &= s->measured;
    return HD_OK;
}

/* ---- checking for leaks ---- */

static hd_status check_idle(const hd_sched *s, hd_err *err) {
    const int32_t n = s->o.cache.max_seqs;
    if (s->n_free_slots != n) {
        return HD_FAIL(err, HD_EINVAL, "%d of %d running slots are free", s->n_free_slots, n);
    }
    return hd_cache_check(s->cache, true, err);
}

hd_status hd_sched_audit(hd_sched *s, hd_err *err) {
    assert(hd_sched_idle(s));
    const hd_status st = check_idle(s, err);
    if (st != HD_OK && st != HD_ENOMEM) {
        free_all_slots(s);
        if (s->o.disk) hd_disk_tier_stop(s->o.disk);
        hd_cache_reset(s->cache);
        s->blocked = false;
    }
    return st;
}

/* ---- statistics ---- */

bool hd_sched_idle(const hd_sched *s) {
    return s->n_running == 0 && s->waiting.n == 0;
}

hd_sched_stats hd_sched_read_stats(const hd_sched *s) {
    hd_sched_stats stats = s->stats;
    stats.waiting = s->waiting.n;
    stats.running = s->n_running;
    return stats;
}

hd_sched_progress hd_sched_running(const hd_sched *s, int32_t i) {
    const sched_seq *q = s->running[i];
    return (hd_sched_progress){q->r.id, q->n_done, q->n_tokens, q->n_cached};
}

hd_cache *hd_sched_cache(const hd_sched *s) {
    return s->cache;
}

int64_t hd_sched_look_ns(const hd_sched *s) {
    return s->o.disk ? hd_disk_tier_look_ns(s->o.disk) : 0;
}

/* The next step sets the costs again. */
bool hd_sched_read(hd_sched *s, uint64_t id, uint64_t salt, const int32_t *tokens, int32_t n,
                   int64_t now_ns) {
    static const double patience_ns = 1e12;
    if (!s->o.disk) return false;
    hd_cache_set_costs(s->cache, &(hd_cache_costs){0});
    return hd_disk_tier_ask(s->o.disk, id, salt, tokens, n, patience_ns, now_ns);
}

void hd_sched_renew_cache(hd_sched *s, uint64_t weights) {
    if (s->o.disk) hd_disk_tier_stop(s->o.disk);
    hd_cache_renew(s->cache);
    if (s->o.disk) hd_disk_tier_renew(s->o.disk, weights);
    s->blocked = false;
}

void hd_sched_flush_cache(hd_sched *s) {
    if (s->o.disk) hd_disk_tier_stop(s->o.disk);
    hd_cache_flush(s->cache);
    s->blocked = false;
}
