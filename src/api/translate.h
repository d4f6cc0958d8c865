/* translate.h - converts Anthropic messages and OpenAI Responses items to OpenAI chat
 * messages, which the rest of src/api reads. The request owns the results; a refusal is left
 * in it. */
#ifndef HD_API_TRANSLATE_H
#define HD_API_TRANSLATE_H

#include "api/request.h"

/* Anthropic: replaces system, messages, tools and tool_choice of r. */
bool api_translate_messages(api_request *r);

/* OpenAI Responses: instructions, items, tools, tool_choice. */
bool api_translate_items(api_request *r, json_t *items);

#endif
