/* test_model_runner.c - constraints, prompt log-probabilities, drafts and expert loads of
 * the model runner, on small random models. */
#include "fakes/crowd.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

static machine m;
static request crowd[SLOTS], before[SLOTS];

static const char *const drafting_models[] = {"v3_small_mtp", "v32_rope_mtp", "v4_small_mtp",
                                              "v4_dspark", "v41_small"};

/* ---- constrained answers ---- */

static const char schema[] =
    "{\"type\":\"object\",\"properties\":{\"name\":{\"type\":\"string\",\"maxLength\":6},"
    "\"tags\":{\"type\":\"array\",\"items\":{\"enum\":[\"a\",\"bc\",12]},\"maxItems\":3},"
    "\"n\":{\"type\":\"integer\",\"minimum\":-5,\"maximum\":120},\"ok\":{\"type\":\"boolean\"}}"
    ","
    "\"required\":[\"name\",\"tags\",\"n\",\"ok\"]}";
static const char pattern[] = "xyz((ab|12)+!|[0-9]{3,5})";

typedef struct grammars {
    hd_grammar *schema, *pattern;
    int32_t forced[3];
} grammars;

static hd_grammar *open_answer_grammar(hd_grammar_kind kind, const char *text) {
    const hd_grammar_args a = {.kind = kind, .text = text, .n = strlen(text)};
    hd_grammar *g;
    hd_err err = {0};
    if (hd_grammar_open(&g, &a, &err) != HD_OK) fail_msg("%s", err.msg);
    return g;
}

static void open_grammars(grammars *f) {
    *f = (grammars){
        open_answer_grammar(HD_GRAMMAR_JSON_SCHEMA, schema),
        open_answer_grammar(HD_GRAMMAR_REGEX, pattern),
        {id_of('x'), id_of('y'), id_of('z')}
    };
}

static void close_grammars(grammars *f) {
    hd_grammar_close(f->schema);
    hd_grammar_close(f->pattern);
}

/* Four requests: unconstrained sampling; a schema at once; reasoning with an end, then a
 * pattern whose first tokens are forced; reasoning that the model opens itself, then a
 * schema. */
static void constraint_crowd(const grammars *f, uint64_t seed, int32_t n_drafts) {
    static const hd_logit_bias thinks = {THINK, 100.0f};
    for (int32_t i = 0; i < SLOTS; i++) {
        request *r = &crowd[i];
        init_request(r, &m, i, 5 + 9 * i, seed + (uint64_t)i);
        r->sampling.params.temperature = i % 2 ? 1.0f : 0.0f;
        r->sampling.params.repetition_penalty = 1.2f;
        r->n_drafts = n_drafts;
        r->sampling.constraint = &r->constraint;
    }
    crowd[0].sampling.constraint = NULL;
    crowd[0].sampling.params.temperature = 1.0f;
    crowd[0].most = 60;
    crowd[1].constraint.grammar = f->schema;
    crowd[2].constraint = (hd_constraint){.reasoning = true,
                                          .think = -1,
                                          .unthink = UNTHINK,
                                          .max_reasoning = 7,
                                          .forced = f->forced,
                                          .n_forced = 3,
                                          .grammar = f->pattern};
    crowd[3].constraint.think = THINK;
    crowd[3].constraint.max_reasoning = 12;
    crowd[3].constraint.grammar = f->schema;
    crowd[3].sampling.params.n_bias = 1;
    crowd[3].sampling.bias = &thinks;
}

static void check_json(const char *text) {
    json_error_t why;
    json_t *j = json_loads(text, JSON_REJECT_DUPLICATES, &why);
    if (!j) fail_msg("%s: %s", text, why.text);
    assert_true(json_is_string(json_object_get(j, "name")));
    assert_true(json_array_size(json_object_get(j, "tags")) <= 3);
    assert_true(json_is_boolean(json_object_get(j, "ok")));
    assert_in_range(json_integer_value(json_object_get(j, "n")) + 5, 0, 125);
    assert_int_equal(json_object_size(j), 4);
    json_decref(j);
}

/* Checks that the grammar allows everything up to the end of sequence. */
static void check_answer_grammar(const hd_grammar *g, const request *r, int32_t from) {
    static hd_grammar_state s;
    char text[4 * POSITIONS];
    assert_int_equal(r->status, HD_OK);
    assert_int_equal(r->text[r->n - 1], EOS);
    text_of(r->text + from, r->n - 1 - from, text);
    hd_grammar_start(g, &s);
    assert_true(hd_grammar_advance(g, &s, (const uint8_t *)text, strlen(text)));
    assert_true(hd_grammar_can_end(g, &s));
    if (text[0] == '{') check_json(text);
}

/* Returns the index after the reasoning, which has at most `most` tokens and no end of
 * sequence. */
static int32_t find_unthink(const request *r, int32_t at, int32_t most) {
    const int32_t first = at;
    while (r->text[at] != UNTHINK) assert_int_not_equal(r->text[at++], EOS);
    assert_in_range(at - first, 0, most);
    return at + 1;
}

static void check_crowd(const grammars *f) {
    check_answer_grammar(f->schema, &crowd[1], crowd[1].n_prompt);
    const int32_t forced = find_unthink(&crowd[2], crowd[2].n_prompt, 7);
    assert_memory_equal(crowd[2].text + forced, f->forced, sizeof f->forced);
    check_answer_grammar(f->pattern, &crowd[2], forced);
    assert_int_equal(crowd[3].text[crowd[3].n_prompt], THINK);
    check_answer_grammar(f->schema, &crowd[3],
                         find_unthink(&crowd[3], crowd[3].n_prompt + 1, 12));
}

static void check_same_texts(void) {
    for (int32_t i = 0; i < SLOTS; i++) {
        assert_int_equal(crowd[i].n, before[i].n);
        assert_memory_equal(crowd[i].text, before[i].text,
                            (size_t)crowd[i].n * sizeof crowd[i].text[0]);
        assert_memory_equal(crowd[i].logprob, before[i].logprob,
                            (size_t)crowd[i].n * sizeof crowd[i].logprob[0]);
    }
}

static void replies_keep_their_answer_grammar(void **state) {
    (void)state;
    grammars f;
    open_grammars(&f);
    for (size_t i = 0; i < HD_LEN(drafting_models); i++) {
        open_machine(&m, drafting_models[i], 0.0f);
        for (int32_t k = 0; k <= HD_MAX_DRAFTS; k++) {
            constraint_crowd(&f, 50 + i, k);
            for (int32_t r = 0; r < SLOTS; r++) {
                crowd[r].chunk = k % 3 * 5;
                enter(&m, &crowd[r]);
            }
            run_all(&m, crowd, SLOTS);
            check_crowd(&f);
            if (k == 0) memcpy(before, crowd, sizeof before);
            check_same_texts();
        }
        close_machine(&m);
    }
    close_grammars(&f);
}

/* Mostly correct drafts, so that many rows of a step are masked and accepted, and requests
 * that change their slots at any time. */
static void retracted_replies_go_on(void **state) {
    (void)state;
    grammars f;
    open_grammars(&f);
    open_machine(&m, "v3_small_mtp", 0.0f);
    for (uint64_t seed = 0; seed < 6; seed++) {
        constraint_crowd(&f, 100 * seed, 0);
        for (int32_t r = 0; r < SLOTS; r++) enter(&m, &crowd[r]);
        run_all(&m, crowd, SLOTS);
        check_crowd(&f);
        memcpy(before, crowd, sizeof before);
        constraint_crowd(&f, 100 * seed, 1 + (int32_t)seed);
        for (int32_t r = 0; r < SLOTS; r++) {
            crowd[r].oracle = before[r].text;
            crowd[r].one_wrong_in = 6;
            enter(&m, &crowd[r]);
        }
        for (int32_t parity = 0; parity < 400; parity++) {
            bool runs = false;
            for (int32_t r = 0; r < SLOTS; r++) runs |= !crowd[r].ended;
            if (!runs) break;
            step(&m, crowd, SLOTS);
            /* all move to the next slot */
            for (int32_t r = 0; parity % 7 == 6 && r < SLOTS; r++) {
                crowd[r].slot = (crowd[r].slot + 1) % SLOTS;
                crowd[r].chunk = 8 + parity % 5 * 6;
                if (!crowd[r].ended) enter(&m, &crowd[r]);
            }
        }
        check_same_texts();
        assert_true(crowd[1].accepted * 2 > crowd[1].drafted);
    }
    close_machine(&m);
    close_grammars(&f);
}

/* The end of sequence, however probable, is allowed only after the grammar's text, and then
 * nothing else is. */
static void the_end_waits(void **state) {
    (void)state;
    static const hd_logit_bias ends = {EOS, 1000.0f};
    grammars f;
    open_grammars(&f);
    open_machine(&m, "v3_small_mtp", 0.0f);
    for (int32_t reasoning = 0; reasoning < 2; reasoning++) {
        request *r = &crowd[0];
        init_request(r, &m, 0, 8, 3);
        r->sampling.params.n_bias = 1;
        r->sampling.bias = &ends;
        r->sampling.constraint = &r->constraint;
        r->constraint.reasoning = reasoning;
        r->constraint.max_reasoning = 5;
        r->constraint.grammar = f.pattern;
        enter(&m, r);
        run_all(&m, r, 1);
        check_answer_grammar(f.pattern, r,
                             reasoning ? find_unthink(r, r->n_prompt, 5) : r->n_prompt);
    }
    close_machine(&m);
    close_grammars(&f);
}

/* Banning the only allowed token ends the request, and no other. */
static void a_dead_end_ends_one_request(void **state) {
    (void)state;
    static const int32_t ban = UNTHINK;
    grammars f;
    open_grammars(&f);
    open_machine(&m, "v3_small_mtp", 0.0f);
    constraint_crowd(&f, 7, 2);
    crowd[2].sampling.ban = &ban;
    crowd[2].sampling.params.n_ban = 1;
    crowd[2].sampling.params.ban_until = POSITIONS;
    for (int32_t r = 0; r < SLOTS; r++) enter(&m, &crowd[r]);
    run_all(&m, crowd, SLOTS);
    assert_int_equal(crowd[2].status, HD_EINVAL);
    assert_int_equal(crowd[2].n, crowd[2].n_prompt + 7);
    check_answer_grammar(f.schema, &crowd[1], crowd[1].n_prompt);
    close_machine(&m);
    close_grammars(&f);
}

/* ---- log-probabilities ---- */

static void check_number(double got, double want) {
    if (!(fabs(got - want) <= 2e-6 * (1 + fabs(want)))) fail_msg("%.9g, not %.9g", got, want);
}

/* Compares with the logits of a plain forward pass: the token, and the sorted alternatives. */
static void check_tops(const request *r, const float *logits, int32_t at) {
    const float *x = logits + (int64_t)(at - 1) * m.spec->vocab;
    const int32_t n_top = r->sampling.params.n_top;
    check_number((double)r->logprob[at], log_softmax(&m, x, r->text[at]));
    for (int32_t i = 0; i < n_top; i++) {
        const int32_t id = r->top[at][i].token;
        int32_t better = 0;
        for (int32_t k = 0; k < m.n_ids; k++)
            better += x[k] > x[id] || (x[k] == x[id] && k < id);
        assert_int_equal(better, i);
        check_number((double)r->top[at][i].logprob, log_softmax(&m, x, id));
    }
}

static void scores_are_those_of_the_logits(void **state) {
    (void)state;
    static const char *const models[] = {"v2_plain", "v3_small_mtp", "v4_small_mtp"};
    static const int32_t chunks[] = {0, 1, 7, 32};
    static const int32_t from[SLOTS] = {1, 9, 0, 20}, n_top[SLOTS] = {0, 3, 5, TOPS};
    for (size_t i = 0; i < HD_LEN(models); i++) {
        open_machine(&m, models[i], 0.0f);
        for (size_t c = 0; c < HD_LEN(chunks); c++) {
            for (int32_t k = 0; k < SLOTS; k++) {
                request *r = &crowd[k];
                init_request(r, &m, k, 33, 20 + (uint64_t)k);
                r->sampling.params.temperature = 0.8f;
                r->sampling.params.n_top = n_top[k];
                r->sampling.params.presence_penalty = 0.5f;
                r->chunk = chunks[c];
                r->prompt_logprobs_from = from[k];
                r->most = 50;
                r->n_drafts = hd_weights_n_mtp(m.weights) ? 2 : 0;
                enter(&m, r);
            }
            run_all(&m, crowd, SLOTS);
            for (int32_t k = 0; k < SLOTS; k++) {
                const request *r = &crowd[k];
                float *logits = logits_of(&m, r->text, r->n);
                const int32_t first = from[k] ? from[k] : r->n_prompt;
                for (int32_t at = first; at < r->n; at++) check_tops(r, logits, at);
                free(logits);
            }
            if (c == 0) memcpy(before, crowd, sizeof before);
            check_same_texts();
        }
        close_machine(&m);
    }
}

/* ---- acceptance ---- */

/* Inside the reasoning every sufficiently probable draft is accepted, with its own
 * log-probability; after the token that ends it only the token that would be sampled. */
static void relaxed_acceptance_ends_with_reasoning(void **state) {
    (void)state;
    int32_t other[POSITIONS];
    open_machine(&m, "v3_small_mtp", 0.0f);
    for (int32_t k = 0; k < 3; k++) { /* strict; all within delta; only the most probable */
        request *r = &crowd[k];
        init_request(r, &m, k, 10, 31);
        r->sampling.constraint = &r->constraint;
        r->constraint.reasoning = true;
        r->constraint.relaxed_top = k == 1 ? 200 : k == 2 ? 1 : 0;
        r->constraint.relaxed_delta = 1.0f;
        r->most = 30;
        enter(&m, r);
    }
    run_all(&m, crowd, 1);
    const int32_t *greedy = crowd[0].text;
    for (int32_t i = 0; i < POSITIONS; i++) other[i] = greedy[i] == 9 ? 10 : 9;
    other[13] = UNTHINK;
    for (int32_t k = 1; k < 3; k++) {
        crowd[k].oracle = other;
        crowd[k].n_drafts = 7;
    }
    step(&m, crowd + 1, 2); /* the prompt, and in the same step drafts for positions 10 .. 16 */
    const request *all = &crowd[1], *first = &crowd[2];
    assert_int_equal(first->n, 11);
    assert_int_equal(first->text[10], greedy[10]);
    assert_int_equal(all->accepted, 4);
    assert_memory_equal(all->text + 10, other + 10, 4 * sizeof *other);
    float *logits = logits_of(&m, all->text, all->n);
    for (int32_t at = 10; at < 15; at++) check_tops(all, logits, at);
    const float *x = logits + (int64_t)13 * m.spec->vocab;
    for (int32_t id = 0; id < m.n_ids; id++) assert_true(x[id] <= x[all->text[14]]);
    free(logits);
    close_machine(&m);
}

static void ban_end(request *r) {
    static const int32_t end = EOS;
    r->sampling.ban = &end;
    r->sampling.params.n_ban = 1;
    r->sampling.params.ban_until = POSITIONS;
}

static void benchmarks_choose_what_is_accepted(void **state) {
    (void)state;
    static const float means[] = {0.25f, 1.6f, 3.0f, 9.0f};
    for (size_t i = 0; i < HD_LEN(means); i++) {
        open_machine(&m, "v3_small_mtp", means[i]);
        for (int32_t k = 0; k < SLOTS; k++) {
            request *r = &crowd[k];
            init_request(r, &m, k, 10, 40 + (uint64_t)k);
            ban_end(r);
            r->n_drafts = k == 0 ? 1 : k == 1 ? 2 : 7;
            enter(&m, r);
        }
        double steps = 0, accepted = 0;
        while (crowd[3].n < 340 && !crowd[3].ended) step(&m, crowd, SLOTS);
        for (int32_t k = 1; k < SLOTS; k++) {
            assert_int_equal(crowd[k].status, HD_OK);
            if (crowd[k].n_drafts < (int32_t)ceilf(means[i])) continue;
            steps += crowd[k].steps - 1; /* the prefill step had no drafts */
            accepted += crowd[k].accepted;
        }
        assert_true(steps == 0 || fabs(accepted / steps - (double)means[i]) < 0.15);
        if (means[i] >= 1.0f) assert_int_equal(crowd[0].accepted, crowd[0].steps - 1);
        if (means[i] > 7.0f) assert_int_equal(crowd[3].accepted, crowd[3].drafted);
        close_machine(&m);
    }
}

/* Correct drafts beyond the forced number are rejected, so the text is the model's own. */
static void benchmarks_refuse_right_drafts(void **state) {
    (void)state;
    for (int32_t forced = 0; forced < 2; forced++) {
        request *r = &crowd[forced];
        open_machine(&m, "v3_small_mtp", (float)forced);
        init_request(r, &m, 0, 10, 80);
        ban_end(r);
        r->most = 60;
        r->n_drafts = 4;
        r->oracle = forced ? crowd[0].text : NULL;
        enter(&m, r);
        run_all(&m, r, 1);
        close_machine(&m);
    }
    assert_int_equal(crowd[0].n, 60);
    assert_memory_equal(crowd[1].text, crowd[0].text, sizeof crowd[0].text);
    assert_int_equal(crowd[1].steps, 25); /* two tokens each */
    assert_int_equal(crowd[1].accepted, 25);
}

/* ---- loads ---- */

static void loads_count_every_row(void **state) {
    (void)state;
    static const char *const models[] = {"v2_groups", "v3_small_mtp", "v4_small_mtp"};
    for (size_t i = 0; i < HD_LEN(models); i++) {
        open_machine(&m, models[i], 0.0f);
        const int32_t n_experts = m.spec->route.n_experts;
        static int64_t load[32 * 64];
        int64_t counted[HD_N_ROW_PHASES] = {0};
        assert_true(hd_model_n_expert_rows(m.spec) <= (int64_t)HD_LEN(load));
        for (int32_t k = 0; k < SLOTS; k++) {
            init_request(&crowd[k], &m, k, 20 + k, 60 + (uint64_t)k);
            crowd[k].chunk = 6;
            crowd[k].most = 40;
            crowd[k].n_drafts = hd_weights_n_mtp(m.weights) ? k : 0;
            enter(&m, &crowd[k]);
        }
        run_all(&m, crowd, SLOTS);
        assert_int_equal(hd_model_runner_read_experts(m.model_runner, load, NULL), HD_OK);
        for (int32_t l = 0; l < m.spec->n_layers; l++) {
            const bool dense = m.spec->layers[l].mlp == HD_MLP_DENSE;
            int64_t sum = 0;
            for (int32_t k = 0; k < HD_N_ROW_PHASES * n_experts; k++) {
                const int32_t p = k / n_experts;
                const int64_t n = load[(p * m.spec->n_layers + l) * n_experts + k % n_experts];
                counted[p] += n;
                sum += n;
            }
            assert_int_equal(sum, dense ? 0 : m.rows * m.spec->route.top_k);
        }
        const bool drafts = hd_weights_n_mtp(m.weights) > 0;
        assert_true(counted[HD_ROW_PREFILL] && counted[HD_ROW_DECODE]);
        assert_true((counted[HD_ROW_VERIFY] > 0) == drafts);
        int64_t drafted = 0;
        for (int32_t e = 0; e < m.spec->n_mtp * n_experts; e++) {
            drafted += load[HD_N_ROW_PHASES * m.spec->n_layers * n_experts + e];
        }
        assert_true(drafts ? drafted >= m.rows * m.spec->route.top_k : drafted == 0);
        close_machine(&m);
    }
}

int test_model_runner(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(replies_keep_their_answer_grammar),
        cmocka_unit_test(retracted_replies_go_on),
        cmocka_unit_test(the_end_waits),
        cmocka_unit_test(a_dead_end_ends_one_request),
        cmocka_unit_test(scores_are_those_of_the_logits),
        cmocka_unit_test(relaxed_acceptance_ends_with_reasoning),
        cmocka_unit_test(benchmarks_choose_what_is_accepted),
        cmocka_unit_test(benchmarks_refuse_right_drafts),
        cmocka_unit_test(loads_count_every_row),
    };
    return cmocka_run_group_tests_name("model_runner", tests, NULL, NULL);
}
