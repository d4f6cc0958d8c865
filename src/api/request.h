/* request.h - one body on its way to the engine: what it asked for, and why it was refused.
 *
 * A request lives on the HTTP thread until its prompts are submitted; the engine copies what it
 * is given, and what the answer needs later lies in api_wishes. Tables of parameters
 * (params.h) write into this struct by offset. Functions that can refuse return false and
 * leave the first refusal in the request. */
#ifndef HD_API_REQUEST_H
#define HD_API_REQUEST_H

#include <jansson.h>

#include "api/api.h"
#include "api/params.h"
#include "api/text.h"

enum { API_MAX_ID = 128 };

/* How the answer is written; plain data. */
typedef struct api_wishes {
    bool stream, include_usage, continuous_usage;
    bool logprobs, echo, token_ids, prompt_ids, text_in_logprobs;
    bool separate_reasoning, stream_reasoning, parallel_calls;
    bool prefill_only; /* nothing is generated, as far as the client can see */
    bool background;   /* the answer goes on without its client */
    bool to_the_end;   /* more was asked for than the context leaves: it ends there */
    int32_t stream_interval;
} api_wishes;

typedef struct api_refusal {
    int status;      /* 0: none */
    int32_t retry_s; /* of 429 and 503; 0: one second */
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
    json_t *made; /* an array that holds documents made on the way */
    api_kept *kept;
    api_refusal refusal;
    bool handed_over; /* another thread begins anew */

    hd_request g;
    hd_conversation conversation;
    api_wishes w;
    char id[API_MAX_ID + 1]; /* the call's */

    /* As the body has them; NULL, -1 where it is silent. */
    const char *checked; /* words whose table is all there is to them */
    const char *rid, *request_id, *cache_salt, *extra_key, *regex, *guided_regex, *task;
    const char *effort, *thinking_type, *instructions, *previous, *content, *parser, *suffix;
    json_t *stop, *stop_ids, *bias, *response_format, *schema, *guided_json, *guided_choice;
    json_t *content_list, *messages, *tools, *tool_choice, *prompt, *text, *input_ids, *system;
    json_t *sampling, *echoed, *rids, *tokens, *modalities, *edits;
    int32_t max_tokens, max_completion_tokens, min_tokens, top_logprobs, logprobs;
    int32_t logprob_start, generation_prompt;
    int32_t most_tokens; /* of an answer that has no bound; 0: what the context leaves */
    int32_t begins;      /* with the tokenizer's BOS: 1 yes, -1 no, 0 as usual */
    bool guided_object, continue_final, parse_special, token_strs, with_pieces, store;
} api_request;

/* Reads the body by the family's table. False: refused, or handed over to another thread. Close it in either case. */
bool api_request_open(api_request *r, http_call *c, api_context *ctx, const api_family *family,
                      http_shape shape);
void api_request_close(api_request *r);
bool api_request_name(api_request *r, const char *id, const char *param); /* as the body says */
void api_request_send_refusal(api_request *r); /* nothing, where it was handed over */

/* False always, for: return api_refuse(...). Only the first refusal is kept. */
bool api_refuse(api_request *r, const char *code, const char *param, const char *format, ...)
    HD_PRINTF(4, 5);
bool api_refuse_status(api_request *r, int status, const char *code, const char *param,
                       const char *format, ...) HD_PRINTF(5, 6);
/* From a library's sentence: the field before its colon becomes the param. */
bool api_refuse_err(api_request *r, const char *param, const hd_err *err);

/* The word for machines with which grammars begin their sentences; NULL: there is none. */
const char *api_grammar_code(const char *message);

void *api_keep(api_request *r, size_t n, size_t size); /* zeroed, freed with the request */
json_t *api_keep_json(api_request *r, json_t *made); /* takes the reference; NULL: no memory */

/* The steps between the table and the engine; each looks at the fields named above. */
bool api_take_sampling(api_request *r); /* stop, stop_ids, bias, limits of tokens */
bool api_take_response_format(
    api_request *r); /* at most one of all that bind the answer's form */
bool api_take_thinking(api_request *r);
bool api_take_messages(api_request *r); /* messages, tools, tool_choice: the conversation */
/* A text, texts, ids or lists of ids; each becomes a prompt with a copy of r->g. */
bool api_take_prompts(api_request *r, json_t *given, const char *param, api_prompt **out,
                      int32_t *n);
bool api_take_ids(api_request *r, json_t *list, const char *param, int32_t **ids, size_t *n);
bool api_take_text(api_request *r, const char *text, size_t n, const char *param, int32_t **ids,
                   size_t *n_ids);
/* A default that may be shortened where the context is; then the engine's own check. */
void api_default_max_tokens(api_request *r, hd_request *g, size_t n_prompt, int32_t tokens);

const char *api_error_type(http_shape shape, int status);

/* Answers with what was written, which is given away and then empty; 503 if there was no memory
 * for it. */
void api_reply(http_call *c, const char *type, api_text *out);

#endif
