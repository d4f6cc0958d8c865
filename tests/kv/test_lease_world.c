/* test_lease_world.c - handovers between simulated servers under faults: random runs, all
 * interleavings of small worlds, and proof that the shadow memory finds what a check prevents. */
#include "check.h"

#include <stdlib.h>

#include "base/philox.h"
#include "lease_world.h"

typedef struct run {
    world *w;
    uint64_t seed, draws;
    uint32_t faults_on; /* bit per kind of fault */
    uint32_t per_fault; /* one move in so many is a fault */
    uint64_t made[WORLD_N_MOVES];
} run;

static uint32_t draw(run *r, uint32_t below) {
    return hd_philox_at(r->seed, 1, r->draws++).v[0] % below;
}

static void make(run *r, world_move m) {
    lease_world_make(r->w, m);
    r->made[m.kind]++;
}

static void refill(run *r) {
    const uint32_t n = (uint32_t)r->w->n_servers, receiver = draw(r, n);
    const uint32_t sender = (receiver + 1 + draw(r, n - 1)) % n;
    lease_world_add(r->w, (int32_t)receiver, (int32_t)sender, 1 + draw(r, WORLD_LEASE_PAGES));
}

static bool make_fault(run *r) {
    world_move moves[WORLD_MOVES];
    const int32_t n = lease_world_faults(r->w, moves);
    const world_move m = moves[draw(r, (uint32_t)n)];
    if (!(r->faults_on >> m.kind & 1)) return false;
    make(r, m);
    return true;
}

static bool make_move(run *r) {
    world_move moves[WORLD_MOVES];
    const int32_t n = lease_world_moves(r->w, moves);
    if (n > 0) make(r, moves[draw(r, (uint32_t)n)]);
    return n > 0;
}

/* Without faults and new requests, everything ends within the deadlines. */
static void heal(run *r) {
    int32_t n = 0;
    while (make_move(r)) assert_true(++n < 10000);
    lease_world_check(r->w, true);
}

/* Returns the first invariant that failed, or NULL. The seed chooses the world and the faults. */
static const char *simulate(run *r, uint64_t seed, int32_t n_events, world_omission omits) {
    r->seed = seed;
    r->draws = 0;
    lease_world_open(r->w, 2 + (int32_t)draw(r, WORLD_SERVERS - 1),
                     WORLD_LEASE_PAGES + (int32_t)draw(r, WORLD_POOL - WORLD_LEASE_PAGES + 1));
    r->w->omits = omits;
    r->w->has_order = draw(r, 2);
    r->faults_on = draw(r, 1u << 31) | (omits ? ~0u : 0);
    r->per_fault = 5 + draw(r, 60);
    for (int32_t i = 0; i < n_events && !r->w->wrong; i++) {
        if (draw(r, 4) == 0) refill(r);
        if (draw(r, r->per_fault) != 0 || !make_fault(r)) make_move(r);
        if (i % 64 == 0) lease_world_check(r->w, false);
    }
    if (!r->w->wrong) heal(r);
    return r->w->wrong;
}

/* FT45 .. FT50, FT53, FT54, FT57 .. FT59: in any order, every request ends once, no page is lost
 * or written after its release, and what is owned are the bytes that were computed. */
static void random_worlds_lose_nothing(void **state) {
    (void)state;
    enum { EVENTS = 5000 };
    const uint64_t n_runs = is_brief() ? 20 : 2000; /* 10^7 events */
    run r = {.w = malloc(sizeof *r.w)};
    hd_lease_counts sum = {0};
    for (uint64_t seed = 1; seed <= n_runs; seed++) {
        const char *wrong = simulate(&r, seed, EVENTS, WORLD_OMITS_NOTHING);
        if (wrong) fail_msg("seed %llu: %s", (unsigned long long)seed, wrong);
        const hd_lease_counts counts = lease_world_counts(r.w);
        sum.owned[0] += counts.owned[0];
        sum.owned[1] += counts.owned[1];
        for (int32_t i = 0; i < HD_N_LEASE_REASONS; i++) {
            sum.aborted[i] += counts.aborted[i];
            sum.discarded[i] += counts.discarded[i];
        }
    }
    for (int32_t k = 0; k < WORLD_N_MOVES; k++) assert_true(r.made[k] > 0);
    assert_true(sum.owned[1] > 50 * n_runs);
    assert_true(sum.aborted[HD_LEASE_DEADLINE] > 0 && sum.aborted[HD_LEASE_HOLE] > 0);
    assert_true(sum.discarded[HD_LEASE_EPOCH] > 0 && sum.discarded[HD_LEASE_DIGEST] > 0);
    assert_true(sum.discarded[HD_LEASE_STALE] > 0 && sum.discarded[HD_LEASE_REPEATED] > 0);
    free(r.w);
}

/* The same seed is the same run. */
static void a_run_repeats(void **state) {
    (void)state;
    run r = {.w = malloc(sizeof *r.w)};
    for (uint64_t seed = 1; seed <= 5; seed++) {
        assert_null(simulate(&r, seed, 2000, WORLD_OMITS_NOTHING));
        const uint64_t first = lease_world_hash(r.w);
        assert_null(simulate(&r, seed, 2000, WORLD_OMITS_NOTHING));
        assert_true(lease_world_hash(r.w) == first);
    }
    free(r.w);
}

/* Without one of the checks, the shadow memory finds a wrong page within a few runs. */
static void each_check_is_needed(void **state) {
    (void)state;
    run r = {.w = malloc(sizeof *r.w)};
    for (int32_t omits = WORLD_OMITS_QUIESCE; omits <= WORLD_OMITS_DIGEST; omits++) {
        const char *wrong = NULL;
        for (uint64_t seed = 1; seed <= 100 && !wrong; seed++) {
            wrong = simulate(&r, seed, 5000, (world_omission)omits);
        }
        if (!wrong) fail_msg("nothing noticed omission %d", omits);
    }
    free(r.w);
}

/* All interleavings */

typedef struct search {
    uint64_t *seen; /* [mask + 1] open addressing by hash */
    uint64_t mask;
    uint64_t n_states;
    int32_t n_faults;
    const char *wrong;
} search;

static bool is_new(search *s, uint64_t hash) {
    hash |= 1;
    for (uint64_t i = hash >> 8 & s->mask;; i = (i + 1) & s->mask) {
        if (s->seen[i] == hash) return false;
        if (s->seen[i] != 0) continue;
        s->seen[i] = hash;
        if (++s->n_states > s->mask / 2) fail_msg("more states than the table holds");
        return true;
    }
}

typedef struct frame {
    world w;
    world_move moves[WORLD_MOVES];
    int32_t n_moves, n_normal, next, n_faults;
} frame;

/* Enters a state; returns false if it is known, is an end, or is wrong. */
static bool enter(search *s, frame *f) {
    lease_world_check(&f->w, false);
    if (f->w.wrong) s->wrong = f->w.wrong;
    if (s->wrong || !is_new(s, lease_world_hash(&f->w) + (uint64_t)f->n_faults * 2))
        return false;
    f->n_normal = lease_world_moves(&f->w, f->moves);
    f->n_moves = f->n_normal;
    f->next = 0;
    if (f->n_normal == 0) {
        lease_world_check(&f->w, true);
        s->wrong = f->w.wrong;
        return false;
    }
    if (f->n_faults < s->n_faults)
        f->n_moves += lease_world_faults(&f->w, f->moves + f->n_normal);
    return true;
}

/* Depth first, without recursion. */
static void explore(search *s, frame *stack, int32_t depth) {
    int32_t top = enter(s, &stack[0]) ? 0 : -1;
    while (top >= 0 && !s->wrong) {
        frame *f = &stack[top];
        if (f->next == f->n_moves) {
            top--;
            continue;
        }
        if (top + 1 == depth) fail_msg("the world does not end");
        frame *g = &stack[top + 1];
        const int32_t i = f->next++;
        lease_world_copy(&g->w, &f->w);
        g->n_faults = f->n_faults + (i >= f->n_normal);
        lease_world_make(&g->w, f->moves[i]);
        if (enter(s, g)) top++;
    }
}

static void explore_world(uint32_t pages_0, uint32_t pages_1, int32_t n_faults) {
    enum { DEPTH = 200 };
    const uint64_t n_seen = 1ull << (is_long() ? 26 : 21);
    frame *stack = calloc(DEPTH, sizeof *stack);
    search s = {
        .seen = calloc(n_seen, sizeof *s.seen), .mask = n_seen - 1, .n_faults = n_faults};
    assert_non_null(s.seen);
    lease_world_open(&stack[0].w, 2, 3);
    stack[0].w.has_order = true;
    lease_world_add(&stack[0].w, 0, 1, pages_0);
    if (pages_1) lease_world_add(&stack[0].w, 0, 1, pages_1);
    explore(&s, stack, DEPTH);
    if (s.wrong) fail_msg("%s", s.wrong);
    free(s.seen);
    free(stack);
    print_message("%llu states of %d requests and %d faults\n", (unsigned long long)s.n_states,
                  1 + (pages_1 > 0), n_faults);
}

static void small_worlds_lose_nothing_at_all(void **state) {
    (void)state;
    explore_world(3, 0, 2);
    explore_world(2, 1, is_long() ? 2 : 1);
}

int test_lease_world(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_worlds_lose_nothing),
        cmocka_unit_test(a_run_repeats),
        cmocka_unit_test(each_check_is_needed),
        cmocka_unit_test(small_worlds_lose_nothing_at_all),
    };
    return cmocka_run_group_tests_name("lease_world", tests, NULL, NULL);
}
