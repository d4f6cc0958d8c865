/* renew.c - a shard gets the values of the complete weights again, after an update of them: what it has
 * copied in host memory, and what a device has. Addresses stay. */
#include <stdlib.h>

#include "weights/weights_internal.h"

hd_status weights_slice(hd_weights *w, const hd_weights *whole, int32_t decl, hd_err *err) {
    const weights_bound *from = &whole->bound[decl];
    weights_bound *to = &w->bound[decl];
    if (!from->data || w->slices[decl].rows == 0) return HD_OK;
    if (to->data) { /* a second time, into the same memory */
        w->pieces.taken = w->first_piece[decl];
    } else {
        w->first_piece[decl] = w->pieces.taken;
    }
    *to = *from;
    return weights_shard(&to->weight, &w->slices[decl], &w->pieces, err);
}

/* ---- host memory ---- */

static hd_status renew_host(hd_weights *w, const hd_weights *whole, const hd_weights_update *u,
                            hd_err *err) {
    for (int32_t i = 0; i < w->schema.n; i++) {
        if (u && !weights_update_brings(u, i)) continue;
        HD_TRY(weights_slice(w, whole, i, err));
        const bool table = w->schema.decls[i].role == HD_ROUTER_HASH; /* that of the whole */
        if (w->bound[i].data && !table) HD_TRY(weights_place(w, i, err));
    }
    weights_renew_received(&w->expert_slots, &whole->expert_slots);
    weights_slots_refill(&w->expert_slots);
    return HD_OK;
}

/* ---- a device ---- */

static void put(hd_stream *s, const void *to, const void *from, size_t bytes) {
    if (to && to != from) hd_stream_upload(s, (void *)(uintptr_t)to, from, bytes);
}

static void put_matrix(hd_stream *s, const hd_weight *to, const hd_weight *from) {
    const hd_stored_format f = hd_weight_format(from);
    put(s, to->data, from->data, hd_stored_data_bytes(&f, from->rows, from->cols));
    if (!from->scale) return;
    put(s, to->scale, from->scale, hd_stored_scale_bytes(&f, from->rows, from->cols));
}

/* As float32, which the host has widened into memory of its own, or the file has. */
static void put_vector(hd_stream *s, const weights_slot *to, const hd_weight *from) {
    const size_t n = (size_t)from->rows * (size_t)from->cols;
    float *wide = to->owned;
    for (size_t i = 0; wide && i < n; i++) {
        wide[i] = hd_dtype_at(from->type, from->data, (int64_t)i);
    }
    put(s, to->vector, wide ? wide : from->data, n * sizeof *wide);
}

static void put_table(hd_stream *s, const weights_slot *to, const weights_slot *from) {
    const size_t n = (size_t)from->weight.rows * (size_t)from->weight.cols;
    put(s, to->table, from->table, n * sizeof *from->table);
}

/* Experts are where they have moved to; those of other ranks at first are complete. */
static void put_expert(const hd_weights *w, const hd_weights *whole, int32_t decl,
                       hd_stream *s) {
    const hd_tensor_decl *d = &w->schema.decls[decl];
    const weights_slot_layer *l = &w->expert_slots.layers[d->layer];
    const weights_bound *from = w->bound[decl].data ? &w->bound[decl] : &whole->bound[decl];
    const hd_weight *to = weights_expert_matrix(&w->expert_slots, l,
                                                (int32_t)(d->role - HD_EXPERT_GATE), d->expert);
    if (from->data && to && to->data) put_matrix(s, to, &from->weight);
}

static void put_tensor(const hd_weights *w, const hd_weights *whole, int32_t decl,
                       hd_stream *s) {
    const hd_tensor_decl *d = &w->schema.decls[decl];
    const weights_bound *own = &w->bound[decl];
    const weights_slot *to = weights_slot_at(w, d->layer, d->role);
    if (d->expert >= 0) {
        put_expert(w, whole, decl, s);
    } else if (!own->data) {
        return; /* another rank has it */
    } else if (d->role == HD_ROUTER_HASH) {
        put_table(s, to, weights_slot_at(whole, d->layer, d->role));
    } else if (weights_is_small(d)) {
        put_vector(s, to, &own->weight);
    } else {
        put_matrix(s, &to->weight, &own->weight);
    }
}

static hd_status renew_device(hd_weights *w, const hd_weights *whole,
                              const hd_weights_update *u, hd_stream *s, hd_err *err) {
    for (int32_t i = 0; i < w->schema.n; i++) {
        if ((u && !weights_update_brings(u, i)) || w->schema.decls[i].unused) continue;
        HD_TRY(weights_slice(w, whole, i, err));
        put_tensor(w, whole, i, s);
    }
    return hd_stream_sync(s, err);
}

hd_status hd_weights_renew_shard(hd_weights *w, const hd_weights *whole,
                                 const hd_weights_update *u, hd_stream *s, hd_err *err) {
    return w->device ? renew_device(w, whole, u, s, err) : renew_host(w, whole, u, err);
}

hd_status hd_weights_restore_shard(hd_weights *w, const hd_weights *whole, hd_stream *s,
                                   hd_err *err) {
    if (!w->device) return HD_OK;
    HD_TRY(hd_device_restore(w->device, w->device_block, err));
    return renew_device(w, whole, NULL, s, err);
}

size_t hd_weights_discard_shard(hd_weights *w) {
    return weights_pieces_discard(&w->pieces);
}
