/* sched_world.c - the simulated device and clients, and the checks of the scheduler's
 * guarantees. */
#include "check.h"

#include "fakes/sched_world.h"

#include <string.h>

#include "allocations.h"
#include "base/checked.h"
#include "base/philox.h"

enum { STOP_ID = 7, INDEX_BITS = 6, STEP_BITS = 8 };

static uint32_t draw(world *w, uint32_t below) {
    return hd_philox_at(w->seed, 1, w->draws++).v[0] % below;
}

static bool once_in(world *w, uint32_t steps) {
    return steps && draw(w, steps) == 0;
}

static uint64_t chain(uint64_t before, int32_t token) {
    const uint64_t h = (before ^ (uint64_t)(token + 1)) * 0x9E3779B97F4A7C15u;
    return (h ^ h >> 29) * 0xBF58476D1CE4E5B9u + 1;
}

static void digest(world *w, int64_t number) {
    w->digest = chain(w->digest ^ (uint64_t)number, 0);
}

/* A small vocabulary makes texts that share prefixes; some tokens are stop ids. */
static int32_t oracle(uint64_t hash) {
    return hash % 31 == 0 ? STOP_ID : (int32_t)(hash >> 32) % 3 + 10;
}

/* ---- clients ---- */

static client *client_of(world *w, uint64_t id) {
    client *c = &w->clients[id & ((1u << INDEX_BITS) - 1)];
    assert_true(c->id == id); /* no event before submission or after the last event */
    return c;
}

/* Higher priority, then earlier arrival. */
static bool goes_before(const client *a, const client *b) {
    return a->priority != b->priority ? a->priority > b->priority : a->id < b->id;
}

static bool decodes(const client *c) {
    return c->n_tokens > c->n_prompt && c->n_done == c->n_tokens - 1;
}

/* Returns whether the client waits for another request's prefill. */
static bool waits(const world *w, const client *c) {
    const client *leader = &w->clients[c->leader & ((1u << INDEX_BITS) - 1)];
    return c->leader && leader->id == c->leader && leader->n_tokens == leader->n_prompt;
}

static int32_t unreported(const client *c) {
    return c->prompt_logprobs_from ? c->n_prompt - c->prompt_logprobs_from - c->n_reported : 0;
}

static void learn(client *c, int32_t token) {
    assert_true(c->n_tokens < MAX_LEN);
    c->hash[c->n_tokens] = chain(c->n_tokens ? c->hash[c->n_tokens - 1] : c->salt, token);
    c->tokens[c->n_tokens++] = token;
}

/* ---- the simulated device ---- */

static uint64_t *cells(world *w, const hd_seq_input *k, int group, int32_t pos) {
    const int32_t tokens = w->o.cache.page_tokens;
    assert_true(pos / tokens < k->n_pages);
    const int32_t page = k->pages[group][pos / tokens];
    assert_true(page >= 0 && page < w->o.cache.n_pages[group]);
    return &w->memory[group][page * tokens + pos % tokens];
}

static int n_groups(const world *w) {
    return w->o.cache.lookback ? HD_N_KV_GROUPS : 1;
}

static void run_copies(world *w, const hd_page_copy *copies, int32_t n) {
    const int32_t tokens = w->o.cache.page_tokens;
    for (int32_t i = 0; i < n; i++) {
        const hd_kv_group group = copies[i].group;
        assert_true(copies[i].host.n >= 0 && copies[i].host.n < w->o.cache.n_host[group]);
        uint64_t *page = &w->memory[group][copies[i].device.n * tokens];
        uint64_t *host = &w->host[group][copies[i].host.n * tokens];
        memcpy(copies[i].save ? host : page, copies[i].save ? page : host,
               (size_t)tokens * sizeof *page);
        if (group != HD_KV_WINDOW) continue;
        uint8_t *layers = &w->layers[copies[i].device.n * tokens];
        uint8_t *kept = &w->host_layers[copies[i].host.n * tokens];
        memcpy(copies[i].save ? kept : layers, copies[i].save ? layers : kept, (size_t)tokens);
    }
    w->copies += n;
    w->events += n;
}

/* Positions after a sequence's rows that the drafter writes. */
static int32_t draft_positions(const world *w, const hd_seq_input *k) {
    return k->want_drafts ? hd_max_i32(k->want_drafts, w->o.draft_block) : 0;
}

/* A page is written by one request of a step; marks it with the step and the sequence input. */
static void mark_writes(world *w, const hd_seq_input *k, int32_t number) {
    const int32_t tokens = w->o.cache.page_tokens;
    const int32_t end = k->start + k->n + draft_positions(w, k);
    const int64_t mark = w->steps << STEP_BITS | number;
    for (int group = 0; group < n_groups(w); group++) {
        const int32_t kept = group == HD_KV_FULL ? k->ends.rebuilt : 0;
        for (int32_t p = hd_max_i32(k->start, kept) / tokens; p * tokens < end; p++) {
            const int32_t page =
                (int32_t)(cells(w, k, group, p * tokens) - w->memory[group]) / tokens;
            int64_t *seen = &w->written[group][page];
            assert_true(*seen >> STEP_BITS < w->steps || *seen == mark);
            *seen = mark;
        }
    }
}

/* FT26, FT27: every position before the first row is present, is this request's own prefix,
 * and is not being written by another request of the step. */
static void read_prefix(world *w, const hd_seq_input *k, const client *c, int32_t number) {
    const int32_t tokens = w->o.cache.page_tokens, lookback = w->o.cache.lookback;
    for (int group = 0; group < n_groups(w); group++) {
        int32_t from = group == HD_KV_WINDOW ? hd_max_i32(0, k->start - lookback) : 0;
        if (group == HD_KV_WINDOW && k->ends.rebuilt) {
            from = hd_max_i32(from, k->ends.rebuilt - w->o.cache.rebuild);
        }
        while (from < k->start) {
            const int32_t end = hd_min_i32(k->start, (from / tokens + 1) * tokens);
            const uint64_t *cell = cells(w, k, group, from);
            const int32_t page = (int32_t)(cell - w->memory[group]) / tokens;
            const int64_t seen = w->written[group][page];
            assert_memory_equal(cell, &c->hash[from], (size_t)(end - from) * sizeof *cell);
            assert_true(seen >> STEP_BITS < w->steps ||
                        seen == (w->steps << STEP_BITS | number));
            from = end;
        }
    }
}

static uint8_t *layers_at(world *w, const hd_seq_input *k, int32_t pos) {
    return &w->layers[cells(w, k, HD_KV_WINDOW, pos) - w->memory[HD_KV_WINDOW]];
}

/* Every layer with a tail that computes a row finds its own vectors in the window. Its result is
 * for the rows that the next layer computes, or that have an output. */
static void compute_tails(world *w, const hd_seq_input *k, int32_t pos) {
    const hd_kv_shape shape = {w->o.cache.page_tokens, w->o.cache.lookback, w->tail};
    uint8_t *layers = layers_at(w, k, pos);
    *layers = 0;
    for (int32_t i = 0; i < w->tail.n; i++) {
        const bool last = i + 1 == w->tail.n;
        if (!hd_kv_is_needed(&shape, i, &k->ends, pos)) continue;
        *layers |= (uint8_t)(1 << i);
        if (last ? pos < hd_max_i32(k->ends.outputs, k->ends.rebuilt)
                 : !hd_kv_is_needed(&shape, i + 1, &k->ends, pos)) {
            continue;
        }
        for (int32_t q = hd_max_i32(0, pos - w->tail.step); q < pos; q++) {
            assert_true(*layers_at(w, k, q) >> i & 1);
        }
    }
    w->skipped += w->tail.n && !(*layers >> (w->tail.n - 1) & 1);
}

/* Rows write their hashes; rejected drafts write garbage after them. */
static void write_rows(world *w, const hd_seq_input *k, const client *c, uint64_t *last) {
    uint64_t hash = k->start ? c->hash[k->start - 1] : c->salt;
    for (int32_t i = 0; i < k->n + draft_positions(w, k); i++) {
        if (i < k->n) last[i] = hash = chain(hash, k->tokens[i]);
        for (int group = 0; group < n_groups(w); group++) {
            const bool kept = group == HD_KV_FULL && k->start + i < k->ends.rebuilt;
            uint64_t *cell = cells(w, k, group, k->start + i);
            if (kept) assert_true(*cell == hash);
            if (!kept) *cell = i < k->n ? hash : 0xBAD;
        }
        if (i < k->n && w->tail.n) compute_tails(w, k, k->start + i);
    }
}

/* The simulated log-probability of a token is its position. */
static const float *score(world *w, const hd_seq_input *k, int32_t used) {
    const int32_t first = k->start + k->n - k->n_sample - k->n_prompt_logprobs + 1;
    for (int32_t i = 0; i < k->n_prompt_logprobs; i++)
        w->prompt_logprobs[used + i] = (float)(first + i);
    return w->prompt_logprobs + used;
}

static void choose(world *w, const hd_seq_input *k, const uint64_t *hashes,
                   hd_seq_output *out) {
    for (int32_t i = k->n - k->n_sample; i < k->n; i++) {
        const int32_t token = oracle(hashes[i]);
        out->step.tokens[out->step.n_tokens++] = token;
        if (i + 1 == k->n || k->tokens[i + 1] != token) break;
    }
    if (!k->n_sample) return;
    uint64_t hash = hashes[k->n - k->n_sample + out->step.n_tokens - 1];
    int32_t token = out->step.tokens[out->step.n_tokens - 1];
    const bool few = w->habits.few_drafts && hash % w->habits.few_drafts == 0;
    while (out->n_drafts < k->want_drafts - few) {
        hash = chain(hash, token);
        const bool wrong = w->habits.wrong_draft && (hash >> 20) % w->habits.wrong_draft == 0;
        token = wrong ? 10 : oracle(hash);
        if (w->o.draft_block) {
            out->confidence[out->n_confidence++] =
                (float)(hash >> 8 & 7) - (wrong ? 6.0f : 2.0f);
        }
        out->drafts[out->n_drafts++] = token;
    }
}

/* Every prompt row from prompt_logprobs_from - 1 on reports the log-probability of the token
 * after it, and is computed for it. */
static void check_prompt_logprobs(const hd_seq_input *k, const client *c) {
    const int32_t next = c->prompt_logprobs_from + c->n_reported;
    int32_t rows = 0;
    for (int32_t i = 0; i < k->n - k->n_sample; i++) {
        rows += unreported(c) > 0 && k->start + i + 1 >= next && k->start + i + 1 < c->n_prompt;
    }
    assert_int_equal(k->n_prompt_logprobs, rows);
    if (unreported(c) > 0) assert_true(k->start < next);
}

/* Checks a sequence input against its client. */
static void check_work(world *w, const hd_seq_input *k, client *c) {
    assert_non_null(c);
    assert_false(c->cancelled); /* not one step after a cancel */
    assert_true(c->rows == 0 && k->n > 0);
    if (c->n_done < 0) {
        const bool rebuilds = k->start < k->ends.rebuilt;
        c->announced = 0;
        const int32_t cached = rebuilds ? k->ends.rebuilt : k->start;
        assert_true(cached % w->o.cache.page_tokens == 0 && cached < c->n_tokens);
        if (rebuilds) assert_int_equal(k->start, cached - w->o.cache.rebuild);
        c->n_done = k->start;
        w->hits += k->start > 0;
        w->rebuilds += rebuilds;
        if (c->n_tokens == c->n_prompt) c->n_cached = cached;
    }
    assert_int_equal(k->start, c->n_done);
    check_prompt_logprobs(k, c);
    c->prefills = !decodes(c);
    c->as_announced = c->announced > 0;
    if (c->announced) assert_int_equal(k->n, c->announced);
    c->announced = k->n_next;
    c->rows = k->n;
    c->pending = c->n_tokens - c->n_done;
    const int32_t known = hd_min_i32(k->n, c->pending);
    assert_memory_equal(k->tokens, c->tokens + k->start, (size_t)known * sizeof *k->tokens);
    if (k->n < c->pending) {
        assert_true(k->n_sample == 0 && k->want_drafts == 0 && k->n <= w->o.chunk_rows);
        assert_int_equal(k->after, c->tokens[k->start + k->n]);
        c->n_done += k->n;
    } else {
        assert_int_equal(k->n_sample, 1 + k->n - c->pending);
        const bool automatic = c->drafts == HD_DRAFTS_AUTO;
        const int32_t limit = w->o.draft_block ? w->o.draft_block : HD_MAX_DRAFTS;
        const int32_t most = automatic ? limit : hd_min_i32(c->drafts, limit);
        assert_true(known <= w->o.chunk_rows && k->n_sample <= 1 + most);
        assert_true(c->n_tokens + k->n_sample <= c->n_prompt + c->max_new);
        assert_true(k->after == -1 && k->want_drafts <= most);
        assert_true(k->want_drafts == most || (automatic && k->want_drafts >= 0));
    }
}

/* FT19, FT24: every request past its prefill advances. Prefills follow in order of
 * importance while rows are left. The most important request must finish, however often
 * others are retracted. room: unused rows of the step. */
static void check_order(world *w, int32_t room) {
    client *top = NULL;
    for (int32_t i = 0; i < w->o.cache.max_seqs; i++) {
        const client *a = w->seated[i];
        if (!a) continue;
        if (!top || goes_before(a, top)) top = w->seated[i];
        if (a->rows == 0) assert_false(decodes(a));
        if (unreported(a) > 0) continue; /* the logits rows may be used up */
        const bool starved =
            !a->as_announced &&
            (a->rows == 0 ||
             (a->prefills && a->rows < hd_min_i32(a->pending, w->o.chunk_rows)));
        assert_false(starved && room > 0);
        for (int32_t k = 0; k < w->o.cache.max_seqs && starved; k++) {
            const client *b = w->seated[k];
            if (!b || !b->rows || !b->prefills || b->as_announced) continue;
            assert_false(goes_before(a, b) && a != b);
        }
    }
    assert_non_null(top);
    assert_true(top->rows > 0);
    for (int32_t i = 0; i < w->o.cache.max_seqs; i++) {
        if (w->seated[i] && w->seated[i] != top) w->seated[i]->steps_on_top = 0;
    }
    const int32_t others =
        (w->o.cache.max_seqs - 1) * HD_MAX_STEP_TOKENS + (w->o.ahead ? HD_MAX_DRAFTS + 1 : 0);
    int32_t each = hd_min_i32(w->o.chunk_rows, hd_max_i32(w->o.step_rows - others, 1));
    if (top->prompt_logprobs_from) each = hd_min_i32(each, HD_MAX_DRAFTS);
    const int32_t longest = top->n_prompt + top->max_new;
    const int32_t squeezed = w->o.ahead > 0; /* what others announced comes first, once */
    assert_true(++top->steps_on_top <= longest / each + 1 + squeezed + top->max_new);
}

/* A request that left its slot in this step and has not finished was retracted: it must be
 * the least important. */
static bool check_retracted(world *w) {
    const client *sent_back = NULL, *least = NULL;
    for (int i = 0; i < MAX_CLIENTS; i++) {
        client *c = &w->clients[i];
        if (!c->id) continue;
        if (c->left && (!sent_back || goes_before(c, sent_back))) sent_back = c;
        if (c->slot >= 0 && (!least || goes_before(least, c))) least = c;
        w->retracted += c->left;
        c->left = false;
    }
    if (sent_back) assert_true(least && goes_before(least, sent_back));
    return sent_back != NULL;
}

/* A runner one step ahead computes the next positions in the pages of this step. */
static void plan_ahead(world *w, const hd_seq_input *k, const hd_seq_output *c) {
    const int32_t tokens = w->o.cache.page_tokens;
    world_ahead *a = &w->ahead[w->n_ahead];
    if (!w->o.ahead || (!k->n_sample && !k->n_next)) return;
    w->n_ahead++;
    for (int group = 0; group < n_groups(w); group++) {
        memcpy(a->pages[group], k->pages[group], (size_t)k->n_pages * sizeof(int32_t));
    }
    if (!k->n_sample) {
        a->from = k->start + k->n;
        a->to = a->from + k->n_next;
        assert_true(a->to <= k->n_pages * tokens);
        return;
    }
    a->from = k->start + k->n - k->n_sample + c->step.n_tokens;
    a->to =
        hd_min_i32(a->from + 1 + k->want_drafts + draft_positions(w, k), k->n_pages * tokens);
}

/* Its garbage is written before the next step, page copies included. */
static void write_ahead(world *w) {
    const int32_t tokens = w->o.cache.page_tokens;
    for (int32_t i = 0; i < w->n_ahead; i++) {
        const world_ahead *a = &w->ahead[i];
        for (int group = 0; group < n_groups(w); group++) {
            for (int32_t pos = a->from; pos < a->to; pos++) {
                const int32_t page = a->pages[group][pos / tokens];
                assert_true(page >= 0 && page < w->o.cache.n_pages[group]);
                w->memory[group][page * tokens + pos % tokens] = 0xBAD;
            }
        }
    }
    w->n_ahead = 0;
}

/* Only what the rows of the step write is undefined. */
static hd_status fail_to_read(world *w, const hd_seq_input *inputs, int32_t n, hd_err *err) {
    const int32_t tokens = w->o.cache.page_tokens;
    for (int32_t i = 0; i < n; i++) {
        const hd_seq_input *k = &inputs[i];
        w->seated[k->slot]->unread = true;
        for (int32_t pos = k->start; pos < k->start + k->n; pos++) {
            for (int group = pos < k->ends.rebuilt; group < n_groups(w); group++) {
                const int32_t page = k->pages[group][pos / tokens];
                w->memory[group][page * tokens + pos % tokens] = 0xBAD;
            }
        }
    }
    w->unread += n;
    w->read_failed = true;
    return HD_FAIL(err, HD_EIO, "simulated read error");
}

static hd_status run(void *ctx, const hd_page_copy *copies, int32_t n_copies,
                     const hd_seq_input *inputs, int32_t n_inputs, hd_seq_output *outputs,
                     hd_err *err) {
    world *w = ctx;
    uint64_t hashes[MAX_LEN + HD_MAX_DRAFTS];
    int32_t rows = 0, choices = 0, scored = 0;
    w->steps++;
    w->stepped = true;
    const bool retracted = check_retracted(w);
    for (int i = 0; i < MAX_CLIENTS; i++) {
        w->clients[i].rows = 0;
        w->clients[i].as_announced = false;
    }
    if (w->fail_next) { /* a failure during the step: its memory content is undefined */
        memset(w->memory, 0xEE, sizeof w->memory);
        w->n_ahead = 0;
        w->failed = true;
        return HD_FAIL(err, HD_EDEVICE, "simulated device failure");
    }
    if (w->give_up_next) { /* the same, but the runner has recovered */
        memset(w->memory, 0xEE, sizeof w->memory);
        w->n_ahead = 0;
        w->gave_up = true;
        return HD_EAGAIN;
    }
    write_ahead(w);
    run_copies(w, copies, n_copies);
    for (int32_t i = 0; i < n_inputs; i++) {
        assert_true(inputs[i].slot >= 0 && inputs[i].slot < w->o.cache.max_seqs);
        check_work(w, &inputs[i], w->seated[inputs[i].slot]);
        mark_writes(w, &inputs[i], i);
        rows += inputs[i].n;
        choices += inputs[i].n_sample + inputs[i].n_prompt_logprobs;
    }
    w->took = rows * (int64_t)w->habits.row_time + n_copies * (int64_t)w->habits.copy_time;
    assert_true(choices <= (w->o.sample_rows ? w->o.sample_rows
                                             : w->o.cache.max_seqs * HD_MAX_STEP_TOKENS));
    assert_true(n_inputs <= w->o.cache.max_seqs && rows <= w->o.step_rows);
    /* retracted requests may have had rows */
    const int32_t padding = w->o.ahead ? n_inputs * HD_MAX_DRAFTS + HD_MAX_DRAFTS : 0;
    check_order(w, retracted ? 0 : w->o.step_rows - rows - padding);
    for (int32_t i = 0; i < n_inputs; i++) {
        read_prefix(w, &inputs[i], w->seated[inputs[i].slot], i);
    }
    if (w->fail_read) return fail_to_read(w, inputs, n_inputs, err);
    for (int32_t i = 0; i < n_inputs; i++) {
        const hd_seq_input *k = &inputs[i];
        const int32_t first = k->start + k->n - k->n_sample - k->n_prompt_logprobs;
        if (k->n_sample + k->n_prompt_logprobs) assert_true(k->ends.outputs <= first);
        write_rows(w, &inputs[i], w->seated[inputs[i].slot], hashes);
        outputs[i] = (hd_seq_output){
            .prompt = {.logprobs = score(w, &inputs[i], scored),
                       .n = inputs[i].n_prompt_logprobs}
        };
        choose(w, &inputs[i], hashes, &outputs[i]);
        plan_ahead(w, &inputs[i], &outputs[i]);
        scored += inputs[i].n_prompt_logprobs;
        digest(w, inputs[i].slot << 16 | inputs[i].n);
    }
    if (w->fail_one) outputs[draw(w, (uint32_t)n_inputs)].status = HD_EDEVICE;
    w->rows += rows;
    w->events += n_inputs;
    return HD_OK;
}

/* ---- hooks ---- */

static void slot_assigned(void *ctx, uint64_t id, int32_t slot, const int32_t *tokens,
                          int32_t n) {
    world *w = ctx;
    client *c = client_of(w, id);
    assert_true(c->slot < 0 && !w->seated[slot] && !c->left);
    assert_int_equal(n, c->n_tokens); /* a retraction loses no token */
    assert_memory_equal(tokens, c->tokens, (size_t)n * sizeof *tokens);
    for (int i = 0; i < MAX_CLIENTS; i++) { /* no request is overtaken */
        const client *other = &w->clients[i];
        if (!other->id || other->slot >= 0 || other == c || waits(w, other)) continue;
        assert_true(goes_before(c, other));
    }
    assert_false(waits(w, c));
    w->followed += c->leader != 0;
    c->slot = slot;
    c->n_done = -1;
    c->steps_on_top = 0;
    c->admitted = true;
    c->entered = w->now;
    w->seated[slot] = c;
    w->events++;
}

static void slot_released(void *ctx, uint64_t id, int32_t slot) {
    world *w = ctx;
    client *c = client_of(w, id);
    assert_true(c->slot == slot && w->seated[slot] == c);
    w->seated[slot] = NULL;
    c->slot = -1;
    c->left = true;
    w->events++;
}

/* Its pages hold the entries of all known tokens, also of those that this step has added. */
static void computed(void *ctx, uint64_t id, const int32_t *pages, int32_t n_done) {
    world *w = ctx;
    const client *c = client_of(w, id);
    const int32_t tokens = w->o.cache.page_tokens;
    assert_true(n_done >= c->n_tokens);
    for (int32_t pos = 0; pos < c->n_tokens; pos++) {
        const uint64_t *page = &w->memory[HD_KV_FULL][pages[pos / tokens] * tokens];
        assert_true(page[pos % tokens] == c->hash[pos]);
    }
}

static void remember(world *w, const client *c) {
    world_text *t = &w->texts[c->id % N_TEXTS];
    memcpy(t->tokens, c->tokens, (size_t)c->n_tokens * sizeof *t->tokens);
    t->n = c->n_tokens;
    t->salt = c->salt;
}

static void check_end(const world *w, const client *c, hd_finish_reason finish) {
    const bool stopped = c->n_tokens > c->n_prompt && c->tokens[c->n_tokens - 1] == STOP_ID;
    assert_true(stopped == (finish == HD_FINISH_STOP));
    if (finish == HD_FINISH_LENGTH) assert_int_equal(c->n_tokens, c->n_prompt + c->max_new);
    if (finish == HD_FINISH_ABORT) assert_true(c->cancelled);
    if (finish == HD_FINISH_ERROR) assert_true(w->failed || w->fail_one || c->unread);
    assert_true(!c->unread || finish == HD_FINISH_ERROR);
    if (finish == HD_FINISH_TIMEOUT) {
        assert_true(c->deadline && w->now >= c->deadline && !c->admitted && !c->cancelled);
    }
}

static void event(void *ctx, const hd_sched_event *e) {
    world *w = ctx;
    client *c = client_of(w, e->id);
    const hd_step_tokens *step = &e->step;
    const hd_prompt_logprobs *prompt = &e->prompt;
    digest(w, (int64_t)e->id ^ (int64_t)step->finish_reason << 48);
    w->events++;
    w->drafted += step->n_drafted;
    w->accepted += step->n_accepted;
    assert_true(step->n_accepted <= step->n_drafted && step->n_tokens >= 0);
    assert_true(step->n_tokens || step->finish_reason || prompt->n);
    if (prompt->n) assert_int_equal(prompt->from, c->prompt_logprobs_from + c->n_reported);
    for (int32_t i = 0; i < prompt->n; i++, c->n_reported++) {
        assert_int_equal(prompt->tokens[i], c->tokens[c->prompt_logprobs_from + c->n_reported]);
        assert_true(prompt->logprobs[i] == (float)(c->prompt_logprobs_from + c->n_reported));
    }
    w->scored += prompt->n;
    if (step->n_tokens) assert_true(unreported(c) <= 0);
    for (int32_t i = 0; i < step->n_tokens; i++) {
        assert_int_equal(step->tokens[i], oracle(c->hash[c->n_tokens - 1]));
        assert_true(i == 0 || step->tokens[i - 1] != STOP_ID);
        learn(c, step->tokens[i]);
        digest(w, step->tokens[i]);
    }
    assert_true(c->n_tokens <= c->n_prompt + c->max_new);
    if (step->n_tokens) assert_int_equal(step->n_cached, c->n_cached);
    assert_true(step->n_cached >= 0 && step->n_cached < c->n_prompt &&
                step->n_cached % w->o.cache.page_tokens == 0);
    if (step->finish_reason == HD_FINISH_NONE) {
        if (step->n_tokens) c->n_done = c->n_tokens - 1;
        return;
    }
    assert_true(c->slot < 0);
    check_end(w, c, step->finish_reason);
    w->finished[step->finish_reason]++;
    remember(w, c);
    c->id = 0;
}

/* ---- opening and closing ---- */

void world_open(world *w) {
    const hd_runner runner = {w, run};
    const hd_sched_hooks hooks = {.ctx = w,
                                  .slot_assigned = slot_assigned,
                                  .slot_released = slot_released,
                                  .event = event,
                                  .computed = computed};
    const hd_cache_options *c = &w->o.cache;
    hd_err err = {0};
    assert_true(c->max_seqs <= MAX_CLIENTS);
    assert_true(w->o.max_positions <= MAX_LEN);
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        assert_true(c->n_pages[l] * c->page_tokens <= MAX_CELLS);
        assert_true(c->n_host[l] * c->page_tokens <= MAX_CELLS);
    }
    if (hd_sched_open(&w->sched, &w->o, &runner, &hooks, &err) != HD_OK) {
        fail_msg("%s", err.msg);
    }
}

void world_close(world *w) {
    hd_sched_close(w->sched);
    w->sched = NULL;
}

/* A habit is on with probability 1/2. */
static uint32_t sometimes(world *w, uint32_t least, uint32_t most) {
    return draw(w, 2) ? least + draw(w, most - least) : 0;
}

static void draw_habits(world *w) {
    w->habits = (world_habits){.submit = 1 + draw(w, 6),
                               .cancel = sometimes(w, 10, 200),
                               .flush = sometimes(w, 50, 1000),
                               .fail_one = sometimes(w, 50, 1000),
                               .fail_all = sometimes(w, 300, 3000),
                               .fail_read = sometimes(w, 100, 2000),
                               .give_up = sometimes(w, 50, 1000),
                               .refuse = sometimes(w, 10, 200),
                               .deadline = sometimes(w, 1, 10),
                               .follow_up = sometimes(w, 1, 5),
                               .longest_prompt = 1 + (int32_t)draw(w, 120),
                               .longest_answer = 1 + (int32_t)draw(w, 80),
                               .priorities = 1 + (int32_t)draw(w, 4),
                               .wrong_draft = sometimes(w, 1, 8),
                               .few_drafts = sometimes(w, 1, 8),
                               .row_time = sometimes(w, 1, 4),
                               .copy_time = sometimes(w, 1, 40),
                               .follow = sometimes(w, 1, 5),
                               .score = sometimes(w, 2, 10),
                               .automatic = sometimes(w, 1, 4)};
}

static void draw_options(world *w) {
    static const int32_t pages[] = {1, 2, 3, 4, 8, 16};
    const int32_t page = pages[draw(w, 6)], seqs = 1 + (int32_t)draw(w, 10);
    const int32_t reaches[] = {0, 1, page, 2 * page + 1, 9};
    const int32_t lookback = reaches[draw(w, 5)], chunk = 1 + (int32_t)draw(w, 50);
    const int32_t seq_pages = MAX_LEN / page;
    const int32_t rows = hd_max_i32(chunk, HD_MAX_STEP_TOKENS) + HD_MAX_DRAFTS;
    const int32_t near = (lookback + rows) / page + 2;
    const int32_t most = MAX_CELLS / page - seq_pages;
    const int32_t spare = hd_min_i32(most, (int32_t)draw(w, (uint32_t)(3 * seq_pages)));
    const int32_t snapshots = draw(w, 2) ? (int32_t)draw(w, (uint32_t)(2 * seq_pages)) : 0;
    const int32_t host = draw(w, 2) ? (int32_t)draw(w, (uint32_t)(3 * seq_pages)) : 0;
    w->tail = (hd_kv_tail){
        .n = lookback ? (int32_t)draw(w, 4) : 0, .step = lookback, .rebuilds = draw(w, 2)};
    const hd_kv_shape shape = {page, lookback, w->tail};
    w->o = (hd_sched_options){
        .cache = {.page_tokens = page,
                  .lookback = lookback,
                  .tail = hd_kv_longest_tail(&shape),
                  .rebuild = hd_kv_rebuild_length(&shape),
                  .n_pages = {seq_pages + spare,
                              near + (int32_t)draw(w, (uint32_t)(seqs * near))},
                  .n_host = {host, snapshots},
                  .max_seqs = seqs,
                  .seq_pages = seq_pages},
        .step_rows = seqs * HD_MAX_STEP_TOKENS + (int32_t)draw(w, 40),
        .chunk_rows = chunk,
        .queue_limit = 1 + (int32_t)draw(w, 24),
        .ahead = draw(w, 2) ? (int32_t)draw(w, 3 * HD_MAX_STEP_TOKENS) : 0,
        .draft_block = draw(w, 3) ? 0 : 1 + (int32_t)draw(w, HD_MAX_DRAFTS),
        .page_bytes = {draw(w, 2),     draw(w,             4)               },
        .max_positions = MAX_LEN - HD_MAX_DRAFTS - (int32_t)draw(w, 50)
    };
}

void world_draw(world *w, uint64_t seed) {
    memset(w, 0, sizeof *w);
    w->seed = seed;
    draw_habits(w);
    draw_options(w);
}

/* ---- acting ---- */

client *world_free_client(world *w) {
    for (int i = 0; i < MAX_CLIENTS; i++) {
        if (w->clients[i].id) continue;
        w->clients[i] = (client){.slot = -1};
        return &w->clients[i];
    }
    return NULL;
}

void world_set_prompt(client *c, const int32_t *tokens, int32_t n) {
    c->n_tokens = 0;
    for (int32_t i = 0; i < n; i++) learn(c, tokens[i]);
    c->n_prompt = n;
}

hd_status world_submit(world *w, client *c) {
    const int32_t stop = STOP_ID;
    const hd_cache_options *cache = &w->o.cache;
    const int32_t room = cache->seq_pages * cache->page_tokens - HD_MAX_DRAFTS;
    const hd_sched_stats before = hd_sched_read_stats(w->sched);
    hd_status expected = before.waiting < w->o.queue_limit ? HD_OK : HD_EAGAIN;
    if (c->n_prompt < 1 || c->max_new < 1 ||
        c->n_prompt + c->max_new > hd_min_i32(room, w->o.max_positions)) {
        expected = HD_EINVAL;
    }
    c->id = ++w->arrivals << INDEX_BITS | (uint64_t)(c - w->clients);
    c->slot = c->n_done = -1;
    const hd_sched_request r = {.id = c->id,
                                .prompt = c->tokens,
                                .n_prompt = c->n_prompt,
                                .max_new = c->max_new,
                                .priority = c->priority,
                                .follows = c->leader,
                                .draft_tokens = c->drafts,
                                .prompt_logprobs_from = c->prompt_logprobs_from,
                                .salt = c->salt,
                                .queue_until_ns = c->deadline,
                                .stop_ids = &stop,
                                .n_stop = 1};
    hd_err err = {0};
    const hd_status st = hd_sched_submit(w->sched, &r, &err);
    assert_int_equal(st, expected);
    if (st != HD_OK) { /* a refused request has no effect, except an error sentence */
        const hd_sched_stats after = hd_sched_read_stats(w->sched);
        assert_memory_equal(&before, &after, sizeof before);
        assert_true(err.msg[0]);
        c->id = 0;
    }
    w->events++;
    return st;
}

void world_cancel(world *w, client *c) {
    c->cancelled = true;
    hd_sched_cancel(w->sched, c->id);
    w->events++;
}

/* Submits a new text, or one that continues a finished text. */
static void come(world *w) {
    client *c = world_free_client(w);
    if (!c) return;
    const world_habits *h = &w->habits;
    const world_text *t = &w->texts[draw(w, N_TEXTS)];
    int32_t prompt[MAX_LEN], n = 1 + (int32_t)draw(w, (uint32_t)h->longest_prompt);
    const bool goes_on = once_in(w, h->follow_up) && t->n + n < MAX_LEN;
    const int32_t kept = goes_on ? t->n : 0;
    if (kept) memcpy(prompt, t->tokens, (size_t)kept * sizeof *prompt);
    for (int32_t i = kept; i < kept + n; i++) {
        prompt[i] = draw(w, 50) ? i % 4 : (int32_t)draw(w, 5);
    }
    c->salt = goes_on ? t->salt : 1 + draw(w, 2);
    world_set_prompt(c, prompt, kept + n);
    c->max_new = 1 + (int32_t)draw(w, (uint32_t)h->longest_answer);
    c->priority = (int32_t)draw(w, (uint32_t)h->priorities);
    c->drafts = (int32_t)draw(w, HD_MAX_DRAFTS + 1);
    if (once_in(w, h->automatic)) c->drafts = HD_DRAFTS_AUTO;
    if (once_in(w, h->follow)) c->leader = w->clients[draw(w, MAX_CLIENTS)].id;
    if (once_in(w, h->score))
        c->prompt_logprobs_from = 1 + (int32_t)draw(w, (uint32_t)c->n_prompt);
    c->deadline = once_in(w, h->deadline) ? w->now + (int64_t)draw(w, 50) : 0;
    if (once_in(w, h->refuse)) c->max_new = draw(w, 2) ? 0 : 1000;
    world_submit(w, c);
}

void world_act(world *w) {
    if (once_in(w, w->habits.submit)) come(w);
    if (once_in(w, w->habits.cancel)) {
        client *c = &w->clients[draw(w, MAX_CLIENTS)];
        if (c->id) world_cancel(w, c);
    }
    if (once_in(w, w->habits.flush)) {
        hd_sched_flush_cache(w->sched);
        w->events++;
    }
    w->fail_one = once_in(w, w->habits.fail_one);
    w->fail_next = once_in(w, w->habits.fail_all);
    w->fail_read = once_in(w, w->habits.fail_read);
    w->give_up_next = once_in(w, w->habits.give_up);
    world_step(w);
}

/* ---- checking ---- */

void world_check_cache(world *w) {
    hd_err err = {0};
    if (hd_cache_check(hd_sched_cache(w->sched), hd_sched_idle(w->sched), &err) != HD_OK)
        fail_msg("%s", err.msg);
}

/* The scheduler's counters must equal the simulation's. */
static void check_counters(const world *w, int32_t waiting, int32_t running) {
    const hd_sched_stats s = hd_sched_read_stats(w->sched);
    int64_t finished = 0;
    for (int f = 0; f <= HD_FINISH_ERROR; f++) finished += w->finished[f];
    assert_int_equal(s.waiting, waiting);
    assert_int_equal(s.running, running);
    assert_int_equal(s.finished, finished);
    assert_int_equal(s.retracted, w->retracted);
    assert_int_equal(s.steps, w->steps);
    assert_int_equal(s.drafted, w->drafted);
    assert_int_equal(s.accepted, w->accepted);
    assert_true(waiting <= w->o.queue_limit + w->o.cache.max_seqs);
    assert_int_equal(s.rows, w->rows);
}

/* Every client is waiting or running, and within its timeout. */
static void check_clients(world *w) {
    int32_t waiting = 0, running = 0;
    for (int i = 0; i < MAX_CLIENTS; i++) {
        const client *c = &w->clients[i];
        if (!c->id) continue;
        assert_false(c->cancelled || c->left);
        assert_true(c->admitted || !c->deadline || w->now < c->deadline);
        waiting += c->slot < 0;
        running += c->slot >= 0;
    }
    check_counters(w, waiting, running);
}

/* Returns the first waiting request that this step must admit: there is a slot, pages for
 * all its known tokens and a page of growth for every request, even if nothing is cached. */
static client *sure_to_enter(world *w) {
    const hd_cache_options *o = &w->o.cache;
    const hd_cache_stats c = hd_cache_read_stats(hd_sched_cache(w->sched));
    client *first = NULL;
    int32_t running = 0, room[HD_N_KV_GROUPS];
    for (int i = 0; i < MAX_CLIENTS; i++) {
        client *q = &w->clients[i];
        const bool late = !q->admitted && q->deadline && w->now >= q->deadline;
        running += q->id && q->slot >= 0;
        if (!q->id || q->slot >= 0 || q->cancelled || late) continue;
        if (waits(w, q)) return NULL; /* it may wait for any time */
        if (!first || goes_before(q, first)) first = q;
    }
    if (!first || running == o->max_seqs) return NULL;
    const int32_t known = (first->n_tokens + o->page_tokens - 1) / o->page_tokens;
    const int32_t near = (o->lookback + w->o.chunk_rows) / o->page_tokens + 3;
    for (int l = 0; l < HD_N_KV_GROUPS; l++) room[l] = c.free[l] + c.evictable[l] - running - 1;
    const bool fits = known <= room[HD_KV_FULL] && (!o->lookback || near <= room[HD_KV_WINDOW]);
    return fits ? first : NULL;
}

void world_step(world *w) {
    hd_err err = {0};
    w->now += 1 + w->took;
    w->took = 0;
    w->stepped = w->failed = w->read_failed = w->gave_up = false;
    client *sure = sure_to_enter(w);
    const int64_t rows = w->rows, before = allocations();
    const hd_status st = hd_sched_step(w->sched, w->now, &err);
    assert_int_equal(allocations(), before);
    if (w->read_failed) {
        assert_int_equal(st, HD_EIO);
        w->rows = hd_sched_read_stats(w->sched).rows;
    } else if (w->failed) {
        assert_int_equal(st, HD_EDEVICE);
        assert_true(hd_sched_idle(w->sched));
        w->rows = hd_sched_read_stats(w->sched).rows; /* rows of a failed step count too */
    } else if (w->gave_up) {
        assert_int_equal(st, HD_OK);
        assert_int_equal(hd_sched_read_stats(w->sched).running, 0);
        w->rows = hd_sched_read_stats(w->sched).rows;
        for (int i = 0; i < MAX_CLIENTS; i++) {
            client *c = &w->clients[i];
            w->retracted += c->id && c->left;
            c->left = false;
        }
    } else if (w->stepped) {
        assert_int_equal(st, HD_OK);
        assert_true(w->rows > rows);
    } else { /* FT25: every running request advances */
        assert_int_equal(st, HD_EAGAIN);
        assert_true(hd_sched_idle(w->sched));
    }
    if (sure) assert_int_equal(sure->entered, w->now);
    w->events++;
    check_clients(w);
}

void world_heal(world *w) {
    int32_t left = MAX_CLIENTS * MAX_CLIENTS * MAX_LEN;
    w->fail_one = w->fail_next = w->fail_read = w->give_up_next = false;
    while (!hd_sched_idle(w->sched)) {
        assert_true(left-- > 0);
        world_step(w);
    }
    for (int i = 0; i < MAX_CLIENTS; i++) assert_true(w->clients[i].id == 0);
    world_check_cache(w);
    hd_sched_flush_cache(w->sched);
    const hd_cache_stats c = hd_cache_read_stats(hd_sched_cache(w->sched));
    for (int l = 0; l < HD_N_KV_GROUPS; l++) assert_int_equal(c.free[l], c.pages[l]);
    assert_true(c.nodes == 0 && c.host[0] == 0 && c.host[1] == 0);
}
