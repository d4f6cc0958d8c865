/* weights.c - loads weights: binds every tensor of the schema to the checkpoint, shards,
 * uploads.
 *
 * Binding walks the schema once. A tensor that is missing or does not fit is recorded, not
 * fatal. One walk therefore serves both hd_weights_open, which then fails, and the survey,
 * which shows the rest. Owns the checkpoint's map and all converted vectors. */
#include "weights/weights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/checked.h"
#include "tokenizer/token_classes.h"
#include "weights/config/drafter_folder.h"
#include "weights/placement.h"
#include "weights/weights_internal.h"

enum { NAMED_MISSING = 10 };

/* ---- presence ---- */

static bool is_mtp(const hd_weights *w, const hd_tensor_decl *d) {
    return d->layer >= w->spec->n_layers;
}

/* Counts the leading MTP layers of which the files contain any tensor. */
static hd_status count_mtp(hd_weights *w, const char *model_dir) {
    bool *seen = calloc((size_t)w->spec->n_mtp + 1, sizeof *seen);
    if (!seen) return HD_FAIL(&w->problem, HD_ENOMEM, "%s: no memory to bind it", model_dir);
    for (int32_t i = 0; i < w->schema.n; i++) {
        const hd_tensor_decl *d = &w->schema.decls[i];
        if (is_mtp(w, d) && w->bound[i].data) seen[d->layer - w->spec->n_layers] = true;
    }
    for (int32_t m = 0; m < w->spec->n_mtp; m++) {
        if (seen[m]) w->n_mtp = m + 1; /* an earlier gap counts as missing tensors */
    }
    /* the stages of a DSpark drafter are of no use without each other */
    if (w->n_mtp && w->spec->drafter == HD_DRAFTER_DSPARK) w->n_mtp = w->spec->n_mtp;
    free(seen);
    return HD_OK;
}

/* Marks missing tensors and names the first few in the problem. */
static void list_missing(hd_weights *w, const char *model_dir) {
    char names[400] = "";
    int32_t n = 0, named = 0;
    for (int32_t i = 0; i < w->schema.n; i++) {
        const hd_tensor_decl *d = &w->schema.decls[i];
        bool left_out = is_mtp(w, d) && d->layer >= w->spec->n_layers + w->n_mtp;
        if (w->bound[i].data || d->duplicate || d->unused || left_out) continue;
        w->missing[i] = true;
        n++;
        size_t used = strlen(names);
        if (n <= NAMED_MISSING && used + strlen(d->name) + 3 < sizeof names) {
            snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", d->name);
            named++;
        }
    }
    if (n == 0) return;
    char more[40] = "";
    if (n > named) snprintf(more, sizeof more, " and %d more", n - named);
    HD_FAIL(&w->problem, HD_EFORMAT, "%s: missing tensor %s%s", model_dir, names, more);
}

/* ---- binding ---- */

static void mark(hd_weights *w, const hd_tensor *t, hd_use what, int32_t decl) {
    if (t) w->uses[t - hd_checkpoint_at(w->checkpoint, 0)] = (weights_use){what, decl};
}

/* Uses the map if it has aligned float32, else converts to float32. */
static hd_status place_vector(weights_slot *s, const hd_weight *m, hd_err *err) {
    if (m->type == HD_F32 && (uintptr_t)m->data % sizeof(float) == 0) {
        s->vector = m->data;
        return HD_OK;
    }
    size_t n = (size_t)m->rows * (size_t)m->cols;
    float *wide = s->owned ? s->owned : malloc(n * sizeof *wide);
    if (!wide) return HD_FAIL(err, HD_ENOMEM, "no memory for a vector of %zu floats", n);
    for (size_t i = 0; i < n; i++) wide[i] = hd_dtype_at(m->type, m->data, (int64_t)i);
    s->owned = wide;
    s->vector = wide;
    return HD_OK;
}

int64_t weights_integer_at(const hd_tensor *t, size_t i) {
    int64_t wide;
    int32_t narrow;
    if (t->dtype == HD_I64) {
        memcpy(&wide, t->data + sizeof wide * i, sizeof wide);
        return wide;
    }
    memcpy(&narrow, t->data + sizeof narrow * i, sizeof narrow);
    return narrow;
}

static hd_status place_table(const hd_weights *w, weights_slot *s, const hd_tensor *t,
                             hd_err *err) {
    size_t n = (size_t)t->shape[0] * (size_t)t->shape[1];
    int32_t *table = malloc(n * sizeof *table), experts = w->spec->route.n_experts;
    if (!table) return HD_FAIL(err, HD_ENOMEM, "no memory for a hash table of %zu", n);
    s->owned = table;
    for (size_t i = 0; i < n; i++) {
        int64_t id = weights_integer_at(t, i);
        if (id < 0 || id >= experts) {
            return weights_misfit(
                w->checkpoint, t, err, "bad expert: [%zu, %zu] is %lld, must be below %d",
                i / (size_t)t->shape[1], i % (size_t)t->shape[1], (long long)id, experts);
        }
        table[i] = (int32_t)id;
    }
    s->table = table;
    return HD_OK;
}

hd_status weights_place(hd_weights *w, int32_t i, hd_err *err) {
    const hd_tensor_decl *d = &w->schema.decls[i];
    const weights_bound *b = &w->bound[i];
    weights_slot *s = weights_slot_at(w, d->layer, d->role);
    if (d->unused) return HD_OK;
    if (d->expert >= 0) {
        const int32_t at = hd_shard_slot(&w->shard, d->expert, w->spec->route.n_experts);
        s->experts[at] = b->weight;
        return HD_OK;
    }
    s->weight = b->weight;
    if (d->role == HD_ROUTER_HASH) return place_table(w, s, b->data, err);
    return weights_is_small(d) ? place_vector(s, &b->weight, err) : HD_OK;
}

static hd_status bind_one(hd_weights *w, int32_t i, hd_err *err) {
    weights_bound *b = &w->bound[i];
    hd_status st = weights_bind(b, w->checkpoint, w->spec, &w->schema.decls[i], b->data, err);
    mark(w, b->scale, HD_USE_SCALE, i);
    mark(w, b->global, HD_USE_SCALE, i);
    return st == HD_OK ? weights_place(w, i, err) : st;
}

static void bind_all(hd_weights *w) {
    for (int32_t i = 0; i < w->schema.n; i++) {
        if (!w->bound[i].data) continue;
        mark(w, w->bound[i].data, HD_USE_DATA, i);
        hd_err err = {0};
        if (bind_one(w, i, &err) == HD_OK) continue;
        w->bound[i].weight.data = NULL;
        if (w->problem.status == HD_OK) w->problem = err;
    }
}

/* Assigns each expert role of each MoE layer its array of matrices. */
static hd_status place_experts(hd_weights *w, const char *model_dir) {
    const hd_role roles[WEIGHTS_EXPERT_ROLES] = {HD_EXPERT_GATE, HD_EXPERT_UP, HD_EXPERT_DOWN};
    size_t n = 0, per_row = (size_t)w->spec->route.n_experts, at = 0;
    for (int32_t l = 0; l < w->spec->n_layers + w->spec->n_mtp; l++) {
        if (w->spec->layers[l].mlp != HD_MLP_DENSE) n += WEIGHTS_EXPERT_ROLES * per_row;
    }
    w->experts = calloc(n + 1, sizeof *w->experts);
    if (!w->experts) {
        return HD_FAIL(&w->problem, HD_ENOMEM, "%s: no memory for %zu experts", model_dir, n);
    }
    HD_TRY(weights_slots_init(&w->expert_slots, w->spec, &w->shard, &w->problem));
    for (int32_t l = 0; l < w->spec->n_layers + w->spec->n_mtp; l++) {
        if (w->spec->layers[l].mlp == HD_MLP_DENSE) continue;
        for (int32_t r = 0; r < WEIGHTS_EXPERT_ROLES; r++, at += per_row) {
            weights_slot_at(w, l, roles[r])->experts = w->experts + at;
            weights_slots_hold(&w->expert_slots, l, r, w->experts + at);
        }
    }
    return HD_OK;
}

static bool ends_with(const char *text, const char *tail) {
    size_t n = strlen(text), k = strlen(tail);
    return n >= k && strcmp(text + n - k, tail) == 0;
}

/* Tensors that are known but unused: scales of activations and caches, tables that are
 * computed here, and the copies of embedding and head that V4's converter also skips. */
bool weights_of_no_use(const char *name) {
    static const char *const tails[] = {".input_scale", ".k_scale", ".v_scale",
                                        ".rotary_emb.inv_freq"};
    for (size_t i = 0; i < HD_LEN(tails); i++) {
        if (ends_with(name, tails[i])) return true;
    }
    return strncmp(name, "mtp.", 4) == 0 &&
           (strstr(name, "emb") || ends_with(name, "head.weight"));
}

/* Allocates all arrays that are as long as the schema or the spec, or the checkpoint's
 * n_tensors. */
static hd_status take_memory(hd_weights *w, const char *model_dir, int32_t n_tensors) {
    size_t n_slots = (size_t)(1 + w->spec->n_layers + w->spec->n_mtp) * HD_N_ROLES;
    w->bound = calloc((size_t)w->schema.n + 1, sizeof *w->bound);
    w->missing = calloc((size_t)w->schema.n + 1, sizeof *w->missing);
    w->lost = calloc((size_t)w->schema.n + 1, sizeof *w->lost);
    w->uses = calloc((size_t)n_tensors + 1, sizeof *w->uses);
    w->slots = calloc(n_slots, sizeof *w->slots);
    if (!w->bound || !w->missing || !w->lost || !w->uses || !w->slots) {
        return HD_FAIL(&w->problem, HD_ENOMEM, "%s: no memory to bind it", model_dir);
    }
    return place_experts(w, model_dir);
}

static hd_status bind_model(hd_weights *w, const char *model_dir) {
    int32_t n_tensors = hd_checkpoint_count(w->checkpoint);
    HD_TRY(take_memory(w, model_dir, n_tensors));
    for (int32_t i = 0; i < n_tensors; i++) {
        bool useless = weights_of_no_use(hd_checkpoint_at(w->checkpoint, i)->name);
        w->uses[i] = (weights_use){useless ? HD_USE_IGNORED : HD_USE_UNKNOWN, -1};
    }
    for (int32_t i = 0; i < w->schema.n; i++) {
        w->bound[i].data = weights_find_tensor(w->checkpoint, w->spec, &w->schema.decls[i]);
    }
    HD_TRY(count_mtp(w, model_dir));
    list_missing(w, model_dir);
    bind_all(w);
    HD_TRY(weights_slots_fill(&w->expert_slots, NULL, NULL, &w->problem));
    return w->problem.status == HD_ENOMEM ? HD_ENOMEM : HD_OK;
}

/* ---- opening ---- */

static void shard_all(hd_weights *w, const hd_model_spec *spec) {
    const hd_parallel_config single = hd_parallel_single();
    w->spec = spec;
    w->shard = hd_shard_of(&single, 0, spec);
}

static hd_status survey(hd_weights **out, const char *model_dir, const hd_model_spec *spec,
                        hd_checkpoint_opener *open, hd_err *err) {
    *out = NULL;
    hd_weights *w = calloc(1, sizeof *w);
    if (!w) return HD_FAIL(err, HD_ENOMEM, "%s: no memory for weights", model_dir);
    shard_all(w, spec);
    hd_status st = hd_checkpoint_open_all(&w->checkpoint, model_dir, spec, open, err);
    if (st == HD_OK) st = hd_schema_open(&w->schema, spec, err);
    if (st == HD_OK) {
        st = bind_model(w, model_dir);
        if (st != HD_OK && err && err->status == HD_OK) *err = w->problem;
    }
    if (st == HD_OK) {
        *out = w;
    } else {
        hd_weights_close(w);
    }
    return st;
}

hd_status hd_weights_survey(hd_weights **out, const char *model_dir, const hd_model_spec *spec,
                            hd_err *err) {
    return survey(out, model_dir, spec, hd_checkpoint_open, err);
}

/* What is elsewhere is checked when it is fetched. A step reads a few rows of an Engram table,
 * which may be larger than memory. */
static hd_status check_scales(const hd_weights *w, int32_t decl, hd_err *err) {
    if (w->experts_elsewhere && w->schema.decls[decl].expert >= 0) return HD_OK;
    if (w->schema.decls[decl].role == HD_ENGRAM_TABLE) return HD_OK;
    return hd_weights_check_scales(w, decl, err);
}

/* ---- classes of tokens ---- */

static hd_status take_classes(hd_weights *w) {
    const size_t n = (size_t)w->spec->vocab;
    w->token_classes = malloc(n * sizeof *w->token_classes);
    if (w->token_classes) return HD_OK;
    return HD_FAIL(&w->problem, HD_ENOMEM, "no memory for classes of %zu tokens", n);
}

static hd_status classify(hd_weights *w, const char *model_dir, hd_tokenizer *t, hd_err *err) {
    const int32_t vocab = w->spec->vocab, declared = w->spec->engram.classes;
    int32_t n;
    HD_TRY(hd_tokenizer_check_rows(t, vocab, err));
    HD_TRY(hd_token_classes(t, vocab, w->token_classes, &n, err));
    if (n == declared) return HD_OK;
    return HD_FAIL(
        err, HD_EFORMAT,
        "%s: its tokenizer has %d classes of tokens, but engram_compressed_vocab_size "
        "is %d: is it another model's?",
        model_dir, n, declared);
}

static hd_status read_classes(hd_weights *w, const char *model_dir, hd_err *err) {
    hd_tokenizer *t;
    if (w->spec->engram.n_layers == 0) return HD_OK;
    HD_TRY(take_classes(w));
    HD_TRY(hd_tokenizer_open(&t, model_dir, err));
    const hd_status st = classify(w, model_dir, t, err);
    hd_tokenizer_close(t);
    return st;
}

static hd_status make_classes(hd_weights *w) {
    if (w->spec->engram.n_layers == 0) return HD_OK;
    HD_TRY(take_classes(w));
    for (int32_t i = 0; i < w->spec->vocab; i++) {
        w->token_classes[i] = i % w->spec->engram.classes;
    }
    return HD_OK;
}

static hd_status open_checked(hd_weights **out, const char *model_dir,
                              const hd_model_spec *spec, hd_checkpoint_opener *open,
                              bool experts_elsewhere, hd_err *err) {
    hd_weights *w;
    *out = NULL;
    hd_status st = survey(&w, model_dir, spec, open, err);
    if (!w) return st;
    w->experts_elsewhere = experts_elsewhere;
    st = w->problem.status;
    if (st != HD_OK && err && err->status == HD_OK) *err = w->problem;
    for (int32_t i = 0; i < w->schema.n && st == HD_OK; i++) {
        st = check_scales(w, i, err);
    }
    if (st == HD_OK) st = read_classes(w, model_dir, err);
    if (st == HD_OK) {
        *out = w;
    } else {
        hd_weights_close(w);
    }
    return st;
}

hd_status hd_weights_open(hd_weights **out, const char *model_dir, const hd_model_spec *spec,
                          hd_err *err) {
    return open_checked(out, model_dir, spec, hd_checkpoint_open, false, err);
}

hd_status hd_weights_open_updatable(hd_weights **out, const char *model_dir,
                                    const hd_model_spec *spec, hd_err *err) {
    return open_checked(out, model_dir, spec, hd_checkpoint_read, false, err);
}

hd_status hd_weights_open_unstaged(hd_weights **out, const char *model_dir,
                                   const hd_model_spec *spec, hd_err *err) {
    return open_checked(out, model_dir, spec, hd_checkpoint_open, true, err);
}

/* Draws a layer's table of experts by token. Shapes alone, of which nobody asks for a routing, have one of
 * zeros, which takes no time. */
static hd_status make_table(int32_t **out, hd_weights *w, const hd_dummy_options *o, int32_t l,
                            size_t bytes) {
    if (!o->shapes_only || o->routing != HD_ROUTING_MODEL) {
        return weights_make_routing(out, w->spec, o->routing, l, &w->problem);
    }
    *out = calloc(1, bytes);
    return *out ? HD_OK : HD_FAIL(&w->problem, HD_ENOMEM, "no memory for a table of experts");
}

/* Makes the synthetic routing of MoE layers, if it is requested or the layer needs a table. */
static hd_status make_routing(hd_weights *w, const hd_dummy_options *o) {
    const hd_model_spec *c = w->spec;
    for (int32_t l = 0; l < c->n_layers + c->n_mtp; l++) {
        const hd_mlp kind = c->layers[l].mlp;
        const int32_t top_k = hd_layer_route(c, l).top_k;
        const size_t bytes = (size_t)c->vocab * (size_t)top_k * sizeof(int32_t);
        weights_slot *s = weights_slot_at(w, l, HD_ROUTER_HASH);
        int32_t *table;
        void *there;
        if (kind == HD_MLP_DENSE) continue;
        if (kind == HD_MLP_MOE && o->routing == HD_ROUTING_MODEL) continue;
        HD_TRY(make_table(&table, w, o, l, bytes));
        s->owned = table;
        s->table = table;
        s->weight = (hd_weight){.rows = c->vocab, .cols = top_k};
        if (!o->device) continue;
        HD_TRY(hd_device_alloc(o->device, &there, bytes, "experts by token", &w->problem));
        hd_stream_upload(o->stream, there, table, bytes);
        s->table = there;
    }
    return o->device ? hd_stream_sync(o->stream, &w->problem) : HD_OK;
}

static hd_status plan_dummies(hd_plan *plan, hd_weights *w, const hd_dummy_options *o) {
    const hd_plan_args args = {.parallel = &o->parallel,
                               .rank = o->rank,
                               .spec = w->spec,
                               .schema = &w->schema,
                               .n_mtp = w->spec->n_mtp};
    HD_TRY(hd_plan_open(plan, &args, &w->problem));
    w->shard = plan->shard;
    return HD_OK;
}

static hd_status take_spares(hd_weights *w, hd_device *d) {
    const size_t bytes = weights_spare_bytes(&w->expert_slots);
    void *spares = NULL;
    if (bytes) HD_TRY(hd_device_alloc(d, &spares, bytes, "spare experts", &w->problem));
    return weights_buffers_open(&w->expert_slots, spares, &w->problem);
}

static hd_status make_dummies(hd_weights *w, const hd_dummy_options *o) {
    hd_plan plan;
    HD_TRY(plan_dummies(&plan, w, o));
    hd_status st = take_memory(w, "dummy weights", 0);
    const weights_dummies_args args = {.spec = w->spec,
                                       .schema = &w->schema,
                                       .slices = plan.slices,
                                       .device = o->device,
                                       .stream = o->stream,
                                       .shapes_only = o->shapes_only,
                                       .experts_later = o->experts_later};
    if (st == HD_OK) st = weights_dummies_init(&w->dummies, w->bound, &args, &w->problem);
    hd_plan_close(&plan);
    for (int32_t i = 0; i < w->schema.n && st == HD_OK; i++) {
        if (w->bound[i].data) st = weights_place(w, i, &w->problem);
    }
    w->n_mtp = w->spec->n_mtp;
    if (st == HD_OK) st = make_classes(w);
    hd_device *d = o->device && !hd_device_is_host(o->device) ? o->device : NULL;
    w->expert_slots.movable = d && o->movable;
    if (st == HD_OK) st = take_spares(w, d);
    if (st == HD_OK) st = weights_slots_fill(&w->expert_slots, d, o->stream, &w->problem);
    return st == HD_OK ? make_routing(w, o) : st;
}

/* Returns w in *out, or closes it and returns the failure. */
static hd_status hand_over(hd_weights **out, hd_weights *w, hd_status st, hd_err *err) {
    if (st == HD_OK) {
        *out = w;
        return HD_OK;
    }
    if (w->problem.status != HD_OK && err && err->status == HD_OK) *err = w->problem;
    hd_weights_close(w);
    return st;
}

hd_status hd_weights_open_dummy(hd_weights **out, const hd_model_spec *spec,
                                const hd_dummy_options *options, hd_err *err) {
    hd_dummy_options o = options ? *options : (hd_dummy_options){0};
    if (o.parallel.tp == 0) o.parallel = hd_parallel_single();
    *out = NULL;
    hd_weights *w = calloc(1, sizeof *w);
    if (!w) return HD_FAIL(err, HD_ENOMEM, "no memory for dummy weights");
    shard_all(w, spec);
    hd_status st = hd_schema_open(&w->schema, spec, err);
    if (st == HD_OK) st = make_dummies(w, &o);
    return hand_over(out, w, st, err);
}

static hd_status copy_classes(hd_weights *w, const hd_weights *whole) {
    if (!whole->token_classes) return HD_OK;
    HD_TRY(take_classes(w));
    memcpy(w->token_classes, whole->token_classes,
           (size_t)w->spec->vocab * sizeof *w->token_classes);
    return HD_OK;
}

static hd_status slice_tensors(hd_weights *w, const hd_weights *whole) {
    w->first_piece = calloc((size_t)w->schema.n + 1, sizeof *w->first_piece);
    if (!w->first_piece) return HD_FAIL(&w->problem, HD_ENOMEM, "no memory to list pieces");
    for (int32_t i = 0; i < w->schema.n; i++) {
        HD_TRY(weights_slice(w, whole, i, &w->problem));
        const bool table = w->schema.decls[i].role == HD_ROUTER_HASH;
        if (w->bound[i].data && !table) HD_TRY(weights_place(w, i, &w->problem));
    }
    return HD_OK;
}

/* Tables are those of the complete weights. */
static hd_status slice_all(hd_weights *w, const hd_weights *whole) {
    HD_TRY(take_memory(w, "a share", 0));
    HD_TRY(copy_classes(w, whole));
    HD_TRY(slice_tensors(w, whole));
    HD_TRY(weights_slots_fill(&w->expert_slots, NULL, NULL, &w->problem));
    for (int32_t l = 0; l < w->spec->n_layers + w->spec->n_mtp; l++) {
        weights_slot *s = weights_slot_at(w, l, HD_ROUTER_HASH);
        *s = *weights_slot_at(whole, l, HD_ROUTER_HASH);
        s->owned = NULL; /* owned by the complete weights */
    }
    return HD_OK;
}

static hd_status open_shard(hd_weights *w, const hd_weights *whole, hd_plan_args args) {
    hd_plan plan;
    args.spec = w->spec;
    args.n_mtp = w->n_mtp;
    HD_TRY(hd_schema_open(&w->schema, w->spec, &w->problem));
    hd_stored_format *formats = calloc((size_t)w->schema.n + 1, sizeof *formats);
    if (!formats) return HD_FAIL(&w->problem, HD_ENOMEM, "no memory to plan a shard");
    for (int32_t i = 0; i < w->schema.n; i++) {
        formats[i] = hd_weight_format(&whole->bound[i].weight);
    }
    args.schema = &w->schema;
    args.formats = formats;
    hd_status st = hd_plan_open(&plan, &args, &w->problem);
    if (st == HD_OK) {
        w->shard = plan.shard;
        w->slices = plan.slices;
        plan.slices = NULL;
        st = slice_all(w, whole);
        hd_plan_close(&plan);
    }
    free(formats);
    return st;
}

static hd_status open_part(hd_weights **out, const hd_weights *whole, const hd_plan_args *args,
                           hd_err *err) {
    *out = NULL;
    hd_weights *w = calloc(1, sizeof *w);
    if (!w) return HD_FAIL(err, HD_ENOMEM, "no memory for a shard of weights");
    w->spec = whole->spec;
    w->n_mtp = whole->n_mtp;
    return hand_over(out, w, open_shard(w, whole, *args), err);
}

hd_status hd_weights_open_shards(hd_weights **out, const hd_weights *whole,
                                 const hd_parallel_config *parallel, int32_t rank,
                                 hd_err *err) {
    return open_part(out, whole, &(hd_plan_args){.parallel = parallel, .rank = rank}, err);
}

hd_status hd_weights_open_without_experts(hd_weights **out, const hd_weights *whole,
                                          hd_err *err) {
    const hd_parallel_config single = hd_parallel_single();
    return open_part(out, whole, &(hd_plan_args){.parallel = &single, .no_experts = true}, err);
}

const hd_shard *hd_weights_shard(const hd_weights *w) {
    return &w->shard;
}

void hd_weights_close(hd_weights *w) {
    if (!w) return;
    size_t n_slots = (size_t)(1 + w->spec->n_layers + w->spec->n_mtp) * HD_N_ROLES;
    for (size_t i = 0; w->slots && i < n_slots; i++) free(w->slots[i].owned);
    free(w->slots);
    weights_slots_deinit(&w->expert_slots);
    free(w->slices);
    free(w->first_piece);
    free(w->experts);
    free(w->uses);
    free(w->token_classes);
    free(w->missing);
    free(w->lost);
    free(w->moves);
    free(w->bound);
    hd_schema_close(&w->schema);
    hd_checkpoint_close(w->checkpoint);
    weights_dummies_deinit(&w->dummies);
    weights_pieces_deinit(&w->pieces);
    free(w);
}

/* ---- what operators read ---- */

void hd_weights_are_on_devices(hd_weights *whole) {
    whole->on_devices = true;
}

hd_device *hd_weights_device(const hd_weights *w) {
    return w->device;
}

bool hd_weights_has_experts_elsewhere(const hd_weights *w) {
    return w->experts_elsewhere || w->shard.held.n < w->shard.n_experts;
}

int32_t hd_weights_n_mtp(const hd_weights *w) {
    return w->n_mtp;
}

size_t hd_weights_bytes(const hd_weights *w) {
    size_t bytes = 0;
    if (!w->checkpoint) return w->dummies.bytes;
    for (int32_t i = 0; i < hd_checkpoint_count(w->checkpoint); i++) {
        bytes += hd_checkpoint_at(w->checkpoint, i)->bytes;
    }
    return bytes;
}

const hd_weight *hd_weights_matrix(const hd_weights *w, int32_t layer, hd_role role) {
    if (role == HD_ROUTER_HASH) return NULL;
    const weights_slot *s = weights_slot_at(w, layer, role);
    bool has_copy = layer >= w->spec->n_layers && layer < w->spec->n_layers + w->n_mtp &&
                    (role == HD_EMBED || role == HD_HEAD);
    if (!s->weight.data && has_copy) s = weights_slot_at(w, HD_GLOBAL, role);
    if (!s->weight.data && role == HD_HEAD && w->spec->tied_embeddings &&
        (has_copy || layer == HD_GLOBAL)) {
        s = weights_slot_at(w, HD_GLOBAL, HD_EMBED);
    }
    return s->weight.data ? &s->weight : NULL;
}

const hd_expert_table *hd_weights_experts(const hd_weights *w, int32_t layer, hd_role role) {
    const weights_slot_layer *layers = w->expert_slots.layers;
    if (layer == HD_GLOBAL || role < HD_EXPERT_GATE || role > HD_EXPERT_DOWN) return NULL;
    const hd_expert_table *t = &layers[layer].tables[role - HD_EXPERT_GATE];
    return t->shape.rows > 0 ? t : NULL;
}

const hd_weight *hd_weights_held_expert(const hd_weights *w, int32_t layer, hd_role role,
                                        int32_t expert) {
    const weights_slot_layer *l = &w->expert_slots.layers[layer];
    if (l->map.n_slots == 0) return NULL;
    const hd_weight *m =
        weights_expert_matrix(&w->expert_slots, l, (int32_t)(role - HD_EXPERT_GATE), expert);
    return m && m->data ? m : NULL;
}

const hd_expert_map *hd_weights_expert_map(const hd_weights *w, int32_t layer) {
    const hd_expert_map *map = &w->expert_slots.layers[layer].map;
    return map->n_slots > 0 ? map : NULL;
}

hd_status hd_weights_place_experts(hd_weights *w, int32_t layer, const int32_t *expert,
                                   hd_stream *s, hd_err *err) {
    return weights_slots_place(&w->expert_slots, layer, expert, s, err);
}

const float *hd_weights_vector(const hd_weights *w, int32_t layer, hd_role role) {
    return weights_slot_at(w, layer, role)->vector;
}

const int32_t *hd_weights_token_classes(const hd_weights *w) {
    return w->token_classes;
}

const int32_t *hd_weights_table(const hd_weights *w, int32_t layer) {
    return weights_slot_at(w, layer, HD_ROUTER_HASH)->table;
}

const hd_err *hd_weights_problem(const hd_weights *w) {
    return &w->problem;
}

const hd_schema *hd_weights_schema(const hd_weights *w) {
    return &w->schema;
}

const hd_checkpoint *hd_weights_checkpoint(const hd_weights *w) {
    return w->checkpoint;
}

bool hd_weights_missing(const hd_weights *w, int32_t decl) {
    return w->missing[decl];
}

const hd_weight *hd_weights_stored(const hd_weights *w, int32_t decl) {
    const weights_bound *b = &w->bound[decl];
    return b->data && b->weight.data ? &b->weight : NULL;
}

hd_status hd_weights_check_scales(const hd_weights *w, int32_t decl, hd_err *err) {
    if (!hd_weights_stored(w, decl)) return HD_OK;
    return weights_check_scales(w->checkpoint, &w->bound[decl], err);
}

const hd_tensor *hd_weights_tensor(const hd_weights *w, int32_t decl) {
    return w->bound[decl].data;
}

const hd_tensor *hd_weights_scale_tensor(const hd_weights *w, int32_t decl) {
    return w->bound[decl].scale;
}

hd_status hd_weights_check_copied_scales(const hd_weights *w, int32_t decl, const void *scales,
                                         hd_err *err) {
    weights_bound b = w->bound[decl];
    if (!b.scale) return HD_OK;
    hd_tensor copy = *b.scale;
    copy.data = scales;
    b.scale = &copy;
    return weights_check_scales(w->checkpoint, &b, err);
}

hd_status hd_weights_check_values(const hd_weights *w, int32_t decl, hd_err *err) {
    if (!hd_weights_stored(w, decl)) return HD_OK;
    return weights_check_values(w->checkpoint, &w->bound[decl], err);
}

hd_use hd_weights_use(const hd_weights *w, int32_t i, int32_t *decl) {
    *decl = w->uses[i].decl;
    return w->uses[i].what;
}
