/* test_engine_ranks.c - an engine of several ranks answers as an engine of one: text, drafts,
 * log-probabilities, constraints, prefix hits, retraction and pauses; and a lost rank ends what
 * runs, with its number. With HADAL_BACKEND=cuda the same on GPUs, of which ranks share some if there
 * are too few. */
#include "check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "allocations.h"
#include "base/checked.h"
#include "engine/rank.h"
#include "fakes/engine_rig.h"
#include "fakes/gpus.h"
#include "moe/rebalance.h"
#include "runner/expert_moves_internal.h"

#define V41 "models/tiny-v41"

typedef struct layout {
    const char *model;
    int32_t tp, ep, dp;
    bool sums; /* sum_in_ranks */
    int32_t cp;
    const char *overlap;
} layout;

static const layout layouts[] = {
    {TINY,             2, 2,     2, false, 1, NULL}, /* attention groups with followers */
    {TINY,             2, 2,     1, false, 1, "2" },
    {TINY,             1, 2,     2, false, 1, "3" }, /* two attention groups share the experts */
    {TINY,             1, 2,     1, false, 2, NULL}, /* ranks divide the rows of prompts */
    {TINY,             2, 1,     1, false, 1, NULL},
    {TINY,             4, 2,     1, false, 1, NULL},
    {V41,              2, 2,     2, false, 1, NULL}, /* layers that drop rows of a prompt */
    {V41,              1, 4,     1, false, 1, "2" },
    {"models/tiny-v3", 4, 1,     1, false, 1, NULL}, /* 2 heads; blocks of 128 rows in 2 parts */
    {"models/tiny-v3", 2, 3 * 2, 1, false, 1, "2" }, /* 8 experts in 12 slots */
    {"models/tiny-v3", 1, 1,     3, false, 1, NULL}, /* parts of every expert in all groups */
    {"models/tiny-v3", 2, 1,     1, false, 2, NULL},
    {"models/tiny-v3", 1, 3,     2, false, 3, "3" },
};

enum { FEW_LAYOUTS = 4 };

static bool on_gpus;

/* The thread sanitizer makes a token take long. */
static size_t n_layouts(void) {
    return is_brief() ? 1 : HD_LEN(layouts);
}

/* Of what no layout computes in a way of its own: all of them in ./test --long. */
static size_t few_layouts(void) {
    return is_brief() ? 1 : is_long() ? HD_LEN(layouts) : FEW_LAYOUTS;
}

static hd_engine *open_layout(const layout *l, hd_engine_options o) {
    o.model_dir = l->model;
    o.tp = l->tp;
    o.ep = l->ep;
    o.dp = l->dp;
    o.cp = l->cp;
    o.overlap = on_gpus ? NULL : l->overlap;
    hd_engine *e = rig_open(on_gpus ? "cuda" : "cpu", &o);
    const int32_t all = l->tp * hd_max_i32(l->cp, 1) * l->dp;
    assert_int_equal(hd_parallel_world(hd_engine_parallel(e)), hd_max_i32(all, l->ep));
    return e;
}

static hd_engine *open_one(const char *model, hd_engine_options o) {
    return open_layout(&(layout){.model = model, .tp = 1, .ep = 1, .dp = 1}, o);
}

/* Fewer there, too. */
static int32_t n_tokens(int32_t n) {
    return is_brief() ? n / 4 : n;
}

/* Requests that use what only the leader has: drafts, penalties, a grammar, alternatives, relaxed acceptance. */
enum { N_KINDS = 5 };

static hd_request request_of(int32_t kind) {
    static const hd_logit_bias bias[] = {
        {300, 2.0f}
    };
    hd_request g = {.size = sizeof g,
                    .text = "Once upon a time there was a little girl",
                    .max_tokens = n_tokens(40),
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
        g.max_tokens = 40;
    }
    if (kind == 4) {
        g.text = NULL;
        g.messages = "[{\"role\": \"user\", \"content\": \"Tell me a story.\"}]";
        g.thinking = 1;
        g.temperature = 2;
        g.seed = 3;
        g.relaxed_top = 10;
        g.relaxed_delta = 0.9f;
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

/* Every layout in 2 or in 3 micro-batches (./test --long: in both), of prompts, drafts that are verified,
 * and single rows. */
static void micro_batches_answer_as_one(void **state) {
    (void)state;
    static rig_answer want[N_KINDS][3], got[N_KINDS][3];
    static const char *const numbers[] = {"2", "3"};
    for (size_t l = 0; l < n_layouts(); l++) {
        hd_engine *one = open_one(layouts[l].model, (hd_engine_options){0});
        answer_all(one, want);
        hd_engine_close(one);
        for (size_t i = 0; i < HD_LEN(numbers); i++) {
            if (i != l % 2 && !is_long()) continue;
            hd_engine_stats stats;
            layout cut = layouts[l];
            cut.overlap = numbers[i];
            hd_engine *many = open_layout(&cut, (hd_engine_options){.threads = 2});
            answer_all(many, got);
            for (int32_t k = 0; k < N_KINDS; k++) {
                for (int32_t c = 0; c < request_of(k).n; c++) rig_same(&want[k][c], &got[k][c]);
            }
            hd_engine_read_stats(many, &stats);
            if (2 * stats.micro_steps < stats.steps) {
                fail_msg("layout %zu: %lld of %lld steps were cut", l,
                         (long long)stats.micro_steps, (long long)stats.steps);
            }
            deinit_all(got);
            hd_engine_close(many);
        }
        deinit_all(want);
    }
}

/* The second run of a prompt reads pages of the first. */
static void prefix_hits_are_on_every_rank(void **state) {
    (void)state;
    static char prompt[1200];
    for (size_t n = 0; n + 20 < sizeof prompt; n = strlen(prompt)) {
        snprintf(prompt + n, sizeof prompt - n, "the cat sat, ");
    }
    const hd_request g = {.size = sizeof g,
                          .text = prompt,
                          .max_tokens = n_tokens(20),
                          .draft_tokens = 2,
                          .n = 1};
    for (size_t l = 0; l < few_layouts(); l++) {
        rig_answer a[2] = {0};
        hd_engine *e = open_layout(&layouts[l], (hd_engine_options){.chunk_tokens = 32});
        hd_engine_stats stats;
        for (int i = 0; i < 2; i++) rig_run(e, &g, &a[i]); /* in one group */
        hd_engine_read_stats(e, &stats);
        if (stats.cached_tokens == 0) fail_msg("layout %zu: nothing cached; %s", l, a[0].why);
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
                              .max_tokens = is_brief() ? 24 : 60,
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

/* Every attention group has had its part of the requests, with its own pages. */
static void check_shares(hd_engine *e) {
    const int32_t groups = hd_engine_parallel(e)->dp;
    hd_engine_stats all, one;
    int64_t finished = 0, tokens = 0;
    int32_t pages = 0;
    hd_engine_read_stats(e, &all);
    for (int32_t g = 0; g < groups; g++) {
        assert_int_equal(hd_engine_read_group(e, g, &one), groups);
        assert_int_equal(one.finished, 8 / groups);
        finished += one.finished;
        tokens += one.output_tokens;
        pages += one.pages[HD_KV_FULL];
    }
    assert_int_equal(finished, all.finished);
    assert_int_equal(tokens, all.output_tokens);
    assert_int_equal(pages, all.pages[HD_KV_FULL]);
    assert_int_equal(hd_engine_read_group(e, groups, &one), groups);
}

static void retracted_requests_go_on(void **state) {
    (void)state;
    const hd_engine_options small = {
        .max_running = 8, .max_context = 256, .kv_tokens = is_brief() ? 256 : 384};
    static crowd want, got;
    want = (crowd){0};
    hd_engine *one = open_one(TINY, small);
    run_crowd(one, &want);
    hd_engine_close(one);
    for (size_t l = 0; l < n_layouts() && l < FEW_LAYOUTS; l++) {
        hd_engine_stats stats;
        got = (crowd){0};
        hd_engine *many = open_layout(&layouts[l], small);
        run_crowd(many, &got);
        hd_engine_read_stats(many, &stats);
        assert_true(stats.retracted > 0);
        check_shares(many);
        for (int i = 0; i < 8; i++) {
            rig_same(&want.answers[i], &got.answers[i]);
            rig_deinit(&got.answers[i]);
        }
        hd_engine_close(many);
    }
    for (int i = 0; i < 8; i++) rig_deinit(&want.answers[i]);
}

/* The first command of a run, which a follower cannot run. */
static void send_wrong_command(hd_engine *e) {
    const engine_rank *leader = &e->ranks[0];
    const size_t bytes = leader->model_runner->command_bytes;
    uint8_t *command = malloc(bytes);
    assert_non_null(command);
    memset(command, -1, bytes);
    hd_comm_broadcast(leader->comm, leader->stream,
                      &(hd_broadcast_args){HD_GROUP_TP, command, bytes});
    free(command);
}

/* Two failures while it runs. */
static void run_with_failures(hd_engine *e, const hd_request *g, rig_answer *out,
                              const char *why) {
    char refusal[300];
    hd_event event = {0};
    const uint64_t id = hd_engine_submit(e, g, NULL, refusal, sizeof refusal);
    if (!id) fail_msg("%s", refusal);
    for (int n = 1; !event.last; n++) {
        assert_true(hd_engine_poll(e, &event, -1));
        rig_take(&out[event.choice], &event);
        if (n == 3 || n == 12) hd_comm_abort(e->ranks[e->n_ranks - 1].comm, why);
    }
}

static void check_answers(const rig_answer want[3], rig_answer got[3]) {
    for (int i = 0; i < 3; i++) {
        rig_same(&want[i], &got[i]);
        rig_deinit(&got[i]);
    }
}

/* No page is held once nothing runs: when the engine has ended its next step, with the last event. */
static void check_pools(hd_engine *e) {
    const int32_t groups = hd_engine_parallel(e)->dp;
    rig_answer a = {0};
    const hd_request g = {.size = sizeof g, .text = "Once", .max_tokens = 2, .n = 1};
    rig_run(e, &g, &a);
    rig_deinit(&a);
    for (int32_t k = 0; k < groups; k++) {
        hd_engine_stats s;
        do hd_engine_read_group(e, k, &s);
        while (s.running || s.waiting);
        for (int l = 0; l < HD_N_KV_GROUPS; l++) {
            if (s.pages_free[l] + s.pages_cached[l] != s.pages[l]) {
                fail_msg("group %d holds %d of %d pages", k,
                         s.pages[l] - s.pages_free[l] - s.pages_cached[l], s.pages[l]);
            }
        }
    }
}

/* So many more tokens, which nobody takes. */
static void await_tokens(hd_engine *e, int64_t n) {
    hd_engine_stats s;
    hd_engine_read_stats(e, &s);
    const int64_t before = s.output_tokens;
    while (s.output_tokens < before + n) {
        nanosleep(&(struct timespec){0, 1000000}, NULL);
        hd_engine_read_stats(e, &s);
    }
}

/* Steps of four ranks: of two groups with a follower each. Only who takes tokens makes texts of them. */
static void steps_allocate_nothing(void **state) {
    enum { REQUESTS = 4, SOME = 8 * REQUESTS, ROUNDS = 8, MOST = 200 };
    static const layout four = {.model = TINY, .tp = 2, .ep = 2, .dp = 2, .cp = 1};
    (void)state;
    hd_engine *e = open_layout(&four, (hd_engine_options){.threads = 2});
    char why[300];
    hd_event event;
    int32_t ended = 0;
    for (int32_t i = 0; i < REQUESTS; i++) {
        const hd_request g = {.size = sizeof g,
                              .text = "Once upon a time",
                              .max_tokens = MOST,
                              .n = 1,
                              .ignore_eos = true,
                              .draft_tokens = i % 3};
        if (!hd_engine_submit(e, &g, NULL, why, sizeof why)) fail_msg("%s", why);
    }
    await_tokens(e, SOME);
    const int64_t first = allocations();
    for (int32_t i = 0; i < ROUNDS; i++) {
        while (hd_engine_poll(e, &event, 0)) ended += event.last;
        const int64_t before = allocations();
        await_tokens(e, SOME);
        assert_int_equal(allocations(), before);
    }
    assert_int_equal(ended, 0);
    assert_true(allocations() > first); /* of texts */
    for (; ended < REQUESTS; ended += event.last) assert_true(hd_engine_poll(e, &event, -1));
    check_pools(e);
    hd_engine_close(e);
}

/* Failures before a request and while it runs: its text is that of one rank. */
static void survive_failures(const layout *l, const rig_answer *want) {
    static rig_answer got[3];
    static const char why[] = "rank 1: its device is gone";
    static const char wrong[] = "rank 1: a command of kind -1 with -1 rows of -1 sequences";
    const hd_request g = request_of(1);
    hd_engine_stats stats;
    hd_engine *e = open_layout(l, (hd_engine_options){0});
    const int first = e->parallel.tp > 1 ? 0 : 1; /* a leader alone takes no commands */
    for (int k = first; k < 3; k++) {
        if (k == 0) send_wrong_command(e);
        if (k == 1) hd_comm_abort(e->ranks[1].comm, why);
        memset(got, 0, sizeof got);
        if (k < 2) {
            rig_run(e, &g, got);
        } else {
            run_with_failures(e, &g, got, why);
        }
        check_answers(want, got);
        hd_engine_read_stats(e, &stats);
        if (k == 2 && stats.rank_failures < k + 1 - first) { /* it was over before they came */
            rig_run(e, &g, got);
            check_answers(want, got);
            hd_engine_read_stats(e, &stats);
        }
        assert_true(stats.rank_failures >= k + 1 - first && !stats.ranks_lost);
        assert_string_equal(stats.rank_failure, k == 0 ? wrong : why);
    }
    assert_true(stats.retracted > 0);
    check_pools(e);
    hd_engine_close(e);
}

static void requests_survive_failures(void **state) {
    (void)state;
    static rig_answer want[3];
    const hd_request g = request_of(1);
    hd_engine *one = open_one(layouts[0].model, (hd_engine_options){0});
    rig_run(one, &g, want);
    hd_engine_close(one);
    for (size_t l = 0; l < n_layouts() && l < FEW_LAYOUTS; l++) {
        survive_failures(&layouts[l], want);
    }
    for (int i = 0; i < 3; i++) rig_deinit(&want[i]);
}

/* A follower that refuses every step: the message is that of every request, until a restart
 * helps. */
static void a_lost_rank_is_named(void **state) {
    (void)state;
    /* at rest when its answer is there */
    static const layout one_group = {.model = TINY, .tp = 2, .ep = 2, .dp = 1, .cp = 1};
    const hd_request g = {.size = sizeof g, .text = "Once", .max_tokens = 6, .n = 1};
    hd_engine_stats stats;
    hd_engine *e = open_layout(&one_group, (hd_engine_options){.no_graphs = true});
    int32_t *most = &e->ranks[1].model_runner->batch.limits.rows, rows = *most;
    for (int i = 0; i < 4; i++) {
        rig_answer a = {0};
        *most = i < 2 ? 0 : rows;
        if (i == 2) e->ranks[0].failed_ns = 0; /* long ago */
        rig_run(e, &g, &a);
        if (i < 2) {
            assert_int_equal(a.end.step.finish_reason, HD_FINISH_ERROR);
            assert_non_null(strstr(a.why, "rank 1: a command of kind 0 with"));
        } else {
            assert_int_equal(a.end.step.finish_reason, HD_FINISH_LENGTH);
        }
        hd_engine_read_stats(e, &stats);
        assert_int_equal(stats.ranks_lost, i < 2);
        rig_deinit(&a);
    }
    hd_engine_close(e);
}

/* ---- experts that move ---- */

static const struct {
    layout l;
    int32_t redundant;
    const char *split;
} movers[] = {
    {{TINY, 1, 2, 1, false, 1, NULL},             4, "flow" },
    {{TINY, 1, 2, 2, false, 1, NULL},             4, "flow" }, /* two attention groups */
    {{"models/tiny-v3", 1, 3, 1, false, 1, NULL}, 4, "flow" }, /* 8 experts in 12 slots */
    {{TINY, 2, 4, 2, false, 1, NULL},             8, "local"}, /* attention groups with followers */
    {{TINY, 2, 2, 2, false, 1, NULL},             4, "flow" }, /* and two ranks share an expert */
    {{TINY, 1, 4, 1, false, 1, NULL},             8, "local"},
    {{TINY, 4, 2, 1, false, 1, NULL},             2, "flow" }, /* two ranks share an expert */
    {{TINY, 1, 6, 1, false, 1, NULL},             2, "turns"},
};

static size_t n_movers(void) {
    return is_brief() ? 1 : HD_LEN(movers);
}

static hd_engine *open_mover(size_t i, const char *rebalance) {
    const hd_engine_options o = {.redundant = movers[i].redundant,
                                 .rebalance = rebalance,
                                 .expert_split = movers[i].split,
                                 .threads = 2};
    return open_layout(&movers[i].l, o);
}

static hd_rebalance_figures figures_of(hd_engine *e) {
    hd_engine_stats stats;
    hd_engine_read_stats(e, &stats);
    return stats.rebalance;
}

/* Every rank has the same maps, and the same version of each. */
static void check_maps(hd_engine *e) {
    hd_engine_pause(e, HD_PAUSE_IN_PLACE); /* no step runs when a later poll is answered */
    for (int32_t l = 0; l < e->spec->n_layers; l++) {
        const hd_expert_map *first = hd_weights_expert_map(e->ranks[0].weights, l);
        for (int32_t i = 1; first && i < e->n_ranks; i++) {
            const hd_expert_map *map = hd_weights_expert_map(e->ranks[i].weights, l);
            assert_int_equal(map->version, first->version);
            assert_memory_equal(map->expert, first->expert,
                                (size_t)first->n_slots * sizeof *map->expert);
        }
    }
    hd_engine_resume(e);
}

/* Moves have a share of the time of steps: how many steps they need depends on the machine. */
static void expect_flips(hd_engine *e, const hd_request *g, const rig_answer *want) {
    for (int32_t i = 0; i < 50 && figures_of(e).flips == 0; i++) {
        rig_answer more = {0};
        rig_run(e, g, &more);
        rig_same(want, &more);
        rig_deinit(&more);
    }
    assert_true(figures_of(e).flips > 0);
}

/* Experts move after every step, drafts and a grammar included: not a bit of a text changes. */
static void moves_change_no_bit(void **state) {
    (void)state;
    static rig_answer want[N_KINDS][3], got[N_KINDS][3];
    for (size_t l = 0; l < n_movers(); l++) {
        hd_engine *one = open_one(movers[l].l.model, (hd_engine_options){0});
        hd_engine *many = open_mover(l, "1");
        answer_all(one, want);
        answer_all(many, got);
        for (int32_t k = 0; k < N_KINDS; k++) {
            for (int32_t i = 0; i < request_of(k).n; i++) rig_same(&want[k][i], &got[k][i]);
        }
        const hd_request first = request_of(0);
        expect_flips(many, &first, &want[0][0]);
        const hd_rebalance_figures f = figures_of(many);
        assert_true(f.on && f.flips > 0 && f.moves > 0 && f.bytes > 0);
        assert_int_equal(f.interrupted, 0);
        check_maps(many);
        deinit_all(want);
        deinit_all(got);
        hd_engine_close(many);
        hd_engine_close(one);
    }
}

/* A flip changes what the queue of steps reads, and nothing that a graph was captured with. */
static void flips_capture_no_graph(void **state) {
    (void)state;
    static rig_answer want[N_KINDS][3], got[N_KINDS][3];
    hd_engine_stats first, last;
    hd_engine *e = open_mover(0, "1");
    answer_all(e, want);
    const hd_request g = request_of(0);
    expect_flips(e, &g, &want[0][0]);
    for (int32_t i = 0; i < 3; i++) { /* a shape is captured when it comes again */
        answer_all(e, got);
        deinit_all(got);
    }
    hd_engine_read_stats(e, &first);
    last = first;
    for (int32_t i = 0; i < 40 && last.rebalance.flips < first.rebalance.flips + 8; i++) {
        answer_all(e, got);
        for (int32_t k = 0; k < N_KINDS; k++) rig_same(&want[k][0], &got[k][0]);
        deinit_all(got);
        hd_engine_read_stats(e, &last);
    }
    assert_true(last.rebalance.flips >= first.rebalance.flips + 8);
    assert_true(first.graphs > 0);
    assert_int_equal(last.graphs, first.graphs);
    assert_int_equal(last.rebalance.interrupted, 0);
    check_maps(e);
    deinit_all(want);
    hd_engine_close(e);
}

/* The leader's communication, which ends at a certain exchange of moves, or when followers have been
 * told to flip and the leader has not. */
enum {
    MOVE_COMMAND = RUNNER_DRAFT_AGAIN + 3,
    TOLD_FLIP = HD_REBALANCE_TO_FLIP, /* of a leader to the other leaders */
    AT_FLIP = -1,
    AT_MAP = -2 /* followers are told another map than the leader */
};

static struct {
    hd_comm_table table;
    const hd_comm *real;
    hd_comm comm;
    const hd_model_runner *runner;
    int32_t at, n;
} tap;

/* Where the order of a command is: behind a header of 10 numbers and two of each attention group. */
static size_t order_at(void) {
    return (size_t)(10 + 2 * tap.comm.groups[HD_GROUP_DP].n) * sizeof(int32_t);
}

static const char tap_why[] = "rank 1: its device is gone";

static void tap_gather(void *ctx, hd_stream *s, const hd_all_gather_args *a) {
    const runner_moves *m = &tap.runner->moves;
    const uint8_t *x = (const uint8_t *)a->x;
    const uint8_t *votes = (const uint8_t *)(const void *)m->votes;
    const bool moves = x == votes || (x >= m->packed && x < m->packed + m->bytes);
    if (moves && tap.at >= 0 && tap.n++ == tap.at) hd_comm_abort(tap.real, tap_why);
    tap.real->table->all_gather(ctx, s, a);
}

static void flip_is_told(hd_stream *s, bool ends) {
    if (!ends || tap.n++ > 0) return;
    hd_comm_abort(tap.real, tap_why);
    hd_stream_fail(s, HD_EPEER, tap_why);
}

static void tap_broadcast(void *ctx, hd_stream *s, const hd_broadcast_args *a) {
    int32_t command;
    runner_move_order order;
    memcpy(&command, a->data, sizeof command);
    tap.real->table->broadcast(ctx, s, a);
    if (a->group == HD_GROUP_DP) { /* what is told */
        flip_is_told(s, tap.at == AT_FLIP && command == TOLD_FLIP);
        return;
    }
    memcpy(&order, (const uint8_t *)a->data + order_at(), sizeof order);
    if (tap.at == AT_MAP && command == MOVE_COMMAND && order.kind == RUNNER_MOVE_VERIFY) {
        if (tap.n++ > 0) return;
        uint8_t *slots = (uint8_t *)a->data + order_at() + sizeof order;
        for (size_t i = 0; i < sizeof(int32_t); i++) { /* two slots of the leader's rank */
            const uint8_t x = slots[i];
            slots[i] = slots[i + sizeof(int32_t)];
            slots[i + sizeof(int32_t)] = x;
        }
        return;
    }
    flip_is_told(s, tap.at == AT_FLIP && command == MOVE_COMMAND &&
                        order.kind == RUNNER_MOVE_FLIP);
}

/* While it is idle. */
static void tap_leader(hd_engine *e, int32_t at) {
    hd_model_runner *x = e->ranks[0].model_runner;
    tap.real = e->ranks[0].comm;
    tap.runner = x;
    tap.at = at;
    tap.n = 0;
    tap.table = *tap.real->table;
    tap.table.all_gather = tap_gather;
    tap.table.broadcast = tap_broadcast;
    tap.comm = *tap.real;
    tap.comm.table = &tap.table;
    x->env.comm = &tap.comm;
    e->ranks[0].comm = &tap.comm;
}

/* Communication ends at each exchange of the first moves, and in the middle of a flip: every rank
 * has the same whole maps, and the text is the same. In one attention group, and in two. */
static void moves_survive_failures(void **state) {
    (void)state;
    rig_answer want = {0}, got = {0};
    const hd_request g = request_of(0);
    hd_engine *one = open_one(movers[0].l.model, (hd_engine_options){0});
    const int32_t points = is_brief() ? 2 : on_gpus ? 6 : 10;
    rig_run(one, &g, &want);
    hd_engine_close(one);
    for (int32_t i = 0; i < 2 * points; i++) {
        const int32_t at = AT_FLIP + i % points;
        hd_engine *e = open_mover((size_t)(i / points), "1");
        tap_leader(e, at);
        rig_run(e, &g, &got);
        rig_same(&want, &got);
        rig_deinit(&got);
        memset(&got, 0, sizeof got);
        assert_true(tap.n > at);
        const hd_rebalance_figures f = figures_of(e);
        assert_int_equal(f.interrupted, 1);
        assert_non_null(strstr(f.why, tap_why));
        expect_flips(e, &g, &want); /* it tries again */
        check_maps(e);
        hd_engine_close(e);
    }
    rig_deinit(&want);
}

/* A leader that verifies another map than followers: nothing flips, it is said, and it is tried
 * again. */
static void other_moves_are_refused(void **state) {
    (void)state;
    rig_answer want = {0}, got = {0};
    const hd_request g = request_of(0);
    hd_engine *one = open_one(movers[0].l.model, (hd_engine_options){0});
    rig_run(one, &g, &want);
    hd_engine_close(one);
    hd_engine *e = open_mover(0, "1");
    tap_leader(e, AT_MAP);
    rig_run(e, &g, &got);
    rig_same(&want, &got);
    const hd_rebalance_figures f = figures_of(e);
    assert_int_equal(f.interrupted, 1);
    assert_non_null(strstr(f.why, "was told other moves"));
    expect_flips(e, &g, &want);
    check_maps(e);
    rig_deinit(&want);
    rig_deinit(&got);
    hd_engine_close(e);
}

/* A follower whose maps are of another version refuses: nothing moves, and it is said. */
static void stale_maps_are_refused(void **state) {
    (void)state;
    rig_answer want[3] = {0}, got[3] = {0};
    const hd_request g = request_of(0);
    hd_engine *one = open_one(movers[0].l.model, (hd_engine_options){0});
    rig_run(one, &g, want);
    hd_engine_close(one);
    hd_engine *e = open_mover(0, "1");
    for (int32_t l = 0; l < e->spec->n_layers; l++) {
        const hd_expert_map *map = hd_weights_expert_map(e->ranks[1].weights, l);
        if (map) ((hd_expert_map *)(uintptr_t)map)->version++;
    }
    rig_run(e, &g, got);
    rig_same(&want[0], &got[0]);
    const hd_rebalance_figures f = figures_of(e);
    assert_int_equal(f.flips, 0);
    assert_true(f.interrupted > 0);
    assert_non_null(strstr(f.why, "rank "));
    rig_deinit(&want[0]);
    rig_deinit(&got[0]);
    hd_engine_close(e);
}

static void run_in_both_groups(hd_engine *e) {
    hd_request g = request_of(0);
    hd_event event;
    char why[256];
    static const char *const texts[] = {"What is 347 + 586?", "Once upon a time", "[3, 1, 2]",
                                        "{"};
    int32_t left = HD_LEN(texts);
    g.draft_tokens = 0;
    for (int32_t i = 0; i < left; i++) {
        g.text = texts[i];
        assert_true(hd_engine_submit(e, &g, NULL, why, sizeof why));
    }
    while (left > 0) {
        assert_true(hd_engine_poll(e, &event, -1));
        left -= event.last;
    }
    for (int32_t i = 0; i < 2; i++) assert_true(e->groups[i].stats.rows > 0);
}

/* Mean over layers of mean / max of the ranks' rows where nothing has moved; 1 of an MTP layer without
 * rows. */
static double expected_at_start(hd_engine *e, int32_t slots) {
    static int64_t load[4096];
    hd_engine_stats stats;
    int32_t n, ranks = hd_engine_parallel(e)->ep;
    int64_t sum;
    do { /* they are published once a second */
        hd_engine_read_experts(e, load, HD_LEN(load), &n);
        hd_engine_read_stats(e, &stats);
        sum = 0;
        for (int32_t k = 0; k < n; k++) sum += load[(e->spec->n_layers - 1) * n + k];
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    } while (sum != stats.rows * e->spec->route.top_k);
    double all = e->spec->n_mtp;
    for (int32_t l = 0; l < e->spec->n_layers; l++) {
        double of[8] = {0}, most = 0;
        for (int32_t s = 0; s < slots; s++) {
            const int32_t expert = s % n, copies = 1 + (expert < slots - n);
            of[s / (slots / ranks)] += (double)load[l * n + expert] / copies;
        }
        for (int32_t r = 0; r < ranks; r++) most = of[r] > most ? of[r] : most;
        all += (double)sum / ranks / most;
    }
    return all / (e->spec->n_layers + e->spec->n_mtp);
}

/* A look that is ordered while all are idle has the rows of all groups. */
static void looks_have_the_rows_of_all_groups(void **state) {
    (void)state;
    const hd_engine_options o = {
        .redundant = 4, .rebalance = "auto", .no_drafts = true, .threads = 2};
    hd_engine *e = open_layout(&(layout){TINY, 1, 2, 2, false, 1, NULL}, o);
    hd_err err = {0};
    run_in_both_groups(e);
    assert_int_equal(figures_of(e).looks, 0);
    const double want = expected_at_start(e, e->spec->route.n_experts + 4);
    for (int32_t i = 0; figures_of(e).looks == 0; i++) {
        assert_int_equal(hd_engine_rebalance(e, &err), HD_OK);
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    assert_true(fabs(figures_of(e).at_start - want) < 1e-9);
    hd_engine_close(e);
}

/* Ranks that divide the rows count their own; together they are those of one rank. */
static void loads_are_those_of_all_ranks(void **state) {
    (void)state;
    const hd_request g = request_of(1);
    static int64_t load[1 + FEW_LAYOUTS][4096];
    const size_t n = n_layouts() < FEW_LAYOUTS ? n_layouts() : FEW_LAYOUTS;
    int64_t sum = 0;
    for (size_t i = 0; i <= n; i++) {
        rig_answer a[3] = {0};
        int32_t n_experts;
        hd_engine *e = i ? open_layout(&layouts[i - 1], (hd_engine_options){.no_drafts = true})
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
    for (size_t i = 1; i <= n; i++) assert_memory_equal(load[0], load[i], sizeof load[0]);
}

int test_engine_ranks(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_answer_as_one),
        cmocka_unit_test(micro_batches_answer_as_one),
        cmocka_unit_test(prefix_hits_are_on_every_rank),
        cmocka_unit_test(retracted_requests_go_on),
        cmocka_unit_test(requests_survive_failures),
        cmocka_unit_test(steps_allocate_nothing),
        cmocka_unit_test(a_lost_rank_is_named),
        cmocka_unit_test(moves_change_no_bit),
        cmocka_unit_test(moves_survive_failures),
        cmocka_unit_test(other_moves_are_refused),
        cmocka_unit_test(stale_maps_are_refused),
        cmocka_unit_test(looks_have_the_rows_of_all_groups),
        cmocka_unit_test(loads_are_those_of_all_ranks),
    };
    const struct CMUnitTest of_gpus[] = {
        cmocka_unit_test(ranks_answer_as_one),
        cmocka_unit_test(prefix_hits_are_on_every_rank),
        cmocka_unit_test(retracted_requests_go_on),
        cmocka_unit_test(requests_survive_failures),
        cmocka_unit_test(a_lost_rank_is_named),
        cmocka_unit_test(moves_change_no_bit),
        cmocka_unit_test(flips_capture_no_graph),
        cmocka_unit_test(moves_survive_failures),
        cmocka_unit_test(other_moves_are_refused),
        cmocka_unit_test(stale_maps_are_refused),
        cmocka_unit_test(looks_have_the_rows_of_all_groups),
        cmocka_unit_test(loads_are_those_of_all_ranks),
    };
    int failed = cmocka_run_group_tests_name("engine_ranks", tests, NULL, NULL);
    on_gpus = gpus_are_wanted();
    if (on_gpus) {
        failed += cmocka_run_group_tests_name("engine_ranks on GPUs", of_gpus, NULL, NULL);
    }
    return failed;
}
