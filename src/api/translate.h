/* translate.h - other makers' conversations become OpenAI's, which the rest of this room
 * reads. The translations are kept by the request; a refusal is left there. */
#ifndef HD_API_TRANSLATE_H
#define HD_API_TRANSLATE_H

#include "api/request.h"

/* Anthropic: system, messages, tools, tool_choice of r are replaced. */
bool api_translate_messages(api_request *r);

/* OpenAI Responses: instructions, items, tools, tool_choice. */
bool api_translate_items(api_request *r, json_t *items);

#endif
