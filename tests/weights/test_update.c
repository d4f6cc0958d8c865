/* test_update.c - new weights for an open model: the same ones change nothing, damaged ones
 * are mended, and a refused update leaves every byte as it was. */
#include "check.h"

#include <stdio.h>
#include <string.h>

#include "base/checksum.h"
#include "weights/changes.h"

static const char *const models[] = {"tests/golden/v2_plain", "tests/golden/v3_small_mtp",
                                     "tests/golden/v32_rope_mtp", "tests/golden/v4_odd",
                                     "tests/golden/v41_small"};

typedef struct opened {
    hd_device *device;
    hd_stream *stream;
    hd_model_spec *spec;
    hd_weights *weights;
    const char *dir;
} opened;

static void open_model(opened *o, const char *dir, int32_t n_threads) {
    const hd_cpu_options cpu = {.n_threads = n_threads};
    o->dir = dir;
    assert_int_equal(hd_device_open_cpu(&o->device, &cpu, NULL), HD_OK);
    assert_int_equal(hd_stream_open(&o->stream, o->device, NULL), HD_OK);
    assert_int_equal(hd_model_spec_open(&o->spec, dir, NULL), HD_OK);
    assert_int_equal(hd_weights_open_updatable(&o->weights, dir, o->spec, NULL), HD_OK);
}

static void close_model(opened *o) {
    hd_weights_close(o->weights);
    hd_model_spec_close(o->spec);
    hd_stream_close(o->stream);
    hd_device_close(o->device);
}

static uint64_t checksum(const opened *o) {
    const hd_checkpoint *c = hd_weights_checkpoint(o->weights);
    uint64_t h = 0;
    for (int32_t i = 0; i < hd_checkpoint_count(c); i++) {
        h = hd_checksum(h, hd_checkpoint_at(c, i)->data, hd_checkpoint_at(c, i)->bytes);
    }
    return h;
}

/* Updates by c, which it takes. Returns how many tensors were replaced. */
static int32_t update(opened *o, hd_checkpoint *c, hd_weights_selector selector) {
    const hd_weights_update_rule rule = {.selector = selector, .whole = true};
    hd_weights_update *u;
    hd_err err = {0};
    assert_int_equal(hd_weights_update_open(&u, o->weights, &err), HD_OK);
    assert_int_equal(hd_weights_update_add(u, c, &rule, &err), HD_OK);
    assert_int_equal(hd_weights_update_apply(u, o->weights, o->stream, &err), HD_OK);
    const int32_t n = hd_weights_update_count(u);
    hd_weights_update_close(u);
    return n;
}

static hd_checkpoint *read_again(const opened *o) {
    hd_checkpoint *c;
    assert_int_equal(hd_checkpoint_read(&c, o->dir, NULL), HD_OK);
    return c;
}

static void the_same_weights_change_nothing(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(models); i++) {
        opened o;
        open_model(&o, models[i], 1);
        const uint64_t before = checksum(&o);
        const int32_t all = update(&o, read_again(&o), HD_SELECT_ALL);
        const int32_t target = update(&o, read_again(&o), HD_SELECT_TARGET);
        assert_int_equal(all, target + update(&o, read_again(&o), HD_SELECT_DRAFT));
        assert_true(target > 0 && checksum(&o) == before);
        close_model(&o);
    }
}

/* A copy that the device could not make, or memory that was given back: the tensors are lost, each
 * until an update brings it. */
static void lost_tensors_come_back(void **state) {
    (void)state;
    const hd_weights_update_rule rule = {.whole = true};
    for (size_t i = 0; i < HD_LEN(models); i++) {
        opened o;
        hd_weights_update *u;
        hd_err err = {0};
        size_t bytes = 0;
        open_model(&o, models[i], 1);
        const uint64_t before = checksum(&o);
        assert_int_equal(hd_weights_update_open(&u, o.weights, &err), HD_OK);
        assert_int_equal(hd_weights_update_add(u, read_again(&o), &rule, &err), HD_OK);
        hd_stream_fail(o.stream, HD_EDEVICE, "copy");
        assert_int_equal(hd_weights_update_apply(u, o.weights, o.stream, &err), HD_EDEVICE);
        assert_int_equal(hd_weights_lost(o.weights), hd_weights_update_count(u));
        hd_weights_update_close(u);
        assert_int_equal(hd_weights_discard(o.weights, &bytes, &err), HD_OK);
        const int32_t all = hd_weights_lost(o.weights);
        const int32_t some = update(&o, read_again(&o), HD_SELECT_TARGET);
        assert_true(all > 0 && hd_weights_lost(o.weights) == all - some);
        update(&o, read_again(&o), HD_SELECT_DRAFT);
        assert_int_equal(hd_weights_lost(o.weights), 0);
        assert_true(checksum(&o) == before);
        close_model(&o);
    }
}

static void what_operators_read_is_replaced(void **state) {
    (void)state;
    opened o;
    open_model(&o, models[1], 1);
    const hd_weight *head = hd_weights_matrix(o.weights, HD_GLOBAL, HD_HEAD);
    const float *norm = hd_weights_vector(o.weights, HD_GLOBAL, HD_FINAL_NORM);
    const uint64_t before = checksum(&o);
    const float first = norm[0], element = hd_weight_at(head, 1, 1);
    memset((void *)(uintptr_t)head->data, 0, 64 * (size_t)head->cols / 8);
    memset((void *)(uintptr_t)norm, 0, sizeof *norm);
    assert_true(norm[0] == 0 && checksum(&o) != before);
    update(&o, read_again(&o), HD_SELECT_ALL);
    assert_true(norm[0] == first && hd_weight_at(head, 1, 1) == element);
    assert_true(checksum(&o) == before);
    close_model(&o);
}

static void refused_updates_change_nothing(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(models); i++) {
        const hd_weights_update_rule rule = {.selector = HD_SELECT_ALL, .whole = true};
        hd_weights_update *u;
        hd_checkpoint *other;
        hd_err err = {0};
        opened o;
        open_model(&o, models[i], 1);
        const uint64_t before = checksum(&o);
        const char *dir = models[(i + 1) % HD_LEN(models)];
        assert_int_equal(hd_checkpoint_read(&other, dir, NULL), HD_OK);
        assert_int_equal(hd_weights_update_open(&u, o.weights, &err), HD_OK);
        assert_int_equal(hd_weights_update_add(u, other, &rule, &err), HD_EFORMAT);
        assert_non_null(strstr(err.msg, "tensor"));
        assert_int_equal(hd_weights_update_count(u), 0);
        assert_int_equal(hd_weights_update_apply(u, o.weights, o.stream, NULL), HD_OK);
        assert_true(checksum(&o) == before);
        hd_weights_update_close(u);
        close_model(&o);
    }
}

/* The last of several that bring a tensor counts, whoever else brings it. */
static void the_last_bringer_counts(void **state) {
    (void)state;
    const hd_weights_update_rule all = {.whole = true},
                                 draft = {.selector = HD_SELECT_DRAFT, .whole = true};
    opened o;
    hd_weights_update *u;
    open_model(&o, models[1], 1);
    const uint64_t before = checksum(&o);
    hd_checkpoint *damaged = read_again(&o);
    for (int32_t i = 0; i < hd_checkpoint_count(damaged); i++) {
        const hd_tensor *t = hd_checkpoint_at(damaged, i);
        memset((void *)(uintptr_t)t->data, 0, t->bytes);
    }
    assert_int_equal(hd_weights_update_open(&u, o.weights, NULL), HD_OK);
    assert_int_equal(hd_weights_update_add(u, damaged, &all, NULL), HD_OK);
    const int32_t n = hd_weights_update_count(u);
    assert_int_equal(hd_weights_update_add(u, read_again(&o), &draft, NULL), HD_OK);
    assert_int_equal(hd_weights_update_count(u), n);
    assert_int_equal(hd_weights_update_add(u, read_again(&o), &all, NULL), HD_OK);
    assert_int_equal(hd_weights_update_count(u), n);
    assert_int_equal(hd_weights_update_apply(u, o.weights, o.stream, NULL), HD_OK);
    assert_true(checksum(&o) == before);
    hd_weights_update_close(u);
    close_model(&o);
}

/* Puts NaN in place of element i of a BF16 tensor. */
static void spoil(hd_checkpoint *c, const char *name, size_t i) {
    const hd_tensor *t = hd_checkpoint_find(c, name);
    assert_true(t && t->dtype == HD_BF16 && 2 * (i + 1) <= t->bytes);
    memset((uint8_t *)(uintptr_t)t->data + 2 * i, 0xFF, 2);
}

/* Whatever number of threads looks at an update that is large enough for several, the first fault
 * in the model's order is named, wherever it is; and without a fault all of it arrives. */
static void threads_change_nothing(void **state) {
    (void)state;
    static const size_t places[] = {0, 1, 127, 128, 255};
    opened o;
    open_model(&o, "models/tiny-v4", 3);
    const uint64_t before = checksum(&o);
    for (int32_t n_threads = 1; n_threads <= 5; n_threads++) {
        const hd_weights_update_rule rule = {.whole = true, .n_threads = n_threads};
        const size_t place = places[n_threads - 1];
        hd_weights_update *u;
        hd_checkpoint *c = read_again(&o);
        hd_err err = {0};
        char at[32];
        snprintf(at, sizeof at, "[0, %zu]", place);
        spoil(c, "layers.5.ffn_norm.weight", 3);
        spoil(c, "layers.2.attn_norm.weight", place);
        spoil(c, "layers.5.attn_norm.weight", 7);
        assert_int_equal(hd_weights_update_open(&u, o.weights, NULL), HD_OK);
        assert_int_equal(hd_weights_update_add(u, c, &rule, &err), HD_EFORMAT);
        assert_non_null(strstr(err.msg, "layers.2.attn_norm.weight"));
        assert_non_null(strstr(err.msg, at));
        assert_int_equal(hd_weights_update_add(u, read_again(&o), &rule, NULL), HD_OK);
        for (int32_t i = 0; i < hd_checkpoint_count(hd_weights_checkpoint(o.weights)); i++) {
            const hd_tensor *t = hd_checkpoint_at(hd_weights_checkpoint(o.weights), i);
            memset((uint8_t *)(uintptr_t)t->data, 0, t->bytes);
        }
        assert_true(checksum(&o) != before);
        assert_int_equal(hd_weights_update_apply(u, o.weights, o.stream, NULL), HD_OK);
        assert_true(checksum(&o) == before);
        hd_weights_update_close(u);
    }
    close_model(&o);
}

/* Another model of the same shapes: bytes of every tensor lie in another order. */
static hd_checkpoint *read_permuted(const opened *o) {
    hd_checkpoint *c = read_again(o);
    for (int32_t i = 0; i < hd_checkpoint_count(c); i++) {
        const hd_tensor *t = hd_checkpoint_at(c, i);
        uint8_t *bytes = (uint8_t *)(uintptr_t)t->data;
        const size_t half = t->bytes / 2 / 8 * 8; /* whole elements of any type */
        for (size_t k = 0; k < half; k++) {
            const uint8_t one = bytes[k];
            bytes[k] = bytes[k + half];
            bytes[k + half] = one;
        }
    }
    return c;
}

/* Takes all parts of what is due. Returns how many there were. */
static int32_t bring(hd_weights_changes *c, opened *to) {
    hd_weights_update *u;
    hd_map part;
    int32_t n = 0;
    assert_int_equal(hd_weights_update_open(&u, to->weights, NULL), HD_OK);
    for (;; n++) {
        assert_int_equal(hd_weights_changes_take(c, &part, NULL), HD_OK);
        if (part.bytes == 0) break;
        assert_int_equal(hd_weights_changes_read(u, to->weights, &part, NULL), HD_OK);
    }
    assert_int_equal(hd_weights_update_apply(u, to->weights, to->stream, NULL), HD_OK);
    hd_weights_update_close(u);
    return n;
}

static void changes_come_to_another_process(void **state) {
    (void)state;
    const hd_weights_update_rule all = {.whole = true};
    for (size_t i = 0; i < HD_LEN(models); i++) {
        opened one, two, late;
        hd_weights_changes *c;
        hd_weights_update *u;
        open_model(&one, models[i], 1);
        open_model(&two, models[i], 1);
        open_model(&late, models[i], 1);
        const uint64_t before = checksum(&one);
        assert_int_equal(hd_weights_changes_open(&c, one.weights, NULL), HD_OK);
        assert_false(hd_weights_changes_are_due(c));
        assert_int_equal(bring(c, &two), 0);
        assert_int_equal(hd_weights_update_open(&u, one.weights, NULL), HD_OK);
        assert_int_equal(hd_weights_update_add(u, read_permuted(&one), &all, NULL), HD_OK);
        hd_weights_changes_add(c, u);
        assert_int_equal(hd_weights_update_apply(u, one.weights, one.stream, NULL), HD_OK);
        hd_weights_update_close(u);
        assert_true(checksum(&one) != before && checksum(&two) == before);
        assert_true(bring(c, &two) > 0 && !hd_weights_changes_are_due(c));
        assert_true(checksum(&two) == checksum(&one));
        assert_int_equal(bring(c, &late), 0); /* it comes after the update */
        hd_weights_changes_again(c);
        assert_true(bring(c, &late) > 0 && checksum(&late) == checksum(&one));
        hd_weights_changes_close(c);
        close_model(&one);
        close_model(&two);
        close_model(&late);
    }
}

/* Parts that are cut off, or have other numbers in head or entries. */
static void wrong_parts_are_refused(void **state) {
    (void)state;
    enum { HEADS = 48 }; /* bytes of a head and two entries */
    const hd_weights_update_rule all = {.whole = true};
    opened o;
    hd_weights_changes *c;
    hd_weights_update *u;
    hd_map part, bad;
    open_model(&o, models[1], 1);
    const uint64_t before = checksum(&o);
    assert_int_equal(hd_weights_changes_open(&c, o.weights, NULL), HD_OK);
    assert_int_equal(hd_weights_update_open(&u, o.weights, NULL), HD_OK);
    assert_int_equal(hd_weights_update_add(u, read_again(&o), &all, NULL), HD_OK);
    hd_weights_changes_add(c, u);
    hd_weights_update_close(u);
    assert_int_equal(hd_weights_changes_take(c, &part, NULL), HD_OK);
    assert_int_equal(hd_weights_update_open(&u, o.weights, NULL), HD_OK);
    for (size_t i = 0; i < 2 * HEADS; i++) {
        const size_t n = i < HEADS ? i + 1 : part.bytes;
        assert_int_equal(hd_map_take(&bad, n, "a part", NULL), HD_OK);
        memcpy(hd_map_writable(&bad), part.data, n);
        const size_t at = i - HEADS;
        const bool is_pad = i >= HEADS && at >= 16 && at % 16 >= 4 && at % 16 < 8;
        if (i >= HEADS) hd_map_writable(&bad)[at] ^= 0x81;
        hd_err err = {0};
        const hd_status st = hd_weights_changes_read(u, o.weights, &bad, &err);
        assert_int_equal(st, is_pad ? HD_OK : HD_EFORMAT);
    }
    hd_map_close(&part);
    hd_weights_update_close(u);
    hd_weights_changes_close(c);
    assert_true(checksum(&o) == before);
    close_model(&o);
}

int test_update(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_weights_change_nothing),
        cmocka_unit_test(lost_tensors_come_back),
        cmocka_unit_test(what_operators_read_is_replaced),
        cmocka_unit_test(refused_updates_change_nothing),
        cmocka_unit_test(the_last_bringer_counts),
        cmocka_unit_test(threads_change_nothing),
        cmocka_unit_test(changes_come_to_another_process),
        cmocka_unit_test(wrong_parts_are_refused),
    };
    return cmocka_run_group_tests_name("update", tests, NULL, NULL);
}
