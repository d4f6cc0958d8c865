/* test_fetched_experts.c - experts in host memory: the bits of resident ones, with room for two experts
 * on the device up to all, while others become resident after every step; and read in place by
 * operators, with room for one of every layer up to all, in captured steps, also where the last
 * layers have theirs on the device alone. HADAL_BACKEND=cuda
 * has the latter on a GPU. */
#include <math.h>

#include "fakes/crowd.h"
#include "fakes/gpus.h"

#include "base/random_fill.h"

enum { PROMPT = 90, MOST = 130, CROWD = 4, ALL = 99 };

static const char *const models[] = {"v4_small_mtp", "v3_small_mtp", "v2_groups", "v4_dspark",
                                     "v4_odd"};

/* Two for the sets; some resident; sets that hold a layer; all. */
static const int32_t rooms[] = {2, 3, 9, 17, 0};

static void logits_have_the_same_bits(void **state) {
    (void)state;
    static request r;
    for (size_t i = 0; i < HD_LEN(models); i++) {
        machine plain, fetched;
        open_machine(&plain, models[i], 0.0f);
        init_request(&r, &plain, 0, PROMPT, 3);
        float *want = logits_of(&plain, r.text, PROMPT);
        for (size_t k = 0; k < HD_LEN(rooms); k++) {
            open_machine_fetched(&fetched, models[i], rooms[k]);
            float *have = logits_of(&fetched, r.text, PROMPT);
            assert_memory_equal(have, want,
                                (size_t)PROMPT * (size_t)plain.spec->vocab * sizeof *have);
            free(have);
            close_machine(&fetched);
        }
        free(want);
        close_machine(&plain);
    }
}

/* Experts of a layer that have slots, 0: all; and how many layers are on the device alone. */
typedef struct room {
    int32_t slots, whole;
} room;
static const room places[] = {
    {1, 0  },
    {2, 0  },
    {5, 0  },
    {0, 0  },
    {1, 1  },
    {5, 2  },
    {0, ALL}
};

/* Layers with experts that are not on the device alone. */
static int32_t count_layers(const machine *m, int32_t whole) {
    const int32_t end = m->spec->n_layers + m->spec->n_mtp - whole;
    int32_t n = 0;
    for (int32_t l = 0; l < end; l++) {
        n += hd_weights_expert_map(m->whole, l) &&
             hd_weights_held_expert(m->whole, l, HD_EXPERT_GATE, 0);
    }
    return n;
}

static void open_slots_on(machine *m, const char *backend, const char *name,
                          hd_precision precision, room place, missing_experts missing) {
    machine all;
    open_machine_in_place(&all, "cpu", name, HD_EXACT, 0, place.whole, FETCHED);
    const hd_expert_stage_stats s = hd_expert_stage_read_stats(all.stage);
    const int32_t n_experts = all.spec->route.n_experts;
    const int32_t n_layers = count_layers(&all, place.whole);
    const int32_t whole = (int32_t)(s.bytes / s.expert_bytes) - s.n_slots;
    assert_int_equal(s.n_slots, s.n_experts);
    assert_true(whole % n_experts == 0 && (whole > 0 || place.whole < ALL));
    assert_true(n_layers == 0 || place.whole != ALL);
    close_machine(&all);
    const int32_t n =
        place.slots ? place.slots * n_layers + (place.slots > 2) : 0; /* one has more */
    open_machine_in_place(m, backend, name, precision, n ? whole + n : 0, place.whole, missing);
}

static void open_slots(machine *m, const char *name, room place, missing_experts missing) {
    open_slots_on(m, gpus_are_wanted() ? "cuda" : "cpu", name, HD_EXACT, place, missing);
}

static void logits_in_place_have_the_same_bits(void **state) {
    (void)state;
    static request r;
    for (size_t i = 0; i < HD_LEN(models); i++) {
        machine plain, fetched;
        open_machine_on(&plain, gpus_are_wanted() ? "cuda" : "cpu", models[i], 0.0f, true);
        init_request(&r, &plain, 0, PROMPT, 3);
        float *want = logits_of(&plain, r.text, PROMPT);
        const size_t bytes = (size_t)PROMPT * (size_t)plain.spec->vocab * sizeof *want;
        close_machine(&plain);
        for (size_t k = 0; k < HD_LEN(places); k++) {
            open_slots(&fetched, models[i], places[k], FETCHED);
            for (int32_t again = 0; again < 2; again++) {
                float *have = logits_of(&fetched, r.text, PROMPT);
                assert_memory_equal(have, want, bytes);
                free(have);
            }
            close_machine(&fetched);
        }
        free(want);
    }
}

static void init_crowd(const machine *m, request *crowd) {
    for (int32_t k = 0; k < CROWD; k++) {
        init_request(&crowd[k], m, k, 5 + 13 * k, (uint64_t)(40 + k));
        crowd[k].most = MOST;
        crowd[k].chunk = k == 1 ? 4 : k == 2 ? 11 : 0;
        crowd[k].n_drafts = hd_weights_n_mtp(m->weights) ? k : 0;
    }
}

static void enter_all(machine *m, request *crowd) {
    for (int32_t k = 0; k < CROWD; k++) enter(m, &crowd[k]);
}

static void expect_texts(const request *have, const request *want) {
    for (int32_t c = 0; c < CROWD; c++) {
        assert_int_equal(have[c].n, want[c].n);
        assert_memory_equal(have[c].text, want[c].text, (size_t)want[c].n * sizeof(int32_t));
        assert_memory_equal(have[c].logprob, want[c].logprob,
                            (size_t)want[c].n * sizeof(float));
    }
}

static bool is_over(const request *crowd) {
    bool over = true;
    for (int32_t k = 0; k < CROWD; k++) over &= crowd[k].ended;
    return over;
}

/* Makes other experts seem to be used most, and carries on with moves. */
static void disturb(machine *m, int64_t *rows, uint64_t step) {
    const int64_t n = hd_model_n_expert_rows(m->spec);
    for (int64_t i = 0; i < n; i++) {
        rows[i] += (int64_t)(hd_random_fill_at(step, (uint64_t)i) % 1000);
    }
    hd_expert_stage_follow(m->stage, rows);
    hd_expert_stage_move(m->stage);
}

/* Drafts, chunked prompts, retractions and moves, side by side. */
static void crowds_have_the_same_texts(void **state) {
    (void)state;
    static request want[CROWD], have[CROWD];
    for (size_t i = 0; i < HD_LEN(models); i++) {
        machine plain, fetched;
        open_machine(&plain, models[i], 0.0f);
        init_crowd(&plain, want);
        enter_all(&plain, want);
        run_all(&plain, want, CROWD);
        for (size_t k = 0; k < HD_LEN(rooms); k++) {
            open_machine_fetched(&fetched, models[i], rooms[k]);
            int64_t *rows = calloc((size_t)hd_model_n_expert_rows(fetched.spec), sizeof *rows);
            assert_non_null(rows);
            init_crowd(&fetched, have);
            enter_all(&fetched, have);
            for (uint64_t steps = 0; !is_over(have); steps++) {
                step(&fetched, have, CROWD);
                disturb(&fetched, rows, steps);
                if (steps != 9) continue;
                enter(&fetched, &have[1]); /* retracted */
                enter(&fetched, &have[3]);
            }
            expect_texts(have, want);
            const hd_expert_stage_stats s = hd_expert_stage_read_stats(fetched.stage);
            const bool all = rooms[k] == 0, some = rooms[k] > 4;
            assert_true(all ? s.fetched == 0 && s.staged == s.used : s.fetched > 0);
            assert_true(all || !some ? s.moved == 0 : s.moved > 3);
            free(rows);
            close_machine(&fetched);
        }
        close_machine(&plain);
    }
}

/* The same in captured steps, whose slots the host does not know. */
static void crowds_in_place_have_the_same_texts(void **state) {
    (void)state;
    static request want[CROWD], have[CROWD];
    for (size_t i = 0; i < HD_LEN(models); i++) {
        machine plain, fetched;
        open_machine_on(&plain, gpus_are_wanted() ? "cuda" : "cpu", models[i], 0.0f, true);
        init_crowd(&plain, want);
        enter_all(&plain, want);
        run_all(&plain, want, CROWD);
        close_machine(&plain);
        for (size_t k = 0; k < HD_LEN(places); k++) {
            open_slots(&fetched, models[i], places[k], FETCHED);
            init_crowd(&fetched, have);
            enter_all(&fetched, have);
            for (int32_t steps = 0; steps < 9; steps++) step(&fetched, have, CROWD);
            enter(&fetched, &have[1]); /* retracted */
            enter(&fetched, &have[3]);
            run_all(&fetched, have, CROWD);
            expect_texts(have, want);
            const hd_expert_stage_stats s = hd_expert_stage_read_stats(fetched.stage);
            const bool all = places[k].slots == 0;
            assert_true(s.n_experts == 0 ? s.used == 0 : s.used > 200);
            assert_int_equal(s.fetched, s.used - s.staged);
            assert_true(all || s.fetched == 0 || s.fetched_bytes % s.fetched == 0);
            if (all) assert_true(s.fetched <= s.n_experts); /* each once */
            if (places[k].slots == 1) assert_true(s.fetched > s.used / 4);
            close_machine(&fetched);
        }
    }
}

/* ---- rows that the host computes ---- */

/* Room for the missing experts of few rows or many: all are sent, or as many as the rates tell. */
static const room shared_places[] = {
    {1, 0},
    {3, 0},
    {5, 1}
};

/* The root mean square of the differences, relative to that of want. */
static double distance(const float *have, const float *want, size_t n) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        difference += (double)(have[i] - want[i]) * (double)(have[i] - want[i]);
        size += (double)want[i] * (double)want[i];
    }
    return sqrt(difference / size);
}

static const double NEAR = 1e-4;

/* A GPU's sums have another order; those of a CPU have the same bits. */
static void the_host_computes_the_same_logits(void **state) {
    (void)state;
    static request r;
    enum { FEW = 3 }; /* tokens: places of one round, which is not streamed */
    const bool gpu = gpus_are_wanted();
    for (size_t i = 0; i < HD_LEN(models); i++) {
        machine plain, fetched;
        open_machine_on(&plain, gpu ? "cuda" : "cpu", models[i], 0.0f, true);
        init_request(&r, &plain, 0, FEW, 3);
        float *want = logits_of(&plain, r.text, FEW);
        const size_t n = FEW * (size_t)plain.spec->vocab;
        close_machine(&plain);
        for (size_t k = 0; k < HD_LEN(shared_places); k++) {
            open_slots(&fetched, models[i], shared_places[k], LEFT_TO_HOST);
            float *have = logits_of(&fetched, r.text, FEW);
            if (gpu) {
                assert_true(distance(have, want, n) <= NEAR);
            } else {
                assert_memory_equal(have, want, n * sizeof *have);
            }
            const hd_expert_stage_stats s = hd_expert_stage_read_stats(fetched.stage);
            assert_true(s.fetched == 0 && s.sent > 0 && s.sent_rows >= s.sent);
            free(have);
            close_machine(&fetched);
        }
        free(want);
    }
}

/* Logits of a few tokens whose missing experts are all left to the host. */
static float *logits_by_host(const char *backend, const char *name, hd_precision precision,
                             const int32_t *text, int32_t n) {
    machine m;
    open_slots_on(&m, backend, name, precision, shared_places[0], LEFT_TO_HOST);
    float *out = logits_of(&m, text, n);
    const hd_expert_stage_stats s = hd_expert_stage_read_stats(m.stage);
    assert_true(s.fetched == 0 && s.sent > 0);
    close_machine(&m);
    return out;
}

/* Experts in FP4, whose rows are rounded by groups of 32 columns, and of 128. The reference, which defines
 * `official`, has float64 sums; a GPU's are rounded themselves, and rows are rounded again behind them. */
static void the_host_rounds_as_the_device(void **state) {
    static const char *const rounded[] = {"v41_small", "../../models/tiny-v4"};
    static request r;
    enum { FEW = 3 };
    const bool gpu = gpus_are_wanted();
    const char *backend = gpu ? "cuda" : "ref";
    (void)state;
    for (size_t i = 0; i < 2 * HD_LEN(rounded); i++) {
        const char *name = rounded[i / 2];
        const hd_precision precision = i % 2 ? HD_FAST : HD_OFFICIAL;
        machine plain;
        if (precision == HD_FAST && !gpu) continue; /* the reference has none */
        open_machine_rounding(&plain, backend, name, precision);
        init_request(&r, &plain, 0, FEW, 3);
        const size_t n = FEW * (size_t)plain.spec->vocab;
        float *want = logits_of(&plain, r.text, FEW);
        close_machine(&plain);
        float *have = logits_by_host(backend, name, precision, r.text, FEW);
        assert_true(distance(have, want, n) <= (gpu ? 0.03 : NEAR));
        free(have);
        free(want);
    }
}

static void crowds_with_the_host_have_the_same_texts(void **state) {
    (void)state;
    static request want[CROWD], have[CROWD];
    if (gpus_are_wanted()) skip(); /* other bits may choose other tokens */
    for (size_t i = 0; i < HD_LEN(models); i++) {
        machine plain, fetched;
        open_machine_on(&plain, "cpu", models[i], 0.0f, true);
        init_crowd(&plain, want);
        enter_all(&plain, want);
        run_all(&plain, want, CROWD);
        close_machine(&plain);
        for (size_t k = 0; k < 2 * HD_LEN(shared_places); k++) {
            const missing_experts missing = k % 2 ? SHARED_WITH_HOST : LEFT_TO_HOST;
            if ((i + k / 2 + k) % 2 && !is_long())
                continue; /* each place, and each sharing, with each model */
            open_slots(&fetched, models[i], shared_places[k / 2], missing);
            init_crowd(&fetched, have);
            enter_all(&fetched, have);
            for (int32_t steps = 0; steps < 9; steps++) step(&fetched, have, CROWD);
            enter(&fetched, &have[1]); /* retracted */
            run_all(&fetched, have, CROWD);
            expect_texts(have, want);
            const hd_expert_stage_stats s = hd_expert_stage_read_stats(fetched.stage);
            assert_int_equal(s.used, s.staged + s.fetched + s.sent);
            assert_true(missing == SHARED_WITH_HOST || (s.sent > 0 && s.taken_ns > 0));
            close_machine(&fetched);
        }
    }
}

int test_fetched_experts(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_in_place_have_the_same_bits),
        cmocka_unit_test(crowds_in_place_have_the_same_texts),
        cmocka_unit_test(the_host_computes_the_same_logits),
        cmocka_unit_test(the_host_rounds_as_the_device),
        cmocka_unit_test(crowds_with_the_host_have_the_same_texts),
        cmocka_unit_test(logits_have_the_same_bits),
        cmocka_unit_test(crowds_have_the_same_texts),
    };
    return cmocka_run_group_tests_name("fetched_experts", tests, NULL, NULL);
}
