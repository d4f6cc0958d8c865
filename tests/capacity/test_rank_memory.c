/* test_rank_memory.c - the memory that `hadal plan` predicts of a rank, against what ranks have that are opened:
 * engines of the shipped models in every layout, and released models' ranks of their whole depth, by shapes. */
#include "check.h"

#include <math.h>
#include <stdio.h>

#include "capacity/capacity.h"
#include "comm/emulated.h"
#include "engine/rank.h"
#include "fakes/engine_rig.h"
#include "weights/configs.h"

enum { MAX_LAYOUTS = 64 };

static void assert_near(int64_t planned, int64_t opened, const char *what, const char *of,
                        const hd_parallel_config *l) {
    if (llabs(planned - opened) * 100 <= opened) return;
    fail_msg("%s, %s, tp %d, dp %d, ep %d, cp %d: %lld bytes planned, %lld opened", of, what,
             l->tp, l->dp, l->ep, l->cp, (long long)planned, (long long)opened);
}

/* ---- what is bound ---- */

static int64_t matrix_bytes(const hd_weight *w) {
    const hd_stored_format f = hd_weight_format(w);
    return (int64_t)(hd_stored_data_bytes(&f, w->rows, w->cols) +
                     hd_stored_scale_bytes(&f, w->rows, w->cols));
}

static int64_t expert_bytes(const hd_weights *w, int32_t layer, hd_role role) {
    const hd_expert_table *t = hd_weights_experts(w, layer, role);
    int64_t bytes = 0;
    for (int32_t i = 0; t && i < t->n; i++) bytes += matrix_bytes(&t->slots[i]);
    return bytes;
}

/* A role of a layer as operators read it: a table of token choices, a vector in float32, a matrix, or the experts in
 * slots. Engram tables are the host's; an MTP layer's EMBED and HEAD may be those of the model. */
static int64_t role_bytes(const hd_weights *w, const hd_model_spec *spec, int32_t layer,
                          hd_role role) {
    const hd_weight *m = hd_weights_matrix(w, layer, role);
    if (role == HD_ROUTER_HASH) {
        const bool has = layer != HD_GLOBAL && hd_weights_table(w, layer);
        return has ? (int64_t)spec->vocab * spec->route.top_k * (int64_t)sizeof(int32_t) : 0;
    }
    if (role == HD_ENGRAM_TABLE) return 0;
    if (!m) return expert_bytes(w, layer, role);
    if (layer != HD_GLOBAL && m == hd_weights_matrix(w, HD_GLOBAL, role)) return 0;
    if (!hd_weights_vector(w, layer, role)) return matrix_bytes(m);
    return (int64_t)m->rows * m->cols * (int64_t)sizeof(float);
}

static int64_t bound_bytes(const hd_weights *w, const hd_model_spec *spec) {
    int64_t bytes = 0;
    for (int32_t l = HD_GLOBAL; l < spec->n_layers + spec->n_mtp; l++) {
        for (int r = 0; r < HD_N_ROLES; r++) bytes += role_bytes(w, spec, l, (hd_role)r);
    }
    return bytes;
}

/* ---- engines of the shipped models ---- */

static const char *const models[] = {TINY, "models/tiny-v3", "models/tiny-v41"};

static void check_engine(const char *model, hd_engine_options o) {
    o.model_dir = model;
    o.max_running = 5;
    o.max_context = 512;
    o.chunk_tokens = 96;
    hd_engine *e = rig_open("cpu", &o);
    const hd_engine_sizes sizes = hd_engine_sizes_of(e->spec, e->drafts, &o);
    const hd_rank_memory_args args = {.spec = e->spec,
                                      .parallel = &e->parallel,
                                      .sizes = &sizes,
                                      .act_type = HD_F32,
                                      .kv_type = HD_F32,
                                      .threads = 1,
                                      .vocab = e->vocab,
                                      .n_micro = o.overlap ? o.overlap[0] - '0' : 0};
    hd_rank_memory m;
    hd_err err = {0};
    int64_t weights = 0, activations = 0;
    if (hd_rank_memory_of(&m, &args, &err) != HD_OK) fail_msg("%s", err.msg);
    for (int32_t i = 0; i < e->n_ranks; i++) {
        const engine_rank *rank = &e->ranks[i];
        const int64_t held = bound_bytes(rank->weights, e->spec);
        const int64_t runner = (int64_t)hd_model_runner_bytes(rank->model_runner);
        if (held > weights) weights = held;
        if (runner > activations) activations = runner;
    }
    assert_near(hd_rank_memory_weights(&m), weights, "weights", model, &e->parallel);
    assert_near(m.activations, activations, "activations", model, &e->parallel);
    assert_int_equal(m.kv * e->parallel.tp,
                     e->ranks[0].totals.kv_bytes); /* with its followers' */
    assert_int_equal(hd_rank_memory_total(&m),
                     hd_rank_memory_weights(&m) + m.kv + m.activations);
    hd_engine_close(e);
}

static void check_layouts(const char *model, int32_t ranks) {
    hd_model_spec *spec;
    hd_err err = {0};
    hd_parallel_config all[MAX_LAYOUTS];
    if (hd_model_spec_open(&spec, model, &err) != HD_OK) fail_msg("%s", err.msg);
    const int32_t n = hd_capacity_layouts(all, MAX_LAYOUTS, ranks, spec);
    hd_model_spec_close(spec);
    assert_true(n <= MAX_LAYOUTS);
    for (int32_t i = 0; i < n; i++) {
        const hd_engine_options o = {.tp = all[i].tp, .dp = all[i].dp, .ep = all[i].ep};
        check_engine(model, o);
    }
}

/* All that `serve` has of up to 8 ranks. */
static void engines_have_the_planned_memory(void **state) {
    (void)state;
    for (size_t m = 0; m < HD_LEN(models); m++) {
        for (int32_t ranks = 1; ranks <= 8; ranks++) {
            if (!is_brief() || ranks == 3) check_layouts(models[m], ranks);
        }
    }
}

/* Beside sizes of a layout: sums in ranks, spare slots, more ranks for experts than for attention, rows divided by cp, two
 * and three micro-batches, rows that travel as FP8. */
static const struct {
    int32_t tp, cp, dp, ep, redundant;
    bool sums;
    const char *overlap, *rows;
} mixed[] = {
    {2, 1, 1, 2, 0, true,  NULL, NULL },
    {2, 1, 1, 2, 0, true,  "3",  NULL },
    {1, 1, 1, 4, 8, false, NULL, NULL },
    {1, 1, 2, 2, 2, false, "2",  NULL },
    {2, 1, 1, 4, 0, false, NULL, NULL },
    {2, 1, 2, 4, 0, false, "3",  NULL },
    {1, 2, 1, 2, 0, false, NULL, NULL },
    {1, 2, 1, 2, 0, false, "2",  NULL },
    {2, 2, 1, 4, 0, false, NULL, NULL },
    {1, 1, 2, 2, 0, false, NULL, "fp8"},
    {2, 1, 1, 4, 0, false, "2",  "fp8"},
};

static void options_have_the_planned_memory(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(mixed) * HD_LEN(models); i++) {
        const size_t k = i % HD_LEN(mixed), m = i / HD_LEN(mixed);
        if (mixed[k].cp > 1 && strstr(models[m], "v41")) continue; /* has no cp */
        const hd_engine_options o = {.tp = mixed[k].tp,
                                     .cp = mixed[k].cp,
                                     .dp = mixed[k].dp,
                                     .ep = mixed[k].ep,
                                     .redundant = mixed[k].redundant,
                                     .sum_in_ranks = mixed[k].sums,
                                     .overlap = mixed[k].overlap,
                                     .dispatch_dtype = mixed[k].rows};
        check_engine(models[m], o);
    }
}

/* ---- released models, random weights without values ---- */

static const struct {
    const char *name;
    int32_t tp, dp, ep, redundant;
} released[] = {
    {"v4_flash", 4, 1,  1,  0 },
    {"v4_flash", 1, 4,  4,  0 },
    {"v4_flash", 2, 2,  4,  8 },
    {"v3",       8, 1,  8,  0 },
    {"v3",       1, 32, 32, 32},
    {"v3",       1, 72, 72, 32},
    {"r1_nvfp4", 4, 1,  1,  0 },
    {"r1_nvfp4", 1, 8,  8,  0 },
    {"r1_nvfp4", 5, 1,  5,  4 },
};

typedef struct opened {
    hd_weights *weights;
    hd_ops ops;
    hd_device *device;
    hd_stream *stream;
    hd_comm_emulated *others;
    hd_comm comm;
    hd_model_runner *runner;
} opened;

static hd_status open_rank(opened *o, const hd_rank_memory_args *a, int32_t number,
                           hd_err *err) {
    const hd_dummy_options shapes = {
        .parallel = *a->parallel, .rank = number, .shapes_only = true};
    const hd_ops_options untouched = {
        .cpu = {.n_threads = 1, .untouched = true}
    };
    HD_TRY(hd_weights_open_dummy(&o->weights, a->spec, &shapes, err));
    HD_TRY(hd_ops_open(&o->ops, &o->device, "cpu", &untouched, err));
    HD_TRY(hd_stream_open(&o->stream, o->device, err));
    o->ops.kv_type = a->kv_type;
    const hd_comm_emulated_options others = {
        .spec = a->spec,
        .shard = hd_weights_shard(o->weights),
        .rows = {a->sizes->step_rows, a->sizes->running},
        .ops = &o->ops,
        .device = o->device,
        .stream = o->stream
    };
    HD_TRY(hd_comm_emulated_open(&o->others, &others, err));
    o->comm = *hd_comm_emulated_interface(o->others);
    o->comm.one_round =
        false; /* of an emulated rank, for which it keeps what a real one need not */
    const hd_model_env env = {.spec = a->spec,
                              .weights = o->weights,
                              .ops = &o->ops,
                              .device = o->device,
                              .stream = o->stream,
                              .comm = &o->comm};
    hd_model_runner_options options = hd_engine_runner_options(a->sizes);
    for (int g = 0; g < HD_N_KV_GROUPS; g++) options.n_host[g] = 0;
    options.n_ids = a->spec->vocab;
    options.role = number % a->parallel->tp ? HD_RUNNER_FOLLOWS : HD_RUNNER_LEADS;
    options.n_micro = 1;
    return hd_model_runner_open(&o->runner, &env, &options, err);
}

static void close_rank(opened *o) {
    hd_model_runner_close(o->runner);
    hd_comm_emulated_close(o->others);
    hd_stream_close(o->stream);
    hd_device_close(o->device);
    hd_weights_close(o->weights);
}

/* The first rank of a layout, the last and one between: experts may be spread unevenly. */
static void check_released(const char *name, const hd_parallel_config *l) {
    hd_model_spec *spec = config_open(name);
    const hd_engine_options load = {
        .max_running = 8, .max_context = 4096, .chunk_tokens = 1024};
    const hd_engine_sizes sizes = hd_engine_sizes_of(spec, false, &load);
    const hd_rank_memory_args args = {.spec = spec,
                                      .parallel = l,
                                      .sizes = &sizes,
                                      .act_type = HD_F32,
                                      .kv_type = HD_BF16,
                                      .threads = 1};
    hd_rank_memory m;
    hd_err err = {0};
    int64_t weights = 0, activations = 0;
    if (hd_rank_memory_of(&m, &args, &err) != HD_OK) fail_msg("%s", err.msg);
    for (int32_t i = 0; i < 3; i++) {
        opened o = {0};
        if (open_rank(&o, &args, i * (hd_parallel_world(l) - 1) / 2, &err) != HD_OK) {
            fail_msg("%s", err.msg);
        }
        const int64_t held = bound_bytes(o.weights, spec);
        const int64_t runner = (int64_t)hd_model_runner_bytes(o.runner);
        if (held > weights) weights = held;
        if (runner > activations) activations = runner;
        close_rank(&o);
    }
    assert_near(hd_rank_memory_weights(&m), weights, "weights", name, l);
    assert_near(m.activations, activations, "activations", name, l);
    hd_model_spec_close(spec);
}

static void released_ranks_have_the_planned_memory(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(released); i++) {
        hd_model_spec *spec = config_open(released[i].name);
        hd_parallel_config l =
            hd_parallel_common(released[i].tp, released[i].dp, released[i].ep, spec);
        if (released[i].redundant) l.redundant = released[i].redundant;
        hd_model_spec_close(spec);
        check_released(released[i].name, &l);
    }
}

int test_rank_memory(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(engines_have_the_planned_memory),
        cmocka_unit_test(options_have_the_planned_memory),
        cmocka_unit_test(released_ranks_have_the_planned_memory),
    };
    return cmocka_run_group_tests_name("rank_memory", tests, NULL, NULL);
}
