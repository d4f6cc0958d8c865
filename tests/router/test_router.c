/* test_router.c - prompts as hashes, lists of servers, load reports, and the choice of a server. */
#include "check.h"

#include <stdio.h>
#include <string.h>

#include "router/picture.h"
#include "router/prefix.h"
#include "router/router_internal.h"

static router_prefix prefix_of(const char *body, uint64_t salt) {
    router_prefix p;
    static const uint64_t key[2] = {1, 2};
    router_prefix_of(&p, body, strlen(body), salt, key);
    return p;
}

/* A chat of two long messages; the second begins with a letter of its own. */
static router_prefix chat(char second, uint64_t salt) {
    char body[4000];
    char text[1000];
    memset(text, 'a', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    snprintf(body, sizeof body,
             "{\"max_tokens\": %d, \"messages\": [{\"role\": \"user\", \"content\": \"%s\"}, "
             "{\"role\": \"user\", \"content\": \"%c%s\"}]}",
             second, text, second, text);
    return prefix_of(body, salt);
}

static int32_t common(const router_prefix *a, const router_prefix *b) {
    int32_t n = 0;
    while (n < a->n && n < b->n && a->hashes[n] == b->hashes[n]) n++;
    return n;
}

static void test_prefixes(void **state) {
    const router_prefix a = chat('x', 1), b = chat('y', 1), other_key = chat('x', 2);
    const router_prefix again = chat('x', 1);
    (void)state;
    assert_int_equal(a.n, 7); /* 2036 bytes in blocks of 256 */
    assert_int_equal(common(&a, &again), 7);
    assert_int_equal(common(&a, &b), 4); /* whatever else the bodies say */
    assert_int_equal(common(&a, &other_key), 0);
    assert_int_equal(prefix_of("{\"prompt\": \"short\"}", 1).n, 0);
    assert_int_equal(prefix_of("no JSON", 1).bytes, 0);
    assert_int_equal(prefix_of("", 1).n, 0);
    assert_int_equal(router_prefix_end(16), 16 * 256);
    assert_int_equal(router_prefix_end(17), 16 * 256 + 512);
}

/* of the tests; too large for a stack */
static router_picture p;
static router_news news;

static void test_lists(void **state) {
    static const char *const bad[] = {"a",       ":1",       "a:",           "a:0",
                                      "a:65536", "a:1,,b:2", "a/b:1",        "a:1,a:1",
                                      "a b:1",   "u@a:1",    "a:99999999999"};
    hd_err err = {0};
    (void)state;
    for (size_t i = 0; i < HD_LEN(bad); i++) {
        assert_int_equal(router_picture_open(&p, &err), HD_OK);
        assert_int_equal(router_picture_add(&p, ROUTER_DECODE, "decode", bad[i], &err),
                         HD_EINVAL);
        assert_non_null(strstr(err.msg, "--decode"));
        router_picture_close(&p);
    }
    assert_int_equal(router_picture_open(&p, &err), HD_OK);
    assert_int_equal(router_picture_add(&p, ROUTER_DECODE, "decode", "a:1,[::1]:65535", &err),
                     HD_OK);
    assert_int_equal(router_picture_add(&p, ROUTER_PREFILL, "prefill", "b:1", &err), HD_OK);
    assert_int_equal(p.n, 3);
    assert_string_equal(p.peers[1].name, "[::1]:65535");
    assert_int_equal(p.peers[2].role, ROUTER_PREFILL);
    router_picture_close(&p);
}

static void open_picture(const char *decode, const char *prefill) {
    hd_err err = {0};
    assert_int_equal(router_picture_open(&p, &err), HD_OK);
    assert_int_equal(router_picture_add(&p, ROUTER_DECODE, "decode", decode, &err), HD_OK);
    assert_int_equal(router_picture_add(&p, ROUTER_PREFILL, "prefill", prefill, &err), HD_OK);
    for (int32_t i = 0; i < p.n; i++) {
        p.peers[i].up = true;
        p.peers[i].load.max_running = 8;
    }
}

static void test_choice(void **state) {
    const router_prefix x = chat('x', 1), y = chat('y', 1);
    (void)state;
    open_picture("a:1,b:1,c:1", NULL);
    router_choice choice = router_choose(&p, &x, 0, 1, 0);
    assert_int_equal(choice.peer, 1); /* all are equal: in turn */
    router_sent(&p, &x, &choice);
    assert_int_equal(router_choose(&p, &x, 0, 2, 0).peer, 1); /* it has the prefix, */
    assert_int_equal(router_choose(&p, &y, 0, 2, 0).peer, 1); /* or a part of it */
    assert_int_equal(router_choose(&p, &x, 1 << 1, 2, 0).peer, 2);
    p.peers[1].load.pending_tokens = 4000; /* overload: elsewhere, */
    assert_int_equal(router_choose(&p, &x, 0, 2, 0).peer, 2);
    p.peers[1].load.pending_tokens = 0;
    p.peers[1].inflight = 4; /* so with far more requests than the mean, */
    assert_int_not_equal(router_choose(&p, &x, 0, 2, 0).peer, 1);
    p.peers[0].inflight = p.peers[2].inflight = 4; /* but not where all have as many */
    assert_int_equal(router_choose(&p, &x, 0, 2, 0).peer, 1);
    p.peers[1].rest_until_ns = 10;
    assert_int_not_equal(router_choose(&p, &x, 0, 2, 9).peer, 1);
    assert_int_equal(router_choose(&p, &x, 0, 2, 10).peer, 1);
    for (int32_t i = 0; i < p.n; i++) p.peers[i].up = false;
    assert_int_equal(router_choose(&p, &x, 0, 2, 10).peer, -1);
    router_picture_close(&p);
}

static void test_prefill(void **state) {
    const router_prefix shortest = prefix_of("{\"prompt\": \"short\"}", 1), x = chat('x', 1);
    (void)state;
    open_picture("a:1", "b:1,c:1");
    router_prefix longer = x;
    longer.bytes = 40000;
    assert_int_equal(router_choose(&p, &shortest, 0, 0, 0).prefill, -1);
    p.peers[0].load.running = 2; /* its steps are slower than those of an idle one */
    p.peers[0].load.pending_tokens = 1000;
    assert_int_equal(router_choose(&p, &shortest, 0, 0, 0).prefill, -1);
    const router_choice choice = router_choose(&p, &longer, 0, 0, 0);
    assert_int_equal(choice.peer, 0);
    assert_true(choice.prefill >= 1);
    p.peers[1].up = p.peers[2].up = false; /* without them it computes itself */
    assert_int_equal(router_choose(&p, &longer, 0, 0, 0).prefill, -1);
    p.peers[0].up = false;
    p.peers[2].up = true; /* the last server answers alone */
    assert_int_equal(router_choose(&p, &longer, 0, 0, 0).peer, 2);
    router_picture_close(&p);
}

/* X30: load reports of any content */
static void test_reports(void **state) {
    static const char good[] = "{\"loads\": [{\"num_running_reqs\": 1, \"num_waiting_reqs\": "
                               "2, \"num_used_tokens\": 30,"
                               " \"num_total_tokens\": 70, \"max_running_requests\": 8}]}";
    static const char *const bad[] = {
        "",
        "{}",
        "[]",
        "{\"loads\": []}",
        "{\"loads\": [3]}",
        "{\"loads\": [{\"num_running_reqs\": -1, \"num_waiting_reqs\": 2, \"num_used_tokens\": "
        "3,"
        " \"num_total_tokens\": 7, \"max_running_requests\": 8}]}",
        "{\"loads\": [{\"num_running_reqs\": 1e30, \"num_waiting_reqs\": 2, "
        "\"num_used_tokens\": "
        "3, \"num_total_tokens\": 7, \"max_running_requests\": 8}]}",
        "{\"loads\": [{\"num_running_reqs\": 1, \"num_waiting_reqs\": 2, \"num_used_tokens\": "
        "7,"
        " \"num_total_tokens\": 3, \"max_running_requests\": 8}]}"};
    router_load load;
    (void)state;
    assert_true(router_load_parse(&load, &news, NULL, good, sizeof good - 1));
    assert_int_equal(load.running, 1);
    assert_int_equal(load.waiting, 2);
    assert_int_equal(load.max_running, 8);
    assert_int_equal(load.pending_tokens, 40);
    for (size_t i = 0; i < HD_LEN(bad); i++) {
        assert_false(router_load_parse(&load, &news, NULL, bad[i], strlen(bad[i])));
    }
}

/* ---- what is shown of servers ---- */

static json_t *detail_of(const char *disagg) {
    char text[1000];
    router_load load;
    json_t *detail;
    snprintf(
        text, sizeof text,
        "{\"loads\": [{\"num_running_reqs\": 1, \"num_waiting_reqs\": 2, \"cache_hit_rate\": "
        "0.5, \"num_used_tokens\": 3, \"num_total_tokens\": 3, \"max_running_requests\": 8, "
        "\"disagg\": %s}]}",
        disagg);
    assert_true(router_load_parse(&load, &news, &detail, text, strlen(text)));
    return detail;
}

static double rate_of(const router_reports *a, const char *name) {
    const json_t *link = json_array_get(json_object_get(a->detail, "links"), 0);
    return json_number_value(json_object_get(link, name));
}

/* A connection's rate follows its bytes, and is none when they begin anew. */
static void test_detail(void **state) {
    static const char *const none[] = {
        "3",
        "{}",
        "{\"waiting\": {\"kv\": -1}}",
        "{\"waiting\": {\"k v\": 1}}",
        "{\"waiting\": {\"a\\\"}\": 1}}",
        "{\"waiting\": {}, \"leases\": {\"send\": 3}}",
        "{\"waiting\": {}, \"leases\": {\"send\": {\"owned\": \"1\"}}}",
        "{\"waiting\": {}, \"links\": [{\"peer\": \"a\", \"in\": 1, \"out\": 1}]}",
        "{\"waiting\": {}, \"links\": [{\"peer\": \"\\n\", \"side\": \"send\", \"in\": 1, "
        "\"out\": 1}]}",
        "{\"waiting\": {}, \"links\": [{\"peer\": \"a\", \"side\": \"send\", \"in\": -1, "
        "\"out\": 1}]}"};
    static const char link[] =
        "{\"waiting\": {\"kv\": 2}, \"links\": [{\"peer\": \"a:1\", \"side\": "
        "\"send\", \"in\": %d, \"out\": 7}]}";
    router_reports a = {.detail = NULL};
    char text[400];
    (void)state;
    for (size_t i = 0; i < HD_LEN(none); i++) assert_null(detail_of(none[i]));
    static const struct {
        int bytes;
        double rate;
    } at[] = {
        {1000, 0   },
        {3000, 1000},
        {3000, 0   },
        {10,   0   }
    };
    for (size_t i = 0; i < HD_LEN(at); i++) { /* two seconds apart */
        snprintf(text, sizeof text, link, at[i].bytes);
        router_detail_take(&a, detail_of(text), (int64_t)(i + 1) * 2000000000);
        assert_true(rate_of(&a, "in_per_s") == at[i].rate);
        assert_true(rate_of(&a, "out_per_s") == 0);
    }
    router_detail_take(&a, NULL, 0);
    assert_null(a.detail);
}

/* ---- prefixes that servers tell ---- */

static bool parse_news(const char *prefixes) {
    char text[1000];
    router_load load;
    snprintf(text, sizeof text,
             "{\"loads\": [{\"num_running_reqs\": 1, \"num_waiting_reqs\": 2, "
             "\"num_used_tokens\": 3, \"num_total_tokens\": 3, \"max_running_requests\": 8}], "
             "\"prefixes\": %s}",
             prefixes);
    return router_load_parse(&load, &news, NULL, text, strlen(text));
}

static void test_news(void **state) {
    static const char *const none[] = {
        "null", "{\"epoch\": 5, \"next\": 2}", "{\"epoch\": -5, \"next\": 2, \"hashes\": \"\"}",
        "{\"epoch\": 5, \"next\": 2, \"hashes\": \"AQAAAAAAAA==\"}", /* 7 bytes */
        "{\"epoch\": 5, \"next\": 2, \"hashes\": \"?QAAAAAAAAA=\"}"};
    (void)state;
    for (size_t i = 0; i < HD_LEN(none); i++) {
        assert_true(parse_news(none[i])); /* the load is good */
        assert_true(news.epoch == 0 && news.n == 0);
    }
    assert_true(
        parse_news("{\"epoch\": 5, \"next\": 9, \"hashes\": \"AQAAAAAAAAACAAAAAAAAAA==\"}"));
    assert_true(news.epoch == 5 && news.next == 9 && news.n == 2);
    assert_true(news.hashes[0] == 1 && news.hashes[1] == 2);
}

static void test_learned_prefixes(void **state) {
    (void)state;
    const router_prefix x = chat('x', 1);
    assert_int_equal(router_picture_open(&p, NULL), HD_OK);
    assert_int_equal(router_picture_add(&p, ROUTER_DECODE, "decode", "a:1,b:2", NULL), HD_OK);
    p.peers[0].up = p.peers[1].up = true;
    router_learn(&p, 1, x.hashes, x.n);
    for (uint64_t turn = 0; turn < 2; turn++) {
        assert_int_equal(router_choose(&p, &x, 0, turn, 0).peer, 1);
    }
    router_learn(&p, 0, x.hashes, x.n - 1);
    assert_int_equal(router_choose(&p, &x, 0, 0, 0).peer, 1); /* it has more */
    router_forget(&p, 1);
    for (uint64_t turn = 0; turn < 2; turn++) {
        assert_int_equal(router_choose(&p, &x, 0, turn, 0).peer, 0);
    }
    router_picture_close(&p);
}

/* ---- names of many servers ---- */

static void test_servers_join_and_leave(void **state) {
    (void)state;
    static const hd_resolved one =
                                 {
                                     {"10.0.0.1:5", "10.0.0.2:5"},
                                     2
    },
                             two = {{"10.0.0.3:5", "10.0.0.2:5", "a:1"}, 3};
    static hd_resolved many = {.n = ROUTER_MAX_PEERS};
    const router_prefix x = chat('x', 1);
    hd_err err = {0};
    assert_int_equal(router_picture_open(&p, NULL), HD_OK);
    assert_int_equal(router_picture_add(&p, ROUTER_DECODE, "decode", "a:1,dns:b:5", &err),
                     HD_OK);
    assert_int_equal(router_picture_add(&p, ROUTER_DECODE, "decode", "dns:b", &err), HD_EINVAL);
    assert_true(p.n == 1 && p.n_sources == 1);
    assert_string_equal(p.sources[0].address, "b:5");
    router_picture_resolved(&p, 0, &one);
    assert_true(p.n == 3 && p.peers[1].source == 0 && !p.peers[1].gone);
    p.peers[1].up = p.peers[2].up = true;
    router_learn(&p, 1, x.hashes, x.n);
    assert_int_equal(router_choose(&p, &x, 0, 0, 0).peer, 1);
    router_picture_resolved(&p, 0, &two); /* a:1 is in the list already */
    assert_true(p.n == 4 && p.peers[1].gone && !p.peers[2].gone && !p.peers[0].gone);
    assert_int_equal(router_choose(&p, &x, 0, 0, 0).peer, 2);
    router_picture_resolved(&p, 0, &one);
    assert_true(!p.peers[1].gone && p.peers[3].gone);
    assert_int_equal(router_choose(&p, &x, 0, 0, 0).peer, 1); /* with all that it had */
    router_picture_remove(&p, 1);
    router_picture_resolved(&p, 0, &one); /* a server without a past in its place */
    assert_string_equal(p.peers[1].name, one.names[0]);
    p.peers[1].up = true;
    assert_int_equal(router_choose(&p, &x, 0, 2, 0).peer, 2);
    for (int i = 0; i < ROUTER_MAX_PEERS; i++) {
        snprintf(many.names[i], sizeof many.names[i], "10.1.0.%d:5", i);
    }
    router_picture_resolved(&p, 0, &many);
    assert_int_equal(p.n, ROUTER_MAX_PEERS);
    router_picture_close(&p);
}

int test_router(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prefixes),
        cmocka_unit_test(test_lists),
        cmocka_unit_test(test_choice),
        cmocka_unit_test(test_prefill),
        cmocka_unit_test(test_reports),
        cmocka_unit_test(test_detail),
        cmocka_unit_test(test_news),
        cmocka_unit_test(test_learned_prefixes),
        cmocka_unit_test(test_servers_join_and_leave),
    };
    return cmocka_run_group_tests_name("router", tests, NULL, NULL);
}
