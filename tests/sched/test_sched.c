/* test_sched.c - the scheduler in a simulated world, where the right answer is known.
 *
 * The model is an oracle: the next token is a hash of all tokens before it. Its memory is
 * simulated too: a row writes, into the pages it was given, a hash of its whole prefix, and
 * reads every page a real row would read and compares. Clients submit, cancel and wait at
 * random; pools are small, so requests are retracted, windows evicted and restored all the
 * time. Whatever happens, every text must be the oracle's, and every page must come home. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#include "base/philox.h"
#include "sched/sched.h"

enum { PAGE = 4, VOCAB = 50, MAX_PAGES = 400, MAX_LIVE = 40, MAX_LEN = 200, STOP_ID = 7 };

typedef struct client {
    bool live, cancelled;
    int32_t prompt[MAX_LEN], n_prompt, max_new;
    int32_t text[MAX_LEN], n_text;
    uint64_t salt, id;
    int64_t deadline;
} client;

typedef struct world {
    hd_sched *sched;
    hd_sched_options o;
    uint64_t memory[HD_N_LIFETIMES][MAX_PAGES][PAGE], snapshots[MAX_PAGES][PAGE];
    uint64_t slot_salt[MAX_LIVE];
    client clients[MAX_LIVE];
    uint64_t seed, draws, next_id;
    int64_t now, events, finished[HD_FINISH_ERROR + 1];
    bool fail_next, fail_one;
} world;

static uint32_t draw(world *w, uint32_t below) {
    return hd_philox_at(w->seed, 1, w->draws++).v[0] % below;
}

static uint64_t chain(uint64_t before, int32_t token) {
    uint64_t h = (before ^ (uint64_t)(token + 1)) * 0x9E3779B97F4A7C15u;
    return (h ^ h >> 29) * 0xBF58476D1CE4E5B9u + 1;
}

/* Long runs of one token make texts that share prefixes, and stop now and then. */
static int32_t oracle(uint64_t hash) {
    return hash % 31 == 0 ? STOP_ID : (int32_t)(hash >> 32) % 3 + 10;
}

/* ---- the simulated device ---- */

static uint64_t *cell(world *w, const hd_work *k, int life, int32_t pos) {
    const int32_t page = k->pages[life][pos / PAGE];
    assert_true(page >= 0 && page < w->o.cache.n_pages[life]);
    return &w->memory[life][page][pos % PAGE];
}

/* The hash of tokens[0..pos], which a row at pos + 1 finds in the page of pos. */
static uint64_t prefix_hash(world *w, const hd_work *k, int32_t pos) {
    return pos < 0 ? w->slot_salt[k->slot] : *cell(w, k, HD_LIFE_ENTRIES, pos);
}

static void read_everything(world *w, const hd_work *k, const client *c) {
    uint64_t hash = w->slot_salt[k->slot];
    for (int32_t p = 0; p < k->start; p++) {
        const int32_t token = p < c->n_prompt ? c->prompt[p] : c->text[p - c->n_prompt];
        hash = chain(hash, token);
        assert_true(*cell(w, k, HD_LIFE_ENTRIES, p) == hash);
        if (w->o.cache.reach && p >= k->start - w->o.cache.reach) {
            assert_true(*cell(w, k, HD_LIFE_WINDOW, p) == hash);
        }
    }
}

static client *client_of(world *w, uint64_t id) {
    for (int i = 0; i < MAX_LIVE; i++) {
        if (w->clients[i].live && w->clients[i].id == id) return &w->clients[i];
    }
    return NULL;
}

static client *slot_clients[MAX_LIVE]; /* who sits in which slot; one world at a time */

static void compute(world *w, const hd_work *k, hd_chosen *out) {
    read_everything(w, k, slot_clients[k->slot]);
    for (int32_t i = 0; i < k->n; i++) {
        const int32_t pos = k->start + i;
        const uint64_t hash = chain(prefix_hash(w, k, pos - 1), k->tokens[i]);
        *cell(w, k, HD_LIFE_ENTRIES, pos) = hash;
        if (w->o.cache.reach) *cell(w, k, HD_LIFE_WINDOW, pos) = hash;
    }
    *out = (hd_chosen){.status = HD_OK};
    for (int32_t i = k->n - k->n_choose; i < k->n; i++) {
        const int32_t token = oracle(prefix_hash(w, k, k->start + i));
        out->tokens[out->n_tokens++] = token;
        if (i + 1 == k->n || k->tokens[i + 1] != token) break;
    }
    if (!k->n_choose) return;
    uint64_t hash = prefix_hash(w, k, k->start + k->n - k->n_choose + out->n_tokens - 1);
    int32_t token = out->tokens[out->n_tokens - 1];
    for (int32_t d = 0; d < k->want_drafts; d++) {
        hash = chain(hash, token);
        token = draw(w, 4) ? oracle(hash) : 10; /* a wrong draft sometimes */
        out->drafts[out->n_drafts++] = token;
    }
}

static hd_status run(void *ctx, const hd_page_copy *copies, int32_t n_copies,
                     const hd_work *works, int32_t n_works, hd_chosen *chosen, hd_err *err) {
    world *w = ctx;
    int32_t rows = 0;
    bool seen[MAX_LIVE] = {false};
    for (int32_t i = 0; i < n_copies; i++) {
        uint64_t *page = w->memory[HD_LIFE_WINDOW][copies[i].page];
        uint64_t *snapshot = w->snapshots[copies[i].snapshot];
        memcpy(copies[i].save ? snapshot : page, copies[i].save ? page : snapshot,
               PAGE * sizeof *page);
    }
    if (w->fail_next) {
        w->fail_next = false;
        return HD_FAIL(err, HD_EDEVICE, "simulated device failure");
    }
    for (int32_t i = 0; i < n_works; i++) {
        assert_false(seen[works[i].slot]);
        seen[works[i].slot] = true;
        rows += works[i].n;
        compute(w, &works[i], &chosen[i]);
        if (w->fail_one) chosen[i].status = HD_EDEVICE;
        w->fail_one = false;
    }
    assert_true(rows <= w->o.step_rows);
    return HD_OK;
}

/* ---- the clients ---- */

static void enter(void *ctx, uint64_t id, int32_t slot, const int32_t *tokens, int32_t n) {
    world *w = ctx;
    client *c = client_of(w, id);
    assert_non_null(c);
    assert_int_equal(n, c->n_prompt + c->n_text); /* nothing lost by a retraction */
    assert_memory_equal(tokens, c->prompt, (size_t)c->n_prompt * sizeof *tokens);
    slot_clients[slot] = c;
    w->slot_salt[slot] = c->salt;
}

static void leave(void *ctx, uint64_t id, int32_t slot) {
    (void)ctx;
    assert_true(slot_clients[slot]->id == id);
    slot_clients[slot] = NULL;
}

static void event(void *ctx, const hd_sched_event *e) {
    world *w = ctx;
    client *c = client_of(w, e->id);
    assert_non_null(c); /* nothing after the finishing event */
    w->events++;
    for (int32_t i = 0; i < e->n; i++) c->text[c->n_text++] = e->tokens[i];
    assert_true(c->n_text <= c->max_new && e->n_cached < c->n_prompt);
    if (e->finish == HD_FINISH_NONE) return;
    uint64_t hash = c->salt;
    for (int32_t i = 0; i < c->n_prompt; i++) hash = chain(hash, c->prompt[i]);
    for (int32_t i = 0; i < c->n_text; i++) {
        assert_int_equal(c->text[i], oracle(hash));
        assert_true(i + 1 == c->n_text || c->text[i] != STOP_ID);
        hash = chain(hash, c->text[i]);
    }
    if (e->finish == HD_FINISH_STOP) assert_int_equal(c->text[c->n_text - 1], STOP_ID);
    if (e->finish == HD_FINISH_LENGTH) assert_int_equal(c->n_text, c->max_new);
    if (e->finish == HD_FINISH_ABORT) assert_true(c->cancelled);
    if (e->finish == HD_FINISH_TIMEOUT) assert_true(c->deadline && w->now >= c->deadline);
    w->finished[e->finish]++;
    c->live = false;
}

static void submit(world *w) {
    client *c = NULL;
    for (int i = 0; i < MAX_LIVE && !c; i++) {
        if (!w->clients[i].live) c = &w->clients[i];
    }
    if (!c) return;
    *c = (client){.live = true, .id = w->next_id++, .salt = 1 + draw(w, 2)};
    c->n_prompt = 1 + (int32_t)draw(w, 100);
    c->max_new = 1 + (int32_t)draw(w, 60);
    c->deadline = draw(w, 5) ? 0 : w->now + (int64_t)draw(w, 50);
    for (int32_t i = 0; i < c->n_prompt; i++) {
        c->prompt[i] = draw(w, 50) ? i % 4 : (int32_t)draw(w, 5);
    }
    const int32_t stop = STOP_ID;
    const hd_request r = {.id = c->id,
                          .prompt = c->prompt,
                          .n_prompt = c->n_prompt,
                          .max_new = c->max_new,
                          .priority = (int32_t)draw(w, 3),
                          .draft_tokens = (int32_t)draw(w, 7) - 1, /* -1: as many as pay */
                          .salt = c->salt,
                          .queue_until_ns = c->deadline,
                          .stop_ids = &stop,
                          .n_stop = 1};
    if (hd_sched_submit(w->sched, &r, NULL) != HD_OK) c->live = false;
}

static void act(world *w) {
    w->now++;
    if (draw(w, 3) == 0) submit(w);
    if (draw(w, 40) == 0) {
        client *c = &w->clients[draw(w, MAX_LIVE)];
        if (c->live) {
            c->cancelled = true;
            hd_sched_cancel(w->sched, c->id);
        }
    }
    w->fail_one = draw(w, 300) == 0;
    w->fail_next = draw(w, 3000) == 0;
    if (draw(w, 400) == 0) hd_sched_flush_cache(w->sched);
    hd_err err = {0};
    hd_sched_turn(w->sched, w->now, &err);
}

static void open_world(world *w, uint64_t seed) {
    memset(w, 0, sizeof *w);
    w->seed = seed;
    w->next_id = 1;
    const int32_t reach[] = {0, 3, 4, 9}, leases = 2 + (int32_t)seed % 7;
    const int32_t lease_pages = (MAX_LEN + PAGE - 1) / PAGE;
    w->o = (hd_sched_options){
        .cache = {.page_tokens = PAGE,
                  .reach = reach[seed % 4],
                  .n_pages = {lease_pages + (int32_t)(seed * 13 % 150),
                              30 + (int32_t)(seed * 7 % 60)},
                  .n_snapshots = (int32_t)(seed % 3) * 60,
                  .n_leases = leases,
                  .lease_pages = lease_pages},
        .step_rows = leases * HD_MAX_CHOSEN + (int32_t)(seed % 30),
        .chunk_rows = 1 + (int32_t)(seed * 5 % 40),
        .queue_limit = 20,
        .max_positions = 170
    };
    const hd_runner runner = {w, run};
    const hd_sched_hooks hooks = {w, enter, leave, event};
    hd_err err = {0};
    if (hd_sched_open(&w->sched, &w->o, &runner, &hooks, &err) != HD_OK)
        fail_msg("%s", err.msg);
}

/* Faults stop; everything that lives must end, and every page must come home. */
static void heal(world *w) {
    for (int i = 0; i < 20000 && !hd_sched_idle(w->sched); i++) {
        hd_err err = {0};
        w->now++;
        w->fail_one = w->fail_next = false;
        hd_sched_turn(w->sched, w->now, &err);
    }
    assert_true(hd_sched_idle(w->sched));
    for (int i = 0; i < MAX_LIVE; i++) assert_false(w->clients[i].live);
    hd_sched_flush_cache(w->sched);
    const hd_cache_stats c = hd_cache_read_stats(hd_sched_cache(w->sched));
    for (int l = 0; l < HD_N_LIFETIMES; l++) assert_int_equal(c.free[l], c.pages[l]);
}

static void every_text_is_the_oracles(void **state) {
    (void)state;
    world *w = malloc(sizeof *w);
    int64_t retracted = 0, events = 0, accepted = 0, finished[HD_FINISH_ERROR + 1] = {0};
    for (uint64_t seed = 0; seed < 100; seed++) {
        open_world(w, seed);
        for (int i = 0; i < 2000; i++) {
            hd_err err = {0};
            act(w);
            if (i % 64 == 0 && hd_cache_check(hd_sched_cache(w->sched), &err) != HD_OK) {
                fail_msg("seed %d: %s", (int)seed, err.msg);
            }
        }
        heal(w);
        const hd_sched_stats s = hd_sched_read_stats(w->sched);
        retracted += s.retracted;
        accepted += s.accepted;
        events += w->events;
        for (int f = 0; f <= HD_FINISH_ERROR; f++) finished[f] += w->finished[f];
        hd_sched_close(w->sched);
    }
    /* The world was rough enough to mean something. */
    assert_true(retracted > 1000 && accepted > 10000 && events > 100000);
    for (int f = HD_FINISH_STOP; f <= HD_FINISH_ERROR; f++) assert_true(finished[f] > 50);
    free(w);
}

static void a_run_repeats(void **state) {
    (void)state;
    world *w = malloc(sizeof *w);
    hd_sched_stats first = {0}, second;
    for (int round = 0; round < 2; round++) {
        open_world(w, 11);
        for (int i = 0; i < 3000; i++) act(w);
        second = hd_sched_read_stats(w->sched);
        if (round == 0) first = second;
        hd_sched_close(w->sched);
    }
    assert_memory_equal(&first, &second, sizeof first);
    free(w);
}

static void what_cannot_run_is_refused(void **state) {
    (void)state;
    world *w = malloc(sizeof *w);
    int32_t prompt[MAX_LEN] = {0};
    hd_request r = {.id = 1, .prompt = prompt, .n_prompt = 100, .max_new = 71};
    hd_err err = {0};
    open_world(w, 1);
    assert_int_equal(hd_sched_submit(w->sched, &r, &err), HD_EINVAL);
    assert_string_equal(err.msg,
                        "100 prompt tokens and 71 output tokens exceed the context of 170");
    r.n_prompt = 0;
    assert_int_equal(hd_sched_submit(w->sched, &r, NULL), HD_EINVAL);
    r.n_prompt = 5;
    r.max_new = 0;
    assert_int_equal(hd_sched_submit(w->sched, &r, NULL), HD_EINVAL);
    r.max_new = 5;
    for (int i = 0; i < w->o.queue_limit; i++) {
        assert_int_equal(hd_sched_submit(w->sched, &r, NULL), HD_OK);
    }
    assert_int_equal(hd_sched_submit(w->sched, &r, NULL), HD_EAGAIN);
    hd_sched_close(w->sched);
    hd_sched_options o = w->o;
    o.step_rows = 3;
    assert_int_equal(hd_sched_open(&w->sched, &o, &(hd_runner){0}, &(hd_sched_hooks){0}, NULL),
                     HD_EINVAL);
    free(w);
}

int test_sched(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_text_is_the_oracles),
        cmocka_unit_test(a_run_repeats),
        cmocka_unit_test(what_cannot_run_is_refused),
    };
    return cmocka_run_group_tests_name("sched", tests, NULL, NULL);
}
