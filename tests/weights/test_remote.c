/* test_remote.c - tensors that lie on a GPU, in memory of another process: as PyTorch's pickles and
 * as a plain list describe them. The GPU is a fake whose memory the test knows. */
#include "check.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "fakes/shared_device.h"
#include "weights/torch/ipc_tensors.h"
#include "weights/torch/torch_tensors.h"
#include "weights/update.h"
#include "weights/weights_internal.h"

#define PICKLES "tests/fuzz/corpus/pickle/"
#define COUNTER "/torch_hadal_counter" /* what the pickles name */

enum { COUNTERS_AT = 64, N_COUNTERS = 10, USERS = 5 };

/* ---- counts of users, as PyTorch has them ---- */

static int64_t *open_counters(void) {
    const size_t bytes = COUNTERS_AT + N_COUNTERS * sizeof(int64_t);
    const int fd = shm_open(COUNTER, O_RDWR | O_CREAT, 0600);
    assert_true(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    uint8_t *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(p, MAP_FAILED);
    close(fd);
    int64_t *counters = (int64_t *)(void *)(p + COUNTERS_AT);
    for (int32_t i = 0; i < N_COUNTERS; i++) counters[i] = USERS;
    return counters;
}

static void close_counters(int64_t *counters) {
    munmap((uint8_t *)counters - COUNTERS_AT, COUNTERS_AT + N_COUNTERS * sizeof(int64_t));
    shm_unlink(COUNTER);
}

/* ---- reading ---- */

static hd_status read_pickle(hd_checkpoint **out, hd_device *d, const char *path, bool flat,
                             const char *from, const char *to, hd_err *err) {
    char *pickle;
    size_t n;
    *out = NULL;
    assert_int_equal(hd_file_read(&pickle, &n, path, 1 << 20, NULL), HD_OK);
    for (size_t i = 0; from && i + strlen(from) <= n; i++) {
        if (memcmp(pickle + i, from, strlen(from)) == 0) memcpy(pickle + i, to, strlen(to));
    }
    const hd_status st = hd_torch_tensors_read(out, (const uint8_t *)pickle, n, flat, d, err);
    free(pickle);
    return st;
}

/* Element bytes of `name` are those of a handle's block from `at` on. */
static void check_bytes(const hd_checkpoint *c, const char *name, char handle, size_t at,
                        size_t n, bool on_device) {
    const hd_tensor *t = hd_checkpoint_find(c, name);
    assert_non_null(t);
    assert_int_equal(t->bytes, n);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(t->data[i], shared_device_byte(handle, at + i));
    }
    assert_int_equal(t->on_device != NULL, on_device);
    if (on_device) assert_memory_equal(t->on_device, t->data, n);
}

/* F32 [4, 6] whose columns lie one after the other, from byte 1032 of block B on. */
static void check_transposed(const hd_checkpoint *c) {
    const hd_tensor *t = hd_checkpoint_find(c, "turned");
    assert_non_null(t);
    assert_null(t->on_device);
    for (size_t i = 0; i < t->bytes; i++) {
        const size_t row = i / 4 / 6, col = i / 4 % 6;
        assert_int_equal(t->data[i],
                         shared_device_byte('B', 1032 + (row + 4 * col) * 4 + i % 4));
    }
}

static void pickled_tensors_on_a_gpu_come(void **state) {
    (void)state;
    hd_device *d = shared_device_open();
    int64_t *users = open_counters();
    for (int32_t full = 0; full < 2; full++) {
        hd_checkpoint *c;
        shared_device_fill(d, full);
        assert_int_equal(read_pickle(&c, d, PICKLES "cuda", false, NULL, NULL, NULL), HD_OK);
        check_bytes(c, "plain", 'A', 512 + 16 * 2, 4 * 8 * 2, !full);
        check_bytes(c, "headed", 'A', SHARED_BLOCK_BYTES - 100, 100, !full);
        check_transposed(c);
        assert_int_equal(hd_checkpoint_find(c, "empty")->bytes, 0);
        hd_checkpoint_close(c);
        for (int32_t i = 0; i < N_COUNTERS; i++) {
            assert_int_equal(users[i], i >= 3 && i <= 5 ? USERS - 1 - full : USERS);
        }
    }
    assert_int_equal(shared_device_waits(d), 2 * 2); /* "turned" has no event */
    assert_int_equal(shared_device_opened(d), 0);
    close_counters(users);
    hd_device_close(d);
}

static void a_bucket_on_a_gpu_comes(void **state) {
    (void)state;
    hd_device *d = shared_device_open();
    int64_t *users = open_counters();
    hd_checkpoint *c;
    assert_int_equal(read_pickle(&c, d, PICKLES "cuda_bucket", true, NULL, NULL, NULL), HD_OK);
    check_bytes(c, "one", 'B', 256, 3 * 5 * 2, true);
    check_bytes(c, "two", 'B', 256 + 32, 7 * 4, true);
    hd_checkpoint_close(c);
    assert_int_equal(users[6], USERS - 1); /* one storage, one user */
    assert_int_equal(shared_device_waits(d), 1);
    assert_int_equal(shared_device_opened(d), 0);
    close_counters(users);
    hd_device_close(d);
}

static void bad_pickles_of_a_gpu_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *from, *to, *says;
    } bad[] = {
        {"AAAA",         "AAAZ",         "opens nothing"},
        {"cAAAA",        "eAAAA",        "expandable"   },
        {"/torch_",      "/torch/",      "counter"      },
        {"/torch_",      "/tmp/x_",      "counter"      },
        {"_hadal_",      "_ha/al_",      "counter"      },
        {"bfloat16",     "bfloat17",     "dtype"        },
        {"rebuild_cuda", "rebuild_cudb", "rebuild_cudb" },
    };
    hd_device *d = shared_device_open();
    for (size_t i = 0; i < HD_LEN(bad); i++) {
        hd_checkpoint *c;
        hd_err err = {0};
        assert_int_equal(
            read_pickle(&c, d, PICKLES "cuda", false, bad[i].from, bad[i].to, &err),
            HD_EFORMAT);
        assert_true(strstr(err.msg, bad[i].says) && strstr(err.msg, "tensor "));
        assert_null(c);
    }
    assert_int_equal(shared_device_opened(d), 0);
    hd_device_close(d);
}

/* ---- the plain list ---- */

static hd_status read_list(hd_checkpoint **out, hd_device *d, const char *text, hd_err *err) {
    json_t *list;
    assert_int_equal(hd_json_parse(&list, text, strlen(text), "a list", NULL), HD_OK);
    const hd_status st = hd_ipc_tensors_read(out, list, d, err);
    json_decref(list);
    return st;
}

/* base64 of 64 times 'A' and 'B' */
#define A21 \
    "QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFB"
#define A64 A21 "QQ=="
#define B64 \
    "QkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQkJCQg=="

#define SHAPE(shape)   "\"name\": \"norm\", \"shape\": [" shape "]"
#define F32            ", \"dtype\": \"F32\""
#define HANDLE(handle) ", \"handle\": \"" handle "\""
#define OFFSET(offset) ", \"offset\": " offset

static void listed_tensors_come(void **state) {
    (void)state;
    static const char list[] =
        "[{\"name\": \"a\", \"dtype\": \"BF16\", \"shape\": [3, 4], \"handle\": \"" A64 "\"},"
        " {\"name\": \"b\", \"dtype\": \"U8\", \"shape\": [4000], \"handle\": \"" B64
        "\", \"offset\": 96},"
        " {\"name\": \"c\", \"dtype\": \"F32\", \"shape\": [], \"handle\": \"" A64
        "\", \"offset\": 4092}]";
    hd_device *d = shared_device_open();
    hd_checkpoint *c;
    assert_int_equal(read_list(&c, d, list, NULL), HD_OK);
    check_bytes(c, "a", 'A', 0, 24, true);
    check_bytes(c, "b", 'B', 96, 4000, true);
    check_bytes(c, "c", 'A', 4092, 4, true);
    hd_checkpoint_close(c);
    assert_int_equal(shared_device_opened(d), 0);
    hd_device_close(d);
}

static void bad_lists_are_refused(void **state) {
    (void)state;
    static const struct {
        const char *fields, *says;
    } bad[] = {
        {SHAPE("4") F32,                                           "bad handle"   },
        {SHAPE("4") F32 HANDLE("QUFB"),                            "bad handle"   },
        {SHAPE("4") F32 HANDLE(A64 A64),                           "bad handle"   },
        {SHAPE("4") F32 ", \"handle\": 7",                         "bad handle"   },
        {SHAPE("4") F32 HANDLE(A21 "Wg=="),                        "opens nothing"},
        {SHAPE("-4") F32 HANDLE(A64),                              "bad shape"    },
        {"\"name\": \"norm\"" F32 HANDLE(A64),                     "bad shape"    },
        {SHAPE("1, 1, 1, 1, 1, 1, 1, 1, 1") F32 HANDLE(A64),       "bad shape"    },
        {SHAPE("4") HANDLE(A64),                                   "dtype"        },
        {SHAPE("4") ", \"dtype\": \"F33\"" HANDLE(A64),            "dtype"        },
        {SHAPE("4294967296, 4294967296") F32 HANDLE(A64),          "overflow"     },
        {SHAPE("4") F32 HANDLE(A64) OFFSET("-1"),                  "bad offset"   },
        {SHAPE("4") F32 HANDLE(A64) OFFSET("4081"),                "too small"    },
        {SHAPE("4") F32 HANDLE(A64) OFFSET("9223372036854775807"), "too small"    },
        {SHAPE("1025") F32 HANDLE(A64),                            "too small"    },
    };
    hd_device *d = shared_device_open();
    for (size_t i = 0; i < HD_LEN(bad); i++) {
        char text[600];
        hd_checkpoint *c;
        hd_err err = {0};
        snprintf(text, sizeof text, "[{%s}]", bad[i].fields);
        assert_int_equal(read_list(&c, d, text, &err), HD_EFORMAT);
        assert_true(strstr(err.msg, bad[i].says) && strstr(err.msg, "tensor norm"));
    }
    assert_int_equal(shared_device_opened(d), 0);
    hd_device_close(d);
}

static void without_a_gpu_they_are_refused(void **state) {
    (void)state;
    hd_checkpoint *c;
    hd_err err = {0};
    assert_int_equal(read_pickle(&c, NULL, PICKLES "cuda", false, NULL, NULL, &err),
                     HD_EFORMAT);
    assert_true(strstr(err.msg, "rebuild_cuda_tensor") && strstr(err.msg, "tensor plain"));
    err = (hd_err){0};
    assert_int_equal(read_list(&c, NULL, "[]", &err), HD_EINVAL);
    assert_non_null(strstr(err.msg, "not on a GPU"));
}

/* ---- weights with a copy on a device ---- */

typedef struct model {
    hd_device *device;
    hd_stream *stream;
    hd_model_spec *spec;
    hd_weights *weights;
} model;

static model open_uploaded(const char *dir) {
    model m = {.device = shared_device_open()};
    shared_device_set_remote(m.device);
    assert_int_equal(hd_stream_open(&m.stream, m.device, NULL), HD_OK);
    assert_int_equal(hd_model_spec_open(&m.spec, dir, NULL), HD_OK);
    assert_int_equal(hd_weights_open_updatable(&m.weights, dir, m.spec, NULL), HD_OK);
    assert_int_equal(hd_weights_upload(m.weights, m.device, m.stream, NULL, NULL), HD_OK);
    assert_ptr_equal(hd_weights_device(m.weights), m.device);
    return m;
}

static void close_uploaded(const model *m) {
    hd_weights_close(m->weights);
    hd_model_spec_close(m->spec);
    hd_stream_close(m->stream);
    hd_device_close(m->device);
}

/* Arrays of which the device has other bytes than the host; *bytes: how many. */
static size_t differing(const hd_weights *w, size_t *bytes) {
    size_t n = 0;
    *bytes = 0;
    for (size_t i = 0; i < w->n_moves; i++) {
        const uint8_t *a = w->moves[i].to, *b = w->moves[i].from;
        size_t here = 0;
        for (size_t k = 0; k < w->moves[i].bytes; k++) here += a[k] != b[k];
        n += here > 0;
        *bytes += here;
    }
    return n;
}

static void apply(const model *m, hd_checkpoint *c) {
    const hd_weights_update_rule all = {.whole = true};
    hd_weights_update *u;
    assert_int_equal(hd_weights_update_open(&u, m->weights, NULL), HD_OK);
    assert_int_equal(hd_weights_update_add(u, c, &all, NULL), HD_OK);
    assert_int_equal(hd_weights_update_apply(u, m->weights, m->stream, NULL), HD_OK);
    hd_weights_update_close(u);
}

/* Changes a bit of each tensor that stays a number by it. */
static void change_all(const hd_checkpoint *c) {
    for (int32_t i = 0; i < hd_checkpoint_count(c); i++) {
        const hd_tensor *t = hd_checkpoint_at(c, i);
        const bool plain = t->dtype == HD_BF16 || t->dtype == HD_F32;
        if (plain && t->bytes) ((uint8_t *)(uintptr_t)t->data)[0] ^= 1;
    }
}

static const char *const models[] = {"tests/golden/v3_small_mtp", "tests/golden/v4_odd",
                                     "tests/golden/v41_small"};

static void memory_of_a_device_comes_again(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(models); i++) {
        const model m = open_uploaded(models[i]);
        size_t bytes;
        for (int32_t changed = 0; changed < 2; changed++) {
            hd_checkpoint *c;
            hd_err err = {0};
            size_t released = 0;
            assert_int_equal(differing(m.weights, &bytes), 0);
            assert_int_equal(hd_weights_discard(m.weights, &released, NULL), HD_OK);
            assert_true(released > 0 && differing(m.weights, &bytes) > 0);
            assert_int_equal(hd_weights_lost(m.weights), 0);
            shared_device_fill(m.device, true);
            assert_int_equal(hd_weights_restore(m.weights, m.stream, &err), HD_ENOMEM);
            shared_device_fill(m.device, false);
            assert_int_equal(hd_weights_restore(m.weights, m.stream, NULL), HD_OK);
            assert_int_equal(differing(m.weights, &bytes), 0);
            assert_int_equal(hd_checkpoint_read(&c, models[i], NULL), HD_OK);
            change_all(c);
            apply(&m, c);
        }
        assert_int_equal(differing(m.weights, &bytes), 0);
        close_uploaded(&m);
    }
}

/* Bytes that are on the device in the stored format are copied from there: here they are others in
 * one place than on the host. */
static void updates_are_copied_on_the_device(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(models); i++) {
        const model m = open_uploaded(models[i]);
        hd_checkpoint *c;
        void *copy;
        size_t all = 0, n_matrices = 0, bytes;
        assert_int_equal(hd_checkpoint_read(&c, models[i], NULL), HD_OK);
        for (int32_t k = 0; k < hd_checkpoint_count(c); k++)
            all += hd_checkpoint_at(c, k)->bytes;
        assert_int_equal(hd_device_alloc(m.device, &copy, all, "copies", NULL), HD_OK);
        hd_checkpoint_keep_device(c, m.device, copy);
        uint8_t *to = copy;
        for (int32_t k = 0; k < hd_checkpoint_count(c); k++) {
            hd_tensor *t = (hd_tensor *)(uintptr_t)hd_checkpoint_at(c, k);
            memcpy(to, t->data, t->bytes);
            if (t->bytes) to[t->bytes - 1] ^= 1;
            t->on_device = to;
            to += t->bytes;
            n_matrices += t->rank == 2;
        }
        apply(&m, c);
        const size_t n = differing(m.weights, &bytes);
        assert_true(n > n_matrices / 2 && n == bytes);
        assert_int_equal(shared_device_copies(m.device), n);
        close_uploaded(&m);
    }
}

int test_remote(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pickled_tensors_on_a_gpu_come),
        cmocka_unit_test(a_bucket_on_a_gpu_comes),
        cmocka_unit_test(bad_pickles_of_a_gpu_are_refused),
        cmocka_unit_test(listed_tensors_come),
        cmocka_unit_test(bad_lists_are_refused),
        cmocka_unit_test(without_a_gpu_they_are_refused),
        cmocka_unit_test(memory_of_a_device_comes_again),
        cmocka_unit_test(updates_are_copied_on_the_device),
    };
    return cmocka_run_group_tests_name("remote", tests, NULL, NULL);
}
