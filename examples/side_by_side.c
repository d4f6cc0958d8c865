/* side_by_side.c - several prompts through one engine at the same time.
 *
 *     side_by_side MODEL_DIR MAX_TOKENS DRAFTS KV_TOKENS PROMPT...
 *
 * Each prompt is continued as raw text, sampled with a seed of its own. Answers are printed in
 * the order of the prompts, one per line, control characters as spaces. A small KV_TOKENS makes
 * requests take turns in the cache; the answers stay the same. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hadal.h"

typedef struct answer {
    uint64_t id;
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

int main(int argc, char **argv) {
    if (argc < 6) {
        fprintf(stderr, "usage: %s MODEL_DIR MAX_TOKENS DRAFTS KV_TOKENS PROMPT...\n", argv[0]);
        return 2;
    }
    char why[600];
    hd_engine *engine;
    hd_event event;
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
    for (int i = 0; answers && i < n; i++) {
        const hd_generation g = {.size = sizeof g,
                                 .text = argv[5 + i],
                                 .max_tokens = (int)max_tokens,
                                 .draft_tokens = (int)strtol(argv[3], NULL, 10),
                                 .temperature = 1,
                                 .seed = (uint64_t)i,
                                 .ignore_eos = true};
        answers[i].id = hd_engine_submit(engine, &g, NULL, why, sizeof why);
        if (!answers[i].id) fprintf(stderr, "prompt %d: %s\n", i, why);
    }
    while (answers && hd_engine_poll(engine, &event, -1)) {
        answer *a = find(answers, n, event.id);
        for (size_t i = 0; a && i < event.n_parts; i++) {
            if (!append(a, event.parts[i].text, event.parts[i].n)) return 1;
        }
    }
    for (int i = 0; answers && i < n; i++) puts(answers[i].text ? answers[i].text : "");
    hd_engine_stats stats;
    hd_engine_read_stats(engine, &stats);
    long long drafted = 0, accepted = 0;
    for (int i = 0; i < HD_MOST_DRAFTS; i++) {
        drafted += stats.drafted_at[i];
        accepted += stats.accepted_at[i];
    }
    fprintf(stderr, "%lld steps, %lld retracted, %lld of %lld drafts accepted\n",
            (long long)stats.steps, (long long)stats.retracted, accepted, drafted);
    for (int i = 0; answers && i < n; i++) free(answers[i].text);
    free(answers);
    hd_engine_close(engine);
    return 0;
}
