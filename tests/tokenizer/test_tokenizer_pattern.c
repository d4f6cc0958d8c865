/* test_tokenizer_pattern.c - the linear scanner finds what the regular expression engine finds,
 * and the tables know the characters. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#include "tokenizer/pattern_internal.h"
#include "tokenizer/vocab_internal.h"
#include "fakes/toy_tokenizer.h"

static const char *const scannable[] = {
    "\\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./"
    ":;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    "[\r\n]",
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6]+",
    "\\s?[!-/:-~\uff01-\uff0f\u2018-\u201f\u3000-\u3002]+",
    "\\s+$",
    "\\s?\\p{P}+",
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
    "th|the|[a-h]{2,3}1?t+|\\P{L}{2}(?!\\d)",
    "\\s*t{2}|\\s+(?!t)|.{1,4}h",
};

static const char *const not_scannable[] = {
    "(?i:'s)",   "a+?b", "(ab)+", "\\s+\\p{L}+\\s+x", "a*",  "x(?=y)",
    "a{2,3}|^b", "x++y", "a||b",  "(?<!a)b",          "a$b",
};

/* Both engines from match to match over one text. */
static void compare(const text_pattern *a, const text_pattern *b, text_regex_scratch *scratch,
                    const uint8_t *text, size_t n) {
    text_search x = {.pattern = a}, y = {.pattern = b, .scratch = scratch};
    text_search_start(&x, text, n);
    text_search_start(&y, text, n);
    for (bool found = true; found;) {
        bool also;
        size_t first = 0, end = 0, first_also = 0, end_also = 0;
        assert_int_equal(text_search_next(&x, &first, &end, &found, NULL), HD_OK);
        assert_int_equal(text_search_next(&y, &first_also, &end_also, &also, NULL), HD_OK);
        assert_int_equal(found, also);
        if (!found) break;
        assert_int_equal(first, first_also);
        assert_int_equal(end, end_also);
    }
}

static void scanner_and_engine_agree(void **state) {
    (void)state;
    const char *rounds_text = getenv("HADAL_PATTERN_ROUNDS"); /* a long run asks for more */
    uint64_t rounds = rounds_text ? strtoull(rounds_text, NULL, 10) : 3000;
    text_regex_scratch *scratch;
    uint8_t text[4 * 64];
    assert_int_equal(text_regex_scratch_open(&scratch, NULL), HD_OK);
    for (size_t i = 0; i < HD_LEN(scannable); i++) {
        text_pattern scan = {0}, regex = {0};
        size_t n = strlen(scannable[i]);
        assert_int_equal(text_scan_open(&scan.scan, scannable[i], n, NULL), HD_OK);
        if (!scan.scan) fail_msg("not scannable: %s", scannable[i]);
        assert_int_equal(text_regex_open(&regex.regex, scannable[i], n, NULL), HD_OK);
        for (uint64_t round = 0; round < rounds; round++) {
            size_t bytes = toy_random_text(text, 77 + i, round, (int32_t)(round % 64));
            compare(&scan, &regex, scratch, text, bytes);
        }
        text_scan_close(scan.scan);
        text_regex_close(regex.regex);
    }
    text_regex_scratch_close(scratch);
}

static void the_rest_goes_to_the_engine(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(not_scannable); i++) {
        text_scan *scan;
        hd_err err = {0};
        hd_status st = text_scan_open(&scan, not_scannable[i], strlen(not_scannable[i]), &err);
        if (st != HD_OK || scan) fail_msg("%s: %s", not_scannable[i], err.msg);
    }
}

/* Every code point with its neighbors in both directions, through each class of interest. */
static void classes_agree_on_every_character(void **state) {
    (void)state;
    static const char source[] = "\\p{L}|\\p{N}|[\\p{P}\\p{S}]|\\s|\\p{M}|\\p{Cf}";
    text_scan *scan;
    text_pattern pattern = {0};
    assert_int_equal(text_scan_open(&scan, source, strlen(source), NULL), HD_OK);
    pattern.scan = scan;
    for (uint32_t cp = 0; cp < TEXT_UNICODE_END; cp++) {
        if (cp >= 0xd800 && cp < 0xe000) continue;
        uint8_t text[4];
        size_t first, end, n = text_utf8_put(text, cp), at = 0;
        bool found;
        assert_int_equal(text_utf8_valid((char *)text, n), n);
        assert_int_equal(text_utf8_next(text, &at), cp);
        text_search s = {.pattern = &pattern};
        text_search_start(&s, text, n);
        assert_int_equal(text_search_next(&s, &first, &end, &found, NULL), HD_OK);
        text_category c = text_category_of(cp);
        bool want = (c >= TEXT_LU && c <= TEXT_SO) || text_is_space(cp) || c == TEXT_CF;
        assert_int_equal(found, want);
    }
    text_scan_close(scan);
}

static void byte_alphabet_goes_both_ways(void **state) {
    (void)state;
    for (int32_t byte = 0; byte < 256; byte++) {
        uint32_t cp = text_byte_character((uint8_t)byte);
        assert_int_equal(text_character_byte(cp), byte);
    }
    assert_int_equal(text_byte_character(' '), 0x120);
    assert_int_equal(text_byte_character('\n'), 0x10a);
    assert_int_equal(text_byte_character(0xad), 0x143);
    assert_int_equal(text_character_byte(0x144), -1);
    assert_int_equal(text_character_byte(' '), -1);
    assert_int_equal(text_character_byte(0xad), -1);
}

static void broken_utf8_is_found(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t n, at;
    } cases[] = {
        {"abc",                         3,  3 },
        {"abcdefghijk\xff",             12, 11},
        {"\xc0\x80",                    2,  0 },
        {"a\xed\xa0\x80",               4,  1 },
        {"\xf4\x90\x80\x80",            4,  0 },
        {"\xf0\x9f\x99\x82",            4,  4 },
        {"\xf0\x9f\x99",                3,  0 },
        {"abcdefg\xe2\x82\xac\xe2\x82", 12, 10},
        {"\xe0\x80\x80",                3,  0 },
        {"\xf5\x80\x80\x80",            4,  0 },
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        assert_int_equal(text_utf8_valid(cases[i].text, cases[i].n), cases[i].at);
    }
}

int test_tokenizer_pattern(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scanner_and_engine_agree),
        cmocka_unit_test(the_rest_goes_to_the_engine),
        cmocka_unit_test(classes_agree_on_every_character),
        cmocka_unit_test(byte_alphabet_goes_both_ways),
        cmocka_unit_test(broken_utf8_is_found),
    };
    return cmocka_run_group_tests_name("tokenizer_pattern", tests, NULL, NULL);
}
