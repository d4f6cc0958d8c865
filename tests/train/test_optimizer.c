/* test_optimizer.c - AdamW against its formulas in float64, Muon's directions, schedules, and
 * steps that change nothing. */
#include "check.h"

#include <math.h>

#include "base/random_fill.h"
#include "train/optimizer.h"

enum { ROWS = 5, COLS = 7, N = ROWS * COLS };

typedef struct rig {
    hd_device *device;
    hd_stream *stream;
    float master[N], grad[N], first[N], second[N];
    hd_parameter p;
    hd_optimizer_options o;
} rig;

static float unit(uint64_t seed, uint64_t i) {
    return (float)(hd_random_fill_at(seed, i) % 20011) / 10007.0f - 1.0f;
}

static void open_rig(rig *r, hd_update_kind kind, int32_t threads) {
    *r = (rig){
        .o = {.rate = 0.01,
              .beta1 = 0.9,
              .beta2 = 0.95,
              .eps = 1e-8,
              .muon_rate = 0.02,
              .momentum = 0.9,
              .decay = 0.1}
    };
    const hd_cpu_options cpu = {.n_threads = threads};
    assert_int_equal(hd_device_open_cpu(&r->device, &cpu, NULL), HD_OK);
    assert_int_equal(hd_stream_open(&r->stream, r->device, NULL), HD_OK);
    r->p = (hd_parameter){.name = "w",
                          .master = r->master,
                          .grad = r->grad,
                          .first = r->first,
                          .second = kind == HD_UPDATE_ADAMW ? r->second : NULL,
                          .rows = ROWS,
                          .cols = COLS,
                          .stack = 1,
                          .kind = kind,
                          .decays = true};
    for (uint64_t i = 0; i < N; i++) r->master[i] = unit(1, i);
    assert_int_equal(hd_optimizer_reserve(r->stream, true, &r->p, 1, NULL), HD_OK);
}

static void close_rig(rig *r) {
    hd_stream_close(r->stream);
    hd_device_close(r->device);
}

static void step_once(rig *r, int64_t step, hd_optimizer_report *report) {
    r->p.n = (int64_t)r->p.rows * r->p.cols;
    double sums[1], squares;
    hd_backward_ops ops;
    hd_backward_init_cpu(&ops, 0);
    const hd_optimizer_env env = {&ops, r->stream, sums, sums};
    assert_int_equal(hd_optimizer_sums(r->p.n), 1);
    assert_int_equal(hd_optimizer_squares(&squares, &env, r->grad, r->p.n, NULL), HD_OK);
    hd_optimizer_step(&r->o, &r->p, 1, step, squares, &env, report);
}

static void draw_gradient(rig *r, int64_t step) {
    for (uint64_t i = 0; i < N; i++) r->grad[i] = unit(100 + (uint64_t)step, i);
}

static void adamw_is_its_formula(void **state) {
    (void)state;
    rig r;
    open_rig(&r, HD_UPDATE_ADAMW, 1);
    r.o.clip = 2.0;
    double w[N], m[N] = {0}, v[N] = {0};
    for (int i = 0; i < N; i++) w[i] = (double)r.master[i];
    for (int64_t step = 0; step < 20; step++) {
        double square = 0.0;
        hd_optimizer_report report;
        draw_gradient(&r, step);
        for (int i = 0; i < N; i++) square += (double)r.grad[i] * (double)r.grad[i];
        step_once(&r, step, &report);
        assert_true(fabs(report.norm - sqrt(square)) < 1e-9 && !report.skipped);
        assert_true(report.norm > r.o.clip);
        for (int i = 0; i < N; i++) {
            const double g = (double)r.grad[i] * r.o.clip / sqrt(square);
            const double t = (double)step + 1;
            m[i] = 0.9 * m[i] + 0.1 * g;
            v[i] = 0.95 * v[i] + 0.05 * g * g;
            w[i] -=
                0.01 * (m[i] / (1 - pow(0.9, t)) / (sqrt(v[i] / (1 - pow(0.95, t))) + 1e-8) +
                        0.1 * w[i]);
            assert_true(fabs(w[i] - (double)r.master[i]) < 1e-5);
        }
    }
    close_rig(&r);
}

/* The update is a matrix whose singular values are near 1, times the rate. */
static void muon_moves_along_an_orthogonal_matrix(void **state) {
    (void)state;
    for (int tall = 0; tall < 2; tall++) {
        rig r;
        hd_optimizer_report report;
        float before[N];
        open_rig(&r, HD_UPDATE_MUON, 1);
        r.o.decay = 0.0;
        r.p.rows = tall ? COLS : ROWS;
        r.p.cols = tall ? ROWS : COLS;
        draw_gradient(&r, 0);
        memcpy(before, r.master, sizeof before);
        step_once(&r, 0, &report);
        const double scale = 0.02 * 0.2 * sqrt(COLS);
        for (int a = 0; a < ROWS; a++) {
            for (int b = 0; b < ROWS; b++) { /* rows of the wide form */
                double dot = 0.0;
                for (int c = 0; c < COLS; c++) {
                    const int i = tall ? c * ROWS + a : a * COLS + c;
                    const int j = tall ? c * ROWS + b : b * COLS + c;
                    dot +=
                        (double)(r.master[i] - before[i]) * (double)(r.master[j] - before[j]);
                }
                const double want = a == b ? 1.0 : 0.0;
                assert_true(fabs(dot / scale / scale - want) < 0.5);
            }
        }
        close_rig(&r);
    }
}

static void a_stack_is_so_many_matrices(void **state) {
    (void)state;
    rig one, two;
    hd_optimizer_report report;
    open_rig(&one, HD_UPDATE_MUON, 1);
    open_rig(&two, HD_UPDATE_MUON, 1);
    draw_gradient(&one, 3);
    draw_gradient(&two, 3);
    one.p.rows = 2;
    two.p.rows = 4;
    two.p.stack = 2;
    step_once(&one, 0, &report);
    const double norm = report.norm;
    step_once(&two, 0, &report);
    assert_true(report.norm > norm);
    assert_memory_equal(one.master, two.master, 2 * COLS * sizeof(float));
    close_rig(&one);
    close_rig(&two);
}

static void threads_change_no_bit(void **state) {
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        rig one, three;
        hd_optimizer_report report;
        open_rig(&one, (hd_update_kind)kind, 1);
        open_rig(&three, (hd_update_kind)kind, 3);
        for (int64_t step = 0; step < 5; step++) {
            draw_gradient(&one, step);
            draw_gradient(&three, step);
            step_once(&one, step, &report);
            step_once(&three, step, &report);
        }
        assert_memory_equal(one.master, three.master, sizeof one.master);
        assert_memory_equal(one.first, three.first, sizeof one.first);
        close_rig(&one);
        close_rig(&three);
    }
}

static void no_number_changes_nothing(void **state) {
    (void)state;
    const float bad[] = {NAN, INFINITY};
    for (size_t i = 0; i < HD_LEN(bad); i++) {
        rig r;
        hd_optimizer_report report;
        float before[N], zeros[N] = {0};
        open_rig(&r, HD_UPDATE_ADAMW, 1);
        draw_gradient(&r, 0);
        r.grad[17] = bad[i];
        memcpy(before, r.master, sizeof before);
        step_once(&r, 0, &report);
        assert_true(report.skipped);
        assert_memory_equal(before, r.master, sizeof before);
        assert_memory_equal(zeros, r.first, sizeof zeros);
        close_rig(&r);
    }
}

static void schedules(void **state) {
    (void)state;
    const hd_schedule c = {.kind = HD_SCHEDULE_CONSTANT, .warmup = 4};
    const hd_schedule s = {.kind = HD_SCHEDULE_COSINE, .warmup = 4, .steps = 15, .last = 0.1};
    for (int64_t i = 0; i < 4; i++) {
        assert_true(hd_schedule_at(&c, i) == (double)(i + 1) / 4);
        assert_true(hd_schedule_at(&s, i) == hd_schedule_at(&c, i));
    }
    assert_true(hd_schedule_at(&c, 1000) == 1.0);
    assert_true(hd_schedule_at(&s, 4) == 1.0);
    assert_true(fabs(hd_schedule_at(&s, 9) - 0.55) < 1e-12);
    assert_true(fabs(hd_schedule_at(&s, 14) - 0.1) < 1e-12);
    assert_true(fabs(hd_schedule_at(&s, 400) - 0.1) < 1e-12);
}

int test_optimizer(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adamw_is_its_formula),
        cmocka_unit_test(muon_moves_along_an_orthogonal_matrix),
        cmocka_unit_test(a_stack_is_so_many_matrices),
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(no_number_changes_nothing),
        cmocka_unit_test(schedules),
    };
    return cmocka_run_group_tests_name("optimizer", tests, NULL, NULL);
}
