/* test_tokenizer.c - encoding, decoding and every refusal, on a tokenizer written down here. */
#include "check.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"
#include "tokenizer/token_classes.h"
#include "tokenizer/unicode.h"
#include "fakes/toy_tokenizer.h"

static hd_status open_parts(hd_tokenizer **out, const toy_parts *parts, const char *config,
                            hd_err *err) {
    hd_bytes document = {0};
    toy_document(&document, parts);
    hd_status st = toy_open(out, document.data, document.n, config, err);
    hd_bytes_deinit(&document);
    return st;
}

static hd_tokenizer *open_toy(void) {
    hd_tokenizer *t;
    hd_err err = {0};
    if (open_parts(&t, &(toy_parts){0}, NULL, &err) != HD_OK) fail_msg("%s", err.msg);
    return t;
}

static void check_ids(const hd_tokenizer *t, const char *text, uint32_t flags,
                      const int32_t *want, size_t n) {
    hd_ids ids = {0};
    assert_int_equal(hd_tokenizer_encode(t, text, strlen(text), flags, &ids, NULL), HD_OK);
    assert_int_equal(ids.n, n);
    if (n) assert_memory_equal(ids.ids, want, n * sizeof *want);
    hd_ids_deinit(&ids);
}

static void merges_go_by_rank(void **state) {
    (void)state;
    hd_tokenizer *t = open_toy();
    check_ids(t, "", 0, NULL, 0);
    check_ids(t, "the", 0, (const int32_t[]){257}, 1);
    check_ids(t, "x the", 0, (const int32_t[]){'x', 259}, 2);
    check_ids(t, "x th", 0, (const int32_t[]){'x', ' ', 256}, 3); /* "th" before " t" */
    check_ids(t, "    x", 0, (const int32_t[]){260, ' ', ' ', 'x'}, 4);
    check_ids(t, "\xc3\xa9", 0, (const int32_t[]){0xc3, 0xa9}, 2);
    hd_tokenizer_close(t);
}

static void special_text_is_text_unless_asked(void **state) {
    (void)state;
    hd_tokenizer *t = open_toy();
    const int32_t asked[] = {'a', 262, 'b', 263, 261};
    check_ids(t, "a<think>b</think><s>", HD_ENCODE_SPECIAL, asked, 5);
    hd_ids ids = {0};
    assert_int_equal(hd_tokenizer_encode(t, "<think><s>", 10, 0, &ids, NULL), HD_OK);
    for (size_t i = 0; i < ids.n; i++) assert_false(hd_tokenizer_is_added(t, ids.ids[i]));
    hd_ids_deinit(&ids);
    assert_int_equal(hd_tokenizer_find(t, "<think>", 7), 262);
    assert_int_equal(hd_tokenizer_find(t, "<thin", 5), -1);
    assert_true(hd_tokenizer_is_special(t, 261) && !hd_tokenizer_is_special(t, 262));
    assert_int_equal(hd_tokenizer_vocab_size(t), 264);
    assert_int_equal(hd_tokenizer_check_rows(t, 264, NULL), HD_OK);
    assert_int_equal(hd_tokenizer_check_rows(t, 263, NULL), HD_EFORMAT);
    hd_tokenizer_close(t);
}

static void bos_comes_from_config_or_template(void **state) {
    (void)state;
    hd_tokenizer *t;
    hd_err err = {0};
    const toy_parts parts = {
        .post_processor = "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":"
                          "{\"id\":\"<s>\",\"type_id\":0}},{\"Sequence\":{}}]}"};
    assert_int_equal(open_parts(&t, &parts, NULL, &err), HD_OK);
    assert_int_equal(hd_tokenizer_bos(t), 261);
    assert_true(hd_tokenizer_adds_bos(t));
    check_ids(t, "the", HD_ENCODE_BOS, (const int32_t[]){261, 257}, 2);
    hd_tokenizer_close(t);
    const char *config = "{\"bos_token\":{\"content\":\"<think>\"},\"eos_token\":\"<s>\","
                         "\"pad_token\":null,\"add_bos_token\":false}";
    assert_int_equal(open_parts(&t, &parts, config, &err), HD_OK);
    assert_int_equal(hd_tokenizer_bos(t), 262);
    assert_int_equal(hd_tokenizer_eos(t), 261);
    assert_int_equal(hd_tokenizer_pad(t), -1);
    assert_false(hd_tokenizer_adds_bos(t));
    hd_tokenizer_close(t);
}

/* Any bytes cut anywhere decode as they do in one go, and never to invalid UTF-8. */
static void streamed_text_is_the_whole_text(void **state) {
    (void)state;
    static const uint8_t bytes[] = {'a',  0x80, 0xbf, 0xc2, 0xc0, 0xe0, 0xa0, 0xed, 0x9f,
                                    0xf0, 0x90, 0xf4, 0x8f, 0xff, 0xe2, 0x82, 0xac, 0xf1};
    hd_tokenizer *t = open_toy();
    for (uint64_t round = 0; round < 20000; round++) {
        int32_t ids[8];
        hd_philox r = hd_philox_at(5, round, 0), q = hd_philox_at(6, round, 0);
        for (int i = 0; i < 8; i++) {
            ids[i] = bytes[(i < 4 ? r.v[i] : q.v[i - 4]) % sizeof bytes];
        }
        hd_bytes whole = {0}, streamed = {0};
        hd_detokenizer d;
        assert_int_equal(hd_tokenizer_decode(t, ids, 8, false, &whole, NULL), HD_OK);
        hd_detokenizer_init(&d, t, false);
        for (int i = 0; i < 8; i++) {
            assert_int_equal(hd_detokenizer_push(&d, ids[i], &streamed, NULL), HD_OK);
            assert_int_equal(text_utf8_valid(streamed.data, streamed.n), streamed.n);
        }
        assert_int_equal(hd_detokenizer_finish(&d, &streamed, NULL), HD_OK);
        assert_int_equal(whole.n, streamed.n);
        assert_memory_equal(whole.data, streamed.data, whole.n);
        hd_bytes_deinit(&whole);
        hd_bytes_deinit(&streamed);
    }
    hd_tokenizer_close(t);
}

static void broken_bytes_become_one_mark_each(void **state) {
    (void)state;
    static const struct {
        uint8_t bytes[6];
        size_t n;
        const char *text;
    } cases[] = {
        {{0xf0, 0x9f, 0x99, 0x82},       4, "\xf0\x9f\x99\x82"                    },
        {{0xf0, 0x9f, 0x99},             3, "\xef\xbf\xbd"                        },
        {{0xf0, 0x9f, 'a'},
         3,                                 "\xef\xbf\xbd"
         "a"                                                           },
        {{0xed, 0xa0, 0x80},             3, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
        {{0xe2, 0x82, 0xe2, 0x82, 0xac}, 5, "\xef\xbf\xbd\xe2\x82\xac"            },
        {{0xc0, 0x80, 'x'},
         3,                                 "\xef\xbf\xbd\xef\xbf\xbd"
         "x"                                                           },
    };
    hd_tokenizer *t = open_toy();
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        int32_t ids[6];
        hd_bytes text = {0};
        for (size_t k = 0; k < cases[i].n; k++) ids[k] = cases[i].bytes[k];
        assert_int_equal(hd_tokenizer_decode(t, ids, cases[i].n, false, &text, NULL), HD_OK);
        assert_int_equal(text.n, strlen(cases[i].text));
        assert_memory_equal(text.data, cases[i].text, text.n);
        hd_bytes_deinit(&text);
    }
    hd_bytes text = {0};
    const int32_t ids[] = {261, 'a', 9999, -5, 262};
    assert_int_equal(hd_tokenizer_decode(t, ids, 5, true, &text, NULL), HD_OK);
    assert_int_equal(text.n, 8);
    assert_memory_equal(text.data, "a<think>", 8);
    hd_bytes_deinit(&text);
    hd_tokenizer_close(t);
}

static void text_survives(void **state) {
    (void)state;
    hd_tokenizer *t = open_toy();
    uint8_t text[4 * 400];
    for (uint64_t round = 0; round < 3000; round++) {
        size_t n = toy_random_text(text, 3, round, (int32_t)(round % 400));
        hd_ids ids = {0};
        hd_bytes back = {0};
        assert_int_equal(hd_tokenizer_encode(t, (char *)text, n,
                                             round & 1 ? HD_ENCODE_SPECIAL : 0, &ids, NULL),
                         HD_OK);
        assert_int_equal(hd_tokenizer_decode(t, ids.ids, ids.n, false, &back, NULL), HD_OK);
        assert_int_equal(back.n, n);
        if (n) assert_memory_equal(back.data, text, n);
        hd_ids_deinit(&ids);
        hd_bytes_deinit(&back);
    }
    hd_tokenizer_close(t);
}

static void buffers_keep_their_maximum(void **state) {
    (void)state;
    hd_tokenizer *t = open_toy();
    hd_ids ids = {.max = 3};
    hd_err err = {0};
    assert_int_equal(hd_tokenizer_encode(t, "abc", 3, 0, &ids, &err), HD_OK);
    assert_int_equal(hd_tokenizer_encode(t, "d", 1, 0, &ids, &err), HD_EINVAL);
    assert_int_equal(ids.n, 3);
    hd_bytes text = {.max = 2};
    assert_int_equal(hd_tokenizer_decode(t, ids.ids, 3, false, &text, &err), HD_EINVAL);
    hd_ids_deinit(&ids);
    hd_bytes_deinit(&text);
    err = (hd_err){0};
    assert_int_equal(hd_tokenizer_encode(t, "ab\xc3", 3, 0, &ids, &err), HD_EINVAL);
    assert_non_null(strstr(err.msg, "at byte 2"));
    assert_int_equal(ids.n, 0);
    hd_tokenizer_close(t);
}

static void *encode_many(void *arg) {
    const hd_tokenizer *t = arg;
    uint8_t text[4 * 200];
    uint64_t sum = 0;
    for (uint64_t round = 0; round < 200; round++) {
        hd_ids ids = {0};
        size_t n = toy_random_text(text, 9, round, 200);
        if (hd_tokenizer_encode(t, (char *)text, n, HD_ENCODE_SPECIAL, &ids, NULL) != HD_OK) {
            return NULL;
        }
        for (size_t i = 0; i < ids.n; i++) sum = sum * 31 + (uint64_t)ids.ids[i];
        hd_ids_deinit(&ids);
    }
    uint64_t *out = malloc(sizeof *out);
    if (out) *out = sum;
    return out;
}

static void many_threads_share_one(void **state) {
    (void)state;
    hd_tokenizer *t;
    const toy_parts parts = {
        .pre_tokenizer = "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\","
                         "\"pattern\":{\"Regex\":\"(?i:the)|\\\\p{L}+?\"},\"behavior\":"
                         "\"Isolated\"},{\"type\":\"ByteLevel\",\"add_prefix_space\":false}]}"};
    assert_int_equal(open_parts(&t, &parts, NULL, NULL), HD_OK);
    pthread_t threads[4];
    uint64_t *sums[4] = {0};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, encode_many, t), 0);
    }
    for (int i = 0; i < 4; i++) {
        void *sum;
        pthread_join(threads[i], &sum);
        sums[i] = sum;
        assert_non_null(sums[i]);
        assert_int_equal(*sums[i], *sums[0]);
    }
    for (int i = 0; i < 4; i++) free(sums[i]);
    hd_tokenizer_close(t);
}

#define BYTE_LEVEL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}"
#define SPLIT(pattern)                                                                      \
    "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":" \
    "\"" pattern "\"},\"behavior\":\"Isolated\"}," BYTE_LEVEL "]}"

static const struct refusal {
    const char *rule; /* words of the sentence */
    toy_parts parts;
    const char *config;
} refusals[] = {
    {"unsupported tokenizer model: WordPiece",              {.type = "\"WordPiece\""},                                    NULL                                    },
    {"duplicate id 0",                                      {.vocab_more = ",\"zz\":0"},                                  NULL                                    },
    {"duplicate",                                           {.vocab_more = ",\"the\":300"},                               NULL                                    },
    {"id -1 is out of range",                               {.vocab_more = ",\"zz\":-1"},                                 NULL                                    },
    {"id 4294967296 is out of range",                       {.vocab_more = ",\"zz\":4294967296"},                         NULL                                    },
    {"not a whole number",                                  {.vocab_more = ",\"zz\":1.5"},                                NULL                                    },
    {"a token is empty",                                    {.vocab_more = ",\"\":300"},                                  NULL                                    },
    {"not spelled in the byte-level alphabet",              {.vocab_more = ",\"a b\":300"},                               NULL                                    },
    {"byte 0x61, 'a', is missing",                          {.vocab_skip = "a"},                                          NULL                                    },
    {"byte_fallback",                                       {.model_more = ",\"byte_fallback\":true"},                    NULL                                    },
    {"dropout",                                             {.model_more = ",\"dropout\":0.1"},                           NULL                                    },
    {"end_of_word_suffix",                                  {.model_more = ",\"end_of_word_suffix\":\"w\""},              NULL                                    },
    {"bad merge 0",                                         {.merges = "[\"th\"]"},                                       NULL                                    },
    {"bad merge 0",                                         {.merges = "[\"t h e\"]"},                                    NULL                                    },
    {"bad merge 0",                                         {.merges = "[\"t \"]"},                                       NULL                                    },
    {"bad merge 0",                                         {.merges = "[[\"t\",\"h\",\"e\"]]"},                          NULL                                    },
    {"bad merge 0",                                         {.merges = "[[\"t\",\"\"]]"},                                 NULL                                    },
    {"bad merge 0",                                         {.merges = "[7]"},                                            NULL                                    },
    {"merge 0, 'zz' and 'h': its left part",                {.merges = "[\"zz h\"]"},                                     NULL                                    },
    {"its right part",                                      {.merges = "[\"h zz\"]"},                                     NULL                                    },
    {"its result",                                          {.merges = "[\"h t\"]"},                                      NULL                                    },
    {"is there twice",                                      {.merges = "[\"t h\",[\"t\",\"h\"]]"},                        NULL                                    },
    {"merges: must be an array",                            {.merges = "{}"},                                             NULL                                    },
    {"duplicate id 256",                                    {.added = "[{\"id\":256,\"content\":\"<x>\"}]"},              NULL                                    },
    {"duplicate token 'the'",                               {.added = "[{\"id\":300,\"content\":\"the\"}]"},              NULL                                    },
    {"duplicate",
     {.added = "[{\"id\":9,\"content\":\"x\"},{\"id\":9,\"content\":\"x\"}]"},
     NULL                                                                                                                                                         },
    {"its content is empty",                                {.added = "[{\"id\":300,\"content\":\"\"}]"},                 NULL                                    },
    {"'lstrip' must be",                                    {.added = "[{\"id\":300,\"content\":\"<x>\",\"lstrip\":1}]"}, NULL                                    },
    {"added_tokens: must be an array",                      {.added = "{}"},                                              NULL                                    },
    {"unsupported normalizer: NFC",                         {.normalizer = "{\"type\":\"NFC\"}"},                         NULL                                    },
    {"unsupported normalizer: Lowercase",
     {.normalizer = "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Lowercase\"}]}"},
     NULL                                                                                                                                                         },
    {"unsupported decoder: WordPiece",                      {.decoder = "{\"type\":\"WordPiece\"}"},                      NULL                                    },
    {"decoder: must be",                                    {.decoder = "null"},                                          NULL                                    },
    {"unsupported post-processor: Bert",                    {.post_processor = "{\"type\":\"Bert\"}"},                    NULL                                    },
    {"unsupported pre-tokenizer",                           {.pre_tokenizer = "null"},                                    NULL                                    },
    {"unsupported pre-tokenizer: Whitespace",
     {.pre_tokenizer = "{\"type\":\"Whitespace\"}"},
     NULL                                                                                                                                                         },
    {"unsupported pre-tokenizer pattern: escape at byte 0",
     {.pre_tokenizer = SPLIT("\\\\w+")},
     NULL                                                                                                                                                         },
    {"unsupported pre-tokenizer pattern: class",            {.pre_tokenizer = SPLIT("[a&&b]")},                           NULL                                    },
    {"unsupported pre-tokenizer pattern: class",            {.pre_tokenizer = SPLIT("[a")},                               NULL                                    },
    {"unsupported pre-tokenizer pattern: property",
     {.pre_tokenizer = SPLIT("\\\\p{Nope}")},
     NULL                                                                                                                                                         },
    {"unsupported pre-tokenizer pattern: repetition",
     {.pre_tokenizer = SPLIT("a{5000}")},
     NULL                                                                                                                                                         },
    {"unsupported pre-tokenizer pattern: repetition",       {.pre_tokenizer = SPLIT("a{3,2}")},                           NULL                                    },
    {"unsupported pre-tokenizer pattern: open group",       {.pre_tokenizer = SPLIT("(a")},                               NULL                                    },
    {"unsupported pre-tokenizer pattern: closing",          {.pre_tokenizer = SPLIT("a)")},                               NULL                                    },
    {"unsupported pre-tokenizer pattern: group",            {.pre_tokenizer = SPLIT("(?<n>a)")},                          NULL                                    },
    {"Split needs a 'pattern'",                             {.pre_tokenizer = SPLIT("")},                                 NULL                                    },
    {"'bos_token': '<zz>'",                                 {0},                                                          "{\"bos_token\":\"<zz>\"}"              },
    {"'eos_token': '<zz>'",                                 {0},                                                          "{\"eos_token\":{\"content\":\"<zz>\"}}"},
    {"'add_bos_token' must be",                             {0},                                                          "{\"add_bos_token\":3}"                 },
    {"tokenizer_config.json: must hold a JSON object",      {0},                                                          "[]"                                    },
};

/* K02 .. K04, K06 .. K11, K14, K15, K18 .. K20, K23 */
static void every_malformed_file_is_refused_by_name(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(refusals); i++) {
        hd_tokenizer *t;
        hd_err err = {0};
        hd_status st = open_parts(&t, &refusals[i].parts, refusals[i].config, &err);
        if (st != HD_EFORMAT && st != HD_EUNSUPPORTED) {
            fail_msg("row %zu (%s): status %d", i, refusals[i].rule, (int)st);
        }
        assert_null(t);
        if (!strstr(err.msg, refusals[i].rule)) {
            fail_msg("row %zu: '%s' does not say '%s'", i, err.msg, refusals[i].rule);
        }
    }
}

/* Rows that need large documents: one long token, many added tokens, a huge pattern. */
static void oversized_files_are_refused(void **state) { /* K05, K17 */
    (void)state;
    enum { LONG = 70000, MANY = 65537 };
    hd_bytes text = {0}, many = {0};
    hd_tokenizer *t;
    hd_err err = {0};
    char *letters = malloc(LONG + 1);
    assert_non_null(letters);
    memset(letters, 'q', LONG);
    letters[LONG] = 0;
    hd_bytes_append(&text, ",\"", 2, NULL);
    hd_bytes_append(&text, letters, LONG, NULL);
    hd_bytes_append(&text, "\":300", 6, NULL);
    assert_int_equal(open_parts(&t, &(toy_parts){.vocab_more = text.data}, NULL, &err),
                     HD_EFORMAT);
    assert_non_null(strstr(err.msg, "has 70000 bytes"));
    err = (hd_err){0};
    text.n = 0;
    hd_bytes_append(&text, SPLIT("A"), strlen(SPLIT("A")), NULL);
    char *at = strstr(text.data, "\"A\"");
    size_t head = (size_t)(at - text.data) + 1;
    hd_bytes_append(&many, text.data, head, NULL);
    hd_bytes_append(&many, letters, LONG, NULL);
    hd_bytes_append(&many, at + 2, text.n - head - 1, NULL);
    hd_bytes_append(&many, "", 1, NULL);
    assert_int_equal(open_parts(&t, &(toy_parts){.pre_tokenizer = many.data}, NULL, &err),
                     HD_EUNSUPPORTED);
    assert_non_null(strstr(err.msg, "a pattern of 70000 bytes"));
    err = (hd_err){0};
    many.n = 0;
    for (int i = 0; i < MANY; i++) hd_bytes_append(&many, i ? ",1" : "[1", 2, NULL);
    hd_bytes_append(&many, "]", 2, NULL);
    assert_int_equal(open_parts(&t, &(toy_parts){.added = many.data}, NULL, &err), HD_EFORMAT);
    assert_non_null(strstr(err.msg, "65537 of them"));
    free(letters);
    hd_bytes_deinit(&text);
    hd_bytes_deinit(&many);
}

/* On the real tokenizer, where it is at hand. */
/* Classes of the base vocabulary, of which 1,484 tokens are no text by themselves. */
static void check_classes(const hd_tokenizer *t) {
    static const int32_t known[][2] = {
        {2,     2    },
        {3,     3    },
        {71,    39   },
        {619,   39   },
        {16462, 39   },
        {201,   174  },
        {262,   174  },
        {270,   237  },
        {20852, 237  },
        {2058,  1751 },
        {19923, 15844},
    };
    enum { BASE = 128000 };
    int32_t *class_of = malloc(BASE * sizeof *class_of), n;
    assert_non_null(class_of);
    assert_int_equal(hd_token_classes(t, BASE, class_of, &n, NULL), HD_OK);
    assert_int_equal(n, 97812);
    for (size_t i = 0; i < HD_LEN(known); i++) {
        assert_int_equal(class_of[known[i][0]], known[i][1]);
    }
    free(class_of);
}

static void known_vectors_hold(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int32_t ids[8]; /* ends with -1 */
    } vectors[] = {
        {" ",                 {223, -1}                             },
        {"\r\n",              {204, 201, -1}                        },
        {" \n ",              {539, 223, -1}                        },
        {"\t\t x",            {998, 1527, -1}                       },
        {"Hello, world!",     {19923, 14, 2058, 3, -1}              },
        {"a  b   c    d",     {67, 223, 291, 262, 274, 361, 283, -1}},
        {"1234567890",        {6895, 18009, 25744, 18, -1}          },
        {"1,000,000",         {19, 14, 1320, 14, 1320, -1}          },
        {"你好世界",      {30594, 3427, -1}                     },
        {"カタカナ",      {15961, 11767, 15961, 27071, -1}      },
        {"a🙂b",            {67, 80300, 227, 68, -1}              },
        {"e\u0301",           {71, 17793, -1}                       },
        {"\u2028line sep",    {300, 104, 1836, 45434, -1}           },
        {"שלום עולם", {8793, 2328, 16467, 6166, 41141, -1}  },
        {"$1,234.56",         {6, 19, 14, 14456, 16, 3661, -1}      },
    };
    const char *shared = getenv("HADAL_SHARED");
    char path[600];
    hd_tokenizer *t;
    hd_err err = {0};
    if (!shared) {
        print_message("[  SKIPPED ] vectors of a released vocabulary: it is no part of this "
                      "repository; HADAL_SHARED names a folder that has it\n");
        skip();
    }
    snprintf(path, sizeof path, "%s/data/deepseek-v3-tokenizer", shared);
    if (hd_tokenizer_open(&t, path, &err) != HD_OK) fail_msg("%s", err.msg);
    for (size_t i = 0; i < HD_LEN(vectors); i++) {
        size_t n = 0;
        while (vectors[i].ids[n] >= 0) n++;
        check_ids(t, vectors[i].text, 0, vectors[i].ids, n);
    }
    check_classes(t);
    assert_int_equal(hd_tokenizer_bos(t), 0);
    assert_int_equal(hd_tokenizer_eos(t), 1);
    assert_int_equal(hd_tokenizer_find(t, "<｜User｜>", strlen("<｜User｜>")), 128803);
    hd_tokenizer_close(t);
}

int test_tokenizer(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merges_go_by_rank),
        cmocka_unit_test(special_text_is_text_unless_asked),
        cmocka_unit_test(bos_comes_from_config_or_template),
        cmocka_unit_test(streamed_text_is_the_whole_text),
        cmocka_unit_test(broken_bytes_become_one_mark_each),
        cmocka_unit_test(text_survives),
        cmocka_unit_test(buffers_keep_their_maximum),
        cmocka_unit_test(many_threads_share_one),
        cmocka_unit_test(every_malformed_file_is_refused_by_name),
        cmocka_unit_test(oversized_files_are_refused),
        cmocka_unit_test(known_vectors_hold),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, NULL, NULL);
}
