/* test_prompt_decoder.c - prompts of which V4.1's last layers compute only the tail: texts, scores and
 * drafts of an engine that computes every position, with shared prefixes, little memory, chunks,
 * and other requests. */
#include "check.h"

#include <stdio.h>
#include <string.h>

#include "fakes/engine_rig.h"

#define SMALL "tests/golden/v41_small"

/* Texts that begin alike at several lengths, and their next turns. */
enum { N_TEXTS = 5, ROUNDS = 3, MOST = 440, N_ANSWERS = N_TEXTS * ROUNDS };

static rig_answer whole[N_ANSWERS], tail[N_ANSWERS], replayed[N_ANSWERS];

static hd_engine *open_small(const char *decoder, int32_t chunk, int64_t kv_tokens,
                             const char *hisparse) {
    return rig_open("cpu", &(hd_engine_options){.model_dir = SMALL,
                                                .prompt_decoder = decoder,
                                                .hisparse = hisparse,
                                                .max_running = 3,
                                                .max_context = 500,
                                                .kv_tokens = kv_tokens,
                                                .snapshot_tokens = kv_tokens,
                                                .chunk_tokens = chunk});
}

static size_t write_prompt(int32_t *tokens, int text, int round) {
    const size_t n = 120 + 90 * (size_t)round + 17 * (size_t)text;
    for (size_t i = 0; i < n; i++) {
        const size_t own = i > 100 + 40 * (size_t)(text % 3) ? (size_t)text * 7 : 0;
        tokens[i] = (int32_t)(8 + (i * i + 3 * i + own) % 90);
    }
    return n;
}

static void ask(hd_engine *e, rig_answer *out, int32_t drafts) {
    static int32_t tokens[MOST];
    for (int r = 0; r < ROUNDS; r++) {
        for (int t = 0; t < N_TEXTS; t++) {
            const size_t n = write_prompt(tokens, t, r);
            rig_run(e,
                    &(hd_request){.size = sizeof(hd_request),
                                  .tokens = tokens,
                                  .n_tokens = n,
                                  .max_tokens = 20,
                                  .min_tokens = 20,
                                  .temperature = (float)(t % 2),
                                  .seed = (uint64_t)t,
                                  .draft_tokens = drafts},
                    &out[r * N_TEXTS + t]);
        }
    }
}

static void drop(rig_answer *answers) {
    for (int i = 0; i < N_ANSWERS; i++) rig_deinit(&answers[i]);
}

static void tails_change_no_text(void **state) {
    static const struct {
        int32_t chunk, drafts;
        int64_t kv_tokens;
        const char *hisparse; /* rows choose 9 entries */
    } cases[] = {
        {64,  0, 8000, NULL}, /* every prefix stays */
        {200, 3, 8000, "9" },
        {31,  2, 1000, "50"}, /* most are dropped */
    };
    (void)state;
    hd_engine *e = open_small("whole", 50, 8000, NULL);
    ask(e, whole, 0);
    hd_engine_close(e);
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        hd_engine_stats s;
        e = open_small("tail", cases[i].chunk, cases[i].kv_tokens, cases[i].hisparse);
        ask(e, tail, cases[i].drafts);
        hd_engine_read_stats(e, &s);
        hd_engine_close(e);
        for (int k = 0; k < N_ANSWERS; k++) rig_same(&whole[k], &tail[k]);
        assert_true(s.cached_tokens > 500);
        drop(tail);
    }
    drop(whole);
}

static int other_answers(const rig_answer *a, const rig_answer *b) {
    int n = 0;
    for (int k = 0; k < N_ANSWERS; k++) {
        const size_t bytes = a[k].tokens.n * sizeof(int32_t);
        n += a[k].tokens.n != b[k].tokens.n || memcmp(a[k].tokens.ids, b[k].tokens.ids, bytes);
    }
    return n;
}

/* A replay depends on where the prompt ends and on nothing else; it is not the whole pass. */
static void replays_depend_on_the_prompt_alone(void **state) {
    static const struct {
        int32_t chunk, drafts;
        int64_t kv_tokens;
        const char *hisparse;
    } cases[] = {
        {200, 3, 8000, "9" },
        {5,   0, 8000, NULL},
        {31,  2, 1000, "50"},
    };
    (void)state;
    hd_engine *e = open_small("whole", 50, 8000, NULL);
    ask(e, whole, 0);
    hd_engine_close(e);
    e = open_small("replay", 500, 600, NULL); /* no prefix stays */
    ask(e, replayed, 0);
    hd_engine_close(e);
    assert_true(other_answers(whole, replayed) > 0);
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        hd_engine_stats s;
        e = open_small("replay", cases[i].chunk, cases[i].kv_tokens, cases[i].hisparse);
        ask(e, tail, cases[i].drafts);
        hd_engine_read_stats(e, &s);
        hd_engine_close(e);
        for (int k = 0; k < N_ANSWERS; k++) rig_same(&replayed[k], &tail[k]);
        assert_true(s.cached_tokens > 500);
        drop(tail);
    }
    drop(whole);
    drop(replayed);
}

static void refuses(const char *model, const char *decoder, const char *message) {
    char why[600];
    hd_engine *e;
    const hd_engine_options o = {.size = sizeof o,
                                 .model_dir = model,
                                 .backend = "cpu",
                                 .threads = 1,
                                 .prompt_decoder = decoder};
    assert_int_equal(hd_engine_open(&e, &o, why, sizeof why), HD_EINVAL);
    if (!strstr(why, message)) fail_msg("%s", why);
}

static void other_words_and_models_are_refused(void **state) {
    (void)state;
    refuses(SMALL, "half", "prompt_decoder 'half' is not tail, whole or replay");
    refuses(TINY, "replay", "only V4.1 computes less of a prompt");
    refuses(TINY, "whole", "only V4.1 computes less of a prompt");
}

int test_prompt_decoder(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tails_change_no_text),
        cmocka_unit_test(replays_depend_on_the_prompt_alone),
        cmocka_unit_test(other_words_and_models_are_refused),
    };
    return cmocka_run_group_tests_name("prompt_decoder", tests, NULL, NULL);
}
