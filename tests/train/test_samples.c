/* test_samples.c - what a sampling server is asked, and which replies count. */
#include "check.h"

#include "train/samples.h"

enum { N = 2, PROMPT = 2, MOST = 3 };

typedef struct rig {
    hd_sample_request r;
    hd_sample_reply out[N];
    int32_t tokens[N][MOST], routes[N][PROMPT + MOST], keys[N][2 * (PROMPT + MOST)];
    float logprob[N][MOST];
} rig;

static const int32_t prompt[PROMPT] = {3, 4};

/* A model with 10 tokens, one layer, one of 4 experts and two keys for each row. */
static void make(rig *g, int32_t n, bool routes) {
    *g = (rig){
        .r = {.prompt = prompt,
              .n_prompt = PROMPT,
              .n = n,
              .max_tokens = MOST,
              .temperature = 0.5f,
              .seed = 77,
              .routes = routes}
    };
    for (int i = 0; i < N; i++) {
        g->out[i] = (hd_sample_reply){.vocab = 10,
                                      .layers = 1,
                                      .top_k = 1,
                                      .n_experts = 4,
                                      .tokens = g->tokens[i],
                                      .logprob = g->logprob[i],
                                      .key_layers = 1,
                                      .key_top_k = 2,
                                      .routes = g->routes[i],
                                      .keys = g->keys[i]};
    }
}

#define SAMPLE(end, triples, more)                                 \
    "{\"meta_info\": {\"finish_reason\": {\"type\": \"" end "\"}," \
    " \"output_token_logprobs\": [" triples "]" more "}}"
#define KEYS(base64)   ", \"indexer_topk\": \"" base64 "\""
#define ROUTES(base64) ", \"routed_experts\": \"" base64 "\""

static void requests(void **state) {
    rig g;
    (void)state;
    make(&g, 2, true);
    char *body = hd_sample_body(&g.r);
    assert_string_equal(body, "{\"input_ids\":[3,4],\"sampling_params\":{\"n\":2,"
                              "\"max_new_tokens\":3,\"temperature\":0.5,"
                              "\"sampling_seed\":77,\"top_p\":1,\"top_k\":-1,"
                              "\"min_p\":0,\"repetition_penalty\":1},\"return_logprob\":true,"
                              "\"return_routed_experts\":true,\"return_indexer_topk\":false}");
    free(body);
}

static void good_replies(void **state) {
    /* texts are not read, and may have any character */
    static const char one[] = SAMPLE("length", "[-0.5, 9, null], [0, 1, \"x\\u0000\"]", "");
    static const char two[] =
        "[" SAMPLE("stop", "[-1, 2, null]", ROUTES("AwAAAP////8=")) "," SAMPLE(
            "length", "[-1, 2, 0], [-2, 3, 0]", ROUTES("AAAAAAEAAAACAAAA")) "]";
    rig g;
    hd_err err = {0};
    (void)state;
    make(&g, 1, false);
    assert_int_equal(hd_sample_read(g.out, &g.r, one, sizeof one - 1, &err), HD_OK);
    assert_true(g.out[0].n == 2 && g.out[0].truncated && g.tokens[0][0] == 9);
    assert_true(g.logprob[0][0] == -0.5f && g.logprob[0][1] == 0.0f);
    make(&g, 2, true);
    if (hd_sample_read(g.out, &g.r, two, sizeof two - 1, &err) != HD_OK)
        fail_msg("%s", err.msg);
    assert_true(g.out[0].n == 1 && !g.out[0].truncated && g.out[1].n == 2);
    assert_true(g.routes[0][0] == 3 && g.routes[0][1] == -1 && g.routes[1][2] == 2);
}

static void bad_replies(void **state) {
    /* clang-format off */
    static const struct {
        bool routes;
        const char *text, *why;
    } cases[] = {
        {false, "",                                          "reply"                        },
        {false, "[]",                                        "not a list of 1"              },
        {false, "{}",                                        "no or too many"               },
        {false, SAMPLE("stop", "", ""),                      "no or too many"               },
        {false, SAMPLE("stop", "[0,1],[0,1],[0,1],[0,1]", ""), "no or too many"             },
        {false, SAMPLE("stop", "[0, 10]", ""),               "no token"                     },
        {false, SAMPLE("stop", "[0, -1]", ""),               "no token"                     },
        {false, SAMPLE("stop", "[0, \"1\"]", ""),            "no token"                     },
        {false, SAMPLE("stop", "[0.1, 1]", ""),              "a log-probability that is none"},
        {false, SAMPLE("stop", "[null, 1]", ""),             "a log-probability that is none"},
        {false, SAMPLE("abort", "[0, 1]", ""),               "aborted"                      },
        {false, SAMPLE("eaten", "[0, 1]", ""),               "without an end"               },
        {true,  SAMPLE("stop", "[0, 1]", ""),                "without routed_experts"       },
        {true,  SAMPLE("stop", "[0, 1]", ROUTES("AwAAAA==")), "of another shape"            },
        {true,  SAMPLE("stop", "[0, 1]", ROUTES("?")),       "of another shape"             },
        {true,  SAMPLE("stop", "[0, 1]", ROUTES("BAAAAAAAAAA=")), "a number in routed_experts that"},
    };
    /* clang-format on */
    (void)state;
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        rig g;
        hd_err err = {0};
        make(&g, 1, cases[i].routes);
        assert_int_equal(
            hd_sample_read(g.out, &g.r, cases[i].text, strlen(cases[i].text), &err),
            HD_EFORMAT);
        if (!strstr(err.msg, cases[i].why)) fail_msg("%s: %s", cases[i].text, err.msg);
    }
}

static void keys_of_indexers(void **state) {
    static const struct {
        const char *text, *why; /* NULL: good */
    } cases[] = {
        {SAMPLE("stop", "[0, 1]", KEYS("AAAAAP////8AAAAAAQAAAA==")), NULL                  },
        {SAMPLE("stop", "[0, 1]", ""),                               "without indexer_topk"},
        {SAMPLE("stop", "[0, 1]", KEYS("AwAAAA==")),                 "of another shape"    },
        {SAMPLE("stop", "[0, 1]", KEYS("AAAAAP////8AAAAAAgAAAA==")),
         "a number in indexer_topk that"                                                   },
        {SAMPLE("stop", "[0, 1]", KEYS("AAAAAP7///8AAAAAAQAAAA==")),
         "a number in indexer_topk that"                                                   },
    };
    (void)state;
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        rig g;
        hd_err err = {0};
        make(&g, 1, false);
        g.r.keys = true;
        const hd_status st =
            hd_sample_read(g.out, &g.r, cases[i].text, strlen(cases[i].text), &err);
        assert_int_equal(st, cases[i].why ? HD_EFORMAT : HD_OK);
        if (cases[i].why && !strstr(err.msg, cases[i].why)) fail_msg("%s", err.msg);
        if (!cases[i].why) assert_true(g.keys[0][1] == -1 && g.keys[0][3] == 1);
    }
}

int test_samples(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests),
        cmocka_unit_test(good_replies),
        cmocka_unit_test(bad_replies),
        cmocka_unit_test(keys_of_indexers),
    };
    return cmocka_run_group_tests_name("samples", tests, NULL, NULL);
}
