/* test_draft_depth.c - the draft depth chosen on simulated devices whose best depth is
 * known. */
#include "check.h"

#include <math.h>

#include "base/philox.h"
#include "sched/draft_depth.h"

/* A step with k drafts takes base + (k > 0) * first + k * each; a draft is accepted with a
 * given probability. */
typedef struct device {
    double base, first, each;
    double accept_probability[HD_MAX_DRAFTS];
    double jitter; /* step times are multiplied by 1 .. 1 + jitter */
} device;

typedef struct watch {
    sched_draft_depth drafts;
    sched_acceptance own;
    uint64_t draws;
    int32_t before; /* the depth whose rows the coming step verifies */
    int32_t used[SCHED_DEPTHS];
    double tokens, ns;
} watch;

static double unit(watch *w) {
    return (double)hd_philox_unit(hd_philox_at(3, 0, w->draws++).v[0]);
}

static double time_of(const device *d, int32_t k) {
    return d->base + (k > 0) * d->first + k * d->each;
}

/* Tokens per nanosecond at the best depth. */
static double best_rate(const device *d) {
    double most = 0;
    for (int32_t k = 0; k < SCHED_DEPTHS; k++) {
        double tokens = 1, reached = 1;
        for (int32_t i = 0; i < k; i++) tokens += reached *= d->accept_probability[i];
        const double rate = tokens / (time_of(d, k) * (1 + d->jitter / 2));
        if (rate > most) most = rate;
    }
    return most;
}

static void steps(watch *w, const device *d, int32_t n_requests, int n) {
    for (int i = 0; i < n; i++) {
        int32_t accepted = 0;
        const int32_t depth = sched_draft_depth_choose(&w->drafts, n_requests);
        const int32_t want = sched_draft_depth_of(&w->drafts, &w->own, depth);
        while (accepted < w->before && unit(w) < d->accept_probability[accepted]) accepted++;
        const sched_drafts drafts = {.made = w->before, .verified = w->before};
        sched_draft_depth_verified(&w->drafts, &w->own, &drafts, accepted);
        const double rows = time_of(d, w->before), chain = time_of(d, want);
        const double ns = (rows + chain) / 2 * (1 + d->jitter * unit(w));
        sched_draft_depth_step_took(&w->drafts, (int64_t)ns);
        w->before = want;
        w->used[want]++;
        w->tokens += 1 + accepted;
        w->ns += ns;
    }
}

static void start(watch *w) {
    *w = (watch){0};
    sched_draft_depth_init(&w->drafts, HD_MAX_DRAFTS);
}

/* A long run yields nearly as many tokens per time as one that knows the best depth. */
static void expect_best(watch *w, const device *d) {
    w->tokens = w->ns = 0;
    steps(w, d, 1, 4000);
    const double share = w->tokens / w->ns / best_rate(d);
    if (share < 0.97) fail_msg("%.3f of the best", share);
}

#define EVEN(p) \
    { p, p, p, p, p, p, p }

static void the_best_depth_is_found(void **state) {
    (void)state;
    static const int32_t known[][2] = {
        {5, 7},
        {7, 7},
        {0, 0},
        {3, 5},
        {2, 2},
        {4, 4}
    };
    const device devices[] = {
        {1e6, 0,   1e5, EVEN(0.8),                               0}, /* most pay */
        {1e6, 0,   1e4, EVEN(0.95),                              0}, /* all pay */
        {1e6, 0,   9e5, EVEN(0.5),                               0}, /* none pays */
        {1e6, 4e5, 5e4, EVEN(0.6),                               0}, /* three pay */
        {1e6, 0,   2e5, {0.9, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1},     0}, /* two do */
        {1e6, 0,   1e5, {0.99, 0.99, 0.99, 0.99, 0.2, 0.2, 0.2}, 0}  /* four do */
    };
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
        watch w;
        start(&w);
        steps(&w, &devices[i], 1, 400);
        expect_best(&w, &devices[i]);
        int32_t most = 0;
        for (int32_t k = 0; k < SCHED_DEPTHS; k++) {
            if (w.used[k] > w.used[most]) most = k;
        }
        assert_in_range(most, known[i][0], known[i][1]);
    }
}

static void jitter_costs_little(void **state) {
    (void)state;
    const device d = {1e6, 0, 1e5, EVEN(0.8), 0.3};
    watch w;
    start(&w);
    steps(&w, &d, 1, 400);
    expect_best(&w, &d);
}

static void useless_drafts_are_tried_seldom(void **state) {
    (void)state;
    const device d = {1e6, 0, 1e6, EVEN(0.3), 0};
    watch w;
    start(&w);
    steps(&w, &d, 1, 10000);
    for (int i = 0; i < SCHED_DEPTHS; i++) w.used[i] = 0;
    steps(&w, &d, 1, 10000);
    assert_true(w.used[0] > 9900 && w.used[0] < 10000); /* rarely, but not never */
}

static void a_change_is_noticed(void **state) {
    (void)state;
    const device useless = {1e6, 0, 1e6, EVEN(0.1), 0}, good = {1e6, 0, 1e4, EVEN(0.9), 0};
    watch w;
    start(&w);
    steps(&w, &useless, 1, 3000);
    steps(&w, &good, 1, 12000);
    expect_best(&w, &good);
    steps(&w, &useless, 1, 3000);
    expect_best(&w, &useless);
}

static void crowds_are_told_apart(void **state) {
    (void)state;
    const device lone = {1e6, 0, 1e4, EVEN(0.8), 0}, crowded = {1e6, 0, 8e5, EVEN(0.8), 0};
    watch w;
    start(&w);
    for (int round = 0; round < 40; round++) { /* now one request, now sixty */
        steps(&w, &lone, 1, 50);
        steps(&w, &crowded, 60, 50);
    }
    assert_true(w.drafts.batch_classes[0].best >= 6);
    assert_int_equal(w.drafts.batch_classes[5].best, 0);
}

static void a_request_that_is_hard_to_guess_drafts_less(void **state) {
    (void)state;
    const device d = {1e6, 0, 1e5, EVEN(0.8), 0};
    sched_acceptance hard = {0};
    watch w;
    start(&w);
    steps(&w, &d, 1, 1000);
    for (int i = 0; i < 40; i++) { /* acceptance of one among many: the others are unchanged */
        const sched_drafts drafts = {.made = 3, .verified = 3};
        sched_draft_depth_verified(&w.drafts, &hard, &drafts, 0);
        steps(&w, &d, 1, 10);
    }
    const int32_t depth = sched_draft_depth_choose(&w.drafts, 1);
    assert_int_equal(sched_draft_depth_of(&w.drafts, &w.own, depth), depth);
    assert_int_equal(sched_draft_depth_of(&w.drafts, &hard, depth), 0);
}

/* Blocks of drafts: half of the drafts are accepted almost always, half almost never, and the
 * drafter knows which. A step takes base + made * make + verified * row. */
typedef struct block_device {
    double base, make, row;
    float bias; /* added to every confidence */
    bool tells;
} block_device;

typedef struct block_watch {
    sched_draft_depth depth;
    sched_acceptance own;
    sched_drafts drafts;
    double odds[HD_MAX_DRAFTS];
    uint64_t draws;
    double tokens, ns;
    int64_t verified, made;
} block_watch;

static double draw(block_watch *w) {
    return (double)hd_philox_unit(hd_philox_at(4, 0, w->draws++).v[0]);
}

static void make_block(block_watch *w, const block_device *d, int32_t made) {
    w->drafts = (sched_drafts){.made = made, .n_confidence = d->tells ? made : 0};
    for (int32_t i = 0; i < made; i++) {
        const bool likely = draw(w) < 0.5;
        w->odds[i] = likely ? 0.95 : 0.05;
        w->drafts.confidence[i] = (likely ? 2.9f : -2.9f) + d->bias;
    }
}

static void run_blocks(block_watch *w, const block_device *d, int n) {
    w->tokens = w->ns = 0;
    w->verified = w->made = 0;
    for (int i = 0; i < n; i++) {
        int32_t accepted = 0;
        const int32_t want = sched_draft_depth_choose(&w->depth, 1);
        w->drafts.verified = sched_draft_depth_keep(&w->depth, &w->drafts);
        const int32_t kept = w->drafts.verified, made = w->drafts.made;
        while (accepted < kept && draw(w) < w->odds[accepted]) accepted++;
        sched_draft_depth_verified(&w->depth, &w->own, &w->drafts, accepted);
        const double ns = d->base + (want > 0) * d->make + kept * d->row;
        if (kept == made) sched_draft_depth_step_took(&w->depth, (int64_t)ns);
        w->tokens += 1 + accepted;
        w->ns += ns;
        w->verified += kept;
        w->made += made;
        make_block(w, d, want);
    }
}

static double rate_of(const block_device *d) {
    block_watch w = {0};
    sched_draft_depth_init(&w.depth, 5);
    run_blocks(&w, d, 2000);
    run_blocks(&w, d, 8000);
    return w.tokens / w.ns;
}

static void sure_drafts_are_verified(void **state) {
    (void)state;
    block_device d = {1e6, 1e5, 2e5, 0, false};
    const double without = rate_of(&d);
    d.tells = true;
    const double with = rate_of(&d);
    if (with < 1.15 * without) fail_msg("%.3f times the rate without", with / without);
    for (float bias = -3; bias <= 3; bias += 6) { /* learned from what is accepted */
        d.bias = bias;
        const double biased = rate_of(&d);
        if (biased < 0.97 * with)
            fail_msg("bias %g: %.3f of the rate", (double)bias, biased / with);
    }
}

static void broken_confidences_do_no_harm(void **state) {
    (void)state;
    const float values[] = {NAN, INFINITY, -INFINITY, 1e30f, -1e30f};
    const block_device d = {1e6, 0, 1e5, 0, true};
    block_watch w = {0};
    sched_draft_depth_init(&w.depth, 5);
    run_blocks(&w, &d, 500);
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        for (int32_t k = 0; k < 5; k++) w.drafts.confidence[k] = values[i];
        w.drafts.made = w.drafts.n_confidence = 5;
        assert_in_range(sched_draft_depth_keep(&w.depth, &w.drafts), 0, 5);
        run_blocks(&w, &d, 50);
    }
    assert_true(w.depth.all.accepted[0] >= 0 &&
                w.depth.all.accepted[0] <= w.depth.all.tried[0]);
}

static void a_block_is_the_limit(void **state) {
    (void)state;
    for (int32_t most = 1; most <= 5; most++) {
        const block_device d = {1e6, 0, 1, 0, true};
        block_watch w = {0};
        sched_draft_depth_init(&w.depth, most);
        run_blocks(&w, &d, 300);
        for (int i = 0; i < 3000; i++) {
            assert_in_range(sched_draft_depth_choose(&w.depth, 1), 0, most);
        }
    }
}

int test_draft_depth(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_best_depth_is_found),
        cmocka_unit_test(jitter_costs_little),
        cmocka_unit_test(useless_drafts_are_tried_seldom),
        cmocka_unit_test(a_change_is_noticed),
        cmocka_unit_test(crowds_are_told_apart),
        cmocka_unit_test(a_request_that_is_hard_to_guess_drafts_less),
        cmocka_unit_test(sure_drafts_are_verified),
        cmocka_unit_test(broken_confidences_do_no_harm),
        cmocka_unit_test(a_block_is_the_limit),
    };
    return cmocka_run_group_tests_name("auto_drafts", tests, NULL, NULL);
}
