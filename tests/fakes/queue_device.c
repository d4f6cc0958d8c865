/* queue_device.c - streams that run late, and in any order that events allow; see
 * queue_device.h. */
#include "fakes/queue_device.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "device/device_internal.h"

enum { MAX_QUEUED = 4096 };

typedef struct queue_device queue_device;
typedef struct queue_stream queue_stream;

typedef struct queue_event {
    hd_device_event base;
    int32_t recorded, done; /* how many records were queued; how many of them ran */
} queue_event;

/* What a stream does next: an operator, a copy, a record or a wait. */
typedef struct queued {
    void (*run)(hd_stream *s, const void *args); /* NULL: a copy, a record or a wait */
    queue_event *event;
    bool waits;
    int32_t number; /* of the event's record */
    void *to;
    const void *from;
    size_t bytes;
    uint8_t *own; /* arguments, or the bytes of an upload */
} queued;

struct queue_stream {
    hd_stream base;
    hd_stream *real; /* of the CPU device: scratch and threads */
    queued queue[MAX_QUEUED];
    int32_t first, end;
    bool ignores; /* events */
};

struct queue_device {
    hd_device base;
    hd_device *real;
    queue_stream *stream[QUEUE_STREAMS];
    int32_t n_streams, order[QUEUE_STREAMS], n_waits;
    bool ignores;
};

static hd_ops inner;

static queue_device *device_of(const hd_stream *s) {
    return (queue_device *)s->device;
}

static uint8_t *copy_of(const void *from, size_t bytes) {
    uint8_t *own = malloc(bytes + 1);
    assert_non_null(own);
    return memcpy(own, from, bytes);
}

static queued *push(hd_stream *base) {
    queue_stream *s = (queue_stream *)base;
    assert_true(s->end < MAX_QUEUED);
    queued *q = &s->queue[s->end++];
    *q = (queued){0};
    return q;
}

/* ---- running ---- */

static bool is_held(const queued *q) {
    return q->waits && q->event->done < q->number;
}

static void run_next(queue_stream *s) {
    queued *q = &s->queue[s->first++];
    if (q->run) {
        q->run(s->real, q->own);
    } else if (q->to) {
        memmove(q->to, q->own ? q->own : q->from, q->bytes);
    } else if (!q->waits) {
        q->event->done = q->number;
    }
    free(q->own);
    if (s->first == s->end) s->first = s->end = 0;
}

/* Runs one piece of the first stream that can go on; false: all queues are empty. */
static bool run_any(queue_device *d) {
    bool left = false;
    for (int32_t i = 0; i < QUEUE_STREAMS; i++) {
        queue_stream *s = d->stream[d->order[i]];
        if (!s || s->first == s->end) continue;
        left = true;
        if (is_held(&s->queue[s->first])) continue;
        run_next(s);
        return true;
    }
    if (left) fail_msg("streams wait for each other");
    return false;
}

static void wait_all(hd_stream *s) {
    hd_err err = {0};
    while (run_any(device_of(s))) {
    }
    if (hd_stream_sync(((queue_stream *)s)->real, &err) != HD_OK) {
        hd_stream_fail(s, err.status, err.msg);
    }
}

/* ---- the device ---- */

static void close_device(hd_device *base) {
    queue_device *d = (queue_device *)base;
    hd_device_close(d->real);
    free(d);
}

static hd_status alloc(hd_device *d, void **out, size_t bytes, bool on_host, const char *what,
                       hd_err *err) {
    (void)on_host;
    return hd_device_alloc(((queue_device *)d)->real, out, bytes, what, err);
}

static size_t free_bytes(const hd_device *d) {
    return hd_device_free_bytes(((const queue_device *)d)->real);
}

static void release(hd_device *d, void *p) {
    hd_device_release(((queue_device *)d)->real, p);
}

static hd_status open_stream(hd_stream **out, hd_device *base, bool urgent, hd_err *err) {
    (void)urgent; /* the test prefers */
    queue_device *d = (queue_device *)base;
    queue_stream *s = calloc(1, sizeof *s);
    assert_non_null(s);
    assert_true(d->n_streams < QUEUE_STREAMS);
    assert_int_equal(hd_stream_open(&s->real, d->real, err), HD_OK);
    s->base.device = base;
    s->base.workers = hd_stream_workers(s->real);
    d->stream[d->n_streams++] = s;
    *out = &s->base;
    return HD_OK;
}

static void close_stream(hd_stream *base) {
    queue_device *d = device_of(base);
    queue_stream *s = (queue_stream *)base;
    assert_int_equal(s->first, s->end);
    for (int32_t i = 0; i < QUEUE_STREAMS; i++) {
        if (d->stream[i] == s) d->stream[i] = NULL;
    }
    hd_stream_close(s->real);
    free(s);
}

static void upload(hd_stream *s, void *device, const void *host, size_t bytes) {
    queued *q = push(s);
    q->to = device;
    q->own = copy_of(host, bytes);
    q->bytes = bytes;
}

static void copy(hd_stream *s, void *to, const void *from, size_t bytes) {
    queued *q = push(s);
    q->to = to;
    q->from = from;
    q->bytes = bytes;
}

static hd_status reserve(hd_stream *s, size_t bytes_per_worker, hd_err *err) {
    return hd_stream_reserve(((queue_stream *)s)->real, bytes_per_worker, err);
}

static hd_status open_event(hd_device_event **out, hd_device *d, bool timed, hd_err *err) {
    queue_event *m = calloc(1, sizeof *m);
    (void)timed;
    (void)err;
    assert_non_null(m);
    m->base.device = d;
    *out = &m->base;
    return HD_OK;
}

static void close_event(hd_device_event *m) {
    free(m);
}

static void record_event(hd_stream *s, hd_device_event *base) {
    queue_event *m = (queue_event *)base;
    queued *q = push(s);
    q->event = m;
    q->number = ++m->recorded;
}

static void wait_event(hd_stream *s, const hd_device_event *base) {
    queue_event *m;
    device_of(s)->n_waits++;
    if (device_of(s)->ignores || ((queue_stream *)s)->ignores) return;
    memcpy(&m, &(const hd_device_event *){base}, sizeof m);
    queued *q = push(s);
    q->event = m;
    q->waits = true;
    q->number = m->recorded;
}

static void sync_event(hd_stream *s, hd_device_event *m) {
    (void)m;
    wait_all(s);
}

static const backend_table table = {
    .close = close_device,
    .alloc = alloc,
    .free_bytes = free_bytes,
    .release = release,
    .open_stream = open_stream,
    .close_stream = close_stream,
    .upload = upload,
    .download = copy,
    .copy = copy,
    .wait = wait_all,
    .reserve = reserve,
    .open_device_event = open_event,
    .close_device_event = close_event,
    .device_event = record_event,
    .wait_for = sync_event,
    .wait_event = wait_event,
    .host_memory = true,
};

/* ---- operators ---- */

#define X(op)                                                        \
    static void run_##op(hd_stream *s, const void *args) {           \
        inner.op(s, args);                                           \
    }                                                                \
    static void op##_queued(hd_stream *s, const hd_##op##_args *a) { \
        queued *q = push(s);                                         \
        q->run = run_##op;                                           \
        q->own = copy_of(a, sizeof *a);                              \
    }
HD_COMMON_OP_LIST(X)
#undef X

hd_device *queue_device_open(hd_ops *t) {
    const hd_cpu_options one = {.n_threads = 1};
    queue_device *d = calloc(1, sizeof *d);
    assert_non_null(d);
    assert_int_equal(hd_device_open_cpu(&d->real, &one, NULL), HD_OK);
    d->base.table = &table;
    for (int32_t i = 0; i < QUEUE_STREAMS; i++) d->order[i] = i;
    inner = *t;
#define X(op) t->op = op##_queued;
    HD_COMMON_OP_LIST(X)
#undef X
    return &d->base;
}

void queue_device_prefer(hd_device *d, const int32_t order[QUEUE_STREAMS]) {
    memcpy(((queue_device *)d)->order, order, QUEUE_STREAMS * sizeof *order);
}

void queue_device_ignore_events(hd_device *d, bool ignore) {
    ((queue_device *)d)->ignores = ignore;
}

void queue_device_ignore_events_on(hd_device *d, int32_t stream, bool ignore) {
    ((queue_device *)d)->stream[stream]->ignores = ignore;
}

int32_t queue_device_waits(const hd_device *d) {
    return ((const queue_device *)d)->n_waits;
}
