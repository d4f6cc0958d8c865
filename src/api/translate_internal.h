/* translate_internal.h - what the translations of Anthropic's and OpenAI's formats share. */
#ifndef HD_API_TRANSLATE_INTERNAL_H
#define HD_API_TRANSLATE_INTERNAL_H

#include "api/translate.h"

typedef struct translation {
    api_request *r;
    const char *param; /* path of the translated value in the body */
    json_t *out;       /* the messages */
    json_t *answer;    /* the assistant message that further items join; borrowed, or NULL */
    size_t index;      /* index of the current message or item */
} translation;

const char *translate_word(const json_t *object, const char *key); /* "": absent */

/* Always returns false, for: return translate_refuse(...). */
bool translate_refuse(translation *t, const char *what);
bool translate_no_memory(const translation *t);

/* takes the reference; message may be NULL */
bool translate_append(translation *t, json_t *message);

/* A string stays a string; parts of text types become text parts. *out is a new reference. */
bool translate_text(translation *t, json_t *content, const char *const *types, json_t **out);

bool translate_call(translation *t, json_t *message, json_t *id, json_t *name,
                    json_t *arguments);
/* takes the reference of text */
bool translate_result(translation *t, json_t *id, json_t *text);

/* Converts the request's tools to functions. Further attributes of a tool that have no
 * effect here are refused. find returns in *schema the schema of tool i, borrowed or NULL;
 * false: it refused the tool. */
typedef bool translate_find_schema(const translation *t, const json_t *tool, size_t i,
                                   json_t **schema);
bool translate_tools(translation *t, translate_find_schema *find);

#endif
