/* request.h - one request body on its way to the engine: its parsed parameters, and why it
 * was refused.
 *
 * A request lives on the HTTP thread until its prompts are submitted. The engine copies its
 * arguments; what the reply needs later is in api_wishes. Parameter tables (params.h) write
 * into this struct by offset. Functions that may refuse return false and leave the first
 * refusal in the request. */
#ifndef HD_API_REQUEST_H
#define HD_API_REQUEST_H

#include <jansson.h>

#include "api/api.h"
#include "api/params.h"
#include "api/text.h"

enum { API_MAX_ID = 128 };

/* How the reply is written; plain data. */
/* How the choices of layers are written. */
typedef struct api_replay_form {
    int32_t number_bytes; /* 1, 2 or 4 */
    bool compact;         /* without rows that are all keys */
} api_replay_form;

typedef struct api_wishes {
    bool stream, include_usage, continuous_usage;
    bool logprobs, echo, token_ids, prompt_ids, text_in_logprobs;
    bool separate_reasoning, stream_reasoning, parallel_calls;
    bool prefill_only; /* no output is generated, as far as the client can see */
    bool background;   /* the job continues without its client */
    /* more tokens were requested than the context leaves: the output ends there */
    bool to_the_end;
    int32_t stream_interval;
    bool progress;      /* a stream tells how much of the prompt is computed */
    bool sampling_mask; /* list what could be drawn */
    int32_t n_tops;     /* alternatives that are shown; the engine may give more */
    api_replay_form replay[HD_N_REPLAYS];
} api_wishes;

typedef struct api_refusal {
    int status;      /* 0: none */
    int32_t retry_s; /* Retry-After of 429 and 503; 0: one second */
    const char *code;
    char param[128];
    char message[640];
} api_refusal;

typedef struct api_kept api_kept;

typedef struct api_prompt {
    const int32_t *tokens; /* [n]; NULL: the request's conversation */
    size_t n;
    hd_request g;
} api_prompt;

typedef struct api_request {
    http_call *call;
    api_context *ctx;
    const api_family *family;
    http_shape shape;
    int32_t max_context;

    json_t *body;
    json_t *made; /* an array that owns documents made on the way */
    api_kept *kept;
    api_refusal refusal;
    bool handed_over; /* another thread starts the handler again */

    hd_request g;
    hd_conversation conversation;
    api_wishes w;
    char id[API_MAX_ID + 1]; /* id of the call */

    /* As in the body; NULL or -1 if absent. */
    const char *checked; /* strings that are checked by their table only */
    const char *rid, *request_id, *cache_salt, *extra_key, *regex, *guided_regex, *task;
    const char *logprob_mode, *routes_dtype, *indexer_dtype;
    const char *saved_name, *key_digest; /* of saved conversations */
    const char *effort, *thinking_type, *instructions, *previous, *content, *parser, *suffix;
    json_t *stop, *stop_ids, *bias, *response_format, *schema, *guided_json, *guided_choice;
    json_t *content_list, *messages, *tools, *tool_choice, *prompt, *text, *input_ids, *system;
    json_t *sampling, *echoed, *rids, *tokens, *modalities, *edits;
    int32_t max_tokens, max_completion_tokens, min_tokens, top_logprobs, logprobs;
    int32_t logprob_start, generation_prompt;
    /* output tokens if the request sets no maximum; 0: what the context leaves */
    int32_t most_tokens;
    int32_t begins; /* BOS: 1 yes, -1 no, 0 the tokenizer's default */
    bool guided_object, continue_final, parse_special, token_strs, with_pieces, store;
} api_request;

/* Reads the body by the family's table. Returns false if it was refused or handed over to
 * another thread. Close the request in either case. */
bool api_request_open(api_request *r, http_call *c, api_context *ctx, const api_family *family,
                      http_shape shape);
void api_request_close(api_request *r);
/* in the words of the body */
bool api_request_name(api_request *r, const char *id, const char *param);
void api_request_send_refusal(api_request *r); /* does nothing if the call was handed over */

/* Always returns false, for: return api_refuse(...). Only the first refusal is kept. */
bool api_refuse(api_request *r, const char *code, const char *param, const char *format, ...)
    HD_PRINTF(4, 5);
bool api_refuse_status(api_request *r, int status, const char *code, const char *param,
                       const char *format, ...) HD_PRINTF(5, 6);
/* Refuses with a library's error: its field becomes the param, else param does. */
bool api_refuse_err(api_request *r, const char *param, const hd_err *err);

void *api_keep(api_request *r, size_t n, size_t size); /* zeroed, freed with the request */
/* takes the reference; returns NULL without memory */
json_t *api_keep_json(api_request *r, json_t *made);

/* The steps from the parsed table to the engine request; each reads the fields named above. */
bool api_take_sampling(api_request *r); /* stop, stop_ids, bias, token limits */
/* response format: at most one of the parameters that constrain the output */
bool api_take_response_format(api_request *r);
bool api_take_thinking(api_request *r);
bool api_take_messages(api_request *r); /* messages, tools, tool_choice: the conversation */
/* Reads a text, texts, token ids or lists of token ids; each becomes a prompt with a copy of
 * r->g. */
bool api_take_prompts(api_request *r, json_t *given, const char *param, api_prompt **out,
                      int32_t *n);
bool api_take_ids(api_request *r, json_t *list, const char *param, int32_t **ids, size_t *n);
bool api_take_text(api_request *r, const char *text, size_t n, const char *param, int32_t **ids,
                   size_t *n_ids);
/* Sets a default max_tokens that is reduced to fit the context, then runs the engine's own
 * check. */
void api_default_max_tokens(api_request *r, hd_request *g, size_t n_prompt, int32_t tokens);

const char *api_error_type(http_shape shape, int status);

/* Sends out as the reply and empties it; sends 503 if there was no memory for it. */
void api_reply(http_call *c, const char *type, api_text *out);

#endif
