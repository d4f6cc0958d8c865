/* test_ranks.c - tensor and expert parallelism: a sharded model computes what the complete
 * model computes.
 *
 * All ranks of a parallel config run in this process, a thread each (comm/local.h). With tensor parallelism every rank has the same rows, and logits agree to
 * rounding. With expert parallelism every rank has its own rows, and each gets the bits it
 * would get alone. */
#include "check.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/cpu.h"
#include "base/random_fill.h"
#include "comm/local.h"
#include "model/model.h"
#include "weights/configs.h"

enum {
    MAX_RANKS = 8,
    PROMPT = 70,
    SEQS = 2,
    ROWS = PROMPT * SEQS,
    POSITIONS = 128,
    STEPS = 3,
    MAX_SLOTS = 96
};

/* ---- one rank ---- */

typedef struct rank {
    hd_comm_local *world; /* NULL: alone */
    int32_t number, n;
    int32_t n_micro; /* micro-batches of a step: 1, or one per sequence */
    const hd_model_spec *spec;
    const hd_weights *whole;
    hd_parallel_config parallel;
    bool rotates;         /* the experts of each rank's slots change before every step */
    float *logits[STEPS]; /* [SEQS, vocab] */
    hd_err err;
} rank;

typedef struct body {
    hd_device *device;
    hd_stream *stream;
    hd_weights *weights;
    hd_model *model;
    hd_kv *kv;
    hd_batch batches[SEQS]; /* [n_micro] */
    hd_ops ops;
    const hd_comm *comm;
    int32_t pages[SEQS][POSITIONS];
    int32_t n_pages;
} body;

static hd_status open_body(body *b, rank *r) {
    hd_err *err = &r->err;
    const hd_cpu_options one = {.n_threads = 1};
    HD_TRY(hd_device_open_cpu(&b->device, &one, err));
    HD_TRY(hd_stream_open(&b->stream, b->device, err));
    hd_ops_init_cpu(&b->ops, hd_cpu_features(), HD_EXACT);
    HD_TRY(hd_weights_open_shards(&b->weights, r->whole, &r->parallel, r->number, err));
    hd_model_env env = {.spec = r->spec,
                        .weights = b->weights,
                        .ops = &b->ops,
                        .device = b->device,
                        .stream = b->stream};
    if (r->world) {
        HD_TRY(hd_comm_local_join(r->world, r->number, b->device, &b->ops, &b->comm, err));
    }
    env.comm = b->comm;
    const int32_t choices = r->n * ROWS * r->spec->route.top_k;
    const hd_model_limits limits = {
        .rows = ROWS, .logits = SEQS, .positions = POSITIONS, .expert_rows = choices};
    HD_TRY(hd_model_open(&b->model, &env, &limits, r->n_micro, err));
    b->n_pages = (int32_t)hd_ceil_div(POSITIONS, hd_kv_shape_of(r->spec).page_tokens);
    for (int32_t i = 0; i < SEQS * b->n_pages; i++) {
        b->pages[i / b->n_pages][i % b->n_pages] = i;
    }
    const hd_kv_options kv = {
        .n_pages = {SEQS * b->n_pages, SEQS * b->n_pages}
    };
    HD_TRY(
        hd_kv_open(&b->kv, r->spec, r->spec->n_layers + r->spec->n_mtp, b->device, &kv, err));
    const hd_batch_limits batch = {ROWS, SEQS, b->n_pages};
    for (int32_t i = 0; i < r->n_micro; i++) {
        HD_TRY(hd_batch_open(&b->batches[i], &batch, b->device, err));
    }
    return HD_OK;
}

static void close_body(body *b) {
    for (int32_t i = 0; i < SEQS; i++) hd_batch_close(&b->batches[i]);
    hd_kv_close(b->kv);
    hd_model_close(b->model);
    hd_weights_close(b->weights);
    hd_stream_close(b->stream);
    hd_device_close(b->device);
}

/* Ranks of a tensor-parallel config have the same rows, others their own. */
static void write_rows(body *b, const rank *r, int32_t start, int32_t n) {
    const int32_t owner = r->parallel.dp > 1 ? r->number : 0;
    int32_t tokens[PROMPT];
    for (int32_t i = 0; i < r->n_micro; i++) hd_batch_reset(&b->batches[i]);
    for (int32_t q = 0; q < SEQS; q++) {
        for (int32_t i = 0; i < n; i++) {
            const int32_t at = start + i + 37 * q + 101 * owner;
            tokens[i] =
                (int32_t)(hd_random_fill_at(7, (uint64_t)at) % (uint64_t)r->spec->vocab);
        }
        hd_batch_add(&b->batches[q % r->n_micro], &(hd_batch_seq){
                                                      .tokens = tokens,
                                                      .n = n,
                                                      .start = start,
                                                      .after = tokens[0],
                                                      .n_logits = 1,
                                                      .pages = {b->pages[q], b->pages[q]},
                                                      .n_pages = b->n_pages
        });
    }
    for (int32_t i = 0; i < r->n_micro; i++) hd_batch_upload(&b->batches[i], b->stream);
}

static void keep(const body *b, const rank *r, int32_t step) {
    const size_t n = SEQS / (size_t)r->n_micro * (size_t)r->spec->vocab;
    for (int32_t i = 0; i < r->n_micro; i++) {
        memcpy(r->logits[step] + (size_t)i * n, hd_model_logits(b->model, i),
               n * sizeof(float));
    }
}

/* Every slot gets the expert of the rank's next slot, in all layers. */
static void rotate_slots(body *b, const rank *r) {
    const int32_t own = hd_weights_shard(b->weights)->n_experts;
    for (int32_t l = 0; r->rotates && l < r->spec->n_layers + r->spec->n_mtp; l++) {
        const hd_expert_map *map = hd_weights_expert_map(b->weights, l);
        int32_t expert[MAX_SLOTS];
        if (!map) continue;
        assert_true(map->n_slots <= MAX_SLOTS);
        for (int32_t s = 0; s < map->n_slots; s++) {
            expert[s] = map->expert[s / own * own + (s + 1) % own];
        }
        assert_int_equal(hd_weights_place_experts(b->weights, l, expert, b->stream, NULL),
                         HD_OK);
    }
}

/* Runs a prompt, one token more, and its draft if there is an MTP layer. */
static void run_body(body *b, const rank *r) {
    hd_batch *batches[SEQS];
    for (int32_t i = 0; i < r->n_micro; i++) batches[i] = &b->batches[i];
    rotate_slots(b, r);
    write_rows(b, r, 0, PROMPT);
    hd_model_step(b->model, b->kv, batches, r->n_micro);
    keep(b, r, 0);
    rotate_slots(b, r);
    write_rows(b, r, PROMPT, 1);
    hd_model_step(b->model, b->kv, batches, r->n_micro);
    keep(b, r, 1);
    if (r->spec->n_mtp == 0) return;
    hd_model_draft(b->model, b->kv, batches, r->n_micro, false);
    keep(b, r, 2);
}

/* A rank that fails ends communication, or the others would wait for it. */
static void *run_rank(void *arg) {
    rank *r = arg;
    body b = {0};
    hd_status st = open_body(&b, r);
    if (st == HD_OK) {
        run_body(&b, r);
        st = hd_stream_sync(b.stream, &r->err);
    }
    if (st != HD_OK) hd_comm_local_abort(r->world, r->err.msg);
    close_body(&b);
    return NULL;
}

/* ---- worlds ---- */

static void open_rank(rank *r, int32_t number, const hd_weights *whole,
                      const hd_model_spec *spec, const hd_parallel_config *parallel) {
    *r = (rank){.number = number,
                .n = hd_parallel_world(parallel),
                .n_micro = 1,
                .whole = whole,
                .spec = spec,
                .parallel = *parallel};
    for (int i = 0; i < STEPS; i++) {
        r->logits[i] = calloc(SEQS * (size_t)spec->vocab, sizeof(float));
        assert_non_null(r->logits[i]);
    }
}

static void close_rank(rank *r) {
    for (int i = 0; i < STEPS; i++) free(r->logits[i]);
}

static void run_world(rank *ranks, const hd_parallel_config *parallel, const hd_weights *whole,
                      const hd_model_spec *spec, int32_t n_micro, bool rotates) {
    pthread_t threads[MAX_RANKS];
    hd_comm_local *world;
    const int32_t n = hd_parallel_world(parallel);
    assert_true(n <= MAX_RANKS);
    assert_int_equal(hd_comm_local_open(&world, parallel, NULL), HD_OK);
    for (int32_t k = 0; k < n; k++) {
        open_rank(&ranks[k], k, whole, spec, parallel);
        ranks[k].world = world;
        ranks[k].n_micro = n_micro;
        ranks[k].rotates = rotates;
    }
    for (int32_t k = 0; k < n; k++) {
        assert_int_equal(pthread_create(&threads[k], NULL, run_rank, &ranks[k]), 0);
    }
    for (int32_t k = 0; k < n; k++) pthread_join(threads[k], NULL);
    hd_comm_local_close(world);
    for (int32_t k = 0; k < n; k++) {
        if (ranks[k].err.status != HD_OK) fail_msg("rank %d: %s", k, ranks[k].err.msg);
    }
}

/* Randomizes vectors that dummy weights leave at zero, so that a wrong part of them is
 * detected. */
static void stir(const hd_weights *w, const hd_model_spec *spec, hd_role role, int32_t n) {
    for (int32_t l = 0; l < spec->n_layers + spec->n_mtp; l++) {
        float *v;
        const float *at = hd_weights_vector(w, l, role);
        if (!at) continue;
        memcpy(&v, &at, sizeof v); /* the complete weights are owned by this test */
        for (int32_t i = 0; i < n; i++) {
            v[i] = (float)(hd_random_fill_at((uint64_t)l, (uint64_t)i) % 1000) / 1000.0f - 0.5f;
        }
    }
}

static hd_weights *make_weights(const hd_model_spec *spec) {
    hd_weights *w;
    assert_int_equal(hd_weights_open_dummy(&w, spec, NULL, NULL), HD_OK);
    stir(w, spec, HD_SINK, spec->n_heads);
    stir(w, spec, HD_ROUTER_BIAS, spec->route.n_experts);
    return w;
}

static double largest(const float *x, size_t n) {
    double most = 0;
    for (size_t i = 0; i < n; i++) most = fmax(most, fabs((double)x[i]));
    return most;
}

static void assert_near(const float *got, const float *want, size_t n, const char *what) {
    const double scale = largest(want, n);
    assert_true(scale > 0.01 && scale < 1e3);
    for (size_t i = 0; i < n; i++) {
        const double off = fabs((double)got[i] - (double)want[i]);
        if (!(off <= 1e-4 * scale)) {
            fail_msg("%s: logit %zu is %g, whole %g", what, i, (double)got[i], (double)want[i]);
        }
    }
}

static const char *const names[] = {"tiny_v2", "tiny_v3", "tiny_v32", "tiny_v4"};

/* Under the thread sanitizer two families suffice. */
static size_t next_name(size_t k) {
    return is_brief() ? k + 2 : k + 1;
}

static int steps_of(const hd_model_spec *spec) {
    return spec->n_mtp ? STEPS : STEPS - 1;
}

static void test_tensor_ranks(void **state) {
    (void)state;
    for (size_t k = next_name(0) - 1; k < HD_LEN(names); k = next_name(k)) {
        hd_model_spec *spec = config_open(names[k]);
        hd_weights *whole = make_weights(spec);
        const size_t n = SEQS * (size_t)spec->vocab;
        const hd_parallel_config single = hd_parallel_single(), two = hd_parallel_tensor(2);
        rank alone, ranks[MAX_RANKS];
        run_world(&alone, &single, whole, spec, 1, false);
        run_world(ranks, &two, whole, spec, 1, false);
        for (int i = 0; i < steps_of(spec); i++) {
            assert_near(ranks[0].logits[i], alone.logits[i], n, names[k]);
            assert_memory_equal(ranks[0].logits[i], ranks[1].logits[i], n * sizeof(float));
        }
        for (int32_t r = 0; r < 2; r++) close_rank(&ranks[r]);
        close_rank(&alone);
        hd_weights_close(whole);
        hd_model_spec_close(spec);
    }
}

/* A rank of a larger world computes what it computes alone with the same rows, also when its
 * rows travel while another micro-batch computes. */
static void check_expert_world(const char *name, int32_t ep, int32_t redundant, int32_t n_micro,
                               bool rotates) {
    hd_model_spec *spec = config_open(name);
    hd_weights *whole = make_weights(spec);
    const size_t bytes = SEQS * (size_t)spec->vocab * sizeof(float);
    const hd_parallel_config spread = hd_parallel_expert(ep, redundant);
    rank ranks[MAX_RANKS];
    run_world(ranks, &spread, whole, spec, n_micro, rotates);
    for (int32_t r = 0; r < ep; r++) {
        rank alone;
        body b = {0};
        const hd_parallel_config single = hd_parallel_single();
        open_rank(&alone, 0, whole, spec, &single);
        assert_int_equal(open_body(&b, &alone), HD_OK);
        alone.number = r; /* the rows of that rank */
        alone.parallel.dp = ep;
        run_body(&b, &alone);
        for (int i = 0; i < steps_of(spec); i++) {
            assert_memory_equal(ranks[r].logits[i], alone.logits[i], bytes);
        }
        close_body(&b);
        close_rank(&alone);
    }
    for (int32_t r = 0; r < ep; r++) close_rank(&ranks[r]);
    hd_weights_close(whole);
    hd_model_spec_close(spec);
}

static void test_expert_ranks(void **state) {
    (void)state;
    for (size_t k = next_name(0) - 1; k < HD_LEN(names); k = next_name(k)) {
        check_expert_world(names[k], 4, 0, 1, false);
    }
    check_expert_world("tiny_v3", 3, 2, SEQS, false);
    check_expert_world("tiny_v4", 3, 6, SEQS, false);
}

/* Ranks with rows in common and complete experts: the bits of one rank if no head is cut, also
 * if there are fewer rows than ranks. */
static void check_common_world(const char *name, int32_t tp, int32_t ep, int32_t n_micro,
                               bool rotates) {
    hd_model_spec *spec = config_open(name);
    hd_weights *whole = make_weights(spec);
    const size_t n = SEQS * (size_t)spec->vocab;
    const hd_parallel_config single = hd_parallel_single();
    const hd_parallel_config common = hd_parallel_common(tp, ep, spec);
    rank alone, ranks[MAX_RANKS];
    run_world(&alone, &single, whole, spec, 1, false);
    run_world(ranks, &common, whole, spec, n_micro, rotates);
    for (int32_t r = 0; r < ep; r++) {
        for (int i = 0; i < steps_of(spec); i++) {
            if (tp > 1) assert_near(ranks[r].logits[i], alone.logits[i], n, name);
            assert_memory_equal(ranks[r].logits[i], (tp > 1 ? &ranks[0] : &alone)->logits[i],
                                n * sizeof(float));
        }
    }
    for (int32_t r = 0; r < ep; r++) close_rank(&ranks[r]);
    close_rank(&alone);
    hd_weights_close(whole);
    hd_model_spec_close(spec);
}

static void test_common_rows(void **state) {
    (void)state;
    for (size_t k = next_name(0) - 1; k < HD_LEN(names); k = next_name(k)) {
        check_common_world(names[k], 1, 4, 1, false);
        check_common_world(names[k], 2, 2, 1, false);
    }
    check_common_world("tiny_v3", 1, 2, SEQS, true);
    check_common_world("tiny_v4", 1, 4, SEQS, false);
}

/* Experts that change their slots before every step change no bit, with copies too. */
static void test_moving_experts(void **state) {
    (void)state;
    check_expert_world("tiny_v3", 1, 0, 1, true);
    check_expert_world("tiny_v32", 4, 0, 1, true);
    check_expert_world("tiny_v3", 3, 2, SEQS, true);
    check_expert_world("tiny_v4", 3, 6, 1, true);
}

/* A shard without communication, and parallel configs that no stage supports, are refused. */
static void test_refusals(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("tiny_v3");
    hd_weights *whole = make_weights(spec);
    hd_parallel_config mixed = hd_parallel_tensor(2);
    mixed.etp = 1;
    mixed.ep = 2;
    const hd_parallel_config parallel_configs[] = {hd_parallel_tensor(2), mixed};
    static const char *const why[] = {"needs its other ranks", "must both be tp"};
    for (size_t i = 0; i < HD_LEN(parallel_configs); i++) {
        hd_weights *w;
        hd_model *m;
        hd_ops ops;
        hd_err err = {0};
        hd_ops_init_ref(&ops);
        assert_int_equal(hd_weights_open_shards(&w, whole, &parallel_configs[i], 0, &err),
                         HD_OK);
        const hd_model_env env = {.spec = spec, .weights = w, .ops = &ops};
        const hd_model_limits limits = {1, 1, 1, 0};
        assert_int_not_equal(hd_model_open(&m, &env, &limits, 1, &err), HD_OK);
        assert_non_null(strstr(err.msg, why[i]));
        hd_weights_close(w);
    }
    hd_weights_close(whole);
    hd_model_spec_close(spec);
}

int test_ranks(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tensor_ranks), cmocka_unit_test(test_expert_ranks),
        cmocka_unit_test(test_common_rows),  cmocka_unit_test(test_moving_experts),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests_name("ranks", tests, NULL, NULL);
}
