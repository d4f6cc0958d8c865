/* endpoints.h - handlers and parameter families of src/api, for the route table and for
 * /openapi.json. */
#ifndef HD_API_ENDPOINTS_H
#define HD_API_ENDPOINTS_H

#include "api/params.h"
#include "http/http.h"

http_handler api_chat, api_complete, api_generate, api_models, api_model;
http_handler api_tokenize, api_detokenize, api_tokenizer_info, api_apply_template;
http_handler api_parse_call, api_separate_reasoning;
http_handler api_messages, api_count_tokens, api_responses, api_input_tokens;
http_handler api_one_response;
http_handler api_openapi, api_unsupported;

extern const api_family api_chat_family, api_complete_family, api_generate_family;
extern const api_family api_tokenize_family, api_detokenize_family, api_template_family;
extern const api_family api_parse_call_family, api_reasoning_family;
extern const api_family api_messages_family, api_count_family, api_responses_family;
extern const api_family api_input_tokens_family;

#endif
