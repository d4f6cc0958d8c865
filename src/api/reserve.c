/* reserve.c - before a request runs, reserves the most tokens it may use from its key's
 * quota per minute. That is its prompts and the maximum output of each choice. A choice
 * without max_tokens is limited to what the context or the minute leaves. */
#include "api/reserve.h"

static bool prompt_tokens(api_request *r, const api_prompt *p, int64_t *n) {
    hd_ids ids = {0};
    *n = (int64_t)p->n;
    if (p->tokens) return true;
    const bool ok = api_render_ids(r, &ids);
    *n = (int64_t)ids.n;
    hd_ids_deinit(&ids);
    return ok;
}

/* Only a conversation has no limit of its own, and it is the only prompt. */
static void bound_answers(api_request *r, int32_t answers, int64_t prompt, int64_t quota) {
    const int64_t context = r->max_context - prompt;
    const int64_t minute = (quota - prompt) / answers;
    r->most_tokens = (int32_t)(context < minute ? context : minute);
    if (r->most_tokens < 1) r->most_tokens = 1;
}

bool api_reserve(api_request *r, const api_prompt *prompts, int32_t n) {
    const int64_t quota = http_token_quota(r->call);
    int64_t all = 0;
    for (int32_t i = 0; quota && i < n; i++) {
        const hd_request *g = &prompts[i].g;
        int64_t prompt;
        if (!prompt_tokens(r, &prompts[i], &prompt)) return false;
        if (!g->max_tokens) bound_answers(r, g->n, prompt, quota);
        all += prompt + (int64_t)g->n * (g->max_tokens ? g->max_tokens : r->most_tokens);
    }
    if (all > quota) {
        return api_refuse(r, "key_quota", "max_tokens",
                          "the request may use %lld tokens; its key has %lld a minute",
                          (long long)all, (long long)quota);
    }
    const int32_t wait = all ? http_reserve_tokens(r->call, all) : 0;
    r->refusal.retry_s = wait;
    return wait == 0 ||
           api_refuse_status(
               r, 429, "key_quota", NULL,
               "the request may use %lld tokens, which its key has in %d seconds; a "
               "smaller max_tokens needs fewer",
               (long long)all, wait);
}
