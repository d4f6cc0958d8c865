/* test_grammar.c - masks against advance(), states that are copied, and the mask cache.
 *
 * What a grammar accepts is judged by independent programs in tests/e2e/test_grammar.py. */
#include "check.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"
#include "grammar/grammar.h"

enum { MAX_TOKENS = 320, WORDS = 32, ROWS = 700, EOS = 699, MB = 1 << 20 };

typedef struct vocab {
    hd_grammar_vocab *trie;
    const uint8_t *pieces[MAX_TOKENS];
    size_t bytes[MAX_TOKENS];
    uint8_t single[256];
    int32_t n;
} vocab;

static const char *const joints[] = {
    "\"",      "\",\"", "\":",  "\": ", "{\"",      "\"}",    "}}",       "[[",
    "true",    "tru",   "null", "12",   "-1",       "0.5",    "e+",       "\\u",
    "\\ud83d", "\xc3",  "\xa9", "é",    "\xe2\x82", "\xac\"", "\xf0\x9f", "\x98\x80",
    "a\xc3",   "abc",   "aa",   ", ",   "},",       "12" /* twice */};

static void open_vocab(vocab *v) {
    hd_err err = {0};
    v->n = 0;
    for (int c = 0; c < 256; c++) {
        v->single[c] = (uint8_t)c;
        v->pieces[v->n] = &v->single[c];
        v->bytes[v->n++] = 1;
    }
    for (size_t i = 0; i < HD_LEN(joints); i++) {
        v->pieces[v->n] = (const uint8_t *)joints[i];
        v->bytes[v->n++] = strlen(joints[i]);
    }
    v->pieces[v->n] = NULL; /* an unused id */
    v->bytes[v->n++] = 0;
    const hd_grammar_vocab_args a = {.pieces = v->pieces,
                                     .piece_bytes = v->bytes,
                                     .n_pieces = v->n,
                                     .n_rows = ROWS,
                                     .eos = (const int32_t[]){EOS},
                                     .n_eos = 1};
    assert_int_equal(hd_grammar_vocab_open(&v->trie, &a, &err), HD_OK);
    assert_int_equal(hd_grammar_vocab_words(v->trie), (ROWS + 31) / 32);
}

static hd_grammar *open_text(hd_grammar_kind kind, const char *text, int32_t space) {
    hd_grammar *g;
    hd_err err = {0};
    const hd_grammar_args a = {
        .kind = kind, .text = text, .n = strlen(text), .free_space = space};
    if (hd_grammar_open(&g, &a, &err) != HD_OK) fail_msg("%s", err.msg);
    return g;
}

static bool bit(const uint32_t *mask, int32_t id) {
    return mask[id >> 5] >> (id & 31) & 1;
}

/* Every row's bit is what advance() says, by bytes and by token. */
static void check_mask(const vocab *v, const hd_grammar *g, const hd_grammar_state *s,
                       const uint32_t *mask) {
    static _Thread_local hd_grammar_state next;
    for (int32_t id = 0; id < ROWS; id++) {
        bool want = false;
        if (id == EOS) {
            want = hd_grammar_can_end(g, s);
        } else if (id < v->n && v->pieces[id]) {
            hd_grammar_copy(&next, s);
            want = hd_grammar_advance(g, &next, v->pieces[id], v->bytes[id]);
        }
        assert_int_equal(bit(mask, id), want);
        hd_grammar_copy(&next, s);
        assert_int_equal(hd_grammar_advance_token(v->trie, g, &next, id), want || id == EOS);
        assert_int_equal(next.n_threads > 0, want || id == EOS);
    }
}

/* A walk through masks; returns a hash of all masks met. */
static uint64_t walk(const vocab *v, const hd_grammar *g, hd_grammar_masks *m, uint64_t seed,
                     bool check) {
    static _Thread_local hd_grammar_state s;
    uint32_t mask[WORDS] = {0};
    uint64_t hash = 1, draws = 0;
    hd_grammar_start(g, &s);
    for (int step = 0; step < 60; step++) {
        hd_grammar_mask(m, g, &s, mask);
        if (check) check_mask(v, g, &s, mask);
        for (int w = 0; w < (ROWS + 31) / 32; w++)
            hash = (hash ^ mask[w]) * 0x9E3779B97F4A7C15u;
        int32_t id = (int32_t)(hd_philox_at(seed, 0, draws++).v[0] % (uint32_t)v->n);
        for (int32_t tried = 0; !bit(mask, id) && tried < v->n; tried++) id = (id + 1) % v->n;
        if (!bit(mask, id)) {
            assert_true(bit(mask, EOS)); /* never stuck */
            break;
        }
        assert_true(hd_grammar_advance(g, &s, v->pieces[id], v->bytes[id]));
    }
    return hash;
}

static const struct {
    hd_grammar_kind kind;
    const char *text;
    int32_t space;
} cases[] = {
    {HD_GRAMMAR_JSON_OBJECT, "",                                                      0},
    {HD_GRAMMAR_JSON_OBJECT, "",                                                      5},
    {HD_GRAMMAR_JSON_SCHEMA, "{\"type\":\"string\",\"minLength\":2,\"maxLength\":7}", 0},
    {HD_GRAMMAR_JSON_SCHEMA,
     "{\"type\":\"array\",\"items\":{\"type\":\"integer\"},\"maxItems\":4}",          3},
    {HD_GRAMMAR_JSON_SCHEMA,
     "{\"$defs\":{\"t\":{\"anyOf\":[{\"type\":\"null\"},{\"type\":\"object\",\"properties\":{"
     "\"a\":"
     "{\"$ref\":\"#/$defs/t\"},\"aa\":{\"$ref\":\"#/$defs/t\"}},\"required\":[\"aa\"]}]}},"
     "\"$ref\":\"#/$defs/t\"}",                                                       0},
    {HD_GRAMMAR_JSON_SCHEMA,
     "{\"anyOf\":[{\"type\":\"string\",\"pattern\":\"^(a|é)*$\"},"
     "{\"type\":\"string\"},{\"enum\":[\"aa\",\"abc\",12]}]}",                        0},
    {HD_GRAMMAR_REGEX,       "(?:a|aa){1,3000}é?(?:12){2,900}",                      0},
    {HD_GRAMMAR_REGEX,       "(?:a{1,500}b?){1,500}",                                 0},
    {HD_GRAMMAR_REGEX,       "[^a]*",                                                 0},
    {HD_GRAMMAR_REGEX,       "",                                                      0},
};

static void test_masks_equal_advance(void **state) {
    (void)state;
    vocab v;
    hd_err err = {0};
    hd_grammar_masks *large, *small;
    open_vocab(&v);
    assert_int_equal(hd_grammar_masks_open(&large, v.trie, 32 * MB, &err), HD_OK);
    size_t least = MB;
    while (hd_grammar_masks_open(&small, v.trie, least, NULL) != HD_OK) least += 4096;
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        hd_grammar *g = open_text(cases[i].kind, cases[i].text, cases[i].space);
        for (uint64_t seed = 0; seed < 6; seed++) {
            uint64_t hash = walk(&v, g, large, seed, true);
            assert_true(walk(&v, g, small, seed, false) == hash);
            assert_true(walk(&v, g, large, seed, false) == hash);
        }
        hd_grammar_close(g);
    }
    assert_true(hd_grammar_masks_get_stats(small).evictions > 0);
    assert_true(hd_grammar_masks_get_stats(large).hits > 0);
    hd_grammar_masks_close(large);
    hd_grammar_masks_close(small);
    hd_grammar_vocab_close(v.trie);
}

/* Markers are tokens of the vocabulary, its single bytes, or text. */
static void test_masks_of_calls(void **state) {
    (void)state;
    static const char tools[] =
        "[{\"name\":\"aa\",\"strict\":true,\"parameters\":{\"type\":\"object\",\"properties\":{"
        "\"abc\":{\"type\":[\"string\",\"integer\"]},\"e+\":{\"enum\":[\"aa\",12]}},"
        "\"required\":[\"abc\"]}},{\"name\":\"ab\"}]";
    vocab v;
    hd_err err = {0};
    hd_grammar_masks *m;
    open_vocab(&v);
    assert_int_equal(hd_grammar_masks_open(&m, v.trie, 32 * MB, &err), HD_OK);
    for (int i = 0; i < 16; i++) {
        const bool flagged = i & 1;
        const hd_grammar_args a = {
            .kind = i & 2 ? HD_GRAMMAR_CALLS : HD_GRAMMAR_JSON_OBJECT,
            .calls = {.tools = tools,
                      .n_tools = strlen(tools),
                      .format = (hd_reply_format)(HD_REPLY_V3 + i / 4),
                      .marks = flagged ? 0x3f : 0,
                      .flagged = flagged,
                      .hold = i & 1,
                      .most = 2}
        };
        hd_grammar *g;
        if (hd_grammar_open(&g, &a, &err) != HD_OK) fail_msg("%s", err.msg);
        for (uint64_t seed = 0; seed < 6; seed++) walk(&v, g, m, seed, true);
        hd_grammar_close(g);
    }
    hd_grammar_masks_close(m);
    hd_grammar_vocab_close(v.trie);
}

/* Calls that open in a text which is not held, at any byte; what only resembles a marker opens
 * nothing, nor does one with a rest that no call has. */
static void test_openings_are_seen(void **state) {
    (void)state;
    static const char tools[] = "[{\"name\":\"aa\"},{\"name\":\"ab\"}]";
    static const struct {
        hd_reply_format format;
        bool flagged;
        const char *before, *marker, *after, *wrong;
    } rows[] = {
        {HD_REPLY_V4,  true,  "x<\xfc\xfd<<",             "\xfd", "tool_calls>\n<\xfdinvoke name=\"a", "c"   },
        {HD_REPLY_V32, false, "<｜DSML<｜DS<｜DSML",   "｜",
         "function_calls>\n<｜DSML｜invoke name=\"aa\">",                                            "f-"  },
        {HD_REPLY_V41, true,  "x<\xfc\xfd<<",             "\xfd", " calls>\n<\xfd invoke name=\"a",    "t"   },
        {HD_REPLY_V3,  true,  "\xf9",                     "\xf8",
         "\xfa"
         "function\xfc"
         "ab\n```json\n{}",                                                                            "\xfb"},
        {HD_REPLY_V31, true,  "",                         "\xfa", "ab\xfc{}\xfb\xf9",                  "\xfa"},
        {HD_REPLY_V31, false, "<｜tool▁calls▁begin", "｜>",
         "<｜tool▁call▁begin｜>aa<｜tool▁sep｜>{",                                           "aa"  },
    };
    vocab v;
    open_vocab(&v);
    for (size_t i = 0; i < HD_LEN(rows); i++) {
        static hd_grammar_state s, inside;
        hd_grammar *g;
        hd_err err = {0};
        hd_grammar_watch w = {0};
        const hd_grammar_args a = {
            .kind = HD_GRAMMAR_CALLS,
            .calls = {.tools = tools,
                      .n_tools = strlen(tools),
                      .format = rows[i].format,
                      .marks = rows[i].flagged ? 0x3f : 0,
                      .flagged = rows[i].flagged,
                      .most = 2}
        };
        if (hd_grammar_open(&g, &a, &err) != HD_OK) fail_msg("%s", err.msg);
        for (const char *c = rows[i].before; *c; c++) {
            assert_false(hd_grammar_watch_token(v.trie, g, &w, &s, (uint8_t)*c));
        }
        for (const char *c = rows[i].marker; *c; c++) {
            assert_int_equal(hd_grammar_watch_token(v.trie, g, &w, &s, (uint8_t)*c), !c[1]);
        }
        hd_grammar_copy(&inside, &s);
        assert_true(
            hd_grammar_advance(g, &s, (const uint8_t *)rows[i].after, strlen(rows[i].after)));
        assert_false(hd_grammar_advance(g, &inside, (const uint8_t *)rows[i].wrong,
                                        strlen(rows[i].wrong)));
        hd_grammar_close(g);
    }
    hd_grammar_vocab_close(v.trie);
}

static void advance(const hd_grammar *g, hd_grammar_state *s, const char *text, bool want) {
    assert_int_equal(hd_grammar_advance(g, s, (const uint8_t *)text, strlen(text)), want);
}

static void test_copies_take_back(void **state) {
    (void)state;
    static hd_grammar_state s, saved;
    hd_grammar *g = open_text(HD_GRAMMAR_JSON_OBJECT, "", 0);
    hd_grammar_start(g, &s);
    advance(g, &s, "{\"a\":[1,{\"b\":[", true);
    hd_grammar_copy(&saved, &s);
    advance(g, &s, "[[[[2]]]]]}]}", true);
    assert_true(hd_grammar_can_end(g, &s));
    hd_grammar_copy(&s, &saved);
    assert_false(hd_grammar_can_end(g, &s));
    advance(g, &s, "\"\xf0\x9f", true); /* a token may end inside of a character */
    advance(g, &s, "\x98\x80\"]}", true);
    advance(g, &s, "}", false);
    assert_int_equal(s.n_threads, 0);
    advance(g, &s, "]}", false);
    assert_false(hd_grammar_can_end(g, &s));
    hd_grammar_copy(&s, &saved);
    advance(g, &s, "]}]}", true);
    assert_true(hd_grammar_can_end(g, &s));
    hd_grammar_close(g);
}

static void test_long_texts_stay_small(void **state) {
    (void)state;
    static hd_grammar_state s;
    hd_grammar *g = open_text(HD_GRAMMAR_JSON_SCHEMA,
                              "{\"type\":\"array\",\"items\":{\"type\":\"array\",\"items\":"
                              "{\"type\":\"string\",\"maxLength\":9}},\"maxItems\":60000}",
                              0);
    hd_grammar_start(g, &s);
    advance(g, &s, "[[\"a\"]", true);
    for (int i = 1; i < 60000; i++) {
        advance(g, &s, ",[\"abc\",\"\"]", true);
        assert_true(s.n_nodes <= 257);
    }
    advance(g, &s, "]", true);
    assert_true(hd_grammar_can_end(g, &s));
    hd_grammar_close(g);
}

typedef struct worker {
    const vocab *v;
    const hd_grammar *g;
    uint64_t hash;
} worker;

static void *work(void *data) {
    worker *w = data;
    hd_grammar_masks *m;
    w->hash = 0;
    if (hd_grammar_masks_open(&m, w->v->trie, 8 * MB, NULL) != HD_OK) return NULL;
    for (uint64_t seed = 0; seed < 8; seed++) w->hash ^= walk(w->v, w->g, m, seed, false);
    hd_grammar_masks_close(m);
    return NULL;
}

static void test_threads_share_a_grammar(void **state) {
    (void)state;
    vocab v;
    open_vocab(&v);
    hd_grammar *g = open_text(HD_GRAMMAR_JSON_OBJECT, "", 4);
    worker w[3];
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        w[i] = (worker){.v = &v, .g = g};
        assert_int_equal(pthread_create(&threads[i], NULL, work, &w[i]), 0);
    }
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    assert_true(w[0].hash != 0 && w[0].hash == w[1].hash && w[0].hash == w[2].hash);
    hd_grammar_close(g);
    hd_grammar_vocab_close(v.trie);
}

static void test_refusals(void **state) {
    (void)state;
    hd_grammar *g;
    hd_err err = {0};
    const char *bad = "\xff";
    hd_grammar_args a = {.kind = HD_GRAMMAR_CHOICE};
    assert_int_equal(hd_grammar_open(&g, &a, &err), HD_EINVAL);
    a = (hd_grammar_args){.kind = HD_GRAMMAR_CHOICE,
                          .choices = &bad,
                          .choice_bytes = (const size_t[]){1},
                          .n_choices = 1};
    assert_int_equal(hd_grammar_open(&g, &a, NULL), HD_EINVAL);
    a = (hd_grammar_args){.kind = HD_GRAMMAR_REGEX, .text = bad, .n = 1};
    assert_int_equal(hd_grammar_open(&g, &a, NULL), HD_EINVAL);
    a = (hd_grammar_args){.kind = HD_GRAMMAR_JSON_OBJECT, .free_space = 65};
    assert_int_equal(hd_grammar_open(&g, &a, NULL), HD_EINVAL);
    hd_grammar_vocab *trie;
    const hd_grammar_vocab_args none = {.n_rows = 3};
    assert_int_equal(hd_grammar_vocab_open(&trie, &none, NULL), HD_EINVAL);
    vocab v;
    hd_grammar_masks *m;
    open_vocab(&v);
    assert_int_equal(hd_grammar_masks_open(&m, v.trie, 1000, NULL), HD_EINVAL);
    hd_grammar_vocab_close(v.trie);
    hd_grammar_close(NULL);
    hd_grammar_masks_close(NULL);
    hd_grammar_vocab_close(NULL);
}

int test_grammar(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_masks_equal_advance),
        cmocka_unit_test(test_masks_of_calls),
        cmocka_unit_test(test_openings_are_seen),
        cmocka_unit_test(test_copies_take_back),
        cmocka_unit_test(test_long_texts_stay_small),
        cmocka_unit_test(test_threads_share_a_grammar),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests_name("grammar", tests, NULL, NULL);
}
