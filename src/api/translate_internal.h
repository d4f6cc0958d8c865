/* translate_internal.h - what the translations of all makers share. */
#ifndef HD_API_TRANSLATE_INTERNAL_H
#define HD_API_TRANSLATE_INTERNAL_H

#include "api/translate.h"

typedef struct translation {
    api_request *r;
    const char *param; /* where what is translated stands in the body */
    json_t *out;       /* the messages */
    json_t *answer;    /* the assistant's message that further items join; borrowed, or NULL */
    size_t index;      /* of the message or item at hand */
} translation;

const char *translate_word(const json_t *object, const char *key); /* "": not there */

/* False always, for: return translate_refuse(...). */
bool translate_refuse(translation *t, const char *what);
bool translate_no_memory(const translation *t);

bool translate_append(translation *t, json_t *message); /* takes message, which may be NULL */

/* A string stays one; parts of the types that hold text become parts. *out is new. */
bool translate_text(translation *t, json_t *content, const char *const *types, json_t **out);

bool translate_call(translation *t, json_t *message, json_t *id, json_t *name,
                    json_t *arguments);
bool translate_result(translation *t, json_t *id, json_t *text); /* takes text */

/* Makes functions of the request's tools; what clients may say of one beside that and is not done
 * here is refused. find gives where a maker has the schema, borrowed or NULL, of tool i; false: it
 * refused the tool. */
typedef bool translate_find_schema(const translation *t, const json_t *tool, size_t i,
                                   json_t **schema);
bool translate_tools(translation *t, translate_find_schema *find);

#endif
