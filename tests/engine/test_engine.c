/* test_engine.c - the public API on the null runner: stop strings, control, many requests at
 * once. */
#include "check.h"

#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/device.h"
#include "base/philox.h"
#include "base/status.h"
#include "engine/engine.h"
#include "engine/rank.h"
#include "engine/request_ranges.h"
#include "fakes/engine_rig.h"

/* ---- stops ---- */

/* Every stop string of the null runner's text, however tokens and steps divide it. */
static void nothing_leaks_past_a_stop(void **state) {
    (void)state;
    hd_engine *e = rig_open("null", NULL);
    hd_request g = {.size = sizeof g, .text = "x", .max_tokens = 60, .seed = 7};
    rig_answer whole, a;
    rig_run(e, &g, &whole);
    assert_int_equal(whole.end.step.finish_reason, HD_FINISH_LENGTH);
    for (size_t at = 0; at + 5 < whole.content.n; at += 3) {
        for (int drafts = 0; drafts <= 7; drafts += 7) {
            char stop[8] = {0};
            memcpy(stop, whole.content.data + at, 2 + at % 4);
            const char *stops[] = {"never this", stop};
            hd_request h = g;
            h.stop = stops;
            h.n_stop = 2;
            h.draft_tokens = drafts;
            h.keep_stop = at % 2;
            rig_run(e, &h, &a);
            assert_int_equal(a.end.step.finish_reason, HD_FINISH_STOP);
            assert_string_equal(a.stop_text, stop);
            const size_t kept = h.keep_stop ? strlen(stop) : 0;
            assert_true(a.content.n <= at + kept && a.content.n >= kept);
            assert_memory_equal(a.content.data ? a.content.data : "", whole.content.data,
                                a.content.n);
            assert_memory_equal(whole.content.data + a.content.n - kept, stop, strlen(stop));
            assert_memory_equal(a.tokens.ids, whole.tokens.ids, a.tokens.n * sizeof(int32_t));
            rig_deinit(&a);
        }
    }
    rig_deinit(&whole);
    hd_engine_close(e);
}

/* ---- choices ---- */

static void answers_share_the_prompts_pages(void **state) {
    (void)state;
    enum { N = 4, TOKENS = 1000 };
    int32_t prompt[TOKENS];
    for (int i = 0; i < TOKENS; i++) prompt[i] = 100 + i % 7;
    hd_engine *e = rig_open("null", NULL);
    hd_request g = {
        .size = sizeof g, .tokens = prompt, .n_tokens = TOKENS, .max_tokens = 5, .n = N};
    rig_answer a[N];
    rig_run(e, &g, a);
    assert_int_equal(a[0].end.step.n_cached, 0);
    for (int i = 1; i < N; i++) assert_true(a[i].end.step.n_cached > TOKENS / 2);
    for (int i = 0; i < N; i++) rig_deinit(&a[i]);
    hd_engine_close(e);
}

/* ---- control ---- */

static uint64_t submit(hd_engine *e, const hd_request *g) {
    char why[600];
    const uint64_t id = hd_engine_submit(e, g, NULL, why, sizeof why);
    if (!id) fail_msg("%s", why);
    return id;
}

static int32_t finish_all(hd_engine *e, hd_finish_reason end) {
    hd_event event;
    int32_t n = 0;
    while (hd_engine_poll(e, &event, -1)) {
        if (event.step.finish_reason == HD_FINISH_NONE) continue;
        assert_int_equal(event.step.finish_reason, end);
        n++;
    }
    return n;
}

static void a_draining_engine_finishes_what_it_has(void **state) {
    (void)state;
    hd_engine *e = rig_open("null", NULL);
    const hd_request g = {.size = sizeof g, .text = "x", .max_tokens = 50, .n = 3};
    char why[600];
    bool full;
    submit(e, &g);
    hd_engine_drain(e);
    assert_int_equal(hd_engine_submit(e, &g, &full, why, sizeof why), 0);
    assert_string_equal(why, "the engine takes no more requests");
    assert_int_equal(finish_all(e, HD_FINISH_LENGTH), 3);
    hd_engine_stats stats;
    hd_engine_read_stats(e, &stats);
    assert_true(stats.draining && !stats.paused);
    hd_engine_close(e);
}

static void a_full_queue_is_reported(void **state) {
    (void)state;
    hd_engine *e = rig_open("null", &(hd_engine_options){.max_running = 1, .queue_limit = 2});
    hd_request g = {.size = sizeof g, .text = "x", .max_tokens = 5, .n = 4};
    char why[600];
    bool full = false;
    hd_engine_pause(e, HD_PAUSE_IN_PLACE);
    assert_int_equal(hd_engine_submit(e, &g, &full, why, sizeof why), 0);
    assert_true(full);
    g.n = 3;
    submit(e, &g);
    g.n = 0;
    assert_int_equal(hd_engine_submit(e, &g, &full, why, sizeof why), 0);
    hd_engine_resume(e);
    assert_int_equal(finish_all(e, HD_FINISH_LENGTH), 3);
    submit(e, &g);
    assert_int_equal(finish_all(e, HD_FINISH_LENGTH), 1);
    hd_engine_close(e);
}

/* Runs until the choice has some output, pauses, and reads what came before the rest. */
static void pause_in_the_middle(hd_engine *e, const hd_request *g, hd_pause how,
                                rig_answer *a) {
    hd_event event;
    hd_engine_stats stats = {0};
    *a = (rig_answer){0};
    submit(e, g);
    while (a->tokens.n < 5 && hd_engine_poll(e, &event, -1)) rig_take(a, &event);
    hd_engine_pause(e, how);
    while (!stats.paused) { /* the step thread waits if no thread polls */
        if (hd_engine_poll(e, &event, 0)) rig_take(a, &event);
        hd_engine_read_stats(e, &stats);
    }
    while (hd_engine_poll(e, &event, 0)) rig_take(a, &event);
}

static void a_pause_loses_nothing(void **state) {
    (void)state;
    hd_engine *e = rig_open("null", &(hd_engine_options){.max_running = 2});
    const hd_request g = {.size = sizeof g, .text = "x", .max_tokens = 2000, .draft_tokens = 2};
    hd_request_status listed[4];
    hd_event event;
    rig_answer whole, a;
    rig_run(e, &g, &whole);
    for (int how = HD_PAUSE_RETRACT; how <= HD_PAUSE_IN_PLACE; how++) {
        pause_in_the_middle(e, &g, (hd_pause)how, &a);
        assert_int_equal(a.n_ends, 0);
        assert_int_equal(hd_engine_read_requests(e, listed, 4), 1);
        assert_int_equal(listed[0].phase,
                         how == HD_PAUSE_RETRACT ? HD_PHASE_WAITING : HD_PHASE_DECODE);
        assert_int_equal(listed[0].output_tokens, a.tokens.n);
        hd_engine_resume(e);
        while (hd_engine_poll(e, &event, -1)) rig_take(&a, &event);
        rig_same(&whole, &a);
        assert_int_equal(a.end.retracted, how == HD_PAUSE_RETRACT);
        rig_deinit(&a);
    }
    pause_in_the_middle(e, &g, HD_PAUSE_ABORT, &a);
    assert_int_equal(a.end.step.finish_reason, HD_FINISH_ABORT);
    rig_deinit(&a);
    rig_deinit(&whole);
    hd_engine_close(e);
}

static void a_paused_engine_still_cancels_and_times_out(void **state) {
    (void)state;
    hd_engine *e = rig_open("null", NULL);
    hd_request g = {.size = sizeof g, .text = "x", .max_tokens = 5};
    hd_event event;
    hd_engine_pause(e, HD_PAUSE_IN_PLACE);
    const uint64_t id = submit(e, &g);
    assert_false(hd_engine_poll(e, &event, 1000000));
    hd_engine_wake(e);
    assert_false(hd_engine_poll(e, &event, -1)); /* woken */
    hd_engine_cancel(e, id);
    assert_true(hd_engine_poll(e, &event, -1));
    assert_int_equal(event.step.finish_reason, HD_FINISH_ABORT);
    g.queue_timeout_ns = 1000;
    submit(e, &g);
    assert_true(hd_engine_poll(e, &event, -1));
    assert_int_equal(event.step.finish_reason, HD_FINISH_TIMEOUT);
    assert_int_equal(event.admitted_ns, 0);
    hd_engine_close(e);
}

static void the_most_important_are_listed_first(void **state) {
    (void)state;
    hd_engine *e = rig_open("null", NULL);
    hd_request_status listed[8];
    uint64_t ids[4];
    hd_engine_pause(e, HD_PAUSE_IN_PLACE);
    for (int i = 0; i < 4; i++) {
        ids[i] = submit(
            e, &(hd_request){.size = sizeof(hd_request), .text = "x", .priority = i % 2});
    }
    assert_int_equal(hd_engine_read_requests(e, listed, 8), 4);
    const int order[] = {1, 3, 0, 2};
    for (int i = 0; i < 4; i++) assert_true(listed[i].id == ids[order[i]]);
    assert_int_equal(hd_engine_read_requests(e, listed, 2), 2);
    hd_engine_close(e);
}

static void flush_forgets_prefixes(void **state) {
    (void)state;
    int32_t prompt[600];
    for (int i = 0; i < 600; i++) prompt[i] = 100;
    hd_engine *e = rig_open("null", NULL);
    const hd_request g = {.size = sizeof g, .tokens = prompt, .n_tokens = 600, .max_tokens = 2};
    rig_answer a;
    const bool cached[] = {false, true, false};
    for (int i = 0; i < 3; i++) {
        rig_run(e, &g, &a);
        assert_int_equal(a.end.step.n_cached > 0, cached[i]);
        rig_deinit(&a);
        if (i == 1) hd_engine_flush(e);
    }
    hd_engine_close(e);
}

/* ---- many at once ---- */

enum { CROWD = 300 };

typedef struct counted {
    int32_t events, ends;
    hd_finish_reason end;
} counted;

static void on_event(void *user, const hd_event *event) {
    counted *c = user;
    assert_int_equal(c->ends, 0);
    c->events++;
    if (!event->last) return;
    c->ends++;
    c->end = event->step.finish_reason;
}

static void hundreds_are_called_back(void **state) {
    (void)state;
    hd_engine *e = rig_open("null", &(hd_engine_options){.max_running = 32});
    static counted crowd[CROWD];
    memset(crowd, 0, sizeof crowd);
    for (int i = 0; i < CROWD; i++) {
        submit(e, &(hd_request){.size = sizeof(hd_request),
                                .text = "x",
                                .max_tokens = 1 + i % 20,
                                .on_event = on_event,
                                .user = &crowd[i]});
    }
    hd_event event;
    assert_false(hd_engine_poll(e, &event, -1)); /* all went to the callbacks */
    for (int i = 0; i < CROWD; i++) {
        assert_int_equal(crowd[i].ends, 1);
        assert_int_equal(crowd[i].events, 1 + i % 20);
        assert_int_equal(crowd[i].end, HD_FINISH_LENGTH);
    }
    hd_engine_close(e);
}

typedef struct storm {
    hd_engine *engine;
    atomic_int *done;
    uint64_t seed;
    uint64_t ids[CROWD];
} storm;

static void *submit_and_cancel(void *arg) {
    storm *s = arg;
    for (int i = 0; i < CROWD; i++) {
        const hd_philox r = hd_philox_at(s->seed, 0, (uint64_t)i);
        const hd_request g = {.size = sizeof g,
                              .text = "the cat sat on the mat",
                              .max_tokens = 1 + (int32_t)(r.v[0] % 30),
                              .n = (int32_t)(r.v[1] % 4),
                              .priority = (int32_t)(r.v[2] % 2),
                              .draft_tokens = (int32_t)(r.v[3] % 4)};
        if (i % 64 == 41) hd_engine_resume(s->engine); /* a paused queue would stay full */
        while (!(s->ids[i] = hd_engine_submit(s->engine, &g, NULL, NULL, 0))) sched_yield();
        hd_engine_cancel(s->engine, s->ids[r.v[0] / 64 % (uint32_t)(i + 1)]);
        hd_engine_stats stats;
        hd_request_status listed[16];
        if (i % 16 == 0) hd_engine_read_stats(s->engine, &stats);
        if (i % 16 == 8) hd_engine_read_requests(s->engine, listed, 16);
        if (i % 64 == 40) hd_engine_pause(s->engine, (hd_pause)(r.v[1] % 3));
        if (i % 64 == 50) hd_engine_flush(s->engine);
    }
    atomic_fetch_add(s->done, 1);
    return NULL;
}

static void a_storm_of_cancels_leaves_nothing_behind(void **state) {
    (void)state;
    enum { THREADS = 3 };
    static storm storms[THREADS];
    pthread_t threads[THREADS];
    atomic_int done = 0;
    hd_engine *e = rig_open("null", &(hd_engine_options){.max_running = 8, .queue_limit = 40});
    for (int i = 0; i < THREADS; i++) {
        storms[i] = (storm){.engine = e, .done = &done, .seed = (uint64_t)i};
        assert_int_equal(pthread_create(&threads[i], NULL, submit_and_cancel, &storms[i]), 0);
    }
    int64_t ends[HD_FINISH_ERROR + 1] = {0};
    hd_event event;
    bool over;
    do { /* an idle engine returns at once; the last check follows the last submission */
        over = atomic_load(&done) == THREADS;
        while (hd_engine_poll(e, &event, -1)) ends[event.step.finish_reason]++;
    } while (!over);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    assert_true(ends[HD_FINISH_ABORT] > 0 && ends[HD_FINISH_LENGTH] > 0);
    assert_true(ends[HD_FINISH_TIMEOUT] == 0 && ends[HD_FINISH_ERROR] == 0);
    hd_engine_stats stats;
    hd_engine_flush(e);
    submit(e, &(hd_request){.size = sizeof(hd_request), .text = "x", .max_tokens = 1});
    assert_int_equal(finish_all(e, HD_FINISH_LENGTH), 1);
    hd_engine_read_stats(e, &stats);
    assert_true(stats.waiting == 0 && stats.running == 0);
    for (int l = 0; l < HD_N_KV_GROUPS; l++) {
        assert_int_equal(stats.pages_free[l] + stats.pages_cached[l], stats.pages[l]);
    }
    hd_engine_close(e);
}

/* ---- refusals ---- */

static void set_number(hd_request *g, const hd_request_range *r, double value) {
    const float real = (float)value;
    const int32_t count = (int32_t)value;
    memcpy((char *)g + r->at, r->real ? (const void *)&real : (const void *)&count, 4);
}

/* Every number is accepted at both ends of its range, and refused by name behind them; a NaN
 * everywhere. What HTTP accepts begins and ends in the range, except that it has a word for
 * none. */
static void numbers_have_ranges(void **state) {
    (void)state;
    int n = 0;
    for (size_t at = 0; at < sizeof(hd_request); at++) {
        const hd_request_range *r = hd_request_range_of(at);
        if (!r) continue;
        const double ends[] = {r->low, r->high}, behind[] = {r->low - 1, r->high + 1, NAN};
        n++;
        for (int i = 0; i < 5; i++) {
            hd_request g = {.size = sizeof g};
            hd_err err = {0};
            const double v = i < 2 ? ends[i] : behind[i - 2];
            if (!r->real && (isnan(v) || v > INT32_MAX)) continue;
            set_number(&g, r, v);
            assert_int_equal(hd_request_check_ranges(&g, &err), i < 2 ? HD_OK : HD_EINVAL);
            assert_string_equal(err.field, i < 2 ? "" : r->name);
        }
        assert_true(r->http_low >= r->low || r->http_low == -1);
        assert_true(r->http_high <= r->high);
    }
    assert_int_equal(n, 21);
}

/* Whatever its sentence says, a refusal names the parameter, and has a code if there is more
 * to know than that it is wrong. */
static void refusals_name_the_parameter(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", &(hd_engine_options){.no_drafts = true});
    static const char tools[] =
        "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"strict\":true,"
        "\"parameters\":{\"type\":5}}}]";
    static const char user[] = "[{\"role\":\"user\",\"content\":\"x\"}]";
    static const char no_role[] = "[{\"content\":\"x\"}]";
    static const int32_t tokens[] = {-1};
    static const char *const empty[] = {""};
    static const int32_t ids[] = {-1};
    static const hd_logit_bias bias[] =
        {
            {-1, 0}
    },
                               endless[] = {{1, INFINITY}};
    const struct {
        hd_request g;
        const char *field, *code;
    } cases[] = {
        {{.text = "x", .temperature = 101},                                     "temperature",      NULL                     },
        {{.text = "x", .draft_tokens = 2},                                      "draft_tokens",     NULL                     },
        {{.tokens = tokens, .n_tokens = 1},                                     "tokens[0]",        NULL                     },
        {{.text = "x", .stop = empty, .n_stop = 1},                             "stop[0]",          NULL                     },
        {{.text = "x", .stop_tokens = ids, .n_stop_tokens = 1},                 "stop_tokens[0]",   NULL                     },
        {{.text = "x", .bias = bias, .n_bias = 1},                              "bias[0]",          NULL                     },
        {{.text = "x", .bias = endless, .n_bias = 1},                           "bias[0]",          NULL                     },
        {{.text = "x", .n_bias = 5000},                                         "bias",             NULL                     },
        {{.text = "x", .n_stop = 17},                                           "stop",             NULL                     },
        {{.text = "x", .n_stop_tokens = 65},                                    "stop_tokens",      NULL                     },
        {{.messages = no_role},                                                 "messages[0].role", NULL                     },
        {{.messages = user, .tools = "5"},                                      "tools",            NULL                     },
        {{.messages = "["},                                                     "messages",         "invalid_json"           },
        {{.messages = user, .tool_choice = "required"},                         "tool_choice",      NULL                     },
        {{.messages = user, .tools = tools},                                    "tools",            "invalid_schema"         },
        {{.text = "x", .response_format = HD_FORMAT_REGEX, .format_text = "("},
         "response_format",                                                                         "invalid_pattern"        },
        {{.text = "x", .response_format = HD_FORMAT_JSON, .ignore_eos = true},
         "response_format",                                                                         NULL                     },
        {{.text = "x", .max_tokens = 1 << 20},                                  "",                 "context_length_exceeded"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hd_request g = cases[i].g;
        hd_err err = {0};
        uint64_t id;
        g.size = sizeof g;
        if (hd_engine_submit_chat(e, &id, &g, NULL, &err) == HD_OK) fail_msg("case %zu", i);
        assert_string_equal(err.field, cases[i].field);
        assert_string_equal(err.code ? err.code : "", cases[i].code ? cases[i].code : "");
    }
    hd_engine_close(e);
}

static void what_makes_no_sense_is_refused(void **state) {
    (void)state;
    hd_engine *e = rig_open("null", NULL);
    const struct {
        hd_request g;
        const char *part;
    } cases[] = {
        {{.n = 65},               "n is 65"             },
        {{.n = -1},               "n is -1"             },
        {{.effort = 4},           "effort is 4"         },
        {{.effort_number = 101},  "effort_number is 101"},
        {{.draft_tokens = 8},     "draft_tokens is 8"   },
        {{.temperature = -1},     "temperature is -1"   },
        {{.messages = "[]"},      "2 are given"         },
        {{.max_tokens = 1 << 20}, "exceed the context"  },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        hd_request g = cases[i].g;
        char why[600];
        bool full = true;
        g.size = sizeof g;
        g.text = "x";
        assert_int_equal(hd_engine_submit(e, &g, &full, why, sizeof why), 0);
        assert_false(full);
        assert_non_null(strstr(why, cases[i].part));
    }
    hd_engine_close(e);
}

/* Each list of token ids at its limit; the bias forbids what would come next otherwise. */
static void lists_of_tokens_may_be_full(void **state) {
    (void)state;
    static hd_logit_bias bias[HD_MAX_BIAS + 1];
    int32_t stop[HD_MAX_STOP_TOKENS];
    rig_answer a;
    for (int32_t i = 0; i <= HD_MAX_BIAS; i++) bias[i] = (hd_logit_bias){i, -INFINITY};
    for (int32_t i = 0; i < HD_MAX_STOP_TOKENS; i++) stop[i] = HD_MAX_BIAS + i;
    hd_engine *e = rig_open("cpu", &(hd_engine_options){.max_running = 2});
    hd_request g = {.size = sizeof g,
                    .text = "What is 3 + 4?",
                    .max_tokens = 8,
                    .min_tokens = 8,
                    .bias = bias,
                    .n_bias = HD_MAX_BIAS,
                    .stop_tokens = stop,
                    .n_stop_tokens = HD_MAX_STOP_TOKENS};
    rig_run(e, &g, &a);
    assert_int_equal(a.tokens.n, 8);
    for (size_t i = 0; i < a.tokens.n; i++) { /* banned before min_tokens */
        assert_true(a.tokens.ids[i] >= HD_MAX_BIAS + HD_MAX_STOP_TOKENS);
    }
    rig_deinit(&a);
    g.n_bias++;
    assert_int_equal(hd_engine_submit(e, &g, NULL, NULL, 0), 0);
    hd_engine_close(e);
}

static void defaults_are_the_makers(void **state) {
    (void)state;
    hd_engine *e = rig_open("null", NULL);
    hd_request g = {.size = sizeof g, .seed = 5, .max_tokens = 9};
    hd_engine_defaults(e, &g);
    assert_true(g.temperature == 0.6f && g.top_p == 0.95f && g.repetition_penalty == 1);
    assert_true(g.top_k == 0 && g.min_p == 0 && g.seed == 5 && g.max_tokens == 9);
    hd_engine_close(e);
}

/* ---- without a checkpoint ---- */

enum { DUMMY_PROMPT = 300, DUMMY_OUTPUT = 6 };

static hd_engine *open_dummy(const char *config, const char *backend, int32_t threads) {
    char path[128];
    snprintf(path, sizeof path, "tests/configs/%s.json", config);
    return rig_open(backend, &(hd_engine_options){.model_dir = path,
                                                  .dummy_weights = true,
                                                  .threads = threads,
                                                  .max_context = 512,
                                                  .max_running = 2});
}

/* Every family: random weights generate tokens, the same in every engine. */
static void dummy_weights_answer_in_tokens(void **state) {
    (void)state;
    static const char *const configs[] = {"tiny_v2", "tiny_v3", "tiny_v32", "tiny_v4"};
    int32_t prompt[DUMMY_PROMPT];
    for (int i = 0; i < DUMMY_PROMPT; i++) prompt[i] = i % 100;
    hd_request g = {.size = sizeof g,
                    .tokens = prompt,
                    .n_tokens = DUMMY_PROMPT,
                    .max_tokens = DUMMY_OUTPUT,
                    .ignore_eos = true};
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++) {
        rig_answer a[2];
        g.draft_tokens = i % 2 ? 2 : 0; /* V3 and V4 have an MTP layer */
        for (int k = 0; k < 2; k++) {
            hd_engine *e = open_dummy(configs[i], "cpu", 1 + k);
            hd_engine_stats stats;
            hd_engine_read_stats(e, &stats);
            assert_true(stats.weight_bytes > 0);
            rig_run(e, &g, &a[k]);
            hd_engine_close(e);
        }
        assert_int_equal(a[0].end.step.finish_reason, HD_FINISH_LENGTH);
        assert_int_equal(a[0].tokens.n, DUMMY_OUTPUT);
        assert_int_equal(a[0].content.n, 0);
        rig_same(&a[0], &a[1]);
        rig_deinit(&a[0]);
        rig_deinit(&a[1]);
    }
}

static void dummy_weights_know_no_text(void **state) {
    (void)state;
    static const int32_t prompt[] = {1, 2, 3};
    static const char *const stop[] = {"stop"};
    const struct {
        hd_request g;
        const char *part;
    } cases[] = {
        {{.text = "x"},                                                        "text"        },
        {{.messages = "[{\"role\": \"user\", \"content\": \"x\"}]"},           "messages"    },
        {{.tokens = prompt, .n_tokens = 3, .stop = stop, .n_stop = 1},         "stop strings"},
        {{.tokens = prompt, .n_tokens = 3, .response_format = HD_FORMAT_JSON},
         "response formats"                                                                  },
        {{.tokens = prompt, .n_tokens = 3, .tool_choice = "required"},         "no tools"    },
    };
    static const char *const backends[] = {"null", "cpu"};
    for (int b = 0; b < 2; b++) {
        hd_engine *e = open_dummy("tiny_v2", backends[b], 1);
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            hd_request g = cases[i].g;
            char why[600] = "";
            g.size = sizeof g;
            if (b == 0 && g.tool_choice) continue;
            assert_int_equal(hd_engine_submit(e, &g, NULL, why, sizeof why), 0);
            assert_non_null(strstr(why, cases[i].part));
        }
        hd_engine_close(e);
    }
}

/* ---- backends ---- */

static void check_backend(const char *asked, const char *mla, const char *used,
                          const char *why) {
    const hd_engine_options o = {
        .model_dir = "tests/configs/tiny_v2.json", .dummy_weights = true, .mla = mla};
    hd_engine *e = rig_open(asked, &o);
    const char *no_gpu = "unset";
    assert_string_equal(hd_engine_backend(e, &no_gpu), used);
    if (why) {
        assert_non_null(no_gpu);
        assert_non_null(strstr(no_gpu, why));
    } else {
        assert_null(no_gpu);
    }
    hd_engine_close(e);
}

/* "auto" chooses a GPU that can be opened and supports the options; the reason is kept. */
static void backend_is_selected(void **state) {
    (void)state;
    hd_device *gpu;
    hd_err err = {0};
    const bool there = hd_device_open_cuda(&gpu, 0, HD_CUDA_AUTO, &err) == HD_OK;
    hd_device_close(gpu);
    const char *outputs = there ? "cuda" : "cpu", *why = there ? NULL : err.msg;
    check_backend("auto", NULL, outputs, why);
    check_backend(NULL, NULL, outputs, why);
    check_backend("auto", "naive", "cpu",
                  "mla naive is for a CPU"); /* exact, as the rig asks for */
    check_backend("cpu", NULL, "cpu", NULL);
    check_backend("ref", NULL, "ref", NULL);
    check_backend("null", NULL, "null", NULL);
}

/* The number of a GPU reaches the device, and another backend does not ignore it. */
static void a_gpu_that_is_not_there_is_refused(void **state) {
    (void)state;
    static const char *const others[] = {"cpu", "ref", "null"};
    static const char *const gpus[] = {"cuda", "auto", NULL};
    hd_engine_options o = {.size = sizeof o,
                           .model_dir = "tests/configs/tiny_v2.json",
                           .dummy_weights = true,
                           .gpu = 4711};
    hd_engine *e;
    char why[600];
    for (size_t i = 0; i < HD_LEN(others); i++) {
        char want[80];
        o.backend = others[i];
        snprintf(want, sizeof want, "gpu 4711 is for backend cuda, not for %s", others[i]);
        assert_int_equal(hd_engine_open(&e, &o, why, sizeof why), HD_EUNSUPPORTED);
        assert_string_equal(why, want);
    }
    for (size_t i = 0; i < HD_LEN(gpus); i++) {
        o.backend = gpus[i];
        assert_int_not_equal(hd_engine_open(&e, &o, why, sizeof why), HD_OK);
        assert_non_null(strstr(why, "CUDA"));
    }
}

/* ---- weights that are lost ---- */

static hd_status update_from(hd_engine *e, const char *dir, hd_weights_selector selector,
                             hd_err *err) {
    const hd_weights_update_rule rule = {.selector = selector, .whole = true};
    hd_weights_update *u;
    hd_checkpoint *c;
    assert_int_equal(hd_checkpoint_read(&c, dir, NULL), HD_OK);
    assert_int_equal(hd_weights_update_open(&u, hd_engine_weights(e), NULL), HD_OK);
    assert_int_equal(hd_weights_update_add(u, c, &rule, NULL), HD_OK);
    const hd_status st = hd_engine_update_weights(e, u, "next", err);
    hd_weights_update_close(u);
    return st;
}

/* Waits until the loads of all experts are published: from then on a paused engine leaves its stream
 * alone. Every layer of the shipped model has experts. */
static void wait_for_loads(hd_engine *e) {
    const hd_model_spec *c = hd_engine_spec(e);
    const size_t n = hd_engine_read_experts(e, NULL, 0, NULL);
    int64_t *load = calloc(n, sizeof *load), total = -1, rows = 0;
    assert_non_null(load);
    while (total != rows * c->n_layers * c->route.top_k) {
        hd_engine_stats stats;
        sched_yield();
        hd_engine_read_stats(e, &stats);
        hd_engine_read_experts(e, load, n, NULL);
        rows = stats.rows;
        total = 0;
        for (size_t i = 0; i < n; i++) total += load[i];
    }
    free(load);
}

/* A device that breaks off an update half way: nothing is computed by its weights, what waits is
 * kept, and a whole update mends it. */
static void a_broken_update_stops_all_requests(void **state) {
    (void)state;
    hd_engine *e = rig_open("cpu", &(hd_engine_options){.updatable = true});
    hd_request g = {.size = sizeof g, .text = "x", .max_tokens = 12, .ignore_eos = true};
    rig_answer whole, a = {0};
    hd_engine_stats stats;
    hd_event event;
    char why[600];
    hd_err err = {0};
    rig_run(e, &g, &whole);
    hd_engine_pause(e, HD_PAUSE_RETRACT);
    assert_true(hd_engine_submit(e, &g, NULL, why, sizeof why) != 0);
    wait_for_loads(e);
    hd_stream_fail(e->ranks[0].stream, HD_EDEVICE, "copy");
    assert_int_equal(update_from(e, TINY, HD_SELECT_ALL, &err), HD_EAGAIN);
    assert_string_equal(err.code, "weights_incomplete");
    hd_engine_resume(e);
    for (int i = 0; i < 2; i++) {
        uint64_t id;
        err = (hd_err){0};
        assert_int_equal(hd_engine_submit_chat(e, &id, &g, NULL, &err), HD_EAGAIN);
        assert_string_equal(err.code, "weights_incomplete");
        hd_engine_read_stats(e, &stats);
        assert_true(stats.weights_lost > 0 && stats.weight_updates == i);
        assert_string_equal(hd_engine_weight_version(e), i ? "next" : "default");
        assert_int_equal(update_from(e, TINY, i ? HD_SELECT_DRAFT : HD_SELECT_TARGET, NULL),
                         HD_OK);
    }
    while (!a.n_ends && hd_engine_poll(e, &event, -1)) rig_take(&a, &event);
    rig_same(&whole, &a);
    hd_engine_read_stats(e, &stats);
    assert_true(stats.weights_lost == 0 && stats.hindrance == NULL);
    rig_deinit(&whole);
    rig_deinit(&a);
    hd_engine_close(e);
}

/* ---- a long context ---- */

enum { SHORT = 1024, LONG_THREADS = 2 };

/* Sanitizers keep memory of their own, and take long over each token. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1, LONG = 4096 };
#else
enum { SANITIZED = 0, LONG = 131072 };
#endif

/* The shipped model's config with a context of LONG tokens, in its own file. */
static void write_long_config(char *path) {
    json_t *config = json_load_file(TINY "/config.json", 0, NULL);
    const int fd = mkstemp(path);
    assert_true(config && fd >= 0);
    assert_int_equal(close(fd), 0);
    json_object_set_new(config, "max_position_embeddings", json_integer(LONG));
    assert_int_equal(json_dump_file(config, path, 0), 0);
    json_decref(config);
}

static hd_engine *open_long(const char *config, const char *backend, int32_t context) {
    return rig_open(backend, &(hd_engine_options){.model_dir = config,
                                                  .dummy_weights = true,
                                                  .threads = LONG_THREADS,
                                                  .max_running = 1,
                                                  .max_context = context,
                                                  .kv_tokens = context});
}

static size_t resident_bytes(void) {
    size_t pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%*u %zu", &pages), 1);
    fclose(f);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* A prompt of the maximum length is admitted and scheduled; a longer one is refused. */
static void check_admission(const char *config) {
    char why[600];
    rig_answer a;
    hd_engine *e = open_long(config, "null", LONG);
    int32_t *prompt = calloc(LONG, sizeof *prompt);
    assert_non_null(prompt);
    hd_request g = {.size = sizeof g, .tokens = prompt, .n_tokens = LONG - 4, .max_tokens = 4};
    rig_run(e, &g, &a);
    assert_int_equal(a.end.step.finish_reason, HD_FINISH_LENGTH);
    assert_int_equal(a.end.prompt_tokens, LONG - 4);
    rig_deinit(&a);
    g.n_tokens = LONG;
    assert_int_equal(hd_engine_submit(e, &g, NULL, why, sizeof why), 0);
    free(prompt);
    hd_engine_close(e);
}

/* With many times the context, only the KV entries (by size per token) and the scratch
 * memory grow. A short prompt has the same output and touches no more memory. */
static void a_long_context_costs_its_entries(void **state) {
    (void)state;
    char config[] = P_tmpdir "/hadal_long_XXXXXX";
    int32_t prompt[SHORT - 8];
    rig_answer a[2];
    hd_engine_stats stats[2];
    size_t resident[2];
    write_long_config(config);
    check_admission(config);
    for (size_t i = 0; i < HD_LEN(prompt); i++) prompt[i] = (int32_t)(i * 7 % 1000);
    const hd_request g = {.size = sizeof g,
                          .tokens = prompt,
                          .n_tokens = HD_LEN(prompt),
                          .max_tokens = 6,
                          .ignore_eos = true};
    for (int i = 0; i < 2; i++) {
        const size_t before = resident_bytes();
        hd_engine *e = open_long(config, "cpu", i ? LONG : SHORT);
        rig_run(e, &g, &a[i]);
        const size_t after = resident_bytes();
        resident[i] = after > before ? after - before : 0;
        hd_engine_read_stats(e, &stats[i]);
        hd_engine_close(e);
    }
    assert_int_equal(a[1].end.output_tokens, 6);
    rig_same(&a[0], &a[1]);
    rig_deinit(&a[0]);
    rig_deinit(&a[1]);
    const size_t per_token =
        2 * (512 + 128) * sizeof(float) / 4 + 2 * 512 * sizeof(float) / 128;
    const size_t page = (size_t)stats[1].page_tokens * per_token;
    const size_t entries = (LONG - SHORT) * per_token;
    assert_int_equal(stats[0].weight_bytes, stats[1].weight_bytes);
    assert_in_range(stats[1].kv_bytes - stats[0].kv_bytes, entries - page, entries + page);
    const size_t scratch = LONG_THREADS * 16;
    assert_true(stats[1].activation_bytes < stats[0].activation_bytes + (24 + scratch) * LONG);
    if (!SANITIZED) {
        const size_t planned =
            stats[1].weight_bytes + stats[1].kv_bytes + stats[1].activation_bytes;
        assert_true(resident[1] < planned);
        assert_true(resident[1] < resident[0] + planned / 4);
    }
    unlink(config);
}

int test_engine(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_leaks_past_a_stop),
        cmocka_unit_test(answers_share_the_prompts_pages),
        cmocka_unit_test(a_draining_engine_finishes_what_it_has),
        cmocka_unit_test(a_full_queue_is_reported),
        cmocka_unit_test(a_pause_loses_nothing),
        cmocka_unit_test(a_paused_engine_still_cancels_and_times_out),
        cmocka_unit_test(the_most_important_are_listed_first),
        cmocka_unit_test(flush_forgets_prefixes),
        cmocka_unit_test(hundreds_are_called_back),
        cmocka_unit_test(a_storm_of_cancels_leaves_nothing_behind),
        cmocka_unit_test(numbers_have_ranges),
        cmocka_unit_test(refusals_name_the_parameter),
        cmocka_unit_test(what_makes_no_sense_is_refused),
        cmocka_unit_test(lists_of_tokens_may_be_full),
        cmocka_unit_test(defaults_are_the_makers),
        cmocka_unit_test(dummy_weights_answer_in_tokens),
        cmocka_unit_test(dummy_weights_know_no_text),
        cmocka_unit_test(backend_is_selected),
        cmocka_unit_test(a_broken_update_stops_all_requests),
        cmocka_unit_test(a_gpu_that_is_not_there_is_refused),
        cmocka_unit_test(a_long_context_costs_its_entries),
    };
    return cmocka_run_group_tests_name("engine", tests, NULL, NULL);
}
