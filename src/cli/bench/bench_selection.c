/* bench_selection.c - selections of entries by a rule, written before the steps are timed. */
#include "cli/bench/bench_selection.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/philox.h"

typedef enum rule { UNIFORM, ZIPF, REPEAT } rule;

struct bench_selection {
    bench_selection_options o;
    rule rule;
    double parameter;
    int32_t *steps, *now; /* [o.steps] selections [layers, rows, top_k]; those of this step */
    size_t bytes;         /* of one */
    int64_t n_begun, n_calls;
    uint64_t n_drawn;
};

/* An operator has no context. */
static bench_selection *active;

static hd_status parse(bench_selection *b, hd_err *err) {
    static const struct {
        const char *name;
        rule rule;
        double most;
    } rules[] = {
        {"uniform", UNIFORM, 0  },
        {"zipf=",   ZIPF,    1.5},
        {"repeat=", REPEAT,  1  }
    };
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        const size_t n = strlen(rules[i].name);
        if (strncmp(b->o.text, rules[i].name, n) != 0) continue;
        char *end = NULL;
        b->rule = rules[i].rule;
        b->parameter = b->rule == UNIFORM ? 0 : strtod(b->o.text + n, &end);
        if (b->rule == UNIFORM ? !b->o.text[n]
                               : end > b->o.text + n && !*end && b->parameter >= 0 &&
                                     b->parameter <= rules[i].most) {
            return HD_OK;
        }
    }
    return HD_FAIL(err, HD_EINVAL,
                   "--selection '%s': not uniform, zipf=S of 0 to 1.5 or repeat=P of 0 to 1",
                   b->o.text);
}

static double draw(bench_selection *b) {
    return hd_philox_unit(hd_philox_at(27, 0, b->n_drawn++).v[0]);
}

/* The rank of an entry, by the inverse of the integral of rank^-S. */
static int32_t draw_rank(bench_selection *b) {
    const double s = b->rule == ZIPF ? b->parameter : 0, n = b->o.entries, u = draw(b);
    const double x =
        fabs(1 - s) < 1e-6 ? pow(n + 1, u) : pow(1 + u * (pow(n + 1, 1 - s) - 1), 1 / (1 - s));
    return (int32_t)fmin(fmax(x - 1, 0), n - 1);
}

/* Each list has ranks of its own: neighbours in rank lie far from each other. */
static int32_t draw_entry(bench_selection *b, int32_t list) {
    const uint64_t place = (uint64_t)draw_rank(b) * 2654435761u + (uint64_t)list * 40503u;
    return (int32_t)(place % (uint64_t)b->o.entries);
}

/* before: what the list had in the step before, or NULL. taken: a flag for each entry, all zero. */
static void write_list(bench_selection *b, int32_t list, const int32_t *before, int32_t *out,
                       uint8_t *taken) {
    int32_t n = 0;
    for (int32_t i = 0; before && b->rule == REPEAT && i < b->o.top_k; i++) {
        if (draw(b) < b->parameter) out[n++] = before[i];
    }
    for (int32_t i = 0; i < n; i++) taken[out[i]] = 1;
    while (n < b->o.top_k) {
        const int32_t entry = draw_entry(b, list);
        if (taken[entry]) continue;
        taken[entry] = 1;
        out[n++] = entry;
    }
    for (int32_t i = 0; i < n; i++) taken[out[i]] = 0;
}

static hd_status write_steps(bench_selection *b, hd_err *err) {
    const int32_t lists = b->o.layers * b->o.rows;
    const size_t each = (size_t)lists * (size_t)b->o.top_k;
    int32_t *all = malloc(2 * b->bytes), *before = NULL;
    uint8_t *taken = calloc((size_t)b->o.entries, 1);
    hd_status st = all && taken ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for selections");
    for (int32_t i = 0; st == HD_OK && i < b->o.steps; i++) {
        int32_t *out = all + (size_t)(i % 2) * each;
        for (int32_t l = 0; l < lists; l++) {
            const size_t at = (size_t)l * (size_t)b->o.top_k;
            write_list(b, l, before ? before + at : NULL, out + at, taken);
        }
        before = out;
        hd_stream_upload(b->o.stream, b->steps + (size_t)i * each, out, b->bytes);
        st = hd_stream_sync(b->o.stream, err);
    }
    free(all);
    free(taken);
    return st;
}

static hd_status open_all(bench_selection *b, hd_err *err) {
    const bench_selection_options *o = &b->o;
    HD_TRY(parse(b, err));
    if (o->entries < 2 * o->top_k) {
        return HD_FAIL(err, HD_EINVAL, "--selection of %d among %d entries: --context is short",
                       o->top_k, o->entries);
    }
    b->bytes = (size_t)o->layers * (size_t)o->rows * (size_t)o->top_k * sizeof *b->now;
    HD_TRY(hd_device_alloc(o->device, (void **)&b->steps, (size_t)o->steps * b->bytes,
                           "selections", err));
    HD_TRY(hd_device_alloc(o->device, (void **)&b->now, b->bytes, "selections", err));
    return write_steps(b, err);
}

hd_status bench_selection_open(bench_selection **out, const bench_selection_options *o,
                               hd_err *err) {
    bench_selection *b = calloc(1, sizeof *b);
    *out = b;
    if (!b) return HD_FAIL(err, HD_ENOMEM, "no memory for a bench");
    b->o = *o;
    return open_all(b, err);
}

void bench_selection_close(bench_selection *b) {
    if (!b) return;
    hd_device_release(b->o.device, b->steps);
    hd_device_release(b->o.device, b->now);
    free(b);
}

/* Layers select one after the other. */
static void select_and_fetch(hd_stream *s, const hd_resident_args *a) {
    bench_selection *b = active;
    hd_resident_args x = *a;
    const int64_t layer = b->n_calls++ % b->o.layers;
    x.selected = b->now + layer * b->o.rows * b->o.top_k;
    b->o.ops->resident(s, &x);
}

void bench_selection_install(bench_selection *b, hd_ops *ops) {
    active = b;
    ops->resident = select_and_fetch;
}

void bench_selection_begin_step(bench_selection *b) {
    if (!b) return;
    const size_t step = (size_t)(b->n_begun++ % b->o.steps);
    hd_stream_copy(b->o.stream, b->now,
                   (const uint8_t *)(const void *)b->steps + step * b->bytes, b->bytes);
}
