/* record.c - keeps a record of each living call, in a hash table by the call's address.
 * Writes the request log and crash dumps. */
#define _GNU_SOURCE
#include "server/record.h"

#include <errno.h>
#include <jansson.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/json.h"
#include "http/listen.h"
#include "server/line_file.h"

/* The fields that a crash dump reads are written before `call` and cleared after it. */
typedef struct record {
    _Atomic(http_call *) call; /* NULL: free */
    const char *method, *path, *body;
    size_t body_n;
    int32_t next; /* next of its chain, or of the free list */
    uint64_t *ids;
    size_t n_ids, cap_ids;
    uint64_t seed;
    bool submitted, aborted;
    struct log_entry *entry; /* NULL: no request log */
} record;

struct request_records {
    line_file log;
    int crash_fd;
    pthread_mutex_t lock; /* guards the fields below */
    record *places;       /* [n] */
    int32_t *chains;      /* [n] first record of each chain */
    int32_t n, n_living, free;
};

static request_records *watched; /* read by the crash handler */
/* the previous handler of SIGBUS, which prints a message and exits */
static void (*last_words)(int);

request_records *records_new(int32_t capacity, int log_fd, int crash_fd) {
    request_records *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    r->log = (line_file){
        .fd = log_fd, .failed = "request_log_failed", .resumed = "request_log_goes_on"};
    r->crash_fd = crash_fd;
    r->n = capacity;
    r->places = calloc((size_t)capacity, sizeof *r->places);
    r->chains = calloc((size_t)capacity, sizeof *r->chains);
    pthread_mutex_init(&r->lock, NULL);
    if (!r->places || !r->chains) {
        records_free(r);
        return NULL;
    }
    for (int32_t i = 0; i < capacity; i++) {
        r->chains[i] = -1;
        r->places[i].next = i + 1 < capacity ? i + 1 : -1;
    }
    return r;
}

void records_free(request_records *r) {
    if (!r) return;
    if (watched == r) watched = NULL;
    line_file_close(&r->log);
    if (r->crash_fd >= 0) close(r->crash_fd);
    for (int32_t i = 0; r->places && i < r->n; i++) free(r->places[i].ids);
    pthread_mutex_destroy(&r->lock);
    free(r->places);
    free(r->chains);
    free(r);
}

static int32_t *chain_of(request_records *r, const http_call *c) {
    const uint64_t mixed = (uint64_t)(uintptr_t)c * 0x9e3779b97f4a7c15u;
    return &r->chains[(mixed >> 32) % (uint64_t)r->n];
}

static record *find(request_records *r, const http_call *c) {
    for (int32_t i = *chain_of(r, c); i >= 0; i = r->places[i].next) {
        if (atomic_load(&r->places[i].call) == c) return &r->places[i];
    }
    return NULL;
}

static record *add(request_records *r, http_call *c, uint64_t seed) {
    const int32_t i = r->free;
    if (i < 0) return NULL;
    record *p = &r->places[i];
    int32_t *chain = chain_of(r, c);
    r->free = p->next;
    p->next = *chain;
    *chain = i;
    p->method = http_method(c);
    p->path = http_path(c);
    p->body = http_body(c, &p->body_n);
    p->seed = seed;
    p->n_ids = 0;
    p->submitted = p->aborted = false;
    p->entry = NULL;
    r->n_living++;
    atomic_store(&p->call, c);
    return p;
}

static void remove_record(request_records *r, record *p) {
    const int32_t i = (int32_t)(p - r->places);
    int32_t *link = chain_of(r, atomic_load(&p->call));
    while (*link != i) link = &r->places[*link].next;
    *link = p->next;
    atomic_store(&p->call, NULL);
    p->next = r->free;
    r->free = i;
    r->n_living--;
}

/* ---- the log ---- */

/* A line of the request log: begun before submission, complete when both the reply and the
 * outcome are known. The outcome of a background response comes later. */
typedef struct log_entry {
    request_records *records;
    pthread_mutex_t lock; /* guards the fields below */
    json_t *line;         /* NULL: nothing to log */
    int32_t n_left;
} log_entry;

static void write_line(request_records *r, const json_t *line) {
    char *text = hd_json_write(line, JSON_COMPACT | JSON_ENSURE_ASCII);
    if (!text) return;
    const size_t n = strlen(text);
    text[n] = '\n'; /* replaces the NUL */
    line_file_append(&r->log, text, n + 1);
    free(text);
}

/* Takes the reference of more. */
static void complete_entry(log_entry *e, json_t *more) {
    pthread_mutex_lock(&e->lock);
    if (more) json_object_update(e->line, more);
    json_decref(more);
    const bool last = --e->n_left == 0;
    pthread_mutex_unlock(&e->lock);
    if (!last) return;
    if (e->line) write_line(e->records, e->line);
    json_decref(e->line);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

static void on_answered(void *user, const char *answer, size_t n) {
    complete_entry(user, json_pack("{s:s%}", "answer", answer, n));
}

static log_entry *begin_entry(request_records *r, http_call *c, uint64_t seed) {
    size_t n;
    const char *body = http_body(c, &n);
    log_entry *e = malloc(sizeof *e);
    json_t *line = json_pack("{s:I, s:s, s:s, s:s, s:s%, s:I}", "time", (json_int_t)time(NULL),
                             "request_id", http_request_id(c), "method", http_method(c), "path",
                             http_path(c), "body", body, n, "seed", (json_int_t)seed);
    if (!e || !line ||
        pthread_mutex_init(&e->lock, NULL) !=
            0) { /* no memory, or the body was refused because it is not UTF-8 */
        json_decref(line);
        free(e);
        return NULL;
    }
    e->records = r;
    e->line = line;
    e->n_left = 2;
    http_keep_answer(c, on_answered, e);
    return e;
}

static double milliseconds(int64_t from, int64_t to) {
    return to ? (double)(to - from) * 1e-6 : 0;
}

/* Drops the entry of a call that was refused before anything was computed. */
static void void_entry(log_entry *e) {
    pthread_mutex_lock(&e->lock);
    json_decref(e->line);
    e->line = NULL;
    pthread_mutex_unlock(&e->lock);
    complete_entry(e, NULL);
}

static void fill_entry(log_entry *e, const api_outcome *o) {
    json_t *more = json_pack(
        "{s:s, s:i, s:s?, s:i, s:i, s:i, s:i, s:f, s:f, s:f}", "endpoint", o->endpoint,
        "status", o->status, "finish", o->finish, "prompt_tokens", o->prompt_tokens,
        "cached_tokens", o->cached_tokens, "output_tokens", o->output_tokens,
        "reasoning_tokens", o->reasoning_tokens, "queue_ms",
        milliseconds(o->start_ns, o->admitted_ns), "ttft_ms",
        milliseconds(o->start_ns, o->first_ns), "e2e_ms", milliseconds(o->start_ns, o->end_ns));
    complete_entry(e, more);
}

/* ---- submitting and ending ---- */

void records_begin(request_records *r, http_call *c, uint64_t seed) {
    pthread_mutex_lock(&r->lock);
    record *p = add(r, c, seed);
    if (p && r->log.fd >= 0) p->entry = begin_entry(r, c, seed);
    pthread_mutex_unlock(&r->lock);
}

bool records_submit(request_records *r, http_call *c, uint64_t id) {
    pthread_mutex_lock(&r->lock);
    record *p = find(r, c);
    if (p) p->submitted = true;
    if (p && p->n_ids == p->cap_ids) {
        const size_t cap = p->cap_ids ? 2 * p->cap_ids : 2;
        uint64_t *ids = realloc(p->ids, cap * sizeof *ids);
        if (ids) {
            p->ids = ids;
            p->cap_ids = cap;
        }
    }
    if (p && p->n_ids < p->cap_ids) p->ids[p->n_ids++] = id;
    const bool wanted = !p || !p->aborted;
    pthread_mutex_unlock(&r->lock);
    return wanted;
}

/* The outcome names its call by the pointer to the call's id text, so equal ids of two
 * clients are distinguished. */
void records_end(request_records *r, const api_outcome *o) {
    http_call *c = http_call_of_id(o->request_id);
    pthread_mutex_lock(&r->lock);
    record *p = find(r, c);
    if (p) {
        if (p->entry) p->submitted ? fill_entry(p->entry, o) : void_entry(p->entry);
        remove_record(r, p);
    }
    pthread_mutex_unlock(&r->lock);
}

void records_abort(request_records *r, hd_engine *e, const char *request_id) {
    const size_t n = request_id ? strlen(request_id) : 0;
    pthread_mutex_lock(&r->lock);
    for (int32_t i = 0; i < r->n; i++) {
        record *p = &r->places[i];
        const http_call *c = atomic_load(&p->call);
        if (!c || (n && strncmp(http_request_id(c), request_id, n) != 0)) continue;
        for (size_t k = 0; k < p->n_ids; k++) hd_engine_cancel(e, p->ids[k]);
        p->aborted = true;
    }
    pthread_mutex_unlock(&r->lock);
}

size_t records_find(request_records *r, const char *request_id, uint64_t salt, uint64_t *ids,
                    size_t max) {
    size_t n = 0;
    pthread_mutex_lock(&r->lock);
    for (int32_t i = 0; i < r->n; i++) {
        const record *p = &r->places[i];
        const http_call *c = atomic_load(&p->call);
        if (!c || http_salt(c) != salt || strcmp(http_request_id(c), request_id) != 0) continue;
        for (size_t k = 0; k < p->n_ids && n < max; k++) ids[n++] = p->ids[k];
    }
    pthread_mutex_unlock(&r->lock);
    return n;
}

int32_t records_living(request_records *r) {
    pthread_mutex_lock(&r->lock);
    const int32_t n = r->n_living;
    pthread_mutex_unlock(&r->lock);
    return n;
}

/* ---- crashes: only async-signal-safe calls, on whatever state there is ---- */

typedef struct dump {
    char text[512];
    size_t n;
} dump;

static void put(dump *d, const char *text) {
    while (*text && d->n < sizeof d->text) d->text[d->n++] = *text++;
}

static void put_number(dump *d, uint64_t v) {
    char digits[24];
    size_t i = sizeof digits;
    digits[--i] = '\0';
    do {
        digits[--i] = (char)('0' + v % 10);
        v /= 10;
    } while (v);
    put(d, digits + i);
}

static void write_all(int fd, const char *bytes, size_t n) {
    while (n) {
        const ssize_t done = write(fd, bytes, n);
        if (done <= 0) return;
        bytes += done;
        n -= (size_t)done;
    }
}

/* Writes {"path":"/v1/completions","seed":1,"bytes":17}, then that many bytes and a line
 * feed. Paths are those of routes, so they need no escapes. */
static void dump_record(int fd, const record *p) {
    dump d = {.n = 0};
    put(&d, "{\"path\":\"");
    put(&d, p->path);
    put(&d, "\",\"seed\":");
    put_number(&d, p->seed);
    put(&d, ",\"bytes\":");
    put_number(&d, p->body_n);
    put(&d, "}\n");
    write_all(fd, d.text, d.n);
    write_all(fd, p->body, p->body_n);
    write_all(fd, "\n", 1);
}

/* Several threads of one step may crash at the same time; only the first writes the dump. */
static void on_crash(int signal_number) {
    static atomic_flag begun = ATOMIC_FLAG_INIT;
    static _Thread_local bool ours;
    /* a crash in this handler must not start another dump */
    const request_records *r = ours ? NULL : watched;
    while (!ours && atomic_flag_test_and_set(&begun)) pause();
    ours = true;
    for (int32_t i = 0; r && i < r->n; i++) {
        if (atomic_load(&r->places[i].call)) dump_record(r->crash_fd, &r->places[i]);
    }
    if (signal_number == SIGBUS && last_words) last_words(signal_number);
    signal(signal_number, SIG_DFL);
    /* after the return the process ends as it would have without this handler */
    raise(signal_number);
}

void records_watch_crashes(request_records *r) {
    static const int fatal[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
    if (r->crash_fd < 0) return;
    watched = r;
    struct sigaction action = {.sa_handler = on_crash}, before;
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGBUS, NULL, &before) == 0 && before.sa_handler != SIG_DFL &&
        before.sa_handler != SIG_IGN) {
        last_words = before.sa_handler;
    }
    for (size_t i = 0; i < HD_LEN(fatal); i++) sigaction(fatal[i], &action, NULL);
}
