/* test_staged_experts.c - experts that are elsewhere: the bits of resident ones, with memory for
 * one expert up to all, and failures that cost a step and nothing else.
 *
 * The source enforces what may be read when: it poisons a slot before it fills it, and takes its
 * time. Whoever reads an expert before it has arrived, or after its slot was given away, computes
 * with poison. */
#include "fakes/crowd.h"

#include <stdatomic.h>
#include <time.h>

enum { PROMPT = 90, MOST = 130, CROWD = 4 };

static const char *const models[] = {"v4_small_mtp", "v3_small_mtp", "v2_groups", "v4_dspark",
                                     "v4_odd"};

typedef struct slow_source {
    hd_expert_source files;
    size_t slot_bytes;
    atomic_int broken; /* this fetch from now on fails, counting down; -1: none */
} slow_source;

static hd_status fetch_slowly(void *ctx, int32_t key, uint8_t *slot, hd_err *err) {
    slow_source *s = ctx;
    const struct timespec while_others_run = {.tv_nsec = 20000};
    memset(slot, 0xff, s->slot_bytes);
    nanosleep(&while_others_run, NULL);
    if (atomic_load(&s->broken) >= 0 && atomic_fetch_sub(&s->broken, 1) == 0) {
        return HD_FAIL(err, HD_EIO, "shard-%d: input/output error", key);
    }
    return s->files.fetch(s->files.ctx, key, slot, err);
}

static hd_expert_source wrap(void *ctx, hd_expert_source files) {
    slow_source *s = ctx;
    s->files = files;
    return (hd_expert_source){.name = "slow files", .ctx = s, .fetch = fetch_slowly};
}

/* Opens a model with memory for some experts; slots 0: for all. ahead: as in
 * hd_expert_disk_options. */
static void open_staged(machine *m, const char *name, int32_t slots, int32_t ahead,
                        slow_source *source) {
    machine all;
    const hd_expert_disk_options enough = {.bytes = (size_t)1 << 30};
    open_machine_staged(&all, name, &enough);
    const hd_expert_stage_stats s = hd_expert_stage_read_stats(all.stage);
    assert_int_equal(s.n_slots, s.n_experts);
    close_machine(&all);
    *source = (slow_source){.slot_bytes = s.expert_bytes, .broken = -1};
    const hd_expert_disk_options o = {.bytes = s.expert_bytes *
                                               (size_t)(slots ? slots : s.n_experts),
                                      .n_fetchers = 3,
                                      .ahead = ahead,
                                      .wrap = wrap,
                                      .wrap_ctx = source};
    open_machine_staged(m, name, &o);
    assert_int_equal(hd_expert_stage_read_stats(m->stage).n_slots, slots ? slots : s.n_experts);
}

static const int32_t rooms[] = {1, 2, 3, 7, 0};

static void logits_have_the_same_bits(void **state) {
    (void)state;
    static request r;
    for (size_t i = 0; i < HD_LEN(models); i++) {
        machine plain, staged;
        open_machine(&plain, models[i], 0.0f);
        init_request(&r, &plain, 0, PROMPT, 3);
        float *want = logits_of(&plain, r.text, PROMPT);
        for (size_t k = 0; k < HD_LEN(rooms); k++) {
            slow_source source;
            open_staged(&staged, models[i], rooms[k], 2, &source);
            float *have = logits_of(&staged, r.text, PROMPT);
            assert_memory_equal(have, want,
                                (size_t)PROMPT * (size_t)plain.spec->vocab * sizeof *have);
            free(have);
            close_machine(&staged);
        }
        free(want);
        close_machine(&plain);
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
    for (int32_t k = 0; k < CROWD; k++) {
        assert_int_equal(have[k].n, want[k].n);
        assert_memory_equal(have[k].text, want[k].text, (size_t)want[k].n * sizeof(int32_t));
        assert_memory_equal(have[k].logprob, want[k].logprob,
                            (size_t)want[k].n * sizeof(float));
    }
}

/* Drafts, chunked prompts and retractions, side by side. */
static void crowds_have_the_same_texts(void **state) {
    (void)state;
    static request want[CROWD], have[CROWD];
    for (size_t i = 0; i < HD_LEN(models); i++) {
        machine plain, staged;
        open_machine(&plain, models[i], 0.0f);
        init_crowd(&plain, want);
        enter_all(&plain, want);
        run_all(&plain, want, CROWD);
        for (size_t k = 0; k < HD_LEN(rooms); k++) {
            slow_source source;
            open_staged(&staged, models[i], rooms[k], (int32_t)k - 1, &source);
            init_crowd(&staged, have);
            enter_all(&staged, have);
            for (int32_t steps = 0; steps < 9; steps++) step(&staged, have, CROWD);
            enter(&staged, &have[1]); /* retracted */
            enter(&staged, &have[3]);
            run_all(&staged, have, CROWD);
            expect_texts(have, want);
            close_machine(&staged);
        }
        close_machine(&plain);
    }
}

/* Whichever fetch of a step fails, that step says so, and the same step works afterwards. */
static void a_failed_fetch_costs_one_step(void **state) {
    (void)state;
    static request want[CROWD], have[CROWD];
    machine plain, staged;
    slow_source source;
    open_machine(&plain, models[0], 0.0f);
    init_crowd(&plain, want);
    enter_all(&plain, want);
    run_all(&plain, want, CROWD);
    open_staged(&staged, models[0], 3, -1, &source);
    init_crowd(&staged, have);
    enter_all(&staged, have);
    for (int32_t k = 0; k < 12; k++) {
        hd_err err = {0};
        source.broken = k;
        while (try_step(&staged, have, CROWD, &err) == HD_OK) assert_false(have[3].ended);
        assert_int_equal(err.status, HD_EIO);
        assert_non_null(strstr(err.msg, "input/output error"));
        source.broken = -1;
        for (int32_t r = 0; r < CROWD; r++) enter(&staged, &have[r]);
        step(&staged, have, CROWD);
    }
    run_all(&staged, have, CROWD);
    expect_texts(have, want);
    assert_int_equal(hd_expert_stage_read_stats(staged.stage).failed, 12);
    close_machine(&staged);
    close_machine(&plain);
}

/* Layers whose experts token ids choose are known; the others are predicted, and used if that was
 * right. */
static void predictions_are_counted(void **state) {
    (void)state;
    static request crowd[CROWD];
    machine m;
    slow_source source;
    open_staged(&m, models[0], 7, 2, &source);
    init_crowd(&m, crowd);
    enter_all(&m, crowd);
    run_all(&m, crowd, CROWD);
    const hd_expert_stage_stats s = hd_expert_stage_read_stats(m.stage);
    assert_true(s.predicted > 100);
    assert_true(s.right > s.predicted / 2 && s.right <= s.predicted);
    assert_true(s.ahead > 0 && s.ahead < s.fetched);
    close_machine(&m);
    open_staged(&m, models[0], 7, -1, &source);
    init_crowd(&m, crowd);
    enter_all(&m, crowd);
    run_all(&m, crowd, CROWD);
    assert_int_equal(hd_expert_stage_read_stats(m.stage).ahead, 0);
    assert_int_equal(hd_expert_stage_read_stats(m.stage).predicted, 0);
    close_machine(&m);
}

static void what_holds_no_expert_is_refused(void **state) {
    (void)state;
    machine m;
    hd_expert_stage *none;
    hd_err err = {0};
    const hd_expert_disk_options o = {.bytes = 100};
    open_machine_staged(&m, models[0], &(hd_expert_disk_options){.bytes = (size_t)1 << 20});
    assert_int_equal(hd_expert_disk_open(&none, m.spec, m.weights, &o, &err), HD_EINVAL);
    assert_non_null(strstr(err.msg, "100 bytes for staged experts hold none"));
    close_machine(&m);
}

int test_staged_experts(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_have_the_same_bits),
        cmocka_unit_test(crowds_have_the_same_texts),
        cmocka_unit_test(a_failed_fetch_costs_one_step),
        cmocka_unit_test(predictions_are_counted),
        cmocka_unit_test(what_holds_no_expert_is_refused),
    };
    return cmocka_run_group_tests_name("staged_experts", tests, NULL, NULL);
}
