/* run.c - a run of a load: starts what is due, follows each answer as it streams, goes on with the
 * next turn of its conversation, and keeps what every request saw. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/progress.h"
#include "client/client_internal.h"

enum { MOST_FAILURES = 1000, MAX_REFUSAL = 16 << 10 };

typedef struct run run;

/* A conversation in flight, and the request of its present turn. */
typedef struct talk {
    run *r;
    CURL *easy;
    dialog history;
    int64_t index;
    int32_t turn;
    client_record record;
    client_events events;
    client_text refusal; /* the body of a reply that is not 200 */
    char *body;
    double *gaps_ms; /* [n_gaps] of the present request */
    int64_t n_gaps, cap_gaps;
    int64_t order;              /* of sending */
    struct talk *next, *before; /* in flight; idle ones by next */
} talk;

struct run {
    const client_server *server;
    const client_load *load;
    client_run *out;
    wire wire;
    talk *active, *idle;
    int64_t in_flight, next, due_ns; /* conversations; the next one's index and time */
    int64_t start_ns, failures;      /* failures in a row */
    hd_progress progress;
    bool no_memory;
};

static int64_t since(const run *r) {
    return hd_now_ns() - r->start_ns;
}

/* Makes room for one more of size bytes. */
static bool grow(void **at, int64_t n, int64_t *cap, size_t size) {
    if (n < *cap) return true;
    const int64_t more = *cap ? 2 * *cap : 64;
    void *grown = realloc(*at, (size_t)more * size);
    if (!grown) return false;
    *at = grown;
    *cap = more;
    return true;
}

/* ---- bytes of an answer ---- */

static void note_gap(talk *t, double ms) {
    if (!grow((void **)&t->gaps_ms, t->n_gaps, &t->cap_gaps, sizeof *t->gaps_ms)) {
        t->r->no_memory = true;
        return;
    }
    t->gaps_ms[t->n_gaps++] = ms;
}

static void note_events(talk *t, int64_t n, int64_t now) {
    client_record *q = &t->record;
    for (; n > 0; n--) {
        if (q->first_ns) note_gap(t, (double)(now - q->last_ns) * 1e-6);
        if (!q->first_ns) q->first_ns = now;
        q->last_ns = now;
    }
}

static size_t on_bytes(char *bytes, size_t size, size_t n, void *user) {
    talk *t = user;
    const int64_t now = since(t->r);
    long status = 0;
    n *= size;
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    if (status != 200) {
        if (t->refusal.n + n > MAX_REFUSAL) return n;
        return client_text_add(&t->refusal, bytes, n) ? n : 0;
    }
    note_events(t, client_events_feed(&t->events, bytes, n), now);
    return t->events.failed || t->events.no_memory ? 0 : n;
}

/* ---- conversations ---- */

static talk *new_talk(run *r) {
    talk *t = r->idle;
    if (t) {
        r->idle = t->next;
    } else {
        t = calloc(1, sizeof *t);
        if (!t) return NULL;
        t->easy = wire_handle(&r->wire, r->server);
        if (!t->easy) {
            free(t);
            return NULL;
        }
        t->r = r;
        curl_easy_setopt(t->easy, CURLOPT_WRITEFUNCTION, on_bytes);
        curl_easy_setopt(t->easy, CURLOPT_WRITEDATA, t);
        curl_easy_setopt(t->easy, CURLOPT_PRIVATE, t);
    }
    t->before = NULL;
    t->next = r->active;
    if (r->active) r->active->before = t;
    r->active = t;
    r->in_flight++;
    return t;
}

static void clear_request(talk *t) {
    client_events_deinit(&t->events);
    free(t->body);
    t->body = NULL;
    t->refusal.n = 0;
    t->n_gaps = 0;
}

static void end_talk(talk *t) {
    run *r = t->r;
    clear_request(t);
    dialog_deinit(&t->history);
    if (t->before) t->before->next = t->next;
    if (t->next) t->next->before = t->before;
    if (r->active == t) r->active = t->next;
    t->next = r->idle;
    r->idle = t;
    r->in_flight--;
}

static void free_idle(run *r) {
    while (r->idle) {
        talk *t = r->idle;
        r->idle = t->next;
        curl_easy_cleanup(t->easy);
        free(t->refusal.at);
        free(t->gaps_ms);
        free(t);
    }
}

/* Sends the request of the present turn. */
static bool send_turn(talk *t, int64_t due_ns) {
    run *r = t->r;
    clear_request(t);
    t->events.keep = r->load->turns > 1;
    if (!dialog_ask(&t->history, r->server, r->load, t->index, t->turn)) return false;
    t->body = body_write(r->server, r->load, t->history.prompt,
                         plan_output(r->load, t->index, t->turn), true);
    if (!t->body) return false;
    curl_easy_setopt(t->easy, CURLOPT_POSTFIELDS, t->body);
    curl_easy_setopt(t->easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)strlen(t->body));
    t->record = (client_record){.conversation = t->index,
                                .turn = t->turn,
                                .due_ns = due_ns,
                                .sent_ns = since(r),
                                .cached = -1,
                                .error = -1};
    return curl_multi_add_handle(r->wire.multi.multi, t->easy) == CURLM_OK;
}

static bool start_talk(run *r) {
    talk *t = new_talk(r);
    if (!t) return false;
    const int64_t due = r->due_ns;
    t->index = r->next++;
    t->turn = 0;
    r->due_ns += (int64_t)(plan_gap(r->load, r->next) * 1e9);
    return send_turn(t, due);
}

/* ---- the end of a request ---- */

static int32_t count_error(client_run *out, const client_error *e) {
    int32_t i = 0;
    while (i < out->n_errors && strcmp(out->errors[i].name, e->name) != 0) i++;
    if (i == CLIENT_ERRORS) i--;
    if (i == out->n_errors) {
        out->errors[out->n_errors++] = *e;
        if (out->n_errors == CLIENT_ERRORS) {
            snprintf(out->errors[i].name, sizeof out->errors[i].name, "other errors");
        }
    }
    out->errors[i].count++;
    return i;
}

/* Whether the request failed, and then what to call it. */
static bool name_failure(client_error *e, talk *t, CURLcode code) {
    const client_events *got = &t->events;
    long status = 0;
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    *e = (client_error){0};
    if (got->failed) {
        snprintf(e->name, sizeof e->name, "error in the stream");
        snprintf(e->sample, sizeof e->sample, "%s", got->error);
    } else if (code == CURLE_OPERATION_TIMEDOUT) {
        snprintf(e->name, sizeof e->name, "timeout");
    } else if (code != CURLE_OK && status == 200) {
        snprintf(e->name, sizeof e->name, "stream cut");
        snprintf(e->sample, sizeof e->sample, "%s", curl_easy_strerror(code));
    } else if (code != CURLE_OK) {
        snprintf(e->name, sizeof e->name, "%s", curl_easy_strerror(code));
    } else if (status != 200) {
        client_name_refusal(e, status, t->refusal.at, t->refusal.n);
    } else if (!got->done && !got->finished) {
        snprintf(e->name, sizeof e->name, "stream cut");
        snprintf(e->sample, sizeof e->sample, "it ended without [DONE] or a finish reason");
    } else {
        return false;
    }
    return true;
}

static bool keep_gaps(client_run *out, const talk *t) {
    for (int64_t i = 0; i < t->n_gaps; i++) {
        if (!grow((void **)&out->gaps_ms, out->n_gaps, &out->cap_gaps, sizeof *out->gaps_ms)) {
            return false;
        }
        out->gaps_ms[out->n_gaps++] = t->gaps_ms[i];
    }
    return true;
}

/* Adds the record; true if the request was good. */
static bool keep_record(talk *t, CURLcode code) {
    run *r = t->r;
    client_record *q = &t->record;
    const client_events *got = &t->events;
    client_error e;
    const bool failed = name_failure(&e, t, code);
    if (failed) {
        q->error = count_error(r->out, &e);
        r->failures++;
    } else {
        q->counted = got->has_usage;
        q->input = got->has_usage ? got->prompt_tokens : 0;
        q->output = got->has_usage ? got->completion_tokens : got->with_text;
        if (got->has_cached) q->cached = got->cached_tokens;
        r->failures = 0;
        r->no_memory |= !keep_gaps(r->out, t);
    }
    r->no_memory |= got->no_memory;
    client_run *out = r->out;
    if (!grow((void **)&out->records, out->n, &out->cap, sizeof *out->records)) {
        r->no_memory = true;
    } else {
        out->records[out->n++] = *q;
    }
    return !failed;
}

static bool is_over(const run *r) {
    const client_load *load = r->load;
    return (load->duration_s > 0 && since(r) >= (int64_t)(load->duration_s * 1e9)) ||
           r->failures >= MOST_FAILURES;
}

static void show_progress(run *r) {
    const int64_t seconds = since(r) / 1000000000;
    if (r->load->conversations) {
        hd_progress_add(&r->progress, 1);
    } else if (seconds > r->progress.done) {
        hd_progress_add(&r->progress, seconds - r->progress.done);
    }
}

static void end_request(talk *t, CURLcode code, bool stopping) {
    run *r = t->r;
    curl_multi_remove_handle(r->wire.multi.multi, t->easy);
    const bool good = keep_record(t, code);
    show_progress(r);
    if (!good || stopping || t->turn + 1 == r->load->turns || is_over(r)) {
        end_talk(t);
        return;
    }
    r->no_memory |= !dialog_answer(&t->history, r->server, &t->events);
    t->turn++;
    r->no_memory |= !send_turn(t, since(r));
}

static void end_requests(run *r, bool stopping) {
    int left;
    for (CURLMsg *m; (m = curl_multi_info_read(r->wire.multi.multi, &left));) {
        talk *t = NULL;
        const CURLcode code = m->data.result;
        if (m->msg != CURLMSG_DONE) continue;
        curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, (char **)&t);
        end_request(t, code, stopping);
    }
}

/* ---- the loop ---- */

/* When the next conversation may start, in ns of hd_now_ns(); -1: only after another has ended,
 * or never. */
static int64_t next_due(const run *r) {
    const client_load *load = r->load;
    if (load->conversations && r->next == load->conversations) return -1;
    if (is_over(r) || (load->concurrency && r->in_flight >= load->concurrency)) return -1;
    return r->start_ns + r->due_ns;
}

static hd_status drive(run *r, const volatile sig_atomic_t *stop, hd_err *err) {
    r->start_ns = hd_now_ns();
    while (!*stop) {
        int64_t due = next_due(r);
        while (due >= 0 && due <= hd_now_ns() && !r->no_memory && !*stop) {
            r->no_memory |= !start_talk(r);
            due = next_due(r);
        }
        if (r->no_memory) return HD_FAIL(err, HD_ENOMEM, "no memory for the load");
        if (due < 0 && r->in_flight == 0) break;
        HD_TRY(client_multi_step(&r->wire.multi, due, err));
        end_requests(r, *stop != 0);
    }
    r->out->duration_ns = since(r);
    r->out->gave_up = r->failures >= MOST_FAILURES;
    return HD_OK;
}

static double processor_s(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

static int by_sending(const void *a, const void *b) {
    const client_record *x = a, *y = b;
    return (x->sent_ns > y->sent_ns) - (x->sent_ns < y->sent_ns);
}

hd_status client_run_all(client_run *out, const client_server *s, const client_load *load,
                         const volatile sig_atomic_t *stop, bool quiet, hd_err *err) {
    run r = {.server = s, .load = load, .out = out};
    const int64_t total =
        load->conversations ? load->conversations * load->turns : (int64_t)load->duration_s;
    const double before = processor_s();
    *out = (client_run){0};
    hd_status st = wire_open(&r.wire, s, s->chat ? "/chat/completions" : "/completions", err);
    hd_progress_init(&r.progress, "load", load->conversations ? "requests" : "seconds", total,
                     quiet);
    if (st == HD_OK) st = drive(&r, stop, err);
    hd_progress_end(&r.progress);
    if (out->duration_ns) out->processor = (processor_s() - before) / (double)out->duration_ns;
    out->processor *= 1e9;
    while (r.active) {
        curl_multi_remove_handle(r.wire.multi.multi, r.active->easy);
        out->unfinished++;
        end_talk(r.active);
    }
    free_idle(&r);
    wire_close(&r.wire);
    if (out->n) qsort(out->records, (size_t)out->n, sizeof *out->records, by_sending);
    return st;
}

void client_run_deinit(client_run *r) {
    free(r->records);
    free(r->gaps_ms);
    *r = (client_run){0};
}
