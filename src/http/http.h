/* http.h - one HTTP exchange as a handler sees it; hides the HTTP library.
 *
 * A handler is called on an HTTP thread when the body is complete, or on a worker thread if
 * the body is large. It replies at once, or retains the call and replies later from any
 * thread. There is exactly one reply: a body, an error, or an SSE stream that ends. A call
 * lives until it was answered and released by all who retained it. If its client has left,
 * replies are allowed and do nothing. */
#ifndef HD_HTTP_HTTP_H
#define HD_HTTP_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct http_call http_call;

/* ---- the request ---- */

const char *http_method(const http_call *c);
const char *http_path(const http_call *c);      /* without the query */
const char *http_path_tail(const http_call *c); /* what matched the '*' of the route */
const char *http_header(const http_call *c, const char *name); /* NULL: absent */
/* Reads the i-th header, as it came. Returns false behind the last one. */
bool http_header_at(const http_call *c, size_t i, const char **name, const char **value);
const char *http_raw_target(const http_call *c);              /* path and query, as they came */
const char *http_query(const http_call *c, const char *name); /* decoded; NULL: absent */
/* Reads an integer of the query; otherwise: the value if it is absent. Returns false if it
 * is not made of digits, or outside low to high. */
bool http_query_number(const http_call *c, const char *name, long low, long high,
                       long otherwise, long *out);
const char *http_body(const http_call *c, size_t *n); /* NUL-terminated; may contain NULs */
/* the client's X-Request-Id, or a generated one */
const char *http_request_id(const http_call *c);
/* for an id in the body; called in the handler */
void http_set_request_id(http_call *c, const char *id);
/* of the API key: separates the prefix caches of tenants */
uint64_t http_salt(const http_call *c);
int64_t http_start_ns(const http_call *c); /* when the headers were complete */

/* Called by a handler that finds that it will take long. Returns true if the handler is to
 * return without effect: it runs again from its beginning on a worker thread. Returns false
 * on a worker thread. */
bool http_hand_over(http_call *c);

/* Tokens per minute, prompt and output, of the call's key; 0: unlimited. */
int64_t http_token_quota(const http_call *c);
/* Reserves the most tokens that the call may use, once; unused tokens are returned when it
 * ends. Returns 0, or the seconds after which to retry. */
int32_t http_reserve_tokens(http_call *c, int64_t tokens);

void http_retain(http_call *c);
void http_release(http_call *c);

/* fn is called at most once, on an HTTP thread, when the client disconnects before the end
 * of the reply. */
void http_on_gone(http_call *c, void (*fn)(void *user), void *user);

/* ---- the reply ---- */

typedef enum http_shape { HTTP_OPENAI, HTTP_ANTHROPIC } http_shape; /* of error objects */

http_shape http_shape_of(const http_call *c); /* of the call's route */

/* If the memory limit is reached, the reply becomes 503, or 413 if it could never fit. */
void http_reply(http_call *c, int status, const char *type, const char *body, size_t n);
/* The same with a malloc'ed body, which it takes ownership of. */
void http_reply_owned(http_call *c, int status, const char *type, char *body, size_t n);
void http_reply_header(http_call *c, const char *name,
                       const char *value); /* before the reply */

/* Sends {"error": {...}} in the route's shape. param may be NULL. */
void http_error(http_call *c, int status, const char *type, const char *code, const char *param,
                const char *format, ...) __attribute__((format(printf, 6, 7)));

/* Server-sent events (SSE). Writing copies and never blocks. A reader that is too far behind
 * for too long is cut off (and counted); from then on writes return false. The stream sends
 * keep-alive comments while nothing is written. */
void http_stream_begin(http_call *c);
bool http_stream_write(http_call *c, const char *bytes, size_t n);
void http_stream_end(http_call *c);

/* Counts n bytes, which are kept to be read later, in the limit on unread replies. false: all
 * calls together would hold too many. */
bool http_hold(http_call *c, size_t n);
void http_let_go(http_call *c, size_t n);

/* ---- routes ---- */

typedef void http_handler(http_call *c, void *server);

typedef enum http_access {
    HTTP_PUBLIC, /* no key needed: health, web page */
    HTTP_USER,   /* an API key, where keys are set */
    HTTP_ADMIN   /* the admin key; open on loopback if no keys are set */
} http_access;

typedef struct http_route {
    const char *methods; /* "GET", "POST", "GET POST" */
    const char *path;    /* may end in '*' */
    http_access access;
    http_shape shape;
    http_handler *handler;
} http_route;

#endif
