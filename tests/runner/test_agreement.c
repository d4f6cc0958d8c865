/* test_agreement.c - the agreement of attention groups on a step (runner/groups.c), explored exhaustively for three groups: every
 * combination of what each could plan, in every order; and, over the messages of comm/messages.c, every order in
 * which these arrive, with the loss of a rank, or a failed step, at every point, and with all messages of the
 * epoch before, which change nothing. */
#include "check.h"

#include <stdio.h>

#include "base/siphash.h"
#include "comm/messages.h"
#include "runner/groups_internal.h"
#include "fakes/seen_states.h"

enum { GROUPS = 3, SEQS = 2, DRAFTS = 1 };

/* ---- every combination of plans ---- */

static const runner_step_limits limits = {SEQS, DRAFTS};

enum { GRAPHS = 2, MAX_WORDS = 512 }; /* which an in-flight step can be */

/* What overlap.c can plan. */
static bool can_be(const runner_step_word *w) {
    if (w->kind == RUNNER_IDLE) return !w->n && !w->depth && !w->wanted && !w->waits;
    if (w->n == 0 || w->wanted > w->depth) return false;
    return w->kind != RUNNER_CONTINUES || w->in_flight;
}

static int32_t list_words(runner_step_word out[MAX_WORDS]) {
    enum { KINDS = RUNNER_EAGER + 1, N = SEQS + 1, D = DRAFTS + 1, FLIGHTS = GRAPHS + 1 };
    int32_t n = 0;
    for (int32_t i = 0; i < KINDS * N * D * N * D * 2 * FLIGHTS; i++) {
        int32_t at = i;
        runner_step_word w = {.kind = at % KINDS};
        at /= KINDS;
        w.n = at % N;
        at /= N;
        w.depth = at % D;
        at /= D;
        w.continuing = at % N;
        at /= N;
        w.wanted = at % D;
        at /= D;
        w.waits = at % 2;
        w.in_flight = at / 2;
        if (w.continuing > w.n || !can_be(&w)) continue;
        assert_true(n < MAX_WORDS);
        out[n++] = w;
    }
    return n;
}

static bool any_is(const runner_step_word w[GROUPS], runner_step_kind kind) {
    for (int32_t i = 0; i < GROUPS; i++) {
        if (w[i].kind == (int32_t)kind) return true;
    }
    return false;
}

static runner_step_kind kind_of(const runner_step_word w[GROUPS]) {
    const bool one_graph =
        w[0].in_flight && w[0].in_flight == w[1].in_flight && w[0].in_flight == w[2].in_flight;
    const bool continues = any_is(w, RUNNER_CONTINUES), fresh = any_is(w, RUNNER_FRESH);
    if (any_is(w, RUNNER_EAGER) || (continues && fresh)) return RUNNER_EAGER;
    if (continues) return one_graph ? RUNNER_CONTINUES : RUNNER_EAGER;
    return fresh ? RUNNER_FRESH : RUNNER_IDLE;
}

/* Who continues wants drafts of this depth, and nobody waits. */
static bool next_is_ready(const runner_step_word w[GROUPS], int32_t depth) {
    bool any = false;
    for (int32_t i = 0; i < GROUPS; i++) {
        if (w[i].waits || (w[i].continuing && w[i].wanted != depth)) return false;
        any |= w[i].continuing > 0;
    }
    return any;
}

static void check_plan(const runner_step_word w[GROUPS], const runner_step_word *all) {
    assert_int_equal(all->kind, kind_of(w));
    for (int32_t i = 0; i < GROUPS; i++) {
        assert_true(all->n >= w[i].n && all->depth >= w[i].depth);
        assert_true(all->continuing >= w[i].continuing);
    }
    for (int32_t depth = 0; depth <= DRAFTS; depth++) {
        if (runner_launches_next(all, depth) != next_is_ready(w, depth))
            fail_msg("the step after it, with %d drafts", depth);
    }
}

static runner_step_word join_in_order(const runner_step_word w[GROUPS], const char *order) {
    runner_step_word all, in[GROUPS];
    for (int32_t i = 0; i < GROUPS; i++) in[i] = w[order[i] - '0'];
    assert_int_equal(runner_join_steps(in, GROUPS, &limits, &all, NULL), HD_OK);
    return all;
}

static void every_order_of_groups_gives_one_plan(void **state) {
    static const char *const permutations[] = {"120", "210", "021", "102", "201"};
    static runner_step_word words[MAX_WORDS];
    const int32_t n = list_words(words), step = is_brief() ? 7 : 1;
    (void)state;
    assert_true(n > 150);
    for (int32_t a = 0; a < n; a += step) {
        for (int32_t b = a; b < n; b += step) {
            for (int32_t c = b; c < n; c += step) {
                const runner_step_word w[GROUPS] = {words[a], words[b], words[c]};
                const runner_step_word all = join_in_order(w, "012");
                check_plan(w, &all);
                for (size_t o = 0; o < HD_LEN(permutations); o++) {
                    const runner_step_word other = join_in_order(w, permutations[o]);
                    if (memcmp(&all, &other, sizeof all)) fail_msg("of %d, %d, %d", a, b, c);
                }
            }
        }
    }
}

static void refuse(runner_step_word wrong) {
    runner_step_word all, w[GROUPS] = {0};
    hd_err err = {0};
    w[1] = wrong;
    assert_int_equal(runner_join_steps(w, GROUPS, &limits, &all, &err), HD_EPEER);
    assert_non_null(strstr(err.msg, "attention group 1"));
}

static void no_plan_is_refused(void **state) {
    (void)state;
    refuse((runner_step_word){.kind = RUNNER_EAGER + 1, .n = 1});
    refuse((runner_step_word){.kind = -1, .n = 1});
    refuse((runner_step_word){.kind = RUNNER_FRESH, .n = SEQS + 1});
    refuse((runner_step_word){.kind = RUNNER_FRESH, .n = -1});
    refuse((runner_step_word){.kind = RUNNER_FRESH, .n = 1, .depth = DRAFTS + 1});
    refuse((runner_step_word){.kind = RUNNER_FRESH, .n = 1, .continuing = 2});
    refuse((runner_step_word){.kind = RUNNER_FRESH, .n = 1, .wanted = DRAFTS + 1});
}

/* ---- every order of messages ---- */

/* In the first epoch leaders of three groups run two steps, in the second those that are left run one: all
 * three, after a step that failed. */
enum { EPOCHS = 2, STEPS = 2, SLOTS = EPOCHS * STEPS * GROUPS * GROUPS, MAX_BYTES = 64 };

static const int32_t steps_of[EPOCHS] = {STEPS, 1};

typedef struct mail {
    hd_message head;
    _Alignas(float) uint8_t bytes[MAX_BYTES];
    bool sent, delivered;
} mail;

typedef struct leader {
    bool alive;
    int32_t epoch, place, steps; /* epoch: 0, 1; steps: agreed on in it */
    hd_received inbox[STEPS][GROUPS];
} leader;

/* All that a later event depends on. */
typedef struct world {
    leader at[GROUPS];
    mail mail[SLOTS]; /* by epoch, step, sender and receiver */
    bool ended;       /* the first epoch has; so one rank is lost, or a step failed */
    int32_t n;        /* ranks of the second epoch */
} world;

typedef struct explorer {
    world *w;
    leader *runs; /* whose code runs */
    hd_stream *stream;
    int64_t n_states, n_ends, n_late;
} explorer;

static explorer ex;

static mail *mail_of(world *w, int32_t epoch, uint64_t step, int32_t from, int32_t to) {
    return &w->mail[((epoch * STEPS + (int32_t)step) * GROUPS + from) * GROUPS + to];
}

/* The rank at a place of an epoch. */
static int32_t rank_of(const world *w, int32_t epoch, int32_t place) {
    for (int32_t i = 0; epoch && i < GROUPS; i++) {
        if (w->at[i].alive && place-- == 0) return i;
    }
    return place;
}

static hd_message_limits limits_of(const world *w, int32_t epoch) {
    return (hd_message_limits){
        .world = epoch ? w->n : GROUPS,
        .epoch = (uint32_t)epoch + 1,
        .max_bytes = MAX_BYTES,
        .key = {3, 5}, /* of both epochs, so that only their numbers differ */
        .authenticates_bytes = true
    };
}

/* What a group plans depends on epoch, step and place: a word of another one would be seen. */
static runner_step_word plan_of(int32_t epoch, int32_t place, int32_t step) {
    return (runner_step_word){.kind = RUNNER_FRESH,
                              .n = 1 + epoch * 8 + step * 3 + place,
                              .depth = (epoch + step + place) % 3,
                              .continuing = 1 + place,
                              .in_flight = 1 + epoch};
}

/* ---- a link whose messages wait until they are delivered ---- */

static void link_send(void *ctx, int32_t to, hd_message *m, const void *data, int32_t set) {
    const explorer *e = ctx;
    const int32_t epoch = e->runs->epoch;
    mail *out = mail_of(e->w, epoch, m->ticket, rank_of(e->w, epoch, m->from),
                        rank_of(e->w, epoch, to));
    const hd_message_limits l = limits_of(e->w, epoch);
    (void)set;
    assert_true(m->n <= MAX_BYTES && m->ticket < STEPS);
    if (out->sent) return; /* it runs once more what it has done */
    hd_message_seal(m, &l, data);
    out->head = *m;
    memcpy(out->bytes, data, (size_t)m->n);
    out->sent = true;
}

static void *link_room(void *ctx, hd_group group, hd_message_lane lane, uint64_t ticket,
                       uint64_t n) {
    (void)ctx, (void)group, (void)lane, (void)ticket, (void)n;
    return NULL;
}

static bool link_flush(void *ctx, int32_t set) {
    (void)ctx, (void)set;
    return true;
}

/* NULL: it has not come, and the leader begins again when one has. */
static hd_received *link_wait(void *ctx, int32_t from, hd_group group, hd_message_lane lane,
                              uint64_t ticket) {
    const explorer *e = ctx;
    (void)group, (void)lane;
    hd_received *r = &e->runs->inbox[ticket][from];
    return r->full ? r : NULL;
}

static void link_release(void *ctx, hd_received *r) {
    (void)ctx, (void)r;
}

static void link_abort(void *ctx, const char *why) {
    (void)ctx;
    fail_msg("%s", why);
}

static const char *link_ended(void *ctx) {
    (void)ctx;
    return NULL;
}

/* ---- leaders ---- */

/* All that agreed on a step agreed on the same, which is what their groups had to do. */
static void check_agreed(int32_t epoch, int32_t place, int32_t step, int32_t n,
                         const runner_step_word *all) {
    runner_step_word words[GROUPS], right;
    const runner_step_limits l = {SLOTS, DRAFTS + 2};
    for (int32_t i = 0; i < n; i++) words[i] = plan_of(epoch, i, step);
    assert_int_equal(runner_join_steps(words, n, &l, &right, NULL), HD_OK);
    if (memcmp(all, &right, sizeof right))
        fail_msg("place %d of epoch %d agreed on another step %d", place, epoch, step);
}

/* Runs a leader from the beginning of its epoch as far as messages let it. */
static void run_leader(explorer *e, leader *l) {
    static const hd_link of = {.send = link_send,
                               .room = link_room,
                               .flush = link_flush,
                               .wait = link_wait,
                               .release = link_release,
                               .abort = link_abort,
                               .ended = link_ended,
                               .ctx = &ex};
    const int32_t n = l->epoch ? e->w->n : GROUPS;
    hd_messages *messages;
    hd_err err = {0};
    runner_step_word words[GROUPS], all;
    e->runs = l;
    const hd_parallel_config groups = hd_parallel_expert(n, 0);
    assert_int_equal(hd_messages_open(&messages, &of, &groups, l->place, NULL, &err), HD_OK);
    hd_model_runner *x = calloc(1, sizeof *x);
    assert_non_null(x);
    x->words = words;
    x->n_groups = n;
    x->n_drafts = DRAFTS + 1;
    x->o.n_slots = SLOTS;
    x->env.comm = hd_messages_comm(messages);
    x->env.stream = e->stream;
    l->steps = 0;
    while (l->steps < steps_of[l->epoch]) {
        const runner_step_word own = plan_of(l->epoch, l->place, l->steps);
        if (runner_agree_step(x, &own, &all, &err) != HD_OK) break;
        check_agreed(l->epoch, l->place, l->steps++, n, &all);
    }
    hd_stream_sync(e->stream, &err); /* forgets that messages are missing */
    free(x);
    hd_messages_close(messages);
}

/* A message comes, as ucx_on_message() takes one. */
static void deliver(explorer *e, leader *to, mail *m, bool belongs) {
    const hd_message_limits l = limits_of(e->w, to->epoch);
    const hd_status st = hd_message_check(&m->head, &l, m->bytes, m->head.n, NULL);
    if (!belongs) {
        if (st == HD_OK) fail_msg("a message of epoch %u was taken late", m->head.epoch);
        e->n_late++;
        return;
    }
    assert_int_equal(st, HD_OK);
    hd_received *r = &to->inbox[m->head.ticket][m->head.from];
    assert_false(r->full);
    m->delivered = true;
    *r = (hd_received){.head = m->head, .data = m->bytes, .full = true};
}

/* The bytes of received messages lie in the world, which is copied. */
static void point_to_mail(world *w) {
    for (int32_t to = 0; to < GROUPS; to++) {
        for (int32_t k = 0; k < STEPS * GROUPS; k++) {
            hd_received *r = &w->at[to].inbox[k / GROUPS][k % GROUPS];
            const int32_t epoch = w->at[to].epoch;
            if (!r->full) continue;
            r->data =
                mail_of(w, epoch, r->head.ticket, rank_of(w, epoch, r->head.from), to)->bytes;
        }
    }
}

/* ---- exploring ---- */

enum { TABLE = 1 << 20 };

static uint64_t *seen; /* [TABLE] keys of states; 0: free */

static uint64_t key_of(const world *w) {
    hd_siphash s;
    hd_siphash_init(&s, (const uint64_t[2]){1, 2});
    for (int32_t i = 0; i < GROUPS; i++) {
        const leader *l = &w->at[i];
        hd_siphash_add(&s, &(const int32_t[]){l->alive, l->epoch, l->steps, w->ended},
                       4 * sizeof(int32_t));
    }
    for (int32_t i = 0; i < SLOTS; i++) {
        const uint8_t m[2] = {w->mail[i].sent, w->mail[i].delivered};
        hd_siphash_add(&s, m, sizeof m);
    }
    return hd_siphash_value(&s) | 1;
}

static bool is_new(const world *w) {
    if (!seen_states_add(seen, TABLE, key_of(w))) return false;
    assert_true(++ex.n_states < TABLE / 2);
    return true;
}

/* All that was sent in the first epoch, also what had been delivered, comes to a leader of the second. */
static void deliver_late(explorer *e) {
    for (int32_t i = 0; i < STEPS * GROUPS * GROUPS; i++) {
        leader *to = &e->w->at[i % GROUPS];
        if (e->w->mail[i].sent && to->alive && to->epoch) deliver(e, to, &e->w->mail[i], false);
    }
}

static void explore(world *w);

static void go_on(const world *w, const leader *moved) {
    world *next = malloc(sizeof *next);
    assert_non_null(next);
    *next = *w;
    point_to_mail(next);
    ex.w = next;
    if (moved) run_leader(&ex, &next->at[moved - w->at]);
    if (is_new(next)) explore(next);
    free(next);
}

/* The epoch of a rank ends: it hears of a loss, or its step fails. */
static void enter_next(world *w, int32_t rank) {
    leader *l = &w->at[rank];
    *l = (leader){.alive = true, .epoch = 1};
    for (int32_t i = 0; i < rank; i++) l->place += w->at[i].alive;
}

static void explore_end_of_epoch(const world *w) {
    for (int32_t lost = -1; lost < GROUPS && !w->ended; lost++) {
        world next = *w;
        next.ended = true;
        next.n = GROUPS - (lost >= 0);
        if (lost >= 0) next.at[lost].alive = false;
        go_on(&next, NULL);
    }
    for (int32_t i = 0; i < GROUPS && w->ended; i++) {
        world next = *w;
        if (!w->at[i].alive || w->at[i].epoch) continue;
        enter_next(&next, i);
        go_on(&next, &next.at[i]);
    }
}

static void explore(world *w) {
    bool stuck = true;
    ex.w = w;
    deliver_late(&ex);
    for (int32_t i = 0; i < SLOTS; i++) {
        const mail *m = &w->mail[i];
        const leader *to = &w->at[i % GROUPS];
        if (!m->sent || m->delivered || !to->alive || (int32_t)m->head.epoch != to->epoch + 1)
            continue;
        world next = *w;
        point_to_mail(&next);
        ex.w = &next;
        deliver(&ex, &next.at[i % GROUPS], &next.mail[i], true);
        go_on(&next, &next.at[i % GROUPS]);
        stuck = false;
    }
    explore_end_of_epoch(w);
    for (int32_t i = 0; i < GROUPS && w->ended; i++) stuck &= !w->at[i].alive || w->at[i].epoch;
    if (!stuck) return;
    ex.n_ends++;
    for (int32_t i = 0; i < GROUPS; i++) {
        if (w->at[i].alive && w->at[i].steps < steps_of[w->at[i].epoch])
            fail_msg("rank %d waits for ever in epoch %d", i, w->at[i].epoch);
    }
}

static void every_order_of_messages_gives_one_plan(void **state) {
    hd_device *device;
    world *w = calloc(1, sizeof *w);
    (void)state;
    ex = (explorer){0};
    seen = calloc(TABLE, sizeof *seen);
    assert_true(w && seen);
    assert_int_equal(hd_device_open_cpu(&device, &(hd_cpu_options){.n_threads = 1}, NULL),
                     HD_OK);
    assert_int_equal(hd_stream_open(&ex.stream, device, NULL), HD_OK);
    for (int32_t i = 0; i < GROUPS; i++) {
        w->at[i] = (leader){.alive = true, .place = i};
        ex.w = w;
        run_leader(&ex, &w->at[i]);
    }
    explore(w);
    assert_true(ex.n_states > 1000 && ex.n_ends > 0 && ex.n_late > 1000);
    hd_stream_close(ex.stream);
    hd_device_close(device);
    free(seen);
    free(w);
}

int test_agreement(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_order_of_groups_gives_one_plan),
        cmocka_unit_test(no_plan_is_refused),
        cmocka_unit_test(every_order_of_messages_gives_one_plan),
    };
    return cmocka_run_group_tests_name("agreement", tests, NULL, NULL);
}
