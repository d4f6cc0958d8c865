/* expert_host.c - see expert_host.h: memory of layers, and rounds through their slots. */
#include "model/expert_host.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "model/expert_host_internal.h"

enum {
    ROLES = MODEL_EXPERT_ROLES,
    ALIGN = 256, /* of arrays in a slot, as kernels like them best */
    NONE = HOST_NONE,
    /* Of a layer's slots: one round of several fetches so many, and leaves the others to experts that
     * wait for their turn. */
    PART_OF_ROUND = 4,
    PART_OF_SETS = 8, /* of the memory: sets take so much at most, */
    MOST_IN_SET = 16  /* and no more experts each */
};

static expert_host *host_of(hd_expert_stage *s) {
    return (expert_host *)s;
}

static const hd_weight *lies_at(const hd_weights *whole, int32_t layer, int32_t role,
                                int32_t expert) {
    return hd_weights_held_expert(whole, layer, (hd_role)((int32_t)HD_EXPERT_GATE + role),
                                  expert);
}

/* ---- opening: layers ---- */

static size_t place(size_t *at, size_t bytes) {
    const size_t begin = *at;
    *at += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return begin;
}

/* Lays out an expert's arrays; returns the bytes of a slot. */
static size_t arrange(const hd_weights *whole, int32_t layer, int32_t expert,
                      hd_expert_layout *out) {
    size_t bytes = 0;
    *out = (hd_expert_layout){0};
    for (int32_t r = 0; r < ROLES; r++) {
        const hd_weight *m = lies_at(whole, layer, r, expert);
        const hd_stored_format f = hd_weight_format(m);
        const size_t data = hd_stored_data_bytes(&f, m->rows, m->cols);
        const size_t scale = m->scale ? hd_stored_scale_bytes(&f, m->rows, m->cols) : 0;
        out->data_bytes[r] = (int64_t)data;
        out->data_at[r] = (int64_t)place(&bytes, data);
        out->scale_bytes[r] = (int64_t)scale;
        out->scale_at[r] = (int64_t)place(&bytes, scale);
    }
    return bytes;
}

static hd_status look_at_layer(expert_host *s, int32_t layer, host_layer *u, hd_err *err) {
    u->n_experts = hd_layer_route(s->spec, layer).n_experts;
    for (int32_t e = 0; e < u->n_experts; e++) {
        hd_expert_layout own;
        const size_t bytes = arrange(s->o.whole, layer, e, &own);
        if (e == 0) u->layout = own;
        if (memcmp(&own, &u->layout, sizeof own) != 0) {
            return HD_FAIL(err, HD_EUNSUPPORTED,
                           "layer %d: experts of several formats cannot share slots", layer);
        }
        if (bytes > s->slot_bytes) s->slot_bytes = bytes;
        for (int32_t r = 0; r < ROLES && !u->whole; r++) {
            s->elsewhere_bytes += (size_t)(own.data_bytes[r] + own.scale_bytes[r]);
        }
    }
    s->n_whole += u->whole;
    *(u->whole ? &s->whole_experts : &s->held_experts) += u->n_experts;
    return HD_OK;
}

static hd_status look_at_layers(expert_host *s, hd_err *err) {
    const hd_weight *first = NULL;
    for (int32_t l = 0; l < s->n_layers; l++) {
        const hd_weight *own =
            hd_weights_expert_map(s->w, l) ? lies_at(s->o.whole, l, 0, 0) : NULL;
        s->unit_of[l] = NONE;
        if (!own) continue;
        if (!first) first = own;
        s->unit_of[l] = s->n_units++;
        if (l < s->n_main) s->n_main_units = s->n_units;
        s->units[s->unit_of[l]].layer = l;
        s->units[s->unit_of[l]].whole = l >= s->o.held;
        HD_TRY(look_at_layer(s, l, &s->units[s->unit_of[l]], err));
    }
    if (!first || s->slot_bytes == 0) {
        return HD_FAIL(err, HD_EUNSUPPORTED, "no layer has experts to fetch");
    }
    if (s->n_whole == s->n_units) return HD_OK;
    return hd_device_read_host(s->o.device, first->data, 1, err);
}

/* A layer's part of the slots that are left, by its experts; every layer behind it needs one. */
static int32_t part_of_layer(const host_layer *u, int64_t left, int64_t experts_left,
                             int32_t behind) {
    const int64_t part = hd_max_i64(1, left * u->n_experts / experts_left);
    return (int32_t)hd_min_i64(hd_min_i64(part, left - behind), u->n_experts);
}

static hd_status divide_memory(expert_host *s, hd_err *err) {
    const size_t fit = s->o.bytes / (s->slot_bytes + !s->slot_bytes); /* there is an expert */
    const int32_t n_held = s->n_units - s->n_whole;
    const int64_t whole = s->whole_experts;
    if ((int64_t)fit < whole + n_held) {
        return HD_FAIL(err, HD_EUNSUPPORTED,
                       "%zu bytes for experts hold %zu of %zu bytes each; %d layers that host "
                       "memory does not hold have %" PRId64 ", and %d layers need one each",
                       s->o.bytes, fit, s->slot_bytes, s->n_whole, whole, n_held);
    }
    const int64_t left_over = (int64_t)fit - whole, all = s->held_experts;
    if (left_over < all) {
        const int64_t part = left_over / PART_OF_SETS / HOST_SETS;
        s->stream.most = (int32_t)hd_min_i64(part, MOST_IN_SET);
    }
    s->n_slots = (int32_t)hd_min_i64(left_over - HOST_SETS * s->stream.most, all);
    int64_t left = s->n_slots, experts_left = all;
    for (int32_t i = 0; i < s->n_units; i++) {
        host_layer *u = &s->units[i];
        const bool held = i < n_held;
        u->slots.n_slots =
            held ? part_of_layer(u, left, experts_left, n_held - 1 - i) : u->n_experts;
        u->slots.slot_bytes = (int64_t)s->slot_bytes;
        if (!held) continue;
        left -= u->slots.n_slots;
        experts_left -= u->n_experts;
    }
    return HD_OK;
}

/* ---- opening: memory ---- */

/* Walks over the device memory: base NULL measures. */
typedef struct walk {
    uint8_t *base;
    size_t at;
} walk;

static void *take(walk *w, size_t bytes) {
    const size_t at = place(&w->at, bytes);
    return w->base ? w->base + at : NULL;
}

static void take_round(const expert_host *s, walk *w, host_round *out) {
    const size_t n = (size_t)s->n_experts;
    out->table = take(w, ROLES * n * sizeof *out->table);
    out->round_offset = take(w, (n + 1) * sizeof *out->round_offset);
    out->range = take(w, 2 * sizeof *out->range);
    out->todo = take(w, (1 + 2 * n) * sizeof *out->todo);
}

static void take_all(expert_host *s, walk *w) {
    const size_t n = (size_t)s->n_experts, matrices = ROLES * n * sizeof(hd_weight);
    for (int32_t u = 0; u < s->n_units; u++) {
        hd_expert_slots *x = &s->units[u].slots;
        const size_t n_slots = (size_t)x->n_slots;
        x->memory = take(w, n_slots * s->slot_bytes);
        x->slot = take(w, n * sizeof *x->slot);
        x->holder = take(w, n_slots * sizeof *x->holder);
        x->used = take(w, n_slots * sizeof *x->used);
        x->clock = take(w, sizeof *x->clock);
        s->units[u].from = take(w, matrices);
    }
    for (int32_t i = 0; i < HOST_SETS && s->stream.most > 0; i++) {
        host_set *set = &s->stream.sets[i];
        set->memory = take(w, (size_t)s->stream.most * s->slot_bytes);
        take_round(s, w, &set->round);
    }
    take_round(s, w, &s->own);
    s->rows.desk = take(w, sizeof *s->rows.desk);
    s->counts = take(w, sizeof *s->counts);
}

static hd_status take_memory(expert_host *s, hd_err *err) {
    void *seen = NULL;
    walk w = {0};
    take_all(s, &w);
    HD_TRY(hd_device_alloc(s->o.device, &s->block, w.at, "experts that are fetched", err));
    w = (walk){.base = s->block};
    take_all(s, &w);
    HD_TRY(hd_device_alloc_host(s->o.device, &seen, sizeof *s->seen, "counts of experts", err));
    s->seen = seen;
    *s->seen = (hd_fetch_counts){0};
    return HD_OK;
}

/* An expert's matrix of a role in a slot, or a place of a set. */
static hd_weight in_slot(const host_layer *u, int32_t role, const hd_weight *from,
                         const uint8_t *slot) {
    hd_weight m = *from;
    m.data = slot + u->layout.data_at[role];
    if (m.scale) m.scale = slot + u->layout.scale_at[role];
    return m;
}

/* Describes what a layer's slots may hold, every expert in some slot, and each slot with some; and then
 * with the places of each set. may: [the larger of both, and places of a set] */
static void describe(const expert_host *s, host_layer *u, int32_t role, const hd_weight *from,
                     hd_weight *may) {
    const host_stream *x = &s->stream;
    const int32_t n = u->n_experts;
    for (int32_t i = 0; i < n; i++) {
        const uint8_t *slot = u->slots.memory + (size_t)(i % u->slots.n_slots) * s->slot_bytes;
        may[i] = in_slot(u, role, &from[i], slot);
    }
    hd_expert_table_init(&u->tables[role], may, n);
    u->tables[role].slots = s->own.table + (int64_t)role * n;
    for (int32_t k = 0; k < HOST_SETS && x->most > 0; k++) {
        hd_expert_table *t = &u->streamed[k][role];
        for (int32_t i = 0; i < x->most; i++) {
            const uint8_t *place = x->sets[k].memory + (size_t)i * s->slot_bytes;
            may[n + i] = in_slot(u, role, &from[i % n], place);
        }
        hd_expert_table_init(t, may, n + x->most);
        t->n = n;
        t->slots = x->sets[k].round.table + (int64_t)role * n;
    }
}

/* All experts go to the device, and tables tell where. */
static void fill_whole(expert_host *s, int32_t layer, hd_weight *from) {
    host_layer *u = &s->units[s->unit_of[layer]];
    const size_t n = (size_t)u->n_experts;
    for (int32_t r = 0; r < ROLES; r++) {
        hd_weight *all = from + (size_t)r * n;
        for (int32_t e = 0; e < u->n_experts; e++) {
            const uint8_t *slot = u->slots.memory + (size_t)e * s->slot_bytes;
            all[e] = in_slot(u, r, lies_at(s->o.whole, layer, r, e), slot);
        }
        hd_expert_table_init(&u->tables[r], all, u->n_experts);
        u->tables[r].slots = u->from + (size_t)r * n;
    }
    const hd_expert_places to = {.memory = u->slots.memory,
                                 .slot_bytes = s->slot_bytes,
                                 .data_at = u->layout.data_at,
                                 .scale_at = u->layout.scale_at};
    hd_weights_copy_experts(s->o.whole, layer, &to, s->o.stream);
    hd_stream_upload(s->o.stream, u->from, from, ROLES * n * sizeof *from);
}

static void fill_layer(expert_host *s, int32_t layer, hd_weight *from, int32_t *none) {
    host_layer *u = &s->units[s->unit_of[layer]];
    const size_t n = (size_t)u->n_experts;
    hd_weight *may = from + ROLES * n;
    for (int32_t r = 0; r < ROLES; r++) {
        for (int32_t e = 0; e < u->n_experts; e++) {
            from[(size_t)r * n + (size_t)e] = *lies_at(s->o.whole, layer, r, e);
        }
        describe(s, u, r, from + (size_t)r * n, may);
    }
    hd_stream_upload(s->o.stream, u->from, from, ROLES * n * sizeof *from);
    hd_stream_upload(s->o.stream, u->slots.slot, none, n * sizeof *none);
    hd_stream_upload(s->o.stream, u->slots.holder, none,
                     (size_t)u->slots.n_slots * sizeof *none);
}

static hd_status fill(expert_host *s, hd_err *err) {
    const size_t n = (size_t)s->n_experts;
    hd_weight *from = calloc((ROLES + 1) * n + MOST_IN_SET, sizeof *from);
    int32_t *none = calloc(n, sizeof *none);
    if (!from || !none) {
        free(from);
        free(none);
        return HD_FAIL(err, HD_ENOMEM, "no memory for tables of %zu experts", n);
    }
    for (size_t i = 0; i < n; i++) none[i] = NONE;
    for (int32_t l = 0; l < s->n_layers; l++) {
        if (s->unit_of[l] == NONE) continue;
        if (s->units[s->unit_of[l]].whole) {
            fill_whole(s, l, from);
        } else {
            fill_layer(s, l, from, none);
        }
    }
    free(from);
    free(none);
    return hd_stream_sync(s->o.stream, err);
}

/* ---- the stage ---- */

hd_moe_fetch_args host_fetch_args(const expert_host *s, const host_layer *u,
                                  const host_round *round) {
    return (hd_moe_fetch_args){.table = round->table,
                               .round_offset = round->round_offset,
                               .range = round->range,
                               .todo = round->todo,
                               .counts = s->counts,
                               .seen = s->seen,
                               .from = u->from,
                               .slots = u->slots,
                               .layout = u->layout,
                               .n_experts = u->n_experts,
                               .host = s->rows};
}

/* One round if the slots hold all that rows may choose. A round of several fetches few, so that
 * experts that are there stay until their turn. */
static void begin(hd_expert_stage *base, const hd_expert_layer *layer) {
    expert_host *s = host_of(base);
    host_layer *u = &s->units[s->unit_of[layer->layer]];
    s->layer = *layer;
    s->unit = u;
    s->round = 0;
    s->n_rounds = 1;
    s->streams = host_stream_begin(s, s->unit_of[layer->layer]);
    if (u->whole || s->streams) return;
    const int32_t n_slots = u->slots.n_slots;
    const int32_t routed = hd_min_i32(layer->n_places, u->n_experts);
    s->most = routed <= n_slots ? n_slots : hd_max_i32(1, n_slots / PART_OF_ROUND);
    s->n_rounds = routed <= n_slots ? 1 : (int32_t)hd_ceil_div(routed, s->most);
}

static void fetch_round(expert_host *s, const host_layer *u) {
    hd_moe_fetch_args a = host_fetch_args(s, u, &s->own);
    a.before = s->round ? s->own.range : NULL;
    a.offset = s->layer.offset;
    a.most = s->most;
    a.x = s->layer.x;
    a.assignment = s->layer.assignment;
    a.weight = s->layer.weight;
    a.top_k = s->layer.top_k;
    a.layer = u->layer;
    s->layer.ops->moe_fetch(s->layer.stream, &a);
}

/* Takes what the host computed of the round that ends. */
static void join_round(const expert_host *s) {
    if (!s->rows.mail || s->unit->whole || s->round == 0) return;
    s->layer.ops->moe_join(s->layer.stream, &(hd_moe_join_args){.y = s->layer.y,
                                                                .offset = s->layer.offset,
                                                                .host = s->rows,
                                                                .counts = s->counts});
}

static hd_status next(hd_expert_stage *base, hd_expert_wave *out, hd_err *err) {
    expert_host *s = host_of(base);
    host_layer *u = s->unit;
    (void)err;
    *out = (hd_expert_wave){0};
    if (s->streams) {
        host_stream_next(s, out);
        return HD_OK;
    }
    join_round(s);
    if (s->round == s->n_rounds) return HD_OK;
    if (!u->whole) fetch_round(s, u);
    s->round++;
    *out = (hd_expert_wave){.n = u->n_experts,
                            .n_places = s->layer.n_places,
                            .offset = u->whole ? s->layer.offset : s->own.round_offset,
                            .gate = &u->tables[0],
                            .up = &u->tables[1],
                            .down = &u->tables[2]};
    return HD_OK;
}

/* A count that operators write meanwhile. */
static int64_t read_count(const int64_t *count) {
    return __atomic_load_n(count, __ATOMIC_RELAXED);
}

static hd_expert_stage_stats read_stats(const hd_expert_stage *base) {
    const expert_host *s = (const expert_host *)base;
    const size_t n_whole = (size_t)s->whole_experts;
    return (hd_expert_stage_stats){.source = "host",
                                   .n_slots = s->n_slots,
                                   .n_experts = s->held_experts,
                                   .bytes = ((size_t)s->n_slots + n_whole) * s->slot_bytes,
                                   .expert_bytes = s->slot_bytes,
                                   .elsewhere_bytes = s->elsewhere_bytes,
                                   .used = read_count(&s->seen->used),
                                   .staged = read_count(&s->seen->staged),
                                   .fetched = read_count(&s->seen->fetched),
                                   .fetched_bytes = read_count(&s->seen->fetched_bytes),
                                   .sent = read_count(&s->seen->sent),
                                   .sent_rows = read_count(&s->seen->sent_rows),
                                   .predicted_ns = read_count(&s->seen->predicted_ns),
                                   .taken_ns = read_count(&s->seen->taken_ns)};
}

static void close_host(hd_expert_stage *base) {
    expert_host *s = host_of(base);
    hd_stream_wait(s->o.stream);
    host_stream_close(s);
    hd_device_release(s->o.device, s->block);
    hd_device_release(s->o.device, s->seen);
    free(s->units);
    free(s->unit_of);
    free(s);
}

static const model_stage_table table = {
    .close = close_host, .begin = begin, .next = next, .read_stats = read_stats};

static hd_status open_parts(expert_host *s, hd_err *err) {
    s->unit_of = calloc((size_t)s->n_layers + 1, sizeof *s->unit_of);
    s->units = calloc((size_t)s->n_layers + 1, sizeof *s->units);
    if (!s->unit_of || !s->units) {
        return HD_FAIL(err, HD_ENOMEM, "no memory to fetch experts of %d layers", s->n_layers);
    }
    HD_TRY(look_at_layers(s, err));
    HD_TRY(divide_memory(s, err));
    HD_TRY(take_memory(s, err));
    HD_TRY(host_stream_open(s, err));
    return fill(s, err);
}

int32_t hd_expert_host_layers(const hd_model_spec *spec, const hd_weights *whole,
                              size_t bytes) {
    const int32_t n_layers = spec->n_layers + spec->n_mtp;
    for (int32_t l = 0; l < n_layers; l++) {
        const bool some = hd_weights_expert_map(whole, l) && lies_at(whole, l, 0, 0);
        hd_expert_layout unused;
        size_t all = 0;
        for (int32_t e = 0; some && e < hd_layer_route(spec, l).n_experts; e++) {
            all += arrange(whole, l, e, &unused);
        }
        if (all > bytes) return l;
        bytes -= all;
    }
    return n_layers;
}

hd_status hd_expert_host_open(hd_expert_stage **out, const hd_model_spec *spec,
                              const hd_weights *w, const hd_expert_host_options *o,
                              hd_err *err) {
    expert_host *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s) return HD_FAIL(err, HD_ENOMEM, "no memory to fetch experts");
    s->base = (hd_expert_stage){.table = &table, .queued = true};
    s->spec = spec;
    s->w = w;
    s->o = *o;
    s->n_experts = spec->route.n_experts;
    s->n_main = spec->n_layers;
    s->n_layers = spec->n_layers + spec->n_mtp;
    if (o->host) s->rows = hd_host_experts_rows(o->host);
    const hd_status st = open_parts(s, err);
    if (st == HD_OK) {
        *out = &s->base;
    } else {
        close_host(&s->base);
    }
    return st;
}
