/* fuzz_samples.c - replies of a sampling server: refused with a reason, or tokens, log-probabilities and
 * experts are such of the model, and as many as were asked for. */
#include <assert.h>
#include <math.h>
#include <stdint.h>

#include "train/samples.h"

enum { N = 2, PROMPT = 3, MOST = 5, LAYERS = 2, TOP_K = 2, EXPERTS = 8, VOCAB = 100, KEYS = 3 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check(const hd_sample_reply *r, bool keys) {
    assert(r->n >= 1 && r->n <= MOST);
    for (int32_t i = 0; i < r->n; i++) {
        assert(r->tokens[i] >= 0 && r->tokens[i] < VOCAB && r->logprob[i] <= 0.0f);
    }
    for (int32_t i = 0; i < (PROMPT + r->n - 1) * LAYERS * TOP_K; i++) {
        assert(r->routes[i] >= -1 && r->routes[i] < EXPERTS);
    }
    for (int32_t i = 0; keys && i < (PROMPT + r->n - 1) * KEYS; i++) {
        assert(r->keys[i] >= -1 && r->keys[i] < PROMPT + r->n - 1);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static const int32_t prompt[PROMPT] = {1, 2, 3};
    int32_t tokens[N][MOST], routes[N][(PROMPT + MOST) * LAYERS * TOP_K];
    int32_t keys[N][(PROMPT + MOST) * KEYS];
    float logprob[N][MOST];
    hd_sample_reply out[N];
    /* keys for every other length */
    const hd_sample_request r = {.prompt = prompt,
                                 .n_prompt = PROMPT,
                                 .n = N,
                                 .max_tokens = MOST,
                                 .routes = true,
                                 .keys = n % 2 != 0};
    hd_err err = {0};
    for (int i = 0; i < N; i++) {
        out[i] = (hd_sample_reply){.vocab = VOCAB,
                                   .layers = LAYERS,
                                   .top_k = TOP_K,
                                   .n_experts = EXPERTS,
                                   .tokens = tokens[i],
                                   .logprob = logprob[i],
                                   .routes = routes[i],
                                   .key_layers = 1,
                                   .key_top_k = KEYS,
                                   .keys = keys[i]};
    }
    if (hd_sample_read(out, &r, (const char *)data, n, &err) != HD_OK) {
        assert(err.msg[0]);
        return 0;
    }
    for (int i = 0; i < N; i++) check(&out[i], r.keys);
    return 0;
}
