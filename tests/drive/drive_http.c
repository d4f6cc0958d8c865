/* drive_http.c - the HTTP layer with handlers that do nothing, for tests without an engine.
 *
 *     drive_http [NAME=NUMBER...]    limits by name; prints "port N", ends with standard input
 *
 * GET POST /echo     what arrived, as JSON        POST /hold /keep  never answers
 * GET /stream?n=&bytes=&late=    n events, from another thread if late
 * POST /pour    events until the reader is cut off      POST /quiet    a stream of nothing
 * POST /wait    is handed over and does not come back from its handler until GET /go
 * GET /headers?n=    an answer with n headers      GET /large?n=    an answer of n bytes
 * GET /state    counters */
#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "http/listen.h"

typedef struct driver {
    http_server *http;
    atomic_int held, left, poured, waiting;
    pthread_mutex_t lock; /* guards gone_on */
    pthread_cond_t more;
    bool gone_on;
} driver;

static void reply_json(http_call *c, json_t *object) {
    char *text = json_dumps(object, JSON_COMPACT | JSON_ENSURE_ASCII);
    http_reply(c, 200, "application/json", text ? text : "{}", text ? strlen(text) : 2);
    free(text);
    json_decref(object);
}

static void on_echo(http_call *c, void *user) {
    size_t n;
    const char *body = http_body(c, &n), *x = http_header(c, "X-Test");
    const char *query = http_query(c, "q");
    (void)user;
    reply_json(c,
               json_pack("{s:s, s:s, s:s, s:s?, s:s?, s:I, s:o?, s:s, s:b}", "method",
                         http_method(c), "path", http_path(c), "tail", http_path_tail(c), "x",
                         x, "q", query, "n", (json_int_t)n, "body", json_stringn(body, n), "id",
                         http_request_id(c), "salted", http_salt(c) != 0));
}

typedef struct held {
    driver *d;
    http_call *call;
} held;

/* A reply after the client left does nothing, but ends the call. */
static void *answer_late(void *user) {
    held *h = user;
    http_reply(h->call, 200, "text/plain", "late", 4);
    http_stream_end(h->call);
    http_release(h->call);
    free(h);
    return NULL;
}

static void start(void *(*fn)(void *), void *user) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, fn, user) == 0) pthread_detach(thread);
}

static void on_left(void *user) {
    held *h = user;
    atomic_fetch_sub(&h->d->held, 1);
    atomic_fetch_add(&h->d->left, 1);
    start(answer_late, h);
}

static void on_hold(http_call *c, void *user) {
    held *h = malloc(sizeof *h);
    if (!h) return;
    *h = (held){user, c};
    http_retain(c);
    atomic_fetch_add(&h->d->held, 1);
    http_on_gone(c, on_left, h);
}

static long number(http_call *c, const char *name, long otherwise) {
    const char *text = http_query(c, name);
    return text ? strtol(text, NULL, 10) : otherwise;
}

static void *stream(void *user) {
    http_call *c = user;
    const long n = number(c, "n", 3), bytes = number(c, "bytes", 10);
    char *event = malloc((size_t)bytes + 16);
    if (event) {
        memcpy(event, "data: ", 6);
        memset(event + 6, 'x', (size_t)bytes);
        memcpy(event + 6 + bytes, "\n\n", 2);
        for (long i = 0; i < n; i++) http_stream_write(c, event, (size_t)bytes + 8);
    }
    free(event);
    http_stream_end(c);
    http_release(c);
    return NULL;
}

static void on_stream(http_call *c, void *user) {
    (void)user;
    http_retain(c);
    http_stream_begin(c);
    if (number(c, "late", 0)) {
        start(stream, c);
    } else {
        stream(c);
    }
}

typedef struct pour {
    driver *d;
    http_call *call;
} pour;

static void *pour_out(void *user) {
    pour *p = user;
    static const char event[1024] = "data: ";
    while (http_stream_write(p->call, event, sizeof event)) atomic_fetch_add(&p->d->poured, 1);
    http_stream_end(p->call);
    http_release(p->call);
    free(p);
    return NULL;
}

static void on_pour(http_call *c, void *user) {
    pour *p = malloc(sizeof *p);
    if (!p) return;
    *p = (pour){user, c};
    http_retain(c);
    http_stream_begin(c);
    start(pour_out, p);
}

/* A stream without writes: the comments come from the HTTP layer. */
static void on_quiet(http_call *c, void *user) {
    held *h = malloc(sizeof *h);
    if (!h) return;
    *h = (held){user, c};
    http_retain(c);
    http_stream_begin(c);
    atomic_fetch_add(&h->d->held, 1);
    http_on_gone(c, on_left, h);
}

static void on_wait(http_call *c, void *user) {
    driver *d = user;
    if (http_hand_over(c)) return;
    atomic_fetch_add(&d->waiting, 1);
    pthread_mutex_lock(&d->lock);
    while (!d->gone_on) pthread_cond_wait(&d->more, &d->lock);
    pthread_mutex_unlock(&d->lock);
    atomic_fetch_sub(&d->waiting, 1);
    on_echo(c, user);
}

static void on_go(http_call *c, void *user) {
    driver *d = user;
    pthread_mutex_lock(&d->lock);
    d->gone_on = true;
    pthread_cond_broadcast(&d->more);
    pthread_mutex_unlock(&d->lock);
    on_echo(c, user);
}

static void on_headers(http_call *c, void *user) {
    char name[32];
    for (long i = 0; i < number(c, "n", 1); i++) {
        snprintf(name, sizeof name, "X-%ld", i);
        http_reply_header(c, name, "1");
    }
    on_echo(c, user);
}

/* Almost every position has a different byte, so lost or repeated bytes are detected. */
static void on_large(http_call *c, void *user) {
    const size_t n = (size_t)number(c, "n", 1);
    char *body = malloc(n);
    (void)user;
    for (size_t i = 0; body && i < n; i++) body[i] = (char)('a' + i % 23);
    if (body) http_reply_owned(c, 200, "text/plain", body, n);
}

static void on_state(http_call *c, void *user) {
    driver *d = user;
    http_stats s;
    http_read_stats(d->http, &s);
    reply_json(c,
               json_pack("{s:I, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:I, s:I, s:I}", "bodies",
                         (json_int_t)s.held_bytes, "held", atomic_load(&d->held), "left",
                         atomic_load(&d->left), "waiting", atomic_load(&d->waiting), "poured",
                         atomic_load(&d->poured), "connections", s.connections, "calls",
                         s.calls, "streams", s.streams, "cut_off", (json_int_t)s.cut_off,
                         "timed_out", (json_int_t)s.timed_out, "gone", (json_int_t)s.gone));
}

static const http_route routes[] = {
    {"GET POST", "/echo",    HTTP_PUBLIC, HTTP_OPENAI,    on_echo   },
    {"GET POST", "/echo/*",  HTTP_PUBLIC, HTTP_ANTHROPIC, on_echo   },
    {"POST",     "/user",    HTTP_USER,   HTTP_OPENAI,    on_echo   },
    {"POST",     "/admin",   HTTP_ADMIN,  HTTP_OPENAI,    on_echo   },
    {"POST",     "/hold",    HTTP_PUBLIC, HTTP_OPENAI,    on_hold   },
    {"GET",      "/stream",  HTTP_PUBLIC, HTTP_OPENAI,    on_stream },
    {"POST",     "/pour",    HTTP_PUBLIC, HTTP_OPENAI,    on_pour   },
    {"POST",     "/quiet",   HTTP_PUBLIC, HTTP_OPENAI,    on_quiet  },
    {"POST",     "/keep",    HTTP_USER,   HTTP_OPENAI,    on_hold   },
    {"POST",     "/wait",    HTTP_USER,   HTTP_OPENAI,    on_wait   },
    {"GET",      "/go",      HTTP_PUBLIC, HTTP_OPENAI,    on_go     },
    {"GET",      "/headers", HTTP_PUBLIC, HTTP_OPENAI,    on_headers},
    {"GET",      "/large",   HTTP_PUBLIC, HTTP_OPENAI,    on_large  },
    {"GET",      "/state",   HTTP_PUBLIC, HTTP_OPENAI,    on_state  },
};

static int32_t argument(int argc, char **argv, const char *name, int32_t otherwise) {
    const size_t n = strlen(name);
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], name, n) == 0 && argv[i][n] == '=') {
            return (int32_t)strtol(argv[i] + n + 1, NULL, 10);
        }
    }
    return otherwise;
}

int main(int argc, char **argv) {
    static const char *const origin = "https://friend.example";
    driver d = {.lock = PTHREAD_MUTEX_INITIALIZER, .more = PTHREAD_COND_INITIALIZER};
    hd_err err = {0};
    hd_keys *keys;
    const hd_key_sources sources = {.text = getenv("HADAL_API_KEY"),
                                    .admin_text = getenv("HADAL_ADMIN_KEY")};
    if (hd_keys_open(&keys, &sources, &err) != HD_OK) return 2;
    const http_options options = {
        .host = "127.0.0.1",
        .threads = argument(argc, argv, "threads", 2),
        .origins = &origin,
        .n_origins = 1,
        .half_close = argument(argc, argv, "half_close", 0) != 0,
        .writer_sends = argument(argc, argv, "writer_sends", 0) != 0,
        .keys = keys,
        .quotas = {.key_calls = argument(argc, argv, "key_calls", 0),
                   .key_tokens = argument(argc, argv, "key_tokens", 0),
                   .failures = argument(argc,     argv, "failures",     -1)},
        .limits = { .body_bytes = (size_t)argument(argc, argv, "body", 1 << 20),
                   .bodies_bytes = (size_t)argument(argc, argv, "bodies", 64 << 20),
                   .header_bytes = 32 << 10,
                   .one_header_bytes = 16 << 10,
                   .target_bytes = 8 << 10,
                   .stream_bytes = (size_t)argument(argc, argv, "stream", 256 << 10),
                   .headers = 64,
                   .query_args = 16,
                   .connections = argument(argc, argv, "connections", 2000),
                   .connections_per_address = argument(argc, argv, "per_address", 0),
                   .header_s = argument(argc, argv, "header_s", 10),
                   .body_s = argument(argc, argv, "body_s", 20),
                   .idle_s = argument(argc, argv, "idle_s", 75),
                   .stall_s = argument(argc, argv, "stall_s", 30),
                   .keep_alive_s = argument(argc, argv, "keep_alive_s", 10)},
    };
    if (http_open(&d.http, &options, &err) == HD_OK &&
        http_mount(d.http, routes, HD_LEN(routes), &d, &err) == HD_OK &&
        http_start(d.http, &err) == HD_OK) {
        http_set_gate(d.http, HTTP_OPEN);
        printf("port %d\n", http_port(d.http));
        fflush(stdout);
        char byte;
        while (read(STDIN_FILENO, &byte, 1) > 0) {
        }
        http_stats s;
        http_stop(d.http);
        do {
            usleep(1000);
            http_read_stats(d.http, &s);
        } while (s.calls); /* late answers */
        http_close(d.http);
    }
    hd_keys_close(keys);
    if (err.status != HD_OK) fprintf(stderr, "error: %s\n", err.msg);
    return err.status == HD_OK ? 0 : 1;
}
