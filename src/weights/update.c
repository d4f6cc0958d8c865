/* update.c - collects an update as a list of copies, and makes them.
 *
 * The incoming tensors are bound like those of a checkpoint (bind.c), so every name and format
 * that a file may use is accepted here, too. What has the stored format is copied from where it
 * came; what has not is converted into blocks of the update's own. */
#include "weights/update.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "weights/quantize.h"
#include "weights/weights_internal.h"

/* One array of the model and its next content. */
typedef struct piece {
    void *to;
    const void *from;
    size_t bytes;
    int32_t decl;
    bool on_device;
} piece;

/* Tensors that came together, and what was converted of them. */
typedef struct bucket {
    hd_checkpoint *source;
    weights_pieces converted;
    piece *pieces;
    size_t n_pieces, cap_pieces;
    bool *used;  /* [tensors of source] */
    bool *given; /* [schema.n] what it brings, unless a later bucket brings it */
    int32_t n_given;
} bucket;

struct hd_weights_update {
    const hd_weights *w;
    bucket *buckets; /* [n_buckets] */
    size_t n_buckets;
};

/* One tensor on its way. */
typedef struct arrival {
    const hd_weights *w;
    bucket *b;
    weights_bound in;
    int32_t decl;
    hd_err *err;
} arrival;

/* Arrays of updatable weights are memory of this process, whatever points to them. */
static void *writable(const void *p) {
    return (void *)(uintptr_t)p;
}

static hd_status add_piece(arrival *a, const void *to, const void *from, size_t bytes,
                           bool on_device) {
    bucket *b = a->b;
    if (b->n_pieces == b->cap_pieces) {
        const size_t cap = b->cap_pieces ? 2 * b->cap_pieces : 256;
        piece *more = realloc(b->pieces, cap * sizeof *more);
        if (!more) return HD_FAIL(a->err, HD_ENOMEM, "no memory for an update");
        b->pieces = more;
        b->cap_pieces = cap;
    }
    b->pieces[b->n_pieces++] = (piece){writable(to), from, bytes, a->decl, on_device};
    return HD_OK;
}

/* The stored array, and the copy of it that a device has. */
static hd_status replace(arrival *a, const void *stored, const void *read, const void *from,
                         size_t bytes) {
    HD_TRY(add_piece(a, stored, from, bytes, false));
    return read && read != stored ? add_piece(a, read, from, bytes, true) : HD_OK;
}

static hd_status misfit(const arrival *a, const hd_tensor *t, const char *why) {
    return weights_misfit(a->b->source, t, a->err, "%s", why);
}

/* ---- conversions ---- */

static hd_status convert(arrival *a, const uint8_t **out, hd_dtype to, hd_dtype from,
                         const void *values, int64_t n) {
    uint8_t *block = weights_take_piece(&a->b->converted, hd_dtype_bytes(to, n), a->err);
    if (!block) return HD_ENOMEM;
    *out = block;
    if (hd_convert(to, block, from, values, n)) return HD_OK;
    return weights_misfit(a->b->source, a->in.data, a->err,
                          "bad value: larger than %s can hold", hd_dtype_name(to));
}

/* Scales in another type are the same numbers, or they are refused. */
static hd_status convert_scale(arrival *a, const uint8_t **out, const hd_weight *have,
                               int64_t n) {
    const hd_weight *in = &a->in.weight;
    HD_TRY(convert(a, out, have->scale_type, in->scale_type, in->scale, n));
    for (int64_t i = 0; i < n; i++) {
        if (hd_dtype_at(have->scale_type, *out, i) ==
            hd_dtype_at(in->scale_type, in->scale, i)) {
            continue;
        }
        return weights_misfit(a->b->source, a->in.scale, a->err,
                              "bad scale: number %lld is not exact in %s, the model's type",
                              (long long)i, hd_dtype_name(have->scale_type));
    }
    return HD_OK;
}

static bool is_plain(const weights_bound *b) {
    return b->format && b->format->scale_types[0] == HD_NONE;
}

static bool same_blocks(const hd_weight *a, const hd_weight *b) {
    return a->type == b->type && a->block_rows == b->block_rows &&
           a->block_cols == b->block_cols;
}

static hd_status refuse_format(const arrival *a, const weights_bound *have) {
    return weights_misfit(a->b->source, a->in.data, a->err,
                          "dtype mismatch: %s, but the model has %s, which can be made of F32, "
                          "F16 and BF16 only%s",
                          a->in.format->name, have->format->name,
                          hd_can_quantize(&have->weight) || is_plain(have) ? "" : ", not here");
}

/* ---- a tensor's arrays ---- */

static hd_status replace_scales(arrival *a, const weights_bound *have, const hd_weight *read) {
    const hd_weight *in = &a->in.weight, *w = &have->weight;
    const hd_stored_format f = hd_weight_format(w);
    const uint8_t *from = in->scale;
    if (in->scale_type != w->scale_type) {
        HD_TRY(convert_scale(a, &from, w, hd_stored_scales(&f, w->rows, w->cols)));
    }
    HD_TRY(
        replace(a, w->scale, read->scale, from, hd_stored_scale_bytes(&f, w->rows, w->cols)));
    if (!have->global) return HD_OK;
    if (read->data != w->data && in->global != w->global) {
        return misfit(a, a->in.global, "bad scale: on a GPU a global scale cannot change");
    }
    HD_TRY(add_piece(a, have->global->data, a->in.global->data, sizeof(float), false));
    HD_TRY(add_piece(a, &have->weight.global, a->in.global->data, sizeof(float), false));
    return add_piece(a, &read->global, a->in.global->data, sizeof(float), false);
}

static hd_status quantize(arrival *a, const weights_bound *have, const hd_weight *read) {
    const hd_weight *w = &have->weight;
    const hd_stored_format f = hd_weight_format(w);
    const size_t n = hd_stored_data_bytes(&f, w->rows, w->cols);
    const size_t n_scale = hd_stored_scale_bytes(&f, w->rows, w->cols);
    uint8_t *data = weights_take_piece(&a->b->converted, n, a->err);
    uint8_t *scale = data ? weights_take_piece(&a->b->converted, n_scale, a->err) : NULL;
    if (!scale) return HD_ENOMEM;
    HD_TRY(hd_quantize(w, data, scale, a->in.weight.type, a->in.weight.data, a->err));
    HD_TRY(replace(a, w->data, read->data, data, n));
    return replace(a, w->scale, read->scale, scale, n_scale);
}

static hd_status replace_matrix(arrival *a, const weights_bound *have, const hd_weight *read) {
    const hd_weight *in = &a->in.weight, *w = &have->weight;
    const hd_stored_format f = hd_weight_format(w);
    const size_t n = hd_stored_data_bytes(&f, w->rows, w->cols);
    const uint8_t *from = in->data;
    if (is_plain(&a->in) && is_plain(have)) {
        if (in->type != w->type) {
            HD_TRY(convert(a, &from, w->type, in->type, in->data, (int64_t)w->rows * w->cols));
        }
        return replace(a, w->data, read->data, from, n);
    }
    if (is_plain(&a->in) && hd_can_quantize(w)) return quantize(a, have, read);
    if (a->in.format != have->format || !same_blocks(in, w)) return refuse_format(a, have);
    HD_TRY(replace(a, w->data, read->data, from, n));
    return replace_scales(a, have, read);
}

/* A vector is stored in the file's type and read as float32. */
static hd_status replace_vector(arrival *a, const weights_bound *have, const weights_slot *s) {
    const float *read = s->vector;
    const hd_weight *in = &a->in.weight, *w = &have->weight;
    const int64_t n = (int64_t)w->rows * w->cols;
    const uint8_t *stored = in->data, *wide;
    if (in->type != w->type) HD_TRY(convert(a, &stored, w->type, in->type, in->data, n));
    HD_TRY(add_piece(a, w->data, stored, hd_dtype_bytes(w->type, n), false));
    if ((const void *)read == w->data) return HD_OK;
    HD_TRY(convert(a, &wide, HD_F32, w->type, stored, n));
    return add_piece(a, read, wide, (size_t)n * sizeof(float), read != s->owned);
}

static hd_status replace_table(arrival *a, const weights_bound *have, const weights_slot *s) {
    const hd_tensor *in = a->in.data, *stored = have->data;
    const size_t n = (size_t)in->shape[0] * (size_t)in->shape[1];
    int32_t *table = weights_take_piece(&a->b->converted, n * sizeof *table, a->err);
    if (!table) return HD_ENOMEM;
    for (size_t i = 0; i < n; i++) {
        const int64_t id = weights_integer_at(in, i);
        if (id < 0 || id >= a->w->spec->route.n_experts) {
            return misfit(a, in, "bad expert: a number that no expert has");
        }
        table[i] = (int32_t)id;
    }
    if (in->dtype != stored->dtype) {
        return misfit(a, in, "dtype mismatch: the model has the other type of integers");
    }
    HD_TRY(add_piece(a, stored->data, in->data, in->bytes, false));
    return add_piece(a, s->table, table, n * sizeof *table, s->table != s->owned);
}

/* ---- one tensor ---- */

static bool selected(const hd_weights *w, const hd_tensor_decl *d, hd_weights_selector s) {
    const bool draft = d->layer >= w->spec->n_layers;
    return s == HD_SELECT_ALL || draft == (s == HD_SELECT_DRAFT);
}

static void use(bucket *b, const hd_tensor *t) {
    if (t) b->used[t - hd_checkpoint_at(b->source, 0)] = true;
}

static hd_status take_tensor(arrival *a, const hd_tensor *data, bool wanted) {
    const hd_weights *w = a->w;
    const hd_tensor_decl *d = &w->schema.decls[a->decl];
    const weights_bound *have = &w->bound[a->decl];
    use(a->b, data);
    HD_TRY(weights_bind(&a->in, a->b->source, w->spec, d, data, a->err));
    use(a->b, a->in.scale);
    use(a->b, a->in.global);
    if (!wanted || (!have->data && d->duplicate)) return HD_OK;
    if (!have->data) return misfit(a, data, "the running model was opened without it");
    HD_TRY(weights_check_scales(a->b->source, &a->in, a->err));
    HD_TRY(weights_check_values(a->b->source, &a->in, a->err));
    weights_slot *s = weights_slot_at(w, d->layer, d->role);
    if (d->role == HD_ROUTER_HASH) return replace_table(a, have, s);
    if (weights_is_small(d)) return replace_vector(a, have, s);
    const hd_weight *read =
        d->expert < 0
            ? &s->weight
            : &s->experts[hd_shard_slot(&w->shard, d->expert, w->spec->route.n_experts)];
    return replace_matrix(a, have, read);
}

/* ---- buckets ---- */

static void close_bucket(bucket *b) {
    hd_checkpoint_close(b->source);
    weights_pieces_deinit(&b->converted);
    free(b->pieces);
    free(b->used);
    free(b->given);
    *b = (bucket){0};
}

/* What no declaration asked for is unknown, unless files are known to have it. */
static hd_status check_unknown(const bucket *b, hd_err *err) {
    for (int32_t i = 0; i < hd_checkpoint_count(b->source); i++) {
        const hd_tensor *t = hd_checkpoint_at(b->source, i);
        if (b->used[i] || weights_of_no_use(t->name)) continue;
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

static hd_status fill_bucket(const hd_weights_update *u, bucket *b,
                             const hd_weights_update_rule *rule, hd_err *err) {
    const hd_weights *w = u->w;
    const hd_tensor_decl *absent = NULL;
    for (int32_t i = 0; i < w->schema.n; i++) {
        const hd_tensor_decl *d = &w->schema.decls[i];
        const bool wanted = selected(w, d, rule->selector);
        const hd_tensor *data = weights_find_tensor(b->source, w->spec, d);
        if (!data) {
            if (wanted && w->bound[i].data && !d->duplicate && !absent) absent = d;
            continue;
        }
        arrival a = {.w = w, .b = b, .decl = i, .err = err};
        HD_TRY(take_tensor(&a, data, wanted));
        b->given[i] = wanted && w->bound[i].data;
        b->n_given += b->given[i];
    }
    HD_TRY(check_unknown(b, err));
    if (rule->once) HD_TRY(check_once(u, b, err));
    if (!rule->whole || !absent) return HD_OK;
    return HD_FAIL(err, HD_EFORMAT, "%s: missing tensor %s",
                   hd_checkpoint_shard_path(b->source, 0), absent->name);
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
    b.given = calloc((size_t)u->w->schema.n + 1, sizeof *b.given);
    b.used = calloc((size_t)hd_checkpoint_count(c) + 1, sizeof *b.used);
    hd_status st = b.given && b.used ? fill_bucket(u, &b, rule, err)
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

static bool is_on_device(const hd_weights *w) {
    for (int32_t i = 0; i < w->schema.n; i++) {
        const hd_tensor_decl *d = &w->schema.decls[i];
        const weights_slot *s = weights_slot_at(w, d->layer, d->role);
        if (!w->bound[i].data || d->expert >= 0 || weights_is_small(d)) continue;
        if (s->weight.data && s->weight.data != w->bound[i].weight.data) return true;
    }
    return false;
}

hd_status hd_weights_discard(hd_weights *w, size_t *bytes, hd_err *err) {
    if (is_on_device(w)) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "weights on a GPU cannot be given back yet");
    }
    *bytes += hd_checkpoint_discard(w->checkpoint);
    for (int32_t i = 0; i < w->schema.n; i++) set_lost(w, i, w->bound[i].data != NULL);
    return HD_OK;
}

/* ---- applying ---- */

/* Copies what a bucket brings. Returns whether a global scale is among it. */
static bool copy_bucket(const bucket *b, const hd_weights *w, hd_stream *s) {
    bool scalars = false;
    for (size_t k = 0; k < b->n_pieces; k++) {
        const piece *p = &b->pieces[k];
        if (!b->given[p->decl]) continue;
        if (p->on_device) {
            hd_stream_upload(s, p->to, p->from, p->bytes);
        } else if (p->to != p->from) {
            memcpy(p->to, p->from, p->bytes);
        }
        scalars = scalars || w->bound[p->decl].global;
    }
    return scalars;
}

hd_status hd_weights_update_apply(hd_weights_update *u, hd_weights *w, hd_stream *s,
                                  hd_err *err) {
    bool scalars = false;
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
