/* text.h - JSON written as text: a growing buffer with a maximum and a small printf.
 *
 * The first failure sticks: what follows is ignored, so writers write without looking and the
 * caller checks once. Documents that come in are jansson's; what goes out, token by token, is
 * written here. */
#ifndef HD_API_TEXT_H
#define HD_API_TEXT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

enum { API_TEXT_MAX = 256 * 1024 * 1024 };

typedef struct api_text { /* all zero is an empty one */
    char *data;           /* [n], not NUL-terminated */
    size_t n, cap;
    bool failed; /* no memory, or more than API_TEXT_MAX */
} api_text;

void api_text_deinit(api_text *t);
void api_text_clear(api_text *t); /* keeps the memory */

void api_put(api_text *t, const char *bytes, size_t n);
void api_puts(api_text *t, const char *text);
void api_repeat(api_text *t, size_t start, size_t n); /* n bytes of its own, from start on */
void api_put_escaped(api_text *t, const char *utf8, size_t n); /* inside of a JSON string */
void api_put_string(api_text *t, const char *utf8, size_t n);
void api_put_int(api_text *t, long long v);
void api_put_real(api_text *t, double v);        /* not finite: -9999.0, as clients expect */
void api_put_json(api_text *t, const json_t *v); /* of hd_chat_parse_json() or any other */
json_t *api_parse(api_text *t); /* the caller's; NULL: no memory, or no JSON that may come in */
void api_comma(api_text *t); /* unless the text is empty or stands behind a bracket or comma */

/* A template in which ' stands for ". Known: %s a JSON string, NULL is null; %.*s the same of n
 * bytes; %d and %lld; %g; %i a bool. */
void api_write(api_text *t, const char *format, ...) HD_PRINTF(2, 3);

#endif
