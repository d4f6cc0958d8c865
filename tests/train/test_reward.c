/* test_reward.c - what a scorer is asked, and which replies count. */
#include "check.h"

#include <math.h>

#include "base/json.h"
#include "train/reward.h"

static hd_status reply(double *rewards, const char *text, hd_err *err) {
    *err = (hd_err){0};
    return hd_reward_reply(rewards, 2, 7, text, strlen(text), err);
}

static void good_replies(void **state) {
    double r[2];
    hd_err err;
    (void)state;
    assert_int_equal(reply(r, "{\"id\": 7, \"rewards\": [1, -0.25]}", &err), HD_OK);
    assert_true(r[0] == 1.0 && r[1] == -0.25);
    assert_int_equal(reply(r, "{\"rewards\": [0, 1e6], \"id\": 7, \"why\": \"x\"}\r", &err),
                     HD_OK);
    assert_true(r[0] == 0.0 && r[1] == 1e6);
}

static void bad_replies(void **state) {
    static const struct {
        const char *text, *why;
    } cases[] = {
        {"",                                            "reply"                },
        {"1",                                           "its id is not 7"      },
        {"{\"id\": 8, \"rewards\": [1, 1]}",            "its id is not 7"      },
        {"{\"id\": \"7\", \"rewards\": [1, 1]}",        "its id is not 7"      },
        {"{\"id\": 7}",                                 "must be an array"     },
        {"{\"id\": 7, \"rewards\": {\"a\": 1}}",        "must be an array"     },
        {"{\"id\": 7, \"rewards\": [1]}",               "1 rewards for 2"      },
        {"{\"id\": 7, \"rewards\": [1, 2, 3]}",         "3 rewards for 2"      },
        {"{\"id\": 7, \"rewards\": [1, NaN]}",          "reply"                },
        {"{\"id\": 7, \"rewards\": [1, null]}",         "reward 1 is no number"},
        {"{\"id\": 7, \"rewards\": [true, 1]}",         "reward 0 is no number"},
        {"{\"id\": 7, \"rewards\": [1, 1e999]}",        "reply"                },
        {"{\"id\": 7, \"rewards\": [1, -1.1e6]}",       "reward 1 is no number"},
        {"{\"id\": 7, \"rewards\": [1, 1]} {}",         "reply"                },
        {"{\"id\": 7, \"id\": 7, \"rewards\": [1, 1]}", "reply"                },
    };
    (void)state;
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        double r[2];
        hd_err err;
        assert_int_equal(reply(r, cases[i].text, &err), HD_EFORMAT);
        if (!strstr(err.msg, cases[i].why)) fail_msg("%s: %s", cases[i].text, err.msg);
    }
}

static void a_long_reply_is_not_read(void **state) {
    double r[2];
    hd_err err = {0};
    char *text = malloc(HD_MOST_REWARD_BYTES + 1);
    (void)state;
    assert_non_null(text);
    memset(text, ' ', HD_MOST_REWARD_BYTES + 1);
    assert_int_equal(hd_reward_reply(r, 2, 7, text, HD_MOST_REWARD_BYTES + 1, &err),
                     HD_EFORMAT);
    assert_non_null(strstr(err.msg, "longer than"));
    free(text);
}

/* One line with what the prompt says and the answers, whatever is in them. */
static void questions(void **state) {
    static const char odd[] = "a\n\"\0b";
    const hd_reward_answer answers[] = {
        {odd, sizeof odd - 1, true },
        {"",  0,              false}
    };
    json_t *prompt = json_pack("{s:[], s:{s:s}, s:b, s:i}", "messages", "checker", "type",
                               "exact", "thinking", 0, "secret", 1);
    char *text = hd_reward_question(7, prompt, answers, 2);
    json_t *q;
    (void)state;
    assert_non_null(text);
    assert_null(strchr(text, '\n'));
    q = hd_json_read(text, strlen(text), JSON_ALLOW_NUL, NULL);
    assert_non_null(q);
    assert_int_equal(json_integer_value(json_object_get(q, "id")), 7);
    assert_true(json_is_array(json_object_get(q, "messages")));
    assert_true(json_is_false(json_object_get(q, "thinking")));
    assert_null(json_object_get(q, "secret"));
    const json_t *list = json_object_get(q, "answers"), *first = json_array_get(list, 0);
    assert_int_equal(json_array_size(list), 2);
    assert_int_equal(json_string_length(json_object_get(first, "text")), sizeof odd - 1);
    assert_true(json_is_true(json_object_get(first, "finished")));
    assert_true(json_is_false(json_object_get(json_array_get(list, 1), "finished")));
    json_decref(q);
    json_decref(prompt);
    free(text);
}

int test_reward(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_replies),
        cmocka_unit_test(bad_replies),
        cmocka_unit_test(a_long_reply_is_not_read),
        cmocka_unit_test(questions),
    };
    return cmocka_run_group_tests_name("reward", tests, NULL, NULL);
}
