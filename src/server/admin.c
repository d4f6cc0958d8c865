/* admin.c - admin endpoints: flush the prefix cache, abort requests, pause and continue,
 * start and stop a profile, start, stop and dump an expert record. */
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "server/server_internal.h"

static const int64_t SECOND_NS = 1000000000;
enum { PAUSE_TIMEOUT_S = 600 }; /* how long a pause waits for the last step */

json_t *server_take_body(http_call *c) {
    size_t n;
    const char *text = http_body(c, &n);
    hd_err err = {0};
    json_t *object = n == 0 ? json_object() : NULL;
    if (object) return object;
    if (hd_json_parse(&object, text, n, "the body", &err) == HD_OK && !json_is_object(object)) {
        HD_FAIL(&err, HD_EINVAL, "the body must be a JSON object");
    }
    if (err.status == HD_OK) return object;
    json_decref(object);
    if (err.status == HD_ENOMEM || n == 0) {
        http_reply_header(c, "Retry-After", "1");
        http_error(c, 503, "overloaded_error", "out_of_memory", NULL,
                   "no memory for the request");
        return NULL;
    }
    http_error(c, 400, "invalid_request_error", "bad_json", NULL, "%s", err.msg);
    return NULL;
}

static void bad_field(http_call *c, const char *name, const char *must) {
    http_error(c, 400, "invalid_request_error", "bad_value", name, "%s must be %s", name, must);
}

/* ---- flush ---- */

/* Requests that wait hold no pages. During a pause they stay waiting, so that a flush forgets
 * everything. */
static bool may_flush(const hd_engine_stats *e) {
    if (e->paused) return e->running == 0;
    return e->running + e->waiting + e->living == 0;
}

static bool check_flush(server *s, waiting_call *w, bool late) {
    char text[100];
    hd_engine_stats e;
    hd_engine_read_stats(s->engine, &e);
    const bool may = may_flush(&e);
    if (!may && !late) return false;
    if (may) {
        hd_engine_flush(s->engine);
        prefix_ring_forget(s->prefixes);
        server_reply_text(w->call, 200, "Cache flushed.\n");
    } else {
        const int32_t waiting = e.living > e.running ? e.living - e.running : 0;
        snprintf(text, sizeof text, "Not flushed: %d requests run, %d wait.\n", e.running,
                 waiting);
        server_reply_text(w->call, 400, text);
    }
    return true;
}

/* Trainers poll this; 400 means that requests hold pages. */
static void on_flush(http_call *c, void *user) {
    server *s = user;
    const char *text = http_query(c, "timeout");
    char *end = NULL;
    const double timeout = text ? strtod(text, &end) : 0;
    const bool plain = !text || text[strspn(text, "0123456789.")] == '\0';
    if (text && (!plain || end == text || *end || timeout > 3600)) {
        bad_field(c, "timeout", "a number of seconds from 0 to 3600");
        return;
    }
    waiting_call now = {.call = c};
    if (check_flush(s, &now, timeout == 0)) return;
    if (!server_wait_for(s, c, (int64_t)(timeout * (double)SECOND_NS), 0, check_flush)) {
        http_error(c, 503, "overloaded_error", "too_many_wait", NULL, "too many wait already");
    }
}

/* ---- abort ---- */

static void on_abort(http_call *c, void *user) {
    server *s = user;
    json_t *body = server_take_body(c);
    if (!body) return;
    json_t *rid = json_object_get(body, "rid"), *all = json_object_get(body, "abort_all");
    if (rid && !json_is_null(rid) && !json_is_string(rid)) {
        bad_field(c, "rid", "a string");
    } else if (all && !json_is_boolean(all) && !json_is_null(all)) {
        bad_field(c, "abort_all", "true or false");
    } else if (!json_is_true(all) && (!json_is_string(rid) || !json_string_length(rid))) {
        http_error(c, 400, "invalid_request_error", "missing_field", "rid",
                   "give rid or abort_all");
    } else {
        records_abort(s->records, s->engine, json_is_true(all) ? NULL : json_string_value(rid));
        server_reply_text(c, 200, "");
    }
    json_decref(body);
}

/* ---- pause ---- */

/* The call's number is that of its pause. */
static bool check_paused(server *s, waiting_call *w, bool late) {
    hd_engine_stats e;
    hd_engine_read_stats(s->engine, &e);
    if (e.pauses >= atomic_load(&w->request)) {
        server_reply_json(w->call, 200,
                          json_pack("{s:s, s:s}", "status", "ok", "message",
                                    "Generation paused successfully."));
    } else if (late) {
        http_error(w->call, 503, "overloaded_error", "still_running", NULL,
                   "paused, but the last step has not ended");
    }
    return late || e.pauses >= atomic_load(&w->request);
}

static void on_pause(http_call *c, void *user) {
    static const char *const names[] = {"abort", "retract", "in_place"};
    server *s = user;
    json_t *body = server_take_body(c);
    if (!body) return;
    json_t *mode = json_object_get(body, "mode");
    const char *name = mode && !json_is_null(mode) ? json_string_value(mode) : names[0];
    size_t i = 0;
    while (name && i < HD_LEN(names) && strcmp(name, names[i]) != 0) i++;
    if (!name || i == HD_LEN(names)) {
        bad_field(c, "mode", "abort, retract or in_place");
    } else {
        const uint64_t pause = hd_engine_pause(s->engine, (hd_pause)i);
        if (!server_wait_for(s, c, PAUSE_TIMEOUT_S * SECOND_NS, pause, check_paused)) {
            http_error(c, 503, "overloaded_error", "too_many_wait", NULL,
                       "paused, but too many calls wait to reply when the last step has ended");
        }
    }
    json_decref(body);
}

static void on_continue(http_call *c, void *user) {
    server *s = user;
    json_t *body = server_take_body(c);
    if (!body) return;
    json_decref(body);
    hd_engine_resume(s->engine);
    server_reply_json(c, 200,
                      json_pack("{s:s, s:s}", "status", "ok", "message",
                                "Generation continued successfully."));
}

/* ---- profile ---- */

static void order_failed(http_call *c, const hd_err *err, const char *code) {
    const int status = err->status == HD_EINVAL         ? 400
                       : err->status == HD_EAGAIN       ? 409
                       : err->status == HD_EUNSUPPORTED ? 501
                                                        : 500;
    http_error(c, status, status == 500 ? "server_error" : "invalid_request_error", code, NULL,
               "%s", err->msg);
}

static void on_start_profile(http_call *c, void *user) {
    server *s = user;
    hd_err err = {0};
    json_t *body = server_take_body(c);
    if (!body) return;
    json_t *steps = json_object_get(body, "num_steps");
    json_t *name = json_object_get(body, "profile_prefix");
    if (steps && !json_is_null(steps) &&
        (!json_is_integer(steps) || json_integer_value(steps) < 1)) {
        bad_field(c, "num_steps", "a whole number above 0");
    } else if (name && !json_is_null(name) && !json_is_string(name)) {
        bad_field(c, "profile_prefix", "a string");
    } else if (trace_start(s->trace, json_string_value(name), json_integer_value(steps),
                           &err) != HD_OK) {
        order_failed(c, &err, "profile_failed");
    } else {
        trace_tick(s->trace, s->engine); /* steps are counted from here */
        server_reply_text(c, 200, "Start profiling.\n");
    }
    json_decref(body);
}

static void on_stop_profile(http_call *c, void *user) {
    server *s = user;
    char path[4096], text[4200];
    hd_err err = {0};
    trace_tick(s->trace, s->engine); /* steps since the last tick */
    if (trace_stop(s->trace, path, sizeof path, &err) != HD_OK) {
        order_failed(c, &err, "profile_failed");
        return;
    }
    snprintf(text, sizeof text, "Stop profiling. %s\n", path);
    server_reply_text(c, 200, text);
}

/* ---- expert records ---- */

enum { DUMP_S = 60 };

static void on_start_record(http_call *c, void *user) {
    server *s = user;
    hd_err err = {0};
    if (expert_record_start(s->expert_record, s->engine, &err) != HD_OK) {
        order_failed(c, &err, "record_failed");
    } else {
        server_reply_text(c, 200, "Start recording the expert distribution.\n");
    }
}

static void on_stop_record(http_call *c, void *user) {
    server *s = user;
    hd_err err = {0};
    if (expert_record_stop(s->expert_record, s->engine, &err) != HD_OK) {
        order_failed(c, &err, "record_failed");
    } else {
        server_reply_text(c, 200, "Stop recording the expert distribution.\n");
    }
}

static bool check_dumped(server *s, waiting_call *w, bool late) {
    hd_err err = {0};
    const bool done = expert_record_is_dumped(s->expert_record, &err);
    if (!done && !late) return false;
    if (!done) HD_FAIL(&err, HD_EIO, "the record is not written after %d seconds", DUMP_S);
    if (err.status != HD_OK) {
        order_failed(w->call, &err, "record_failed");
    } else {
        server_reply_text(w->call, 200, "Dump expert distribution record.\n");
    }
    return true;
}

static void on_dump_record(http_call *c, void *user) {
    server *s = user;
    hd_err err = {0};
    if (expert_record_dump(s->expert_record, s->engine, &err) != HD_OK) {
        order_failed(c, &err, "record_failed");
    } else if (!server_wait_for(s, c, DUMP_S * SECOND_NS, 0, check_dumped)) {
        http_error(c, 503, "overloaded_error", "too_many_wait", NULL, "too many wait already");
    }
}

/* ---- experts ---- */

static void on_rebalance(http_call *c, void *user) {
    server *s = user;
    hd_engine_stats e;
    hd_err err = {0};
    if (hd_engine_rebalance(s->engine, &err) != HD_OK) {
        http_error(c, 400, "invalid_request_error", "not_rebalancing", NULL, "%s", err.msg);
        return;
    }
    hd_engine_read_stats(s->engine, &e);
    const hd_rebalance_figures *r = &e.rebalance;
    server_reply_json(c, 200,
                      json_pack("{s:s, s:s, s:I, s:I, s:I, s:f, s:f, s:i}", "status", "ok",
                                "state", r->state ? r->state : "watch", "plans",
                                (json_int_t)r->plans, "moves", (json_int_t)r->moves,
                                "interrupted", (json_int_t)r->interrupted, "balancedness",
                                r->balancedness, "bound", r->bound, "single_copies",
                                r->single_copies));
}

const http_route admin_routes[] = {
    {"GET POST", "/flush_cache",                      HTTP_ADMIN, HTTP_OPENAI, on_flush        },
    {"POST",     "/abort_request",                    HTTP_ADMIN, HTTP_OPENAI, on_abort        },
    {"POST",     "/pause_generation",                 HTTP_ADMIN, HTTP_OPENAI, on_pause        },
    {"POST",     "/continue_generation",              HTTP_ADMIN, HTTP_OPENAI, on_continue     },
    {"GET POST", "/start_profile",                    HTTP_ADMIN, HTTP_OPENAI, on_start_profile},
    {"GET POST", "/stop_profile",                     HTTP_ADMIN, HTTP_OPENAI, on_stop_profile },
    {"GET POST", "/start_expert_distribution_record", HTTP_ADMIN, HTTP_OPENAI, on_start_record },
    {"GET POST", "/stop_expert_distribution_record",  HTTP_ADMIN, HTTP_OPENAI, on_stop_record  },
    {"GET POST", "/dump_expert_distribution_record",  HTTP_ADMIN, HTTP_OPENAI, on_dump_record  },
    {"POST",     "/rebalance",                        HTTP_ADMIN, HTTP_OPENAI, on_rebalance    },
};
const size_t admin_n_routes = HD_LEN(admin_routes);
