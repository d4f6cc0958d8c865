/* test_lanes.c - stages on the streams of their lanes: the same bits as on one stream,
 * whatever the streams do between the events of a lane change. With HADAL_BACKEND=cuda also
 * on a GPU, operator by operator and captured. */
#include "check.h"

#include "base/checked.h"
#include "base/cpu.h"
#include "base/random_fill.h"
#include "comm/emulated.h"
#include "fakes/gpus.h"
#include "fakes/queue_device.h"
#include "model/model_internal.h"
#include "weights/configs.h"

enum { PROMPT = 20, SEQS = 2, ROWS = PROMPT * SEQS, POSITIONS = 128, STEPS = 3, MICRO = 2 };

static const int32_t priorities[][QUEUE_STREAMS] = {
    {0, 1, 2},
    {0, 2, 1},
    {1, 0, 2},
    {1, 2, 0},
    {2, 0, 1},
    {2, 1, 0}
};

/* ---- a table with all lanes ---- */

static int32_t passed[MICRO][5]; /* what each stage has handed on */

static void hand_on(const model_step *s, int32_t layer, int32_t stage) {
    int32_t *x = passed[s->t->micro];
    (void)layer;
    hd_stream_copy(s->stream, &x[stage + 1], &x[stage], sizeof *x);
}

static void first(const model_step *s, int32_t layer) {
    hand_on(s, layer, 0);
}

static void second(const model_step *s, int32_t layer) {
    hand_on(s, layer, 1);
}

static void third(const model_step *s, int32_t layer) {
    hand_on(s, layer, 2);
}

static void fourth(const model_step *s, int32_t layer) {
    hand_on(s, layer, 3);
}

static bool never(const hd_model *m) {
    (void)m;
    return false;
}

static void spoil(const model_step *s, int32_t layer) {
    (void)layer;
    memset(passed[s->t->micro], 0, sizeof passed[0]);
}

static void stages_follow_each_other_over_lanes(void **state) {
    (void)state;
    static const model_stage stages[] = {
        {"first",  first,  HD_LANE_COPY,    NULL,  true },
        {"spoil",  spoil,  HD_LANE_COMM,    never, false},
        {"second", second, HD_LANE_COMM,    NULL,  false},
        {"third",  third,  HD_LANE_COPY,    NULL,  true },
        {"fourth", fourth, HD_LANE_COMPUTE, NULL,  false},
        {NULL,     NULL,   HD_LANE_COMPUTE, NULL,  false},
    };
    static hd_model m;
    hd_ops ops;
    hd_ops_init_ref(&ops, HD_EXACT);
    hd_device *d = queue_device_open(&ops);
    for (int32_t i = 0; i < HD_N_LANES; i++) {
        assert_int_equal(hd_stream_open(&m.lanes[i], d, NULL), HD_OK);
    }
    for (int32_t i = 0; i < MICRO; i++) {
        assert_int_equal(hd_device_event_open(&m.lane_change[i], d, false, NULL), HD_OK);
    }
    for (size_t k = 0; k < HD_LEN(priorities); k++) {
        model_step steps[MICRO];
        queue_device_prefer(d, priorities[k]);
        memset(passed, 0, sizeof passed);
        for (int32_t i = 0; i < MICRO; i++) {
            passed[i][0] = 7 + i;
            m.micro[i].micro = i;
            steps[i] = (model_step){.m = &m,
                                    .t = &m.micro[i],
                                    .cut = true,
                                    .stream = m.lanes[HD_LANE_COMPUTE],
                                    .lane_change = m.lane_change[i]};
        }
        model_run_stages(steps, MICRO, stages, "test", 0, false);
        assert_int_equal(hd_stream_sync(m.lanes[HD_LANE_COMPUTE], NULL), HD_OK);
        for (int32_t i = 0; i < MICRO; i++) assert_int_equal(passed[i][4], 7 + i);
    }
    for (int32_t i = 0; i < MICRO; i++) hd_device_event_close(m.lane_change[i]);
    for (int32_t i = 0; i < HD_N_LANES; i++) hd_stream_close(m.lanes[i]);
    hd_device_close(d);
}

/* ---- a rank of a model ---- */

/* One stream that runs at once; streams with queues; a GPU, also with captured steps. */
typedef enum backend { ON_CPU, ON_QUEUES, ON_GPU, CAPTURED } backend;

/* What the second and third stream are for. */
typedef enum streams { OF_LANES, OF_PARTS_BESIDE } streams;

typedef struct rank {
    backend on;
    const hd_model_spec *spec;
    hd_device *device;
    hd_stream *stream[QUEUE_STREAMS];
    hd_weights *weights;
    hd_ops ops;
    hd_comm tensor; /* of tensor parallelism */
    hd_comm_emulated *emulated;
    hd_model *model;
    hd_kv *kv;
    hd_batch batch;
    int32_t pages[SEQS][POSITIONS], n_pages;
    void *sum; /* [ROWS, hidden] device memory */
} rank;

/* As if the other rank had the same sum. */
static void all_reduce(void *ctx, hd_stream *s, const hd_all_reduce_args *a) {
    const rank *r = ctx;
    const hd_rows copy = {.data = r->sum, .type = a->x.type};
    const int32_t rows = (int32_t)(a->n / r->spec->hidden);
    hd_stream_copy(s, r->sum, a->x.data, (size_t)a->n * (size_t)hd_act_bytes(&r->ops));
    r->ops.add(s,
               &(hd_add_args){
                   .x = a->x, .y = copy, .rows = rows, .cols = r->spec->hidden, .repeat = 1});
}

/* As if the other ranks had the same columns. */
static void all_gather(void *ctx, hd_stream *s, const hd_all_gather_args *a) {
    (void)ctx;
    for (int32_t row = 0; row < a->rows; row++) {
        float *x = a->x + (int64_t)row * a->cols;
        for (int32_t col = 0; col < a->cols; col += a->own) {
            if (col == a->first) continue;
            hd_stream_copy(s, x + col, x + a->first, (size_t)a->own * sizeof *x);
        }
    }
}

static int32_t micro_from; /* rows of a step that is cut */

static void open_exchange(rank *r, const hd_parallel_config *parallel, hd_model_env *env,
                          hd_model_limits *limits) {
    static const hd_comm_table tensor = {.all_reduce = all_reduce, .all_gather = all_gather};
    r->tensor = hd_comm_of(&tensor, r, parallel, 0);
    env->comm = &r->tensor;
    const size_t bytes = (size_t)ROWS * (size_t)r->spec->hidden * sizeof(float);
    assert_int_equal(hd_device_alloc(r->device, &r->sum, bytes, "a sum", NULL), HD_OK);
    if (parallel->ep == 1) return;
    const hd_comm_emulated_options o = {
        .spec = r->spec,
        .shard = hd_weights_shard(r->weights),
        .routing = HD_ROUTING_UNIFORM,
        .rows = {ROWS, SEQS / MICRO},
        .copies = true,
        .ops = &r->ops,
        .device = r->device,
        .stream = r->stream[0]
    };
    assert_int_equal(hd_comm_emulated_open(&r->emulated, &o, NULL), HD_OK);
    env->comm = hd_comm_emulated_interface(r->emulated);
    limits->expert_rows = hd_comm_emulated_rows(r->emulated);
}

static void open_device(rank *r) {
    const hd_cpu_options one = {.n_threads = 1};
    const hd_ops_options options = {.cuda_path = gpus_path("cuda")};
    hd_err err = {0};
    if (r->on >= ON_GPU) {
        if (hd_ops_open(&r->ops, &r->device, "cuda", &options, &err) != HD_OK) {
            fail_msg("%s", err.msg);
        }
        return;
    }
    hd_ops_init_cpu(&r->ops, hd_cpu_features(), HD_EXACT);
    if (r->on == ON_QUEUES) {
        r->device = queue_device_open(&r->ops);
    } else {
        assert_int_equal(hd_device_open_cpu(&r->device, &one, NULL), HD_OK);
    }
}

static void open_rank(rank *r, const hd_model_spec *spec, const hd_parallel_config *parallel,
                      backend on, int32_t n_streams, streams use) {
    *r = (rank){.spec = spec, .on = on};
    open_device(r);
    for (int32_t i = 0; i < n_streams; i++) {
        assert_int_equal(hd_stream_open(&r->stream[i], r->device, NULL), HD_OK);
    }
    const hd_dummy_options dummy = {.parallel = *parallel,
                                    .device = on >= ON_GPU ? r->device : NULL,
                                    .stream = r->stream[0]};
    assert_int_equal(hd_weights_open_dummy(&r->weights, spec, &dummy, NULL), HD_OK);
    hd_model_env env = {.spec = spec,
                        .weights = r->weights,
                        .ops = &r->ops,
                        .device = r->device,
                        .stream = r->stream[0],
                        .comm_stream = r->stream[use == OF_LANES ? 1 : 2],
                        .copy_stream = use == OF_LANES ? r->stream[2] : NULL,
                        .beside_stream = use == OF_LANES ? NULL : r->stream[1]};
    hd_model_limits limits = {.rows = ROWS,
                              .logits = SEQS,
                              .positions = POSITIONS,
                              .n_micro = MICRO,
                              .micro_from = micro_from};
    open_exchange(r, parallel, &env, &limits);
    assert_int_equal(hd_model_open(&r->model, &env, &limits, NULL), HD_OK);
    r->n_pages = (int32_t)hd_ceil_div(POSITIONS, hd_kv_shape_of(spec).page_tokens);
    for (int32_t i = 0; i < SEQS * r->n_pages; i++) {
        r->pages[i / r->n_pages][i % r->n_pages] = i;
    }
    const hd_kv_options kv = {
        .n_pages = {SEQS * r->n_pages, SEQS * r->n_pages},
        .resident = 2 * spec->index_topk  /* 0 without an indexer */
    };
    assert_int_equal(
        hd_kv_open(&r->kv, spec, spec->n_layers + spec->n_mtp, r->device, &kv, NULL), HD_OK);
    const hd_batch_limits batch = {ROWS, SEQS, r->n_pages};
    assert_int_equal(hd_batch_open(&r->batch, &batch, r->device, NULL), HD_OK);
}

static void close_rank(rank *r) {
    hd_batch_close(&r->batch);
    hd_kv_close(r->kv);
    hd_model_close(r->model);
    hd_comm_emulated_close(r->emulated);
    hd_weights_close(r->weights);
    for (int32_t i = 0; i < QUEUE_STREAMS; i++) hd_stream_close(r->stream[i]);
    hd_device_close(r->device);
}

/* The first sequence has more rows, so that one of both micro-batches has some of each. */
static void write_rows(rank *r, int32_t start, int32_t n) {
    int32_t tokens[PROMPT];
    hd_batch_reset(&r->batch);
    for (int32_t q = 0; q < SEQS; q++) {
        const int32_t some = q && n > 1 ? n - 8 : n, first = q && start ? start - 8 : start;
        for (int32_t i = 0; i < some; i++) {
            const uint64_t at = (uint64_t)(first + i + 37 * q);
            tokens[i] = (int32_t)(hd_random_fill_at(7, at) % (uint64_t)r->spec->vocab);
        }
        hd_batch_add(&r->batch, &(hd_batch_seq){
                                    .tokens = tokens,
                                    .n = some,
                                    .start = first,
                                    .after = tokens[0],
                                    .n_logits = 1,
                                    .pages = {r->pages[q], r->pages[q]},
                                    .n_pages = r->n_pages
        });
    }
    r->batch.n_micro = hd_model_n_micro(r->model, &r->batch);
    assert_int_equal(r->batch.n_micro, MICRO);
    hd_batch_upload(&r->batch, r->stream[0]);
}

/* Downloads the logits of a step, and synchronizes the compute lane alone. */
static void keep(const rank *r, float *out) {
    hd_err err = {0};
    hd_stream_download(r->stream[0], out, hd_model_logits(r->model),
                       SEQS * (size_t)r->spec->vocab * sizeof *out);
    if (hd_stream_sync(r->stream[0], &err) != HD_OK) fail_msg("%s", err.msg);
}

static void run_step(const rank *r) {
    hd_err err = {0};
    hd_graph *graph;
    if (r->on != CAPTURED) {
        hd_model_step(r->model, r->kv, &r->batch);
        return;
    }
    assert_int_equal(hd_stream_sync(r->stream[0], NULL), HD_OK);
    hd_stream_begin_capture(r->stream[0]);
    hd_model_step(r->model, r->kv, &r->batch);
    if (hd_stream_end_capture(r->stream[0], &graph, &err) != HD_OK) fail_msg("%s", err.msg);
    hd_stream_launch(r->stream[0], graph);
    assert_int_equal(hd_stream_sync(r->stream[0], NULL), HD_OK);
    hd_graph_close(graph);
}

/* A prompt, one token more, and a draft: the logits [STEPS, SEQS, vocab]; free() them. */
static float *run_steps(rank *r) {
    const size_t n = (size_t)SEQS * (size_t)r->spec->vocab;
    float *logits = calloc(STEPS * n, sizeof *logits);
    assert_non_null(logits);
    write_rows(r, 0, PROMPT);
    run_step(r);
    keep(r, logits);
    write_rows(r, PROMPT, 1);
    run_step(r);
    keep(r, logits + n);
    if (r->spec->n_mtp == 0) return logits;
    hd_model_draft(r->model, r->kv, &r->batch, false);
    keep(r, logits + 2 * n);
    return logits;
}

static bool same(const hd_model_spec *spec, const float *a, const float *b) {
    return memcmp(a, b, (size_t)STEPS * SEQS * (size_t)spec->vocab * sizeof *a) == 0;
}

/* Returns whether a rank with three streams in this order computes want. */
static bool agrees(const hd_model_spec *spec, const hd_parallel_config *parallel, streams use,
                   const int32_t *order, bool ignore, const float *want) {
    rank r;
    open_rank(&r, spec, parallel, ON_QUEUES, QUEUE_STREAMS, use);
    queue_device_prefer(r.device, order);
    queue_device_ignore_events(r.device, ignore);
    float *got = run_steps(&r);
    const bool is_same = same(spec, got, want);
    assert_true(queue_device_waits(r.device) > spec->n_layers);
    free(got);
    close_rank(&r);
    return is_same;
}

static void check_lanes(const char *name, const hd_parallel_config *parallel, streams use) {
    static const int32_t second_first[QUEUE_STREAMS] = {1, 0, 2};
    hd_model_spec *spec = config_open(name);
    rank r;
    open_rank(&r, spec, parallel, ON_CPU, 1, OF_LANES);
    float *want = run_steps(&r);
    close_rank(&r);
    for (size_t k = 0; k < HD_LEN(priorities); k++) {
        if (!agrees(spec, parallel, use, priorities[k], false, want)) {
            fail_msg("%s: other bits in order %zu", name, k);
        }
    }
    assert_false(agrees(spec, parallel, use, second_first, true, want)); /* events are needed */
    free(want);
    hd_model_spec_close(spec);
}

static void check_gpu_lanes(const char *name, const hd_parallel_config *parallel, streams use) {
    hd_model_spec *spec = config_open(name);
    rank r;
    open_rank(&r, spec, parallel, ON_GPU, 1, OF_LANES);
    float *want = run_steps(&r);
    close_rank(&r);
    for (backend on = ON_GPU; on <= CAPTURED; on++) {
        open_rank(&r, spec, parallel, on, QUEUE_STREAMS, use);
        float *got = run_steps(&r);
        if (!same(spec, got, want)) fail_msg("%s: other bits on a GPU's lanes", name);
        free(got);
        close_rank(&r);
    }
    free(want);
    hd_model_spec_close(spec);
}

static void check_streams(streams use) {
    static const char *const names[] = {"tiny_v3", "tiny_v4"};
    const hd_parallel_config configs[] = {hd_parallel_tensor(2), hd_parallel_expert(4, 0)};
    const char *wanted = getenv("HADAL_BACKEND");
    const bool has_gpu = wanted && strcmp(wanted, "cuda") == 0;
    for (size_t i = 0; i < HD_LEN(names); i++) {
        for (size_t k = 0; k < HD_LEN(configs); k++) {
            check_lanes(names[i], &configs[k], use);
            if (has_gpu) check_gpu_lanes(names[i], &configs[k], use);
        }
    }
}

static void lanes_give_the_same_bits(void **state) {
    (void)state;
    check_streams(OF_LANES);
}

static void parts_beside_give_the_same_bits(void **state) {
    (void)state;
    check_streams(OF_PARTS_BESIDE);
}

static hd_batch batch_of(int32_t rows) {
    return (hd_batch){.n_rows = rows};
}

/* There is room for them in one. */
static void steps_of_few_rows_are_not_cut(void **state) {
    (void)state;
    static const int32_t groups[] = {1, ROWS - 4},
                         room[] = {ROWS / 2 + HD_MAX_DRAFTS + 1, ROWS - 4, ROWS};
    hd_model_spec *spec = config_open("tiny_v3");
    const hd_parallel_config experts = hd_parallel_expert(2, 0);
    for (int32_t i = 0; i < 3; i++) {
        rank r;
        micro_from = i == 0 ? 0 : i == 1 ? ROWS - 4 : ROWS + 1;
        open_rank(&r, spec, &experts, ON_CPU, 1, OF_LANES);
        const hd_batch few = batch_of(1), some = batch_of(ROWS - 5), many = batch_of(ROWS - 4);
        hd_batch other = few; /* another attention group has many */
        other.group_rows = groups;
        assert_int_equal(hd_model_n_micro(r.model, &few), 1);
        assert_int_equal(hd_model_n_micro(r.model, &some), i == 0 ? MICRO : 1);
        assert_int_equal(hd_model_n_micro(r.model, &many), i == 2 ? 1 : MICRO);
        assert_int_equal(hd_model_n_micro(r.model, &other), i == 2 ? 1 : MICRO);
        assert_int_equal(r.model->whole_rows, room[i]);
        close_rank(&r);
    }
    micro_from = 0;
    hd_model_spec_close(spec);
}

/* Lanes that are one stream record no event. */
static void one_stream_has_no_events(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("tiny_v3");
    const hd_parallel_config tensor = hd_parallel_tensor(2);
    rank r;
    open_rank(&r, spec, &tensor, ON_CPU, 1, OF_LANES);
    for (int32_t i = 0; i < MICRO; i++) assert_null(r.model->lane_change[i]);
    for (int32_t i = 0; i < HD_N_LANES; i++) {
        assert_ptr_equal(r.model->lanes[i], r.stream[0]);
    }
    free(run_steps(&r));
    close_rank(&r);
    hd_model_spec_close(spec);
}

int test_lanes(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_follow_each_other_over_lanes),
        cmocka_unit_test(lanes_give_the_same_bits),
        cmocka_unit_test(parts_beside_give_the_same_bits),
        cmocka_unit_test(steps_of_few_rows_are_not_cut),
        cmocka_unit_test(one_stream_has_no_events),
    };
    return cmocka_run_group_tests_name("lanes", tests, NULL, NULL);
}
