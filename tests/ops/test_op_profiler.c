/* test_op_profiler.c - what the op profiler records, and that the operators compute the same
 * under it. */
#include "check.h"

#include "base/cpu.h"
#include "ops/profile/op_profiler.h"

/* A clock that advances by one second per reading. */
static int64_t seconds_passed;
static int64_t stepping_clock(void) {
    return 1000000000 * seconds_passed++;
}

typedef struct rig {
    hd_device *device;
    hd_stream *stream;
    hd_ops inner, ops;
    hd_op_profiler profiler;
} rig;

static int open_rig(void **state) {
    static rig r;
    const hd_cpu_options one = {.n_threads = 1};
    if (hd_device_open_cpu(&r.device, &one, NULL) != HD_OK) return -1;
    if (hd_stream_open(&r.stream, r.device, NULL) != HD_OK) return -1;
    if (hd_stream_reserve(r.stream, hd_ops_scratch_bytes(1, 64), NULL) != HD_OK) return -1;
    hd_ops_init_cpu(&r.inner, hd_cpu_features(), HD_EXACT);
    hd_op_profiler_init(&r.profiler, &r.ops, &r.inner, stepping_clock);
    *state = &r;
    return 0;
}

static int close_rig(void **state) {
    rig *r = *state;
    hd_stream_close(r->stream);
    hd_device_close(r->device);
    return 0;
}

static void counts_products(void **state) {
    rig *r = *state;
    uint8_t data[4 * 32] = {0};
    const float scale = 1.0f;
    float x[3 * 32] = {0}, out[3 * 4], plain[3 * 4];
    for (int i = 0; i < 96; i++) x[i] = (float)(i % 5);
    for (int i = 0; i < 128; i++) data[i] = (uint8_t)(0x30 + i % 16);
    const hd_weight w = {.data = data,
                         .scale = &scale,
                         .type = HD_E4M3,
                         .scale_type = HD_F32,
                         .rows = 4,
                         .cols = 32,
                         .block_rows = 4,
                         .block_cols = 32,
                         .global = 1.0f};
    hd_linear_args a = {.out = hd_f32(out), .x = hd_f32(x), .w = &w, .rows = 3};
    hd_op_profiler_reset(&r->profiler);
    r->ops.linear(r->stream, &a);
    r->ops.linear(r->stream, &a);
    a.out = hd_f32(plain);
    r->inner.linear(r->stream, &a);
    assert_memory_equal(out, plain, sizeof out);
    assert_int_equal(r->profiler.n, 1);
    const hd_op_profile *l = &r->profiler.line[0];
    assert_string_equal(l->op, "linear");
    assert_int_equal(l->calls, 2);
    assert_true(l->seconds == 2);
    assert_true(l->flops == 2 * 2.0 * 3 * 4 * 32);
    assert_true(l->bytes == 2 * (4 * 32 + 4 + 4 * 3 * (4 + 32))); /* codes, scale, rows */
    a.rows = 1;
    r->ops.linear(r->stream, &a);
    assert_int_equal(r->profiler.n, 2); /* another shape: another line */
}

/* Rows 0 and 1 are one sequence with two keys; row 2 is another one with five. */
static void counts_keys(void **state) {
    rig *r = *state;
    float keys[8 * 4] = {0}, q[3 * 2 * 4] = {0}, out[3 * 2 * 4];
    const int32_t table[2] = {0, 0}, seq[3] = {0, 0, 1}, pos[3] = {0, 1, 4};
    hd_op_profiler_reset(&r->profiler);
    r->ops.attention(r->stream, &(hd_attention_args){
                                    .out = hd_f32(out),
                                    .q = hd_f32(q),
                                    .entries = {.rows = hd_f32(keys),
                                                .table = table,
                                                .table_stride = 1,
                                                .page_entries = 8,
                                                .width = 4},
                                    .seq = seq,
                                    .pos = pos,
                                    .rows = 3,
                                    .heads = 2,
                                    .k_dim = 4,
                                    .v_dim = 4,
                                    .ratio = 1,
                                    .scale = 1.0f
    });
    const hd_op_profile *l = &r->profiler.line[0];
    assert_true(l->bytes == 4.0 * 4 * (2 + 5) + 4.0 * 3 * 2 * (4 + 4)); /* keys; q and out */
    assert_true(l->flops == 2.0 * 2 * (4 + 4) * (1 + 2 + 5));
}

static void a_full_profiler_says_so(void **state) {
    rig *r = *state;
    hd_op_profiler_reset(&r->profiler);
    float x[HD_OP_PROFILER_LINES + 1] = {0};
    for (int32_t n = 1; n <= HD_OP_PROFILER_LINES + 1; n++) {
        r->ops.add(
            r->stream,
            &(hd_add_args){.x = hd_f32(x), .y = hd_f32(x), .rows = 1, .cols = n, .repeat = 1});
    }
    assert_int_equal(r->profiler.n, HD_OP_PROFILER_LINES);
    assert_int_equal(r->profiler.lost, 1);
}

/* On an asynchronous device the profiler runs in passes. What one pass counts, the next one
 * times. Calls that differ from the counted ones are reported. */
static void passes_must_be_equal(void **state) {
    rig *r = *state;
    static hd_op_profiler m;
    hd_ops metered;
    float x[4] = {0};
    const hd_add_args a = {.x = hd_f32(x), .y = hd_f32(x), .rows = 1, .cols = 4, .repeat = 1};
    assert_int_equal(hd_op_profiler_open(&m, &metered, &r->inner, r->device, r->stream, NULL),
                     HD_OK);
    hd_op_profiler_count(&m);
    hd_op_profiler_at(&m, "part", "stage");
    metered.add(r->stream, &a);
    metered.add(r->stream, &a);
    assert_int_equal(m.n, 1);
    assert_int_equal(m.line[0].calls, 0);
    assert_string_equal(m.line[0].part, "part");
    for (int pass = 1; pass <= 2; pass++) {
        hd_op_profiler_time(&m);
        metered.add(r->stream, &a);
        metered.add(r->stream, &a);
        assert_true(hd_op_profiler_finish(&m));
        assert_int_equal(m.line[0].calls, 2 * pass);
        assert_true(m.line[0].bytes == 2 * pass * 4.0 * 4 * 3);
        assert_true(m.line[0].seconds >= 0);
    }
    hd_op_profiler_time(&m);
    metered.add(r->stream, &a);
    assert_false(hd_op_profiler_finish(&m));
    hd_op_profiler_close(&m);
}

int test_op_profiler(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_products),
        cmocka_unit_test(counts_keys),
        cmocka_unit_test(a_full_profiler_says_so),
        cmocka_unit_test(passes_must_be_equal),
    };
    return cmocka_run_group_tests_name("op_profiler", tests, open_rig, close_rig);
}
