/* test_engine_ranks.c - an engine of several ranks answers as an engine of one: text, drafts,
 * log-probabilities, constraints, prefix hits, retraction and pauses; and a lost rank ends what
 * runs, with its number. */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/rank.h"
#include "fakes/engine_rig.h"
#include "runner/model_runner_internal.h"

typedef struct layout {
    const char *model;
    int32_t tp, ep;
} layout;

static const layout layouts[] = {
    {TINY,             1, 2},
    {TINY,             2, 1},
    {TINY,             4, 4},
    {"models/tiny-v3", 1, 4},
};

/* The thread sanitizer makes a token take long. */
static size_t n_layouts(void) {
    return is_brief() ? 1 : HD_LEN(layouts);
}

static hd_engine *open_layout(const layout *l, hd_engine_options o) {
    o.model_dir = l->model;
    o.tp = l->tp;
    o.ep = l->ep;
    hd_engine *e = rig_open("cpu", &o);
    const int32_t ranks = l->tp > l->ep ? l->tp : l->ep;
    assert_int_equal(hd_parallel_world(hd_engine_parallel(e)), ranks);
    return e;
}

static hd_engine *open_one(const char *model, hd_engine_options o) {
    return open_layout(&(layout){model, 1, 1}, o);
}

/* Requests that use what only the leader has: drafts, penalties, a grammar, alternatives. */
enum { N_KINDS = 4 };

static hd_request request_of(int32_t kind) {
    static const hd_logit_bias bias[] = {
        {300, 2.0f}
    };
    hd_request g = {.size = sizeof g,
                    .text = "Once upon a time there was a little girl",
                    .max_tokens = 40,
                    .draft_tokens = 3,
                    .n = 1};
    if (kind == 1) {
        g.temperature = 0.8f;
        g.seed = 7;
        g.n = 3;
    }
    if (kind == 2) {
        g.repetition_penalty = 1.3f;
        g.bias = bias;
        g.n_bias = HD_LEN(bias);
        g.top_logprobs = 3;
    }
    if (kind == 3) {
        g.response_format = HD_FORMAT_REGEX;
        g.format_text = "[a-z]{3,9}( [a-z]{2,9}){4}";
    }
    return g;
}

static void answer_all(hd_engine *e, rig_answer out[N_KINDS][3]) {
    for (int32_t k = 0; k < N_KINDS; k++) {
        const hd_request g = request_of(k);
        rig_run(e, &g, out[k]);
    }
}

static void deinit_all(rig_answer a[N_KINDS][3]) {
    for (int32_t k = 0; k < N_KINDS; k++) {
        for (int32_t i = 0; i < 3; i++) rig_deinit(&a[k][i]);
    }
    memset(a, 0, N_KINDS * sizeof a[0]);
}

/* Every rank has pools of its own, and activations. */
static void check_memory(hd_engine *one, hd_engine *many) {
    hd_engine_stats a, b;
    hd_engine_read_stats(one, &a);
    hd_engine_read_stats(many, &b);
    assert_int_equal(b.kv_bytes, (size_t)many->n_ranks * a.kv_bytes);
    assert_int_equal(b.weight_bytes, a.weight_bytes);
    assert_true(b.activation_bytes > hd_model_runner_bytes(many->ranks[0].model_runner));
}

static void ranks_answer_as_one(void **state) {
    (void)state;
    static rig_answer want[N_KINDS][3], got[N_KINDS][3];
    for (size_t l = 0; l < n_layouts(); l++) {
        hd_engine *one = open_one(layouts[l].model, (hd_engine_options){0});
        hd_engine *many = open_layout(&layouts[l], (hd_engine_options){.threads = 2});
        answer_all(one, want);
        answer_all(many, got);
        for (int32_t k = 0; k < N_KINDS; k++) {
            for (int32_t i = 0; i < request_of(k).n; i++) rig_same(&want[k][i], &got[k][i]);
        }
        assert_true(got[0][0].end.drafted > 0);
        check_memory(one, many);
        deinit_all(want);
        deinit_all(got);
        hd_engine_close(many);
        hd_engine_close(one);
    }
}

/* The second run of a prompt reads pages of the first. */
static void prefix_hits_are_on_every_rank(void **state) {
    (void)state;
    static char prompt[1200];
    for (size_t n = 0; n + 20 < sizeof prompt; n = strlen(prompt)) {
        snprintf(prompt + n, sizeof prompt - n, "the cat sat, ");
    }
    const hd_request g = {
        .size = sizeof g, .text = prompt, .max_tokens = 20, .draft_tokens = 2, .n = 1};
    for (size_t l = 0; l < n_layouts(); l++) {
        rig_answer a[2] = {0};
        hd_engine *e = open_layout(&layouts[l], (hd_engine_options){.chunk_tokens = 32});
        hd_engine_stats stats;
        for (int i = 0; i < 2; i++) rig_run(e, &g, &a[i]);
        hd_engine_read_stats(e, &stats);
        assert_true(stats.cached_tokens > 0);
        rig_same(&a[0], &a[1]);
        for (int i = 0; i < 2; i++) rig_deinit(&a[i]);
        hd_engine_close(e);
    }
}

typedef struct crowd {
    rig_answer answers[8];
    uint64_t ids[8];
    int32_t ended;
} crowd;

static void take(crowd *c, const hd_event *event) {
    for (int i = 0; i < 8; i++) {
        if (c->ids[i] == event->id) rig_take(&c->answers[i], event);
    }
    c->ended += event->step.finish_reason != HD_FINISH_NONE;
}

/* Pools that are too small for all, so that some are retracted; and a pause that retracts. */
static void run_crowd(hd_engine *e, crowd *c) {
    char why[300], prompt[80];
    for (int i = 0; i < 8; i++) {
        snprintf(prompt, sizeof prompt, "Story %d. One day a boy named %c", i, 'A' + i);
        const hd_request g = {.size = sizeof g,
                              .text = prompt,
                              .max_tokens = 120,
                              .n = 1,
                              .ignore_eos = true,
                              .draft_tokens = i % 4};
        c->ids[i] = hd_engine_submit(e, &g, NULL, why, sizeof why);
        if (!c->ids[i]) fail_msg("%s", why);
    }
    hd_event event;
    for (int k = 0; c->ended < 8; k++) {
        assert_true(hd_engine_poll(e, &event, -1));
        take(c, &event);
        if (k == 20) hd_engine_pause(e, HD_PAUSE_RETRACT);
        if (k == 20) hd_engine_resume(e);
    }
}

static void retracted_requests_go_on(void **state) {
    (void)state;
    const hd_engine_options small = {.max_running = 8, .max_context = 256, .kv_tokens = 512};
    static crowd want, got;
    want = (crowd){0};
    hd_engine *one = open_one(TINY, small);
    run_crowd(one, &want);
    hd_engine_close(one);
    for (size_t l = 0; l < n_layouts() && l < 2; l++) {
        hd_engine_stats stats;
        got = (crowd){0};
        hd_engine *many = open_layout(&layouts[l], small);
        run_crowd(many, &got);
        hd_engine_read_stats(many, &stats);
        assert_true(stats.retracted > 0);
        for (int i = 0; i < 8; i++) {
            rig_same(&want.answers[i], &got.answers[i]);
            rig_deinit(&got.answers[i]);
        }
        hd_engine_close(many);
    }
    for (int i = 0; i < 8; i++) rig_deinit(&want.answers[i]);
}

/* What a rank's failure does: its message is that of every request, now and later. */
static void a_lost_rank_is_named(void **state) {
    (void)state;
    rig_answer a[2] = {0};
    const hd_request g = {.size = sizeof g, .text = "Once", .max_tokens = 30, .n = 1};
    hd_engine *e = open_layout(&layouts[0], (hd_engine_options){0});
    hd_comm_abort(e->ranks[1].comm, "rank 1: its device is gone");
    for (int i = 0; i < 2; i++) {
        rig_run(e, &g, &a[i]);
        assert_int_equal(a[i].end.step.finish_reason, HD_FINISH_ERROR);
        assert_string_equal(a[i].why, "rank 1: its device is gone");
        rig_deinit(&a[i]);
    }
    hd_engine_close(e);
}

/* A follower refuses a command that it cannot run, and all ends. */
static void a_wrong_command_is_refused(void **state) {
    (void)state;
    static const char want[] = "rank 1: a command of kind -1 with -1 rows of -1 sequences";
    rig_answer a = {0};
    const hd_request g = {.size = sizeof g, .text = "Once", .max_tokens = 30, .n = 1};
    hd_engine *e = open_layout(&layouts[0], (hd_engine_options){0});
    const engine_rank *leader = &e->ranks[0];
    const size_t bytes = leader->model_runner->command_bytes;
    uint8_t *command = malloc(bytes);
    assert_non_null(command);
    memset(command, -1, bytes);
    hd_comm_broadcast(leader->comm, leader->stream,
                      &(hd_broadcast_args){HD_GROUP_TP, command, bytes});
    rig_run(e, &g, &a);
    assert_int_equal(a.end.step.finish_reason, HD_FINISH_ERROR);
    assert_string_equal(a.why, want);
    rig_deinit(&a);
    hd_engine_close(e);
    free(command);
}

static void what_cannot_be_divided_is_refused(void **state) {
    (void)state;
    static const struct {
        layout l;
        const char *backend;
        bool pin;
        const char *why;
    } cases[] = {
        {{TINY, 1, 3},             "cpu",  false, "16 experts cannot be shared by ep 3" },
        {{TINY, 4, 2},             "cpu",  false, "tp 4 with ep 2: ep must be 1 or 4"   },
        {{"models/tiny-v3", 4, 1}, "cpu",  false, "2 heads cannot be shared by tp 4"    },
        {{TINY, 65, 1},            "cpu",  false, "tp is 65; must be 1 to 64"           },
        {{TINY, 1, -1},            "cpu",  false, "ep is -1; must be 1 to 64"           },
        {{TINY, 2, 1},             "cuda", false, "not on cuda yet"                     },
        {{TINY, 2, 1},             "null", false, "tp and ep have no meaning"           },
        {{TINY, 1, 2},             "cpu",  true,  "every rank would take the same cores"},
    };
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        char why[600];
        hd_engine *e;
        const hd_engine_options o = {.size = sizeof o,
                                     .model_dir = cases[i].l.model,
                                     .backend = cases[i].backend,
                                     .pin_threads = cases[i].pin,
                                     .tp = cases[i].l.tp,
                                     .ep = cases[i].l.ep};
        assert_int_not_equal(hd_engine_open(&e, &o, why, sizeof why), HD_OK);
        if (!strstr(why, cases[i].why)) fail_msg("%s, not %s", why, cases[i].why);
    }
}

/* Ranks that divide the rows count their own; together they are those of one rank. */
static void loads_are_those_of_all_ranks(void **state) {
    (void)state;
    const hd_request g = request_of(1);
    static int64_t load[2][4096];
    int64_t sum = 0;
    for (int i = 0; i < 2; i++) {
        rig_answer a[3] = {0};
        int32_t n_experts;
        hd_engine *e = i ? open_layout(&layouts[0], (hd_engine_options){.no_drafts = true})
                         : open_one(TINY, (hd_engine_options){.no_drafts = true});
        hd_request plain = g;
        plain.draft_tokens = 0;
        rig_run(e, &plain, a);
        hd_engine_stats stats;
        do { /* they are published once a second */
            hd_engine_read_experts(e, load[i], HD_LEN(load[i]), &n_experts);
            hd_engine_read_stats(e, &stats);
            sum = 0;
            for (int32_t k = 0; k < n_experts; k++) {
                sum += load[i][(e->spec->n_layers - 1) * n_experts + k];
            }
            nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
        } while (sum != stats.rows * e->spec->route.top_k);
        for (int k = 0; k < 3; k++) rig_deinit(&a[k]);
        hd_engine_close(e);
    }
    assert_memory_equal(load[0], load[1], sizeof load[0]);
}

int test_engine_ranks(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_answer_as_one),
        cmocka_unit_test(prefix_hits_are_on_every_rank),
        cmocka_unit_test(retracted_requests_go_on),
        cmocka_unit_test(a_lost_rank_is_named),
        cmocka_unit_test(a_wrong_command_is_refused),
        cmocka_unit_test(what_cannot_be_divided_is_refused),
        cmocka_unit_test(loads_are_those_of_all_ranks),
    };
    return cmocka_run_group_tests_name("engine_ranks", tests, NULL, NULL);
}
