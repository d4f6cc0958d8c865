/* test_decode_graph.c - decode graphs: steps of fixed shapes, replayed from a tape, against
 * eager steps: the same tokens, probabilities, drafts and expert loads. With
 * HADAL_BACKEND=cuda the same on a GPU, which captures them. */
#include "fakes/crowd.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/philox.h"
#include "fakes/tape.h"

static machine m;
static request crowd[SLOTS], before[SLOTS];

static const char *const models[] = {"v2_groups",    "v3_small_mtp", "v32_rope_mtp",
                                     "v4_small_mtp", "v4_dspark",    "v41_small"};

/* v41_small's drafter chooses fewer experts than a row of a record has. */
enum { DRAFTS_RECORDED = HD_LEN(models) - 1 };

/* Tests that begin with the first model and those that begin with the second share them there. */
static size_t models_apart(void) {
    return is_brief() ? 2 : 1;
}

static const char *backend(void) {
    const char *wanted = getenv("HADAL_BACKEND");
    return wanted ? wanted : "cpu";
}

static void open_either(const char *name, float forced_acceptance, bool fixed) {
    open_machine_on(&m, backend(), name, forced_acceptance, fixed);
}

/* Returns whether steps were replayed: from the tape, or by the GPU. */
static bool replayed(int32_t n) {
    return tape_repeated() > n || hd_model_runner_read_times(m.model_runner)->graph_steps > n;
}

static uint32_t luck(uint64_t seed, int32_t at) {
    return hd_philox_at(seed, 5, (uint64_t)at).v[0];
}

static void check_same(const request *got, const request *want) {
    const size_t n = (size_t)want->n;
    assert_int_equal(got->status, want->status);
    assert_int_equal(got->n, want->n);
    assert_memory_equal(got->text, want->text, n * sizeof *want->text);
    assert_memory_equal(got->logprob, want->logprob, n * sizeof *want->logprob);
    const size_t n_top = (size_t)want->sampling.params.n_top;
    for (size_t at = 0; at < n; at++) {
        assert_memory_equal(got->top[at], want->top[at], n_top * sizeof(hd_alternative));
    }
}

/* Requests with sampling, penalties, alternatives and bias; drafts by the MTP layer. */
static void init_mixed(request requests[SLOTS], const machine *on, uint64_t seed) {
    static const hd_logit_bias bias[] = {
        {40, 2.0f},
        {41, 1.0f}
    };
    for (int32_t i = 0; i < SLOTS; i++) {
        request *r = &requests[i];
        hd_sampling *p = &r->sampling.params;
        init_request(r, on, i, 3 + 11 * i, seed + (uint64_t)i);
        p->temperature = i ? 0.4f * (float)i : 0.0f;
        p->repetition_penalty = i % 2 ? 1.3f : 0.0f;
        p->frequency_penalty = i == 3 ? 0.4f : 0.0f;
        p->top_p = i == 2 ? 0.9f : 0.0f;
        p->n_top = i == 1 ? 4 : 0;
        p->n_bias = i == 2 ? 2 : 0;
        r->sampling.bias = bias;
        r->most = 90 + 30 * i;
        r->chunk = 9;
        r->announces = true;
        r->n_drafts = on->spec && hd_weights_n_mtp(on->weights) ? i : 0;
    }
}

static void init_prompt(request *r, int32_t n_prompt, uint64_t seed) {
    static request other;
    init_request(&other, &m, r->slot, n_prompt, seed + (uint64_t)r->slot);
    memcpy(r->text, other.text, sizeof r->text);
    r->n = r->n_prompt = n_prompt;
}

static void mixed_crowd(uint64_t seed) {
    init_mixed(crowd, &m, seed);
}

/* Returns whether tool calls opened, and checks that the grammar allows what follows. */
static bool check_calls(const hd_grammar *g, const request *r) {
    static hd_grammar_state s;
    hd_grammar_watch w = {0};
    bool opened = false;
    for (int32_t at = r->n_prompt; at < r->n; at++) {
        if (!opened) {
            opened = hd_grammar_watch_token(m.vocab, g, &w, &s, r->text[at]);
        } else {
            assert_true(hd_grammar_advance_token(m.vocab, g, &s, r->text[at]));
        }
    }
    return opened;
}

static void run_mixed(uint64_t seed, int32_t ahead) {
    mixed_crowd(seed);
    for (int32_t i = 0; i < SLOTS; i++) {
        crowd[i].ahead = ahead;
        enter(&m, &crowd[i]);
    }
    run_all(&m, crowd, SLOTS);
}

/* Layers of V4.1 drop rows, which the host chooses. */
static bool takes_chunks(size_t model) {
    return strncmp(models[model], "v41", 3) != 0;
}

static void ban_end(request *r) {
    static const int32_t end = EOS;
    r->sampling.ban = &end;
    r->sampling.params.n_ban = 1;
    r->sampling.params.ban_until = POSITIONS;
}

/* Pages as the scheduler assigns them: exactly for a step, or a step further. In the first
 * case, a sequence that gets a new page is padding for a step. */
static void texts_are_the_same(void **state) {
    (void)state;
    static const int32_t ahead[] = {0, 1, 2 * HD_MAX_STEP_TOKENS};
    for (size_t i = 0; i < HD_LEN(models); i += models_apart()) {
        for (size_t a = 0; a < 1 + HD_LEN(ahead); a++) {
            open_either(models[i], 0.0f, a > 0);
            run_mixed(300 + i, a ? ahead[a - 1] : 0);
            if (a == 0) memcpy(before, crowd, sizeof before);
            for (int32_t r = 0; r < SLOTS; r++) {
                check_same(&crowd[r], &before[r]);
                assert_int_equal(crowd[r].drafted, before[r].drafted);
                assert_int_equal(crowd[r].steps, before[r].steps);
            }
            if (a) {
                assert_true(replayed(40));
            }
            close_machine(&m);
        }
    }
}

/* Prompts of several chunks come while others decode, whose next chunk is announced or is not. Steps are launched ahead and have the same bits as chunks of other sizes. */
static void chunks_run_beside_decoding(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(models); i += models_apart()) {
        for (int32_t fixed = 0; fixed < 2; fixed++) {
            open_either(models[i], 0.0f, fixed);
            init_mixed(crowd, &m, 800 + i);
            for (int32_t r = 0; r < SLOTS; r++) {
                request *q = &crowd[r];
                init_prompt(q, 20 + 60 * r, 800 + i);
                q->most = q->n_prompt + 60;
                q->chunk = fixed ? 7 + 9 * r : 16;
                q->announces = fixed;
                q->ahead = r == 2 ? 1 : 0;
            }
            bool runs = true;
            for (int32_t at = 0; runs; at++) {
                if (at % 3 == 0 && at / 3 < SLOTS) enter(&m, &crowd[at / 3]);
                crowd[2].announces = fixed && at % 5 < 3;
                step(&m, crowd, hd_min_i32(at / 3 + 1, SLOTS));
                runs = at / 3 < SLOTS;
                for (int32_t r = 0; r < SLOTS; r++) runs |= !crowd[r].ended;
            }
            if (!fixed) memcpy(before, crowd, sizeof before);
            for (int32_t r = 0; r < SLOTS; r++) check_same(&crowd[r], &before[r]);
            close_machine(&m);
        }
    }
}

enum { PROMPTS = 10, LEAST_CHUNK = 26, SIZES = 8 };

/* Prompts follow each other beside three requests that decode, in chunks of changing numbers of rows
 * that have one shape. */
static void run_prompts(request *done, bool fixed, uint64_t seed) {
    request *q = &crowd[SLOTS - 1];
    init_mixed(crowd, &m, seed);
    for (int32_t r = 0; r + 1 < SLOTS; r++) {
        crowd[r].most = POSITIONS - 8;
        crowd[r].n_drafts = crowd[2].n_drafts ? 1 : 0;
        ban_end(&crowd[r]);
        enter(&m, &crowd[r]);
    }
    for (int32_t p = 0, at = 0; p < PROMPTS; p++) {
        init_request(q, &m, SLOTS - 1, 300 + 7 * p, seed + 10 + (uint64_t)p);
        q->most = q->n_prompt + 3;
        q->chunk = q->next_chunk = fixed ? LEAST_CHUNK : 40;
        q->announces = fixed;
        ban_end(q);
        enter(&m, q);
        for (; !q->ended; at++) {
            step(&m, crowd, SLOTS);
            q->chunk = q->next_chunk;
            if (fixed) q->next_chunk = LEAST_CHUNK + (int32_t)(luck(seed, at) % SIZES);
        }
        done[p] = *q;
    }
}

static void chunks_are_replayed(void **state) {
    (void)state;
    static request done[2][PROMPTS];
    for (size_t i = 0; i < HD_LEN(models); i += models_apart()) {
        for (int32_t fixed = 0; fixed < 2; fixed++) {
            open_either(models[i], 0.0f, fixed);
            run_prompts(done[fixed], fixed, 900 + i);
            const hd_model_runner_times *t = hd_model_runner_read_times(m.model_runner);
            if (fixed && takes_chunks(i)) assert_true(t->mixed_ahead >= 60 && replayed(90));
            if (!fixed) memcpy(before, crowd, sizeof before);
            for (int32_t p = 0; p < PROMPTS; p++) check_same(&done[fixed][p], &done[0][p]);
            for (int32_t r = 0; r + 1 < SLOTS; r++) {
                crowd[r].n = before[r].n = hd_min_i32(crowd[r].n, before[r].n);
                check_same(&crowd[r], &before[r]);
            }
            close_machine(&m);
        }
    }
}

/* Masks are uploaded with the inputs; unconstrained rows are beside them; others draft. */
static void constrained_rows_stay_in_the_step(void **state) {
    (void)state;
    static const char pattern[] = "([a-f]{1,3}[0-9 ]){30,}";
    const int32_t forced[] = {id_of('a'), id_of('1')};
    const hd_grammar_args args = {
        .kind = HD_GRAMMAR_REGEX, .text = pattern, .n = sizeof pattern - 1};
    hd_grammar *answer_grammar;
    assert_int_equal(hd_grammar_open(&answer_grammar, &args, NULL), HD_OK);
    for (size_t i = 1; i < HD_LEN(models); i += models_apart()) {
        for (int32_t fixed = 0; fixed < 2; fixed++) {
            open_either(models[i], 0.0f, fixed);
            mixed_crowd(40 + i);
            crowd[0].constraint.grammar = answer_grammar;
            crowd[1].constraint = (hd_constraint){.reasoning = true,
                                                  .think = -1,
                                                  .unthink = UNTHINK,
                                                  .max_reasoning = 30,
                                                  .forced = forced,
                                                  .n_forced = HD_LEN(forced),
                                                  .grammar = answer_grammar};
            for (int32_t r = 0; r < SLOTS; r++) {
                if (r < 2) crowd[r].n_drafts = 0;
                crowd[r].sampling.constraint = r < 2 ? &crowd[r].constraint : NULL;
                enter(&m, &crowd[r]);
            }
            run_all(&m, crowd, SLOTS);
            if (!fixed) memcpy(before, crowd, sizeof before);
            for (int32_t r = 0; r < SLOTS; r++) {
                check_same(&crowd[r], &before[r]);
                assert_int_equal(crowd[r].steps, before[r].steps);
            }
            assert_true(crowd[0].n > 60 && crowd[1].n > 60);
            if (fixed) assert_true(replayed(crowd[1].steps / 2));
            close_machine(&m);
        }
    }
    hd_grammar_close(answer_grammar);
}

/* Answers are unconstrained, with drafts and the host ahead, until tool calls open, in the
 * content or in the reasoning; from there on they are constrained. */
static void calls_open_in_the_step(void **state) {
    (void)state;
    static const char tools[] =
        "[{\"name\":\"ab\",\"strict\":true,\"parameters\":{\"type\":\"object\","
        "\"properties\":{\"a\":{\"enum\":[1,23]},\"b\":{\"type\":\"boolean\"}}}}]";
    const hd_logit_bias bias[] = {
        {id_of('\xf8'), 3.0f},
        {id_of('\xfa'), 3.0f}
    };
    const hd_grammar_args args = {
        .kind = HD_GRAMMAR_CALLS,
        .calls = {.tools = tools,
                  .n_tools = sizeof tools - 1,
                  .format = HD_REPLY_V31,
                  .marks = 0x1f,
                  .flagged = true,
                  .most = 3}
    };
    hd_grammar *calls;
    assert_int_equal(hd_grammar_open(&calls, &args, NULL), HD_OK);
    for (size_t i = 1; i < HD_LEN(models); i += models_apart()) {
        int32_t n_called = 0, n_graph = 0;
        for (uint64_t seed = 0; seed < (is_brief() ? 1 : 3); seed++) {
            for (int32_t fixed = 0; fixed < 2; fixed++) {
                open_either(models[i], 0.0f, fixed);
                mixed_crowd(70 + seed);
                for (int32_t r = 0; r < SLOTS; r++) {
                    crowd[r].constraint = (hd_constraint){.reasoning = r % 2,
                                                          .think = -1,
                                                          .unthink = UNTHINK,
                                                          .free = true,
                                                          .grammar = calls};
                    crowd[r].sampling.constraint = r < 3 ? &crowd[r].constraint : NULL;
                    crowd[r].sampling.bias = bias;
                    crowd[r].sampling.params.n_bias = 2;
                    crowd[r].sampling.params.temperature = 1.0f;
                    crowd[r].sampling.params.repetition_penalty = 0.0f;
                    crowd[r].sampling.params.frequency_penalty = r == 2 ? 0.1f : 0.0f;
                    enter(&m, &crowd[r]);
                }
                run_all(&m, crowd, SLOTS);
                if (!fixed) memcpy(before, crowd, sizeof before);
                for (int32_t r = 0; r < SLOTS; r++) check_same(&crowd[r], &before[r]);
                n_graph += fixed && replayed(0);
                for (int32_t r = 0; r < 3; r++) n_called += check_calls(calls, &crowd[r]);
                close_machine(&m);
            }
        }
        assert_true(n_called > 0 && n_graph > 0);
    }
    hd_grammar_close(calls);
}

/* Every request changes, at some time, its draft depth, starts late, moves to another slot,
 * gets the drafts of an oracle, or has a constraint. */
static void whoever_comes_and_goes(void **state) {
    (void)state;
    for (size_t i = 1; i < HD_LEN(models); i += models_apart()) {
        for (uint64_t seed = 0; seed < (is_brief() ? 1 : is_long() ? 4 : 2); seed++) {
            open_either(models[i], 0.0f, false);
            run_mixed(seed, 0);
            memcpy(before, crowd, sizeof before);
            close_machine(&m);
            open_either(models[i], 0.0f, true);
            mixed_crowd(seed);
            crowd[3].sampling.constraint = seed == 1 ? &crowd[3].constraint : NULL;
            for (int32_t parity = 0; parity < 400; parity++) {
                int32_t running = 0;
                for (int32_t r = 0; r < SLOTS; r++) {
                    request *q = &crowd[r];
                    const uint32_t x = luck(seed, SLOTS * parity + r);
                    if (parity == 7 * r) enter(&m, q);
                    if (parity < 7 * r || q->ended) continue;
                    running++;
                    if (x % 16 == 0) q->n_drafts = (int32_t)(x >> 8) % 5;
                    if (x % 32 == 1 && r % 2 == 0)
                        q->oracle = q->oracle ? NULL : before[r].text;
                    q->one_wrong_in = 3;
                    q->ahead = (int32_t)(x >> 4) % 3 * HD_MAX_STEP_TOKENS;
                }
                if (!running && parity > 7 * SLOTS) break;
                if (parity % 29 == 28) { /* all move to the next slot */
                    for (int32_t r = 0; r < SLOTS; r++) {
                        crowd[r].slot = (crowd[r].slot + 1) % SLOTS;
                        if (parity >= 7 * r && !crowd[r].ended) enter(&m, &crowd[r]);
                    }
                }
                if (running) step(&m, crowd, hd_min_i32(parity / 7 + 1, SLOTS));
            }
            for (int32_t r = 0; r < SLOTS; r++) check_same(&crowd[r], &before[r]);
            assert_true(replayed(0));
            close_machine(&m);
        }
    }
}

/* ---- several ranks ---- */

typedef struct follower {
    machine m;
    hd_status st;
    hd_err err;
} follower;

static void *follow(void *arg) {
    follower *f = arg;
    f->st = hd_model_runner_follow(f->m.model_runner, &f->err);
    return NULL;
}

/* The crowd's requests on two ranks, which launch the same steps. */
static void run_on_two(const char *name, machine_rank r, float forced_acceptance,
                       uint64_t seed) {
    static follower f;
    pthread_t thread;
    assert_int_equal(hd_parallel_world(&r.parallel), 2);
    assert_int_equal(hd_comm_local_open(&r.world, &r.parallel, NULL), HD_OK);
    open_machine_rank(&m, backend(), name, forced_acceptance, &r);
    r.number = 1;
    open_machine_rank(&f.m, backend(), name, forced_acceptance, &r);
    assert_int_equal(pthread_create(&thread, NULL, follow, &f), 0);
    run_mixed(seed, 2 * HD_MAX_STEP_TOKENS);
    const hd_model_runner_times *times = hd_model_runner_read_times(m.model_runner);
    assert_true(times->steps > 20);
    assert_int_equal(times->micro_steps > 20, r.n_micro > 1);
    hd_model_runner_end(m.model_runner);
    pthread_join(thread, NULL);
    if (f.st != HD_OK) fail_msg("%s", f.err.msg);
    hd_stream_wait(m.stream); /* both, before either goes: they read each other's memory */
    hd_stream_wait(f.m.stream);
    close_machine(&f.m);
    close_machine(&m);
    hd_comm_local_close(r.world);
}

static void ranks_launch_the_same(void **state) {
    (void)state;
    static const int32_t tp_ep[][2] = {
        {2, 1},
        {1, 2},
        {2, 2}
    };
    for (size_t i = 0; i < HD_LEN(models); i += models_apart()) {
        const float forced = i == 1 ? 1.7f : 0.0f;
        open_either(models[i], forced, false);
        machine_rank r = {.parallel =
                              hd_parallel_common(tp_ep[i % 3][0], 1, tp_ep[i % 3][1], m.spec),
                          .n_micro = 1 + (int32_t)i % 4};
        run_mixed(500 + i, 0);
        memcpy(before, crowd, sizeof before);
        close_machine(&m);
        run_on_two(models[i], r, forced, 500 + i);
        for (int32_t k = 0; k < SLOTS; k++) {
            check_same(&crowd[k], &before[k]);
            assert_int_equal(crowd[k].accepted, before[k].accepted);
        }
    }
}

/* An attention group, whose requests come one after the other. */
typedef struct attention_group {
    machine m;
    request crowd[SLOTS];
    int32_t number;
    bool runs;
} attention_group;

static attention_group groups[2];
static pthread_barrier_t round_end;

/* Groups run as many steps as each other, also when they have nothing to do. */
static void *run_group(void *arg) {
    attention_group *g = arg;
    for (int32_t round = 0, others = true; others; round++) {
        int32_t n = 0;
        g->runs = false;
        for (int32_t r = 0; r < SLOTS; r++) {
            const int32_t at = 12 * r + 20 * g->number;
            if (round == at) enter(&g->m, &g->crowd[r]);
            if (round >= at) n = r + 1;
            g->runs |= round < at || !g->crowd[r].ended;
        }
        step(&g->m, g->crowd, n);
        pthread_barrier_wait(&round_end);
        others = groups[0].runs || groups[1].runs;
        pthread_barrier_wait(&round_end);
    }
    return NULL;
}

static void run_groups(const char *name, int32_t n_micro, uint64_t seed) {
    pthread_t threads[2];
    machine_rank r = {.parallel = hd_parallel_common(1, 2, 2, m.spec), .n_micro = n_micro};
    assert_int_equal(hd_comm_local_open(&r.world, &r.parallel, NULL), HD_OK);
    for (r.number = 0; r.number < 2; r.number++) {
        attention_group *g = &groups[r.number];
        g->number = r.number;
        open_machine_rank(&g->m, backend(), name, 0.0f, &r);
        init_mixed(g->crowd, &g->m, seed + 50 * (uint64_t)r.number);
    }
    pthread_barrier_init(&round_end, NULL, 2);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, run_group, &groups[i]), 0);
    }
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&round_end);
    for (int i = 0; i < 2; i++) hd_stream_wait(groups[i].m.stream);
    for (int i = 0; i < 2; i++) {
        assert_true(hd_model_runner_read_times(groups[i].m.model_runner)->steps > 20);
        close_machine(&groups[i].m);
    }
    hd_comm_local_close(r.world);
}

static void attention_groups_launch_the_same(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(models); i++) {
        open_either(models[i], 0.0f, false);
        run_groups(models[i], 1 + (int32_t)i % 3, 600 + i);
        for (uint64_t g = 0; g < 2; g++) {
            run_mixed(600 + i + 50 * g, 0);
            for (int32_t k = 0; k < SLOTS; k++) check_same(&groups[g].crowd[k], &crowd[k]);
        }
        close_machine(&m);
    }
}

static void benchmarks_accept_the_same(void **state) {
    (void)state;
    static const float means[] = {0.6f, 1.7f, 9.0f};
    for (size_t i = 0; i < HD_LEN(means); i++) {
        for (int32_t fixed = 0; fixed < 2; fixed++) {
            open_either("v3_small_mtp", means[i], fixed);
            run_mixed(77, 0);
            if (!fixed) memcpy(before, crowd, sizeof before);
            for (int32_t r = 0; r < SLOTS; r++) {
                check_same(&crowd[r], &before[r]);
                assert_int_equal(crowd[r].accepted, before[r].accepted);
            }
            close_machine(&m);
        }
    }
}

/* Padding rows reach furthest if another sequence drafts deepest. */
static void texts_end_with_the_context(void **state) {
    (void)state;
    for (size_t i = 1; i < HD_LEN(models); i += models_apart()) {
        for (int32_t fixed = 0; fixed < 2; fixed++) {
            open_either(models[i], 0.0f, fixed);
            for (int32_t r = 0; r < SLOTS; r++) {
                init_request(&crowd[r], &m, r, POSITIONS - 40 - 9 * r, 900 + (uint64_t)r);
                crowd[r].n_drafts = r == SLOTS - 1 ? HD_MAX_DRAFTS : r % 2;
                crowd[r].chunk = STEP_ROWS / SLOTS;
                ban_end(&crowd[r]);
                enter(&m, &crowd[r]);
            }
            crowd[SLOTS - 1].most = POSITIONS - 9;
            run_all(&m, crowd, SLOTS);
            if (!fixed) memcpy(before, crowd, sizeof before);
            for (int32_t r = 0; r < SLOTS; r++) check_same(&crowd[r], &before[r]);
            close_machine(&m);
        }
    }
}

/* A sequence that certainly ends is not in the next step, and padding rows do not count as
 * expert load. */
static void loads_are_the_same(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(models); i += models_apart()) {
        static int64_t load[2][32 * 64];
        for (int32_t fixed = 0; fixed < 2; fixed++) {
            open_either(models[i], 0.0f, fixed);
            assert_true(hd_model_n_expert_rows(m.spec) <= (int64_t)HD_LEN(load[0]));
            for (int32_t r = 0; r < SLOTS; r++) {
                init_request(&crowd[r], &m, r, 12, 500 + (uint64_t)r);
                crowd[r].most = 40 + 7 * r;
                ban_end(&crowd[r]);
                enter(&m, &crowd[r]);
            }
            run_all(&m, crowd, SLOTS);
            assert_int_equal(hd_model_runner_read_experts(m.model_runner, load[fixed], NULL),
                             HD_OK);
            close_machine(&m);
        }
        assert_memory_equal(load[0], load[1], sizeof load[0]);
    }
}

/* ---- records of choices ---- */

static hd_recorder *recorder_of(const machine *on) {
    const hd_model_spec *c = on->spec;
    static int32_t map[16 * 64];
    const hd_record_head head = {.layers = c->n_layers + c->n_mtp,
                                 .n_mtp = c->n_mtp,
                                 .experts = c->route.n_experts,
                                 .top_k = c->route.top_k,
                                 .slots = c->route.n_experts,
                                 .ranks = 1,
                                 .nodes = 1,
                                 .slot_expert = map};
    hd_err err = {0};
    hd_recorder *r;
    assert_true(head.layers * head.slots <= (int32_t)HD_LEN(map));
    for (int32_t i = 0; i < head.layers * head.slots; i++) {
        map[i] = c->layers[i / head.slots].mlp == HD_MLP_DENSE ? -1 : i % head.slots;
    }
    if (hd_recorder_open(&r, &head, 1 << 22, &err) != HD_OK) fail_msg("%s", err.msg);
    return r;
}

/* Returns the bytes of a record. */
static uint8_t *bytes_of(hd_recorder *r, size_t *n) {
    enum { MOST = 1 << 22 };
    hd_recorder_end(r);
    uint8_t *bytes = malloc(MOST);
    assert_non_null(bytes);
    *n = hd_recorder_take(r, hd_recorder_read_state(r).begun, bytes, MOST);
    assert_int_equal(hd_recorder_read_state(r).dropped, 0);
    return bytes;
}

/* Adds up what a record counts, in the order of hd_model_expert_rows(). */
static void add_up(const uint8_t *bytes, size_t n, int64_t *load) {
    hd_record_reader r;
    hd_err err = {0};
    FILE *in = fmemopen((void *)(uintptr_t)bytes, n, "rb");
    assert_non_null(in);
    if (hd_record_open(&r, in, "a record", &err) != HD_OK) fail_msg("%s", err.msg);
    const int64_t per_layer = r.head.experts, n_layers = r.head.layers - r.head.n_mtp;
    for (;;) {
        if (hd_record_next(&r, &err) != HD_OK) fail_msg("%s", err.msg);
        if (r.ended) break;
        const bool draft = r.row.phase == HD_RECORD_DRAFT;
        const int64_t from = draft ? n_layers * per_layer : 0;
        int64_t *to = load + (int64_t)r.row.phase * n_layers * per_layer;
        for (int64_t i = 0; i < (draft ? r.head.n_mtp : n_layers) * per_layer; i++) {
            to[i] += r.row.logical[from + i];
        }
    }
    assert_false(r.cut);
    hd_record_close(&r);
    fclose(in);
}

static void run_recorded(bool fixed, hd_record_mode mode, uint8_t **bytes, size_t *n) {
    hd_recorder *r = recorder_of(&m);
    hd_recorder_begin(r, mode);
    hd_model_runner_record(m.model_runner, r);
    for (int32_t i = 0; i < SLOTS; i++) {
        init_request(&crowd[i], &m, i, 12, 500 + (uint64_t)i);
        crowd[i].most = 30 + 7 * i;
        crowd[i].chunk = 5;
        crowd[i].n_drafts = i; /* fewer than the step has */
        ban_end(&crowd[i]);
        enter(&m, &crowd[i]);
    }
    run_all(&m, crowd, SLOTS);
    assert_true(!fixed || replayed(10));
    *bytes = bytes_of(r, n);
    hd_recorder_close(r);
}

/* Counts the rows that one record has and the other lacks; both are sorted. */
static int32_t n_lacking(const uint8_t *has, size_t n_has, const uint8_t *other, size_t n_other,
                         size_t each) {
    int32_t lacking = 0;
    size_t at = 0;
    for (size_t i = 0; i < n_has; i += each) {
        while (at < n_other && memcmp(other + at, has + i, each) < 0) at += each;
        const bool found = at < n_other && memcmp(other + at, has + i, each) == 0;
        at += found ? each : 0;
        lacking += !found;
    }
    return lacking;
}

static size_t row_bytes;

static int by_bytes(const void *a, const void *b) {
    return memcmp(a, b, row_bytes);
}

/* A record of every token has the same rows if steps are graphs. Only in the last step of a text
 * a graph may have continued another token than the last; then it makes no further drafts. */
static void records_have_the_same_rows(void **state) {
    (void)state;
    for (size_t k = 0; k < HD_LEN(models); k++) {
        uint8_t *bytes[2];
        size_t n[2], head = 0;
        for (int32_t fixed = 0; fixed < 2; fixed++) {
            open_either(models[k], 0.0f, fixed);
            run_recorded(fixed, HD_RECORD_PER_TOKEN, &bytes[fixed], &n[fixed]);
            const int32_t layers = m.spec->n_layers + m.spec->n_mtp;
            head = 56 + 2 * (size_t)layers * (size_t)m.spec->route.n_experts;
            row_bytes = 24 + (size_t)layers * (size_t)m.spec->route.top_k;
            n[fixed] -= head;
            assert_int_equal(n[fixed] % row_bytes, 0);
            qsort(bytes[fixed] + head, n[fixed] / row_bytes, row_bytes, by_bytes);
            close_machine(&m);
        }
        const uint8_t *const rows[] = {bytes[0] + head, bytes[1] + head};
        assert_int_equal(n_lacking(rows[1], n[1], rows[0], n[0], row_bytes), 0);
        assert_true(n_lacking(rows[0], n[0], rows[1], n[1], row_bytes) <= SLOTS);
        free(bytes[0]);
        free(bytes[1]);
    }
}

/* What a record of every pass counts is what the device counted. */
static void records_agree_with_counters(void **state) {
    (void)state;
    static int64_t load[32 * 64], counted[2][32 * 64];
    for (size_t k = 0; k < DRAFTS_RECORDED; k++) {
        memset(counted, 0, sizeof counted);
        for (int32_t fixed = 0; fixed < 2; fixed++) {
            uint8_t *bytes;
            size_t n;
            open_either(models[k], 0.0f, fixed);
            run_recorded(fixed, HD_RECORD_PER_PASS, &bytes, &n);
            add_up(bytes, n, counted[fixed]);
            free(bytes);
            const size_t all = (size_t)hd_model_n_expert_rows(m.spec) * sizeof *load;
            const size_t steps = all - (size_t)(m.spec->n_mtp * m.spec->route.n_experts) * 8;
            assert_int_equal(hd_model_runner_read_experts(m.model_runner, load, NULL), HD_OK);
            if (!fixed) assert_memory_equal(counted[0], load, all);
            assert_memory_equal(counted[fixed], counted[0], steps);
            close_machine(&m);
        }
    }
}

/* ---- experts that move ---- */

enum { MAX_SLOTS = 64 };

static int32_t n_captured(void) {
    const int64_t graphs = hd_model_runner_read_times(m.model_runner)->graphs;
    return hd_device_has_graphs(m.device) ? (int32_t)graphs : tape_recorded();
}

/* Exchanges the experts of two slots of every layer. */
static void swap_slots(int32_t at) {
    for (int32_t l = 0; l < m.spec->n_layers + m.spec->n_mtp; l++) {
        const hd_expert_map *map = hd_weights_expert_map(m.weights, l);
        int32_t expert[MAX_SLOTS];
        if (!map) continue;
        const int32_t n = map->n_slots;
        assert_true(n <= MAX_SLOTS);
        memcpy(expert, map->expert, (size_t)n * sizeof *expert);
        const int32_t a = (int32_t)(luck((uint64_t)l, 2 * at) % (uint32_t)n);
        const int32_t b = (int32_t)(luck((uint64_t)l, 2 * at + 1) % (uint32_t)n);
        expert[a] = map->expert[b];
        expert[b] = map->expert[a];
        assert_int_equal(hd_weights_place_experts(m.weights, l, expert, m.stream, NULL), HD_OK);
        assert_int_equal(map->version, at + 1);
    }
}

/* Sends rows to wrong slots: the map without the matrices. */
static void spoil_maps(void) {
    for (int32_t l = 0; l < m.spec->n_layers; l++) {
        const hd_expert_map *map = hd_weights_expert_map(m.weights, l);
        int32_t slot[MAX_SLOTS], *to;
        if (!map) continue;
        const int32_t n = m.spec->route.n_experts;
        for (int32_t e = 0; e < n; e++) slot[e] = (e + 1) % n;
        memcpy(&to, &map->slot, sizeof to);
        hd_stream_upload(m.stream, to, slot, (size_t)n * sizeof *slot);
    }
}

typedef enum moves { STAY, SWAP, SPOIL } moves;

/* Runs a crowd whose experts move before every step; returns the captured graphs. */
static int32_t run_moving(const char *name, moves how, int64_t *load) {
    open_either(name, 0.0f, true);
    mixed_crowd(70);
    for (int32_t r = 0; r < SLOTS; r++) enter(&m, &crowd[r]);
    if (how == SPOIL) spoil_maps();
    bool runs = true;
    for (int32_t at = 0; runs; at++) {
        if (how == SWAP) swap_slots(at);
        step(&m, crowd, SLOTS);
        runs = false;
        for (int32_t r = 0; r < SLOTS; r++) runs |= !crowd[r].ended;
    }
    assert_true(replayed(40));
    assert_int_equal(hd_model_runner_read_experts(m.model_runner, load, NULL), HD_OK);
    const int32_t n = n_captured();
    close_machine(&m);
    return n;
}

static bool same_probabilities(void) {
    bool is_same = true;
    for (int32_t r = 0; r < SLOTS; r++) {
        const size_t n = (size_t)before[r].n;
        is_same &= crowd[r].n == before[r].n &&
                   memcmp(crowd[r].logprob, before[r].logprob, n * sizeof(float)) == 0;
    }
    return is_same;
}

/* Captured steps read the slots when they run: no graph is captured again, and no bit of a
 * probability and no count of an expert's rows changes. */
static void experts_move_between_steps(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(models); i += models_apart()) {
        static int64_t load[2][32 * 64];
        memset(load, 0, sizeof load);
        const int32_t n = run_moving(models[i], STAY, load[0]);
        memcpy(before, crowd, sizeof before);
        assert_int_equal(run_moving(models[i], SWAP, load[1]), n);
        for (int32_t r = 0; r < SLOTS; r++) check_same(&crowd[r], &before[r]);
        assert_memory_equal(load[0], load[1], sizeof load[0]);
        run_moving(models[i], SPOIL, load[1]);
        assert_false(same_probabilities());
    }
}

static hd_rms_norm_fn *sound_norm;
static int32_t norms_left; /* norm calls until one fails */

static void failing_norm(hd_stream *s, const hd_rms_norm_args *a) {
    if (norms_left-- == 0) hd_stream_fail(s, HD_EDEVICE, "rms_norm: no such luck");
    sound_norm(s, a);
}

/* An operator fails in a prefill, in a single step, in one launched ahead, and during
 * capture: the step fails, returns no token, and has no later effect. */
static void a_failed_operator_fails_the_step(void **state) {
    (void)state;
    static const int32_t steps[] = {0, 9, 14, 40};
    open_either("v4_small_mtp", 0.0f, false);
    run_mixed(60, 0);
    memcpy(before, crowd, sizeof before);
    close_machine(&m);
    for (size_t t = 0; t < HD_LEN(steps); t++) {
        hd_err err = {0};
        open_either("v4_small_mtp", 0.0f, true);
        sound_norm = m.ops.rms_norm;
        m.ops.rms_norm = failing_norm;
        norms_left = INT32_MAX;
        mixed_crowd(60);
        for (int32_t r = 0; r < SLOTS; r++) enter(&m, &crowd[r]);
        for (int32_t parity = 0; parity < steps[t]; parity++) step(&m, crowd, SLOTS);
        norms_left = 3;
        int32_t tries = 0; /* a replayed step calls no operator */
        while (try_step(&m, crowd, SLOTS, &err) == HD_OK && tries < 40) tries++;
        assert_true(tries < 40);
        assert_int_equal(err.status, HD_EDEVICE);
        assert_non_null(strstr(err.msg, "no such luck"));
        for (int32_t r = 0; r < SLOTS; r++) {
            if (!crowd[r].ended) enter(&m, &crowd[r]);
        }
        run_all(&m, crowd, SLOTS);
        for (int32_t r = 0; r < SLOTS; r++) check_same(&crowd[r], &before[r]);
        close_machine(&m);
    }
}

int test_decode_graph(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(texts_are_the_same),
        cmocka_unit_test(chunks_run_beside_decoding),
        cmocka_unit_test(chunks_are_replayed),
        cmocka_unit_test(constrained_rows_stay_in_the_step),
        cmocka_unit_test(calls_open_in_the_step),
        cmocka_unit_test(whoever_comes_and_goes),
        cmocka_unit_test(ranks_launch_the_same),
        cmocka_unit_test(attention_groups_launch_the_same),
        cmocka_unit_test(benchmarks_accept_the_same),
        cmocka_unit_test(texts_end_with_the_context),
        cmocka_unit_test(loads_are_the_same),
        cmocka_unit_test(records_have_the_same_rows),
        cmocka_unit_test(records_agree_with_counters),
        cmocka_unit_test(experts_move_between_steps),
        cmocka_unit_test(a_failed_operator_fails_the_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
