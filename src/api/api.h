/* api.h - OpenAI, Anthropic and SGLang compatible endpoints: JSON bodies become engine
 * requests, and engine events become JSON replies or server-sent events (SSE). Handlers run
 * on HTTP threads. Replies are written on the polling thread, by hd_request.on_event. */
#ifndef HD_API_API_H
#define HD_API_API_H

#include "engine/engine.h"
#include "http/http.h"

typedef struct api_limits { /* limits of one request; see `hadal serve --help` */
    int32_t max_choices, max_top_logprobs, max_messages, max_batch_prompts;
    int32_t stream_interval; /* streaming: tokens per event after the first */
    int32_t draft_tokens;    /* default draft depth of a request; HD_DRAFTS_AUTO */
    int64_t queue_timeout_ns;
} api_limits;

/* How one request ended, for metrics and the request log. */
typedef struct api_outcome {
    const char *endpoint, *request_id;
    int status; /* HTTP status; 200 for a stream that began */
    /* finish reason: "stop", "length", "tool_calls", "abort", ... or NULL */
    const char *finish;
    int32_t prompt_tokens, cached_tokens, output_tokens, reasoning_tokens;
    int64_t start_ns, admitted_ns, first_ns, end_ns; /* 0: never */
    int32_t drafted_at[HD_MAX_DRAFTS], accepted_at[HD_MAX_DRAFTS];
} api_outcome;

typedef struct api_context {
    hd_engine *engine;
    const char *model_name; /* as served */
    int64_t created;        /* Unix seconds, when the server started */
    api_limits limits;
    /* Observers; any thread may call them. on_begin: before any prompt of a call is
     * submitted. on_submit: after each prompt was submitted, possibly after its first
     * tokens. on_end: once for each on_begin. on_first: when a request has its first token.
     * on_token: between two events of one choice. */
    void (*on_begin)(void *server, http_call *c, uint64_t seed);
    void (*on_submit)(void *server, http_call *c, uint64_t id);
    void (*on_first)(void *server, int64_t since_start_ns);
    void (*on_token)(void *server, int32_t n_tokens, int64_t since_last_ns);
    void (*on_end)(void *server, const api_outcome *outcome);
    void (*on_unknown_field)(void *server, const char *endpoint, const char *field);
    void *server;
    /* routes of other folders for /openapi.json; NULL: none */
    const struct api_description *described;
    struct api_background *background; /* see background.h; NULL: no background responses */
    /* stored objects of /v1/responses, see store.h; NULL: nothing is stored */
    struct api_store *store;
} api_context;

/* The routes of src/api; their handlers expect an api_context * as the server argument. */
extern const http_route api_routes[];
extern const size_t api_n_routes;

#endif
