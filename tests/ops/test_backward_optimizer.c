/* test_backward_optimizer.c - the optimizer's operators: every table has the reference's bits, and the
 * reference's rounding is that of weight updates. */
#include <math.h>
#include <string.h>

#include "ops/backward_fixture.h"
#include "weights/quantize.h"

static hd_backward_ops reference(void) {
    hd_backward_ops t;
    hd_backward_init_ref(&t);
    return t;
}

/* ---- sums of squares, AdamW ---- */

void squares_have_one_order(void **state) {
    (void)state;
    const int64_t sizes[] = {1, 255, 256, 1000, HD_SQUARES_BLOCK, HD_SQUARES_BLOCK + 257};
    const hd_backward_ops ref = reference();
    for (size_t i = 0; i < HD_LEN(sizes); i++) {
        const float *x = take_random(sizes[i], 3.0f);
        double *own = take(2 * sizeof *own), *want = take(2 * sizeof *want), sum = 0.0;
        memset(own, 0, 2 * sizeof *own);
        memset(want, 0, 2 * sizeof *want);
        ref.sum_squares(backward_stream(), &(hd_sum_squares_args){want, x, sizes[i]});
        backward_ops()->sum_squares(backward_stream(),
                                    &(hd_sum_squares_args){own, x, sizes[i]});
        assert_memory_equal(own, want, 2 * sizeof *own);
        for (int64_t k = 0; k < sizes[i]; k++) sum += (double)x[k] * (double)x[k];
        assert_true(fabs(own[0] + own[1] - sum) <= 1e-12 * sum);
    }
}

void adamw_has_one_order(void **state) {
    enum { N = 40001 };
    (void)state;
    const hd_backward_ops ref = reference();
    const float *grad = take_random(N, 1.0f), *start = take_random(N, 1.0f);
    hd_adamw_args a[2];
    for (int k = 0; k < 2; k++) {
        a[k] = (hd_adamw_args){.master = take_copy(start, N * sizeof *start),
                               .first = take_zeros(N),
                               .second = take_zeros(N),
                               .grad = grad,
                               .n = N,
                               .clip = 0.37f,
                               .rate = 3e-4f,
                               .keep = 0.9999f,
                               .beta1 = 0.9f,
                               .beta2 = 0.95f,
                               .eps = 1e-8f,
                               .correction1 = 10.0f,
                               .correction2 = 20.0f};
        for (int step = 0; step < 3; step++) {
            a[k].correction1 /= 1.3f;
            (k ? backward_ops() : &ref)->adamw(backward_stream(), &a[k]);
        }
    }
    check_bits("adamw masters", a[1].master, a[0].master, N);
    check_bits("adamw first moments", a[1].first, a[0].first, N);
    check_bits("adamw second moments", a[1].second, a[0].second, N);
}

/* ---- Muon ---- */

void muon_has_one_order(void **state) {
    static const int32_t shapes[][2] = {
        {5,  7 },
        {7,  5 },
        {1,  3 },
        {33, 64},
        {80, 17},
        {48, 48}
    };
    enum { MATRICES = 3 };
    (void)state;
    const hd_backward_ops ref = reference();
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        const int32_t rows = shapes[i][0], cols = shapes[i][1];
        const int64_t n = (int64_t)MATRICES * rows * cols;
        const float *grad = take_random(n, 1.0f), *start = take_random(n, 1.0f);
        hd_muon_args a[2];
        for (int k = 0; k < 2; k++) {
            a[k] = (hd_muon_args){.master = take_copy(start, (size_t)n * sizeof *start),
                                  .first = take_zeros(n),
                                  .grad = grad,
                                  .n = MATRICES,
                                  .rows = rows,
                                  .cols = cols,
                                  .clip = 0.7f,
                                  .rate = 0.01f,
                                  .keep = 0.999f,
                                  .momentum = 0.95f};
        }
        ref.muon(fix.stream[0], &a[0]);
        backward_ops()->muon(backward_stream(), &a[1]);
        check_bits("muon masters", a[1].master, a[0].master, n);
        check_bits("muon momenta", a[1].first, a[0].first, n);
    }
}

/* ---- rounding ---- */

typedef struct rounding {
    hd_dtype type, scale_type;
    int32_t block_rows, block_cols, rows, cols;
    float global;
    bool power, widened;
} rounding;

static const rounding roundings[] = {
    {HD_F32,  HD_NONE, 0,   0,   3,   7,   1.0f,  false, false},
    {HD_BF16, HD_NONE, 0,   0,   5,   301, 1.0f,  false, false},
    {HD_BF16, HD_NONE, 0,   0,   1,   99,  1.0f,  false, true },
    {HD_F16,  HD_NONE, 0,   0,   4,   33,  1.0f,  false, false},
    {HD_E4M3, HD_F32,  128, 128, 130, 200, 1.0f,  false, false},
    {HD_E4M3, HD_BF16, 128, 128, 37,  131, 1.0f,  false, false},
    {HD_E4M3, HD_E8M0, 128, 128, 37,  131, 1.0f,  true,  false},
    {HD_E4M3, HD_E8M0, 1,   32,  9,   96,  1.0f,  false, false},
    {HD_E2M1, HD_E8M0, 1,   32,  9,   78,  1.0f,  true,  false},
    {HD_E2M1, HD_E4M3, 1,   16,  11,  48,  0.01f, false, false},
};

/* Of all sizes, with zeros; many lie in the middle between two codes. */
static float *take_numbers(int64_t n) {
    float *x = take((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) {
        const float f = ldexpf((float)random_below(64) / 32.0f, random_below(24) - 20);
        x[i] = random_below(2) ? f : -f;
    }
    return x;
}

static hd_weight like_of(const rounding *r) {
    static const uint8_t any;
    return (hd_weight){.type = r->type,
                       .scale_type = r->scale_type,
                       .scale = r->scale_type == HD_NONE ? NULL : &any,
                       .rows = r->rows,
                       .cols = r->cols,
                       .block_rows = r->block_rows,
                       .block_cols = r->block_cols,
                       .global = r->global,
                       .power_scales = r->power};
}

static void round_by(const hd_backward_ops *ops, const rounding *r, const float *const *values,
                     int32_t n, uint8_t **data, uint8_t **scale, int32_t *bad) {
    hd_round_weights_args a = {.bad = bad, .n = n, .like = like_of(r), .widened = r->widened};
    for (int32_t k = 0; k < n; k++) {
        a.data[k] = data[k];
        a.scale[k] = scale[k];
        a.values[k] = values[k];
        bad[k] = 0;
    }
    ops->round_weights(backward_stream(), &a);
}

void rounding_is_that_of_updates(void **state) {
    enum { N = 3, ROOM = 130 * 200 * 4 };
    (void)state;
    const hd_backward_ops ref = reference();
    for (size_t i = 0; i < HD_LEN(roundings); i++) {
        const rounding *r = &roundings[i];
        const int64_t n = (int64_t)r->rows * r->cols;
        const float *values[N];
        uint8_t *data[3][N], *scale[3][N];
        int32_t *bad[2] = {take_ints(N), take_ints(N)};
        const hd_weight like = like_of(r);
        for (int k = 0; k < N; k++) {
            values[k] = take_numbers(n);
            for (int w = 0; w < 3; w++) {
                data[w][k] = memset(take(ROOM), 0, ROOM);
                scale[w][k] = memset(take(ROOM), 0, ROOM);
            }
            if (like.scale) {
                assert_int_equal(
                    hd_quantize(&like, data[2][k], scale[2][k], HD_F32, values[k], NULL),
                    HD_OK);
            } else if (!r->widened) {
                assert_true(hd_convert(r->type, data[2][k], HD_F32, values[k], n));
            }
        }
        round_by(&ref, r, values, N, data[0], scale[0], bad[0]);
        round_by(backward_ops(), r, values, N, data[1], scale[1], bad[1]);
        for (int k = 0; k < N; k++) {
            assert_memory_equal(data[1][k], data[0][k], ROOM);
            assert_memory_equal(scale[1][k], scale[0][k], ROOM);
            if (!r->widened) assert_memory_equal(data[0][k], data[2][k], ROOM);
            assert_memory_equal(scale[0][k], scale[2][k], ROOM);
            assert_true(!bad[0][k] && !bad[1][k]);
        }
        for (int64_t e = 0; r->widened && e < n; e++) {
            const float want = hd_bf16_to_f32(hd_f32_to_bf16(values[0][e]));
            assert_memory_equal(data[1][0] + 4 * e, &want, sizeof want);
        }
    }
}

/* What no format can hold is marked, for its matrix alone. */
void rounding_marks_what_does_not_fit(void **state) {
    enum { N = 3, ROOM = 130 * 200 * 4 };
    (void)state;
    const float wrong[] = {NAN, INFINITY, -INFINITY, 3e38f};
    for (size_t i = 0; i < HD_LEN(roundings); i++) {
        for (size_t w = 0; w < HD_LEN(wrong); w++) {
            const rounding *r = &roundings[i];
            const int64_t n = (int64_t)r->rows * r->cols;
            float *values[N];
            uint8_t *data[N], *scale[N];
            int32_t *bad = take_ints(N);
            for (int k = 0; k < N; k++) {
                values[k] = take_numbers(n);
                data[k] = take(ROOM);
                scale[k] = take(ROOM);
            }
            values[1][n - 1] = wrong[w];
            round_by(backward_ops(), r, (const float *const *)values, N, data, scale, bad);
            const bool fits = w == 3 && r->type != HD_F16 && r->scale_type != HD_E4M3;
            assert_true(bad[0] == 0 && bad[1] == !fits && bad[2] == 0);
        }
    }
}
