/* fuzz_samples.c - replies of a sampling server: refused with a reason, or tokens, log-probabilities and
 * experts are such of the model, and as many as were asked for. */
#include <assert.h>
#include <math.h>
#include <stdint.h>

#include "train/samples.h"

enum { N = 2, PROMPT = 3, MOST = 5, LAYERS = 2, TOP_K = 2, EXPERTS = 8, VOCAB = 100 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check(const hd_sample_reply *r) {
    assert(r->n >= 1 && r->n <= MOST);
    for (int32_t i = 0; i < r->n; i++) {
        assert(r->tokens[i] >= 0 && r->tokens[i] < VOCAB && r->logprob[i] <= 0.0f);
    }
    for (int32_t i = 0; i < (PROMPT + r->n - 1) * LAYERS * TOP_K; i++) {
        assert(r->routes[i] >= -1 && r->routes[i] < EXPERTS);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static const int32_t prompt[PROMPT] = {1, 2, 3};
    int32_t tokens[N][MOST], routes[N][(PROMPT + MOST) * LAYERS * TOP_K];
    float logprob[N][MOST];
    hd_sample_reply out[N];
    const hd_sample_request r = {
        .prompt = prompt, .n_prompt = PROMPT, .n = N, .max_tokens = MOST, .routes = true};
    hd_err err = {0};
    for (int i = 0; i < N; i++) {
        out[i] = (hd_sample_reply){.vocab = VOCAB,
                                   .layers = LAYERS,
                                   .top_k = TOP_K,
                                   .n_experts = EXPERTS,
                                   .tokens = tokens[i],
                                   .logprob = logprob[i],
                                   .routes = routes[i]};
    }
    if (hd_sample_read(out, &r, (const char *)data, n, &err) != HD_OK) {
        assert(err.msg[0]);
        return 0;
    }
    for (int i = 0; i < N; i++) check(&out[i]);
    return 0;
}
