/* arrival.c - one tensor of an update on its way: bound like those of a checkpoint (bind.c), so
 * every name and format that a file may use is accepted here, too; checked; and turned into
 * copies. What has the stored format is copied from where it came; what has not is converted
 * into blocks of the arrival's own. */
#include "weights/arrival_internal.h"

#include <stdint.h>
#include <stdlib.h>

#include "weights/quantize.h"
#include "weights/weights_internal.h"

/* An arrival while it is prepared. */
typedef struct work {
    const hd_weights *w;
    const hd_checkpoint *source;
    weights_arrival *a;
    hd_err *err;
} work;

/* Arrays of updatable weights are memory of this process, whatever points to them. */
static void *writable(const void *p) {
    return (void *)(uintptr_t)p;
}

static void add_copy(const work *k, const void *to, const void *from, size_t bytes,
                     bool on_device) {
    weights_arrival *a = k->a;
    assert(a->n_copies < WEIGHTS_MOST_COPIES);
    a->copies[a->n_copies++] = (weights_copy){
        .to = writable(to), .from = from, .bytes = bytes, .on_device = on_device};
}

/* The device's copy of bytes of a tensor that came from there, or NULL. */
static const void *on_device(const hd_tensor *t, const void *from) {
    const uintptr_t at = (uintptr_t)from, first = t ? (uintptr_t)t->data : 0;
    if (!t || !t->on_device || at < first || at - first >= t->bytes) return NULL;
    return t->on_device + (at - first);
}

/* The stored array, and the copy of it that a device has. */
static void replace(const work *k, const void *stored, const void *read, const void *from,
                    size_t bytes) {
    const weights_bound *in = &k->a->in;
    add_copy(k, stored, from, bytes, false);
    if (!read || read == stored) return;
    const void *there = on_device(in->data, from);
    if (!there) there = on_device(in->scale, from);
    add_copy(k, read, there ? there : from, bytes, true);
    k->a->copies[k->a->n_copies - 1].from_device = there != NULL;
}

/* What operators read of a tensor that is stored otherwise: the host's array, and a device's copy. */
static void replace_read(const work *k, const void *read, const void *owned, const void *from,
                         size_t bytes) {
    if (owned) add_copy(k, owned, from, bytes, false);
    if (read != owned) add_copy(k, read, from, bytes, true);
}

static hd_status misfit(const work *k, const hd_tensor *t, const char *why) {
    return weights_misfit(k->source, t, k->err, "%s", why);
}

/* Memory for what is converted; NULL: there is none. */
static void *take_block(const work *k, size_t bytes) {
    weights_arrival *a = k->a;
    assert(a->n_blocks < WEIGHTS_MOST_BLOCKS);
    hd_block *block = &a->blocks[a->n_blocks];
    if (hd_block_init(block, bytes + 1, "an update", k->err) != HD_OK) return NULL;
    a->n_blocks++;
    return block->data;
}

/* ---- conversions ---- */

static hd_status convert(const work *k, const uint8_t **out, hd_dtype to, hd_dtype from,
                         const void *values, int64_t n) {
    uint8_t *block = take_block(k, hd_dtype_bytes(to, n));
    if (!block) return HD_ENOMEM;
    *out = block;
    if (hd_convert(to, block, from, values, n)) return HD_OK;
    return weights_misfit(k->source, k->a->in.data, k->err,
                          "bad value: larger than %s can hold", hd_dtype_name(to));
}

/* Scales in another type are the same numbers, or they are refused. */
static hd_status convert_scale(const work *k, const uint8_t **out, const hd_weight *have,
                               int64_t n) {
    const hd_weight *in = &k->a->in.weight;
    HD_TRY(convert(k, out, have->scale_type, in->scale_type, in->scale, n));
    for (int64_t i = 0; i < n; i++) {
        if (hd_dtype_at(have->scale_type, *out, i) ==
            hd_dtype_at(in->scale_type, in->scale, i)) {
            continue;
        }
        return weights_misfit(k->source, k->a->in.scale, k->err,
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

static hd_status refuse_format(const work *k, const weights_bound *have) {
    return weights_misfit(k->source, k->a->in.data, k->err,
                          "dtype mismatch: %s, but the model has %s, which can be made of F32, "
                          "F16 and BF16 only%s",
                          k->a->in.format->name, have->format->name,
                          hd_can_quantize(&have->weight) || is_plain(have) ? "" : ", not here");
}

/* ---- a tensor's arrays ---- */

static hd_status replace_scales(const work *k, const weights_bound *have,
                                const hd_weight *read) {
    const weights_bound *in = &k->a->in;
    const hd_weight *w = &have->weight;
    const hd_stored_format f = hd_weight_format(w);
    const uint8_t *from = in->weight.scale;
    if (in->weight.scale_type != w->scale_type) {
        HD_TRY(convert_scale(k, &from, w, hd_stored_scales(&f, w->rows, w->cols)));
    }
    replace(k, w->scale, read->scale, from, hd_stored_scale_bytes(&f, w->rows, w->cols));
    if (!have->global) return HD_OK;
    const bool captured = read->data != w->data || k->w->on_devices;
    if (captured && in->weight.global != w->global) {
        return misfit(k, in->global, "bad scale: on a GPU a global scale cannot change");
    }
    add_copy(k, have->global->data, in->global->data, sizeof(float), false);
    add_copy(k, &have->weight.global, in->global->data, sizeof(float), false);
    add_copy(k, &read->global, in->global->data, sizeof(float), false);
    return HD_OK;
}

static hd_status quantize(const work *k, const weights_bound *have, const hd_weight *read) {
    const hd_weight *in = &k->a->in.weight, *w = &have->weight;
    const hd_stored_format f = hd_weight_format(w);
    const size_t n = hd_stored_data_bytes(&f, w->rows, w->cols);
    const size_t n_scale = hd_stored_scale_bytes(&f, w->rows, w->cols);
    uint8_t *data = take_block(k, n);
    uint8_t *scale = data ? take_block(k, n_scale) : NULL;
    if (!scale) return HD_ENOMEM;
    hd_err why = {0};
    const hd_status st = hd_quantize(w, data, scale, in->type, in->data, &why);
    if (st == HD_EFORMAT) return misfit(k, k->a->in.data, why.msg);
    if (st != HD_OK) return HD_FAIL(k->err, st, "%s", why.msg);
    replace(k, w->data, read->data, data, n);
    replace(k, w->scale, read->scale, scale, n_scale);
    return HD_OK;
}

static hd_status replace_matrix(const work *k, const weights_bound *have,
                                const hd_weight *read) {
    const weights_bound *arrived = &k->a->in;
    const hd_weight *in = &arrived->weight, *w = &have->weight;
    const hd_stored_format f = hd_weight_format(w);
    const size_t n = hd_stored_data_bytes(&f, w->rows, w->cols);
    const uint8_t *from = in->data;
    if (is_plain(arrived) && is_plain(have)) {
        if (in->type != w->type) {
            HD_TRY(convert(k, &from, w->type, in->type, in->data, (int64_t)w->rows * w->cols));
        }
        replace(k, w->data, read->data, from, n);
        return HD_OK;
    }
    if (is_plain(arrived) && hd_can_quantize(w)) return quantize(k, have, read);
    if (arrived->format != have->format || !same_blocks(in, w)) return refuse_format(k, have);
    replace(k, w->data, read->data, from, n);
    return replace_scales(k, have, read);
}

/* A vector is stored in the file's type and read as float32, unless nothing reads it. */
static hd_status replace_vector(const work *k, const weights_bound *have,
                                const weights_slot *s) {
    const float *read = s->vector;
    const hd_weight *in = &k->a->in.weight, *w = &have->weight;
    const int64_t n = (int64_t)w->rows * w->cols;
    const uint8_t *stored = in->data, *wide;
    if (in->type != w->type) HD_TRY(convert(k, &stored, w->type, in->type, in->data, n));
    add_copy(k, w->data, stored, hd_dtype_bytes(w->type, n), false);
    if (!read || (const void *)read == w->data) return HD_OK;
    HD_TRY(convert(k, &wide, HD_F32, w->type, stored, n));
    replace_read(k, read, s->owned, wide, (size_t)n * sizeof(float));
    return HD_OK;
}

static hd_status replace_table(const work *k, const weights_bound *have,
                               const weights_slot *s) {
    const hd_tensor *in = k->a->in.data, *stored = have->data;
    const size_t n = (size_t)in->shape[0] * (size_t)in->shape[1];
    int32_t *table = take_block(k, n * sizeof *table);
    if (!table) return HD_ENOMEM;
    for (size_t i = 0; i < n; i++) {
        const int64_t id = weights_integer_at(in, i);
        if (id < 0 || id >= k->w->spec->route.n_experts) {
            return misfit(k, in, "bad expert: a number that no expert has");
        }
        table[i] = (int32_t)id;
    }
    if (in->dtype != stored->dtype) {
        return misfit(k, in, "dtype mismatch: the model has the other type of integers");
    }
    add_copy(k, stored->data, in->data, in->bytes, false);
    replace_read(k, s->table, s->owned, table, n * sizeof *table);
    return HD_OK;
}

/* ---- one tensor ---- */

hd_status weights_arrival_bind(weights_arrival *out, const hd_weights *w,
                               const hd_checkpoint *source, int32_t decl, const hd_tensor *data,
                               hd_err *err) {
    *out = (weights_arrival){.decl = decl};
    return weights_bind(&out->in, source, w->spec, &w->schema.decls[decl], data, err);
}

hd_status weights_arrival_prepare(weights_arrival *a, const hd_weights *w,
                                  const hd_checkpoint *source, hd_err *err) {
    const hd_tensor_decl *d = &w->schema.decls[a->decl];
    const weights_bound *have = &w->bound[a->decl];
    const weights_slot *s = weights_slot_at(w, d->layer, d->role);
    const work k = {w, source, a, err};
    HD_TRY(weights_check_scales(source, &a->in, err));
    HD_TRY(weights_check_values(source, &a->in, err));
    if (d->role == HD_ROUTER_HASH) return replace_table(&k, have, s);
    if (weights_is_small(d)) return replace_vector(&k, have, s);
    if (d->unused) return replace_matrix(&k, have, &have->weight);
    if (d->expert < 0) return replace_matrix(&k, have, &s->weight);
    const int32_t slot = hd_shard_slot(&w->shard, d->expert, w->spec->route.n_experts);
    return replace_matrix(&k, have, &s->experts[slot]);
}

void weights_arrival_deinit(weights_arrival *a) {
    for (int32_t i = 0; i < a->n_blocks; i++) hd_block_deinit(&a->blocks[i]);
    a->n_blocks = 0;
}
