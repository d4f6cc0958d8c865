/* http.h - one HTTP exchange as a handler sees it; the library that speaks HTTP stays behind it.
 *
 * A handler is called on an HTTP thread when the whole body is there, or on a worker where the
 * body is large. It answers at once, or
 * keeps the call and answers later from any thread. Exactly one answer: a reply, an error, or a
 * stream that ends. A call lives until it was answered AND released by everyone who retained
 * it; after its client vanished answering is allowed and does nothing. */
#ifndef HD_HTTP_HTTP_H
#define HD_HTTP_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct http_call http_call;

/* ---- the request ---- */

const char *http_method(const http_call *c);
const char *http_path(const http_call *c);                     /* without the query */
const char *http_path_tail(const http_call *c);                /* what a route's '*' matched */
const char *http_header(const http_call *c, const char *name); /* NULL: absent */
const char *http_query(const http_call *c, const char *name);  /* decoded; NULL: absent */
/* A whole number of the query, otherwise where there is none; false: it is not one of digits
 * alone from low to high. */
bool http_query_number(const http_call *c, const char *name, long low, long high,
                       long otherwise, long *out);
const char *http_body(const http_call *c, size_t *n); /* NUL-terminated; may hold NULs */
const char *http_request_id(const http_call *c); /* the client's X-Request-Id, or one of ours */
void http_set_request_id(http_call *c, const char *id); /* by the body, in the handler */
uint64_t http_salt(const http_call *c);    /* of the API key: keeps tenants' caches apart */
int64_t http_start_ns(const http_call *c); /* when the headers were there */

/* For a handler that found out that it takes long: it runs again, from its beginning, on a thread
 * where it keeps nobody waiting, and now returns without a trace. False: it is on one. */
bool http_hand_over(http_call *c);

/* Tokens that the call's key may use in a minute, read and written; 0: no bound. */
int64_t http_token_quota(const http_call *c);
/* Sets aside what the call may use at most, once; what it did not use comes back when it ends.
 * 0: done; else trying again makes sense in so many seconds. */
int32_t http_reserve_tokens(http_call *c, int64_t tokens);

void http_retain(http_call *c);
void http_release(http_call *c);

/* Called at most once, on an HTTP thread, when the client vanishes before the answer's end. */
void http_on_gone(http_call *c, void (*fn)(void *user), void *user);

/* ---- the answer ---- */

typedef enum http_shape { HTTP_OPENAI, HTTP_ANTHROPIC } http_shape; /* of error objects */

/* An answer for which there is no room becomes 503, or 413 if there never is. */
void http_reply(http_call *c, int status, const char *type, const char *body, size_t n);
/* The same of a body that malloc made, which is given away. */
void http_reply_owned(http_call *c, int status, const char *type, char *body, size_t n);
void http_reply_header(http_call *c, const char *name,
                       const char *value); /* before the reply */

/* {"error": {...}} in the route's shape. type and code follow facts/api.md; param may be NULL. */
void http_error(http_call *c, int status, const char *type, const char *code, const char *param,
                const char *format, ...) __attribute__((format(printf, 6, 7)));

/* Server-sent events. Writing copies and never blocks: a reader that is too far behind for long
 * is cut off (and counted), and from then on writes return false. Keep-alive comments are sent by the
 * stream itself while nothing is written. */
void http_stream_begin(http_call *c);
bool http_stream_write(http_call *c, const char *bytes, size_t n);
void http_stream_end(http_call *c);

/* ---- routes ---- */

typedef void http_handler(http_call *c, void *server);

typedef enum http_access {
    HTTP_PUBLIC, /* no key needed: health, the page */
    HTTP_USER,   /* an API key, where keys are set */
    HTTP_ADMIN   /* the admin key; on loopback without keys: open */
} http_access;

typedef struct http_route {
    const char *methods; /* "GET", "POST", "GET POST" */
    const char *path;    /* may end in '*' */
    http_access access;
    http_shape shape;
    http_handler *handler;
} http_route;

#endif
