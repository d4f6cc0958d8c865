/* drive_answers.c - the same requests computed in many ways must get the same answers.
 *
 *     drive_answers MODEL_DIR [CROWD]
 *
 * Every request is answered alone first. Then come side by side, drafts, chunks, threads, a
 * cache that is warm, or useless, or too small for all, and several answers to one prompt. The
 * first difference ends the program with a sentence; otherwise one line of JSON says what was
 * seen on the way. With a CROWD the same is compared in short, for sanitizers: fewer requests,
 * fewer tokens, fewer chunkings and depths of drafts, and that many side by side. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hadal.h"

enum {
    REQUESTS = 6,
    CROWD = 64,
    TOKENS = 16,
    PROMPT = 130,
    SHORT_REQUESTS = 3,
    SHORT_TOKENS = 5
};

typedef struct answer {
    int32_t tokens[TOKENS], n;
    float logprobs[TOKENS];
} answer;

enum {           /* ways to run the requests */
       MANY = 1, /* repeated until they are many; else each once */
       TWICE = 2,
       SALTED = 4, /* no two share a prefix */
       SHORT = 8   /* also where all is in short */
};

typedef struct way {
    const char *name;
    hd_engine_options engine;
    int32_t drafts;
    int32_t how;
} way;

static const char *model;
static int n_requests = REQUESTS, n_tokens = TOKENS, n_crowd = CROWD;
static answer expected[REQUESTS], got[CROWD];
static long long cached, retracted, accepted;
/* the model has an MTP layer; else requests with drafts would be refused */
static bool drafting;

static void fail(const char *name, const char *what) {
    fprintf(stderr, "%s: %s\n", name, what);
    exit(1);
}

static hd_engine *open_engine(const way *w) {
    char why[600];
    hd_engine *e;
    hd_engine_options o = w->engine;
    o.size = sizeof o;
    o.model_dir = model;
    o.max_context = 256;
    if (!o.threads) o.threads = 1;
    if (hd_engine_open(&e, &o, why, sizeof why) != 0) fail(w->name, why);
    return e;
}

static bool can_draft(void) {
    char why[600];
    hd_engine *e;
    const hd_engine_options o = {.size = sizeof o,
                                 .model_dir = model,
                                 .max_context = 256,
                                 .threads = 1,
                                 .need_drafts = true};
    const bool opened = hd_engine_open(&e, &o, why, sizeof why) == 0;
    if (opened) hd_engine_close(e);
    return opened;
}

/* Prompts share prefixes of several lengths; half of the requests are greedy. */
static void fill_prompt(int32_t *prompt, int i) {
    for (int k = 0; k < PROMPT; k++)
        prompt[k] = 40 + (k * k + k / (50 * (1 + i % 3)) * i) % 200;
}

static hd_request request(const way *w, int i, const int32_t *prompt) {
    return (hd_request){.size = sizeof(hd_request),
                        .tokens = prompt,
                        .n_tokens = PROMPT - (size_t)i * 5,
                        .max_tokens = n_tokens,
                        .temperature = i % 2 ? 1.0f : 0.0f,
                        .seed = (uint64_t)i,
                        .salt = w->how & SALTED ? (uint64_t)i + 1 : 0,
                        .draft_tokens = drafting ? w->drafts : 0,
                        .ignore_eos = true};
}

static void take(const char *name, answer *a, const hd_event *e) {
    if (e->step.finish_reason == HD_FINISH_ERROR) fail(name, e->why);
    for (int32_t i = 0; i < e->step.n_tokens; i++) {
        a->tokens[a->n] = e->step.tokens[i];
        a->logprobs[a->n++] = e->step.logprobs[i];
    }
    if (e->step.finish_reason == HD_FINISH_NONE) return;
    cached += e->step.n_cached;
    retracted += e->retracted;
    accepted += e->accepted;
}

static void compare(const char *name, const answer *a, const answer *b) {
    if (a->n != b->n || memcmp(a->tokens, b->tokens, (size_t)a->n * sizeof a->tokens[0])) {
        fail(name, "another text");
    }
    if (memcmp(a->logprobs, b->logprobs, (size_t)a->n * sizeof a->logprobs[0])) {
        fail(name, "other probabilities");
    }
}

/* Submits requests [from, to) before the first step. */
static void ask(hd_engine *e, const way *w, int from, int to) {
    uint64_t ids[CROWD];
    int32_t prompt[PROMPT];
    char why[600];
    hd_event event;
    hd_engine_pause(e, HD_PAUSE_IN_PLACE);
    for (int i = from; i < to; i++) {
        fill_prompt(prompt, i % n_requests);
        const hd_request g = request(w, i % n_requests, prompt);
        got[i].n = 0;
        ids[i] = hd_engine_submit(e, &g, NULL, why, sizeof why);
        if (!ids[i]) fail(w->name, why);
    }
    hd_engine_resume(e);
    while (hd_engine_poll(e, &event, -1)) {
        int i = from;
        while (ids[i] != event.id) i++;
        take(w->name, &got[i], &event);
    }
}

static void try(const way *w) {
    hd_engine *e = open_engine(w);
    const int n = w->how & MANY ? n_crowd : n_requests;
    for (int round = 0; round <= (w->how & TWICE ? 1 : 0); round++) {
        ask(e, w, 0, n);
        for (int i = 0; i < n; i++) compare(w->name, &expected[i % n_requests], &got[i]);
    }
    hd_engine_close(e);
}

/* Choice i equals a single request with seed + i. */
static void try_answers(int drafts) {
    enum { N = 4 };
    int32_t prompt[PROMPT];
    const way w = {.name = "several answers", .engine = {.max_running = 3}, .drafts = drafts};
    hd_engine *e = open_engine(&w);
    fill_prompt(prompt, 3);
    hd_request g = request(&w, 3, prompt);
    hd_event event;
    static answer many[N], one;
    memset(many, 0, sizeof many);
    g.n = N;
    if (!hd_engine_submit(e, &g, NULL, NULL, 0)) fail(w.name, "refused");
    while (hd_engine_poll(e, &event, -1)) take(w.name, &many[event.choice], &event);
    g.n = 0;
    for (int i = 0; i < N; i++, g.seed++) {
        one.n = 0;
        if (!hd_engine_submit(e, &g, NULL, NULL, 0)) fail(w.name, "refused");
        while (hd_engine_poll(e, &event, -1)) take(w.name, &one, &event);
        compare(w.name, &many[i], &one);
    }
    hd_engine_close(e);
}

/* Prints prompt log-probabilities, to compare with those of single requests. */
static void print_scores(void) {
    const way w = {.name = "scores", .engine = {.chunk_tokens = 50}};
    int32_t prompt[PROMPT];
    hd_engine *e = open_engine(&w);
    hd_event event;
    fill_prompt(prompt, 0);
    hd_request g = request(&w, 0, prompt);
    g.prompt_logprobs = true;
    if (!hd_engine_submit(e, &g, NULL, NULL, 0)) fail(w.name, "refused");
    if (!hd_engine_poll(e, &event, -1) || event.prompt.n != PROMPT - 1) fail(w.name, "none");
    for (size_t i = 0; i < PROMPT; i++) printf("%s%d", i ? ", " : "\"prompt\": [", prompt[i]);
    for (int32_t i = 0; i < event.prompt.n; i++) {
        printf("%s%.9g", i ? ", " : "], \"scores\": [", (double)event.prompt.logprobs[i]);
    }
    printf("]");
    hd_engine_close(e);
}

int main(int argc, char **argv) {
    if (argc != 2 && argc != 3) return 2;
    model = argv[1];
    const bool whole = argc == 2;
    drafting = can_draft();
    if (!whole) {
        n_requests = SHORT_REQUESTS;
        n_tokens = SHORT_TOKENS;
        n_crowd = atoi(argv[2]);
        if (n_crowd < 1 || n_crowd > CROWD) return 2;
    }
    const way alone = {.name = "alone", .engine = {.max_running = 1}, .how = SALTED};
    hd_engine *e = open_engine(&alone);
    for (int i = 0; i < n_requests; i++) ask(e, &alone, i, i + 1);
    memcpy(expected, got, sizeof expected);
    hd_engine_close(e);
    cached = 0;

    const int pressed = n_crowd == CROWD ? 2500 : n_crowd * 52;
    const way ways[] = {
        {"side by side",           {.max_running = n_crowd, .kv_tokens = 9000},        0,              MANY | SHORT },
        {"a warm cache",           {.kv_tokens = 4000},                                3,              TWICE | SHORT},
        {"chunks of 5",            {.chunk_tokens = 5},                                2,              SHORT        },
        {"chunks of 1",            {.chunk_tokens = 1},                                1,              0            },
        {"two threads",            {.threads = 2},                                     4,              SHORT        },
        {"7 drafts",               {.kv_tokens = 4000},                                7,              SALTED       },
        {"a crowd under pressure",
         {.max_running = n_crowd, .kv_tokens = pressed},
         2,                                                                                            MANY | SHORT },
        {"drafts that pay",        {.max_running = 3},                                 HD_DRAFTS_AUTO, 0            },
        {"pressure",               {.max_running = 6, .kv_tokens = whole ? 400 : 260}, 2,              SHORT        },
    };
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        if (whole || ways[i].how & SHORT) try(&ways[i]);
    }
    if (whole) try_answers(0);
    try_answers(4);
    printf("{\"cached\": %lld, \"retracted\": %lld, \"accepted\": %lld, ", cached, retracted,
           accepted);
    print_scores();
    puts("}");
    return 0;
}
