/* test_server.c - targets, hosts, histograms, keys: what the server decides without a socket. */
#include "check.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "server/dump.h"
#include "server/histogram.h"
#include "server/history.h"
#include "http/url.h"
#include "http/keys.h"
#include "server/metrics/metrics.h"

enum { MOST_ARGS = 4 };

static void test_targets(void **state) {
    static const struct {
        const char *text;
        http_target_fault fault;
        const char *path, *name, *value;
        size_t n;
    } rows[] = {
        {"/",                  HTTP_TARGET_GOOD,     "/",      NULL,  NULL, 0},
        {"/a?b=c",             HTTP_TARGET_GOOD,     "/a",     "b",   "c",  1},
        {"/a?b",               HTTP_TARGET_GOOD,     "/a",     "b",   "",   1},
        {"/a?&&b=c&",          HTTP_TARGET_GOOD,     "/a",     "b",   "c",  1},
        {"/a?x+y=%41%2b",      HTTP_TARGET_GOOD,     "/a",     "x y", "A+", 1},
        {"/a%2Fb",             HTTP_TARGET_GOOD,     "/a%2Fb", NULL,  NULL, 0},
        {"*",                  HTTP_TARGET_GOOD,     "*",      NULL,  NULL, 0},
        {"/a?b=1&c=2&d=3&e=4", HTTP_TARGET_GOOD,     "/a",     "b",   "1",  4},
        {"/?1&2&3&4&5",        HTTP_TARGET_TOO_MANY, NULL,     NULL,  NULL, 0},
        {"",                   HTTP_TARGET_BAD,      NULL,     NULL,  NULL, 0},
        {"a",                  HTTP_TARGET_BAD,      NULL,     NULL,  NULL, 0},
        {"/a#b",               HTTP_TARGET_BAD,      NULL,     NULL,  NULL, 0},
        {"/a%",                HTTP_TARGET_BAD,      NULL,     NULL,  NULL, 0},
        {"/a%0",               HTTP_TARGET_BAD,      NULL,     NULL,  NULL, 0},
        {"/a%00",              HTTP_TARGET_BAD,      NULL,     NULL,  NULL, 0},
        {"/a?b=%00",           HTTP_TARGET_BAD,      NULL,     NULL,  NULL, 0},
        {"/a?b=%0a",           HTTP_TARGET_BAD,      NULL,     NULL,  NULL, 0},
        {"/a\x80",             HTTP_TARGET_BAD,      NULL,     NULL,  NULL, 0},
        {"http://a/b",         HTTP_TARGET_FOREIGN,  NULL,     NULL,  NULL, 0},
    };
    (void)state;
    for (size_t i = 0; i < HD_LEN(rows); i++) {
        char text[64];
        http_query_arg args[MOST_ARGS];
        http_target target;
        snprintf(text, sizeof text, "%s", rows[i].text);
        assert_int_equal(http_target_parse(&target, text, args, MOST_ARGS), rows[i].fault);
        if (rows[i].fault != HTTP_TARGET_GOOD) continue;
        assert_string_equal(target.path, rows[i].path);
        assert_int_equal(target.n_args, rows[i].n);
        if (!rows[i].name) continue;
        assert_string_equal(target.args[0].name, rows[i].name);
        assert_string_equal(target.args[0].value, rows[i].value);
    }
}

static void test_hosts(void **state) {
    static const struct {
        const char *text, *host;
    } rows[] = {
        {"localhost",                           "localhost"     },
        {"LocalHost:8000",                      "localhost"     },
        {"127.0.0.1:",                          "127.0.0.1"     },
        {"[::1]:80",                            "::1"           },
        {"[::1]",                               "::1"           },
        {"a-b.c_d",                             "a-b.c_d"       },
        {"",                                    NULL            },
        {":80",                                 NULL            },
        {"a:b",                                 NULL            },
        {"a:123456",                            NULL            },
        {"a:65535",                             "a"             },
        {"a:65536",                             NULL            },
        {"a:99999",                             NULL            },
        {"[127.0.0.1]",                         NULL            },
        {"[.:.]",                               NULL            },
        {"[::1%1]",                             NULL            },
        {"[::ffff:1.2.3.4]",                    "::ffff:1.2.3.4"},
        {"[1:::2]",                             NULL            },
        {"[]",                                  NULL            },
        {"::1",                                 NULL            },
        {"[::1",                                NULL            },
        {"[::1]x",                              NULL            },
        {"a/b",                                 NULL            },
        {"a@b",                                 NULL            },
        {"a b",                                 NULL            },
        {"a,b",                                 NULL            },
        {"longer-than-the-buffer-of-this-test", NULL            },
    };
    (void)state;
    for (size_t i = 0; i < HD_LEN(rows); i++) {
        char host[16];
        assert_int_equal(http_host_parse(rows[i].text, host, sizeof host),
                         rows[i].host != NULL);
        if (rows[i].host) assert_string_equal(host, rows[i].host);
    }
    static const char *const here[] = {"localhost", "127.0.0.1", "127.255.3.4", "::1",
                                       "0:0:0:0:0:0:0:1"};
    static const char *const elsewhere[] = {"127.evil.example",
                                            "127.0.0.1.evil.example",
                                            "127.1",
                                            "127.0.0.256",
                                            "127.",
                                            "127.0.0.1.",
                                            "0.0.0.0",
                                            "128.0.0.1",
                                            "::",
                                            "::2",
                                            "localhost.a",
                                            "localhost.",
                                            ""};
    for (size_t i = 0; i < HD_LEN(here); i++) assert_true(http_host_is_loopback(here[i]));
    for (size_t i = 0; i < HD_LEN(elsewhere); i++) {
        if (http_host_is_loopback(elsewhere[i])) fail_msg("%s", elsewhere[i]);
    }
    assert_true(http_origin_is_own("http://a:1", "a:1", false));
    assert_false(http_origin_is_own("https://a:1", "a:1", false));
    assert_false(http_origin_is_own("http://a:12", "a:1", false));
    assert_false(http_origin_is_own("null", "a:1", false));
    static const char *const valid[] = {"http://a", "https://a.example:8080", "http://[::1]:3",
                                        "moz-extension://8f2a-1b"};
    static const char *const invalid[] = {"",          "null",        "a.example",
                                          "https://",  "://a",        "https://a/",
                                          "HTTPS://a", "https://a b", "https://a:b"};
    for (size_t i = 0; i < HD_LEN(valid); i++) assert_true(http_origin_is_valid(valid[i]));
    for (size_t i = 0; i < HD_LEN(invalid); i++) {
        if (http_origin_is_valid(invalid[i])) fail_msg("%s", invalid[i]);
    }
}

static void test_histogram(void **state) {
    static histogram h;
    static histogram_copy c;
    (void)state;
    assert_true(histogram_quantile(&c, 0.5) == 0);
    for (int64_t v = 1; v <= 100000; v++) histogram_add(&h, v * 1000, 1);
    histogram_read(&h, &c);
    for (double edge = 1e6; edge <= 1e8; edge *= 1.7) {
        const double exact = edge / 1000, counted = (double)histogram_below(&c, edge);
        assert_true(counted <= exact && counted >= exact * 0.93);
    }
    assert_int_equal(histogram_below(&c, 1e12), 100000);
    const double median = histogram_quantile(&c, 0.5);
    assert_true(median >= 5e7 && median <= 5e7 * 1.07);
    histogram_add(&h, -5, 1);
    histogram_add(&h, INT64_MAX, 2);
    histogram_read(&h, &c);
    assert_int_equal(histogram_below(&c, 0), 1);
    assert_int_equal(c.n, 100003);
}

/* Values of 1 s, then only such of 1 ms: a minute later the first are forgotten. */
static void test_recent(void **state) {
    metrics *m = metrics_new("m");
    (void)state;
    assert_int_equal(metrics_recent(m, METRICS_TTFT).n, 0);
    for (int i = 0; i < 100; i++) metrics_first(m, 1000000000);
    for (int mark = 0; mark <= HISTOGRAM_MARKS; mark++) {
        const metrics_spread s = metrics_recent(m, METRICS_TTFT);
        const bool forgotten = mark >= HISTOGRAM_MARKS;
        assert_int_equal(s.n, mark + (forgotten ? 0 : 100));
        assert_true(forgotten ? s.p95_ms < 1.1 : s.p50_ms >= 1000);
        metrics_mark(m);
        metrics_first(m, 1000000);
    }
    assert_int_equal(metrics_recent(m, METRICS_ITL).n, 0);
    metrics_free(m);
}

static void test_balancedness(void **state) {
    static const int64_t even[] = {5, 5, 5, 5}, one[] = {8, 0, 0, 0}, none[] = {0, 0, 0, 0};
    (void)state;
    assert_true(metrics_balancedness(even, 4, 4) == 1);
    assert_true(metrics_balancedness(one, 4, 4) == 0.25);
    assert_true(metrics_balancedness(none, 4, 4) == 0);
    assert_true(metrics_balancedness(even, 4, 2) == 1);
}

static void test_keys(void **state) {
    const hd_key_sources sources = {.text = "user-key-0123456789",
                                    .admin_text = "admin-key-0123456789"};
    const hd_key_sources weak = {.text = "short"}, nothing = {0};
    uint64_t salt, other;
    hd_keys *k;
    hd_err err = {0};
    (void)state;
    assert_int_equal(hd_keys_open(&k, &weak, &err), HD_EINVAL);
    assert_null(k);
    assert_null(strstr(err.msg, "short"));
    assert_int_equal(hd_keys_open(&k, &sources, NULL), HD_OK);
    assert_true(hd_keys_user_set(k) && hd_keys_admin_set(k));
    assert_int_equal(hd_keys_check(k, "user-key-0123456789", &salt), HD_RIGHT_USER);
    assert_int_equal(hd_keys_check(k, "admin-key-0123456789", &other), HD_RIGHT_ADMIN);
    assert_true(salt != 0 && other != 0 && salt != other);
    assert_int_equal(hd_keys_check(k, "user-key-012345678", &salt), HD_RIGHT_NONE);
    assert_int_equal(salt, 0);
    assert_int_equal(hd_keys_check(k, NULL, &salt), HD_RIGHT_NONE);
    hd_keys_close(k);
    assert_int_equal(hd_keys_open(&k, &nothing, NULL), HD_OK);
    assert_false(hd_keys_user_set(k) || hd_keys_admin_set(k));
    assert_int_equal(hd_keys_check(k, "anything-at-all-here", &salt), HD_RIGHT_NONE);
    hd_keys_close(k);
}

/* ---- dumps of earlier runs ---- */

typedef struct dumps {
    char dir[32], file[48];
} dumps;

static void name_dump(const dumps *d, int number, char name[64]) {
    snprintf(name, 64, number ? "%s.%d" : "%s", d->file, number);
}

static void put_dump(const dumps *d, int number, const char *text) {
    char name[64];
    name_dump(d, number, name);
    FILE *f = fopen(name, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

/* text NULL: there is no such file. */
static void expect_dump(const dumps *d, int number, const char *text) {
    char name[64], found[16] = "";
    name_dump(d, number, name);
    FILE *f = fopen(name, "r");
    assert_true((f != NULL) == (text != NULL));
    if (!f) return;
    if (!fgets(found, sizeof found, f)) found[0] = '\0';
    fclose(f);
    assert_string_equal(found, text);
}

static void keep_dumps(const dumps *d, char *logged, size_t size) {
    int ends[2];
    hd_err err = {0};
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(fcntl(ends[0], F_SETFL, O_NONBLOCK), 0);
    const int saved = dup(STDERR_FILENO);
    assert_true(saved >= 0 && dup2(ends[1], STDERR_FILENO) >= 0);
    assert_int_equal(dump_keep_earlier(d->file, "the model", &err), HD_OK);
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    close(saved);
    const ssize_t n = read(ends[0], logged, size - 1);
    logged[n > 0 ? n : 0] = '\0';
    close(ends[0]);
    close(ends[1]);
}

static void test_dumps_are_kept(void **state) {
    (void)state;
    dumps d = {.dir = "/tmp/hadal-dump-XXXXXX"};
    char logged[1024], text[16], name[64], command[80];
    assert_non_null(mkdtemp(d.dir));
    snprintf(d.file, sizeof d.file, "%s/dump", d.dir);
    keep_dumps(&d, logged, sizeof logged); /* there is nothing */
    put_dump(&d, 0, "");
    keep_dumps(&d, logged, sizeof logged); /* nobody crashed */
    assert_string_equal(logged, "");
    expect_dump(&d, 0, "");
    for (int run = 0; run < DUMPS_KEPT + 2; run++) {
        snprintf(text, sizeof text, "run %d", run);
        put_dump(&d, 0, text);
        keep_dumps(&d, logged, sizeof logged);
        expect_dump(&d, 0, NULL);
        for (int k = 0; k <= DUMPS_KEPT; k++) {
            snprintf(text, sizeof text, "run %d", run - k);
            expect_dump(&d, k + 1, k <= run && k < DUMPS_KEPT ? text : NULL);
        }
    }
    assert_non_null(strstr(logged, " warn crash_dump_kept dumps=9 "));
    name_dump(&d, 4, name); /* looked at: its place is the next one's */
    unlink(name);
    put_dump(&d, 0, "again");
    keep_dumps(&d, logged, sizeof logged);
    expect_dump(&d, 1, "again");
    snprintf(text, sizeof text, "run %d", DUMPS_KEPT + 1 - 4);
    expect_dump(&d, 5, text);
    for (int k = 1; k <= DUMPS_KEPT; k++) {
        name_dump(&d, k, name);
        if (k != 7) unlink(name);
    }
    keep_dumps(&d, logged,
               sizeof logged); /* said again at every start, until the last one is gone */
    snprintf(text, sizeof text, "dumps=1");
    assert_non_null(strstr(logged, text));
    snprintf(command, sizeof command, "hadal replay %s.7 the model", d.file);
    assert_non_null(strstr(logged, command));
    name_dump(&d, 7, name);
    unlink(name);
    keep_dumps(&d, logged, sizeof logged);
    assert_string_equal(logged, "");
    rmdir(d.dir);
}

/* A pipe is no file that holds anything; a folder in the way is named. */
static void test_dumps_that_cannot_be_kept(void **state) {
    (void)state;
    dumps d = {.dir = "/tmp/hadal-dump-XXXXXX"};
    char name[64], inside[72];
    hd_err err = {0};
    assert_non_null(mkdtemp(d.dir));
    snprintf(d.file, sizeof d.file, "%s/dump", d.dir);
    assert_int_equal(mkfifo(d.file, 0600), 0);
    assert_int_equal(dump_keep_earlier(d.file, "m", NULL), HD_OK);
    assert_int_equal(dump_keep_earlier(NULL, "m", NULL), HD_OK);
    unlink(d.file);
    put_dump(&d, 0, "precious");
    for (int k = 1; k <= DUMPS_KEPT; k++) {
        name_dump(&d, k, name);
        mkdir(name, 0700);
    }
    snprintf(inside, sizeof inside, "%s/x", name);
    mkdir(inside, 0700);
    assert_int_equal(dump_keep_earlier(d.file, "m", &err), HD_EIO);
    assert_non_null(strstr(err.msg, "dump.8, a crash dump of an earlier run, as "));
    expect_dump(&d, 0, "precious");
    rmdir(inside);
    for (int k = 1; k <= DUMPS_KEPT; k++) {
        name_dump(&d, k, name);
        rmdir(name);
    }
    unlink(d.file);
    rmdir(d.dir);
}

static void test_history(void **state) {
    enum { N = HISTORY_SAMPLES + 10 };
    static const char *const names[] = {"t",           "tokens_s",      "prompt_tokens_s",
                                        "ttft_p50_ms", "ttft_p95_ms",   "itl_p50_ms",
                                        "itl_p95_ms",  "prompt_tokens", "cached_tokens",
                                        "running",     "waiting"};
    history *h = history_new();
    (void)state;
    assert_non_null(h);
    for (int32_t n = 0; n <= N; n++) {
        api_text text = {0};
        history_write(h, &text);
        assert_false(text.failed);
        json_t *o = json_loadb(text.data, text.n, 0, NULL);
        assert_int_equal(json_object_size(o), HD_LEN(names));
        const size_t kept = n < HISTORY_SAMPLES ? (size_t)n : HISTORY_SAMPLES;
        for (size_t i = 0; i < HD_LEN(names); i++) {
            assert_int_equal(json_array_size(json_object_get(o, names[i])), kept);
        }
        for (size_t i = 0; i < kept; i++) {
            const json_int_t at = (json_int_t)n - (json_int_t)kept + (json_int_t)i;
            const json_t *ttft = json_array_get(json_object_get(o, "ttft_p95_ms"), i);
            assert_int_equal(json_integer_value(json_array_get(json_object_get(o, "t"), i)),
                             at);
            assert_true(at % 2 ? json_number_value(ttft) == 7.5 : json_is_null(ttft));
        }
        json_decref(o);
        api_text_deinit(&text);
        history_add(h, &(history_sample){
                           .t_ms = n, .ttft = {.n = (uint64_t)(n % 2), .p95_ms = 7.5}
        });
    }
    history_free(h);
}

int test_server(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_targets),        cmocka_unit_test(test_hosts),
        cmocka_unit_test(test_histogram),      cmocka_unit_test(test_balancedness),
        cmocka_unit_test(test_keys),           cmocka_unit_test(test_recent),
        cmocka_unit_test(test_dumps_are_kept), cmocka_unit_test(test_dumps_that_cannot_be_kept),
        cmocka_unit_test(test_history),
    };
    return cmocka_run_group_tests_name("server", tests, NULL, NULL);
}
