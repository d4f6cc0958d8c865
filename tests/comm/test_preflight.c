/* test_preflight.c - what ranks exchange before weights are read (comm/preflight.h), over mailboxes
 * between threads: every pair once, clocks and memory, bytes that are not those sent, a rank that ends. */
#include "check.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "comm/preflight.h"

enum { MOST = 9, TICKETS = 8, FIRST = 2, SMALL = 5000, MEMORY = 7000000 };

static void every_pair_meets_once(void **state) {
    (void)state;
    for (int32_t n = 1; n <= 64; n++) {
        bool met[64][64] = {{false}};
        int32_t pairs = 0;
        for (int32_t round = 0; round < hd_preflight_rounds(n); round++) {
            for (int32_t i = 0; i < n; i++) {
                const int32_t k = hd_preflight_partner(n, i, round);
                if (k < 0) continue;
                assert_true(k != i && k < n && !met[i][k]);
                assert_int_equal(hd_preflight_partner(n, k, round), i);
                met[i][k] = true;
                pairs += i < k;
            }
        }
        assert_int_equal(pairs, n * (n - 1) / 2);
    }
}

/* ---- mailboxes ---- */

typedef struct world {
    pthread_mutex_t mutex;
    pthread_cond_t news;
    hd_received at[MOST][MOST][TICKETS]; /* to, from */
    int32_t n, spoiled; /* spoiled: sends another byte to rank 0; -1: none does */
    int32_t leaver;     /* takes no message; -1: none */
    int64_t ahead_ns;   /* the clock of the last member */
    bool over;
} world;

typedef struct member {
    world *w;
    int32_t own, other;
    bool done;
    float rates[MOST * MOST];
    hd_preflight_rank ranks[MOST];
} member;

static void send(void *ctx, int32_t to, hd_message *m, const void *data, int32_t set) {
    const member *r = ctx;
    uint8_t *copy = malloc(m->n + 1);
    (void)set;
    assert_non_null(copy);
    if (m->n) memcpy(copy, data, m->n);
    if (r->own == r->w->spoiled && to == 0 && m->n) copy[m->n - 1] ^= 1;
    pthread_mutex_lock(&r->w->mutex);
    hd_received *at = &r->w->at[to][r->own][m->ticket];
    assert_false(at->full);
    *at = (hd_received){.head = *m, .data = copy, .full = true};
    if (r->own == r->w->n - 1 && m->shape[0]) {
        int64_t clock_ns;
        memcpy(&clock_ns, at->head.shape, sizeof clock_ns);
        clock_ns += r->w->ahead_ns;
        memcpy(at->head.shape, &clock_ns, sizeof clock_ns);
    }
    pthread_cond_broadcast(&r->w->news);
    pthread_mutex_unlock(&r->w->mutex);
}

static bool flush(void *ctx, int32_t set) {
    (void)ctx, (void)set;
    return true;
}

static hd_received *wait_for(void *ctx, int32_t from, hd_group group, hd_message_lane lane,
                             uint64_t ticket) {
    const member *r = ctx;
    world *w = r->w;
    assert_true(group == HD_GROUP_TP && lane == HD_MESSAGE_HELLO && ticket < TICKETS);
    hd_received *at = &w->at[r->own][from][ticket];
    pthread_mutex_lock(&w->mutex);
    w->over |= r->own == w->leaver;
    pthread_cond_broadcast(&w->news);
    while (!at->full && !w->over) pthread_cond_wait(&w->news, &w->mutex);
    pthread_mutex_unlock(&w->mutex);
    return at->full ? at : NULL;
}

static void release(void *ctx, hd_received *r) {
    (void)ctx;
    free((void *)(uintptr_t)r->data);
    r->data = NULL;
}

static void end(void *ctx, const char *why) {
    (void)ctx;
    fail_msg("%s", why);
}

static void *run_member(void *arg) {
    member *r = arg;
    const hd_link link = {.send = send,
                          .flush = flush,
                          .wait = wait_for,
                          .release = release,
                          .abort = end,
                          .ctx = r};
    const hd_preflight_args args = {.own = r->own,
                                    .n = r->w->n,
                                    .ticket = FIRST,
                                    .most = SMALL,
                                    .free_bytes = MEMORY + (uint64_t)r->own};
    hd_preflight_results found = {.rates = r->rates, .ranks = r->ranks};
    r->done = hd_preflight_run(&link, &args, &found);
    r->other = found.other;
    pthread_mutex_lock(&r->w->mutex); /* who has found other bytes ends it for all */
    if (r->other >= 0) r->w->over = true;
    pthread_cond_broadcast(&r->w->news);
    pthread_mutex_unlock(&r->w->mutex);
    return NULL;
}

/* Runs n members; free() them. */
static member *run_world(int32_t n, int32_t spoiled, int32_t leaver, int64_t ahead_ns) {
    pthread_t threads[MOST];
    world *w = calloc(1, sizeof *w);
    member *r = calloc((size_t)n, sizeof *r);
    assert_true(w && r);
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->news, NULL);
    w->n = n;
    w->spoiled = spoiled;
    w->leaver = leaver;
    w->ahead_ns = ahead_ns;
    for (int32_t i = 0; i < n; i++) {
        r[i].w = w;
        r[i].own = i;
        assert_int_equal(pthread_create(&threads[i], NULL, run_member, &r[i]), 0);
    }
    for (int32_t i = 0; i < n; i++) pthread_join(threads[i], NULL);
    for (int32_t i = 0; i < MOST * MOST * TICKETS; i++) {
        free((void *)(uintptr_t)(&w->at[0][0][0])[i].data);
    }
    pthread_mutex_destroy(&w->mutex);
    pthread_cond_destroy(&w->news);
    free(w);
    return r;
}

static void rank_0_knows_all_rates(void **state) {
    (void)state;
    for (int32_t n = 2; n <= MOST; n++) {
        member *r = run_world(n, -1, -1, 0);
        for (int32_t i = 0; i < n * n; i++) {
            assert_true(r[i / n].done && r[i / n].other == -1);
            assert_int_equal(r[0].rates[i] > 0, i / n != i % n);
        }
        free(r);
    }
}

static void rank_0_knows_clocks_and_memory(void **state) {
    static const int64_t ahead_ns[] = {0, 5000000000, -90000000000};
    (void)state;
    for (size_t i = 0; i < HD_LEN(ahead_ns); i++) {
        member *r = run_world(3, -1, -1, ahead_ns[i]);
        const hd_preflight_rank *found = r[0].ranks;
        for (int32_t k = 0; k < 3; k++) {
            const int64_t off_ns = found[k].clock_ns - (k == 2 ? ahead_ns[i] : 0);
            assert_true(off_ns <= found[k].within_ns && off_ns >= -found[k].within_ns);
            assert_true(found[k].free_bytes == MEMORY + (uint64_t)k);
        }
        assert_int_equal(found[0].within_ns, 0);
        assert_true(found[1].within_ns > 0);
        free(r);
    }
}

static void other_bytes_are_found(void **state) {
    (void)state;
    member *r = run_world(4, 2, -1, 0);
    assert_false(r[0].done);
    assert_int_equal(r[0].other, 2);
    assert_int_equal(r[2].other, -1);
    free(r);
}

static void a_rank_that_ends_ends_it(void **state) {
    (void)state;
    member *r = run_world(3, -1, 1, 0);
    for (int32_t i = 0; i < 3; i++) assert_int_equal(r[i].other, -1);
    assert_false(r[0].done);
    assert_false(r[1].done);
    free(r);
}

int test_preflight(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_pair_meets_once),
        cmocka_unit_test(rank_0_knows_all_rates),
        cmocka_unit_test(rank_0_knows_clocks_and_memory),
        cmocka_unit_test(other_bytes_are_found),
        cmocka_unit_test(a_rank_that_ends_ends_it),
    };
    return cmocka_run_group_tests_name("preflight", tests, NULL, NULL);
}
