/* test_examples.c - lines of training data: which tokens have a loss, what is refused, and the
 * order of epochs. */
#include "check.h"

#include <stdio.h>

#include "train/examples.h"

typedef struct rig {
    hd_tokenizer *tokenizer;
    hd_example_rules rules;
} rig;

static void open_rig(rig *r) {
    assert_int_equal(hd_tokenizer_open(&r->tokenizer, "models/tiny-v3", NULL), HD_OK);
    r->rules = (hd_example_rules){.tokenizer = r->tokenizer,
                                  .encoding = HD_CHAT_V31,
                                  .eos = 1,
                                  .vocab = 4096,
                                  .context = 64};
}

static hd_status read(const rig *r, hd_examples *out, const char *text, hd_err *err) {
    return hd_examples_read(out, text, strlen(text), "data", &r->rules, err);
}

/* The text of the tokens with a loss, or without. */
static void check_text(const rig *r, const hd_example *e, int loss, const char *want) {
    hd_ids ids = {0};
    hd_bytes text = {0};
    for (int32_t i = 0; i < e->n; i++) {
        if (e->mask[i] == loss) {
            assert_int_equal(hd_ids_push(&ids, e->tokens[i], NULL), HD_OK);
        }
    }
    assert_int_equal(hd_tokenizer_decode(r->tokenizer, ids.ids, ids.n, false, &text, NULL),
                     HD_OK);
    assert_int_equal(text.n, strlen(want));
    assert_memory_equal(text.data, want, text.n);
    hd_bytes_deinit(&text);
    hd_ids_deinit(&ids);
}

static void kinds_of_lines(void **state) {
    (void)state;
    rig r;
    hd_examples e;
    open_rig(&r);
    assert_int_equal(
        read(&r, &e,
             "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\","
             "\"content\":\"ho\"},{\"role\":\"user\",\"content\":\"he\"},{\"role\":"
             "\"assistant\",\"content\":\"ha\"}]}\n\n"
             "{\"prompt\":\"one\",\"completion\":\" two\"}\n"
             "{\"tokens\":[5,6,7,8],\"mask\":[1,0,1,0]}\n{\"tokens\":[5,6]}",
             NULL),
        HD_OK);
    assert_int_equal(e.n, 4);
    check_text(&r, &e.all[0], 1, "ho<｜end▁of▁sentence｜>ha<｜end▁of▁sentence｜>");
    check_text(&r, &e.all[1], 1, " two<｜end▁of▁sentence｜>");
    assert_int_equal(e.all[2].n, 4);
    assert_int_equal(e.all[2].n_loss, 1); /* the first token has none */
    assert_int_equal(e.all[2].first, 2);
    assert_int_equal(e.all[3].n_loss, 1);
    hd_examples_deinit(&e);
    hd_tokenizer_close(r.tokenizer);
}

static void bad_lines_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *text, *why;
    } cases[] = {
        {"",                                                       "no examples"     },
        {"{\"tokens\":[1,2]}\n{",                                  "line 2"          },
        {"[1]",                                                    "object"          },
        {"{}",                                                     "must have one of"},
        {"{\"text\":\"a\",\"tokens\":[1,2]}",                      "must have one of"},
        {"{\"text\":7}",                                           "string"          },
        {"{\"prompt\":\"a\"}",                                     "string"          },
        {"{\"tokens\":7}",                                         "array"           },
        {"{\"tokens\":[1,4096]}",                                  "no token"        },
        {"{\"tokens\":[1,-1]}",                                    "no token"        },
        {"{\"tokens\":[1,2.5]}",                                   "no token"        },
        {"{\"tokens\":[1,2],\"mask\":[1]}",                        "one length"      },
        {"{\"tokens\":[1,2],\"mask\":[0,2]}",                      "0 and 1"         },
        {"{\"tokens\":[1,2],\"mask\":[1,0]}",                      "has a loss"      },
        {"{\"tokens\":[1]}",                                       "two tokens"      },
        {"{\"messages\":[{\"role\":\"king\",\"content\":\"a\"}]}", "role"            },
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}", "has a loss"      },
    };
    rig r;
    open_rig(&r);
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        hd_examples e;
        hd_err err = {0};
        assert_true(read(&r, &e, cases[i].text, &err) != HD_OK);
        if (!strstr(err.msg, cases[i].why)) fail_msg("%s: %s", cases[i].text, err.msg);
        assert_null(e.all);
    }
    hd_tokenizer_close(r.tokenizer);
}

static void what_is_longer_than_the_context(void **state) {
    (void)state;
    rig r;
    hd_examples e;
    hd_err err = {0};
    open_rig(&r);
    r.rules.context = 3;
    assert_int_equal(read(&r, &e, "{\"tokens\":[1,2,3]}", NULL), HD_OK);
    hd_examples_deinit(&e);
    assert_int_equal(read(&r, &e, "{\"tokens\":[1,2,3,4]}", &err), HD_EINVAL);
    assert_non_null(strstr(err.msg, "line 1: 4 tokens; the context is 3"));
    hd_tokenizer_close(r.tokenizer);
}

/* Every epoch has every example once, in an order of its own. */
static void epochs_are_permutations(void **state) {
    (void)state;
    const int32_t sizes[] = {1, 2, 7, 100};
    for (size_t s = 0; s < HD_LEN(sizes); s++) {
        const hd_examples e = {.n = sizes[s]};
        int64_t same = 0;
        for (int64_t epoch = 0; epoch < 3; epoch++) {
            bool seen[100] = {false};
            for (int32_t i = 0; i < e.n; i++) {
                const int32_t at = hd_examples_shuffled(&e, 5, epoch * e.n + i);
                assert_true(at >= 0 && at < e.n && !seen[at]);
                seen[at] = true;
                same += at == hd_examples_shuffled(&e, 6, epoch * e.n + i);
            }
        }
        if (e.n == 100) assert_true(same < 30);
    }
}

int test_examples(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kinds_of_lines),
        cmocka_unit_test(bad_lines_are_refused),
        cmocka_unit_test(what_is_longer_than_the_context),
        cmocka_unit_test(epochs_are_permutations),
    };
    return cmocka_run_group_tests_name("examples", tests, NULL, NULL);
}
