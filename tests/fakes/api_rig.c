/* api_rig.c - a recording HTTP call and a scripted engine behind http.h and engine.h. */
#include "fakes/api_rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "api/text.h"
#include "fakes/toy_tokenizer.h"

/* ---- calls ---- */

enum { MAX_HEADERS = 8 };

struct http_call {
    const http_route *route;
    char path[512], method[8], id[160];
    const char *tail, *stream; /* the value of that query */
    char *body;
    size_t n_body;
    int32_t refs, status;
    bool streaming, ended, gone, stalled, handed_over;
    api_text out;
    char names[MAX_HEADERS][64], values[MAX_HEADERS][300];
    int32_t n_headers;
    void (*on_gone)(void *user);
    void *on_gone_user;
};

struct rig_call {
    http_call call;
};

static void demand(bool so, const char *what) {
    if (so) return;
    fprintf(stderr, "api_rig: %s\n", what);
    abort();
}

const char *http_method(const http_call *c) {
    return c->method;
}
const char *http_path(const http_call *c) {
    return c->path;
}
const char *http_path_tail(const http_call *c) {
    return c->tail;
}
const char *http_header(const http_call *c, const char *name) {
    (void)c;
    (void)name;
    return NULL;
}
const char *http_query(const http_call *c, const char *name) {
    return strcmp(name, "stream") == 0 ? c->stream : NULL;
}
bool http_query_number(const http_call *c, const char *name, long low, long high,
                       long otherwise, long *out) {
    (void)c, (void)name, (void)low, (void)high;
    *out = otherwise;
    return true;
}
const char *http_body(const http_call *c, size_t *n) {
    *n = c->n_body;
    return c->body;
}
const char *http_request_id(const http_call *c) {
    return c->id;
}
void http_set_request_id(http_call *c, const char *id) {
    snprintf(c->id, sizeof c->id, "%s", id);
}
int64_t http_start_ns(const http_call *c) {
    (void)c;
    return 1;
}
bool http_hand_over(http_call *c) {
    demand(c->status == 0 && c->n_headers == 0, "a call is handed over too late");
    const bool first = !c->handed_over;
    c->handed_over = true;
    return first;
}
void http_retain(http_call *c) {
    c->refs++;
}
void http_release(http_call *c) {
    demand(c->refs > 0, "a call is released too often");
    if (--c->refs > 0) return;
    api_text_deinit(&c->out);
    free(c->body);
    free(c);
}
void http_on_gone(http_call *c, void (*fn)(void *user), void *user) {
    c->on_gone = fn;
    c->on_gone_user = user;
}

static void answered(http_call *c, int status) {
    demand(c->status == 0, "a call is answered twice");
    c->status = status;
}

void http_reply(http_call *c, int status, const char *type, const char *body, size_t n) {
    answered(c, status);
    demand(strcmp(type, "application/json") == 0 || strcmp(type, "text/event-stream") == 0,
           "a reply is no JSON, and no events");
    api_put(&c->out, body, n);
    c->ended = true;
}
void http_reply_owned(http_call *c, int status, const char *type, char *body, size_t n) {
    http_reply(c, status, type, body, n);
    free(body);
}
void http_reply_header(http_call *c, const char *name, const char *value) {
    demand(!strpbrk(name, "\r\n") && !strpbrk(value, "\r\n"), "a header is split");
    if (c->n_headers == MAX_HEADERS) return;
    snprintf(c->names[c->n_headers], sizeof c->names[0], "%s", name);
    snprintf(c->values[c->n_headers++], sizeof c->values[0], "%s", value);
}
void http_error(http_call *c, int status, const char *type, const char *code, const char *param,
                const char *format, ...) {
    char message[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    demand(status >= 400 && type, "an error has no status or no type");
    answered(c, status);
    if (c->route->shape == HTTP_ANTHROPIC) {
        api_write(&c->out, "{'type':'error','error':{'type':%s,'message':%s}}", type, message);
    } else {
        api_write(&c->out, "{'error':{'message':%s,'type':%s,'param':%s,'code':%s}}", message,
                  type, param, code);
    }
    c->ended = true;
}
void http_stream_begin(http_call *c) {
    answered(c, 200);
    c->streaming = true;
}
bool http_stream_write(http_call *c, const char *bytes, size_t n) {
    demand(c->streaming && !c->ended, "a write outside a stream");
    if (c->gone || c->stalled) return false;
    api_put(&c->out, bytes, n);
    return true;
}
void http_stream_end(http_call *c) {
    demand(c->streaming && !c->ended, "the end of no stream");
    c->ended = true;
}

static const http_route *find_route(const char *method, const char *path) {
    for (size_t i = 0; i < api_n_routes; i++) {
        const size_t n = strlen(api_routes[i].path);
        const bool star = api_routes[i].path[n - 1] == '*';
        const bool same = star ? strncmp(path, api_routes[i].path, n - 1) == 0
                               : strcmp(path, api_routes[i].path) == 0;
        if (same && strstr(api_routes[i].methods, method)) return &api_routes[i];
    }
    demand(false, path);
    return NULL;
}

static rig_call *run(rig *r, const char *method, const char *path, const char *body, size_t n) {
    rig_call *made = calloc(1, sizeof *made);
    http_call *c = &made->call;
    c->route = find_route(method, path);
    c->refs = 1;
    c->body = calloc(1, n + 1);
    if (n > 0) memcpy(c->body, body, n);
    c->n_body = n;
    snprintf(c->path, sizeof c->path, "%s", path);
    c->path[strcspn(c->path, "?")] = '\0';
    c->stream = strstr(path, "?stream=") ? strstr(path, "?stream=") + 8 : NULL;
    snprintf(c->method, sizeof c->method, "%s", method);
    snprintf(c->id, sizeof c->id, "call-1");
    c->tail = c->path + strlen(c->route->path) - 1;
    r->begun = NULL;
    c->route->handler(c, &r->ctx);
    if (c->handed_over) {
        demand(c->status == 0 && c->n_headers == 0, "a call that is handed over has a trace");
        c->route->handler(c, &r->ctx);
    }
    return made;
}

rig_call *rig_post(rig *r, const char *path, const char *body) {
    return run(r, "POST", path, body, strlen(body));
}
rig_call *rig_post_bytes(rig *r, const char *path, const char *body, size_t n) {
    return run(r, "POST", path, body, n);
}
rig_call *rig_get(rig *r, const char *path) {
    return run(r, "GET", path, "", 0);
}
void rig_vanish(rig_call *c) {
    c->call.gone = true;
    if (c->call.on_gone && !c->call.ended) c->call.on_gone(c->call.on_gone_user);
    c->call.on_gone = NULL;
}
void rig_stall(rig_call *c) {
    c->call.stalled = true;
}
int rig_status(const rig_call *c) {
    return c->call.status;
}
const char *rig_text(rig_call *c) {
    api_put(&c->call.out, "", 1);
    c->call.out.n--;
    return c->call.out.data;
}
const char *rig_header(const rig_call *c, const char *name) {
    for (int32_t i = 0; i < c->call.n_headers; i++) {
        if (strcmp(c->call.names[i], name) == 0) return c->call.values[i];
    }
    return NULL;
}
bool rig_was_handed_over(const rig_call *c) {
    return c->call.handed_over;
}
bool rig_ended(const rig_call *c) {
    return c->call.ended;
}
bool rig_release(rig_call *c) {
    const bool last = c->call.refs == 1;
    http_release(&c->call);
    return last;
}

/* ---- the engine ---- */

struct hd_engine {
    rig *r;
    hd_tokenizer *tokenizer;
    hd_model_spec spec;
};

static hd_engine the_engine;

int64_t http_token_quota(const http_call *c) {
    (void)c;
    return the_engine.r->key_tokens;
}
int32_t http_reserve_tokens(http_call *c, int64_t tokens) {
    (void)c;
    demand(tokens > 0 && tokens <= the_engine.r->key_tokens, "more is set aside than there is");
    the_engine.r->n_reserved += tokens;
    return the_engine.r->key_wait;
}
bool http_hold(http_call *c, size_t n) {
    (void)c;
    if (n > the_engine.r->max_held - the_engine.r->held) return false;
    the_engine.r->held += n;
    return true;
}
void http_let_go(http_call *c, size_t n) {
    (void)c;
    demand(n <= the_engine.r->held, "more is let go than is held");
    the_engine.r->held -= n;
}
uint64_t http_salt(const http_call *c) {
    (void)c;
    return the_engine.r->salt;
}

enum { MAX_CONTEXT = 4096, VOCAB = 264 };

void hd_engine_defaults(const hd_engine *e, hd_request *g) {
    (void)e;
    g->temperature = 0.6f;
    g->top_p = 0.95f;
    g->repetition_penalty = 1;
}
void hd_engine_read_stats(hd_engine *e, hd_engine_stats *out) {
    (void)e;
    *out = (hd_engine_stats){.max_context = MAX_CONTEXT};
}
const hd_tokenizer *hd_engine_tokenizer(const hd_engine *e) {
    return e->tokenizer;
}
const hd_model_spec *hd_engine_spec(const hd_engine *e) {
    return &e->spec;
}
hd_chat_encoding hd_engine_encoding(const hd_engine *e) {
    (void)e;
    return HD_CHAT_V4;
}
bool hd_engine_thinks(const hd_engine *e) {
    (void)e;
    return false;
}
hd_status hd_engine_render(const hd_engine *e, hd_chat_prompt *out, const hd_request *g,
                           const hd_conversation *conversation, hd_err *err) {
    const hd_chat_options options = {.encoding = hd_engine_encoding(e),
                                     .thinking = g->thinking > 0,
                                     .effort = (hd_chat_effort)g->effort};
    return hd_chat_render(out, conversation, &options, err);
}

hd_status hd_engine_encode(const hd_engine *e, hd_ids *out, const hd_request *g,
                           const hd_conversation *conversation, hd_err *err) {
    hd_chat_prompt prompt;
    HD_TRY(hd_engine_render(e, &prompt, g, conversation, err));
    const hd_status st = hd_chat_encode(&prompt, e->tokenizer, out, err);
    hd_chat_prompt_deinit(&prompt);
    return st;
}

/* Reads all memory that the request points to, as the engine does when it copies it. */
static size_t read_all(const hd_request *g) {
    size_t n = g->format_text ? strlen(g->format_text) : 0;
    for (size_t i = 0; i < g->n_stop; i++) n += strlen(g->stop[i]);
    for (size_t i = 0; i < g->n_choices; i++) n += strlen(g->choices[i]);
    for (size_t i = 0; i < g->n_stop_tokens; i++) n += (size_t)g->stop_tokens[i];
    for (size_t i = 0; i < g->n_bias; i++) n += (size_t)g->bias[i].token;
    return n + (g->tool_choice ? strlen(g->tool_choice) : 0);
}

hd_status hd_engine_submit_chat(hd_engine *e, uint64_t *id, const hd_request *g,
                                const hd_conversation *conversation, hd_err *err) {
    rig *r = e->r;
    hd_chat_prompt prompt = {0};
    const bool refuse = r->refuse_at >= 0 && r->n_requests >= r->refuse_at;
    demand(g->size == sizeof *g && g->n >= 1 && g->n <= HD_MAX_CHOICES, "bad request");
    demand((conversation != NULL) != (g->tokens != NULL), "no prompt, or two");
    demand(read_all(g) < SIZE_MAX, "never");
    demand(r->begun != NULL, "a prompt is submitted before its call begins");
    if (refuse) {
        return HD_REFUSE(err, r->refuse_at_status, r->refuse_code, r->refuse_field, "%s",
                         r->refuse_why);
    }
    if (r->n_requests == RIG_REQUESTS) return HD_FAIL(err, HD_EAGAIN, "the queue is full");
    if (conversation) HD_TRY(hd_engine_render(e, &prompt, g, conversation, err));
    rig_request *q = &r->requests[r->n_requests++];
    *q = (rig_request){.id = (uint64_t)r->n_requests, .g = *g, .living = g->n};
    q->n_prompt = conversation ? (int32_t)prompt.n_spans : (int32_t)g->n_tokens;
    hd_chat_prompt_deinit(&prompt);
    *id = q->id;
    return HD_OK;
}

void hd_engine_cancel(hd_engine *e, uint64_t id) {
    for (int32_t i = 0; i < e->r->n_requests; i++) {
        rig_request *q = &e->r->requests[i];
        if (q->id != id || q->cancelled || q->living == 0) continue;
        q->cancelled = true;
        e->r->n_cancels++;
    }
}

/* ---- events ---- */

static void send_event(rig *r, int32_t i, hd_event *e) {
    rig_request *q = &r->requests[i];
    static const int32_t prompt_ids[3] = {10, 11, 12};
    static const float scores[3] = {-0.5f, -1.0f, -1.5f};
    static hd_alternative top[3 * HD_DEFAULT_LOGPROBS];
    const int32_t n_top = q->g.top_logprobs;
    for (size_t k = 0; k < HD_LEN(top); k++) top[k] = (hd_alternative){97, -0.25f};
    e->id = q->id;
    e->user = q->g.user;
    e->step.top = top;
    e->step.n_top = n_top;
    e->step.n_cached = 1;
    if (q->g.prompt_logprobs && e->choice == 0 && !q->n_prompt_scored) {
        q->n_prompt_scored = q->n_prompt > 3 ? 3 : q->n_prompt - 1;
        e->prompt = (hd_prompt_logprobs){.tokens = prompt_ids,
                                         .logprobs = scores,
                                         .top = top,
                                         .n = q->n_prompt_scored,
                                         .n_top = n_top,
                                         .from = 1};
    }
    e->prompt_tokens = q->n_prompt;
    e->output_tokens = q->n_events;
    e->admitted_ns = 2;
    if (e->step.finish_reason != HD_FINISH_NONE) e->last = --q->living == 0;
    q->g.on_event(q->g.user, e);
}

void rig_say(rig *r, int32_t i, int32_t a, hd_delta_kind kind, int32_t call, const char *text) {
    const hd_delta part = {kind, call, kind == HD_DELTA_CALL_END, text, strlen(text)};
    r->requests[i].n_events++;
    hd_event e = {
        .choice = a,
        .deltas = &part,
        .n_deltas = 1,
        .step = {.tokens = {116}, .logprobs = {-0.125f}, .n_tokens = 1}, /* "t" */
        .stop_token = -1
    };
    send_event(r, i, &e);
}

void rig_end(rig *r, int32_t i, int32_t a, hd_finish_reason end) {
    hd_event e = {
        .choice = a, .step.finish_reason = end, .stop_token = end == HD_FINISH_STOP ? 1 : -1};
    if (end == HD_FINISH_ERROR) e.why = "the logits are broken";
    send_event(r, i, &e);
}

void rig_stop(rig *r, int32_t i, int32_t a, const char *stop_text) {
    hd_event e = {.choice = a,
                  .step.finish_reason = HD_FINISH_STOP,
                  .stop_token = -1,
                  .stop_text = stop_text};
    send_event(r, i, &e);
}

void rig_play(rig *r) {
    static const hd_finish_reason ends[] = {HD_FINISH_STOP, HD_FINISH_LENGTH, HD_FINISH_ABORT,
                                            HD_FINISH_TIMEOUT, HD_FINISH_ERROR};
    for (int32_t i = 0; i < r->n_requests; i++) {
        const int32_t n = r->requests[i].living;
        for (int32_t a = 0; a < n; a++) {
            rig_say(r, i, a, HD_DELTA_REASONING, 0, "why\n");
            rig_say(r, i, a, HD_DELTA_CONTENT, 0, "\"so\"");
            rig_say(r, i, a, HD_DELTA_CALL, 0, "add");
            rig_say(r, i, a, HD_DELTA_ARGUMENTS, 0, "{\"a\": 1}");
            rig_say(r, i, a, HD_DELTA_CALL_END, 0, "");
            rig_say(r, i, a, HD_DELTA_NOTE, 0, "a note");
        }
        const hd_finish_reason end =
            r->requests[i].cancelled ? HD_FINISH_ABORT : ends[r->requests[i].g.n_stop % 5];
        for (int32_t a = 0; a < n; a++) rig_end(r, i, a, end);
    }
    r->n_requests = 0;
}

/* ---- observers ---- */

static void on_begin(void *user, http_call *c, uint64_t seed) {
    rig *r = user;
    (void)seed;
    demand(!r->begun, "a call begins twice");
    demand(c != NULL, "a call without an owner begins");
    r->begun = c;
    r->n_begins++;
}
static void on_submit(void *user, http_call *c, uint64_t id) {
    rig *r = user;
    demand(c == r->begun && id == (uint64_t)r->n_requests, "another's prompt");
    r->n_submits++;
}
static void on_token(void *user, int32_t n_tokens, int64_t since_last_ns) {
    demand(since_last_ns >= 0, "time runs backwards");
    ((rig *)user)->n_tokens_seen += n_tokens;
}
static void on_end(void *user, const api_outcome *outcome) {
    rig *r = user;
    demand(r->n_ends < r->n_begins, "a call ends that never began");
    r->n_ends++;
    r->outcome = *outcome;
}
static void on_unknown_field(void *user, const char *endpoint, const char *field) {
    rig *r = user;
    snprintf(r->unknown, sizeof r->unknown, "%.20s %.40s", endpoint, field);
}

void rig_init(rig *r) {
    hd_bytes document = {0};
    hd_err err = {0};
    const toy_parts usual = {0};
    *r = (rig){.refuse_at = -1, .salt = 7, .max_held = SIZE_MAX};
    the_engine = (hd_engine){.r = r, .spec = {.vocab = VOCAB}};
    toy_document(&document, &usual);
    demand(toy_open(&the_engine.tokenizer, document.data, document.n, NULL, &err) == HD_OK,
           err.msg);
    hd_bytes_deinit(&document);
    r->ctx = (api_context){
        .engine = &the_engine,
        .model_name = "toy",
        .created = 5,
        .limits = {.max_choices = 8,
                   .max_top_logprobs = HD_DEFAULT_LOGPROBS,
                   .max_messages = 4096,
                   .max_batch_prompts = 64,
                   .stream_interval = 1},
        .on_begin = on_begin,
        .on_submit = on_submit,
        .on_token = on_token,
        .on_end = on_end,
        .on_unknown_field = on_unknown_field,
        .server = r,
        .store = api_store_open(1 << 16)
    };
}

void rig_deinit(rig *r) {
    api_store_close(r->ctx.store);
    hd_tokenizer_close(the_engine.tokenizer);
}
