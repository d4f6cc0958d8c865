/* op_profiler.c - the operator profiler: times every operator of a table, with its op cost. */
#include "ops/profile/op_profiler.h"

#include <stdlib.h>
#include <string.h>

#include "ops/profile/op_profiler_internal.h"

/* The GPU is held busy so that timed calls queue up: again after so many calls, for so long. */
enum { CALLS_PER_HOLD = 24, HOLD_MICROSECONDS = 250 };

/* An operator has no context, so the profiled table is a global. */
static const hd_ops *profiled;
static hd_op_profiler *profiler;
static hd_clock_fn *now;
static ops_reader reader;

/* ---- lines ---- */

static hd_op_profile *find_line(const char *op, const op_cost *c) {
    const char *format = c->w ? hd_dtype_name(c->w->type) : "";
    for (int32_t i = 0; i < profiler->n; i++) {
        hd_op_profile *l = &profiler->line[i];
        if (l->op == op && l->format == format && l->rows == c->rows && l->outs == c->outs &&
            l->ins == c->ins && l->part == profiler->part && l->stage == profiler->stage) {
            return l;
        }
    }
    if (profiler->n == HD_OP_PROFILER_LINES) return NULL;
    hd_op_profile *l = &profiler->line[profiler->n++];
    *l = (hd_op_profile){.part = profiler->part,
                         .stage = profiler->stage,
                         .op = op,
                         .format = format,
                         .rows = c->rows,
                         .outs = c->outs,
                         .ins = c->ins,
                         .type = c->w ? c->w->type : HD_NONE};
    return l;
}

static void add(hd_op_profile *l, double seconds, double bytes, double flops) {
    l->calls++;
    l->seconds += seconds;
    l->bytes += bytes;
    l->flops += flops;
}

static void note(const char *op, const op_cost *c, int64_t ns) {
    hd_op_profile *l = find_line(op, c);
    if (!l) {
        profiler->lost++;
    } else if (!profiler->calls) {
        add(l, (double)ns * 1e-9, c->bytes, c->flops);
    } else if (profiler->n_calls < HD_OP_PROFILER_CALLS) {
        hd_op_call *call = &profiler->calls[profiler->n_calls++];
        call->line = (int32_t)(l - profiler->line);
        call->used = c->used;
        call->bytes = c->bytes;
        call->flops = c->flops;
    } else {
        profiler->lost++;
    }
}

static void mark_before(hd_stream *s) {
    if (profiler->next % CALLS_PER_HOLD == 0) hd_stream_busy(s, HOLD_MICROSECONDS);
    if (profiler->next < HD_OP_PROFILER_CALLS)
        hd_stream_record_event(s, profiler->calls[profiler->next].before);
}

static void mark_after(hd_stream *s) {
    if (profiler->next < HD_OP_PROFILER_CALLS)
        hd_stream_record_event(s, profiler->calls[profiler->next].after);
    profiler->next++;
}

#define X(op)                                                          \
    static void op##_profiled(hd_stream *s, const hd_##op##_args *a) { \
        static const char name[] = #op;                                \
        if (profiler->timing) {                                        \
            mark_before(s);                                            \
            profiled->op(s, a);                                        \
            mark_after(s);                                             \
            return;                                                    \
        }                                                              \
        const int64_t begun = now();                                   \
        profiled->op(s, a);                                            \
        const int64_t ns = now() - begun;                              \
        const op_cost c = ops_cost_##op(&reader, a);                   \
        note(name, &c, ns);                                            \
    }
HD_OP_LIST(X)
#undef X

void hd_op_profiler_init(hd_op_profiler *m, hd_ops *out, const hd_ops *inner,
                         hd_clock_fn *clock) {
    profiled = inner;
    profiler = m;
    now = clock;
    reader = (ops_reader){.act_bytes = hd_act_bytes(inner)};
    *m = (hd_op_profiler){.part = "", .stage = ""};
    *out = (hd_ops){.name = inner->name,
                    .act_type = inner->act_type,
                    .kv_type = inner->kv_type,
                    .exchange = inner->exchange,
#define X(op) .op = inner->op ? op##_profiled : NULL,
                    HD_OP_LIST(X)
#undef X
    };
}

void hd_op_profiler_reset(hd_op_profiler *m) {
    m->n = 0;
    m->lost = 0;
}

void hd_op_profiler_at(hd_op_profiler *m, const char *part, const char *stage) {
    m->part = part;
    m->stage = stage;
}

/* ---- asynchronous devices ---- */

static int64_t no_clock(void) {
    return 0;
}

hd_status hd_op_profiler_open(hd_op_profiler *m, hd_ops *out, const hd_ops *inner, hd_device *d,
                              hd_stream *s, hd_err *err) {
    hd_op_profiler_init(m, out, inner, no_clock);
    if (!hd_device_is_host(d)) {
        reader.stream = s;
        /* BF16 as published, whatever this backend stores */
        reader.act_bytes = sizeof(uint16_t);
    }
    m->calls = calloc(HD_OP_PROFILER_CALLS, sizeof *m->calls);
    if (!m->calls)
        return HD_FAIL(err, HD_ENOMEM, "no memory for %d calls", HD_OP_PROFILER_CALLS);
    for (int32_t i = 0; i < HD_OP_PROFILER_CALLS; i++) {
        HD_TRY(hd_device_event_open(&m->calls[i].before, d, true, err));
        HD_TRY(hd_device_event_open(&m->calls[i].after, d, true, err));
    }
    return HD_OK;
}

void hd_op_profiler_close(hd_op_profiler *m) {
    for (int32_t i = 0; m->calls && i < HD_OP_PROFILER_CALLS; i++) {
        hd_device_event_close(m->calls[i].before);
        hd_device_event_close(m->calls[i].after);
    }
    free(m->calls);
    free(reader.copy);
    reader = (ops_reader){0};
    m->calls = NULL;
}

void hd_op_profiler_count(hd_op_profiler *m) {
    hd_op_profiler_reset(m);
    m->n_calls = 0;
    m->timing = false;
}

void hd_op_profiler_time(hd_op_profiler *m) {
    m->next = 0;
    m->timing = true;
}

bool hd_op_profiler_finish(hd_op_profiler *m) {
    if (m->next != m->n_calls || m->lost) return false;
    for (int32_t i = 0; i < m->n_calls; i++) {
        const hd_op_call *c = &m->calls[i];
        add(&m->line[c->line], hd_device_event_seconds(c->before, c->after), c->bytes,
            c->flops);
    }
    return true;
}
