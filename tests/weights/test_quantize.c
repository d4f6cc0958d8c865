/* test_quantize.c - rounding to FP8 and FP4 against the conversions of single numbers: every shape of
 * blocks, ties, numbers too small for the format, zeros, and each plain type. */
#include "check.h"

#include <math.h>

#include "weights/quantize.h"

enum { ROWS = 37, MOST = ROWS * 200 };

typedef struct shape {
    hd_dtype type, scale_type;
    int32_t block_rows, block_cols, cols;
    bool power_scales;
} shape;

static const shape shapes[] = {
    {HD_E4M3, HD_F32,  16,  16,  45,  false},
    {HD_E4M3, HD_F32,  128, 128, 200, false},
    {HD_E4M3, HD_E8M0, 128, 128, 131, true },
    {HD_E4M3, HD_E8M0, 32,  32,  96,  true },
    {HD_E2M1, HD_E8M0, 1,   32,  96,  true },
    {HD_E2M1, HD_E8M0, 1,   32,  78,  true },
};

static uint32_t draw(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Of all sizes; many lie in the middle between two codes of a block whose scale is a power of two. */
static float number(uint32_t *state) {
    const int exponent = (int)(draw(state) % 24u) - 20;
    const float mantissa = (float)(draw(state) % 64u) / 32.0f;
    const float f = ldexpf(mantissa, exponent);
    return draw(state) % 2 ? f : -f;
}

static void put(hd_dtype type, void *values, int32_t i, float f) {
    const uint32_t code = hd_dtypes[type].encode(f);
    const size_t bytes = hd_dtype_bytes(type, 1);
    memcpy((uint8_t *)values + (size_t)i * bytes, &code, bytes);
}

static float amax_of(const hd_weight *w, hd_dtype type, const void *values, int32_t r0,
                     int32_t c0) {
    float amax = 0;
    for (int32_t r = r0; r < r0 + w->block_rows && r < w->rows; r++) {
        for (int32_t c = c0; c < c0 + w->block_cols && c < w->cols; c++) {
            amax = fmaxf(amax, fabsf(hd_dtype_at(type, values, (int64_t)r * w->cols + c)));
        }
    }
    return amax;
}

static void check(const shape *h, hd_dtype type, uint32_t seed) {
    static uint8_t data[MOST], scale[MOST * sizeof(float)];
    static float values[MOST], largest_of[MOST]; /* of a block */
    const hd_weight w = {.type = h->type,
                         .scale_type = h->scale_type,
                         .rows = ROWS,
                         .cols = h->cols,
                         .block_rows = h->block_rows,
                         .block_cols = h->block_cols,
                         .power_scales = h->power_scales,
                         .scale = scale};
    const float largest = hd_dtypes[h->type].decode(hd_dtypes[h->type].largest);
    const int32_t per_row = (h->cols + h->block_cols - 1) / h->block_cols;
    for (int32_t i = 0; i < ROWS * h->cols; i++) {
        const bool zero_row = i / h->cols / h->block_rows == 1; /* a block of zeros */
        put(type, values, i, zero_row ? 0.0f : number(&seed));
    }
    memset(data, 0xAA, sizeof data);
    assert_int_equal(hd_quantize(&w, data, scale, type, values, NULL), HD_OK);
    for (int32_t i = 0; i < ROWS * h->cols; i++) {
        const int32_t r = i / h->cols, c = i % h->cols;
        const int32_t at = r / h->block_rows * per_row + c / h->block_cols;
        const float s = hd_dtype_at(h->scale_type, scale, at);
        if (r % h->block_rows == 0 && c % h->block_cols == 0) {
            largest_of[at] = amax_of(&w, type, values, r, c);
        }
        const float amax = largest_of[at];
        const float ideal = fmaxf(amax, 1e-12f) / largest;
        assert_true(h->power_scales ? s >= ideal && s / 2 < ideal : !(s < ideal || s > ideal));
        const float x = hd_dtype_at(type, values, i) / s;
        uint32_t code = data[i];
        if (h->type == HD_E2M1) code = (unsigned)data[i / 2] >> (i % 2 * 4) & 15u;
        const uint32_t want = hd_dtypes[h->type].encode(x);
        const bool no_sign = h->type == HD_E2M1 && want == 8; /* its zero has none */
        assert_int_equal(code, no_sign ? 0 : want);
    }
}

static void codes_are_those_of_single_numbers(void **state) {
    (void)state;
    static const hd_dtype types[] = {HD_F32, HD_BF16, HD_F16};
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        for (size_t k = 0; k < HD_LEN(types); k++) {
            for (uint32_t seed = 1; seed <= 5; seed++) check(&shapes[i], types[k], seed);
        }
    }
}

/* Every code's number, those between two, and those next to them, in a block of scale 1. */
static void every_border_is_where_it_was(void **state) {
    (void)state;
    enum { N = 6 * 256 };
    static float values[N];
    static uint8_t data[N], scale[N];
    const hd_weight w = {.type = HD_E4M3,
                         .scale_type = HD_E8M0,
                         .rows = 1,
                         .cols = N,
                         .block_rows = 1,
                         .block_cols = N,
                         .power_scales = true,
                         .scale = scale};
    for (uint32_t i = 0; i < 256; i++) {
        const float at = hd_e4m3_to_f32((uint8_t)(i == 0x7f || i == 0xff ? 0x7e : i));
        const float next = hd_e4m3_to_f32((uint8_t)((i & 0x7f) < 0x7e ? i + 1 : 0x7e));
        const float middle = (at + next) / 2;
        const float all[6] = {
            at,     middle,           nextafterf(middle, 0), nextafterf(middle, 448),
            at / 2, nextafterf(at, 0)};
        memcpy(values + (size_t)i * 6, all, sizeof all);
    }
    assert_int_equal(hd_quantize(&w, data, scale, HD_F32, values, NULL), HD_OK);
    assert_int_equal(scale[0], 127);
    for (int32_t i = 0; i < N; i++) assert_int_equal(data[i], hd_f32_to_e4m3(values[i]));
}

int test_quantize(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(codes_are_those_of_single_numbers),
        cmocka_unit_test(every_border_is_where_it_was),
    };
    return cmocka_run_group_tests_name("quantize", tests, NULL, NULL);
}
