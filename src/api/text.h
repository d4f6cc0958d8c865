/* text.h - a JSON writer: a growing buffer with a maximum size and a small printf. The first
 * failure is kept and later writes are ignored, so the caller checks once at the end.
 * Incoming documents are parsed with jansson; replies are written here token by token. */
#ifndef HD_API_TEXT_H
#define HD_API_TEXT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

enum { API_TEXT_MAX = 256 * 1024 * 1024 };

typedef struct api_text { /* all zero is an empty text */
    char *data;           /* [n], not NUL-terminated */
    size_t n, cap;
    bool failed; /* no memory, or longer than API_TEXT_MAX */
} api_text;

void api_text_deinit(api_text *t);
void api_text_clear(api_text *t); /* keeps the memory */

void api_put(api_text *t, const char *bytes, size_t n);
void api_puts(api_text *t, const char *text);
/* appends n of its own bytes, from start on */
void api_repeat(api_text *t, size_t start, size_t n);
void api_put_escaped(api_text *t, const char *utf8, size_t n); /* inside of a JSON string */
void api_put_string(api_text *t, const char *utf8, size_t n);
void api_put_int(api_text *t, long long v);
void api_put_real(api_text *t, double v);        /* if not finite: -9999.0, as clients expect */
void api_put_json(api_text *t, const json_t *v); /* of hd_chat_parse_json() or any other */
/* the caller owns the result; NULL: no memory, or refused as input JSON */
json_t *api_parse(api_text *t);
void api_comma(api_text *t); /* unless the text is empty or ends with a bracket or comma */

/* Writes a template in which ' stands for ". Conversions: %s a JSON string, NULL becomes
 * null; %.*s the same with n bytes; %d and %lld; %g; %i a bool. */
void api_write(api_text *t, const char *format, ...) HD_PRINTF(2, 3);

#endif
