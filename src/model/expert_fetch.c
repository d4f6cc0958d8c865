/* expert_fetch.c - see expert_fetch.h. */
#include "model/expert_fetch.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/progress.h"
#include "model/batch.h"
#include "model/expert_stage_internal.h"
#include "model/fetch_source_internal.h"
#include "moe/residency.h"

enum {
    ROLES = MODEL_EXPERT_ROLES,
    ALIGN = 256, /* of arrays in a set, as kernels like them best */
    MAX_SETS = HD_MAX_FETCH_DEPTH + 1,
    NONE = -1
};

static const size_t SLICE_BYTES = 2 << 20;

/* Memory for the missing experts of one layer, with what guards it. */
typedef struct staging_set {
    uint8_t *memory; /* [set_experts, slot_bytes] */
    hd_device_event *fetched, *consumed;
    int32_t unit;    /* whose experts it holds, or will when `fetched` is reached */
    uint64_t *reads; /* [n_sources] the last one into it of each reader */
} staging_set;

/* Experts that stay on the device, in slots: of each layer those that are used most. */
typedef struct resident_pool {
    int32_t n_slots;   /* with the spare one */
    uint8_t *memory;   /* [n_slots, slot_bytes] */
    hd_weight *matrix; /* [n_slots, ROLES] */
    hd_residency *residency;
    int32_t spare; /* the slot that the next move fills; NONE: experts do not move */
    bool moves;
    hd_residency_swap swap;              /* of the move */
    hd_device_event *arrived, *released; /* the spare slot is filled; is read no more */
} resident_pool;

/* An MoE layer: a set holds those of its experts that are not resident. */
typedef struct fetch_unit {
    int32_t layer;
    int32_t n_missing;
    hd_fetch_order order;
    size_t bytes;
    hd_expert_table tables[ROLES];
} fetch_unit;

typedef struct fetch_counters {
    _Atomic int64_t used, staged, fetched, fetched_bytes, moved, wait_ns;
} fetch_counters;

typedef struct expert_fetch {
    hd_expert_stage base;
    const hd_model_spec *spec;
    const hd_weights *w;
    hd_expert_fetch_options o;
    fetch_sources sources;
    int32_t n_main, n_layers, n_experts; /* n_layers: with those of drafts, which come last */
    int32_t n_elsewhere;                 /* experts that these weights do not hold */
    size_t slot_bytes, elsewhere_bytes;
    int32_t *unit_of; /* [n_layers] NONE: dense, or absent */
    fetch_unit *units;
    int32_t n_units, n_main_units;
    staging_set sets[MAX_SETS];
    int32_t n_sets, set_experts;
    int32_t next_set; /* of selected experts */
    bool whole;       /* a set holds all that a layer misses */
    resident_pool pool;
    void *block;       /* device memory of sets, pool and tables */
    hd_weight *tables; /* [n_units, ROLES, n_experts] in host memory, as they are uploaded */
    hd_weight *there;  /* the same in device memory */
    hd_fetch_copy *copies; /* [n_experts * 2 * ROLES] of one unit */
    fetch_counters counters;
    int64_t fetch_ns; /* of what all main layers lack, by one of them; 0: not measured */
    int64_t *rows;    /* [n_layers, n_experts] that chose each */

    /* the layer */
    hd_expert_layer layer;
    bool selected; /* only the experts that rows chose are fetched */
    bool is_done;
    staging_set *in_use, *ahead; /* of the wave; of the next one of selected experts */
    int32_t end, ahead_end;      /* slots before it were computed; were fetched */
    int32_t *offset;             /* [n_experts + 1] of the wave */
    hd_weight *matrix[ROLES];    /* [n_experts] of waves of selected experts */
    hd_expert_table selected_tables[ROLES];
} expert_fetch;

static expert_fetch *fetch_of(hd_expert_stage *s) {
    return (expert_fetch *)s;
}

static void add(_Atomic int64_t *counter, int64_t n) {
    atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static int64_t read_counter(const _Atomic int64_t *counter) {
    return atomic_load_explicit(counter, memory_order_relaxed);
}

/* ---- experts ---- */

static hd_role role_of(int32_t role) {
    return (hd_role)((int32_t)HD_EXPERT_GATE + role);
}

static bool is_held(const expert_fetch *s, int32_t layer, int32_t expert) {
    return hd_weights_held_expert(s->w, layer, HD_EXPERT_GATE, expert) != NULL;
}

static hd_weight *pool_matrix(const expert_fetch *s, int32_t slot, int32_t role) {
    return &s->pool.matrix[slot * ROLES + role];
}

static const hd_weight *resident(const expert_fetch *s, int32_t layer, int32_t role,
                                 int32_t expert) {
    const hd_weight *held = hd_weights_held_expert(s->w, layer, role_of(role), expert);
    if (held) return held;
    const int32_t slot = hd_residency_slot(s->pool.residency, layer, expert);
    return slot == HD_NOT_RESIDENT ? NULL : pool_matrix(s, slot, role);
}

static bool is_missing(const expert_fetch *s, int32_t layer, int32_t expert) {
    return !resident(s, layer, 0, expert);
}

/* The arrays of an expert, where they lie and where they go. */
typedef struct expert_arrays {
    int32_t source, expert;
    hd_weight from[ROLES], to[ROLES];
    size_t data_bytes[ROLES], scale_bytes[ROLES];
    size_t bytes; /* of the slot */
} expert_arrays;

static const uint8_t *place(expert_arrays *a, const uint8_t *slot, size_t bytes) {
    const uint8_t *at = slot + a->bytes;
    a->bytes += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return at;
}

static expert_arrays arrays_of(const expert_fetch *s, int32_t layer, int32_t expert,
                               const uint8_t *slot) {
    expert_arrays a = {.source = fetch_source_of(&s->sources, layer, expert), .expert = expert};
    for (int32_t r = 0; r < ROLES; r++) {
        const hd_weight *m =
            hd_weights_held_expert(s->sources.all[a.source].has, layer, role_of(r), expert);
        const hd_stored_format f = hd_weight_format(m);
        a.from[r] = a.to[r] = *m;
        a.data_bytes[r] = hd_stored_data_bytes(&f, m->rows, m->cols);
        a.to[r].data = place(&a, slot, a.data_bytes[r]);
        if (!m->scale) continue;
        a.scale_bytes[r] = hd_stored_scale_bytes(&f, m->rows, m->cols);
        a.to[r].scale = place(&a, slot, a.scale_bytes[r]);
    }
    return a;
}

/* array: of the expert, as in hd_piece. */
static int32_t add_copy(hd_fetch_copy *copies, int32_t n, const expert_arrays *a, int32_t array,
                        const void *to, const void *from, size_t bytes) {
    if (bytes == 0) return n;
    /* a slot is read through const pointers, and written by copies alone */
    void *slot;
    memcpy(&slot, &to, sizeof slot);
    copies[n] = (hd_fetch_copy){.peer = a->source,
                                .what = fetch_name(a->expert, array),
                                .to = slot,
                                .from = from,
                                .bytes = bytes};
    return n + 1;
}

static int32_t add_copies(hd_fetch_copy *copies, int32_t n, const expert_arrays *a) {
    for (int32_t r = 0; r < ROLES; r++) {
        n = add_copy(copies, n, a, 2 * r, a->to[r].data, a->from[r].data, a->data_bytes[r]);
        n = add_copy(copies, n, a, 2 * r + 1, a->to[r].scale, a->from[r].scale,
                     a->scale_bytes[r]);
    }
    return n;
}

/* Of the slots that this rank computes; where it exchanges rows in some steps (ep without dwdp), of all. A
 * drafter's layers may have fewer than slots. */
static const int32_t *experts_of(const expert_fetch *s, int32_t layer, int32_t *n) {
    const hd_expert_map *map = hd_weights_expert_map(s->w, layer);
    const hd_shard *shard = hd_weights_shard(s->w);
    const bool own = shard->parallel.dwdp > 1;
    const int32_t first = own ? shard->expert0 : 0;
    const int32_t slots = !map ? 0 : own ? shard->n_experts : map->n_slots;
    const int32_t fewer = hd_layer_route(s->spec, layer).n_experts < s->n_experts
                              ? hd_layer_route(s->spec, layer).n_experts - first
                              : slots;
    *n = hd_max_i32(0, hd_min_i32(slots, fewer));
    return map ? map->expert + first : NULL;
}

/* ---- opening: what is elsewhere, and how memory is divided ---- */

static bool is_present(const expert_fetch *s, int32_t layer) {
    for (int32_t i = 0; i < s->sources.n; i++) {
        if (hd_weights_experts(s->sources.all[i].has, layer, HD_EXPERT_GATE)) return true;
    }
    return false;
}

static hd_status look_at_expert(expert_fetch *s, int32_t layer, int32_t expert, hd_err *err) {
    if (fetch_source_of(&s->sources, layer, expert) < 0) {
        return HD_FAIL(err, HD_EINVAL, "layer %d: no rank and no memory has expert %d", layer,
                       expert);
    }
    const expert_arrays a = arrays_of(s, layer, expert, NULL);
    if (a.bytes > s->slot_bytes) s->slot_bytes = a.bytes;
    for (int32_t r = 0; r < ROLES; r++) {
        s->elsewhere_bytes += a.data_bytes[r] + a.scale_bytes[r];
    }
    s->n_elsewhere++;
    return HD_OK;
}

static hd_status look_at_layers(expert_fetch *s, hd_err *err) {
    for (int32_t l = 0; l < s->n_layers; l++) {
        int32_t n;
        const int32_t *expert = experts_of(s, l, &n);
        s->unit_of[l] = NONE;
        if (n == 0 || !is_present(s, l)) continue;
        for (int32_t i = 0; i < n; i++) {
            if (!is_held(s, l, expert[i])) HD_TRY(look_at_expert(s, l, expert[i], err));
        }
        s->unit_of[l] = s->n_units++;
        if (l < s->n_main) s->n_main_units = s->n_units;
    }
    if (s->n_elsewhere) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "there is nothing to fetch: no expert is elsewhere");
}

static int32_t count_missing(const expert_fetch *s, int32_t layer) {
    int32_t n, missing = 0;
    const int32_t *expert = experts_of(s, layer, &n);
    for (int32_t i = 0; i < n; i++) missing += is_missing(s, layer, expert[i]);
    return missing;
}

static int32_t most_missing(const expert_fetch *s) {
    int32_t most = 0;
    for (int32_t l = 0; l < s->n_layers; l++) {
        if (s->unit_of[l] != NONE) most = hd_max_i32(most, count_missing(s, l));
    }
    return most;
}

/* Gives every layer the same number of resident experts, its first ones. */
static void choose_residents(expert_fetch *s, int32_t n_slots) {
    int32_t taken = 0, layers_left = s->n_units;
    for (int32_t l = 0; l < s->n_layers; l++) {
        int32_t n, own = 0;
        const int32_t *expert = experts_of(s, l, &n);
        if (s->unit_of[l] == NONE) continue;
        const int32_t part = (n_slots - taken) / layers_left--;
        for (int32_t i = 0; i < n && own < part; i++) {
            if (is_held(s, l, expert[i])) continue;
            hd_residency_set(s->pool.residency, l, expert[i], taken++);
            own++;
        }
    }
}

/* Sets take half of the slots at most, if they are for all that a layer misses not more. */
static hd_status divide_memory(expert_fetch *s, hd_err *err) {
    const int32_t most = most_missing(s), n_sets = s->n_sets;
    s->set_experts = most;
    s->whole = true;
    if (s->o.bytes == 0) return HD_OK;
    const size_t fit = s->o.bytes / s->slot_bytes;
    if (fit < (size_t)n_sets || (s->o.queued && fit < (size_t)n_sets * (size_t)most)) {
        return HD_FAIL(err, HD_EINVAL,
                       "%zu bytes for experts hold %zu of %zu bytes each: at least %d are "
                       "fetched at once here",
                       s->o.bytes, fit, s->slot_bytes, n_sets * (s->o.queued ? most : 1));
    }
    const size_t all = (size_t)s->n_elsewhere + (size_t)n_sets;
    const int32_t n = fit < all ? (int32_t)fit : (int32_t)all;
    if (!s->o.queued) s->set_experts = hd_max_i32(1, hd_min_i32(most, n / 2 / n_sets));
    if (fit >= all) s->set_experts = 1; /* all are resident */
    s->pool.n_slots = n - n_sets * s->set_experts;
    const bool spare = fit < all && s->pool.n_slots > 1;
    if (spare) s->pool.spare = s->pool.n_slots - 1;
    choose_residents(s, s->pool.n_slots - spare);
    s->whole = most_missing(s) <= s->set_experts;
    return HD_OK;
}

/* ---- opening: memory ---- */

static size_t set_bytes(const expert_fetch *s) {
    return (size_t)s->set_experts * s->slot_bytes;
}

static size_t pool_bytes(const expert_fetch *s) {
    return (size_t)s->pool.n_slots * s->slot_bytes;
}

static size_t table_bytes(const expert_fetch *s) {
    return (size_t)s->n_units * ROLES * (size_t)s->n_experts * sizeof(hd_weight);
}

static uint8_t *pool_slot(const expert_fetch *s, int32_t slot) {
    return s->pool.memory + (size_t)slot * s->slot_bytes;
}

static hd_status take_tables(expert_fetch *s, hd_err *err) {
    const size_t n = (size_t)s->n_experts;
    s->units = calloc((size_t)s->n_units + 1, sizeof *s->units);
    s->tables = calloc(1, table_bytes(s) + 1);
    s->copies = calloc(2 * ROLES * n, sizeof *s->copies);
    s->offset = calloc(n + 1, sizeof *s->offset);
    s->pool.matrix = calloc((size_t)s->pool.n_slots * ROLES + 1, sizeof *s->pool.matrix);
    bool all = s->units && s->tables && s->copies && s->offset && s->pool.matrix;
    for (int32_t r = 0; r < ROLES; r++) {
        s->matrix[r] = calloc(n, sizeof *s->matrix[r]);
        all = all && s->matrix[r];
    }
    if (all) return HD_OK;
    return HD_FAIL(err, HD_ENOMEM, "no memory for tables of %d experts", s->n_elsewhere);
}

static hd_status open_event(const expert_fetch *s, hd_device_event **out, hd_err *err) {
    return hd_device_event_open(out, s->o.device, false, err);
}

static hd_status take_memory(expert_fetch *s, hd_err *err) {
    const size_t sets = (size_t)s->n_sets * set_bytes(s);
    HD_TRY(hd_device_alloc(s->o.device, &s->block, sets + pool_bytes(s) + table_bytes(s),
                           "experts that are fetched", err));
    s->pool.memory = (uint8_t *)s->block + sets;
    s->there = (hd_weight *)(void *)(s->pool.memory + pool_bytes(s));
    HD_TRY(take_tables(s, err));
    for (int32_t i = 0; i < s->n_sets; i++) {
        staging_set *set = &s->sets[i];
        set->memory = (uint8_t *)s->block + (size_t)i * set_bytes(s);
        set->unit = NONE;
        set->reads = calloc((size_t)s->o.n_sources, sizeof *set->reads);
        if (!set->reads) return HD_FAIL(err, HD_ENOMEM, "no memory to fetch experts");
        HD_TRY(open_event(s, &set->fetched, err));
        HD_TRY(open_event(s, &set->consumed, err));
    }
    HD_TRY(open_event(s, &s->pool.arrived, err));
    return open_event(s, &s->pool.released, err);
}

/* Queues the copies of an expert into a slot of the pool. */
static void copy_to_pool(expert_fetch *s, int32_t layer, int32_t expert, int32_t slot) {
    const expert_arrays a = arrays_of(s, layer, expert, pool_slot(s, slot));
    const int32_t n = add_copies(s->copies, 0, &a);
    fetch_queue(&s->sources, s->o.copy_stream, layer, s->copies, n, NULL);
    for (int32_t r = 0; r < ROLES; r++) *pool_matrix(s, slot, r) = a.to[r];
}

static void fill_pool(expert_fetch *s) {
    for (int32_t l = 0; l < s->n_layers; l++) {
        for (int32_t e = 0; e < s->n_experts; e++) {
            const int32_t slot = hd_residency_slot(s->pool.residency, l, e);
            if (slot != HD_NOT_RESIDENT) copy_to_pool(s, l, e, slot);
        }
    }
    hd_stream_record_event(s->o.copy_stream, s->pool.arrived);
    hd_stream_wait_event(s->o.stream, s->pool.arrived);
}

static int64_t table_at(const expert_fetch *s, int32_t unit, int32_t role) {
    return ((int64_t)unit * ROLES + role) * s->n_experts;
}

static staging_set *set_of(expert_fetch *s, int32_t unit) {
    return &s->sets[unit % s->n_sets];
}

/* Makes the tables of a layer, and the list of its copies if a set holds them. */
static hd_status make_unit(expert_fetch *s, int32_t layer, hd_err *err) {
    const int32_t unit = s->unit_of[layer];
    fetch_unit *u = &s->units[unit];
    int32_t n, n_copies = 0;
    const int32_t *expert = experts_of(s, layer, &n);
    hd_fetch_order_close(&u->order);
    *u = (fetch_unit){.layer = layer};
    for (int32_t i = 0; i < n; i++) {
        const bool missing = is_missing(s, layer, expert[i]);
        expert_arrays a = {.source = NONE};
        if (missing && s->whole) {
            const size_t at = (size_t)u->n_missing * s->slot_bytes;
            a = arrays_of(s, layer, expert[i], set_of(s, unit)->memory + at);
            n_copies = add_copies(s->copies, n_copies, &a);
        }
        u->n_missing += missing;
        for (int32_t r = 0; r < ROLES; r++) {
            s->tables[table_at(s, unit, r) + i] =
                missing ? a.to[r] : *resident(s, layer, r, expert[i]);
        }
    }
    for (int32_t i = 0; i < n_copies; i++) u->bytes += s->copies[i].bytes;
    for (int32_t r = 0; r < ROLES; r++) {
        hd_expert_table_init(&u->tables[r], s->tables + table_at(s, unit, r), n);
        u->tables[r].slots = s->there + table_at(s, unit, r);
    }
    const size_t bytes = ROLES * (size_t)s->n_experts * sizeof *s->tables;
    hd_stream_upload(s->o.stream, s->there + table_at(s, unit, 0),
                     s->tables + table_at(s, unit, 0), bytes);
    return hd_fetch_order_open(&u->order, s->copies, n_copies, s->o.n_sources,
                               s->o.first_source, s->o.slice_bytes, err);
}

static hd_status make_units(expert_fetch *s, hd_err *err) {
    fill_pool(s);
    for (int32_t l = 0; l < s->n_layers; l++) {
        if (s->unit_of[l] != NONE) HD_TRY(make_unit(s, l, err));
    }
    return hd_stream_sync(s->o.stream, err);
}

/* ---- whole layers ---- */

/* A set is overwritten: by copies when it was consumed, and not while it is still read into for a layer
 * that then had no use for it. */
static void begin_fetch(expert_fetch *s, staging_set *set) {
    hd_stream_wait_event(s->o.copy_stream, set->consumed);
    fetch_await(&s->sources, set->reads);
}

/* Queues the copies of a unit, unless its set has them already. */
static void fetch_unit_now(expert_fetch *s, int32_t unit) {
    const fetch_unit *u = &s->units[unit];
    staging_set *set = set_of(s, unit);
    if (set->unit == unit) return;
    begin_fetch(s, set);
    fetch_queue(&s->sources, s->o.copy_stream, u->layer, u->order.slices, u->order.n,
                set->reads);
    hd_stream_record_event(s->o.copy_stream, set->fetched);
    set->unit = unit;
    add(&s->counters.fetched, u->n_missing);
    add(&s->counters.fetched_bytes, (int64_t)u->bytes);
}

/* Units run in the order of layers, and then those of the next step. */
static int32_t next_unit(const expert_fetch *s, int32_t unit) {
    return unit + 1 == s->n_main_units || unit + 1 == s->n_units ? 0 : unit + 1;
}

/* Queues the copies of the next units, each into another set than those before it. */
static void fetch_ahead(expert_fetch *s, int32_t unit) {
    const staging_set *taken[MAX_SETS];
    int32_t n = 0;
    taken[n++] = set_of(s, unit);
    while (n <= s->o.depth) {
        unit = next_unit(s, unit);
        for (int32_t i = 0; i < n; i++) {
            if (taken[i] == set_of(s, unit)) return;
        }
        fetch_unit_now(s, unit);
        taken[n++] = set_of(s, unit);
    }
}

static void use_set(expert_fetch *s, staging_set *set) {
    hd_stream_wait_event(s->layer.stream, set->fetched);
    fetch_await(&s->sources, set->reads);
    s->in_use = set;
}

static void end_use(expert_fetch *s) {
    if (s->in_use) hd_stream_record_event(s->layer.stream, s->in_use->consumed);
    s->in_use = NULL;
}

/* The places of a wave; the host reads the offsets of it, if it can. */
static void place_wave(expert_fetch *s, hd_expert_wave *out, int32_t first, int32_t n) {
    const int32_t *all = s->layer.offset;
    out->n = n;
    if (s->o.queued) {
        out->offset = all;
        out->n_places = s->layer.n_places;
        return;
    }
    for (int32_t i = 0; i <= n; i++) s->offset[i] = all[first + i] - all[first];
    out->first_place = all[first];
    out->offset = s->offset;
    out->n_places = s->offset[n];
}

static bool has_rows(const expert_fetch *s, int32_t slot) {
    return s->o.queued || s->layer.offset[slot + 1] > s->layer.offset[slot];
}

/* Counts the experts that rows need and these weights do not hold. there: those that are not resident
 * are on their way. */
static void count_used(expert_fetch *s, bool there) {
    int32_t n;
    const int32_t layer = s->layer.layer, *expert = experts_of(s, layer, &n);
    for (int32_t i = 0; i < n; i++) {
        if (!has_rows(s, i) || is_held(s, layer, expert[i])) continue;
        add(&s->counters.used, 1);
        add(&s->counters.staged, there || !is_missing(s, layer, expert[i]));
    }
}

static void next_whole(expert_fetch *s, hd_expert_wave *out) {
    const int32_t unit = s->unit_of[s->layer.layer];
    const fetch_unit *u = &s->units[unit];
    if (s->is_done) return;
    s->is_done = true;
    count_used(s, set_of(s, unit)->unit == unit);
    fetch_unit_now(s, unit);
    use_set(s, set_of(s, unit));
    fetch_ahead(s, unit);
    place_wave(s, out, 0, u->tables[0].n);
    out->gate = &u->tables[0];
    out->up = &u->tables[1];
    out->down = &u->tables[2];
}

/* ---- selected experts ---- */

/* Queues the copies of the next selected experts, as many as a set holds. */
static void fetch_selected(expert_fetch *s) {
    int32_t n, i = s->ahead_end, taken = 0;
    const int32_t layer = s->layer.layer, *expert = experts_of(s, layer, &n);
    staging_set *set = &s->sets[s->next_set];
    s->ahead = NULL;
    if (i == n) return;
    s->next_set = (s->next_set + 1) % s->n_sets;
    s->ahead = set;
    set->unit = NONE;
    begin_fetch(s, set);
    for (; i < n; i++) {
        for (int32_t r = 0; r < ROLES; r++) s->matrix[r][i] = (hd_weight){.data = NULL};
        if (!has_rows(s, i)) continue;
        if (!is_missing(s, layer, expert[i])) {
            for (int32_t r = 0; r < ROLES; r++) {
                s->matrix[r][i] = *resident(s, layer, r, expert[i]);
            }
            continue;
        }
        if (taken == s->set_experts) break;
        const expert_arrays a =
            arrays_of(s, layer, expert[i], set->memory + (size_t)taken++ * s->slot_bytes);
        const int32_t n_copies = add_copies(s->copies, 0, &a);
        fetch_queue(&s->sources, s->o.copy_stream, layer, s->copies, n_copies, set->reads);
        for (int32_t k = 0; k < n_copies; k++) {
            add(&s->counters.fetched_bytes, (int64_t)s->copies[k].bytes);
        }
        for (int32_t r = 0; r < ROLES; r++) s->matrix[r][i] = a.to[r];
    }
    hd_stream_record_event(s->o.copy_stream, set->fetched);
    add(&s->counters.fetched, taken);
    if (s->layer.offset[i] == s->layer.offset[s->ahead_end]) s->ahead = NULL; /* no rows left */
    s->ahead_end = i;
}

static void next_selected(expert_fetch *s, hd_expert_wave *out) {
    const int32_t first = s->end;
    if (!s->ahead) return;
    const int32_t n = s->ahead_end - first;
    for (int32_t r = 0; r < ROLES; r++) {
        hd_expert_table_init(&s->selected_tables[r], s->matrix[r] + first, n);
    }
    out->gate = &s->selected_tables[0];
    out->up = &s->selected_tables[1];
    out->down = &s->selected_tables[2];
    use_set(s, s->ahead);
    place_wave(s, out, first, n);
    s->end = s->ahead_end;
    fetch_selected(s);
}

/* ---- the stage ---- */

static void begin(hd_expert_stage *base, const hd_expert_layer *layer) {
    expert_fetch *s = fetch_of(base);
    const fetch_unit *u = &s->units[s->unit_of[layer->layer]];
    end_use(s);
    s->layer = *layer;
    s->is_done = false;
    s->end = s->ahead_end = 0;
    s->selected = !s->whole || (!s->o.queued && layer->n_places < u->n_missing);
    if (!s->selected) return;
    count_used(s, false);
    fetch_selected(s);
}

/* Where streams have no queues, copies are done when they are queued: in time of the step. */
static hd_status next(hd_expert_stage *base, hd_expert_wave *out, hd_err *err) {
    expert_fetch *s = fetch_of(base);
    const int64_t began = hd_now_ns();
    (void)err;
    *out = (hd_expert_wave){0};
    end_use(s);
    if (s->selected) {
        next_selected(s, out);
    } else {
        next_whole(s, out);
    }
    if (hd_device_is_host(s->o.device)) add(&s->counters.wait_ns, hd_now_ns() - began);
    return HD_OK;
}

static hd_expert_stage_stats read_stats(const hd_expert_stage *base) {
    const expert_fetch *s = (const expert_fetch *)base;
    const fetch_counters *c = &s->counters;
    return (hd_expert_stage_stats){.source = s->sources.all[0].name,
                                   .n_slots = s->n_sets * s->set_experts + s->pool.n_slots,
                                   .n_experts = s->n_elsewhere,
                                   .bytes = (size_t)s->n_sets * set_bytes(s) + pool_bytes(s),
                                   .expert_bytes = s->slot_bytes,
                                   .elsewhere_bytes = s->elsewhere_bytes,
                                   .used = read_counter(&c->used),
                                   .staged = read_counter(&c->staged),
                                   .fetched = read_counter(&c->fetched),
                                   .fetched_bytes = read_counter(&c->fetched_bytes),
                                   .moved = read_counter(&c->moved),
                                   .fetch_ns = s->fetch_ns,
                                   .wait_ns = read_counter(&c->wait_ns)};
}

/* ---- which experts are resident ---- */

static void follow(hd_expert_stage *base, const int64_t *rows) {
    expert_fetch *s = fetch_of(base);
    const int64_t n_main = (int64_t)s->n_main * s->n_experts;
    const int64_t n_drafts = (int64_t)(s->n_layers - s->n_main) * s->n_experts;
    memcpy(s->rows + n_main, rows + HD_N_ROW_PHASES * n_main, (size_t)n_drafts * sizeof *rows);
    for (int64_t i = 0; i < n_main; i++) {
        s->rows[i] = 0;
        for (int32_t p = 0; p < HD_N_ROW_PHASES; p++) s->rows[i] += rows[p * n_main + i];
    }
    hd_residency_look(s->pool.residency, s->rows);
}

/* What was copied to the spare slot takes part in the next step; the slot of the other is spare
 * then. */
static void end_move(expert_fetch *s) {
    resident_pool *p = &s->pool;
    const int32_t unit = s->unit_of[p->swap.layer];
    const int32_t freed = hd_residency_slot(p->residency, p->swap.layer, p->swap.out);
    hd_err err = {0};
    hd_stream_wait_event(s->o.stream, p->arrived);
    hd_stream_record_event(s->o.stream, p->released);
    hd_residency_set(p->residency, p->swap.layer, p->swap.in, p->spare);
    hd_residency_set(p->residency, p->swap.layer, p->swap.out, HD_NOT_RESIDENT);
    p->spare = freed;
    p->moves = false;
    add(&s->counters.moved, 1);
    if (make_unit(s, p->swap.layer, &err) != HD_OK) {
        hd_stream_fail(s->o.stream, err.status, err.msg);
    }
    if (set_of(s, unit)->unit == unit)
        set_of(s, unit)->unit = NONE; /* others are missing now */
}

/* One move at a time. Neither the host nor the operators wait for its copies: they end behind a
 * step. */
static void move(hd_expert_stage *base) {
    expert_fetch *s = fetch_of(base);
    resident_pool *p = &s->pool;
    end_use(s);
    if (p->moves) end_move(s);
    if (p->spare == NONE || !hd_residency_next(p->residency, &p->swap)) return;
    hd_stream_wait_event(s->o.copy_stream, p->released);
    copy_to_pool(s, p->swap.layer, p->swap.in, p->spare);
    hd_stream_record_event(s->o.copy_stream, p->arrived);
    p->moves = true;
}

static void close_fetch(hd_expert_stage *base) {
    expert_fetch *s = fetch_of(base);
    hd_stream_wait(s->o.copy_stream);
    for (int32_t i = 0; i < s->n_sets; i++) {
        if (s->sets[i].reads) fetch_await(&s->sources, s->sets[i].reads);
        free(s->sets[i].reads);
        hd_device_event_close(s->sets[i].fetched);
        hd_device_event_close(s->sets[i].consumed);
    }
    for (int32_t u = 0; s->units && u < s->n_units; u++) {
        hd_fetch_order_close(&s->units[u].order);
    }
    for (int32_t r = 0; r < ROLES; r++) free(s->matrix[r]);
    hd_device_event_close(s->pool.arrived);
    hd_device_event_close(s->pool.released);
    hd_device_release(s->o.device, s->block);
    hd_residency_close(s->pool.residency);
    free(s->pool.matrix);
    free(s->rows);
    free(s->offset);
    free(s->copies);
    free(s->tables);
    free(s->units);
    free(s->unit_of);
    fetch_sources_close(&s->sources);
    free(s);
}

static const model_stage_table table = {.close = close_fetch,
                                        .begin = begin,
                                        .next = next,
                                        .follow = follow,
                                        .move = move,
                                        .read_stats = read_stats};

static void time_fetch(expert_fetch *s) {
    size_t all = 0;
    const int64_t began = hd_now_ns();
    fetch_unit_now(s, 0);
    hd_stream_wait(s->o.copy_stream);
    const double ns = (double)(hd_now_ns() - began);
    for (int32_t u = 0; u < s->n_main_units; u++) all += s->units[u].bytes;
    s->fetch_ns = (int64_t)(ns * (double)all / (double)(s->units[0].bytes + 1)) + 1;
}

static hd_status open_parts(expert_fetch *s, hd_err *err) {
    const size_t n = (size_t)s->n_layers * (size_t)s->n_experts;
    s->unit_of = calloc((size_t)s->n_layers + 1, sizeof *s->unit_of);
    s->rows = calloc(n + 1, sizeof *s->rows);
    if (!s->unit_of || !s->rows) {
        return HD_FAIL(err, HD_ENOMEM, "no memory to fetch experts");
    }
    HD_TRY(fetch_sources_open(&s->sources, s->o.sources, s->o.n_sources, err));
    HD_TRY(hd_residency_open(&s->pool.residency, s->n_layers, s->n_experts, err));
    HD_TRY(look_at_layers(s, err));
    HD_TRY(divide_memory(s, err));
    if (s->o.copy_stream != s->o.stream) hd_stream_report_to(s->o.copy_stream, s->o.stream);
    HD_TRY(take_memory(s, err));
    HD_TRY(make_units(s, err));
    if (s->o.timed) time_fetch(s);
    return HD_OK;
}

hd_status hd_expert_fetch_open(hd_expert_stage **out, const hd_model_spec *spec,
                               const hd_weights *w, const hd_expert_fetch_options *o,
                               hd_err *err) {
    assert(o->n_sources > 0 && o->depth >= 1 && o->depth <= HD_MAX_FETCH_DEPTH);
    expert_fetch *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s) return HD_FAIL(err, HD_ENOMEM, "no memory to fetch experts");
    s->base = (hd_expert_stage){.table = &table, .queued = o->queued};
    s->w = w;
    s->o = *o;
    if (s->o.slice_bytes == 0) s->o.slice_bytes = SLICE_BYTES;
    s->spec = spec;
    s->n_main = spec->n_layers;
    s->n_experts = spec->route.n_experts;
    s->n_layers = spec->n_layers + spec->n_mtp;
    s->n_sets = o->depth + 1;
    s->pool.spare = NONE;
    const hd_status st = open_parts(s, err);
    if (st == HD_OK) {
        *out = &s->base;
    } else {
        close_fetch(&s->base);
    }
    return st;
}
