/* exchange.c - one request of a client, from the choice of a server to the end of its reply. A
 * server that refuses or is lost before the client has a byte is replaced by another, twice at
 * most. Streams are passed on in whole events, so that comments of the HTTP layer fit between. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/base64.h"
#include "base/log.h"
#include "base/progress.h"
#include "router/router_internal.h"

enum {
    MOST_RETRIES = 2,
    FIRST_PAUSE_MS = 50, /* before a retry; each one waits twice as long */
    REST_MS = 500,       /* a server that is overloaded or ends is left alone */
    MOST_BYTES = 256 << 20,
    STATUS_LOST = 502,
    ROUTER_MAX_PLACE = 1024
};
static const char PLACE[] = ": hadal "; /* api/resume.h */
static const int64_t MS_NS = 1000000;

struct router_exchange {
    router_transfer transfer; /* first: on_done gets its address */
    router *router;
    http_call *call;                  /* retained */
    router_exchange *next, *previous; /* living ones */
    router_exchange *next_arrived, *next_left, *next_ready;
    bool ready;  /* has bytes that came in this step */
    bool to_all; /* an admin request: every server gets it, one after the other */
    bool linked, begun, sent, over;
    atomic_bool left; /* the client has left: posted */
    bool left_seen;   /* the same, and taken from the inbox */
    router_prefix prefix;
    router_choice choice;   /* valid while sent */
    int64_t waiting_tokens; /* counted in the server's until the first byte */
    uint64_t tried;
    int32_t retries;
    int64_t due_ns; /* when it is sent again; 0: it is under way */
    int status;
    char type[160];
    hd_bytes fields; /* names and values of the reply's headers, each NUL-terminated */
    hd_bytes body;   /* of the reply, or the unfinished event of a stream */
    size_t held;     /* bytes of body, counted in the limit on unread replies */
    char place[ROUTER_MAX_PLACE]; /* how far a stream has come; "": nobody could go on */
};

/* ---- headers ---- */

static bool is_one_of(const char *name, const char *const *names) {
    for (; *names; names++) {
        if (strcasecmp(name, *names) == 0) return true;
    }
    return false;
}

/* Those of the connection, those that the router checks itself, and those between servers. */
static bool goes_up(const char *name) {
    static const char *const stay[] = {
        "Host",   "Connection",   "Keep-Alive", "Transfer-Encoding", "Content-Length",
        "TE",     "Expect",       "Upgrade",    "Proxy-Connection",  "Trailer",
        "Origin", "X-Request-Id", NULL};
    return !is_one_of(name, stay) && strncasecmp(name, "X-Hadal-", 8) != 0;
}

/* Without those that the HTTP layer adds to every reply. */
static bool goes_down(const char *name) {
    static const char *const stay[] = {
        "Connection",   "Keep-Alive", "Transfer-Encoding", "Content-Length",
        "Content-Type", "Date",       "X-Request-Id",      "X-Content-Type-Options",
        "Vary",         NULL};
    return !is_one_of(name, stay) && strncasecmp(name, "Access-Control-", 15) != 0;
}

static bool add_headers(router_exchange *e) {
    router_transfer *t = &e->transfer;
    const char *name, *value;
    bool whole = router_transfer_add_header(t, "X-Request-Id", http_request_id(e->call));
    bool typed = false;
    for (size_t i = 0; whole && http_header_at(e->call, i, &name, &value); i++) {
        typed = typed || strcasecmp(name, "Content-Type") == 0;
        if (goes_up(name)) whole = router_transfer_add_header(t, name, value);
    }
    if (whole && !typed) { /* libcurl would declare a form */
        struct curl_slist *more = curl_slist_append(t->headers, "Content-Type:");
        whole = more != NULL;
        if (more) t->headers = more;
    }
    if (whole) whole = router_transfer_add_header(t, "X-Hadal-Resume", e->place);
    if (whole && e->prefix.n) {
        char text[ROUTER_PREFIX_BLOCKS * sizeof(uint64_t) * 4 / 3 + 5];
        const size_t n = (size_t)e->prefix.n * sizeof(uint64_t);
        hd_base64_encode(text, (const uint8_t *)e->prefix.hashes, n);
        text[hd_base64_length(n)] = '\0';
        whole = router_transfer_add_header(t, "X-Hadal-Prefix", text);
    }
    if (whole && e->choice.prefill >= 0) {
        const char *peer = e->router->picture.peers[e->choice.prefill].name;
        whole = router_transfer_add_header(t, "X-Hadal-Prefill", peer);
    }
    return whole;
}

/* The HTTP layer adds those of a stream itself. */
static void pass_fields(router_exchange *e) {
    static const char *const of_streams[] = {"Cache-Control", "X-Accel-Buffering", NULL};
    for (size_t at = 0; at < e->fields.n;) {
        const char *name = e->fields.data + at, *value = name + strlen(name) + 1;
        if (!e->begun || !is_one_of(name, of_streams)) http_reply_header(e->call, name, value);
        at = (size_t)(value + strlen(value) + 1 - e->fields.data);
    }
}

/* ---- the books ---- */

static router_peer *peer_of(const router_exchange *e) {
    return &e->router->picture.peers[e->choice.peer];
}

static void count_sent(router_exchange *e) {
    router *r = e->router;
    pthread_mutex_lock(&r->lock);
    router_sent(&r->picture, &e->prefix, &e->choice);
    peer_of(e)->inflight++;
    peer_of(e)->inflight_tokens += e->waiting_tokens = e->choice.tokens;
    pthread_mutex_unlock(&r->lock);
    e->sent = true;
}

static void count_first_byte(router_exchange *e) {
    if (!e->waiting_tokens) return;
    pthread_mutex_lock(&e->router->lock);
    peer_of(e)->inflight_tokens -= e->waiting_tokens;
    pthread_mutex_unlock(&e->router->lock);
    e->waiting_tokens = 0;
}

static void drop_body(router_exchange *e) {
    http_let_go(e->call, e->held);
    e->held = e->body.n = e->fields.n = 0;
    e->type[0] = '\0';
}

/* When it is sent again; 0: it is not to be. */
static void set_due(router_exchange *e, int64_t due_ns) {
    e->router->n_due += (due_ns != 0) - (e->due_ns != 0);
    e->due_ns = due_ns;
}

/* Ends the transfer to the server, under way or not. */
static void leave_peer(router_exchange *e, bool failed) {
    router *r = e->router;
    router_transfer_close(r, &e->transfer);
    if (!e->sent) return;
    count_first_byte(e);
    pthread_mutex_lock(&r->lock);
    peer_of(e)->inflight--;
    peer_of(e)->failures += failed;
    pthread_mutex_unlock(&r->lock);
    e->sent = false;
}

static void free_exchange(router_exchange *e) {
    hd_bytes_deinit(&e->body);
    hd_bytes_deinit(&e->fields);
    free(e);
}

/* The call was answered, so its client cannot be reported as gone any more. */
static void end(router_exchange *e) {
    router *r = e->router;
    leave_peer(e, false);
    drop_body(e);
    set_due(e, 0);
    if (e->next) e->next->previous = e->previous;
    if (e->previous) {
        e->previous->next = e->next;
    } else {
        r->living = e->next;
    }
    http_release(e->call);
    atomic_fetch_sub(&r->n_living, 1);
    e->over = true;
    if (!atomic_load(&e->left) || e->left_seen) free_exchange(e); /* else with the inbox */
}

/* ---- the reply ---- */

static void reply(router_exchange *e) {
    pass_fields(e);
    http_let_go(e->call, e->held);
    e->held = 0;
    http_reply(e->call, e->status, e->type[0] ? e->type : NULL,
               e->body.data ? e->body.data : "", e->body.n);
    end(e);
}

static void refuse(router_exchange *e, int status, const char *code, const char *message) {
    http_reply_header(e->call, "Retry-After", "1");
    http_error(e->call, status, "server_error", code, NULL, "%s", message);
    end(e);
}

/* A stream never ends in silence: its last event is an error. */
static void end_stream_with_error(router_exchange *e) {
    static const char openai[] =
        "data: {\"error\":{\"message\":\"the rest of this response was lost\","
        "\"type\":\"server_error\",\"param\":null,\"code\":\"stream_lost\"}}\n\n";
    static const char anthropic[] =
        "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":"
        "\"the rest of this response was lost\"}}\n\n";
    if (http_shape_of(e->call) == HTTP_ANTHROPIC) {
        http_stream_write(e->call, anthropic, sizeof anthropic - 1);
    } else {
        http_stream_write(e->call, openai, sizeof openai - 1);
    }
    http_stream_end(e->call);
    atomic_fetch_add(&e->router->lost, 1);
    end(e);
}

/* ---- bytes of the server ---- */

static size_t on_header(char *line, size_t size, size_t n, void *user) {
    router_exchange *e = user;
    const size_t bytes = size * n;
    size_t end = bytes, name_n = 0;
    while (end && (line[end - 1] == '\n' || line[end - 1] == '\r')) end--;
    if (end > 9 && strncmp(line, "HTTP/", 5) == 0) {
        e->status = (int)strtol(line + 9, NULL, 10);
        e->fields.n = 0;
        return bytes;
    }
    while (name_n < end && line[name_n] != ':') name_n++;
    if (name_n == 0 || name_n == end) return bytes; /* the end of the headers */
    const char *value = line + name_n + 1;
    while (value < line + end && *value == ' ') value++;
    const int value_n = (int)(line + end - value);
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)name_n, line);
    if (strcasecmp(name, "Content-Type") == 0) {
        snprintf(e->type, sizeof e->type, "%.*s", value_n, value);
    }
    if (name_n >= sizeof name || !goes_down(name)) return bytes;
    const bool kept = hd_bytes_append(&e->fields, name, name_n + 1, NULL) == HD_OK &&
                      hd_bytes_append(&e->fields, value, (size_t)value_n, NULL) == HD_OK &&
                      hd_bytes_append(&e->fields, "", 1, NULL) == HD_OK;
    return kept ? bytes : 0;
}

/* Returns the length of all whole events. */
static size_t whole_events(const hd_bytes *b) {
    for (size_t n = b->n; n >= 2; n--) {
        if (b->data[n - 1] == '\n' && b->data[n - 2] == '\n') return n;
    }
    return 0;
}

static void remove_bytes(router_exchange *e, size_t at, size_t n) {
    e->body.n -= n;
    memmove(e->body.data + at, e->body.data + at + n, e->body.n - at);
    http_let_go(e->call, n);
    e->held -= n;
}

/* Returns where the event at `at` ends, at most n. */
static size_t event_end(const hd_bytes *b, size_t at, size_t n) {
    while (at + 1 < n && (b->data[at] != '\n' || b->data[at + 1] != '\n')) at++;
    return at + 2 < n ? at + 2 : n;
}

/* Takes the comments that say how far the stream has come out of n bytes of events. Returns the
 * bytes that are left. */
static size_t take_places(router_exchange *e, size_t n) {
    const size_t head = sizeof PLACE - 1;
    for (size_t at = 0, end; at < n; at = end) {
        const char *event = e->body.data + at;
        end = event_end(&e->body, at, n);
        if (end - at < head + 2 || memcmp(event, PLACE, head) != 0) continue;
        const size_t size = end - at - head - 2;
        if (size >= sizeof e->place) continue;
        memcpy(e->place, event + head, size);
        e->place[size] = '\0';
        remove_bytes(e, at, end - at);
        n -= end - at;
        end = at;
    }
    return n;
}

static bool pass_events(router_exchange *e, size_t n) {
    n = take_places(e, n);
    if (!n) return true;
    const bool written = http_stream_write(e->call, e->body.data, n);
    remove_bytes(e, 0, n);
    atomic_fetch_add_explicit(&e->router->events, 1, memory_order_relaxed);
    return written;
}

static bool is_stream(const router_exchange *e) {
    return e->status == 200 && strncasecmp(e->type, "text/event-stream", 17) == 0;
}

static size_t on_bytes(char *bytes, size_t size, size_t n, void *user) {
    router_exchange *e = user;
    n *= size;
    count_first_byte(e);
    if (!http_hold(e->call, n)) return 0;
    e->held += n;
    if (hd_bytes_append(&e->body, bytes, n, NULL) != HD_OK) return 0;
    if (!is_stream(e)) return n;
    if (!e->begun) {
        e->begun = true;
        pass_fields(e);
        http_stream_begin(e->call);
    }
    if (!e->ready) {
        e->next_ready = e->router->ready;
        e->router->ready = e;
    }
    e->ready = true;
    return n;
}

/* ---- sending ---- */

static bool set_request(router_exchange *e) {
    CURL *easy = e->transfer.easy;
    const char *method = http_method(e->call);
    size_t n;
    const char *body = http_body(e->call, &n);
    if (strcmp(method, "HEAD") == 0) {
        curl_easy_setopt(easy, CURLOPT_NOBODY, 1L);
    } else if (n || strcmp(method, "POST") == 0) {
        curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)n);
        curl_easy_setopt(easy, CURLOPT_POSTFIELDS, body); /* which the call keeps */
    }
    if (strcmp(method, "HEAD") != 0) curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, method);
    curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(easy, CURLOPT_HEADERDATA, e);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_bytes);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, e);
    return add_headers(e);
}

/* There is no server for it: a stream that has begun ends with an error. */
static void give_back(router_exchange *e, const char *code, const char *message) {
    if (e->begun) {
        end_stream_with_error(e);
    } else {
        refuse(e, 503, code, message);
    }
}

static void send_to_choice(router_exchange *e) {
    router_transfer *t = &e->transfer;
    set_due(e, 0);
    e->status = 0;
    drop_body(e);
    count_sent(e);
    if (router_transfer_open(t, peer_of(e)->name, http_raw_target(e->call)) && set_request(e) &&
        router_transfer_send(e->router, t)) {
        return;
    }
    give_back(e, "out_of_memory", "no memory for the request");
}

static router_choice choose(router_exchange *e) {
    router *r = e->router;
    return router_choose(&r->picture, &e->prefix, e->tried, (uint64_t)atomic_load(&r->turn),
                         hd_now_ns());
}

/* Plans a further attempt. Returns false if there were enough, or nobody could go on. */
static bool try_later(router_exchange *e) {
    if ((e->begun && !e->place[0]) || e->to_all || e->retries == MOST_RETRIES) return false;
    set_due(e, hd_now_ns() + ((int64_t)FIRST_PAUSE_MS << e->retries++) * MS_NS);
    atomic_fetch_add(&e->router->retries, 1);
    return true;
}

static void send_somewhere(router_exchange *e) {
    e->choice = choose(e);
    if (e->choice.peer < 0 &&
        e->tried) { /* all were tried: a second time is better than none */
        e->tried = 0;
        e->choice = choose(e);
    }
    if (e->choice.peer >= 0) {
        atomic_fetch_add(&e->router->turn, 1);
        send_to_choice(e);
    } else if (!try_later(e)) {
        give_back(e, "no_server", "no server can take the request now");
    }
}

/* Returns false if no server is left that the request was not sent to. */
static bool send_to_next(router_exchange *e) {
    const router_picture *p = &e->router->picture;
    for (int32_t i = 0; i < p->n; i++) {
        if (!p->peers[i].up || p->peers[i].gone || (e->tried >> i & 1)) continue;
        e->choice = (router_choice){.peer = i, .prefill = -1};
        e->tried |= 1ull << i;
        send_to_choice(e);
        return true;
    }
    return false;
}

static void start(router_exchange *e) {
    if (!e->to_all) {
        send_somewhere(e);
    } else if (!send_to_next(e)) {
        refuse(e, 503, "no_server", "no server can take the request now");
    }
}

/* ---- the end of a transfer ---- */

static void lose_peer(router_exchange *e) {
    HD_LOG(HD_LOG_WARN, "request_lost_server",
           hd_log_text("request_id", http_request_id(e->call)),
           hd_log_text("server", peer_of(e)->name));
    leave_peer(e, true);
    e->tried |= 1ull << e->choice.peer;
    if (try_later(e)) {
        if (e->begun) atomic_fetch_add(&e->router->resumed, 1);
        return;
    }
    if (e->begun) {
        end_stream_with_error(e);
        return;
    }
    refuse(e, STATUS_LOST, "server_lost", "the server that got the request was lost");
}

/* A stored response lies on one server, and only that one knows it. */
static bool may_lie_elsewhere(const router_exchange *e) {
    const char *path = http_path(e->call);
    if (strncmp(path, "/v1", 3) == 0) path += 3;
    return e->status == 404 && strncmp(path, "/responses", 10) == 0;
}

static void rest(router_exchange *e) {
    pthread_mutex_lock(&e->router->lock);
    peer_of(e)->rest_until_ns = hd_now_ns() + REST_MS * MS_NS;
    pthread_mutex_unlock(&e->router->lock);
}

static void take_reply(router_exchange *e) {
    leave_peer(e, false);
    e->tried |= 1ull << e->choice.peer;
    if (e->to_all) {
        if (e->status >= 400 || !send_to_next(e)) reply(e);
    } else if (e->status == 503) {
        rest(e);
        if (!try_later(e)) reply(e);
    } else if (!may_lie_elsewhere(e) || !send_to_next(e)) {
        reply(e);
    }
}

/* The connection to the server is closed, which cancels the request there. */
static void give_up(router_exchange *e) {
    atomic_fetch_add(&e->router->cancelled, 1);
    if (e->begun) {
        http_stream_end(e->call);
        end(e);
    } else {
        refuse(e, 503, "client_left", "the client has left");
    }
}

static void on_done(router_transfer *t, CURLcode code) {
    router_exchange *e = (router_exchange *)t;
    /* the client has left or is too slow, or there is no memory */
    if (code == CURLE_WRITE_ERROR) {
        if (atomic_load(&e->left)) { /* the inbox says so later */
            give_up(e);
        } else if (e->begun) {
            end_stream_with_error(e);
        } else {
            refuse(e, 503, "out_of_memory", "no room for the response");
        }
    } else if (code != CURLE_OK) {
        lose_peer(e);
    } else if (e->begun && !is_stream(e)) { /* a server that should go on refuses */
        lose_peer(e);
    } else if (e->begun) {
        pass_events(e, e->body.n);
        http_stream_end(e->call);
        end(e);
    } else {
        take_reply(e);
    }
}

/* What a server wrote in several pieces is written to the client in one. */
void router_pass_ready(router *r) {
    for (router_exchange *e = r->ready, *next; e; e = next) {
        next = e->next_ready;
        e->ready = false;
        if (!pass_events(e, whole_events(&e->body))) on_done(&e->transfer, CURLE_WRITE_ERROR);
    }
    r->ready = NULL;
}

void router_lose_peer(router *r, int32_t peer) {
    for (router_exchange *e = r->living, *next; e; e = next) {
        next = e->next;
        if (e->sent && e->choice.peer == peer) lose_peer(e);
    }
}

int64_t router_send_due(router *r, int64_t now_ns) {
    int64_t due = -1;
    if (!r->n_due) return due;
    for (router_exchange *e = r->living, *next; e; e = next) {
        next = e->next;
        if (!e->due_ns) continue;
        if (e->due_ns <= now_ns) {
            send_somewhere(e);
        } else if (due < 0 || e->due_ns < due) {
            due = e->due_ns;
        }
    }
    return due;
}

/* ---- the inbox ---- */

static void on_left(void *user) {
    router_exchange *e = user;
    router *r = e->router;
    pthread_mutex_lock(&r->inbox_lock);
    atomic_store(&e->left, true);
    e->next_left = r->left;
    r->left = e;
    pthread_mutex_unlock(&r->inbox_lock);
    client_multi_wake(&r->multi);
}

static void take_arrived(router *r, router_exchange *first) {
    for (router_exchange *e = first, *next; e; e = next) {
        next = e->next_arrived;
        e->linked = true;
        e->previous = NULL;
        e->next = r->living;
        // NOLINTNEXTLINE(clang-analyzer-unix.Malloc): one that ended left the list, as e->router is r
        if (e->next) e->next->previous = e;
        r->living = e;
        if (e->left_seen) {
            give_up(e);
        } else {
            start(e);
        }
    }
}

/* One that ended meanwhile was kept for this; one that has not arrived yet will see it. */
static void take_left(router_exchange *first) {
    for (router_exchange *e = first, *next; e; e = next) {
        next = e->next_left;
        e->left_seen = true;
        if (e->over) {
            free_exchange(e);
        } else if (e->linked) {
            give_up(e);
        }
    }
}

void router_take_inbox(router *r) {
    pthread_mutex_lock(&r->inbox_lock);
    router_exchange *arrived = r->arrived, *left = r->left;
    r->arrived = r->left = NULL;
    pthread_mutex_unlock(&r->inbox_lock);
    take_arrived(r, arrived);
    take_left(left);
}

static void forward(http_call *c, router *r, bool to_all) {
    router_exchange *e = calloc(1, sizeof *e);
    if (!e) {
        http_error(c, 503, "overloaded_error", "no_memory", NULL, "no memory for this request");
        return;
    }
    size_t n;
    const char *body = http_body(c, &n);
    *e = (router_exchange){.transfer.on_done = on_done,
                           .router = r,
                           .call = c,
                           .to_all = to_all,
                           .fields.max = 64 << 10,
                           .body.max = MOST_BYTES};
    if (!to_all) router_prefix_of(&e->prefix, body, n, http_salt(c), r->prefix_key);
    http_retain(c);
    atomic_fetch_add(&r->n_living, 1);
    http_on_gone(c, on_left, e);
    pthread_mutex_lock(&r->inbox_lock);
    e->next_arrived = r->arrived;
    r->arrived = e;
    pthread_mutex_unlock(&r->inbox_lock);
    client_multi_wake(&r->multi);
}

void router_forward(http_call *c, void *user) {
    forward(c, user, false);
}

void router_forward_to_all(http_call *c, void *user) {
    forward(c, user, true);
}
