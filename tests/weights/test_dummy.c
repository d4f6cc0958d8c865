/* test_dummy.c - random (dummy) weights: all of a model, in the formats its config declares. */
#include "check.h"

#include <math.h>

#include "device/device.h"
#include "weights/configs.h"
#include "weights/placement.h"
#include "weights/summary.h"
#include "weights/weights.h"

static const char *const names[] = {"tiny_v2", "tiny_v3", "tiny_v32", "tiny_v4"};

static bool is_matrix(const hd_tensor_decl *d) {
    return d->rank == 2 && d->role != HD_ROUTER_HASH;
}

/* Returns 1 if elements have a mean square of 1 / cols. */
static double relative_size(const hd_weight *w) {
    double sum = 0;
    for (int32_t r = 0; r < w->rows; r++) {
        for (int32_t c = 0; c < w->cols; c++) {
            const double v = hd_weight_at(w, r, c);
            sum += v * v;
        }
    }
    return sqrt(sum / w->rows);
}

static void check_tensor(const hd_weights *w, const hd_model_spec *spec, int32_t i) {
    const hd_tensor_decl *d = &hd_weights_schema(w)->decls[i];
    const hd_weight *stored = hd_weights_stored(w, i);
    if (d->role == HD_ROUTER_HASH) {
        assert_non_null(hd_weights_table(w, d->layer));
        return;
    }
    if (d->duplicate) {
        assert_null(stored);
        return;
    }
    assert_non_null(stored);
    const hd_stored_format want = hd_declared_format(spec, d);
    assert_int_equal(stored->scale_type, want.scale_type);
    assert_int_equal(stored->rows, d->rows);
    assert_int_equal(stored->cols, d->cols);
    assert_int_equal(hd_weights_check_scales(w, i, NULL), HD_OK);
    assert_int_equal(hd_weights_check_values(w, i, NULL), HD_OK);
    if (!is_matrix(d) || (int64_t)d->rows * d->cols < 4096) return;
    const double size = relative_size(stored);
    if (size < 0.5 || size > 2) fail_msg("%s: relative size %g", d->name, size);
}

static void test_all_tensors(void **state) {
    (void)state;
    for (size_t k = 0; k < HD_LEN(names); k++) {
        hd_model_spec *spec = config_open(names[k]);
        hd_weights *w;
        assert_int_equal(hd_weights_open_dummy(&w, spec, NULL, NULL), HD_OK);
        assert_int_equal(hd_weights_n_mtp(w), spec->n_mtp);
        for (int32_t i = 0; i < hd_weights_schema(w)->n; i++) check_tensor(w, spec, i);
        assert_non_null(hd_weights_matrix(w, HD_GLOBAL, HD_EMBED));
        assert_non_null(hd_weights_matrix(w, HD_GLOBAL, HD_HEAD));
        hd_weights_close(w);
        hd_model_spec_close(spec);
    }
}

/* Of the layers below `last` where they are, and of the last one in slots; there the host has none. */
static void check_experts_of(const hd_weights *have, const hd_weights *want, int32_t last,
                             hd_stream *s) {
    enum { EACH = 1 << 19 };
    const hd_schema *schema = hd_weights_schema(want);
    const int64_t data_at[] = {0, EACH, 2 * EACH};
    const int64_t scale_at[] = {3 * EACH, 4 * EACH, 5 * EACH};
    uint8_t *slots = calloc(64, 6 * EACH);
    const hd_expert_places to = {slots, 6 * EACH, data_at, scale_at};
    int32_t seen = 0;
    assert_non_null(slots);
    hd_weights_copy_experts(have, last, &to, s);
    assert_int_equal(hd_stream_sync(s, NULL), HD_OK);
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_tensor_decl *d = &schema->decls[i];
        const hd_weight *a = hd_weights_stored(want, i), *b = hd_weights_stored(have, i);
        if (d->expert < 0 || d->layer > last) continue;
        const hd_stored_format f = hd_weight_format(a);
        const size_t data = hd_stored_data_bytes(&f, a->rows, a->cols);
        const size_t scale = a->scale ? hd_stored_scale_bytes(&f, a->rows, a->cols) : 0;
        const int32_t role = (int32_t)(d->role - HD_EXPERT_GATE);
        const uint8_t *slot = slots + (size_t)d->expert * to.slot_bytes;
        const bool copied = d->layer == last;
        assert_true(data <= EACH && scale <= EACH && d->expert < 64);
        assert_memory_equal(copied ? slot + data_at[role] : b->data, a->data, data);
        if (scale)
            assert_memory_equal(copied ? slot + scale_at[role] : b->scale, a->scale, scale);
        if (copied) assert_memory_not_equal(b->data, a->data, data);
        seen += copied;
    }
    assert_true(seen > 0);
    free(slots);
}

/* Experts that are made later, in host memory or where they are copied to, are those that are made at once. */
static void test_experts_are_made_later(void **state) {
    (void)state;
    for (size_t k = 0; k < HD_LEN(names); k++) {
        hd_model_spec *spec = config_open(names[k]);
        const int32_t n_layers = spec->n_layers + spec->n_mtp, last = n_layers - 1;
        const hd_dummy_options later = {.experts_later = true};
        hd_weights *want, *have;
        hd_device *d;
        hd_stream *s;
        size_t pinned;
        assert_int_equal(hd_device_open_cpu(&d, &(hd_cpu_options){.n_threads = 1}, NULL),
                         HD_OK);
        assert_int_equal(hd_stream_open(&s, d, NULL), HD_OK);
        assert_int_equal(hd_weights_open_dummy(&want, spec, NULL, NULL), HD_OK);
        assert_int_equal(hd_weights_open_dummy(&have, spec, &later, NULL), HD_OK);
        assert_int_equal(hd_weights_hold_experts(have, last, d, &pinned, NULL), HD_OK);
        check_experts_of(have, want, last, s);
        hd_stream_close(s);
        hd_device_close(d);
        hd_weights_close(have);
        hd_weights_close(want);
        hd_model_spec_close(spec);
    }
}

static void test_nvfp4_experts(void **state) {
    (void)state;
    hd_weights *w;
    hd_model_spec *spec =
        config_changed("tiny_v3", "{\"quantization_config\": {\"quant_method\": \"modelopt\", "
                                  "\"quant_algo\": \"NVFP4\"}}");
    assert_int_equal(hd_weights_open_dummy(&w, spec, NULL, NULL), HD_OK);
    for (int32_t i = 0; i < hd_weights_schema(w)->n; i++) check_tensor(w, spec, i);
    const hd_expert_table *experts = hd_weights_experts(w, spec->n_layers - 1, HD_EXPERT_GATE);
    assert_non_null(experts);
    assert_int_equal(experts->slots->type, HD_E2M1);
    hd_weights_close(w);
    hd_model_spec_close(spec);
}

/* A rank's random weights are its slices and nothing else, generated on its device. */
static void check_rank(const hd_model_spec *spec, const hd_parallel_config *parallel,
                       int32_t rank, const hd_dummy_options *o) {
    hd_weights *w;
    hd_plan plan;
    assert_int_equal(hd_weights_open_dummy(&w, spec, o, NULL), HD_OK);
    const hd_schema *schema = hd_weights_schema(w);
    const hd_plan_args args = {.parallel = parallel,
                               .rank = rank,
                               .spec = spec,
                               .schema = schema,
                               .n_mtp = spec->n_mtp};
    assert_int_equal(hd_plan_open(&plan, &args, NULL), HD_OK);
    assert_int_equal(hd_weights_shard(w)->n_heads, plan.shard.n_heads);
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_weight *stored = hd_weights_stored(w, i);
        const hd_slice *s = &plan.slices[i];
        if (schema->decls[i].role == HD_ROUTER_HASH) continue;
        assert_int_equal(stored != NULL, s->rows > 0);
        if (!stored) continue;
        assert_int_equal(stored->rows, s->rows);
        assert_int_equal(stored->cols, s->cols);
        assert_int_equal(hd_weights_check_values(w, i, NULL), HD_OK);
    }
    hd_plan_close(&plan);
    hd_weights_close(w);
}

static void test_shards(void **state) {
    (void)state;
    const hd_parallel_config parallel_configs[] = {hd_parallel_tensor(2),
                                                   hd_parallel_expert(4, 0)};
    const hd_cpu_options one = {.n_threads = 1};
    hd_device *d;
    hd_stream *s;
    assert_int_equal(hd_device_open_cpu(&d, &one, NULL), HD_OK);
    assert_int_equal(hd_stream_open(&s, d, NULL), HD_OK);
    for (size_t k = 0; k < HD_LEN(names); k++) {
        hd_model_spec *spec = config_open(names[k]);
        for (size_t l = 0; l < HD_LEN(parallel_configs); l++) {
            for (int32_t r = 0; r < hd_parallel_world(&parallel_configs[l]); r++) {
                hd_dummy_options o = {.parallel = parallel_configs[l], .rank = r};
                check_rank(spec, &parallel_configs[l], r, &o);
                o.device = d;
                o.stream = s;
                check_rank(spec, &parallel_configs[l], r, &o);
            }
        }
        hd_model_spec_close(spec);
    }
    hd_stream_close(s);
    hd_device_close(d);
}

/* Engram tables are larger than memory; random ones have as many rows as give random reads. */
static void test_tables_are_short(void **state) {
    const hd_dummy_options o = {.shapes_only = true};
    hd_model_spec *spec = config_open("v4_1_flash");
    hd_weights *w;
    (void)state;
    assert_int_equal(hd_weights_open_dummy(&w, spec, &o, NULL), HD_OK);
    for (int32_t i = 0; i < spec->engram.n_layers; i++) {
        const hd_weight *t = hd_weights_matrix(w, spec->engram.layers[i], HD_ENGRAM_TABLE);
        assert_int_equal(t->rows, 1 << 20);
        assert_int_equal(t->cols, spec->engram.head_dim);
        assert_true(spec->engram.rows[i] > t->rows);
    }
    hd_weights_close(w);
    hd_model_spec_close(spec);
}

/* The drafter of V4.1 has fewer experts than the model, and selects fewer. */
static void test_routing_of_drafters(void **state) {
    const hd_dummy_options o = {.shapes_only = true, .routing = HD_ROUTING_UNIFORM};
    hd_model_spec *spec = config_open("v4_1_flash");
    hd_weights *w;
    (void)state;
    spec->vocab = 64;
    assert_int_equal(hd_weights_open_dummy(&w, spec, &o, NULL), HD_OK);
    for (int32_t l = spec->n_layers - 1; l <= spec->n_layers; l++) {
        const hd_router_rule rule = hd_layer_route(spec, l);
        const int32_t *table = hd_weights_table(w, l);
        int32_t most = 0;
        for (int32_t i = 0; i < spec->vocab * rule.top_k; i++) {
            assert_in_range(table[i], 0, rule.n_experts - 1);
            most = table[i] > most ? table[i] : most;
        }
        assert_true(most > rule.n_experts / 2);
    }
    hd_weights_close(w);
    hd_model_spec_close(spec);
}

int test_dummy(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_tensors),
        cmocka_unit_test(test_nvfp4_experts),
        cmocka_unit_test(test_experts_are_made_later),
        cmocka_unit_test(test_shards),
        cmocka_unit_test(test_tables_are_short),
        cmocka_unit_test(test_routing_of_drafters),
    };
    return cmocka_run_group_tests_name("dummy", tests, NULL, NULL);
}
