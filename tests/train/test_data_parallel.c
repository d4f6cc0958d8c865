/* test_data_parallel.c - steps of several ranks against those of one: gradients, skipped steps, loads of
 * experts, checkpoints, and slices of masters and moments. */
#include "check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/json.h"
#include "train/exchange.h"
#include "train/trainer.h"

enum { SEQS = 7, LONGEST = 24, PARTS = 5, MOST_RANKS = 9 };

typedef struct rig {
    hd_model_spec *spec;
    hd_weights *weights;
    hd_trainer *trainer;
    hd_train_sequence seqs[SEQS];
    int32_t ids[SEQS][LONGEST];
    float numbers[SEQS][PARTS][LONGEST];
    hd_optimizer_report report;
    hd_whole_parameters whole; /* after a step */
} rig;

typedef struct rule {
    const char *model;
    int32_t ranks;
    hd_update_kind matrices;
    bool drafts;
    double balance;
} rule;

static void draw_sequences(rig *r, bool drafts) {
    static const int32_t lengths[SEQS] = {5, LONGEST, 9, 3, 17, 4, 11};
    for (int32_t i = 0; i < SEQS; i++) {
        float(*x)[LONGEST] = r->numbers[i];
        r->seqs[i] = (hd_train_sequence){.tokens = r->ids[i],
                                         .n = lengths[i],
                                         .first = 1 + (lengths[i] > 8),
                                         .temperature = i % 2 ? 0.8f : 0.0f,
                                         .factor = x[0],
                                         .entropy_factor = i % 3 ? x[1] : NULL,
                                         .logprob = x[2],
                                         .entropy = x[3],
                                         .draft_factor = drafts ? x[0] : NULL,
                                         .draft_logprob = x[4]};
        for (int32_t k = 0; k < lengths[i]; k++) {
            r->ids[i][k] = (7 * i + 3 * k + k * k) % r->spec->vocab;
            x[0][k] = 0.01f * (float)(1 + (i + k) % 5);
            x[1][k] = 0.003f * (float)((i * k) % 4);
        }
    }
}

static void open_rig(rig *r, const rule *u) {
    char dir[64];
    *r = (rig){.spec = NULL};
    snprintf(dir, sizeof dir, "tests/golden/%s", u->model);
    assert_int_equal(hd_model_spec_open(&r->spec, dir, NULL), HD_OK);
    assert_int_equal(hd_weights_open_updatable(&r->weights, dir, r->spec, NULL), HD_OK);
    const hd_trainer_options o = {
        .spec = r->spec,
        .weights = r->weights,
        .rows = 40,
        .context = LONGEST,
        .threads = 2,
        .n_ranks = u->ranks,
        .keep_bytes = u->ranks > 1 ? 1 << 30 : 0,
        .drafts = u->drafts,
        .balance = u->balance,
        .matrices = u->matrices,
        .optimizer = {.rate = 1e-3,
                      .beta1 = 0.9,
                      .beta2 = 0.95,
                      .eps = 1e-8,
                      .muon_rate = 1e-3,
                      .momentum = 0.9,
                      .clip = 0.5}
    };
    assert_int_equal(hd_trainer_open(&r->trainer, &o, NULL), HD_OK);
    draw_sequences(r, u->drafts);
}

static void close_rig(rig *r) {
    hd_whole_parameters_free(&r->whole);
    hd_trainer_close(r->trainer);
    hd_weights_close(r->weights);
    hd_model_spec_close(r->spec);
}

static void step(rig *r) {
    hd_weights_update *u;
    hd_stream *s = hd_trainer_stream(r->trainer);
    assert_int_equal(hd_trainer_accumulate(r->trainer, r->seqs, 4, NULL), HD_OK);
    assert_int_equal(hd_trainer_accumulate(r->trainer, r->seqs + 4, SEQS - 4, NULL), HD_OK);
    assert_int_equal(hd_trainer_step(r->trainer, &u, &r->report, NULL), HD_OK);
    assert_true((u == NULL) == r->report.skipped);
    if (u) assert_int_equal(hd_weights_update_apply(u, r->weights, s, NULL), HD_OK);
    hd_weights_update_close(u);
    hd_whole_parameters_free(&r->whole);
    assert_int_equal(hd_trainer_gather(r->trainer, &r->whole, NULL), HD_OK);
}

typedef struct distance {
    double square, other; /* of lengths: of what is right, of the difference */
} distance;

static void measure(distance *d, const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        d->square += (double)b[i] * (double)b[i];
        d->other += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    }
}

/* The difference is at most `bound` of the length. */
static void check_near(const char *what, const distance *d, double bound) {
    if (sqrt(d->other) <= bound * sqrt(d->square)) return;
    fail_msg("%s: differs by %.3g of its length", what, sqrt(d->other / d->square));
}

/* First moments are gradients, times a constant. A tensor of few numbers is a sum whose terms cancel. */
static void check_like_one(const rig *r, const rig *one) {
    distance all = {0.0, 0.0};
    assert_true(fabs(r->report.norm - one->report.norm) <= 1e-6 * one->report.norm);
    assert_int_equal(r->whole.n, one->whole.n);
    for (int32_t i = 0; i < r->whole.n; i++) {
        const hd_parameter *a = &r->whole.all[i], *b = &one->whole.all[i];
        distance first = {0.0, 0.0};
        assert_string_equal(a->name, b->name);
        assert_true(a->n == b->n && a->begin == 0);
        if (b->kind == HD_UPDATE_BALANCE) {
            assert_memory_equal(a->master, b->master, (size_t)b->n * sizeof(float));
            continue;
        }
        measure(&first, a->first, b->first, b->n);
        check_near(b->name, &first, 3e-6);
        if (b->kind == HD_UPDATE_MUON) {
            distance master = {0.0, 0.0};
            measure(&master, a->master, b->master, b->n);
            check_near(b->name, &master, 1e-6);
        }
        measure(&all, a->first, b->first, b->n);
    }
    assert_true(all.square > 0.0);
    check_near("the gradient", &all, 1e-6);
}

/* The log-probabilities of a token do not depend on where it is computed. */
static void check_results(const rig *r, const rig *one, bool drafts) {
    for (int32_t i = 0; i < SEQS; i++) {
        const size_t bytes = (size_t)(r->seqs[i].n - r->seqs[i].first) * sizeof(float);
        for (int k = 2; k < 4 + drafts; k++) {
            assert_memory_equal(r->numbers[i][k], one->numbers[i][k], bytes);
        }
    }
}

static const rule rules[] = {
    {"v3_small_mtp", 1, HD_UPDATE_ADAMW, true,  0.001},
    {"v3_small_mtp", 1, HD_UPDATE_MUON,  false, 0.0  },
    {"v4_small_mtp", 1, HD_UPDATE_ADAMW, true,  0.0  },
};

static void ranks_compute_the_gradients_of_one(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(rules); i++) {
        rig one;
        open_rig(&one, &rules[i]);
        step(&one);
        assert_true(one.report.norm > 0.0 && !one.report.skipped);
        for (int32_t ranks = 2; ranks <= MOST_RANKS; ranks += ranks < 3 ? 1 : 6) {
            rig r;
            rule u = rules[i];
            u.ranks = ranks;
            open_rig(&r, &u);
            step(&r);
            check_results(&r, &one, u.drafts);
            check_like_one(&r, &one);
            close_rig(&r);
        }
        close_rig(&one);
    }
}

static uint64_t sum_of(const rig *r) {
    uint64_t sum = 0;
    for (int32_t i = 0; i < r->whole.n; i++) {
        const hd_parameter *p = &r->whole.all[i];
        const float *arrays[] = {p->master, p->first, p->second};
        for (size_t k = 0; k < HD_LEN(arrays); k++) {
            for (int64_t j = 0; arrays[k] && j < p->n; j++) {
                uint32_t bits;
                memcpy(&bits, &arrays[k][j], sizeof bits);
                sum = sum * 0x9e3779b97f4a7c15u + bits;
            }
        }
    }
    return sum;
}

static void two_runs_have_equal_bits(void **state) {
    (void)state;
    uint64_t sums[2];
    for (int k = 0; k < 2; k++) {
        rig r;
        const rule u = {"v3_small_mtp", 3, HD_UPDATE_MUON, true, 0.01};
        open_rig(&r, &u);
        for (int i = 0; i < 3; i++) step(&r);
        sums[k] = sum_of(&r);
        close_rig(&r);
    }
    assert_true(sums[0] == sums[1]);
}

/* Whichever rank has the sequence whose gradient is no number: the longest is rank 0's. */
static void all_ranks_skip_a_step(void **state) {
    (void)state;
    for (int32_t i = 0; i < SEQS; i++) {
        rig r;
        const rule u = {"v3_small_mtp", 3, HD_UPDATE_ADAMW, false, 0.01};
        open_rig(&r, &u);
        assert_int_equal(hd_trainer_gather(r.trainer, &r.whole, NULL), HD_OK);
        const uint64_t before = sum_of(&r);
        const float good = r.numbers[i][0][0];
        r.numbers[i][0][0] = NAN;
        step(&r);
        assert_true(r.report.skipped && sum_of(&r) == before);
        r.numbers[i][0][0] = good;
        step(&r);
        assert_true(!r.report.skipped && sum_of(&r) != before);
        close_rig(&r);
    }
}

static void slices_are_all_and_even(void **state) {
    (void)state;
    for (int muon = 0; muon < 2; muon++) {
        rig r;
        const rule u = {"v3_small_mtp", 1, HD_UPDATE_ADAMW, false, 0.0};
        open_rig(&r, &u);
        hd_device *d;
        int64_t end = 0;
        hd_stream *s;
        assert_int_equal(hd_device_open_cpu(&d, &(hd_cpu_options){.n_threads = 1}, NULL),
                         HD_OK);
        assert_int_equal(hd_stream_open(&s, d, NULL), HD_OK);
        for (int32_t k = 0; k < 4; k++) {
            hd_parameters *p;
            int64_t first, n, held = 0;
            int32_t n_all;
            const hd_parameters_options o = {.matrices =
                                                 muon ? HD_UPDATE_MUON : HD_UPDATE_ADAMW,
                                             .biases = true,
                                             .rank = k,
                                             .n_ranks = 4};
            assert_int_equal(hd_parameters_open(&p, r.spec, r.weights, d, s, NULL, &o, NULL),
                             HD_OK);
            hd_parameters_slice(p, HD_PARAMETER_FIRST, &first, &n);
            assert_true(first == end);
            end += n;
            const int64_t all = hd_parameters_count(p);
            if (!muon) assert_true(n == all / 4 || n == all / 4 + 1);
            if (k == 3) assert_true(end == all);
            const hd_parameter *list = hd_parameters_all(p, &n_all);
            for (int32_t i = 0; i < n_all; i++) {
                const int64_t size = (int64_t)list[i].rows * list[i].cols;
                held += list[i].n;
                if (list[i].kind == HD_UPDATE_MUON)
                    assert_true(list[i].n == 0 || list[i].n == size);
            }
            assert_true(held == n);
            hd_parameters_close(p);
        }
        hd_stream_close(s);
        hd_device_close(d);
        close_rig(&r);
    }
}

static void bad_sequences_are_refused_and_work_goes_on(void **state) {
    (void)state;
    rig r;
    hd_err err = {0};
    const rule u = {"v3_small_mtp", 2, HD_UPDATE_ADAMW, false, 0.0};
    open_rig(&r, &u);
    r.ids[3][1] = r.spec->vocab;
    assert_int_equal(hd_trainer_accumulate(r.trainer, r.seqs, SEQS, &err), HD_EINVAL);
    assert_true(strstr(err.msg, "the model knows") != NULL);
    r.ids[3][1] = 0;
    step(&r);
    assert_false(r.report.skipped);
    assert_true(hd_trainer_load(r.trainer, "/no/such/folder", 3, NULL) != HD_OK);
    step(&r);
    close_rig(&r);
}

static void ranks_that_cannot_open_end_without_waiting(void **state) {
    (void)state;
    rig r;
    hd_err err = {0};
    const rule u = {"v3_small_mtp", 1, HD_UPDATE_ADAMW, false, 0.0};
    open_rig(&r, &u);
    const hd_trainer_options o = {
        .spec = r.spec, .weights = r.weights, .rows = 3, .context = 24, .n_ranks = 3};
    hd_trainer *t;
    assert_int_equal(hd_trainer_open(&t, &o, &err), HD_EINVAL);
    assert_null(t);
    assert_true(strstr(err.msg, "micro-batches of 3 rows") != NULL);
    close_rig(&r);
}

int test_data_parallel(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_compute_the_gradients_of_one),
        cmocka_unit_test(two_runs_have_equal_bits),
        cmocka_unit_test(all_ranks_skip_a_step),
        cmocka_unit_test(slices_are_all_and_even),
        cmocka_unit_test(bad_sequences_are_refused_and_work_goes_on),
        cmocka_unit_test(ranks_that_cannot_open_end_without_waiting),
    };
    return cmocka_run_group_tests_name("data_parallel", tests, NULL, NULL);
}
