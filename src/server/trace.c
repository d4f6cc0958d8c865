/* trace.c - profiles: events in a growing list, written in Chrome's trace format when the
 * profile ends. Each tick adds the steps since the last one as one bar: their number, time
 * and host time. Requests are added when they end. */
#include "server/trace.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "base/progress.h"

enum { MOST_EVENTS = 1 << 20, NAME_BYTES = 48 };

typedef struct trace_event {
    char name[NAME_BYTES];
    int32_t thread; /* row of the trace: 1 steps, 2 and up requests */
    int64_t start_ns, duration_ns;
    int64_t a, b; /* steps: number and host ns; requests: prompt and output tokens */
} trace_event;

struct trace {
    char *dir;
    pthread_mutex_t lock; /* guards the fields below */
    _Atomic bool on;
    char *path;
    trace_event *events;
    size_t n, cap, dropped;
    int64_t start_ns, stop_at_step;
    hd_engine_stats last;
    bool looked;
    int64_t lanes[64]; /* until when each row of the trace is in use */
};

trace *trace_new(const char *dir) {
    trace *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    pthread_mutex_init(&t->lock, NULL);
    t->dir = dir ? strdup(dir) : NULL;
    if (dir && !t->dir) {
        trace_free(t);
        return NULL;
    }
    return t;
}

void trace_free(trace *t) {
    if (!t) return;
    pthread_mutex_destroy(&t->lock);
    free(t->dir);
    free(t->path);
    free(t->events);
    free(t);
}

static bool is_plain_name(const char *name) {
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                  "0123456789-_";
    const size_t n = strlen(name);
    return n > 0 && n <= 64 && strspn(name, allowed) == n;
}

hd_status trace_start(trace *t, const char *name, int64_t n_steps, hd_err *err) {
    char file[128];
    if (!t->dir) {
        return HD_FAIL(err, HD_EINVAL, "profiles are off: start the server with --trace-dir");
    }
    if (name && !is_plain_name(name)) {
        return HD_FAIL(err, HD_EINVAL,
                       "a profile's name has letters, digits, - and _, at most 64");
    }
    snprintf(file, sizeof file, "%s-%lld.trace.json", name ? name : "hadal",
             (long long)time(NULL));
    pthread_mutex_lock(&t->lock);
    hd_status st = HD_OK;
    if (t->on) {
        st = HD_FAIL(err, HD_EAGAIN, "a profile is being taken already");
    } else {
        free(t->path);
        t->path = hd_path_join(t->dir, file);
        if (!t->path) st = HD_FAIL(err, HD_ENOMEM, "no memory for a profile");
    }
    if (st == HD_OK) {
        t->n = t->dropped = 0;
        t->start_ns = hd_now_ns();
        t->stop_at_step = n_steps;
        t->looked = false;
        memset(t->lanes, 0, sizeof t->lanes);
        t->on = true;
    }
    pthread_mutex_unlock(&t->lock);
    return st;
}

static trace_event *add(trace *t) {
    if (t->n == t->cap && t->cap < MOST_EVENTS) {
        const size_t cap = t->cap ? 2 * t->cap : 1024;
        trace_event *events = realloc(t->events, cap * sizeof *events);
        if (events) {
            t->events = events;
            t->cap = cap;
        }
    }
    if (t->n == t->cap) {
        t->dropped++;
        return NULL;
    }
    return &t->events[t->n++];
}

/* Returns the first row that is free by then. */
static int32_t lane_for(trace *t, int64_t start, int64_t end) {
    const int32_t n = (int32_t)HD_LEN(t->lanes);
    int32_t i = 0;
    while (i + 1 < n && t->lanes[i] > start) i++;
    t->lanes[i] = end;
    return i + 2;
}

void trace_request(trace *t, const api_outcome *o) {
    if (!t->on) return;
    pthread_mutex_lock(&t->lock);
    trace_event *e = t->on ? add(t) : NULL;
    if (e) {
        *e = (trace_event){.thread = lane_for(t, o->start_ns, o->end_ns),
                           .start_ns = o->start_ns,
                           .duration_ns = o->end_ns - o->start_ns,
                           .a = o->prompt_tokens,
                           .b = o->output_tokens};
        snprintf(e->name, sizeof e->name, "%s", o->endpoint);
    }
    pthread_mutex_unlock(&t->lock);
}

static void write_event(FILE *out, const trace *t, const trace_event *e) {
    const bool step = e->thread == 1;
    fprintf(out,
            ",\n{\"name\":\"%s\",\"ph\":\"X\",\"pid\":1,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,"
            "\"args\":{\"%s\":%lld,\"%s\":%lld}}",
            e->name, e->thread, (double)(e->start_ns - t->start_ns) * 1e-3,
            (double)e->duration_ns * 1e-3, step ? "steps" : "prompt_tokens", (long long)e->a,
            step ? "host_ns" : "output_tokens", (long long)e->b);
}

static hd_status write_file(const trace *t, hd_err *err) {
    FILE *out = fopen(t->path, "wxe");
    if (!out) return HD_FAIL(err, HD_EIO, "cannot write %s: %s", t->path, strerror(errno));
    fprintf(out,
            "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"dropped\":%zu},"
            "\"traceEvents\":[\n"
            "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":1,\"tid\":1,"
            "\"args\":{\"name\":\"steps\"}}",
            t->dropped);
    for (size_t i = 0; t->events && i < t->n; i++) write_event(out, t, &t->events[i]);
    fprintf(out, "\n]}\n");
    const bool bad = ferror(out);
    if (fclose(out) == 0 && !bad) return HD_OK;
    unlink(t->path); /* remove an incomplete trace */
    return HD_FAIL(err, HD_EIO, "cannot write %s; is the disk full?", t->path);
}

static hd_status stop_locked(trace *t, hd_err *err) {
    if (!t->on) return HD_FAIL(err, HD_EINVAL, "no profile is being taken");
    t->on = false;
    return write_file(t, err);
}

hd_status trace_stop(trace *t, char *path, size_t size, hd_err *err) {
    pthread_mutex_lock(&t->lock);
    hd_status st = stop_locked(t, err);
    if (st == HD_OK) snprintf(path, size, "%s", t->path);
    pthread_mutex_unlock(&t->lock);
    return st;
}

void trace_tick(trace *t, hd_engine *engine) {
    hd_engine_stats now;
    if (!t->on) return;
    hd_engine_read_stats(engine, &now);
    pthread_mutex_lock(&t->lock);
    if (t->on && t->looked && now.steps > t->last.steps) {
        trace_event *e = add(t);
        const int64_t spent = now.step_ns - t->last.step_ns;
        if (e) {
            *e = (trace_event){.name = "step",
                               .thread = 1,
                               .start_ns = now.last_step_ns - spent,
                               .duration_ns = spent,
                               .a = now.steps - t->last.steps,
                               .b = now.host_ns - t->last.host_ns};
        }
    }
    if (t->on && !t->looked && t->stop_at_step) t->stop_at_step += now.steps;
    t->looked = true;
    t->last = now;
    hd_err err = {0};
    const bool done = t->on && t->stop_at_step && now.steps >= t->stop_at_step;
    if (done && stop_locked(t, &err) != HD_OK) {
        HD_LOG(HD_LOG_ERROR, "profile_failed", hd_log_text("why", err.msg));
    }
    pthread_mutex_unlock(&t->lock);
}
