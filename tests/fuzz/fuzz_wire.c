/* fuzz_wire.c - any bytes as records between processes: as a request for a leader, a step output
 * or prompt log-probabilities for the front, pages and jobs, and the key of a grammar. What is accepted must be
 * within the engine's limits. */
#include <stdint.h>
#include <stdlib.h>

#include "engine/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static hd_engine *engine;

static void open_engine(void) {
    char why[600];
    const hd_engine_options o = {.size = sizeof o,
                                 .model_dir = "models/tiny-v4",
                                 .backend = "null",
                                 .max_context = 64,
                                 .queue_limit = 4,
                                 .max_running = 2};
    if (hd_engine_open(&engine, &o, why, sizeof why) != 0) abort();
}

static void take_request(engine_reader from) {
    const uint64_t id = 1ull << 32 | 1 << ENGINE_CHOICE_BITS;
    if (engine_take_request(engine, &from, id, NULL) != HD_OK) {
        if (engine->requests[0].id) abort();
        return;
    }
    engine_request *r = engine_request_of(engine, id);
    if (!r || r->n_prompt < 1 || r->n_prompt >= 64 || r->n_choices > HD_MAX_CHOICES) abort();
    for (int32_t i = 0; i < r->n_prompt; i++) {
        if (r->prompt.ids[i] < 0 || r->prompt.ids[i] >= engine->spec->vocab) abort();
    }
    engine_forget_request(engine, r);
}

static void take_output(engine_reader from) {
    hd_alternative top[HD_MAX_STEP_TOKENS * HD_DEFAULT_LOGPROBS];
    engine_step_output p = {.top = top};
    if (engine_take_output(engine, &from, 1, &p, NULL) != HD_OK) return;
    if (p.step.n_tokens > HD_MAX_STEP_TOKENS || p.step.n_top > HD_DEFAULT_LOGPROBS) abort();
    free(p.why);
}

static void take_prompt(engine_reader from) {
    float logprobs[6];
    hd_alternative top[12];
    engine_request r = {.n_prompt = 8,
                        .prompt_logprobs_from = 2,
                        .n_top = 2,
                        .prompt_logprobs = logprobs,
                        .prompt_top = top};
    if (engine_take_prompt(&from, &r, NULL) == HD_OK && r.n_prompt_logprobs > 6) abort();
}

static void take_key(engine_reader from) {
    engine_grammar *grammar;
    if (engine_grammar_cache_acquire_key(engine->grammars, &grammar, from.at, from.n, NULL) ==
        HD_OK) {
        engine_grammar_cache_release(engine->grammars, grammar);
    }
}

static void *room_of(void *ctx, size_t n) {
    (void)n;
    return ctx;
}

static void on_exported(void *ctx, hd_status st) {
    (void)ctx;
    (void)st;
}

static void take_page(engine_reader from) {
    char page[sizeof(hd_page_head) + 8];
    engine->page_bytes[HD_KV_FULL] = 8;
    engine_request r = {
        .watch = {
                  .ctx = page, .pages = {.n = {1, 0}}, .room = room_of, .exported = on_exported}
    };
    if (engine_take_page(engine, &from, &r, from.n / 2, NULL) == HD_OK && r.n_exported != 1)
        abort();
}

static void take_job(engine_reader from) {
    hd_page_job job = {0};
    if (engine_take_job(engine, &from, &job, NULL) == HD_OK &&
        (job.n_tokens < 1 || job.n_tokens > 64)) {
        abort();
    }
    free((void *)(uintptr_t)job.tokens);
    free((void *)(uintptr_t)job.message);
}

static void take_job_done(engine_reader from) {
    const int32_t page = hd_kv_shape_of(engine->spec).page_tokens;
    hd_page_job job = {.n_tokens = 8 * page + 1};
    if (engine_take_job_done(engine, &from, &job, NULL) == HD_OK && job.lacking.n[0] > 8)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static void (*const take[])(engine_reader from) = {
        take_request, take_output, take_prompt, take_key, take_page, take_job, take_job_done};
    if (!engine) open_engine();
    if (n) take[data[0] % 7]((engine_reader){(const char *)data + 1, n - 1});
    return 0;
}
