/* test_tails.c - layers with tails skip positions that nothing reads: texts, log-probabilities and
 * drafts have the bits of a runner whose layers compute every position. */
#include "fakes/crowd.h"

#include <string.h>

#include "base/checked.h"

enum { PROMPT = 400, SAMPLED = 12, DRAFTS = 3, LAYERS = 8 };

static machine m;
static request all[SLOTS], some[SLOTS];
static int32_t drafts_of_all[SLOTS][DRAFTS]; /* after the prompt */
static hd_kv_shape shape;

/* Prompts that begin alike, and end at different places of a page and of a chunk. */
static void init_crowd(request *crowd, int32_t chunk) {
    for (int32_t i = 0; i < SLOTS; i++) {
        request *r = &crowd[i];
        init_request(r, &m, i, PROMPT - 37 * i, 5);
        r->sampling.params.temperature = i % 2 ? 1.0f : 0.0f;
        r->sampling.params.n_top = 2;
        r->most = r->n_prompt + SAMPLED;
        r->n_drafts = DRAFTS;
        r->chunk = chunk;
        r->ends = (hd_kv_ends){0};
    }
}

static void enter_all(request *crowd) {
    for (int32_t i = 0; i < SLOTS; i++) enter(&m, &crowd[i]);
}

static void check_same(const request *a, const request *b) {
    const int32_t from = a->prompt_logprobs_from ? a->prompt_logprobs_from : a->n_prompt;
    const size_t n = (size_t)(a->n - from);
    assert_int_equal(a->n, b->n);
    assert_memory_equal(a->text, b->text, (size_t)a->n * sizeof a->text[0]);
    assert_memory_equal(a->logprob + from, b->logprob + from, n * sizeof a->logprob[0]);
    assert_memory_equal(a->top + from, b->top + from, n * sizeof a->top[0]);
    assert_true(a->drafted == b->drafted && a->accepted == b->accepted);
    assert_int_equal(a->n_next, b->n_next);
    assert_memory_equal(a->drafts, b->drafts, (size_t)a->n_next * sizeof a->drafts[0]);
}

/* The drafts after a prompt depend on its last positions in every layer. */
static void run_noting(request *crowd, int32_t drafts[SLOTS][DRAFTS]) {
    bool noted[SLOTS] = {false};
    for (int32_t left = SLOTS; left > 0;) {
        step(&m, crowd, SLOTS);
        for (int32_t i = 0; i < SLOTS; i++) {
            if (noted[i] || crowd[i].n == crowd[i].n_prompt) continue;
            assert_int_equal(crowd[i].n_next, DRAFTS);
            memcpy(drafts[i], crowd[i].drafts, sizeof drafts[i]);
            noted[i] = true;
            left--;
        }
    }
    run_all(&m, crowd, SLOTS);
}

/* Rows that the experts of each layer computed since the machine was opened. */
static void count_rows(int64_t rows[LAYERS]) {
    static int64_t load[HD_N_ROW_PHASES * LAYERS * 64];
    const int32_t n_experts = m.spec->route.n_experts, n_layers = m.spec->n_layers;
    assert_true(hd_model_n_expert_rows(m.spec) <= (int64_t)HD_LEN(load) && n_layers <= LAYERS);
    assert_int_equal(hd_model_runner_read_experts(m.model_runner, load, NULL), HD_OK);
    memset(rows, 0, LAYERS * sizeof *rows);
    for (int32_t i = 0; i < HD_N_ROW_PHASES * n_layers * n_experts; i++) {
        rows[i / n_experts % n_layers] += load[i];
    }
    for (int32_t l = 0; l < n_layers; l++) rows[l] /= m.spec->route.top_k;
}

/* What a layer computes of a prompt: positions that the next layer needs. */
static int64_t rows_of(const request *r, int32_t layer) {
    const int32_t i = hd_min_i32(layer + 1 - shape.tail.first, shape.tail.n - 1);
    int64_t n = 0;
    for (int32_t pos = 0; pos < r->n_prompt; pos++) {
        n += i < 0 || hd_kv_is_needed(&shape, i, &r->ends, pos);
    }
    return n;
}

static void open_all(void) {
    open_machine(&m, "v41_small", 0.0f);
    shape = hd_kv_shape_of(m.spec);
    assert_true(shape.tail.n == 2 && PROMPT > 3 * hd_kv_longest_tail(&shape));
}

/* Chunks that end before, in and at the ends of tails, and all requests in one step or none. */
static void every_chunk_gives_the_same(void **state) {
    static const int32_t chunks[] = {40, 39, 13, 5};
    (void)state;
    open_all();
    init_crowd(all, chunks[0]);
    enter_all(all);
    run_noting(all, drafts_of_all);
    close_machine(&m);
    for (size_t c = 0; c < HD_LEN(chunks); c++) {
        int32_t drafts[SLOTS][DRAFTS];
        open_all();
        init_crowd(some, chunks[c]);
        for (int32_t i = 0; i < SLOTS; i++) some[i].ends.outputs = some[i].n_prompt - 1;
        enter_all(some);
        run_noting(some, drafts);
        assert_memory_equal(drafts, drafts_of_all, sizeof drafts);
        for (int32_t i = 0; i < SLOTS; i++) check_same(&all[i], &some[i]);
        close_machine(&m);
    }
}

/* A layer computes the positions that the next one needs, and rows of answers. */
static void prompts_take_the_rows_of_their_tails(void **state) {
    int64_t rows[LAYERS];
    (void)state;
    open_all();
    init_crowd(some, 17);
    for (int32_t i = 0; i < SLOTS; i++) {
        some[i].ends =
            (hd_kv_ends){.outputs = some[i].n_prompt - 1, .branch = i == 1 ? 192 : 0};
    }
    enter_all(some);
    run_all(&m, some, SLOTS);
    count_rows(rows);
    for (int32_t l = 0; l < m.spec->n_layers; l++) {
        int64_t want = m.rows;
        for (int32_t i = 0; i < SLOTS; i++) want -= some[i].n_prompt - rows_of(&some[i], l);
        assert_int_equal(rows[l], want);
    }
    assert_true(rows[shape.tail.first] < m.rows / 2);
    close_machine(&m);
}

/* Log-probabilities of a prompt need the outputs from their first row on. */
static void scored_prompts_have_the_same_scores(void **state) {
    (void)state;
    for (int32_t tails = 0; tails < 2; tails++) {
        request *crowd = tails ? some : all;
        open_all();
        init_crowd(crowd, 30);
        for (int32_t i = 0; i < SLOTS; i++) {
            crowd[i].prompt_logprobs_from = 40 + 70 * i;
            if (tails) crowd[i].ends.outputs = crowd[i].prompt_logprobs_from - 1;
        }
        enter_all(crowd);
        run_all(&m, crowd, SLOTS);
        close_machine(&m);
    }
    for (int32_t i = 0; i < SLOTS; i++) check_same(&all[i], &some[i]);
}

/* Continues a prompt after the first `at` positions of another slot's pages. */
static void continue_at(request *r, int32_t from_slot, int32_t at) {
    enter(&m, r);
    for (int32_t p = 0; p < at / shape.page_tokens; p++) {
        for (int g = 0; g < HD_N_KV_GROUPS; g++) {
            m.pages[g][r->slot][p] = m.pages[g][from_slot][p];
        }
    }
    r->done = at;
}

/* The first request makes its pages whole before its branch. Others continue there, whatever they
 * compute themselves, or before their own tails begin; all share its pages. */
static void shared_prefixes_give_the_same(void **state) {
    enum { BRANCH = 192 };
    (void)state;
    open_all();
    init_crowd(all, 20);
    enter_all(all);
    run_all(&m, all, SLOTS);
    close_machine(&m);
    open_all();
    init_crowd(some, 20);
    const int32_t partial =
        some[3].n_prompt / shape.page_tokens * shape.page_tokens - hd_kv_longest_tail(&shape);
    const int32_t at[] = {0, BRANCH, BRANCH, partial / shape.page_tokens * shape.page_tokens};
    assert_true(at[3] > 0 && at[3] != BRANCH);
    for (int32_t i = 0; i < SLOTS; i++) {
        request *r = &some[i];
        r->ends.outputs = i == 2 ? BRANCH : r->n_prompt - 1;
        if (i == 0) r->ends.branch = BRANCH;
        continue_at(r, 0, at[i]);
        run_all(&m, r, 1);
        check_same(&all[i], r);
    }
    close_machine(&m);
}

int test_tails(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_chunk_gives_the_same),
        cmocka_unit_test(prompts_take_the_rows_of_their_tails),
        cmocka_unit_test(scored_prompts_have_the_same_scores),
        cmocka_unit_test(shared_prefixes_give_the_same),
    };
    return cmocka_run_group_tests_name("tails", tests, NULL, NULL);
}
