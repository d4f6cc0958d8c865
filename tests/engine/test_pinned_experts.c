/* test_pinned_experts.c - experts in host memory are pinned, and where that has a limit a notice says
 * how to raise it. */
#include "check.h"

#include <stdlib.h>

#include "engine/notices.h"
#include "fakes/shared_device.h"
#include "weights/safetensors.h"
#include "weights/weights.h"

static hd_weights *open_model(hd_model_spec **spec, const char *name) {
    char dir[128];
    hd_weights *w;
    snprintf(dir, sizeof dir, "tests/golden/%s", name);
    assert_int_equal(hd_model_spec_open(spec, dir, NULL), HD_OK);
    assert_int_equal(hd_weights_open(&w, dir, *spec, NULL), HD_OK);
    return w;
}

/* Returns the bytes of all experts. */
static size_t check_pinned(const hd_weights *w, const hd_device *d, bool pinned) {
    const hd_schema *schema = hd_weights_schema(w);
    size_t all = 0;
    for (int32_t i = 0; i < schema->n; i++) {
        const hd_tensor *t = hd_weights_tensor(w, i), *scale = hd_weights_scale_tensor(w, i);
        if (schema->decls[i].expert < 0 || !t) continue;
        assert_int_equal(shared_device_has_pinned(d, t->data, t->bytes), pinned);
        all += t->bytes;
        if (!scale) continue;
        assert_int_equal(shared_device_has_pinned(d, scale->data, scale->bytes), pinned);
        all += scale->bytes;
    }
    return all;
}

static void experts_are_pinned(void **state) {
    static const char *const models[] = {"v2_groups", "v3_small_mtp", "v4_small_mtp"};
    (void)state;
    for (size_t i = 0; i < HD_LEN(models); i++) {
        hd_model_spec *spec;
        size_t bytes;
        hd_err err = {0};
        hd_weights *w = open_model(&spec, models[i]);
        hd_device *d = shared_device_open();
        assert_int_equal(
            hd_weights_hold_experts(w, spec->n_layers + spec->n_mtp, d, &bytes, &err), HD_OK);
        check_pinned(w, d, false); /* its memory is host memory: there is nothing to pin */
        shared_device_set_remote(d);
        assert_int_equal(
            hd_weights_hold_experts(w, spec->n_layers + spec->n_mtp, d, &bytes, &err), HD_OK);
        assert_true(bytes >= check_pinned(w, d, true));
        assert_true(bytes <= hd_checkpoint_shard_bytes(hd_weights_checkpoint(w), 0));
        hd_device_close(d);
        hd_weights_close(w);
        hd_model_spec_close(spec);
    }
}

static void a_limit_is_told(void **state) {
    (void)state;
    hd_model_spec *spec;
    size_t bytes;
    hd_err err = {0};
    const char *const *notices;
    hd_engine *e = calloc(1, sizeof *e);
    hd_weights *w = open_model(&spec, "v4_small_mtp");
    hd_device *d = shared_device_open();
    shared_device_set_remote(d);
    shared_device_limit_pins(d, 1000);
    assert_int_equal(hd_weights_hold_experts(w, spec->n_layers, d, &bytes, &err), HD_EDEVICE);
    assert_int_equal(bytes, 0);
    engine_note_pageable(e, bytes, &err, 8 << 20);
    engine_note_pageable(e, 12300000000, &err, UINT64_MAX);
    assert_int_equal(hd_engine_notices(e, &notices), 2);
    assert_string_equal(notices[0],
                        "only 0 B of the experts in host memory are pinned, others are copied "
                        "slowly: pinning: out of memory; raise the limit of locked memory of "
                        "8.39 MB (ulimit -l, LimitMEMLOCK=)");
    assert_string_equal(notices[1],
                        "only 12.30 GB of the experts in host memory are pinned, others are "
                        "copied slowly: pinning: out of memory");
    hd_device_close(d);
    hd_weights_close(w);
    hd_model_spec_close(spec);
    free(e);
}

int test_pinned_experts(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(experts_are_pinned),
        cmocka_unit_test(a_limit_is_told),
    };
    return cmocka_run_group_tests_name("pinned_experts", tests, NULL, NULL);
}
