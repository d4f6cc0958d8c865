/* delta.c - makes whole tensors of the elements that changed and the model's own. */
#include "weights/delta.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "weights/update.h"
#include "weights/weights_internal.h"

enum { MOST_NAME = 1024 + 16 };

/* A change of one tensor; both NULL: it stays. */
typedef struct change {
    const hd_tensor *indices, *values;
} change;

typedef struct reader {
    const hd_weights *w;
    const hd_checkpoint *delta;
    bool *used;         /* [tensors of delta] */
    bool *touched;      /* [schema.n] a tensor of it changes */
    hd_tensor *tensors; /* [tensors of w] to be updated */
    int32_t n;
    hd_map memory; /* of those that change */
    size_t bytes;  /* of it, that are written */
    hd_err *err;
} reader;

/* ---- finding ---- */

static const hd_tensor *find(const reader *r, const hd_tensor *t, const char *tail) {
    char name[MOST_NAME];
    snprintf(name, sizeof name, "%s.%s", t->name, tail);
    const hd_tensor *found = hd_checkpoint_find(r->delta, name);
    if (found) r->used[found - hd_checkpoint_at(r->delta, 0)] = true;
    return found;
}

static change change_of(const reader *r, const hd_tensor *t) {
    return (change){find(r, t, "indices"), find(r, t, "values")};
}

static hd_status check_change(const reader *r, const hd_tensor *t, const change *c) {
    const hd_tensor *named = c->indices ? c->indices : c->values;
    const char *why = NULL;
    if (!c->indices || !c->values) {
        why = "indices and values come together";
    } else if (c->indices->dtype != HD_I32 && c->indices->dtype != HD_I64) {
        why = "dtype mismatch: indices are I32 or I64";
    } else if (c->indices->rank != 1 || c->values->rank != 1 ||
               c->indices->shape[0] != c->values->shape[0]) {
        why = "shape mismatch: as many indices as values";
    } else if (c->values->dtype != t->dtype || t->dtype == HD_NONE) {
        why = "dtype mismatch: values have the type of the model's file";
    } else if (hd_dtype_bits(t->dtype) % 8) {
        why = "its elements are halves of a byte, which cannot be named";
    }
    return why ? weights_misfit(r->delta, named, r->err, "%s", why) : HD_OK;
}

/* Finds what changes, and how much memory that takes. */
static hd_status find_changes(reader *r, size_t *bytes) {
    const hd_checkpoint *model = r->w->checkpoint;
    for (int32_t i = 0; i < hd_checkpoint_count(model); i++) {
        const hd_tensor *t = hd_checkpoint_at(model, i);
        const change c = change_of(r, t);
        if (!c.indices && !c.values) continue;
        HD_TRY(check_change(r, t, &c));
        if (r->w->uses[i].decl >= 0) r->touched[r->w->uses[i].decl] = true;
        *bytes += t->bytes;
    }
    for (int32_t i = 0; i < hd_checkpoint_count(r->delta); i++) {
        if (r->used[i]) continue;
        return weights_misfit(r->delta, hd_checkpoint_at(r->delta, i), r->err,
                              "unknown: no tensor of the model with .indices or .values");
    }
    return HD_OK;
}

/* ---- changing ---- */

/* Writes the tensor as it is now behind what is in memory. */
static hd_status change_tensor(reader *r, hd_tensor *t, const change *c) {
    const size_t size = hd_dtype_bytes(t->dtype, 1);
    const int64_t n = (int64_t)(t->bytes / size);
    uint8_t *data = hd_map_writable(&r->memory) + r->bytes;
    int64_t last = -1;
    memcpy(data, t->data, t->bytes);
    for (int64_t i = 0; i < c->indices->shape[0]; i++) {
        const int64_t at = weights_integer_at(c->indices, (size_t)i);
        if (at <= last || at >= n) {
            return weights_misfit(r->delta, c->indices, r->err,
                                  "number %lld is %lld: must be above %lld and below %lld",
                                  (long long)i, (long long)at, (long long)last, (long long)n);
        }
        memcpy(data + (size_t)at * size, c->values->data + (size_t)i * size, size);
        last = at;
    }
    t->data = data;
    r->bytes += t->bytes;
    return HD_OK;
}

static hd_status collect(reader *r) {
    const hd_checkpoint *model = r->w->checkpoint;
    for (int32_t i = 0; i < hd_checkpoint_count(model); i++) {
        const int32_t decl = r->w->uses[i].decl;
        hd_tensor t = *hd_checkpoint_at(model, i);
        const change c = change_of(r, &t);
        const bool changes = c.indices && c.values; /* check_change(): or neither */
        if (!changes && (decl < 0 || !r->touched[decl])) continue;
        if (changes) HD_TRY(change_tensor(r, &t, &c));
        r->tensors[r->n++] = t;
    }
    return HD_OK;
}

static hd_status read_delta(reader *r, hd_checkpoint **out) {
    const int32_t n = hd_checkpoint_count(r->w->checkpoint);
    size_t bytes = 1; /* a map is never empty */
    r->used = calloc((size_t)hd_checkpoint_count(r->delta) + 1, sizeof *r->used);
    r->touched = calloc((size_t)r->w->schema.n + 1, sizeof *r->touched);
    r->tensors = calloc((size_t)n + 1, sizeof *r->tensors);
    if (!r->used || !r->touched || !r->tensors) {
        return HD_FAIL(r->err, HD_ENOMEM, "no memory for a delta");
    }
    HD_TRY(find_changes(r, &bytes));
    HD_TRY(hd_map_take(&r->memory, bytes, "delta", r->err));
    HD_TRY(collect(r));
    return hd_checkpoint_of_tensors(out, r->tensors, r->n, &r->memory, "delta", r->err);
}

hd_status hd_weights_delta_read(hd_checkpoint **out, const hd_weights *w, hd_checkpoint *delta,
                                hd_err *err) {
    reader r = {.w = w, .delta = delta, .err = err};
    *out = NULL;
    const hd_status st =
        hd_weights_lost(w)
            ? HD_REFUSE(err, HD_EAGAIN, "weights_incomplete", NULL,
                        "a delta needs the weights that it changes, but tensors are lost")
            : read_delta(&r, out);
    hd_map_close(&r.memory);
    free(r.used);
    free(r.touched);
    free(r.tensors);
    hd_checkpoint_close(delta);
    return st;
}
