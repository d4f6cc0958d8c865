/* call.c - the life of an HTTP call: what a handler reads, and its reply. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/progress.h"
#include "base/json.h"
#include "http/http_internal.h"

enum {
    MESSAGE_BYTES = 1024,
    KEPT_MAX_BYTES = 64 << 20,
    /* the size of a reply that a connection's buffer takes at once */
    ONE_WRITE_BYTES = 64 << 10
};

http_call *http_call_new(http_server *h, http_conn *conn, const char *target) {
    http_call *c = calloc(1, sizeof *c);
    const size_t n = strlen(target) + 1;
    char *text = malloc(2 * n);
    http_query_arg *args = calloc((size_t)h->options.limits.query_args, sizeof *args);
    if (!c || !text || !args) {
        free(c);
        free(text);
        free(args);
        return NULL;
    }
    pthread_mutexattr_t recursive;
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&c->lock, &recursive);
    pthread_mutexattr_destroy(&recursive);
    c->http = h;
    c->conn = conn;
    memcpy(text, target, n);
    memcpy(text + n, target, n);
    c->target_text = text;
    c->raw_target = text + n;
    c->args = args;
    c->start_ns = hd_now_ns();
    c->prompt_tokens = c->output_tokens = -1;
    c->body.max = h->options.limits.body_bytes + 1; /* and a NUL */
    atomic_init(&c->refs, 2);
    atomic_fetch_add(&h->calls, 1);
    return c;
}

void http_retain(http_call *c) {
    atomic_fetch_add(&c->refs, 1);
}

/* A path that was refused before it was parsed is logged up to its query. */
static void report_end(http_call *c) {
    const http_options *o = &c->http->options;
    if (!o->on_end) return;
    if (!c->target.path) c->target_text[strcspn(c->target_text, "?")] = '\0';
    const http_ended e = {.method = c->method,
                          .path = c->target.path ? c->target.path : c->target_text,
                          .request_id = c->id,
                          .status = c->status ? c->status : 499,
                          .left = c->left,
                          .prompt_tokens = c->prompt_tokens,
                          .output_tokens = c->output_tokens,
                          .start_ns = c->start_ns,
                          .first_ns = c->first_ns,
                          .end_ns = c->end_ns};
    o->on_end(o->on_end_user, &e);
}

void http_release(http_call *c) {
    if (atomic_fetch_sub(&c->refs, 1) != 1) return;
    report_end(c);
    http_spend_tokens(c, 0); /* nothing was computed */
    atomic_fetch_sub(&c->http->held_bytes, c->body_held);
    http_stream_free(c);
    atomic_fetch_sub(&c->http->calls, 1);
    if (c->handled) atomic_fetch_sub(&c->http->handled, 1); /* the server may end now */
    while (c->reply_headers) {
        http_reply_field *next = c->reply_headers->next;
        free(c->reply_headers);
        c->reply_headers = next;
    }
    pthread_mutex_destroy(&c->lock);
    hd_bytes_deinit(&c->body);
    hd_bytes_deinit(&c->kept);
    free(c->headers);
    free(c->target_text);
    free(c->args);
    free(c);
}

/* ---- the request ---- */

const char *http_method(const http_call *c) {
    return c->method;
}

const char *http_path(const http_call *c) {
    return c->target.path;
}

const char *http_path_tail(const http_call *c) {
    return c->tail ? c->tail : "";
}

const char *http_header(const http_call *c, const char *name) {
    for (size_t i = 0; i < c->n_headers; i++) {
        if (strcasecmp(c->headers[i].name, name) == 0) return c->headers[i].value;
    }
    return NULL;
}

bool http_header_at(const http_call *c, size_t i, const char **name, const char **value) {
    if (i >= c->n_headers) return false;
    *name = c->headers[i].name;
    *value = c->headers[i].value;
    return true;
}

const char *http_raw_target(const http_call *c) {
    return c->raw_target;
}

http_shape http_shape_of(const http_call *c) {
    return c->route ? c->route->shape : HTTP_OPENAI;
}

const char *http_query(const http_call *c, const char *name) {
    for (size_t i = 0; i < c->target.n_args; i++) {
        if (strcmp(c->target.args[i].name, name) == 0) return c->target.args[i].value;
    }
    return NULL;
}

bool http_query_number(const http_call *c, const char *name, long low, long high,
                       long otherwise, long *out) {
    const char *text = http_query(c, name);
    *out = otherwise;
    return !text || http_number_parse(text, low, high, out);
}

const char *http_body(const http_call *c, size_t *n) {
    *n = c->body.n;
    return c->body.data ? c->body.data : "";
}

const char *http_request_id(const http_call *c) {
    return c->id;
}

http_call *http_call_of_id(const char *request_id) {
    return (http_call *)((uintptr_t)request_id - offsetof(http_call, id));
}

void http_set_request_id(http_call *c, const char *id) {
    snprintf(c->id, sizeof c->id, "%s", id);
}

uint64_t http_salt(const http_call *c) {
    return c->salt;
}

int64_t http_start_ns(const http_call *c) {
    return c->start_ns;
}

/* ---- the client leaves ---- */

void http_call_wake(http_call *c) {
    if (!c->suspended || !c->connection) return;
    c->suspended = false;
    MHD_resume_connection(c->connection);
}

void http_call_gone(http_call *c) {
    if (c->gone) return;
    c->gone = true;
    if (!c->over) {
        c->left = true;
        atomic_fetch_add(&c->http->gone, 1);
        if (c->on_gone) c->on_gone(c->on_gone_user);
    }
    c->on_gone = NULL;
    http_call_wake(c);
}

void http_on_gone(http_call *c, void (*fn)(void *user), void *user) {
    pthread_mutex_lock(&c->lock);
    if (c->gone) {
        fn(user);
    } else if (!c->over) {
        c->on_gone = fn;
        c->on_gone_user = user;
    }
    pthread_mutex_unlock(&c->lock);
}

/* ---- the reply ---- */

void http_reply_header(http_call *c, const char *name, const char *value) {
    const size_t n = strlen(name) + 1, m = strlen(value) + 1;
    http_reply_field *field = malloc(sizeof *field + n + m);
    pthread_mutex_lock(&c->lock);
    if (field) {
        memcpy(field->name, name, n);
        memcpy(field->name + n, value, m);
        field->value = field->name + n;
        field->next = c->reply_headers;
        c->reply_headers = field;
    } else {
        c->short_of_memory = true;
    }
    pthread_mutex_unlock(&c->lock);
}

static bool add(struct MHD_Response *response, const char *name, const char *value) {
    return MHD_add_response_header(response, name, value) == MHD_YES;
}

bool http_call_add_headers(http_call *c, struct MHD_Response *response, const char *type) {
    bool whole = !c->short_of_memory && add(response, "X-Request-Id", c->id) &&
                 add(response, "X-Content-Type-Options", "nosniff");
    if (type) whole = whole && add(response, "Content-Type", type);
    if (c->origin) {
        whole = whole && add(response, "Access-Control-Allow-Origin", c->origin) &&
                add(response, "Vary", "Origin") &&
                add(response, "Access-Control-Expose-Headers", "X-Request-Id");
    }
    if (atomic_load(&c->http->gate) == HTTP_DRAINING) {
        whole = whole && add(response, "Connection", "close");
    }
    for (const http_reply_field *f = c->reply_headers; whole && f; f = f->next) {
        whole = add(response, f->name, f->value);
    }
    return whole;
}

int64_t http_token_quota(const http_call *c) {
    return c->salt ? c->http->options.quotas.key_tokens : 0;
}

int32_t http_reserve_tokens(http_call *c, int64_t tokens) {
    const int32_t wait = http_quota_reserve(c->http->quotas, c->salt, tokens, hd_now_ns());
    if (!wait) atomic_store(&c->reserved, tokens);
    return wait;
}

void http_spend_tokens(http_call *c, int64_t tokens) {
    const int64_t reserved = atomic_exchange(&c->reserved, 0);
    http_quota_settle(c->http->quotas, c->salt, reserved, tokens, hd_now_ns());
}

void http_note_tokens(http_call *c, int32_t prompt, int32_t output, int64_t first_ns) {
    c->prompt_tokens = prompt;
    c->output_tokens = output;
    c->first_ns = first_ns;
}

void http_call_leave_quota(http_call *c) {
    if (c->counted) http_quota_leave(c->http->quotas, c->salt);
    c->counted = false;
}

bool http_call_answer(http_call *c, int status, struct MHD_Response *response) {
    pthread_mutex_lock(&c->lock);
    const bool first = !c->answered;
    c->answered = true;
    if (first && response && !c->gone) {
        c->response = response;
        c->status = status;
        response = NULL;
        http_call_wake(c);
    }
    pthread_mutex_unlock(&c->lock);
    if (response) MHD_destroy_response(response);
    return first;
}

void http_keep_answer(http_call *c, void (*fn)(void *user, const char *answer, size_t n),
                      void *user) {
    pthread_mutex_lock(&c->lock);
    c->kept.max = KEPT_MAX_BYTES;
    c->on_answered = fn;
    c->on_answered_user = user;
    pthread_mutex_unlock(&c->lock);
}

void http_call_keep(http_call *c, const char *bytes, size_t n) {
    if (c->on_answered) hd_bytes_append(&c->kept, bytes, n, NULL);
}

void http_call_over(http_call *c) {
    pthread_mutex_lock(&c->lock);
    const bool first = !c->over;
    c->over = true;
    c->on_gone = NULL;
    if (first) c->end_ns = hd_now_ns();
    http_call_leave_quota(c);
    if (first && c->on_answered) {
        c->on_answered(c->on_answered_user, c->kept.data ? c->kept.data : "", c->kept.n);
    }
    c->on_answered = NULL;
    hd_bytes_deinit(&c->kept);
    pthread_mutex_unlock(&c->lock);
    if (first) http_release(c);
}

/* Makes a response of body[n] and takes ownership of it. */
static struct MHD_Response *response_of(http_call *c, char *body, size_t n) {
    if (n > ONE_WRITE_BYTES) return http_stream_reply(c, body, n);
    struct MHD_Response *response =
        MHD_create_response_from_buffer(n, body, MHD_RESPMEM_MUST_FREE);
    if (!response) free(body);
    return response;
}

static void refuse_answer(http_call *c, size_t n) {
    const size_t most = c->http->options.limits.bodies_bytes;
    if (n > most) {
        http_error(c, 413, "invalid_request_error", "answer_too_large", NULL,
                   "the response has %zu bytes; this server holds at most %zu", n, most);
        return;
    }
    http_reply_header(c, "Retry-After", "1");
    http_error(c, 503, "overloaded_error", "out_of_memory", NULL,
               "no room for the %zu bytes of the response: others have not read theirs yet", n);
}

void http_reply_owned(http_call *c, int status, const char *type, char *body, size_t n) {
    if (n > ONE_WRITE_BYTES && !http_take_bytes(c->http, n)) {
        free(body);
        refuse_answer(c, n);
        return;
    }
    pthread_mutex_lock(&c->lock);
    if (c->answered) {
        if (n > ONE_WRITE_BYTES) atomic_fetch_sub(&c->http->held_bytes, n);
        free(body);
        pthread_mutex_unlock(&c->lock);
        return;
    }
    http_call_keep(c, body, n);
    struct MHD_Response *response = response_of(c, body, n);
    if (response && !http_call_add_headers(c, response, type)) {
        MHD_destroy_response(response);
        response = NULL;
    }
    http_call_leave_quota(c); /* a client that has its reply may send the next request */
    atomic_fetch_add(&c->http->sent_bytes, (int64_t)n);
    if (!response) http_call_gone(c); /* no memory: the connection is dropped */
    const bool first = http_call_answer(c, status, response);
    pthread_mutex_unlock(&c->lock);
    if (first) http_call_over(c);
}

void http_reply(http_call *c, int status, const char *type, const char *body, size_t n) {
    char *copy = malloc(n + 1);
    if (copy && n) memcpy(copy, body, n);
    if (copy) {
        http_reply_owned(c, status, type, copy, n);
        return;
    }
    pthread_mutex_lock(&c->lock);
    http_call_gone(c);
    const bool first = http_call_answer(c, status, NULL);
    pthread_mutex_unlock(&c->lock);
    if (first) http_call_over(c);
}

/* Anthropic's clients know fewer error types, under other names. */
static const char *anthropic_type(int status, const char *type) {
    if (status == 413) return "request_too_large";
    if (status == 429) return "rate_limit_error";
    if (status == 503) return "overloaded_error";
    if (status >= 500) return "api_error";
    return type;
}

static json_t *error_object(http_shape shape, int status, const char *type, const char *code,
                            const char *param, const char *message) {
    if (shape == HTTP_ANTHROPIC) {
        return json_pack("{s:s, s:{s:s, s:s, s:{s:s?}}}", "type", "error", "error", "type",
                         anthropic_type(status, type), "message", message, "details",
                         "error_code", code);
    }
    return json_pack("{s:{s:s, s:s, s:s?, s:s?}}", "error", "message", message, "type", type,
                     "param", param, "code", code);
}

void http_error(http_call *c, int status, const char *type, const char *code, const char *param,
                const char *format, ...) {
    char message[MESSAGE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    const http_shape shape = http_shape_of(c);
    json_t *object = error_object(shape, status, type, code, param, message);
    if (!object) { /* not UTF-8, or cut within a character */
        for (char *p = message; *p; p++) {
            if ((unsigned char)*p >= 0x80) *p = '?';
        }
        object = error_object(shape, status, type, code, NULL, message);
    }
    char *text = object ? hd_json_write(object, JSON_COMPACT) : NULL;
    json_decref(object);
    if (text) {
        http_reply_owned(c, status, "application/json", text, strlen(text));
    } else {
        http_reply(c, status, "application/json", "{}", 2);
    }
}
