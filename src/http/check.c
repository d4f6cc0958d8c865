/* check.c - checks before any handler runs: framing, Host, Origin, routes, API keys, quotas.
 * Called once per request, when the headers are complete and before the body is read. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/progress.h"
#include "http/http_internal.h"

static bool refuse(http_call *c, int status, const char *type, const char *code,
                   const char *message) {
    const bool framed =
        status == 401 || status == 403 || status == 404 || status == 405 || status == 429;
    atomic_fetch_add(&c->http->refused, 1);
    /* do not trust what follows on this connection */
    if (!framed) http_reply_header(c, "Connection", "close");
    c->refused_late =
        framed && !c->body_expected && !http_header(c, "Transfer-Encoding"); /* no body */
    http_error(c, status, type, code, NULL, "%s", message);
    return false;
}

static bool bad_request(http_call *c, const char *code, const char *message) {
    return refuse(c, 400, "invalid_request_error", code, message);
}

/* ---- headers ---- */

typedef struct header_sum {
    size_t n, bytes, longest;
} header_sum;

static enum MHD_Result measure_header(void *user, enum MHD_ValueKind kind, const char *name,
                                      size_t name_n, const char *value, size_t value_n) {
    header_sum *sum = user;
    (void)kind, (void)name, (void)value;
    sum->n++;
    sum->bytes += name_n + value_n + 2;
    if (name_n + value_n > sum->longest) sum->longest = name_n + value_n;
    return MHD_YES;
}

typedef struct header_copy {
    http_field *field;
    char *bytes;
    bool clean; /* names are tokens, values hold no control characters */
} header_copy;

static bool is_token(const char *text, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const char c = text[i];
        const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!letter && !(c >= '0' && c <= '9') && !(c && strchr("!#$%&'*+-.^_`|~", c))) {
            return false;
        }
    }
    return n > 0;
}

static bool is_clean_value(const char *text, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const unsigned char c = (unsigned char)text[i];
        if ((c < 0x20 && c != '\t') || c == 0x7f) return false;
    }
    return true;
}

static char *copy_text(header_copy *to, const char *text, size_t n) {
    char *out = to->bytes;
    if (n) memcpy(out, text, n);
    out[n] = '\0';
    to->bytes += n + 1;
    return out;
}

static enum MHD_Result copy_header(void *user, enum MHD_ValueKind kind, const char *name,
                                   size_t name_n, const char *value, size_t value_n) {
    header_copy *to = user;
    (void)kind;
    if (!is_token(name, name_n) || !is_clean_value(value, value_n)) to->clean = false;
    to->field->name = copy_text(to, name, name_n);
    to->field->value = copy_text(to, value, value_n);
    to->field++;
    return MHD_YES;
}

static bool measure(http_call *c, enum MHD_ValueKind kind, header_sum *sum) {
    const http_limits *limits = &c->http->options.limits;
    MHD_get_connection_values_n(c->connection, kind, measure_header, sum);
    return (sum->n <= (size_t)limits->headers && sum->bytes <= limits->header_bytes &&
            sum->longest <= limits->one_header_bytes) ||
           refuse(c, 431, "invalid_request_error", "headers_too_large",
                  "the headers are too many or too large");
}

bool http_check_trailers(http_call *c) {
    header_sum sum = {0};
    return measure(c, MHD_FOOTER_KIND, &sum);
}

static bool copy_headers(http_call *c) {
    header_sum sum = {0};
    if (!measure(c, MHD_HEADER_KIND, &sum)) return false;
    c->headers = malloc(sum.n * sizeof *c->headers + sum.bytes + 1);
    if (!c->headers) {
        return refuse(c, 503, "overloaded_error", "no_memory", "no memory for this request");
    }
    header_copy to = {c->headers, (char *)(c->headers + sum.n), true};
    MHD_get_connection_values_n(c->connection, MHD_HEADER_KIND, copy_header, &to);
    c->n_headers = sum.n;
    return to.clean || bad_request(c, "bad_header", "a header holds a forbidden character");
}

/* The library reads lines as C strings: it ignores bytes behind a NUL, drops lines without a
 * name and joins folded lines. Its parts lie in one buffer as they were received. So this
 * walk checks that no bytes are missing between them. */
typedef struct part_walk {
    uintptr_t end; /* end of the last part */
    bool whole;
} part_walk;

static void walk_part(part_walk *w, const char *part, size_t n, uintptr_t least,
                      uintptr_t most) {
    const uintptr_t gap = (uintptr_t)part - w->end;
    w->whole = w->whole && gap >= least && gap <= most;
    w->end = (uintptr_t)part + n;
}

static enum MHD_Result walk_header(void *user, enum MHD_ValueKind kind, const char *name,
                                   size_t name_n, const char *value, size_t value_n) {
    (void)kind;
    walk_part(user, name, name_n, 1, 2);          /* LF or CR LF */
    walk_part(user, value, value_n, 1, SIZE_MAX); /* a colon and spaces */
    return MHD_YES;
}

static bool is_whole(const http_call *c, const http_line *line) {
    /* later versions check this themselves */
    if (strncmp(MHD_get_version(), "0.", 2) != 0) return true;
    part_walk w = {.end = (uintptr_t)line->method, .whole = true};
    walk_part(&w, line->method, strlen(line->method), 0, 0);
    walk_part(&w, line->target, strlen(c->target_text), 1, 1);
    walk_part(&w, line->version, strlen(line->version), 1, 1);
    MHD_get_connection_values_n(c->connection, MHD_HEADER_KIND, walk_header, &w);
    const union MHD_ConnectionInfo *size =
        MHD_get_connection_info(c->connection, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
    const char *end = line->method + (size ? size->header_size : 0);
    walk_part(&w, end, 0, 2, 4); /* its line's end, and the empty line */
    return w.whole;
}

static bool check_whole(http_call *c, const http_line *line) {
    return is_whole(c, line) ||
           bad_request(c, "bad_header",
                       "the headers hold a NUL, a folded line or a line without a name");
}

static bool no_doubles(http_call *c) {
    static const char *const single[] = {
        "Content-Length", "Transfer-Encoding", "Host",   "Authorization",
        "X-Api-Key",      "Content-Type",      "Expect", "Origin"};
    for (size_t i = 0; i < c->n_headers; i++) {
        for (size_t k = 0; k < HD_LEN(single); k++) {
            if (strcasecmp(c->headers[i].name, single[k]) != 0) continue;
            if (http_header(c, single[k]) != c->headers[i].value) {
                return bad_request(c, "duplicate_header",
                                   "a header that may stand once stands twice");
            }
        }
    }
    return true;
}

/* ---- the request line and the framing of the body ---- */

static bool check_line(http_call *c, const char *version) {
    if (strcmp(version, "HTTP/1.1") != 0 && strcmp(version, "HTTP/1.0") != 0) {
        return refuse(c, 505, "invalid_request_error", "http_version",
                      "only HTTP/1.1 and HTTP/1.0 are spoken here");
    }
    for (const char *p = c->method; *p; p++) {
        if (*p < 'A' || *p > 'Z')
            return bad_request(c, "bad_method", "the method is malformed");
    }
    if (strlen(c->target_text) > c->http->options.limits.target_bytes) {
        return refuse(c, 414, "invalid_request_error", "target_too_long",
                      "the request target is too long");
    }
    switch (http_target_parse(&c->target, c->target_text, c->args,
                              (size_t)c->http->options.limits.query_args)) {
    case HTTP_TARGET_GOOD:
        return true;
    case HTTP_TARGET_BAD:
        return bad_request(c, "bad_target", "the request target is malformed");
    case HTTP_TARGET_TOO_MANY:
        return bad_request(c, "too_many_arguments", "the query has too many arguments");
    case HTTP_TARGET_FOREIGN:
        return refuse(c, 421, "invalid_request_error", "misdirected",
                      "absolute targets are not served here");
    }
    return false;
}

static bool check_framing(http_call *c, const char *version) {
    const char *length = http_header(c, "Content-Length");
    const char *transfer = http_header(c, "Transfer-Encoding");
    const char *encoding = http_header(c, "Content-Encoding");
    const char *expect = http_header(c, "Expect");
    if (length && transfer) {
        return bad_request(c, "ambiguous_length",
                           "Content-Length and Transfer-Encoding exclude each other");
    }
    if (transfer && strcmp(version, "HTTP/1.0") == 0) {
        return bad_request(c, "transfer_encoding", "HTTP/1.0 has no transfer encodings");
    }
    if (transfer && strcasecmp(transfer, "chunked") != 0) {
        return refuse(c, 501, "invalid_request_error", "transfer_encoding",
                      "the only transfer encoding is chunked");
    }
    if (encoding && strcasecmp(encoding, "identity") != 0) {
        return refuse(c, 415, "invalid_request_error", "content_encoding",
                      "compressed bodies are not taken");
    }
    if (expect && strcasecmp(expect, "100-continue") != 0) {
        return refuse(c, 417, "invalid_request_error", "expectation",
                      "this expectation cannot be met");
    }
    if (!length) return true;
    const size_t digits = strspn(length, "0123456789");
    if (!digits || length[digits]) {
        return bad_request(c, "bad_length", "Content-Length is not a number");
    }
    const unsigned long long n = digits < 19 ? strtoull(length, NULL, 10) : ~0ull;
    if (n > c->http->options.limits.body_bytes) {
        return refuse(c, 413, "invalid_request_error", "body_too_large",
                      "the body is larger than this server takes");
    }
    c->body_expected = (size_t)n;
    return true;
}

/* ---- Host and Origin ---- */

/* On loopback, a foreign name in Host means DNS rebinding: a foreign page's name resolves to
 * this server. */
static bool check_host(http_call *c, const char *version) {
    const http_server *h = c->http;
    const char *text = http_header(c, "Host");
    char host[256];
    if (!text) {
        return strcmp(version, "HTTP/1.0") == 0 ||
               bad_request(c, "no_host", "a request of HTTP/1.1 needs Host");
    }
    if (!http_host_parse(text, host, sizeof host)) {
        return bad_request(c, "bad_host", "Host is malformed");
    }
    if (!h->loopback || http_host_is_loopback(host) || http_is_own_name(h, host)) return true;
    for (size_t i = 0; i < h->options.n_names; i++) {
        if (strcasecmp(host, h->options.names[i]) == 0) return true;
    }
    return refuse(c, 421, "invalid_request_error", "misdirected",
                  "this name is not served here; --public-name adds one");
}

/* Browsers send the origin of a request. Origins other than our own page's may not change or
 * compute anything, unless --cors names them. */
static bool check_origin(http_call *c) {
    const http_options *o = &c->http->options;
    const char *origin = http_header(c, "Origin"), *host = http_header(c, "Host");
    if (!origin) return true;
    if (host && http_origin_is_own(origin, host, c->http->tls != NULL)) return true;
    for (size_t i = 0; i < o->n_origins; i++) {
        if (strcmp(origin, o->origins[i]) == 0 || strcmp("*", o->origins[i]) == 0) {
            c->origin = o->origins[i];
            return true;
        }
    }
    if (strcmp(c->method, "GET") == 0 || strcmp(c->method, "HEAD") == 0) return true;
    return refuse(c, 403, "permission_error", "foreign_origin",
                  "this origin is not allowed; --cors allows one");
}

static bool answer_preflight(http_call *c) {
    if (strcmp(c->method, "OPTIONS") != 0) return true;
    if (c->origin) {
        http_reply_header(c, "Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS");
        http_reply_header(c, "Access-Control-Allow-Headers",
                          "Authorization, Content-Type, X-Api-Key, X-Request-Id, "
                          "anthropic-version, anthropic-beta");
        http_reply_header(c, "Access-Control-Max-Age", "600");
    }
    http_reply_header(c, "Allow", "GET, POST, OPTIONS");
    http_reply(c, 204, NULL, "", 0);
    return false;
}

/* ---- routes ---- */

/* methods: "GET POST" lists the accepted ones. PUT is accepted for POST if the table says
 * so, because a client sends it. */
static bool takes_method(const char *methods, const char *method) {
    const size_t n = strlen(method);
    for (const char *p = methods; *p; p += strcspn(p, " "), p += strspn(p, " ")) {
        if (strncmp(p, method, n) == 0 && (p[n] == ' ' || p[n] == '\0')) return true;
    }
    return strcmp(method, "HEAD") == 0 && takes_method(methods, "GET");
}

static bool matches(const char *pattern, const char *path, const char **tail) {
    const size_t n = strlen(pattern);
    *tail = NULL;
    if (n == 0 || pattern[n - 1] != '*') return strcmp(pattern, path) == 0;
    *tail = path + n - 1;
    return strncmp(pattern, path, n - 1) == 0 && **tail;
}

/* An exact path is preferred to one that ends in '*'. Matches paths below prefix, without
 * the prefix. */
static void find_below(http_call *c, const char *prefix, const char **allowed) {
    const http_server *h = c->http;
    const size_t n = strlen(prefix);
    bool exact = false;
    for (size_t t = 0; t < h->n_tables && !exact; t++) {
        for (size_t i = 0; i < h->tables[t].n && !exact; i++) {
            const http_route *r = &h->tables[t].routes[i];
            const char *tail;
            if (strncmp(r->path, prefix, n) != 0) continue;
            if (!matches(r->path + n, c->target.path, &tail)) continue;
            *allowed = r->methods;
            if (!takes_method(r->methods, c->method)) continue;
            exact = !tail;
            c->route = r;
            c->server = h->tables[t].server;
            c->tail = tail ? c->target.path + (tail - c->target.path) : NULL;
        }
    }
}

/* Clients are configured with a base address that may or may not end in /v1. */
static bool check_route(http_call *c) {
    const char *allowed = NULL;
    find_below(c, "", &allowed);
    if (!allowed) find_below(c, "/v1", &allowed);
    if (!c->route && allowed) {
        char message[64];
        snprintf(message, sizeof message, "this path takes %s", allowed);
        http_reply_header(c, "Allow", allowed);
        return refuse(c, 405, "invalid_request_error", "method_not_allowed", message);
    }
    if (!c->route) {
        return refuse(c, 404, "not_found_error", "not_found",
                      "there is nothing at this path; /openapi.json lists what there is");
    }
    if (c->tail && !http_url_decode(c->tail, false)) {
        return bad_request(c, "bad_target", "the request target is malformed");
    }
    return true;
}

/* ---- keys ---- */

static const char *presented_key(const http_call *c) {
    const char *authorization = http_header(c, "Authorization");
    if (!authorization) return http_header(c, "X-Api-Key");
    if (strncasecmp(authorization, "Bearer ", 7) != 0) return "";
    authorization += 7;
    return authorization + strspn(authorization, " ");
}

static const struct sockaddr *address_of(const http_call *c) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(c->connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    return info ? info->client_addr : NULL;
}

static bool refuse_for_now(http_call *c, const char *code, int32_t seconds,
                           const char *message) {
    char text[16];
    snprintf(text, sizeof text, "%d", (int)seconds);
    http_reply_header(c, "Retry-After", text);
    return refuse(c, 429, "rate_limit_error", code, message);
}

static bool check_key(http_call *c) {
    hd_keys *keys = c->http->options.keys;
    const bool user_set = hd_keys_user_set(keys), admin_set = hd_keys_admin_set(keys);
    const char *key = presented_key(c);
    if (c->route->access != HTTP_PUBLIC && (user_set || admin_set)) {
        const int32_t wait = http_quota_blocked(c->http->quotas, address_of(c), c->start_ns);
        if (wait) {
            return refuse_for_now(c, "too_many_failures", wait,
                                  "too many requests from this address had no valid key");
        }
    }
    const hd_right right = hd_keys_check(keys, key, &c->salt);
    if (c->route->access == HTTP_PUBLIC) return true;
    if (c->route->access == HTTP_USER && (!user_set || right != HD_RIGHT_NONE)) return true;
    if (c->route->access == HTTP_ADMIN && right == HD_RIGHT_ADMIN) return true;
    if (c->route->access == HTTP_ADMIN && !admin_set && c->http->loopback &&
        (!user_set || right == HD_RIGHT_USER)) {
        return true;
    }
    if (right == HD_RIGHT_NONE && (user_set || admin_set)) {
        http_quota_failed(c->http->quotas, address_of(c), c->start_ns);
        http_reply_header(c, "WWW-Authenticate", "Bearer");
        return refuse(c, 401, "authentication_error", "invalid_api_key",
                      key ? "this key is not known" : "a key is needed");
    }
    return refuse(c, 403, "permission_error", "admin_key_needed",
                  "this path needs the admin key");
}

static bool check_gate(http_call *c) {
    const int gate = atomic_load(&c->http->gate);
    if (gate == HTTP_OPEN || c->route->access == HTTP_PUBLIC) return true;
    if (gate == HTTP_DRAINING &&
        (c->route->access == HTTP_ADMIN || strcmp(c->method, "POST") != 0)) {
        return true;
    }
    http_reply_header(c, "Retry-After", "5");
    return gate == HTTP_STARTING
               ? refuse(c, 503, "overloaded_error", "starting", "the model is being loaded")
               : refuse(c, 503, "overloaded_error", "draining", "the server is going down");
}

/* Without a preflight request, a page of another origin may send plain text, a form or an
 * untyped body, but not JSON. A client that is no browser and declares no type means JSON;
 * curl then declares a form. A form from a page that hides its origin is not JSON, because
 * its braces and quotes are escaped. */
static bool is_untyped(const http_call *c, const char *type) {
    const bool silent = !type || strcasecmp(type, "application/x-www-form-urlencoded") == 0;
    return silent && !http_header(c, "Origin");
}

static bool check_media(http_call *c) {
    const char *type = http_header(c, "Content-Type");
    if (strcmp(c->method, "POST") != 0 || is_untyped(c, type)) return true;
    if (!type) type = "";
    const size_t n = strcspn(type, "; \t");
    const char *charset = strcasestr(type, "charset=");
    const bool json = n == 16 && strncasecmp(type, "application/json", n) == 0;
    const bool utf8 = !charset || strncasecmp(charset + 8, "utf-8", 5) == 0 ||
                      strncasecmp(charset + 8, "\"utf-8\"", 7) == 0;
    return (json && utf8) || refuse(c, 415, "invalid_request_error", "unsupported_media_type",
                                    "Content-Type must be application/json in UTF-8");
}

/* The last check, so that requests refused for another reason do not use up the quota. */
static bool check_quota(http_call *c) {
    if (c->route->access != HTTP_USER || strcmp(c->method, "POST") != 0) return true;
    const int32_t wait = http_quota_enter(c->http->quotas, c->salt, hd_now_ns());
    c->counted = wait == 0;
    return c->counted ||
           refuse_for_now(c, "key_quota", wait,
                          "this key has used up what it may at once or in a minute");
}

/* Every request has an id in our log and in the reply: the client's, or a new one. */
static void make_id(http_call *c) {
    const char *given = http_header(c, "X-Request-Id");
    const size_t n = given ? strlen(given) : 0;
    bool plain = n > 0 && n <= HTTP_ID_BYTES;
    for (size_t i = 0; plain && i < n; i++) plain = given[i] > ' ' && given[i] <= '~';
    const uint64_t count = atomic_fetch_add(&c->http->id_next, 1);
    const uint64_t fresh = c->http->id_seed ^ count * 0x9e3779b97f4a7c15u;
    if (plain) {
        memcpy(c->id, given, n + 1);
    } else {
        snprintf(c->id, sizeof c->id, "%016llx", (unsigned long long)fresh);
    }
}

bool http_check_request(http_call *c, const http_line *line) {
    const char *version = line->version;
    make_id(c);
    if (!copy_headers(c)) return false;
    make_id(c);
    return check_whole(c, line) && check_line(c, version) && no_doubles(c) &&
           check_framing(c, version) && check_host(c, version) && check_origin(c) &&
           answer_preflight(c) && check_route(c) && check_key(c) && check_gate(c) &&
           check_media(c) && check_quota(c);
}
