/* test_gradients.c - gradients of whole models against slopes of the loss that an independent
 * program in float64 measured (tests/reference/gradients.py), for every tensor of each case;
 * and micro-batches that change no bit. */
#include "check.h"

#include <math.h>
#include <stdio.h>

#include "base/checked.h"
#include "base/json.h"
#include "kv/replay.h"
#include "train/trainer.h"

enum { PARTS = 5 }; /* of numbers: factors, log-probabilities, entropies; the MTP layer's two */

static const char *backend; /* under test */

static const char *const cases[] = {"v2_plain", "v3_small_mtp", "v32_rope_mtp", "v4_small_mtp"};

typedef struct rig {
    char dir[64];
    hd_model_spec *spec;
    hd_weights *weights;
    hd_trainer *trainer;
    json_t *tokens, *slopes;
    int32_t *ids;
    int32_t n;
    float *numbers;   /* [PARTS, n] */
    hd_dtype kv_type; /* of the trainer */
} rig;

static json_t *load(const rig *r, const char *name) {
    char path[100];
    json_t *out;
    snprintf(path, sizeof path, "%s/%s", r->dir, name);
    assert_int_equal(hd_json_load(&out, path, 1 << 24, NULL), HD_OK);
    return out;
}

/* mtp: with 0.3 times the MTP layer's mean loss */
static void open_rig(rig *r, const char *name, bool mtp) {
    *r = (rig){.n = 0};
    snprintf(r->dir, sizeof r->dir, "tests/golden/%s", name);
    r->tokens = load(r, "tokens.json");
    r->slopes = load(r, mtp ? "slopes_mtp.json" : "slopes.json");
    r->n = (int32_t)json_array_size(r->tokens);
    r->ids = calloc((size_t)r->n, sizeof *r->ids);
    r->numbers = calloc(PARTS * (size_t)r->n, sizeof *r->numbers);
    assert_true(r->ids && r->numbers);
    for (int32_t i = 0; i < r->n; i++) {
        r->ids[i] = (int32_t)json_integer_value(json_array_get(r->tokens, (size_t)i));
        r->numbers[i] = 1.0f / (float)(r->n - 1);
        r->numbers[3 * r->n + i] = 0.3f / (float)(r->n - 2);
    }
    assert_int_equal(hd_model_spec_open(&r->spec, r->dir, NULL), HD_OK);
    assert_int_equal(hd_weights_open_updatable(&r->weights, r->dir, r->spec, NULL), HD_OK);
}

static void open_trainer(rig *r, int32_t rows, int32_t threads, bool mtp) {
    const hd_trainer_options o = {.spec = r->spec,
                                  .weights = r->weights,
                                  .upload = r->weights,
                                  .rows = rows,
                                  .context = r->n,
                                  .drafts = mtp,
                                  .backend = backend,
                                  .kv_type = r->kv_type,
                                  .threads = threads,
                                  .keep_bytes = threads > 1 ? 1 << 30 : 0};
    assert_int_equal(hd_trainer_open(&r->trainer, &o, NULL), HD_OK);
}

static void close_rig(rig *r) {
    hd_trainer_close(r->trainer);
    hd_weights_close(r->weights);
    hd_model_spec_close(r->spec);
    json_decref(r->tokens);
    json_decref(r->slopes);
    free(r->ids);
    free(r->numbers);
}

/* The first n tokens, of which all but one have a loss. */
static hd_train_sequence sequence(const rig *r, int32_t n) {
    return (hd_train_sequence){.tokens = r->ids,
                               .n = n,
                               .first = 1,
                               .factor = r->numbers,
                               .logprob = r->numbers + r->n,
                               .entropy = r->numbers + 2 * (int64_t)r->n,
                               .draft_factor = r->numbers + 3 * (int64_t)r->n,
                               .draft_logprob = r->numbers + 4 * (int64_t)r->n};
}

/* Element i of direction k, as in gradients.py. */
static double sign(uint64_t i, uint64_t k) {
    uint64_t z = i + (k << 40) + 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z = z ^ (z >> 31);
    return z & 1 ? -1.0 : 1.0;
}

/* A parameter's gradient in host memory, which the caller frees. */
static float *take_gradient(const rig *r, const hd_parameter *p) {
    const size_t bytes = (size_t)p->rows * (size_t)p->cols * sizeof(float);
    float *out = malloc(bytes);
    assert_non_null(out);
    hd_stream_download(hd_trainer_stream(r->trainer), out, p->grad, bytes);
    assert_int_equal(hd_stream_sync(hd_trainer_stream(r->trainer), NULL), HD_OK);
    return out;
}

static void check_parameter(const rig *r, const hd_parameter *p) {
    float *grad = take_gradient(r, p);
    const json_t *slopes = json_object_get(json_object_get(r->slopes, "tensors"), p->name);
    const uint64_t n = (uint64_t)p->rows * (uint64_t)p->cols;
    double square = 0.0;
    if (!slopes) fail_msg("%s: %s has no slopes", r->dir, p->name);
    for (uint64_t i = 0; i < n; i++) square += (double)grad[i] * (double)grad[i];
    for (uint64_t k = 0; k < json_array_size(slopes); k++) {
        const double want = json_real_value(json_array_get(slopes, k));
        double got = 0.0;
        for (uint64_t i = 0; i < n; i++) got += sign(i, k) * (double)grad[i];
        if (!(fabs(got - want) <= 1e-4 * sqrt(square) + 1e-7)) {
            fail_msg("%s: %s: slope %llu is %.9g, not %.9g; the gradient's length is %.3g",
                     r->dir, p->name, (unsigned long long)k, got, want, sqrt(square));
        }
    }
    free(grad);
}

static void check_slopes(const char *name, bool mtp) {
    rig r;
    int32_t n;
    double loss = 0.0;
    open_rig(&r, name, mtp);
    open_trainer(&r, r.n, 2, mtp);
    const hd_train_sequence s = sequence(&r, r.n);
    assert_int_equal(hd_trainer_accumulate(r.trainer, &s, 1, NULL), HD_OK);
    assert_int_equal(hd_trainer_finish_gradients(r.trainer, NULL), HD_OK);
    for (int32_t k = 0; k < r.n - 1; k++) loss -= (double)s.logprob[k] / (r.n - 1);
    for (int32_t k = 1; mtp && k < r.n - 1; k++)
        loss -= 0.3 * (double)s.draft_logprob[k] / (r.n - 2);
    assert_true(fabs(loss - json_real_value(json_object_get(r.slopes, "loss"))) < 1e-5);
    const hd_parameter *all = hd_parameters_all(hd_trainer_parameters(r.trainer), &n);
    assert_int_equal(n, json_object_size(json_object_get(r.slopes, "tensors")));
    for (int32_t k = 0; k < n; k++) check_parameter(&r, &all[k]);
    close_rig(&r);
}

static void gradients_are_slopes(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(cases); i++) check_slopes(cases[i], false);
}

static bool has_mtp(const char *name) {
    return strstr(name, "_mtp") != NULL;
}

/* Also of what the MTP layer shares with the main model. */
static void gradients_of_the_mtp_loss_are_slopes(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        if (has_mtp(cases[i])) check_slopes(cases[i], true);
    }
}

/* With a detached MTP layer the main model's gradients are those without its loss, bit for bit, and the
 * layer's own are those with it. */
static void a_detached_mtp_layer_moves_itself_alone(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        rig r[3]; /* without the loss, detached, attached */
        int32_t n[3];
        if (!has_mtp(cases[i])) continue;
        for (int k = 0; k < 3; k++) {
            open_rig(&r[k], cases[i], false);
            const hd_trainer_options o = {.spec = r[k].spec,
                                          .weights = r[k].weights,
                                          .upload = r[k].weights,
                                          .rows = r[k].n,
                                          .context = r[k].n,
                                          .drafts = true,
                                          .backend = backend,
                                          .detached = k == 1};
            assert_int_equal(hd_trainer_open(&r[k].trainer, &o, NULL), HD_OK);
            hd_train_sequence s = sequence(&r[k], r[k].n);
            if (k == 0) s.draft_factor = NULL;
            assert_int_equal(hd_trainer_accumulate(r[k].trainer, &s, 1, NULL), HD_OK);
            assert_int_equal(hd_trainer_finish_gradients(r[k].trainer, NULL), HD_OK);
        }
        const hd_parameter *p[3];
        for (int k = 0; k < 3; k++) {
            p[k] = hd_parameters_all(hd_trainer_parameters(r[k].trainer), &n[k]);
        }
        for (int32_t j = 0; j < n[0]; j++) {
            const bool own = hd_parameters_is_draft(hd_trainer_parameters(r[0].trainer), j);
            const size_t bytes = (size_t)p[0][j].rows * (size_t)p[0][j].cols * sizeof(float);
            float *detached = take_gradient(&r[1], &p[1][j]);
            float *other = take_gradient(&r[own ? 2 : 0], &p[own ? 2 : 0][j]);
            assert_memory_equal(detached, other, bytes);
            free(detached);
            free(other);
        }
        for (int k = 0; k < 3; k++) close_rig(&r[k]);
    }
}

/* The gradients of all parameters, one after another. */
static float *all_gradients(const rig *r, int64_t *n) {
    int32_t n_parameters;
    assert_int_equal(hd_trainer_finish_gradients(r->trainer, NULL), HD_OK);
    const hd_parameters *p = hd_trainer_parameters(r->trainer);
    const hd_parameter *all = hd_parameters_all(p, &n_parameters);
    float *out = malloc((size_t)hd_parameters_count(p) * sizeof *out);
    assert_non_null(out);
    *n = 0;
    for (int32_t i = 0; i < n_parameters; i++) {
        const int64_t size = (int64_t)all[i].rows * all[i].cols;
        float *grad = take_gradient(r, &all[i]);
        memcpy(out + *n, grad, (size_t)size * sizeof *out);
        free(grad);
        *n += size;
    }
    return out;
}

/* Gradients of three sequences in one micro-batch, or each in one of its own, on other threads. */
static float *gradients_of(const char *name, hd_dtype kv_type, bool together, int64_t *n) {
    rig r;
    open_rig(&r, name, false);
    r.kv_type = kv_type;
    open_trainer(&r, together ? 3 * r.n : r.n - 1, together ? 3 : 1, has_mtp(name));
    const hd_train_sequence s[] = {sequence(&r, 5), sequence(&r, r.n), sequence(&r, 40)};
    assert_int_equal(hd_trainer_accumulate(r.trainer, s, HD_LEN(s), NULL), HD_OK);
    float *all = all_gradients(&r, n);
    close_rig(&r);
    return all;
}

static void check_micro_batches(hd_dtype kv_type) {
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        int64_t n;
        float *first = gradients_of(cases[i], kv_type, true, &n);
        float *all = gradients_of(cases[i], kv_type, false, &n);
        assert_memory_equal(first, all, (size_t)n * sizeof *all);
        free(first);
        free(all);
    }
}

static void micro_batches_change_no_bit(void **state) {
    (void)state;
    check_micro_batches(HD_NONE);
}

/* A model that selects nothing: there rounded keys change gradients by little. */
static void rounded_caches_are_trained_with(void **state) {
    (void)state;
    static const struct {
        hd_dtype type;
        double most;
    } types[] = {
        {HD_BF16, 0.03},
        {HD_E4M3, 0.3 }
    };
    int64_t n;
    float *exact = gradients_of("v2_plain", HD_NONE, true, &n);
    for (size_t k = 0; k < HD_LEN(types); k++) {
        check_micro_batches(types[k].type);
        float *all = gradients_of("v2_plain", types[k].type, true, &n);
        double square = 0, off = 0;
        for (int64_t i = 0; i < n; i++) {
            square += (double)exact[i] * (double)exact[i];
            off += pow((double)all[i] - (double)exact[i], 2);
        }
        const double away = sqrt(off / square);
        if (!(away > 1e-4 && away < types[k].most)) fail_msg("%g away", away);
        free(all);
    }
    free(exact);
}

/* The routers' biases after a step. */
static float *balanced(const rig *r, int64_t *n) {
    int32_t n_parameters;
    hd_weights_update *u;
    hd_optimizer_report report;
    assert_int_equal(hd_trainer_step(r->trainer, &u, &report, NULL), HD_OK);
    hd_weights_update_close(u);
    const hd_parameters *p = hd_trainer_parameters(r->trainer);
    const hd_parameter *all = hd_parameters_all(p, &n_parameters);
    float *out = malloc((size_t)hd_parameters_count(p) * sizeof *out);
    assert_non_null(out);
    *n = 0;
    for (int32_t i = 0; i < n_parameters; i++) {
        const int64_t size = (int64_t)all[i].rows * all[i].cols;
        if (all[i].kind != HD_UPDATE_BALANCE) continue;
        hd_stream_download(hd_trainer_stream(r->trainer), out + *n, all[i].master,
                           (size_t)size * sizeof *out);
        *n += size;
    }
    assert_int_equal(hd_stream_sync(hd_trainer_stream(r->trainer), NULL), HD_OK);
    assert_true(*n > 0);
    return out;
}

/* A sequence of two tokens has a row in the MTP layer and no loss there. The row's experts count, whether
 * or not others of its micro-batch have such a loss. */
static void loads_do_not_depend_on_micro_batches(void **state) {
    enum { SHORT = 48 };
    (void)state;
    int64_t n[2];
    float *biases[2];
    for (int pass = 0; pass < 2; pass++) {
        rig r;
        open_rig(&r, "v3_small_mtp", false);
        const hd_trainer_options o = {.spec = r.spec,
                                      .weights = r.weights,
                                      .upload = r.weights,
                                      .rows = pass ? r.n - 1 : r.n + SHORT,
                                      .context = r.n,
                                      .drafts = true,
                                      .balance = 0.25,
                                      .backend = backend,
                                      .optimizer = {.eps = 1e-8}};
        assert_int_equal(hd_trainer_open(&r.trainer, &o, NULL), HD_OK);
        hd_train_sequence s[SHORT + 1];
        for (int i = 0; i <= SHORT; i++) s[i] = sequence(&r, i < SHORT ? 2 : r.n);
        assert_int_equal(hd_trainer_accumulate(r.trainer, s, SHORT + 1, NULL), HD_OK);
        biases[pass] = balanced(&r, &n[pass]);
        close_rig(&r);
    }
    assert_int_equal(n[0], n[1]);
    assert_memory_equal(biases[0], biases[1], (size_t)n[0] * sizeof *biases[0]);
    free(biases[0]);
    free(biases[1]);
}

static double sum_logprobs(rig *r, const int32_t *routes, const int32_t *keys,
                           const float **grads, int64_t *n) {
    hd_train_sequence s = sequence(r, r->n);
    double sum = 0.0;
    s.routes = routes;
    s.keys = keys;
    hd_parameters_clear_gradients(hd_trainer_parameters(r->trainer),
                                  hd_trainer_stream(r->trainer));
    assert_int_equal(hd_trainer_accumulate(r->trainer, &s, 1, NULL), HD_OK);
    *grads = hd_gradients_all(hd_parameters_gradients(hd_trainer_parameters(r->trainer)), n);
    for (int32_t i = 0; i < r->n - 1; i++) sum += (double)s.logprob[i];
    return sum;
}

/* Other experts than the routers' change the loss and are counted; one that does not exist is refused. */
static void given_routes_are_used(void **state) {
    (void)state;
    rig r;
    int64_t n;
    const float *grads;
    open_rig(&r, "v3_small_mtp", false);
    open_trainer(&r, r.n, 2, false);
    const int32_t layers = r.spec->n_layers, top_k = r.spec->route.top_k;
    const int64_t all = (int64_t)(r.n - 1) * layers * top_k;
    int32_t *routes = calloc((size_t)all, sizeof *routes);
    assert_non_null(routes);
    for (int64_t i = 0; i < all; i++) { /* top_k experts in a row */
        routes[i] = (int32_t)((i / top_k + i % top_k) % r.spec->route.n_experts);
    }
    const double own = sum_logprobs(&r, NULL, NULL, &grads, &n);
    assert_int_equal(hd_trainer_replayed(r.trainer).routed, 0);
    const double given = sum_logprobs(&r, routes, NULL, &grads, &n);
    const hd_replay_count count = hd_trainer_replayed(r.trainer);
    assert_true(own != given && count.other_experts > 0 &&
                count.other_experts <= count.routed && count.indexed == 0);
    assert_true(sum_logprobs(&r, routes, NULL, &grads, &n) == given);
    routes[(int64_t)(layers - 1) * top_k] = r.spec->route.n_experts; /* of a MoE layer */
    hd_train_sequence s = sequence(&r, r.n);
    s.routes = routes;
    assert_int_equal(hd_trainer_accumulate(r.trainer, &s, 1, NULL), HD_EINVAL);
    free(routes);
    close_rig(&r);
}

/* Keys that a row sees and its indexer may not select: the first ones change the loss where there are more,
 * and keys that cannot be are refused. */
static void given_keys_are_used(void **state) {
    (void)state;
    static const char *const indexed[] = {"v32_rope_mtp", "v4_small_mtp"};
    for (size_t i = 0; i < HD_LEN(indexed); i++) {
        rig r;
        int64_t n;
        const float *grads;
        open_rig(&r, indexed[i], false);
        open_trainer(&r, r.n, 2, false);
        const hd_replay_shape shape = hd_replay_shape_of(r.spec, HD_REPLAY_KEYS);
        const int64_t row = (int64_t)shape.layers * shape.top_k;
        int32_t *keys = calloc((size_t)((r.n - 1) * row), sizeof *keys);
        int32_t more = 0; /* rows that see more than are selected */
        assert_non_null(keys);
        for (int32_t l = 0; l < r.spec->n_layers; l++) {
            const int32_t at = hd_replay_layer(r.spec, HD_REPLAY_KEYS, l);
            const int32_t ratio = hd_max_i32(r.spec->layers[l].compress_ratio, 1);
            for (int32_t p = 0; at >= 0 && p < r.n - 1; p++) {
                const int32_t seen = (p + 1) / ratio;
                more += seen > shape.top_k;
                for (int32_t k = 0; k < shape.top_k; k++)
                    keys[p * row + (int64_t)at * shape.top_k + k] = k < seen ? k : -1;
            }
        }
        const double own = sum_logprobs(&r, NULL, NULL, &grads, &n);
        const double given = sum_logprobs(&r, NULL, keys, &grads, &n);
        const hd_replay_count count = hd_trainer_replayed(r.trainer);
        assert_int_equal(count.routed, 0);
        assert_int_equal(count.indexed % ((int64_t)(r.n - 1) * shape.layers), 0);
        assert_true(count.indexed > 0 && count.other_keys <= count.indexed);
        assert_true(more > 0 && count.other_keys > 0 && own != given);
        assert_true(sum_logprobs(&r, NULL, keys, &grads, &n) == given);
        hd_train_sequence s = sequence(&r, r.n);
        s.keys = keys;
        int32_t *last = keys + (int64_t)(r.n - 2) * row;
        const int32_t wrong[] = {-1, r.n, last[1]};
        for (size_t k = 0; k < HD_LEN(wrong); k++) {
            const int32_t kept = last[0];
            last[0] = wrong[k];
            assert_int_equal(hd_trainer_score(r.trainer, &s, 1, NULL), HD_EINVAL);
            last[0] = kept;
        }
        free(keys);
        close_rig(&r);
    }
}

static void gpus_take_no_choices(void **state) {
    (void)state;
    rig r;
    hd_err err;
    open_rig(&r, "v3_small_mtp", false);
    open_trainer(&r, r.n, 0, false);
    hd_train_sequence s = sequence(&r, r.n);
    s.routes = r.ids;
    assert_int_equal(hd_trainer_score(r.trainer, &s, 1, &err), HD_EUNSUPPORTED);
    assert_string_equal(err.msg, "given experts and keys are for backend cpu");
    close_rig(&r);
}

int test_gradients(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_slopes),
        cmocka_unit_test(gradients_of_the_mtp_loss_are_slopes),
        cmocka_unit_test(a_detached_mtp_layer_moves_itself_alone),
        cmocka_unit_test(given_routes_are_used),
        cmocka_unit_test(given_keys_are_used),
        cmocka_unit_test(micro_batches_change_no_bit),
        cmocka_unit_test(rounded_caches_are_trained_with),
        cmocka_unit_test(loads_do_not_depend_on_micro_batches),
    };
    backend = "cpu";
    int failed = cmocka_run_group_tests_name("gradients", tests, NULL, NULL);
    if (hd_device_count_gpus() == 0) return failed;
    const struct CMUnitTest on_gpu[] = {
        cmocka_unit_test(gradients_are_slopes),
        cmocka_unit_test(gradients_of_the_mtp_loss_are_slopes),
        cmocka_unit_test(a_detached_mtp_layer_moves_itself_alone),
        cmocka_unit_test(micro_batches_change_no_bit),
        cmocka_unit_test(loads_do_not_depend_on_micro_batches),
        cmocka_unit_test(gpus_take_no_choices),
    };
    backend = "cuda";
    failed += cmocka_run_group_tests_name("gradients cuda", on_gpu, NULL, NULL);
    return failed;
}
