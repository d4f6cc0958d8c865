/* op_profiler.c - times every operator of a table and notes what it had to move and compute. */
#include "ops/profile/op_profiler.h"

#include <stdlib.h>
#include <string.h>

#include "ops/profile/op_profiler_internal.h"

/* Of the queue behind which calls are timed: filled again after so many calls, for so long. */
enum { CALLS_PER_HOLD = 24, HOLD_MICROSECONDS = 250 };

/* An operator has no context, so the table in use is remembered here. */
static const hd_ops *metered;
static hd_meter *meter;
static hd_clock_fn *now;
static ops_reader reader;

/* ---- lines ---- */

static hd_meter_line *find_line(const char *op, const ops_cost *c) {
    const char *format = c->w ? hd_dtype_name(c->w->type) : "";
    for (int32_t i = 0; i < meter->n; i++) {
        hd_meter_line *l = &meter->line[i];
        if (l->op == op && l->format == format && l->rows == c->rows && l->outs == c->outs &&
            l->ins == c->ins && l->part == meter->part && l->stage == meter->stage) {
            return l;
        }
    }
    if (meter->n == HD_METER_LINES) return NULL;
    hd_meter_line *l = &meter->line[meter->n++];
    *l = (hd_meter_line){.part = meter->part,
                         .stage = meter->stage,
                         .op = op,
                         .format = format,
                         .rows = c->rows,
                         .outs = c->outs,
                         .ins = c->ins,
                         .type = c->w ? c->w->type : HD_NONE};
    return l;
}

static void add(hd_meter_line *l, double seconds, double bytes, double flops) {
    l->calls++;
    l->seconds += seconds;
    l->bytes += bytes;
    l->flops += flops;
}

static void note(const char *op, const ops_cost *c, int64_t ns) {
    hd_meter_line *l = find_line(op, c);
    if (!l) {
        meter->lost++;
    } else if (!meter->calls) {
        add(l, (double)ns * 1e-9, c->bytes, c->flops);
    } else if (meter->n_calls < HD_METER_CALLS) {
        hd_meter_call *call = &meter->calls[meter->n_calls++];
        call->line = (int32_t)(l - meter->line);
        call->used = c->used;
        call->bytes = c->bytes;
        call->flops = c->flops;
    } else {
        meter->lost++;
    }
}

static void mark_before(hd_stream *s) {
    if (meter->next % CALLS_PER_HOLD == 0) hd_stream_hold(s, HOLD_MICROSECONDS);
    if (meter->next < HD_METER_CALLS) hd_stream_mark(s, meter->calls[meter->next].before);
}

static void mark_after(hd_stream *s) {
    if (meter->next < HD_METER_CALLS) hd_stream_mark(s, meter->calls[meter->next].after);
    meter->next++;
}

#define X(op)                                                         \
    static void op##_metered(hd_stream *s, const hd_##op##_args *a) { \
        static const char name[] = #op;                               \
        if (meter->timing) {                                          \
            mark_before(s);                                           \
            metered->op(s, a);                                        \
            mark_after(s);                                            \
            return;                                                   \
        }                                                             \
        const int64_t begun = now();                                  \
        metered->op(s, a);                                            \
        const int64_t ns = now() - begun;                             \
        const ops_cost c = ops_cost_##op(&reader, a);                 \
        note(name, &c, ns);                                           \
    }
HD_OP_LIST(X)
#undef X

void hd_meter_init(hd_meter *m, hd_ops *out, const hd_ops *inner, hd_clock_fn *clock) {
    metered = inner;
    meter = m;
    now = clock;
    reader = (ops_reader){.act_bytes = inner->act_bytes};
    *m = (hd_meter){.part = "", .stage = ""};
    *out = (hd_ops){.name = inner->name,
                    .act_bytes = inner->act_bytes,
#define X(op) .op = inner->op ? op##_metered : NULL,
                    HD_OP_LIST(X)
#undef X
    };
}

void hd_meter_reset(hd_meter *m) {
    m->n = 0;
    m->lost = 0;
}

void hd_meter_at(hd_meter *m, const char *part, const char *stage) {
    m->part = part;
    m->stage = stage;
}

/* ---- devices that run later ---- */

static int64_t no_clock(void) {
    return 0;
}

hd_status hd_meter_open(hd_meter *m, hd_ops *out, const hd_ops *inner, hd_device *d,
                        hd_stream *s, hd_err *err) {
    hd_meter_init(m, out, inner, no_clock);
    if (!hd_device_is_host(d)) {
        reader.stream = s;
        reader.act_bytes = sizeof(uint16_t); /* BF16 as published, whatever is kept here */
    }
    m->calls = calloc(HD_METER_CALLS, sizeof *m->calls);
    if (!m->calls) return HD_FAIL(err, HD_ENOMEM, "no memory for %d calls", HD_METER_CALLS);
    for (int32_t i = 0; i < HD_METER_CALLS; i++) {
        HD_TRY(hd_mark_open(&m->calls[i].before, d, true, err));
        HD_TRY(hd_mark_open(&m->calls[i].after, d, true, err));
    }
    return HD_OK;
}

void hd_meter_close(hd_meter *m) {
    for (int32_t i = 0; m->calls && i < HD_METER_CALLS; i++) {
        hd_mark_close(m->calls[i].before);
        hd_mark_close(m->calls[i].after);
    }
    free(m->calls);
    free(reader.copy);
    reader = (ops_reader){0};
    m->calls = NULL;
}

void hd_meter_count(hd_meter *m) {
    hd_meter_reset(m);
    m->n_calls = 0;
    m->timing = false;
}

void hd_meter_time(hd_meter *m) {
    m->next = 0;
    m->timing = true;
}

bool hd_meter_settle(hd_meter *m) {
    if (m->next != m->n_calls || m->lost) return false;
    for (int32_t i = 0; i < m->n_calls; i++) {
        const hd_meter_call *c = &m->calls[i];
        add(&m->line[c->line], hd_mark_seconds(c->before, c->after), c->bytes, c->flops);
    }
    return true;
}
