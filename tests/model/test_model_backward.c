/* test_model_backward.c - the backward pass of whole models: the gradient of every tensor against
 * differences of the loss.
 *
 * All weights are float32 here, so that they can move by small steps. A tensor moves along its
 * own gradient; the loss must change by the gradient's length. The loss is that of the model's
 * logits, in float64. */
#include "check.h"

#include <math.h>

#include "base/cpu.h"
#include "base/random_fill.h"
#include "model/backward.h"
#include "weights/configs.h"
#include "weights/summary.h"

enum { N_SEQS = 3, ROWS = 160, MOST_LOGITS = 64, POSITIONS = 192 };

typedef struct trained {
    int32_t lengths[N_SEQS];
    hd_model_spec *spec;
    hd_weights *weights;
    hd_device *device;
    hd_stream *stream;
    hd_ops ops;
    hd_backward_ops back_ops;
    hd_model *model, *whole; /* `whole` has room for all logits */
    hd_kv *kv;
    hd_batch batch;
    hd_backward *backward;
    hd_gradients *gradients;
    float **made; /* float32 copies of the schema's tensors */
    int32_t target[ROWS];
    float factor[ROWS], entropy_factor[ROWS], temperature[ROWS], logprob[ROWS], entropy[ROWS],
        divergence[ROWS];
} trained;

static float unit(uint64_t seed, uint64_t i) {
    return (float)(hd_random_fill_at(seed, i) % 20011) / 10007.0f - 1.0f;
}

/* ---- weights in float32 ---- */

static hd_weight *writable(const hd_weight *w) {
    hd_weight *out;
    memcpy(&out, &w, sizeof out); /* this test owns the weights */
    return out;
}

static void use_f32(hd_weight *w, float *values) {
    w->data = values;
    w->scale = NULL;
    w->type = HD_F32;
    w->scale_type = HD_NONE;
    w->block_rows = w->block_cols = 0;
    w->global = 1.0f;
}

/* The matrix that operators read for a tensor, or NULL for vectors. */
static hd_weight *matrix_of(const trained *t, const hd_tensor_decl *d) {
    if (d->rank == 1 || d->role == HD_ROUTER_HASH) return NULL;
    if (d->expert < 0) return writable(hd_weights_matrix(t->weights, d->layer, d->role));
    const hd_expert_table *table = hd_weights_experts(t->weights, d->layer, d->role);
    return writable(&table->slots[d->expert]);
}

static bool is_of_indexer(const hd_tensor_decl *d) {
    return hd_param_group_of(d->role) == HD_PARAM_GROUP_INDEXER;
}

static bool has_gradient(void *ctx, const hd_tensor_decl *d) {
    (void)ctx;
    return hd_gradients_exist(d) || is_of_indexer(d);
}

static void make_f32(trained *t) {
    const hd_schema *schema = hd_weights_schema(t->weights);
    t->made = calloc((size_t)schema->n, sizeof *t->made);
    assert_non_null(t->made);
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        if (d->duplicate || hd_weights_missing(t->weights, i) || !has_gradient(NULL, d))
            continue;
        const int64_t n = (int64_t)d->rows * d->cols;
        const float *vector = hd_weights_vector(t->weights, d->layer, d->role);
        if (vector) { /* stirred, as dummies leave some at zero or one */
            memcpy(&t->made[i], &vector, sizeof vector);
            for (int64_t k = 0; k < n; k++)
                t->made[i][k] += 0.2f * unit((uint64_t)i, (uint64_t)k);
            continue;
        }
        hd_weight *w = matrix_of(t, d);
        float *values = t->made[i] = malloc((size_t)n * sizeof *values);
        assert_non_null(values);
        for (int64_t k = 0; k < n; k++) {
            values[k] = hd_weight_at(w, (int32_t)(k / d->cols), (int32_t)(k % d->cols));
        }
        use_f32(w, values);
    }
    for (int32_t l = 0; l < t->spec->n_layers; l++) {
        for (int role = HD_EXPERT_GATE; role <= HD_EXPERT_DOWN; role++) {
            const hd_expert_table *table = hd_weights_experts(t->weights, l, (hd_role)role);
            hd_expert_table *out;
            memcpy(&out, &table, sizeof table);
            if (out) hd_expert_table_init(out, table->slots, table->n);
        }
    }
}

static void free_f32(trained *t) {
    const hd_schema *schema = hd_weights_schema(t->weights);
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        if (t->made[i] && !hd_weights_vector(t->weights, d->layer, d->role)) free(t->made[i]);
    }
    free(t->made);
}

/* ---- a model ---- */

static void open_model(trained *t, hd_model **out, int32_t logits) {
    const hd_model_env env = {.spec = t->spec,
                              .weights = t->weights,
                              .ops = &t->ops,
                              .device = t->device,
                              .stream = t->stream};
    const hd_model_limits limits = {.rows = ROWS, .logits = logits, .positions = POSITIONS};
    assert_int_equal(hd_model_open(out, &env, &limits, NULL), HD_OK);
}

static void fill_batch(trained *t) {
    int32_t tokens[ROWS], pages[N_SEQS][POSITIONS], row = 0;
    const int32_t n_pages = POSITIONS / hd_kv_shape_of(t->spec).page_tokens + 1;
    const hd_batch_limits limits = {ROWS, N_SEQS, n_pages};
    const hd_kv_options kv = {
        .n_pages = {N_SEQS * n_pages, N_SEQS * n_pages}
    };
    assert_int_equal(
        hd_kv_open(&t->kv, t->spec, t->spec->n_layers + t->spec->n_mtp, t->device, &kv, NULL),
        HD_OK);
    assert_int_equal(hd_batch_open(&t->batch, &limits, t->device, NULL), HD_OK);
    for (int32_t s = 0; s < N_SEQS; s++) {
        for (int32_t p = 0; p < n_pages; p++) pages[s][p] = s * n_pages + p;
        for (int32_t i = 0; i < t->lengths[s]; i++, row++) {
            tokens[i] =
                (int32_t)(hd_random_fill_at(7, (uint64_t)row) % (uint64_t)t->spec->vocab);
            t->target[row] =
                (int32_t)(hd_random_fill_at(8, (uint64_t)row) % (uint64_t)t->spec->vocab);
            t->factor[row] = unit(9, (uint64_t)row);
            t->entropy_factor[row] = 0.3f * unit(10, (uint64_t)row);
            t->temperature[row] = 1.0f + 0.4f * unit(11, (uint64_t)row);
        }
        hd_batch_add(&t->batch, &(hd_batch_seq){
                                    .tokens = tokens,
                                    .n = t->lengths[s],
                                    .after = -1,
                                    .n_logits = t->lengths[s],
                                    .pages = {pages[s], pages[s]},
                                    .n_pages = n_pages
        });
    }
    hd_batch_upload(&t->batch, t->stream);
}

/* A large bias decides which experts are selected, so that small steps select no others. */
static void fix_routes(trained *t) {
    for (int32_t l = 0; l < t->spec->n_layers; l++) {
        const float *bias = hd_weights_vector(t->weights, l, HD_ROUTER_BIAS);
        float *own;
        if (!bias) continue;
        memcpy(&own, &bias, sizeof bias);
        for (int32_t e = 0; e < t->spec->route.n_experts; e++)
            own[e] = 100.0f * unit(12, (uint64_t)e);
    }
}

static void open_trained(trained *t, const char *name, const char *changes, int32_t longest) {
    *t = (trained){
        .lengths = {1, longest, 22},
          .spec = config_changed(name, changes)
    };
    const hd_cpu_options cpu = {.n_threads = 2};
    assert_int_equal(hd_weights_open_dummy(&t->weights, t->spec, NULL, NULL), HD_OK);
    make_f32(t);
    fix_routes(t);
    assert_int_equal(hd_device_open_cpu(&t->device, &cpu, NULL), HD_OK);
    assert_int_equal(hd_stream_open(&t->stream, t->device, NULL), HD_OK);
    hd_ops_init_cpu(&t->ops, hd_cpu_features(), HD_EXACT);
    hd_backward_init_ref(&t->back_ops);
    open_model(t, &t->model, MOST_LOGITS);
    open_model(t, &t->whole, ROWS);
    fill_batch(t);
    assert_int_equal(
        hd_backward_open(&t->backward, t->model, &t->back_ops, &(hd_backward_options){0}, NULL),
        HD_OK);
    assert_int_equal(hd_gradients_open(&t->gradients, t->weights, t->device, NULL, NULL, NULL),
                     HD_OK);
}

static void close_trained(trained *t) {
    hd_gradients_close(t->gradients);
    hd_backward_close(t->backward);
    hd_batch_close(&t->batch);
    hd_kv_close(t->kv);
    hd_model_close(t->whole);
    hd_model_close(t->model);
    hd_stream_close(t->stream);
    hd_device_close(t->device);
    free_f32(t);
    hd_weights_close(t->weights);
    hd_model_spec_close(t->spec);
}

/* ---- the loss ---- */

static double log_prob(const float *logits, int32_t vocab, int32_t target, double temperature,
                       double *entropy) {
    double top = -(double)INFINITY, total = 0.0;
    *entropy = 0.0;
    for (int32_t v = 0; v < vocab; v++) top = fmax(top, (double)logits[v] / temperature);
    for (int32_t v = 0; v < vocab; v++) total += exp((double)logits[v] / temperature - top);
    for (int32_t v = 0; v < vocab; v++) {
        const double logp = (double)logits[v] / temperature - top - log(total);
        *entropy -= exp(logp) * logp;
    }
    return (double)logits[target] / temperature - top - log(total);
}

static double loss_now(trained *t) {
    hd_model_step(t->whole, t->kv, &t->batch);
    assert_int_equal(hd_stream_sync(t->stream, NULL), HD_OK);
    const float *logits = hd_model_logits(t->whole);
    double loss = 0.0, entropy;
    for (int32_t r = 0; r < t->batch.n_rows; r++) {
        const double logp = log_prob(logits + (int64_t)r * t->spec->vocab, t->spec->vocab,
                                     t->target[r], (double)t->temperature[r], &entropy);
        loss -= (double)t->factor[r] * logp + (double)t->entropy_factor[r] * entropy;
    }
    return loss;
}

static void run_backward(trained *t) {
    const hd_loss loss = {.target = t->target,
                          .factor = t->factor,
                          .entropy_factor = t->entropy_factor,
                          .temperature = t->temperature,
                          .logprob = t->logprob,
                          .entropy = t->entropy};
    hd_backward_step(t->backward, t->kv, &t->batch, &loss, t->gradients);
    assert_int_equal(hd_stream_sync(t->stream, NULL), HD_OK);
}

/* Moves a tensor along its gradient g of length `length`, and back. */
static double slope_along(trained *t, float *values, const float *g, int64_t n, double length,
                          double step) {
    float *before = malloc((size_t)n * sizeof *before);
    double loss[2];
    assert_non_null(before);
    memcpy(before, values, (size_t)n * sizeof *before);
    for (int side = 0; side < 2; side++) {
        const double by = (side ? -step : step) / length;
        for (int64_t i = 0; i < n; i++)
            values[i] = (float)((double)before[i] + by * (double)g[i]);
        loss[side] = loss_now(t);
    }
    memcpy(values, before, (size_t)n * sizeof *before);
    free(before);
    return (loss[0] - loss[1]) / (2.0 * step);
}

static void check_tensor(trained *t, int32_t i) {
    const hd_tensor_decl *d = &hd_weights_schema(t->weights)->decls[i];
    const int64_t n = (int64_t)d->rows * d->cols;
    const float *all = hd_gradients_at(t->gradients, d->layer, d->role);
    if (!t->made[i] || d->layer >= t->spec->n_layers || is_of_indexer(d)) return;
    assert_non_null(all);
    const float *g = all + (d->expert > 0 ? d->expert * n : 0);
    double square = 0.0;
    for (int64_t k = 0; k < n; k++) square += (double)g[k] * (double)g[k];
    const double length = sqrt(square);
    if (d->expert >= 0 && length == 0.0) return; /* an expert without rows */
    if (!(length > 1e-6)) fail_msg("%s: the gradient is %g long", d->name, length);
    const double step = fmin(1e-2, fmax(2e-4, 0.05 / length));
    const double got = slope_along(t, t->made[i], g, n, length, step);
    if (!(fabs(got - length) <= 0.02 * length + 2e-3)) {
        fail_msg("%s: the loss changes by %g along a gradient of length %g", d->name, got,
                 length);
    }
}

static void check_family(const char *name, const char *changes, int32_t longest) {
    trained t;
    open_trained(&t, name, changes, longest);
    run_backward(&t);
    const hd_schema *schema = hd_weights_schema(t.weights);
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        const bool skipped = is_brief() && i % 20 != 0; /* under a sanitizer */
        if (!skipped && (d->expert < 0 || d->layer % 2 == 1)) check_tensor(&t, i);
    }
    close_trained(&t);
}

/* V2 has no bias: every row selects all experts. */
static void gradients_of_v2(void **state) {
    (void)state;
    check_family("tiny_v2", "{\"num_experts_per_tok\": 8, \"n_group\": 1, \"topk_group\": 1}",
                 29);
}

static void gradients_of_v3(void **state) {
    (void)state;
    check_family("tiny_v3", "{}", 29);
}

/* The indexers of the families below select all keys. */
static void gradients_of_v32(void **state) {
    (void)state;
    check_family("tiny_v32", "{\"index_topk\": 64}", 29);
}

/* One sequence is longer than the window and than a block of every compressor. */
static void gradients_of_v4(void **state) {
    (void)state;
    check_family("tiny_v4", "{\"index_topk\": 64}", 133);
}

/* ---- the indexers' own loss ---- */

enum { INDEXER_FACTOR = 3 };

/* Adds the gradients of both losses to g; returns that of the indexers. */
static double run_indexers(trained *t, hd_gradients *g) {
    const hd_loss loss = {.target = t->target,
                          .factor = t->factor,
                          .entropy_factor = t->entropy_factor,
                          .temperature = t->temperature,
                          .logprob = t->logprob,
                          .entropy = t->entropy,
                          .indexer = INDEXER_FACTOR,
                          .divergence = t->divergence};
    double sum = 0.0;
    hd_backward_step(t->backward, t->kv, &t->batch, &loss, g);
    assert_int_equal(hd_stream_sync(t->stream, NULL), HD_OK);
    for (int32_t r = 0; r < t->batch.n_rows; r++) {
        sum += INDEXER_FACTOR * (double)t->divergence[r];
    }
    return sum;
}

/* The divergence changes by the gradient's length along it, as the loss in check_tensor(). */
static void check_index_tensor(trained *t, hd_gradients *g, hd_gradients *other, int32_t i) {
    const hd_tensor_decl *d = &hd_weights_schema(t->weights)->decls[i];
    const int64_t n = (int64_t)d->rows * d->cols;
    const float *at = hd_gradients_at(g, d->layer, d->role);
    float *values = t->made[i], *before = malloc((size_t)n * sizeof *before);
    double square = 0.0, loss[2];
    assert_non_null(at);
    assert_non_null(before);
    memcpy(before, values, (size_t)n * sizeof *before);
    for (int64_t k = 0; k < n; k++) square += (double)at[k] * (double)at[k];
    const double length = sqrt(square);
    if (!(length > 1e-6)) fail_msg("%s: the gradient is %g long", d->name, length);
    const double step = fmin(1e-2, fmax(2e-4, 0.05 / length));
    for (int side = 0; side < 2; side++) {
        const double by = (side ? -step : step) / length;
        for (int64_t k = 0; k < n; k++)
            values[k] = (float)((double)before[k] + by * (double)at[k]);
        loss[side] = run_indexers(t, other);
    }
    memcpy(values, before, (size_t)n * sizeof *before);
    free(before);
    const double got = (loss[0] - loss[1]) / (2.0 * step);
    if (!(fabs(got - length) <= 0.02 * length + 1e-4)) {
        fail_msg("%s: the divergence changes by %g along a gradient of length %g", d->name, got,
                 length);
    }
}

/* And the model beside the indexers has the gradients that it has without this loss. */
static void check_indexers(const char *name, int32_t longest) {
    trained t;
    hd_gradients *g, *other;
    int checked = 0;
    open_trained(&t, name, "{\"index_topk\": 64}", longest);
    run_backward(&t);
    hd_backward_close(t.backward);
    const hd_backward_options o = {.keep_bytes = 1 << 20, .indexer = true};
    assert_int_equal(hd_backward_open(&t.backward, t.model, &t.back_ops, &o, NULL), HD_OK);
    assert_int_equal(hd_gradients_open(&g, t.weights, t.device, has_gradient, NULL, NULL),
                     HD_OK);
    assert_int_equal(hd_gradients_open(&other, t.weights, t.device, has_gradient, NULL, NULL),
                     HD_OK);
    assert_true(run_indexers(&t, g) > 0.0);
    const hd_schema *schema = hd_weights_schema(t.weights);
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        const size_t bytes = (size_t)d->rows * (size_t)d->cols * sizeof(float);
        if (!t.made[i] || d->layer >= t.spec->n_layers) continue;
        if (is_of_indexer(d)) {
            const bool skipped = checked % (is_long() ? 1 : is_brief() ? 32 : 4) != 0;
            if (!skipped) check_index_tensor(&t, g, other, i);
            checked++;
        } else if (d->expert <= 0) {
            assert_memory_equal(hd_gradients_at(g, d->layer, d->role),
                                hd_gradients_at(t.gradients, d->layer, d->role), bytes);
        }
    }
    assert_true(checked > 4);
    hd_gradients_close(other);
    hd_gradients_close(g);
    close_trained(&t);
}

static void indexers_of_v32(void **state) {
    (void)state;
    check_indexers("tiny_v32", 29);
}

static void indexers_of_v4(void **state) {
    (void)state;
    check_indexers("tiny_v4", 133);
}

static void models_without_indexers_are_refused(void **state) {
    (void)state;
    trained t;
    hd_backward *b;
    hd_err err = {0};
    open_trained(&t, "tiny_v3", "{}", 29);
    const hd_backward_options o = {.indexer = true};
    assert_int_equal(hd_backward_open(&b, t.model, &t.back_ops, &o, &err), HD_EINVAL);
    assert_non_null(strstr(err.msg, "no indexer"));
    close_trained(&t);
}

static bool trains_norms(void *ctx, const hd_tensor_decl *d) {
    (void)ctx;
    return d->role == HD_ATTN_NORM || d->role == HD_FFN_NORM;
}

/* What is frozen has no gradient, and changes none of the others by a bit. */
static void frozen_tensors_change_no_gradient(void **state) {
    (void)state;
    trained t;
    open_trained(&t, "tiny_v4", "{}", 133);
    run_backward(&t);
    hd_gradients *all = t.gradients;
    assert_int_equal(
        hd_gradients_open(&t.gradients, t.weights, t.device, trains_norms, NULL, NULL), HD_OK);
    run_backward(&t);
    const size_t bytes = (size_t)t.spec->hidden * sizeof(float);
    for (int32_t l = 0; l < t.spec->n_layers; l++) {
        assert_memory_equal(hd_gradients_at(t.gradients, l, HD_ATTN_NORM),
                            hd_gradients_at(all, l, HD_ATTN_NORM), bytes);
        assert_memory_equal(hd_gradients_at(t.gradients, l, HD_FFN_NORM),
                            hd_gradients_at(all, l, HD_FFN_NORM), bytes);
        assert_null(hd_gradients_at(t.gradients, l, HD_HC_ATTN_BASE));
        assert_null(hd_gradients_at(t.gradients, l, HD_COMP_APE));
    }
    hd_gradients_close(all);
    close_trained(&t);
}

/* Gradients with the activations of some or all blocks kept are those with none kept. */
static void check_kept(const char *name) {
    trained t;
    open_trained(&t, name, "{}", 133);
    run_backward(&t);
    hd_gradients *again = t.gradients;
    const size_t none = hd_backward_bytes(t.backward);
    size_t all = none;
    for (int all_blocks = 1; all_blocks >= 0; all_blocks--) {
        const int64_t keep = all_blocks ? (int64_t)1 << 32 : (int64_t)(all - none) / 2;
        hd_backward_close(t.backward);
        assert_int_equal(hd_backward_open(&t.backward, t.model, &t.back_ops,
                                          &(hd_backward_options){.keep_bytes = keep}, NULL),
                         HD_OK);
        assert_int_equal(hd_gradients_open(&t.gradients, t.weights, t.device, NULL, NULL, NULL),
                         HD_OK);
        run_backward(&t);
        int64_t n, n_again;
        const float *got = hd_gradients_all(t.gradients, &n);
        const float *want = hd_gradients_all(again, &n_again);
        assert_int_equal(n, n_again);
        assert_memory_equal(got, want, (size_t)n * sizeof *got);
        if (all_blocks) all = hd_backward_bytes(t.backward);
        assert_true(hd_backward_bytes(t.backward) > none);
        assert_true(hd_backward_bytes(t.backward) <= none + (size_t)keep + 4096);
        hd_gradients_close(t.gradients);
    }
    t.gradients = again;
    close_trained(&t);
}

static void kept_activations_change_no_gradient(void **state) {
    (void)state;
    check_kept("tiny_v3");
    check_kept("tiny_v32");
    check_kept("tiny_v4");
}

int test_model_backward(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_of_v2),
        cmocka_unit_test(gradients_of_v3),
        cmocka_unit_test(gradients_of_v32),
        cmocka_unit_test(gradients_of_v4),
        cmocka_unit_test(indexers_of_v32),
        cmocka_unit_test(indexers_of_v4),
        cmocka_unit_test(models_without_indexers_are_refused),
        cmocka_unit_test(frozen_tensors_change_no_gradient),
        cmocka_unit_test(kept_activations_change_no_gradient),
    };
    return cmocka_run_group_tests_name("model_backward", tests, NULL, NULL);
}
