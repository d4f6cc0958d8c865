/* test_policy.c - advantages against tables, factors against differences of a loss that is
 * written once more here, and what must give zero. */
#include "check.h"

#include <math.h>

#include "base/random_fill.h"
#include "train/policy.h"

enum { SAMPLES = 6, GROUP = 3, TOKENS = 9 };

typedef struct rig {
    hd_policy_sample s[SAMPLES];
    float rollout[SAMPLES][TOKENS], old[SAMPLES][TOKENS], now[SAMPLES][TOKENS];
    float reference[SAMPLES][TOKENS];
    float factor[SAMPLES][TOKENS], entropy[SAMPLES][TOKENS];
    uint8_t mask[SAMPLES][TOKENS];
    double scratch[SAMPLES * TOKENS];
} rig;

static float unit(uint64_t seed, uint64_t i) {
    return (float)(hd_random_fill_at(seed, i) % 20011) / 10007.0f - 1.0f;
}

/* Samples of 4 to 9 tokens; trainer and sampler differ by about `gap`, updates move by 0.3. */
static void make(rig *r, float gap) {
    memset(r, 0, sizeof *r);
    for (int i = 0; i < SAMPLES; i++) {
        r->s[i] = (hd_policy_sample){.n = 4 + i,
                                     .reward = (double)unit(7, (uint64_t)i),
                                     .mask = r->mask[i],
                                     .rollout = r->rollout[i],
                                     .old = r->old[i],
                                     .now = r->now[i],
                                     .reference = r->reference[i],
                                     .factor = r->factor[i],
                                     .entropy_factor = r->entropy[i]};
        for (int k = 0; k < TOKENS; k++) {
            const uint64_t at = (uint64_t)(i * TOKENS + k);
            r->old[i][k] = -1.5f + unit(1, at);
            r->rollout[i][k] = r->old[i][k] + gap * unit(2, at);
            r->now[i][k] = r->old[i][k] + 0.3f * unit(3, at);
            r->reference[i][k] = r->old[i][k] + 0.4f * unit(4, at);
            r->mask[i][k] = at % 5 != 2;
        }
    }
}

/* ---- the losses once more, in float64, of all samples; nudge: a change of one token's log p ---- */

static double w_of(const hd_policy_options *o, const rig *r, int i, int k, bool *in) {
    double mean = 0.0;
    int n = 0;
    for (int t = 0; t < r->s[i].n; t++) {
        if (!r->mask[i][t]) continue;
        mean += (double)r->old[i][t] - (double)r->rollout[i][t];
        n++;
    }
    const double w = exp((double)r->old[i][k] - (double)r->rollout[i][k]);
    const double whole = exp(mean / n);
    *in = true;
    if (o->correction == HD_CORRECTION_NONE) return 1.0;
    if (o->correction == HD_CORRECTION_TIS) {
        return fmin(fmax(w, o->correction_low), o->correction_high);
    }
    const double judged = o->correction == HD_CORRECTION_MIS ? whole : w;
    *in = judged >= o->correction_low && judged <= o->correction_high;
    return w;
}

static double divergence(const hd_policy_options *o, double t) {
    if (o->kl_kind == HD_KL_K1) return -t;
    return o->kl_kind == HD_KL_K2 ? t * t / 2 : exp(t) - 1 - t;
}

static double loss(const hd_policy_options *o, const rig *r, int at, int token, double nudge) {
    double all = 0.0, tokens = 0.0;
    for (int i = 0; i < SAMPLES; i++) {
        for (int k = 0; k < r->s[i].n; k++) tokens += r->mask[i][k];
    }
    for (int i = 0; i < SAMPLES; i++) {
        const double a = r->s[i].advantage;
        double sum = 0.0, mean = 0.0, n = 0.0;
        for (int k = 0; k < r->s[i].n; k++) {
            if (!r->mask[i][k]) continue;
            const double now = (double)r->now[i][k] + (i == at && k == token ? nudge : 0.0);
            mean += now - (double)r->old[i][k];
            n += 1.0;
        }
        for (int k = 0; k < r->s[i].n; k++) {
            bool in;
            const double w = w_of(o, r, i, k, &in);
            if (!r->mask[i][k]) continue;
            const double moved = (double)r->now[i][k] + (i == at && k == token ? nudge : 0.0);
            sum += o->kl * divergence(o, (double)r->reference[i][k] - moved);
            if (!in) continue;
            const double now = (double)r->now[i][k] + (i == at && k == token ? nudge : 0.0);
            double ratio = exp(now - (double)r->old[i][k]);
            if (o->ratio == HD_RATIO_CISPO) {
                const double fixed = exp((double)r->now[i][k] - (double)r->old[i][k]);
                sum -= w * fmin(fixed, 1.0 + o->clip_high) * a * now;
                continue;
            }
            if (o->ratio == HD_RATIO_GSPO) ratio = exp(mean / n);
            const double inside = fmin(fmax(ratio, 1.0 - o->clip_low), 1.0 + o->clip_high);
            double l = fmax(-a * ratio, -a * inside);
            if (a < 0 && o->dual_clip > 0) l = fmin(l, -a * o->dual_clip);
            sum += w * l;
        }
        if (o->mean == HD_MEAN_TOKENS) all += sum / tokens;
        if (o->mean == HD_MEAN_SAMPLES) all += sum / n / SAMPLES;
        if (o->mean == HD_MEAN_LENGTH) all += sum / SAMPLES / o->length;
    }
    return all;
}

static void check_factors(const hd_policy_options *o, rig *r) {
    hd_policy_report report = {0};
    hd_policy_factors(o, r->s, SAMPLES, &report);
    assert_true(fabs(report.loss - loss(o, r, -1, 0, 0.0)) < 1e-9);
    for (int i = 0; i < SAMPLES; i++) {
        for (int k = 0; k < r->s[i].n; k++) {
            const double step = 1e-6;
            const double slope =
                (loss(o, r, i, k, step) - loss(o, r, i, k, -step)) / (2 * step);
            if (!(fabs(slope + (double)r->factor[i][k]) < 1e-7)) {
                fail_msg("sample %d token %d: factor %g, slope %g", i, k,
                         (double)r->factor[i][k], slope);
            }
        }
    }
}

static void factors_are_slopes_of_the_loss(void **state) {
    (void)state;
    for (int name = 0; hd_policy_names[name]; name++) {
        for (int correction = 0; correction <= HD_CORRECTION_ICEPOP; correction++) {
            for (int dual = 0; dual < 2; dual++) {
                rig r;
                hd_policy_options o;
                make(&r, 0.5f);
                assert_true(hd_policy_named(&o, hd_policy_names[name]));
                if (o.ratio == HD_RATIO_GSPO) o.clip_low = o.clip_high = 0.05;
                o.correction = (hd_correction)correction;
                o.correction_low = 0.8;
                o.correction_high = 1.3;
                o.dual_clip = dual ? 1.1 : 0.0;
                o.length = 11;
                assert_int_equal(hd_policy_advantages(&o, r.s, SAMPLES, GROUP), 0);
                /* MIS's slope of w itself is none: it is a constant */
                check_factors(&o, &r);
            }
        }
    }
}

/* The divergence has its part in every algorithm, also of tokens that the correction leaves out. */
static void factors_with_a_reference(void **state) {
    (void)state;
    for (int name = 0; hd_policy_names[name]; name++) {
        for (int kind = HD_KL_K1; kind <= HD_KL_K3; kind++) {
            rig r;
            hd_policy_options o;
            hd_policy_report report = {0};
            make(&r, 0.5f);
            assert_true(hd_policy_named(&o, hd_policy_names[name]));
            if (o.ratio == HD_RATIO_GSPO) o.clip_low = o.clip_high = 0.05;
            o.correction = HD_CORRECTION_ICEPOP;
            o.correction_low = 0.8;
            o.length = 11;
            o.kl = 0.7;
            o.kl_kind = (hd_kl_kind)kind;
            hd_policy_advantages(&o, r.s, SAMPLES, GROUP);
            check_factors(&o, &r);
            for (int i = 0; i < SAMPLES; i++) /* the reference itself */
                memcpy(r.reference[i], r.now[i], sizeof r.now[i]);
            hd_policy_factors(&o, r.s, SAMPLES, &report);
            assert_true(report.kl == 0.0);
        }
    }
}

static void advantages_of_groups(void **state) {
    (void)state;
    rig r;
    hd_policy_options o;
    const double rewards[SAMPLES] = {1, 0, 0, 1, 1, 1};
    make(&r, 0.0f);
    for (int i = 0; i < SAMPLES; i++) r.s[i].reward = rewards[i];
    hd_policy_named(&o, "dr-grpo");
    assert_int_equal(hd_policy_advantages(&o, r.s, SAMPLES, GROUP), 1);
    assert_true(fabs(r.s[0].advantage - 2.0 / 3) < 1e-12);
    assert_true(fabs(r.s[1].advantage + 1.0 / 3) < 1e-12);
    for (int i = GROUP; i < SAMPLES; i++)
        assert_true(r.s[i].advantage == 0.0 && !r.s[i].dropped);
    hd_policy_named(&o, "rloo");
    hd_policy_advantages(&o, r.s, SAMPLES, GROUP);
    assert_true(fabs(r.s[0].advantage - 1.0) < 1e-12 && fabs(r.s[1].advantage + 0.5) < 1e-12);
    hd_policy_named(&o, "dapo");
    hd_policy_advantages(&o, r.s, SAMPLES, GROUP);
    assert_true(fabs(r.s[0].advantage - (2.0 / 3) / (sqrt(2.0 / 9) + 1e-6)) < 1e-12);
    assert_true(!r.s[0].dropped && r.s[GROUP].dropped);
}

/* A group without rewards counts nowhere: neither in a mean nor among those of equal rewards. */
static void a_group_without_rewards_does_not_count(void **state) {
    (void)state;
    rig r;
    hd_policy_options o;
    hd_policy_report report = {0}, rest = {0};
    make(&r, 0.0f);
    hd_policy_named(&o, "dapo");
    for (int i = 0; i < GROUP; i++) r.s[i].reward = i;
    r.s[SAMPLES - 1].unscored = true;
    assert_int_equal(hd_policy_advantages(&o, r.s, SAMPLES, GROUP), 0);
    assert_true(!r.s[0].dropped && r.s[GROUP].dropped && r.s[GROUP].advantage == 0.0);
    hd_policy_factors(&o, r.s, SAMPLES, &report);
    assert_true(report.any && r.factor[GROUP][0] == 0.0f);
    const float factor = r.factor[0][0];
    hd_policy_factors(&o, r.s, GROUP, &rest);
    assert_true(r.factor[0][0] == factor && rest.loss == report.loss);
}

static void a_group_of_one_teaches_nothing(void **state) {
    (void)state;
    for (int name = 0; hd_policy_names[name]; name++) {
        rig r;
        hd_policy_options o;
        hd_policy_report report = {0};
        make(&r, 0.1f);
        hd_policy_named(&o, hd_policy_names[name]);
        o.length = 10;
        assert_int_equal(hd_policy_advantages(&o, r.s, SAMPLES, 1), SAMPLES);
        hd_policy_factors(&o, r.s, SAMPLES, &report);
        assert_false(report.any);
    }
}

static void long_answers_cost_reward(void **state) {
    (void)state;
    rig r;
    hd_policy_options o;
    make(&r, 0.0f);
    hd_policy_named(&o, "dr-grpo");
    o.max_length = 6;
    o.overlong = 2; /* 4 tokens cost nothing, 5 cost 1/2, 6 cost 1 */
    for (int i = 0; i < SAMPLES; i++) r.s[i].reward = 1.0;
    hd_policy_advantages(&o, r.s, SAMPLES, GROUP);
    assert_true(fabs(r.s[0].advantage - 0.5) < 1e-12);
    assert_true(fabs(r.s[1].advantage) < 1e-12);
    assert_true(fabs(r.s[2].advantage + 0.5) < 1e-12);
}

/* A token that is left out has the factor 0, whatever its ratio; a ratio is bounded. */
static void infinite_ratios(void **state) {
    (void)state;
    rig r;
    hd_policy_options o;
    hd_policy_report report = {0};
    make(&r, 0.0f);
    hd_policy_named(&o, "dapo");
    o.correction = HD_CORRECTION_ICEPOP;
    o.correction_low = 0.5;
    r.mask[0][0] = 0;
    r.rollout[0][0] = -INFINITY; /* no loss */
    r.mask[0][1] = 1;
    r.rollout[0][1] = -INFINITY; /* out of the bounds */
    r.mask[1][1] = 1;
    r.now[1][1] = r.old[1][1] + 100.0f;
    hd_policy_advantages(&o, r.s, SAMPLES, GROUP);
    hd_policy_factors(&o, r.s, SAMPLES, &report);
    assert_true(r.factor[0][0] == 0.0f && r.factor[0][1] == 0.0f && report.masked == 1);
    for (int i = 0; i < SAMPLES; i++) {
        for (int k = 0; k < r.s[i].n; k++) assert_true(isfinite(r.factor[i][k]));
    }
}

static void equal_policies_measure_zero(void **state) {
    (void)state;
    rig r;
    hd_policy_report report = {0};
    make(&r, 0.0f);
    hd_policy_measure(r.s, SAMPLES, r.scratch, &report);
    assert_true(report.mean == 0.0 && report.p99 == 0.0 && report.most == 0.0);
    assert_true(report.k1 == 0.0 && report.k3 == 0.0 && report.effective == 1.0);
    make(&r, 0.5f);
    hd_policy_measure(r.s, SAMPLES, r.scratch, &report);
    assert_true(report.mean > 0.1 && report.most >= report.p99 && report.most <= 0.5001);
    assert_true(report.k3 > 0.0 && report.effective < 1.0);
}

/* The denominators count all samples: the factors of a batch are those of the same samples among
 * others, times the share. */
static void denominators_count_the_batch(void **state) {
    (void)state;
    rig r;
    hd_policy_options o;
    hd_policy_report report = {0};
    make(&r, 0.0f);
    hd_policy_named(&o, "dapo");
    hd_policy_advantages(&o, r.s, SAMPLES, GROUP);
    hd_policy_factors(&o, r.s, SAMPLES, &report);
    const float whole = r.factor[0][0];
    int all = 0, part = 0;
    for (int i = 0; i < SAMPLES; i++) {
        for (int k = 0; k < r.s[i].n; k++) {
            all += r.mask[i][k];
            part += i < GROUP && r.mask[i][k];
        }
    }
    hd_policy_factors(&o, r.s, GROUP, &report);
    assert_true(fabs((double)(r.factor[0][0] * (float)part - whole * (float)all)) < 1e-5);
}

int test_policy(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(factors_are_slopes_of_the_loss),
        cmocka_unit_test(factors_with_a_reference),
        cmocka_unit_test(advantages_of_groups),
        cmocka_unit_test(a_group_without_rewards_does_not_count),
        cmocka_unit_test(a_group_of_one_teaches_nothing),
        cmocka_unit_test(long_answers_cost_reward),
        cmocka_unit_test(infinite_ratios),
        cmocka_unit_test(equal_policies_measure_zero),
        cmocka_unit_test(denominators_count_the_batch),
    };
    return cmocka_run_group_tests_name("policy", tests, NULL, NULL);
}
