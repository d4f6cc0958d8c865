/* update.c - collects an update as a list of copies, and makes them. One tensor's way is
 * arrival.c. Values are checked and converted on threads of the update's own, beside the steps;
 * copies are made on those of the device, between two steps. */
#include "weights/update.h"

#include <stdlib.h>
#include <string.h>

#include "base/thread_pool.h"
#include "weights/arrival_internal.h"
#include "weights/weights_internal.h"

enum {
    ALONE = 8 << 20, /* bytes of an update that one thread checks, before others have started */
    SPAN = 1 << 20   /* bytes that one task copies */
};

/* A part of one of an arrival's copies. */
typedef struct span {
    int32_t arrival, copy;
    size_t at;
} span;

/* Tensors that came together, and what was converted of them. */
typedef struct bucket {
    hd_checkpoint *source;
    weights_arrival *arrivals; /* [n_arrivals] */
    span *spans;               /* [n_spans] of host memory */
    int32_t n_arrivals, n_spans;
    bool *used;  /* [tensors of source] */
    bool *given; /* [schema.n] what it brings, unless a later bucket brings it */
    int32_t n_given;
} bucket;

struct hd_weights_update {
    const hd_weights *w;
    bucket *buckets; /* [n_buckets] */
    size_t n_buckets;
    hd_weights_change_fn *change; /* NULL: copies */
    void *ctx;
};

/* ---- binding ---- */

static bool selected(const hd_weights *w, const hd_tensor_decl *d, hd_weights_selector s) {
    const bool draft = d->layer >= w->spec->n_layers;
    return s == HD_SELECT_ALL || draft == (s == HD_SELECT_DRAFT);
}

static void use(bucket *b, const hd_tensor *t) {
    if (t) b->used[t - hd_checkpoint_at(b->source, 0)] = true;
}

/* Keeps it as an arrival, if it is wanted. */
static hd_status bind_tensor(const hd_weights *w, bucket *b, int32_t decl,
                             const hd_tensor *data, bool wanted, hd_err *err) {
    weights_arrival *a = &b->arrivals[b->n_arrivals];
    HD_TRY(weights_arrival_bind(a, w, b->source, decl, data, err));
    use(b, data);
    use(b, a->in.scale);
    use(b, a->in.global);
    if (!wanted || (!w->bound[decl].data && w->schema.decls[decl].duplicate)) return HD_OK;
    if (!w->bound[decl].data) {
        return weights_misfit(b->source, data, err, "the running model was opened without it");
    }
    b->given[decl] = true;
    b->n_given++;
    b->n_arrivals++;
    return HD_OK;
}

/* Binds every tensor that a declaration asks for. Returns the first that is wanted and not
 * there in *absent. */
static hd_status bind_tensors(const hd_weights *w, bucket *b, hd_weights_selector selector,
                              const hd_tensor_decl **absent, hd_err *err) {
    for (int32_t i = 0; i < w->schema.n; i++) {
        const hd_tensor_decl *d = &w->schema.decls[i];
        const bool wanted = selected(w, d, selector);
        const hd_tensor *data = weights_find_tensor(b->source, w->spec, d);
        if (data) {
            HD_TRY(bind_tensor(w, b, i, data, wanted, err));
        } else if (wanted && w->bound[i].data && !d->duplicate && !*absent) {
            *absent = d;
        }
    }
    return HD_OK;
}

/* Whether the model's own files have a tensor of this name, and nothing reads it. */
static bool is_unread(const hd_weights *w, const char *name) {
    const hd_tensor *own = hd_checkpoint_find(w->checkpoint, name);
    return own && w->uses[own - hd_checkpoint_at(w->checkpoint, 0)].what == HD_USE_UNKNOWN;
}

/* What no declaration asked for is unknown, unless files are known to have it. */
static hd_status check_unknown(const hd_weights *w, const bucket *b, hd_err *err) {
    for (int32_t i = 0; i < hd_checkpoint_count(b->source); i++) {
        const hd_tensor *t = hd_checkpoint_at(b->source, i);
        if (b->used[i] || weights_of_no_use(t->name) || is_unread(w, t->name)) continue;
        return weights_misfit(b->source, t, err,
                              "unknown: this model has no such tensor, or another one of this "
                              "update is the same by another name");
    }
    return HD_OK;
}

static hd_status check_once(const hd_weights_update *u, const bucket *b, hd_err *err) {
    for (size_t k = 0; k < u->n_buckets; k++) {
        for (int32_t i = 0; i < u->w->schema.n; i++) {
            if (!b->given[i] || !u->buckets[k].given[i]) continue;
            return weights_misfit(b->source, u->w->bound[i].data, err,
                                  "came before: a tensor and its scales are in one part");
        }
    }
    return HD_OK;
}

/* ---- checking and converting, on several threads ---- */

typedef struct preparation {
    const hd_weights *w;
    const bucket *b;
} preparation;

static hd_status prepare_task(const void *arg, int32_t task, hd_err *err) {
    const preparation *p = arg;
    return weights_arrival_prepare(&p->b->arrivals[task], p->w, p->b->source, err);
}

static size_t bytes_of(const bucket *b) {
    size_t n = 0;
    for (int32_t i = 0; i < b->n_arrivals; i++) n += b->arrivals[i].in.data->bytes;
    return n;
}

static hd_status prepare(const hd_weights *w, const bucket *b, int32_t n_threads, hd_err *err) {
    const preparation p = {w, b};
    return hd_tasks_run(bytes_of(b) > ALONE ? n_threads : 1, b->n_arrivals, prepare_task, &p,
                        err);
}

/* Divides the copies within host memory: into *spans unless NULL. Returns the number. */
static size_t divide(const bucket *b, span *spans) {
    size_t n = 0;
    for (int32_t i = 0; i < b->n_arrivals; i++) {
        for (int32_t k = 0; k < b->arrivals[i].n_copies; k++) {
            const weights_copy *c = &b->arrivals[i].copies[k];
            if (c->on_device || c->to == c->from) continue;
            for (size_t at = 0; at < c->bytes; at += SPAN, n++) {
                if (spans) spans[n] = (span){i, k, at};
            }
        }
    }
    return n;
}

static hd_status list_spans(bucket *b, hd_err *err) {
    const size_t n = divide(b, NULL);
    b->spans = n < INT32_MAX ? malloc((n + 1) * sizeof *b->spans) : NULL;
    if (!b->spans) return HD_FAIL(err, HD_ENOMEM, "no memory for an update");
    b->n_spans = (int32_t)divide(b, b->spans);
    return HD_OK;
}

/* ---- buckets ---- */

static void close_bucket(bucket *b) {
    for (int32_t i = 0; i < b->n_arrivals; i++) weights_arrival_deinit(&b->arrivals[i]);
    hd_checkpoint_close(b->source);
    free(b->arrivals);
    free(b->spans);
    free(b->used);
    free(b->given);
    *b = (bucket){0};
}

static hd_status fill_bucket(const hd_weights_update *u, bucket *b,
                             const hd_weights_update_rule *rule, hd_err *err) {
    const hd_tensor_decl *absent = NULL;
    HD_TRY(bind_tensors(u->w, b, rule->selector, &absent, err));
    HD_TRY(check_unknown(u->w, b, err));
    if (rule->once) HD_TRY(check_once(u, b, err));
    if (rule->whole && absent) {
        return HD_FAIL(err, HD_EFORMAT, "%s: missing tensor %s",
                       hd_checkpoint_shard_path(b->source, 0), absent->name);
    }
    HD_TRY(prepare(u->w, b, rule->n_threads, err));
    return list_spans(b, err);
}

/* Takes from a bucket what a later one brings. */
static void supersede(const hd_weights_update *u, bucket *old, const bucket *b) {
    for (int32_t i = 0; i < u->w->schema.n; i++) {
        old->n_given -= old->given[i] && b->given[i];
        old->given[i] = old->given[i] && !b->given[i];
    }
}

/* Buckets that have nothing left go, so that a sender which repeats itself costs no memory. */
static hd_status keep_bucket(hd_weights_update *u, const bucket *b, hd_err *err) {
    bucket *more = realloc(u->buckets, (u->n_buckets + 1) * sizeof *more);
    if (!more) return HD_FAIL(err, HD_ENOMEM, "no memory for an update");
    u->buckets = more;
    size_t n = 0;
    for (size_t i = 0; i < u->n_buckets; i++) {
        supersede(u, &more[i], b);
        if (more[i].n_given == 0) {
            close_bucket(&more[i]);
        } else {
            more[n++] = more[i];
        }
    }
    more[n++] = *b;
    u->n_buckets = n;
    return HD_OK;
}

hd_status hd_weights_update_add(hd_weights_update *u, hd_checkpoint *c,
                                const hd_weights_update_rule *rule, hd_err *err) {
    bucket b = {.source = c};
    const size_t n = (size_t)u->w->schema.n + 1; /* an arrival may be bound and not kept */
    b.arrivals = calloc(n, sizeof *b.arrivals);
    b.given = calloc(n, sizeof *b.given);
    b.used = calloc((size_t)hd_checkpoint_count(c) + 1, sizeof *b.used);
    hd_status st = b.arrivals && b.given && b.used
                       ? fill_bucket(u, &b, rule, err)
                       : HD_FAIL(err, HD_ENOMEM, "no memory for an update");
    if (st == HD_OK) st = keep_bucket(u, &b, err);
    if (st != HD_OK) close_bucket(&b);
    return st;
}

hd_status hd_weights_update_open(hd_weights_update **out, const hd_weights *w, hd_err *err) {
    *out = calloc(1, sizeof **out);
    if (!*out) return HD_FAIL(err, HD_ENOMEM, "no memory for an update");
    (*out)->w = w;
    return HD_OK;
}

hd_status hd_weights_update_open_in_place(hd_weights_update **out, const hd_weights *w,
                                          hd_weights_change_fn *fn, void *ctx, hd_err *err) {
    HD_TRY(hd_weights_update_open(out, w, err));
    (*out)->change = fn;
    (*out)->ctx = ctx;
    return HD_OK;
}

void hd_weights_update_close(hd_weights_update *u) {
    if (!u) return;
    for (size_t i = 0; i < u->n_buckets; i++) close_bucket(&u->buckets[i]);
    free(u->buckets);
    free(u);
}

int32_t hd_weights_update_count(const hd_weights_update *u) {
    int32_t n = 0;
    for (size_t i = 0; i < u->n_buckets; i++) n += u->buckets[i].n_given;
    return n;
}

bool weights_update_brings(const hd_weights_update *u, int32_t decl) {
    for (size_t i = 0; i < u->n_buckets; i++) {
        if (u->buckets[i].given[decl]) return true;
    }
    return false;
}

/* ---- lost tensors ---- */

static void set_lost(hd_weights *w, int32_t decl, bool lost) {
    w->n_lost += lost - w->lost[decl];
    w->lost[decl] = lost;
}

void weights_find_all(hd_weights *w) {
    for (int32_t i = 0; i < w->schema.n; i++) set_lost(w, i, false);
}

int32_t hd_weights_lost(const hd_weights *w) {
    return w->n_lost;
}

hd_status hd_weights_discard(hd_weights *w, size_t *bytes, hd_err *err) {
    if (w->device) return hd_device_discard(w->device, w->device_block, bytes, err);
    *bytes += hd_checkpoint_discard(w->checkpoint);
    for (int32_t i = 0; i < w->schema.n; i++) set_lost(w, i, w->bound[i].data != NULL);
    return HD_OK;
}

/* ---- applying ---- */

static void copy_task(const void *arg, int32_t task, int32_t worker) {
    const bucket *b = arg;
    const span *s = &b->spans[task];
    const weights_arrival *a = &b->arrivals[s->arrival];
    const weights_copy *c = &a->copies[s->copy];
    (void)worker;
    if (!b->given[a->decl]) return;
    const size_t left = c->bytes - s->at;
    memcpy((uint8_t *)c->to + s->at, (const uint8_t *)c->from + s->at,
           left < SPAN ? left : SPAN);
}

/* Copies what a bucket brings. Returns whether a global scale is among it. */
static bool copy_bucket(const bucket *b, const hd_weights *w, hd_stream *s) {
    bool scalars = false;
    hd_stream_host_tasks(s, b->n_spans, copy_task, b);
    for (int32_t i = 0; i < b->n_arrivals; i++) {
        const weights_arrival *a = &b->arrivals[i];
        if (!b->given[a->decl]) continue;
        for (int32_t k = 0; k < a->n_copies; k++) {
            const weights_copy *c = &a->copies[k];
            if (c->from_device) {
                hd_stream_copy(s, c->to, c->from, c->bytes);
            } else if (c->on_device) {
                hd_stream_upload(s, c->to, c->from, c->bytes);
            }
        }
        scalars = scalars || w->bound[a->decl].global;
    }
    return scalars;
}

hd_status hd_weights_update_apply(hd_weights_update *u, hd_weights *w, hd_stream *s,
                                  hd_err *err) {
    bool scalars = false;
    if (u->change) return u->change(u->ctx, s, err);
    for (size_t i = 0; i < u->n_buckets; i++) {
        scalars = copy_bucket(&u->buckets[i], w, s) || scalars;
    }
    /* tables of experts contain their global scales */
    if (scalars) weights_slots_refill(&w->expert_slots);
    const hd_status st = hd_stream_sync(s, err);
    for (size_t i = 0; i < u->n_buckets; i++) {
        for (int32_t k = 0; k < w->schema.n; k++) {
            if (u->buckets[i].given[k]) set_lost(w, k, st != HD_OK);
        }
    }
    return st;
}
