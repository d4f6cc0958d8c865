/* expert_disk.c - see expert_disk.h. */
#include "model/expert_disk.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/progress.h"
#include "model/expert_stage_internal.h"
#include "moe/expert_files.h"
#include "moe/read_ahead.h"
#include "weights/safetensors.h"

enum { ROLES = MODEL_EXPERT_ROLES, DEFAULT_FETCHERS = 8 };

_Static_assert((int)HD_EXPERT_PIECES == 2 * (int)ROLES, "data and scales of each");

/* Where the matrices of one expert lie. */
typedef struct staged_expert {
    int32_t decl[ROLES]; /* of the schema; -1: the model lacks it */
    hd_expert_piece pieces[HD_EXPERT_PIECES];
} staged_expert;

typedef struct expert_disk {
    hd_expert_stage base;
    const hd_weights *w;
    hd_expert_files *files;
    hd_expert_cache *cache;
    staged_expert *experts; /* [layers, experts], which keys number */
    int32_t n_keys, n_experts, n_present, n_slots;
    size_t slot_bytes, stored_bytes; /* of one slot; of all experts in the files */

    /* the layer */
    int32_t layer;
    const int32_t *all_offsets;
    int32_t *slots, *keys; /* [n_used] slots with rows, and the keys of their experts */
    int32_t n_used, n_pinned, n_ready, n_done;
    int32_t *offset;          /* of the wave */
    hd_weight *matrix[ROLES]; /* [slots] without data, if not of the wave */
    hd_expert_table tables[ROLES];

    /* the layer after it */
    int32_t ahead;      /* of the options */
    int32_t *rows;      /* [n_experts] that chose each in the prediction */
    int32_t *expected;  /* [n_expected] keys, those that most rows chose first */
    int32_t *predicted; /* [n_predicted] of them those that were elsewhere */
    int32_t n_expected, n_predicted;
    int64_t ready_at; /* when the layer had its experts */
    hd_read_ahead learned;
    _Atomic int64_t n_all_predicted, n_right;
} expert_disk;

static expert_disk *disk_of(hd_expert_stage *s) {
    return (expert_disk *)s;
}

/* ---- where experts lie ---- */

/* An array of bytes in a tensor of the checkpoint. */
static hd_expert_piece piece_of(const hd_weights *w, const hd_tensor *t, const void *data,
                                size_t bytes) {
    const hd_checkpoint *c = hd_weights_checkpoint(w);
    return (hd_expert_piece){
        .file = t->shard, .at = hd_checkpoint_offset(c, t->shard, data), .bytes = bytes};
}

static void find_pieces(const hd_weights *w, staged_expert *e) {
    for (int32_t r = 0; r < ROLES; r++) {
        const hd_weight *m = hd_weights_stored(w, e->decl[r]);
        const hd_stored_format f = hd_weight_format(m);
        const hd_tensor *scale = hd_weights_scale_tensor(w, e->decl[r]);
        e->pieces[2 * r] = piece_of(w, hd_weights_tensor(w, e->decl[r]), m->data,
                                    hd_stored_data_bytes(&f, m->rows, m->cols));
        if (!scale) continue;
        e->pieces[2 * r + 1] =
            piece_of(w, scale, m->scale, hd_stored_scale_bytes(&f, m->rows, m->cols));
    }
}

static bool is_present(const expert_disk *s, const staged_expert *e) {
    for (int32_t r = 0; r < ROLES; r++) {
        if (e->decl[r] < 0 || !hd_weights_stored(s->w, e->decl[r])) return false;
    }
    return true;
}

static hd_status find_experts(expert_disk *s, hd_err *err) {
    const hd_schema *schema = hd_weights_schema(s->w);
    s->experts = calloc((size_t)s->n_keys + 1, sizeof *s->experts);
    if (!s->experts) return HD_FAIL(err, HD_ENOMEM, "no memory for %d experts", s->n_keys);
    for (int32_t i = 0; i < s->n_keys; i++) {
        for (int32_t r = 0; r < ROLES; r++) s->experts[i].decl[r] = -1;
    }
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        if (d->expert < 0) continue;
        s->experts[d->layer * s->n_experts + d->expert].decl[d->role - HD_EXPERT_GATE] = i;
    }
    for (int32_t i = 0; i < s->n_keys; i++) {
        if (!is_present(s, &s->experts[i])) continue;
        find_pieces(s->w, &s->experts[i]);
        const size_t bytes = hd_expert_files_plan(s->experts[i].pieces, HD_EXPERT_PIECES);
        if (bytes > s->slot_bytes) s->slot_bytes = bytes;
        for (int32_t k = 0; k < HD_EXPERT_PIECES; k++) {
            s->stored_bytes += s->experts[i].pieces[k].bytes;
        }
        s->n_present++;
    }
    if (s->n_present) return HD_OK;
    return HD_FAIL(err, HD_EINVAL, "the model has no routed experts");
}

/* ---- the source ---- */

static hd_weight matrix_in(const expert_disk *s, const staged_expert *e, int32_t role,
                           const uint8_t *slot) {
    hd_weight w = *hd_weights_stored(s->w, e->decl[role]);
    w.data = slot + e->pieces[2 * role].to;
    if (w.scale) w.scale = slot + e->pieces[2 * role + 1].to;
    return w;
}

/* A source: the files. Scales that opening did not read are checked here. */
static hd_status fetch_from_files(void *ctx, int32_t key, uint8_t *slot, hd_err *err) {
    const expert_disk *s = ctx;
    const staged_expert *e = &s->experts[key];
    HD_TRY(hd_expert_files_read(s->files, e->pieces, HD_EXPERT_PIECES, slot, err));
    for (int32_t r = 0; r < ROLES; r++) {
        const hd_weight m = matrix_in(s, e, r, slot);
        HD_TRY(hd_weights_check_copied_scales(s->w, e->decl[r], m.scale, err));
    }
    return HD_OK;
}

static hd_status open_files(expert_disk *s, const hd_expert_disk_options *o, hd_err *err) {
    const hd_checkpoint *c = hd_weights_checkpoint(s->w);
    const int32_t n = hd_checkpoint_shards(c);
    const char **paths = calloc((size_t)n + 1, sizeof *paths);
    size_t *bytes = calloc((size_t)n + 1, sizeof *bytes);
    for (int32_t i = 0; paths && bytes && i < n; i++) {
        paths[i] = hd_checkpoint_shard_path(c, i);
        bytes[i] = hd_checkpoint_shard_bytes(c, i);
    }
    const hd_status st =
        paths && bytes
            ? hd_expert_files_open(&s->files, paths, bytes, n, !o->through_cache, err)
            : HD_FAIL(err, HD_ENOMEM, "no memory for the names of %d files", n);
    free(paths);
    free(bytes);
    return st;
}

/* ---- opening ---- */

static hd_status open_cache(expert_disk *s, const hd_expert_disk_options *o, hd_err *err) {
    const size_t fit = o->bytes / s->slot_bytes;
    if (fit == 0) {
        return HD_FAIL(err, HD_EINVAL,
                       "%zu bytes for staged experts hold none: one expert of this model takes "
                       "%zu bytes",
                       o->bytes, s->slot_bytes);
    }
    s->n_slots = fit < (size_t)s->n_present ? (int32_t)fit : s->n_present;
    hd_expert_source source = {.name = "file", .ctx = s, .fetch = fetch_from_files};
    if (o->wrap) source = o->wrap(o->wrap_ctx, source);
    return hd_expert_cache_open(
        &s->cache,
        &(hd_expert_cache_options){.source = source,
                                   .n_keys = s->n_keys,
                                   .n_slots = s->n_slots,
                                   .slot_bytes = s->slot_bytes,
                                   .n_fetchers =
                                       o->n_fetchers ? o->n_fetchers : DEFAULT_FETCHERS},
        err);
}

static hd_status open_layer(expert_disk *s, hd_err *err) {
    const size_t n = (size_t)s->n_experts;
    s->slots = calloc(n, sizeof *s->slots);
    s->keys = calloc(n, sizeof *s->keys);
    s->offset = calloc(n + 1, sizeof *s->offset);
    s->rows = calloc(n, sizeof *s->rows);
    s->expected = calloc(n, sizeof *s->expected);
    s->predicted = calloc(n, sizeof *s->predicted);
    bool all = s->slots && s->keys && s->offset && s->rows && s->expected && s->predicted;
    for (int32_t r = 0; r < ROLES; r++) {
        s->matrix[r] = calloc(n, sizeof *s->matrix[r]);
        all = all && s->matrix[r];
    }
    return all ? HD_OK : HD_FAIL(err, HD_ENOMEM, "no memory for tables of %zu experts", n);
}

static void close_disk(hd_expert_stage *base) {
    expert_disk *s = disk_of(base);
    hd_expert_cache_close(s->cache);
    hd_expert_files_close(s->files);
    for (int32_t r = 0; r < ROLES; r++) free(s->matrix[r]);
    free(s->predicted);
    free(s->expected);
    free(s->rows);
    free(s->offset);
    free(s->keys);
    free(s->slots);
    free(s->experts);
    free(s);
}

/* ---- the next layer ---- */

static bool predicts(const hd_expert_stage *base) {
    const expert_disk *s = (const expert_disk *)base;
    const bool all = s->n_slots == s->n_present && hd_expert_cache_is_full(s->cache);
    return s->ahead >= 0 && !all;
}

/* Compares what was predicted for this layer with what rows chose. */
static void learn(expert_disk *s) {
    int32_t right = 0;
    if (s->n_predicted == 0) return;
    for (int32_t i = 0; i < s->n_predicted; i++) {
        for (int32_t k = 0; k < s->n_used; k++) right += s->keys[k] == s->predicted[i];
    }
    hd_read_ahead_learn(&s->learned, s->n_predicted, right, hd_now_ns() - s->ready_at);
    s->n_all_predicted += s->n_predicted;
    s->n_right += right;
    s->n_predicted = 0;
}

/* Lists the keys that are predicted, by falling rows. */
static void list_expected(expert_disk *s, const hd_expert_layer *layer) {
    memset(s->rows, 0, (size_t)s->n_experts * sizeof *s->rows);
    s->n_expected = 0;
    for (int32_t i = 0; i < layer->n_next; i++) s->rows[layer->next_choices[i]]++;
    for (int32_t e = 0; e < s->n_experts; e++) {
        const int32_t first = layer->next * s->n_experts;
        int32_t at = s->n_expected;
        if (s->rows[e] == 0) continue;
        for (; at > 0 && s->rows[s->expected[at - 1] - first] < s->rows[e]; at--) {
            s->expected[at] = s->expected[at - 1];
        }
        s->expected[at] = first + e;
        s->n_expected++;
    }
}

/* Experts of this layer that had no room yet go first. */
static int32_t most_ahead(const expert_disk *s) {
    const hd_expert_cache_stats c = hd_expert_cache_read_stats(s->cache);
    if (s->n_pinned < s->n_used) return 0;
    if (s->ahead) return s->ahead;
    return c.fetched ? hd_read_ahead_most(&s->learned, (double)c.busy_ns / (double)c.fetched)
                     : 0;
}

static void look_ahead(expert_disk *s, const hd_expert_layer *layer) {
    s->n_expected = 0;
    if (layer->next_choices) list_expected(s, layer);
    memcpy(s->predicted, s->expected, (size_t)s->n_expected * sizeof *s->predicted);
    s->n_predicted = hd_expert_cache_elsewhere(s->cache, s->predicted, s->n_expected);
    hd_expert_cache_expect(s->cache, s->expected, s->n_expected, most_ahead(s));
    s->ready_at = hd_now_ns();
}

/* ---- waves ---- */

/* Ends the experts before `end` among those with rows: operators cannot read them any more. */
static void end_experts(expert_disk *s, int32_t end) {
    for (int32_t i = s->n_done; i < s->n_ready; i++) {
        for (int32_t r = 0; r < ROLES; r++) {
            s->matrix[r][s->slots[i]] = (hd_weight){.data = NULL};
        }
    }
    hd_expert_cache_unpin(s->cache, s->keys + s->n_done, end - s->n_done);
    s->n_done = end;
}

static void pin_more(expert_disk *s) {
    s->n_pinned +=
        hd_expert_cache_pin(s->cache, s->keys + s->n_pinned, s->n_used - s->n_pinned);
}

static void begin(hd_expert_stage *base, const hd_expert_layer *layer) {
    expert_disk *s = disk_of(base);
    const hd_expert_map *map = hd_weights_expert_map(s->w, layer->layer);
    const int32_t *offset = layer->offset;
    end_experts(s, s->n_pinned);
    if (s->n_predicted && s->predicted[0] / s->n_experts != layer->layer) s->n_predicted = 0;
    s->layer = layer->layer;
    s->all_offsets = offset;
    s->n_used = s->n_pinned = s->n_ready = s->n_done = 0;
    for (int32_t i = 0; i < map->n_slots; i++) {
        if (offset[i + 1] == offset[i]) continue;
        s->slots[s->n_used] = i;
        s->keys[s->n_used++] = s->layer * s->n_experts + map->expert[i];
    }
    learn(s);
    pin_more(s);
    look_ahead(s, layer);
}

/* Waits for the next expert, and shows its matrices to operators. */
static hd_status show_next(expert_disk *s, hd_err *err) {
    const int32_t key = s->keys[s->n_ready];
    const uint8_t *slot = NULL;
    if (!hd_expert_cache_is_ready(s->cache, key)) {
        HD_TRY(hd_expert_cache_wait(s->cache, key, &slot, err));
        s->ready_at = hd_now_ns();
    }
    HD_TRY(hd_expert_cache_wait(s->cache, key, &slot, err));
    for (int32_t r = 0; r < ROLES; r++) {
        s->matrix[r][s->slots[s->n_ready]] = matrix_in(s, &s->experts[key], r, slot);
    }
    s->n_ready++;
    return HD_OK;
}

static hd_status show_arrived(expert_disk *s, hd_err *err) {
    HD_TRY(show_next(s, err));
    while (s->n_ready < s->n_pinned &&
           hd_expert_cache_is_ready(s->cache, s->keys[s->n_ready])) {
        HD_TRY(show_next(s, err));
    }
    return HD_OK;
}

static const hd_expert_table *table_of(expert_disk *s, hd_role role, int32_t first, int32_t n) {
    hd_expert_table *t = &s->tables[role - HD_EXPERT_GATE];
    *t = *hd_weights_experts(s->w, s->layer, role);
    t->slots = s->matrix[role - HD_EXPERT_GATE] + first;
    t->n = n;
    return t;
}

static hd_expert_wave wave_of(expert_disk *s) {
    const int32_t first = s->slots[s->n_done], n = s->slots[s->n_ready - 1] + 1 - first;
    const int32_t *all = s->all_offsets + first;
    for (int32_t i = 0; i <= n; i++) s->offset[i] = all[i] - all[0];
    return (hd_expert_wave){.n = n,
                            .first_place = all[0],
                            .n_places = s->offset[n],
                            .offset = s->offset,
                            .gate = table_of(s, HD_EXPERT_GATE, first, n),
                            .up = table_of(s, HD_EXPERT_UP, first, n),
                            .down = table_of(s, HD_EXPERT_DOWN, first, n)};
}

static hd_status next(hd_expert_stage *base, hd_expert_wave *out, hd_err *err) {
    expert_disk *s = disk_of(base);
    *out = (hd_expert_wave){0};
    end_experts(s, s->n_ready);
    if (s->n_done == s->n_used) return HD_OK;
    pin_more(s);
    const hd_status st = show_arrived(s, err);
    if (st == HD_OK) {
        *out = wave_of(s);
        return HD_OK;
    }
    end_experts(s, s->n_pinned);
    s->n_used = s->n_pinned = s->n_ready = s->n_done = 0;
    return st;
}

static hd_expert_stage_stats read_stats(const hd_expert_stage *base) {
    const expert_disk *s = (const expert_disk *)base;
    const hd_expert_cache_stats c = hd_expert_cache_read_stats(s->cache);
    return (hd_expert_stage_stats){.source = "file",
                                   .n_slots = s->n_slots,
                                   .n_experts = s->n_present,
                                   .bytes = (size_t)s->n_slots * s->slot_bytes,
                                   .expert_bytes = s->slot_bytes,
                                   .elsewhere_bytes = s->stored_bytes,
                                   .used = c.used,
                                   .staged = c.staged,
                                   .fetched = c.fetched,
                                   .fetched_bytes = c.fetched * (int64_t)s->slot_bytes,
                                   .predicted = s->n_all_predicted,
                                   .right = s->n_right,
                                   .ahead = c.ahead,
                                   .failed = c.failed,
                                   .wait_ns = c.wait_ns,
                                   .files = hd_checkpoint_shards(hd_weights_checkpoint(s->w)),
                                   .direct = hd_expert_files_direct(s->files)};
}

static const model_stage_table table = {.close = close_disk,
                                        .begin = begin,
                                        .next = next,
                                        .predicts = predicts,
                                        .read_stats = read_stats};

hd_status hd_expert_disk_open(hd_expert_stage **out, const hd_model_spec *spec,
                              const hd_weights *w, const hd_expert_disk_options *o,
                              hd_err *err) {
    assert(hd_weights_has_experts_elsewhere(w));
    expert_disk *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s) return HD_FAIL(err, HD_ENOMEM, "no memory to stage experts");
    s->base.table = &table;
    s->w = w;
    s->ahead = o->ahead;
    s->n_experts = spec->route.n_experts;
    s->n_keys = (spec->n_layers + spec->n_mtp) * s->n_experts;
    hd_status st = find_experts(s, err);
    if (st == HD_OK) st = open_layer(s, err);
    if (st == HD_OK) st = open_files(s, o, err);
    if (st == HD_OK) st = open_cache(s, o, err);
    if (st == HD_OK) {
        *out = &s->base;
    } else {
        close_disk(&s->base);
    }
    return st;
}
