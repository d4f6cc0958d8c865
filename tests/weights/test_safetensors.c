/* test_safetensors.c - each rule of the header refuses headers that break it; valid ones are
 * accepted. */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "weights/safetensors.h"

/* length: the claim of the first eight bytes; -1: the true one. */
static size_t build(uint8_t **out, const char *header, int64_t length, size_t data_bytes) {
    size_t n = strlen(header), bytes = 8 + n + data_bytes;
    uint64_t claim = length < 0 ? n : (uint64_t)length;
    *out = calloc(1, bytes);
    assert_non_null(*out);
    for (int i = 0; i < 8; i++) (*out)[i] = (uint8_t)(claim >> (8 * i));
    memcpy(*out + 8, header, n);
    return bytes;
}

static void expect(const char *header, size_t data_bytes, const char *refusal) {
    uint8_t *file;
    hd_safetensors s;
    hd_err err = {0};
    size_t bytes = build(&file, header, -1, data_bytes);
    hd_status st = hd_safetensors_init(&s, file, bytes, "m.safetensors", &err);
    if (refusal) {
        if (st != HD_EFORMAT || !strstr(err.msg, refusal)) {
            fail_msg("%.80s\n  gave '%s'\n  not '%s'", header, err.msg, refusal);
        }
        assert_true(strncmp(err.msg, "m.safetensors: ", 15) == 0);
        assert_null(strpbrk(err.msg, "\n\x1b"));
    } else if (st != HD_OK) {
        fail_msg("%.80s\n  was refused: %s", header, err.msg);
    }
    hd_safetensors_deinit(&s);
    free(file);
}

#define T(dtype, shape, span) \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" span "}"
#define ONE(dtype, shape, span) "{\"a\":" T(dtype, shape, span) "}"

static void good_headers_are_read(void **state) {
    (void)state;
    expect("{}", 0, NULL);
    expect("{\"__metadata__\":{\"format\":\"pt\"}}   ", 0, NULL);
    expect(ONE("F32", "[2,3]", "[0,24]"), 24, NULL);
    expect(ONE("F32", "[]", "[0,4]"), 4, NULL);
    expect(ONE("F64", "[1,1,1,1,1,1,1,1]", "[0,8]"), 8, NULL);
    expect(ONE("F4", "[3,4]", "[0,6]"), 6, NULL);
    expect(ONE("BF16", "[0,9223372036854775807]", "[0,0]"), 0, NULL);
    /* any order in the header; empty tensors at any border */
    expect("{\"b\":" T("U8", "[5]", "[3,8]") ",\"e\":" T("U8", "[0]", "[3,3]") ",\"a\":" T(
               "U8", "[3]", "[0,3]") "}",
           8, NULL);
}

static void tensors_are_listed(void **state) {
    (void)state;
    uint8_t *file;
    hd_safetensors s;
    size_t bytes = build(
        &file, "{\"x\":" T("F8_E8M0", "[2,3]", "[1,7]") ",\"y\":" T("I8", "[1]", "[0,1]") "}",
        -1, 7);
    assert_int_equal(hd_safetensors_init(&s, file, bytes, "m", NULL), HD_OK);
    assert_int_equal(s.n, 2);
    const hd_tensor *x = &s.tensors[0];
    assert_string_equal(x->name, "x");
    assert_string_equal(x->dtype_name, "F8_E8M0");
    assert_int_equal(x->dtype, HD_E8M0);
    assert_int_equal(x->rank, 2);
    assert_int_equal(x->shape[1], 3);
    assert_int_equal(x->bytes, 6);
    assert_ptr_equal(x->data, file + bytes - 6);
    hd_safetensors_deinit(&s);
    free(file);
}

static void lengths_are_checked(void **state) {
    (void)state;
    const struct {
        int64_t length;
        const char *refusal;
    } cases[] = {
        {0,         "header empty"         },
        {1,         "header empty"         },
        {3,         "header past end"      },
        {100000001, "header over 100000000"},
        {INT64_MAX, "header past end"      },
    };
    uint8_t *file, ones[8];
    hd_safetensors s;
    for (size_t n = 0; n < 8; n++) {
        hd_err err = {0};
        memset(ones, 0, sizeof ones);
        assert_int_equal(hd_safetensors_init(&s, ones, n, "m", &err), HD_EFORMAT);
        assert_non_null(strstr(err.msg, "file too short"));
    }
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        hd_err err = {0};
        size_t bytes = build(&file, "{}", cases[i].length, 0);
        assert_int_equal(hd_safetensors_init(&s, file, bytes, "m", &err), HD_EFORMAT);
        assert_non_null(strstr(err.msg, cases[i].refusal));
        free(file);
    }
    const uint64_t wraps[] = {UINT64_MAX, UINT64_MAX - 7, (uint64_t)1 << 63};
    for (size_t i = 0; i < HD_LEN(wraps); i++) {
        hd_err err = {0};
        size_t bytes = build(&file, "{}", 0, 0);
        memcpy(file, &wraps[i], sizeof wraps[i]);
        assert_int_equal(hd_safetensors_init(&s, file, bytes, "m", &err), HD_EFORMAT);
        assert_non_null(strstr(err.msg, "header past end"));
        free(file);
    }
}

static void text_is_checked(void **state) {
    (void)state;
    expect("[]", 0, "header not an object");
    expect(" {}", 0, "header not an object");
    expect("\xff\xfe", 0, "header not an object");
    expect("{\"a\":", 0, "header not JSON");
    expect("{}{}", 0, "header not JSON");
    expect("{\"\xc3\x28\":1}", 0, "header not JSON");
    expect("{\"a\":NaN}", 0, "header not JSON");
    expect("{\"a\":" T("U8", "[1]", "[0,1]") ",\"a\":" T("U8", "[1]", "[0,1]") "}", 1,
           "duplicate tensor");
    expect("{\"a\\u0000b\":" T("U8", "[1]", "[0,1]") "}", 1, "bad name");
    expect("{\"a\\nb\":" T("U8", "[1]", "[0,1]") "}", 1, "bad name");
    expect("{\"\\u001b[2J\":" T("U8", "[1]", "[0,1]") "}", 1, "bad name");
    expect("{\"\xc2\x9b[2J\":" T("U8", "[1]", "[0,1]") "}", 1, "bad name");
    expect("{\"\":" T("U8", "[1]", "[0,1]") "}", 1, "bad name");
    expect("{\"__metadata__\":7}", 0, "bad metadata");
    expect("{\"__metadata__\":{\"a\":1}}", 0, "bad metadata");
}

static void entries_are_checked(void **state) {
    (void)state;
    expect("{\"a\":7}", 0, "bad entry");
    expect("{\"a\":{}}", 0, "bad entry");
    expect("{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,0]}}", 0, "bad entry");
    expect("{\"a\":{\"dtype\":\"U8\",\"shape\":[0]}}", 0, "bad offsets");
    expect("{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "bad entry: dtype");
    expect(ONE("F99", "[1]", "[0,1]"), 1, "unknown dtype");
    expect(ONE("bf16", "[1]", "[0,2]"), 2, "unknown dtype");
    expect(ONE("", "[1]", "[0,2]"), 2, "unknown dtype");
    const char *spans[] = {"[0]",    "[0,1,2]", "[\"0\",\"1\"]", "[0.0,1.0]",
                           "[-1,1]", "{}",      "[null,1]"};
    for (size_t i = 0; i < HD_LEN(spans); i++) {
        char header[200];
        snprintf(header, sizeof header,
                 "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":%s}}", spans[i]);
        expect(header, 1, "bad offsets");
    }
    expect(ONE("U8", "[1]", "[1,0]"), 1, "bad offsets");
    expect(ONE("U8", "[-1]", "[0,1]"), 1, "bad shape");
    expect(ONE("U8", "[1.0]", "[0,1]"), 1, "bad shape");
    expect(ONE("U8", "[\"1\"]", "[0,1]"), 1, "bad shape");
    expect(ONE("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1, "rank 9");
    expect(ONE("F4", "[3]", "[0,2]"), 2, "misaligned");
    expect(ONE("F6_E2M3", "[2]", "[0,2]"), 2, "misaligned");
}

static void sizes_are_checked(void **state) {
    (void)state;
    expect(ONE("U8", "[5]", "[0,5]"), 4, "data past end");
    expect(ONE("U8", "[1]", "[9223372036854775806,9223372036854775807]"), 1, "data past end");
    expect(ONE("U8", "[1]", "[18446744073709551615,18446744073709551615]"), 1, "data past end");
    expect(ONE("U8", "[1]", "[0,18446744073709551616]"), 1, "data past end");
    expect(ONE("U8", "[4294967296,4294967296]", "[0,1]"), 1, "shape overflow");
    expect(ONE("F32", "[4611686018427387904,4]", "[0,1]"), 1, "shape overflow");
    expect(ONE("U8", "[9223372036854775808,2]", "[0,1]"), 1, "shape overflow");
    expect(ONE("U8", "[18446744073709551616]", "[0,1]"), 1, "shape overflow");
    expect("{\"a\":" T("U8", "[1e999]", "[0,1]") "}", 1, "header not JSON");
    expect(ONE("F32", "[2]", "[0,4]"), 4, "span mismatch");
    expect(ONE("F32", "[]", "[0,8]"), 8, "span mismatch");
    expect("{\"a\":" T("U8", "[4]", "[0,4]") ",\"b\":" T("U8", "[2]", "[3,5]") "}", 5,
           "overlap");
    expect("{\"a\":" T("U8", "[4]", "[0,4]") ",\"b\":" T("U8", "[4]", "[0,4]") "}", 4,
           "overlap");
    expect("{\"a\":" T("U8", "[4]", "[0,4]") ",\"b\":" T("U8", "[1]", "[5,6]") "}", 6, "hole");
    expect(ONE("U8", "[1]", "[1,2]"), 2, "hole");
    expect(ONE("U8", "[1]", "[0,1]"), 2, "trailing data");
    expect("{}", 1, "trailing data");
}

/* Returns a header of n times one character, between head and tail. */
static void expect_long(const char *head, char c, size_t n, const char *tail,
                        const char *refusal) {
    size_t before = strlen(head), after = strlen(tail) + 1;
    char *header = malloc(before + n + after);
    assert_non_null(header);
    memcpy(header, head, before);
    memset(header + before, c, n);
    memcpy(header + before + n, tail, after);
    expect(header, 0, refusal);
    free(header);
}

static void bombs_do_not_go_off(void **state) {
    (void)state;
    expect_long("{\"a\":", '[', 33 << 20, "", "header nesting");
    expect_long("{\"", 'n', 1 << 20, "\":7}", "bad name");
    expect_long("{\"a\":{\"dtype\":\"", 'F', 1 << 20, "\",\"shape\":[0]}}", "unknown dtype");
    expect_long("{\"a\":[", ',', 17000000, "]}", "too many tensors");
    expect_long("{\"a\":", '{', 1000003, "", "too many tensors");
    expect_long("{\"__metadata__\":{\"a\":\"", 'm', 50 << 20, "\"}}", NULL);
}

static void a_million_tensors_is_the_limit(void **state) {
    (void)state;
    enum { EACH = 64, N = 1000002 };
    char *header = malloc((size_t)N * EACH + 2), *at = header;
    assert_non_null(header);
    *at++ = '{';
    for (int i = 0; i < N; i++) {
        at += snprintf(at, EACH, "\"%07d\":" T("U8", "[0]", "[0,0]") "%c", i,
                       i + 1 < N ? ',' : '}');
    }
    expect(header, 0, "too many tensors");
    free(header);
}

int test_safetensors(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_headers_are_read),
        cmocka_unit_test(tensors_are_listed),
        cmocka_unit_test(lengths_are_checked),
        cmocka_unit_test(text_is_checked),
        cmocka_unit_test(entries_are_checked),
        cmocka_unit_test(sizes_are_checked),
        cmocka_unit_test(bombs_do_not_go_off),
        cmocka_unit_test(a_million_tensors_is_the_limit),
    };
    return cmocka_run_group_tests_name("safetensors", tests, NULL, NULL);
}
