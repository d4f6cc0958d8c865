/* side_by_side.c - several prompts through one engine at the same time.
 *
 *     side_by_side MODEL_DIR MAX_TOKENS DRAFTS KV_TOKENS PROMPT...
 *
 * Each prompt is continued as raw text, sampled with a seed of its own. Answers are printed in
 * the order of the prompts, one per line, control characters as spaces; a prompt without an answer
 * leaves an empty line, is named on standard error, and makes the exit status 1. A small KV_TOKENS
 * makes requests take turns in the cache; the answers stay the same. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hadal.h"

typedef struct answer {
    uint64_t id; /* 0: refused */
    char *text;
    size_t n;
} answer;

static int append(answer *a, const char *text, size_t n) {
    char *grown = realloc(a->text, a->n + n + 1);
    if (!grown) return 0;
    a->text = grown;
    for (size_t i = 0; i < n; i++) {
        grown[a->n++] = (unsigned char)text[i] < ' ' ? ' ' : text[i];
    }
    grown[a->n] = '\0';
    return 1;
}

static answer *find(answer *answers, int n, uint64_t id) {
    for (int i = 0; i < n; i++) {
        if (answers[i].id == id) return &answers[i];
    }
    return NULL;
}

/* How many prompts were refused, each with its reason. */
static int submit_all(hd_engine *engine, char **prompts, int n, long max_tokens, long drafts,
                      answer *answers) {
    int n_refused = 0;
    char why[600];
    for (int i = 0; i < n; i++) {
        const hd_request g = {.size = sizeof g,
                              .text = prompts[i],
                              .max_tokens = (int)max_tokens,
                              .draft_tokens = (int)drafts,
                              .temperature = 1,
                              .seed = (uint64_t)i,
                              .ignore_eos = true};
        answers[i].id = hd_engine_submit(engine, &g, NULL, why, sizeof why);
        if (answers[i].id) continue;
        fprintf(stderr, "error: prompt %d is refused: %s\n", i + 1, why);
        n_refused++;
    }
    return n_refused;
}

/* Takes what comes until all answers ended; how many of them failed, each with its reason. */
static int poll_all(hd_engine *engine, answer *answers, int n) {
    int n_failed = 0;
    hd_event event;
    while (hd_engine_poll(engine, &event, -1)) {
        answer *a = find(answers, n, event.id);
        bool failed = event.step.finish_reason == HD_FINISH_ERROR;
        const char *why = event.why;
        for (size_t i = 0; i < event.n_deltas; i++) {
            if (append(a, event.deltas[i].text, event.deltas[i].n)) continue;
            failed = true;
            why = "no memory for its text";
        }
        if (!failed) continue;
        fprintf(stderr, "error: prompt %d failed: %s\n", (int)(a - answers) + 1, why);
        n_failed++;
    }
    return n_failed;
}

static void print_figures(hd_engine *engine) {
    hd_engine_stats stats;
    hd_engine_read_stats(engine, &stats);
    long long drafted = 0, accepted = 0;
    for (int i = 0; i < HD_MAX_DRAFTS; i++) {
        drafted += stats.drafted_at[i];
        accepted += stats.accepted_at[i];
    }
    fprintf(stderr, "%lld steps, %lld retracted, %lld of %lld drafts accepted\n",
            (long long)stats.steps, (long long)stats.retracted, accepted, drafted);
}

int main(int argc, char **argv) {
    if (argc < 6) {
        fprintf(stderr, "usage: %s MODEL_DIR MAX_TOKENS DRAFTS KV_TOKENS PROMPT...\n", argv[0]);
        return 2;
    }
    char why[600];
    hd_engine *engine;
    const int n = argc - 5;
    const long max_tokens = strtol(argv[2], NULL, 10), kv_tokens = strtol(argv[4], NULL, 10);
    const hd_engine_options options = {.size = sizeof options,
                                       .model_dir = argv[1],
                                       .max_running = n < 64 ? n : 64,
                                       .max_context = (int)kv_tokens,
                                       .kv_tokens = kv_tokens,
                                       .chunk_tokens = 16};
    if (hd_engine_open(&engine, &options, why, sizeof why) != 0) {
        fprintf(stderr, "error: %s\n", why);
        return 1;
    }
    answer *answers = calloc((size_t)n, sizeof *answers);
    if (!answers) {
        fprintf(stderr, "error: no memory for %d answers\n", n);
        hd_engine_close(engine);
        return 1;
    }
    int n_without =
        submit_all(engine, argv + 5, n, max_tokens, strtol(argv[3], NULL, 10), answers);
    n_without += poll_all(engine, answers, n);
    for (int i = 0; i < n; i++) puts(answers[i].text ? answers[i].text : "");
    print_figures(engine);
    for (int i = 0; i < n; i++) free(answers[i].text);
    free(answers);
    hd_engine_close(engine);
    return n_without > 0;
}
