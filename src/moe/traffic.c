/* traffic.c - passes of an expert record, summed over their rows; of several in turn; and passes drawn
 * from shares. */
#include "moe/traffic.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/philox.h"

enum { MOST_NUMBERS = 1 << 28 };

const char *const hd_traffic_phase_names[] = {"all",    "prefill", "decode",
                                              "verify", "draft",   NULL};

unsigned hd_traffic_phases(int choice) {
    return choice ? 1u << (choice - 1) : HD_TRAFFIC_STEPS;
}

void hd_traffic_close(hd_traffic *t) {
    free(t->layer);
    free(t->tokens);
    free(t->rows);
    *t = (hd_traffic){0};
}

static hd_status no_memory(const hd_traffic *t, int64_t passes, hd_err *err) {
    return HD_FAIL(err, HD_ENOMEM, "no memory for %lld passes of %d layers and %d experts",
                   (long long)passes, t->layers, t->experts);
}

/* ---- records ---- */

static hd_status find_layers(hd_traffic *t, const hd_record_head *h, unsigned phases,
                             hd_err *err) {
    t->experts = h->experts;
    t->top_k = h->top_k;
    t->layer = calloc((size_t)h->layers, sizeof *t->layer);
    if (!t->layer) return no_memory(t, 0, err);
    for (int32_t l = 0; l < h->layers; l++) {
        const bool steps = hd_record_has(h, HD_RECORD_PREFILL, l);
        const bool drafts = hd_record_has(h, HD_RECORD_DRAFT, l);
        if ((steps && phases & HD_TRAFFIC_STEPS) || (drafts && phases & HD_TRAFFIC_DRAFT)) {
            t->layer[t->layers++] = l;
        }
    }
    return HD_OK;
}

static hd_status add_pass(hd_traffic *t, int32_t *cap, hd_err *err) {
    const int64_t each = (int64_t)t->layers * t->experts;
    if (t->passes == *cap) {
        const int64_t more = *cap ? 2 * (int64_t)*cap : 16;
        if (more * each > MOST_NUMBERS) {
            return HD_FAIL(err, HD_EINVAL, "more than %d passes do not fit in memory", *cap);
        }
        int64_t *rows = realloc(t->rows, (size_t)(more * each) * sizeof *rows);
        if (!rows) return no_memory(t, more, err);
        t->rows = rows;
        int32_t *tokens = realloc(t->tokens, (size_t)more * sizeof *tokens);
        if (!tokens) return no_memory(t, more, err);
        t->tokens = tokens;
        *cap = (int32_t)more;
    }
    memset(t->rows + t->passes * each, 0, (size_t)each * sizeof *t->rows);
    t->tokens[t->passes++] = 0;
    return HD_OK;
}

static hd_status add_row(hd_traffic *t, const hd_record_row *row, const char *name,
                         hd_err *err) {
    int64_t *to = t->rows + (int64_t)(t->passes - 1) * t->layers * t->experts;
    int32_t *tokens = &t->tokens[t->passes - 1];
    *tokens = row->tokens < INT32_MAX - *tokens ? *tokens + row->tokens : INT32_MAX;
    for (int32_t l = 0; l < t->layers; l++) {
        const int64_t *from = row->logical + (int64_t)t->layer[l] * t->experts;
        for (int32_t e = 0; e < t->experts; e++, to++) {
            if (from[e] > INT64_MAX / 2 - *to) {
                return HD_FAIL(err, HD_EFORMAT, "%s: counts that are too large", name);
            }
            *to += from[e];
        }
    }
    return HD_OK;
}

static hd_status read_passes(hd_traffic *t, hd_record_reader *r, unsigned phases, hd_err *err) {
    const bool one = r->head.mode == HD_RECORD_STAT;
    uint64_t last = 0;
    int32_t cap = 0;
    HD_TRY(find_layers(t, &r->head, phases, err));
    if (t->layers == 0) return HD_OK;
    for (;;) {
        HD_TRY(hd_record_next(r, err));
        if (r->ended) return HD_OK;
        if (!(phases & 1u << r->row.phase)) continue;
        if (t->passes == 0 || (!one && r->row.pass != last)) HD_TRY(add_pass(t, &cap, err));
        last = r->row.pass;
        HD_TRY(add_row(t, &r->row, r->name, err));
    }
}

hd_status hd_traffic_read(hd_traffic *out, hd_record_head *head, bool *cut, FILE *in,
                          const char *name, unsigned phases, hd_err *err) {
    hd_record_reader r;
    *out = (hd_traffic){0};
    hd_status st = hd_record_open(&r, in, name, err);
    if (st == HD_OK) st = read_passes(out, &r, phases, err);
    *cut = r.cut;
    *head = r.head;
    r.head.slot_expert = NULL;
    hd_record_close(&r);
    if (st != HD_OK) hd_traffic_close(out);
    return st;
}

/* ---- several recordings ---- */

static hd_status check_parts(const hd_traffic *parts, int32_t n, int32_t every, hd_err *err) {
    const hd_traffic *a = &parts[0];
    for (int32_t i = 0; i < n; i++) {
        const hd_traffic *b = &parts[i];
        const size_t bytes = (size_t)a->layers * sizeof *a->layer;
        if (a->layers != b->layers || a->experts != b->experts || a->top_k != b->top_k ||
            memcmp(a->layer, b->layer, bytes) != 0) {
            return HD_FAIL(err, HD_EINVAL,
                           "record %d has %d layers and %d of %d experts for a token, the "
                           "first %d layers and %d of %d: not of one model",
                           i + 1, b->layers, b->top_k, b->experts, a->layers, a->top_k,
                           a->experts);
        }
        if (b->passes >= every) continue;
        return HD_FAIL(err, HD_EINVAL, "record %d has %d passes, fewer than %d of one turn",
                       i + 1, b->passes, every);
    }
    return HD_OK;
}

hd_status hd_traffic_switch(hd_traffic *out, const hd_traffic *parts, int32_t n, int32_t every,
                            hd_err *err) {
    const hd_traffic *a = &parts[0];
    const size_t each = (size_t)a->layers * (size_t)a->experts;
    int32_t turns = a->passes / every;
    *out = (hd_traffic){.layers = a->layers, .experts = a->experts, .top_k = a->top_k};
    HD_TRY(check_parts(parts, n, every, err));
    for (int32_t i = 1; i < n; i++) turns = hd_min_i32(turns, parts[i].passes / every);
    const int64_t passes = (int64_t)turns * n * every;
    if (passes > MOST_NUMBERS) return no_memory(out, passes, err);
    out->passes = (int32_t)passes;
    out->layer = calloc((size_t)a->layers + 1, sizeof *out->layer);
    out->tokens = calloc((size_t)passes, sizeof *out->tokens);
    out->rows = calloc((size_t)passes * each + 1, sizeof *out->rows);
    if (!out->layer || !out->tokens || !out->rows) {
        hd_traffic_close(out);
        return no_memory(a, passes, err);
    }
    memcpy(out->layer, a->layer, (size_t)a->layers * sizeof *a->layer);
    for (int32_t p = 0; p < out->passes; p += every) {
        const hd_traffic *from = &parts[p / every % n];
        const int32_t at = p / every / n * every;
        memcpy(out->tokens + p, from->tokens + at, (size_t)every * sizeof *out->tokens);
        memcpy(out->rows + (size_t)p * each, hd_traffic_rows(from, at, 0),
               (size_t)every * each * sizeof *out->rows);
    }
    return HD_OK;
}

/* ---- generation ---- */

typedef struct dice {
    uint64_t seed, at;
} dice;

static double uniform(dice *d) {
    return ((double)hd_philox_at(d->seed, 6, d->at++).v[0] + 0.5) * 0x1p-32;
}

static double normal(dice *d) {
    const double r = sqrt(-2.0 * log(uniform(d)));
    return r * cos(6.283185307179586 * uniform(d));
}

/* Shares of one layer's experts, in an order of its own. */
static void draw_shares(const hd_traffic_spec *s, dice *d, double *share) {
    for (int32_t e = 0; e < s->experts; e++) {
        share[e] = s->zipf > 0 ? pow(e + 1, -s->zipf) : exp(s->lognormal * normal(d));
    }
    for (int32_t e = s->experts - 1; s->zipf > 0 && e > 0; e--) {
        const int32_t other = (int32_t)(uniform(d) * (e + 1));
        const double x = share[e];
        share[e] = share[other];
        share[other] = x;
    }
}

/* Draws an expert by the sums before[experts + 1] of the shares. */
static int32_t draw_expert(dice *d, const double *before, int32_t experts) {
    const double x = uniform(d) * before[experts];
    int32_t low = 0, high = experts - 1;
    while (low < high) {
        const int32_t mid = (low + high + 1) / 2;
        if (before[mid] <= x) {
            low = mid;
        } else {
            high = mid - 1;
        }
    }
    return low;
}

static bool is_among(const int32_t *list, int32_t n, int32_t x) {
    for (int32_t i = 0; i < n; i++) {
        if (list[i] == x) return true;
    }
    return false;
}

/* Draws the different experts of a token. If chance finds no further one, the next ones follow. */
static void draw_token(const hd_traffic_spec *s, dice *d, const double *before, int64_t *rows) {
    enum { TRIES = 64 };
    int32_t own[HD_RECORD_MAX_TOP_K], n = 0;
    for (int32_t tries = 0; n < s->top_k; tries++) {
        int32_t e = draw_expert(d, before, s->experts);
        while (tries >= TRIES && is_among(own, n, e)) e = (e + 1) % s->experts;
        if (is_among(own, n, e)) continue;
        own[n++] = e;
        rows[e]++;
    }
}

static void draw_layer(const hd_traffic_spec *s, hd_traffic *t, int32_t layer, double *share,
                       double *before) {
    dice d = {.seed = s->seed + (uint64_t)layer * 0x9e3779b97f4a7c15u};
    draw_shares(s, &d, share);
    for (int32_t p = 0; p < s->passes; p++) {
        if (p && s->switch_every && p % s->switch_every == 0) draw_shares(s, &d, share);
        before[0] = 0;
        for (int32_t e = 0; e < s->experts; e++) {
            if (p && s->drift > 0) share[e] *= exp(s->drift * normal(&d));
            const double now = s->jitter > 0 ? exp(s->jitter * normal(&d)) : 1;
            before[e + 1] = before[e] + share[e] * now;
        }
        int64_t *rows = t->rows + ((int64_t)p * s->layers + layer) * s->experts;
        for (int32_t i = 0; i < s->tokens; i++) draw_token(s, &d, before, rows);
    }
}

static hd_status check_spec(const hd_traffic_spec *s, hd_err *err) {
    if (s->passes < 1 || s->layers < 1 || s->experts < 1 || s->tokens < 1 ||
        (int64_t)s->passes * s->layers > MOST_NUMBERS / s->experts) {
        return HD_FAIL(err, HD_EINVAL, "%d passes of %d layers, %d experts and %d tokens",
                       s->passes, s->layers, s->experts, s->tokens);
    }
    if (s->top_k < 1 || s->top_k > HD_RECORD_MAX_TOP_K || s->top_k > s->experts) {
        return HD_FAIL(err, HD_EINVAL, "%d experts of %d for each token: at most %d", s->top_k,
                       s->experts, HD_RECORD_MAX_TOP_K);
    }
    return HD_OK;
}

hd_status hd_traffic_generate(hd_traffic *out, const hd_traffic_spec *s, hd_err *err) {
    *out = (hd_traffic){
        .passes = s->passes, .layers = s->layers, .experts = s->experts, .top_k = s->top_k};
    HD_TRY(check_spec(s, err));
    const size_t n = (size_t)s->experts;
    double *share = calloc(2 * n + 1, sizeof *share);
    out->layer = calloc((size_t)s->layers, sizeof *out->layer);
    out->tokens = calloc((size_t)s->passes, sizeof *out->tokens);
    out->rows = calloc((size_t)s->passes * (size_t)s->layers * n, sizeof *out->rows);
    if (!share || !out->layer || !out->tokens || !out->rows) {
        free(share);
        const hd_status st = no_memory(out, s->passes, err);
        hd_traffic_close(out);
        return st;
    }
    for (int32_t p = 0; p < s->passes; p++) out->tokens[p] = s->tokens;
    for (int32_t l = 0; l < s->layers; l++) {
        out->layer[l] = l;
        draw_layer(s, out, l, share, share + n);
    }
    free(share);
    return HD_OK;
}
