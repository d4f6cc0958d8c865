/* upload.c - copies what operators read to a device, and again after its memory was given back; holds
 * experts in host memory for copies. */
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/thread_pool.h"
#include "weights/quantize.h"
#include "weights/safetensors.h"
#include "weights/weights_internal.h"

/* A walk over everything that operators read: it measures if s is NULL, else copies into the
 * arena. */
typedef struct moving {
    hd_arena arena;
    hd_stream *s;
    hd_upload_watch watch;
    size_t total;
    weights_move *moves; /* [n] */
    size_t n;
} moving;

static const void *move(moving *m, const void *from, size_t bytes) {
    void *to = hd_arena_take(&m->arena, bytes, 256);
    m->n++;
    if (!m->s) return from;
    m->moves[m->n - 1] = (weights_move){to, from, bytes};
    hd_stream_upload(m->s, to, from, bytes);
    if (m->watch.moved) m->watch.moved(m->watch.ctx, m->arena.used, m->total);
    return to;
}

static void move_matrix(moving *m, hd_weight *w) {
    const hd_stored_format f = hd_weight_format(w);
    w->data = move(m, w->data, hd_stored_data_bytes(&f, w->rows, w->cols));
    if (w->scale) w->scale = move(m, w->scale, hd_stored_scale_bytes(&f, w->rows, w->cols));
}

static void move_slot(const hd_weights *w, moving *m, weights_slot *s) {
    const size_t n = (size_t)s->weight.rows * (size_t)s->weight.cols;
    const bool experts = s->experts && !w->experts_elsewhere;
    for (int32_t e = 0; experts && e < w->shard.n_experts; e++) {
        if (s->experts[e].data) move_matrix(m, &s->experts[e]);
    }
    if (s->table) {
        s->table = move(m, s->table, n * sizeof *s->table);
    } else if (s->vector) {
        s->vector = move(m, s->vector, n * sizeof *s->vector);
        if (m->s) s->weight.data = NULL; /* operators must not read host memory */
    } else if (s->weight.data) {
        move_matrix(m, &s->weight);
    }
}

/* All but Engram tables. */
static void move_all(const hd_weights *w, moving *m) {
    const size_t n_slots = (size_t)(1 + w->spec->n_layers + w->spec->n_mtp) * HD_N_ROLES;
    for (size_t i = 0; i < n_slots; i++) {
        if (i % HD_N_ROLES != HD_ENGRAM_TABLE) move_slot(w, m, &w->slots[i]);
    }
}

/* Leaves memory where it is if operators of d can read it there; else copies it to where they can. */
static hd_status keep_on_host(hd_device *d, const void **data, size_t bytes, hd_err *err) {
    hd_err why = {0};
    void *copy;
    const hd_status st = hd_device_read_host(d, *data, bytes, &why);
    if (st == HD_OK) return HD_OK;
    if (st != HD_EUNSUPPORTED) return HD_FAIL(err, st, "an Engram table: %s", why.msg);
    HD_TRY(hd_device_alloc_host(d, &copy, bytes, "an Engram table", err));
    memcpy(copy, *data, bytes);
    *data = copy;
    return HD_OK;
}

/* A step reads a few rows of an Engram table, which may be larger than a GPU's memory. */
static hd_status place_tables(hd_weights *w, hd_device *d, hd_err *err) {
    for (int32_t i = 0; i < w->spec->engram.n_layers; i++) {
        hd_weight *t = &weights_slot_at(w, w->spec->engram.layers[i], HD_ENGRAM_TABLE)->weight;
        const hd_stored_format f = hd_weight_format(t);
        if (!t->data) continue;
        HD_TRY(keep_on_host(d, &t->data, hd_stored_data_bytes(&f, t->rows, t->cols), err));
        if (!t->scale) continue;
        HD_TRY(keep_on_host(d, &t->scale, hd_stored_scale_bytes(&f, t->rows, t->cols), err));
    }
    return HD_OK;
}

hd_status hd_weights_upload(hd_weights *w, hd_device *d, hd_stream *s,
                            const hd_upload_watch *watch, hd_err *err) {
    moving m = {.arena = hd_arena_measure()};
    void *block;
    const bool host = hd_device_is_host(d);
    /* the weights are on the device already */
    if ((host && !w->experts_elsewhere) || w->dummies.device) return HD_OK;
    move_all(w, &m);
    hd_arena_take(&m.arena, weights_spare_bytes(&w->expert_slots), 256);
    const size_t bytes = m.arena.peak;
    w->moves = calloc(m.n + 1, sizeof *w->moves);
    if (!w->moves) return HD_FAIL(err, HD_ENOMEM, "no memory for %zu arrays", m.n);
    w->n_moves = m.n;
    HD_TRY(hd_device_alloc(d, &block, bytes, "weights", err));
    m = (moving){
        .arena = hd_arena_over(block, bytes), .s = s, .total = bytes, .moves = w->moves};
    if (watch) m.watch = *watch;
    move_all(w, &m);
    HD_TRY(place_tables(w, d, err));
    if (!host) {
        w->device = d;
        w->device_block = block;
        void *spares = hd_arena_take(&m.arena, weights_spare_bytes(&w->expert_slots), 256);
        HD_TRY(weights_buffers_open(&w->expert_slots, spares, err));
        HD_TRY(weights_slots_fill(&w->expert_slots, d, s, err));
    }
    return hd_stream_sync(s, err);
}

/* Updates keep the host's copy as it is on the device. */
hd_status hd_weights_restore(hd_weights *w, hd_stream *s, hd_err *err) {
    if (!w->device) return HD_OK;
    HD_TRY(hd_device_restore(w->device, w->device_block, err));
    for (size_t i = 0; i < w->n_moves; i++) {
        const weights_move *m = &w->moves[i];
        hd_stream_upload(s, m->to, m->from, m->bytes);
    }
    return hd_stream_sync(s, err);
}

/* A vector is read as float32 and stored in the file's type, which has those numbers. */
static void store_vector(const hd_weights *w, int32_t decl, const float *values) {
    const hd_weight *to = &w->bound[decl].weight;
    hd_convert(to->type, (uint8_t *)(uintptr_t)to->data, HD_F32, values,
               (int64_t)to->rows * to->cols);
}

hd_status hd_weights_fetch(const hd_weights *w, hd_stream *s, hd_err *err) {
    if (!w->device) return HD_OK;
    for (size_t i = 0; i < w->n_moves; i++) {
        const weights_move *m = &w->moves[i];
        hd_stream_download(s, (void *)(uintptr_t)m->from, m->to, m->bytes);
    }
    HD_TRY(hd_stream_sync(s, err));
    for (int32_t i = 0; i < w->schema.n; i++) {
        const hd_tensor_decl *d = &w->schema.decls[i];
        if (!w->bound[i].data || d->expert >= 0) continue;
        const weights_slot *slot = weights_slot_at(w, d->layer, d->role);
        if (slot->vector && slot->owned) store_vector(w, i, slot->owned);
    }
    return HD_OK;
}

/* ---- experts in host memory ---- */

/* Of a file, or of the block of random weights, the bytes from the first expert to the last. NULL: it has
 * none. */
typedef struct file_part {
    const uint8_t *begin, *end;
} file_part;

static void include(file_part *f, const void *data, size_t bytes) {
    const uint8_t *begin = data;
    if (!f->begin || begin < f->begin) f->begin = begin;
    if (begin + bytes > f->end) f->end = begin + bytes;
}

static void include_matrix(file_part *files, const weights_bound *b) {
    const hd_weight *m = &b->weight;
    const hd_stored_format f = hd_weight_format(m);
    include(&files[b->data->shard], m->data, hd_stored_data_bytes(&f, m->rows, m->cols));
    if (!m->scale) return;
    const int32_t file = b->scale ? b->scale->shard : b->data->shard;
    include(&files[file], m->scale, hd_stored_scale_bytes(&f, m->rows, m->cols));
}

static bool is_expert_below(const hd_weights *w, int32_t decl, int32_t n_layers) {
    const hd_tensor_decl *d = &w->schema.decls[decl];
    return d->expert >= 0 && d->layer < n_layers && hd_weights_stored(w, decl);
}

static uint8_t *in_block(const hd_weights *w, const void *at) {
    return (uint8_t *)w->dummies.block.data +
           ((const uint8_t *)at - (const uint8_t *)w->dummies.block.data);
}

typedef struct held_layers {
    const hd_weights *w;
    int32_t n;
} held_layers;

static hd_status make_on_host(const void *arg, int32_t i, hd_err *err) {
    const held_layers *h = arg;
    const hd_weight *m = &h->w->bound[i].weight;
    (void)err;
    if (!is_expert_below(h->w, i, h->n)) return HD_OK;
    weights_dummies_make(h->w->spec, &h->w->schema.decls[i], i, NULL, in_block(h->w, m->data),
                         m->scale ? in_block(h->w, m->scale) : NULL);
    return HD_OK;
}

hd_status hd_weights_hold_experts(const hd_weights *w, int32_t n_layers, hd_device *d,
                                  size_t *bytes, hd_err *err) {
    const int32_t n = w->checkpoint ? hd_checkpoint_shards(w->checkpoint) : 1;
    const held_layers held = {w, n_layers};
    *bytes = 0;
    if (w->dummies.experts_later)
        HD_TRY(hd_tasks_run(0, w->schema.n, make_on_host, &held, err));
    file_part *files = calloc((size_t)n + 1, sizeof *files);
    if (!files) return HD_FAIL(err, HD_ENOMEM, "no memory for a list of %d files", n);
    for (int32_t i = 0; i < w->schema.n; i++) {
        if (is_expert_below(w, i, n_layers)) include_matrix(files, &w->bound[i]);
    }
    hd_status st = HD_OK;
    for (int32_t i = 0; i < n && st == HD_OK; i++) {
        const size_t part = (size_t)(files[i].end - files[i].begin);
        if (part) st = hd_device_pin_host(d, files[i].begin, part, err);
        if (st == HD_OK) *bytes += part;
    }
    free(files);
    return st;
}

static void copy_matrix(const hd_weights *w, int32_t decl, hd_stream *s, uint8_t *data,
                        uint8_t *scale) {
    const hd_weight *m = &w->bound[decl].weight;
    const hd_stored_format f = hd_weight_format(m);
    if (!w->checkpoint) {
        weights_dummies_make(w->spec, &w->schema.decls[decl], decl, s, data,
                             m->scale ? scale : NULL);
        return;
    }
    hd_stream_upload(s, data, m->data, hd_stored_data_bytes(&f, m->rows, m->cols));
    if (m->scale) {
        hd_stream_upload(s, scale, m->scale, hd_stored_scale_bytes(&f, m->rows, m->cols));
    }
}

void hd_weights_copy_experts(const hd_weights *w, int32_t layer, const hd_expert_places *to,
                             hd_stream *s) {
    for (int32_t i = 0; i < w->schema.n; i++) {
        const hd_tensor_decl *d = &w->schema.decls[i];
        if (d->layer != layer || !is_expert_below(w, i, layer + 1)) continue;
        uint8_t *slot = to->memory + (size_t)d->expert * to->slot_bytes;
        const int32_t role = (int32_t)(d->role - HD_EXPERT_GATE);
        copy_matrix(w, i, s, slot + to->data_at[role], slot + to->scale_at[role]);
    }
}
