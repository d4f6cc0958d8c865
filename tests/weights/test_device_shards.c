/* test_device_shards.c - shards of one model on devices: experts move between them for ever in the
 * memory that there is, and new weights reach every one. The devices are host memory that the model may
 * not read in place. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#include "fakes/shared_device.h"
#include "weights/experts/expert_moves.h"
#include "weights/update.h"
#include "weights/weights_internal.h"

enum { MAX_RANKS = 4, MAX_SLOTS = 96 };

typedef struct world {
    hd_model_spec *spec;
    hd_device *device;
    hd_stream *stream;
    hd_weights *whole, *rank[MAX_RANKS];
    hd_parallel_config parallel;
    int32_t n;
} world;

static hd_weights *open_rank(const world *w, int32_t rank) {
    hd_weights *shard;
    hd_err err = {0};
    assert_int_equal(hd_weights_open_shards(&shard, w->whole, &w->parallel, rank, &err), HD_OK);
    hd_weights_make_movable(shard);
    if (hd_weights_upload(shard, w->device, w->stream, NULL, &err) != HD_OK)
        fail_msg("%s", err.msg);
    return shard;
}

static world open_world(const char *dir, hd_parallel_config parallel) {
    world w = {.device = shared_device_open(), .parallel = parallel};
    hd_err err = {0};
    w.n = hd_parallel_world(&parallel);
    assert_non_null(w.device);
    shared_device_set_remote(w.device);
    assert_int_equal(hd_stream_open(&w.stream, w.device, NULL), HD_OK);
    assert_int_equal(hd_model_spec_open(&w.spec, dir, NULL), HD_OK);
    if (hd_weights_open_updatable(&w.whole, dir, w.spec, &err) != HD_OK)
        fail_msg("%s", err.msg);
    for (int32_t i = 0; i < w.n; i++) w.rank[i] = open_rank(&w, i);
    return w;
}

static void close_world(world *w) {
    for (int32_t i = 0; i < w->n; i++) hd_weights_close(w->rank[i]);
    hd_weights_close(w->whole);
    hd_model_spec_close(w->spec);
    hd_stream_close(w->stream);
    hd_device_close(w->device);
}

/* ---- experts that move ---- */

static bool lies_within(const void *at, const void *first, size_t range) {
    const uintptr_t a = (uintptr_t)at, b = (uintptr_t)first;
    return a >= b && a - b <= range;
}

/* Every slot has its expert's bytes, where captured kernels may look for them. */
static void check_layer(const world *w, int32_t layer) {
    for (int32_t i = 0; i < w->n; i++) {
        const hd_expert_map *map = hd_weights_expert_map(w->rank[i], layer);
        const hd_shard *shard = hd_weights_shard(w->rank[i]);
        for (int r = 0; r < 3; r++) {
            const hd_expert_table *t =
                hd_weights_experts(w->rank[i], layer, HD_EXPERT_GATE + r);
            for (int32_t k = 0; k < shard->n_experts; k++) {
                const hd_weight *is = &t->slots[k];
                const hd_weight *want = hd_weights_held_expert(
                    w->whole, layer, HD_EXPERT_GATE + r, map->expert[shard->expert0 + k]);
                const hd_stored_format f = hd_weight_format(want);
                const size_t n = hd_stored_data_bytes(&f, want->rows, want->cols);
                assert_true(lies_within(is->data, t->shape.data, t->data_range));
                assert_memory_equal(is->data, want->data, n);
                if (!want->scale) continue;
                assert_memory_equal(is->scale, want->scale,
                                    hd_stored_scale_bytes(&f, want->rows, want->cols));
            }
        }
    }
}

static bool is_in(const int32_t *map, int32_t first, int32_t n, int32_t expert) {
    for (int32_t i = first; i < first + n; i++) {
        if (map[i] == expert) return true;
    }
    return false;
}

/* Stages an expert at a rank from any that has it; the checksums of both ends are equal. */
static void stage(const world *w, int32_t layer, int32_t to, int32_t expert) {
    uint64_t sum[2] = {0};
    hd_err err = {0};
    int32_t from = 0;
    while (!hd_weights_held_expert(w->rank[from], layer, HD_EXPERT_GATE, expert)) from++;
    void *packed = calloc(1, hd_weights_packed_bytes(w->rank[from], layer));
    assert_non_null(packed);
    assert_int_equal(hd_weights_pack_expert(w->rank[from], layer, expert, packed, NULL), HD_OK);
    if (hd_weights_stage_expert(w->rank[to], layer, expert, packed, w->stream, &err) != HD_OK)
        fail_msg("%s", err.msg);
    hd_weights_sum_expert(w->rank[from], layer, expert, w->stream, &sum[0]);
    hd_weights_sum_expert(w->rank[to], layer, expert, w->stream, &sum[1]);
    assert_true(sum[0] != 0 && sum[0] == sum[1]);
    const hd_weight *there = hd_weights_held_expert(w->rank[to], layer, HD_EXPERT_UP, expert);
    uint8_t *byte = (uint8_t *)(uintptr_t)there->data;
    *byte ^= 1;
    sum[1] = 0;
    hd_weights_sum_expert(w->rank[to], layer, expert, w->stream, &sum[1]);
    assert_true(sum[0] != sum[1]);
    *byte ^= 1;
    free(packed);
}

/* Another order of the experts, and other copies. */
static void draw_map(const hd_expert_map *old, int32_t experts, int32_t *map) {
    for (int32_t i = 0; i < old->n_slots; i++) {
        map[i] = i < experts ? i : rand() % experts;
    }
    for (int32_t i = old->n_slots - 1; i > 0; i--) {
        const int32_t k = rand() % (i + 1), x = map[i];
        map[i] = map[k];
        map[k] = x;
    }
}

static void move_all(const world *w, int32_t layer, bool drop) {
    const hd_expert_map *old = hd_weights_expert_map(w->rank[0], layer);
    int32_t map[MAX_SLOTS];
    assert_true(old->n_slots <= MAX_SLOTS);
    draw_map(old, w->spec->route.n_experts, map);
    for (int32_t i = 0; i < w->n; i++) {
        const hd_shard *s = hd_weights_shard(w->rank[i]);
        for (int32_t e = 0; e < w->spec->route.n_experts; e++) {
            const bool has = is_in(old->expert, s->expert0, s->n_experts, e);
            if (!has && is_in(map, s->expert0, s->n_experts, e)) stage(w, layer, i, e);
        }
    }
    for (int32_t i = 0; i < w->n; i++) {
        hd_err err = {0};
        if (drop) {
            hd_weights_drop_staged(w->rank[i]);
        } else if (hd_weights_place_experts(w->rank[i], layer, map, w->stream, &err) != HD_OK) {
            fail_msg("%s", err.msg);
        }
    }
}

static void experts_move_for_ever(void **state) {
    (void)state;
    static const struct {
        const char *dir;
        int32_t ranks, spare;
    } worlds[] = {
        {"models/tiny-v4", 2, 4},
        {"models/tiny-v3", 4, 4},
    };
    for (size_t k = 0; k < HD_LEN(worlds); k++) {
        world w =
            open_world(worlds[k].dir, hd_parallel_expert(worlds[k].ranks, worlds[k].spare));
        for (int32_t round = 0; round < 40; round++) {
            const int32_t layer = round % w.spec->n_layers;
            if (w.spec->layers[layer].mlp == HD_MLP_DENSE) continue;
            move_all(&w, layer, round % 5 == 4);
            check_layer(&w, layer);
        }
        for (int32_t l = 0; l < w.spec->n_layers; l++) {
            if (w.spec->layers[l].mlp != HD_MLP_DENSE) check_layer(&w, l);
        }
        close_world(&w);
    }
}

/* ---- new weights ---- */

/* The bits of byte i that are signs. */
static uint8_t signs_in(hd_dtype type, size_t i) {
    if (type == HD_I8) return 0x88; /* two of E2M1 */
    const size_t bytes = type == HD_F32 ? 4 : type == HD_BF16 ? 2 : 1;
    if (type != HD_F32 && type != HD_BF16 && type != HD_E4M3) return 0;
    return i % bytes + 1 == bytes ? 0x80u : 0u;
}

/* Other signs everywhere, which is valid in every format. */
static void flip_signs(const hd_tensor *t) {
    uint8_t *data = (uint8_t *)(uintptr_t)t->data;
    const bool scale = strstr(t->name, "scale") != NULL;
    for (size_t i = 0; !scale && i < t->bytes; i++) {
        data[i] = (uint8_t)(data[i] ^ signs_in(t->dtype, i));
    }
}

/* Applies an update of the tensors whose names have a part; returns it, to be closed. */
static hd_weights_update *update(const world *w, const char *dir, const char *part) {
    const hd_weights_update_rule rule = {.whole = false};
    hd_weights_update *u;
    hd_checkpoint *c;
    hd_err err = {0};
    assert_int_equal(hd_checkpoint_read(&c, dir, &err), HD_OK);
    for (int32_t i = 0; i < hd_checkpoint_count(c); i++) {
        const hd_tensor *t = hd_checkpoint_at(c, i);
        if (strstr(t->name, part)) flip_signs(t);
    }
    assert_int_equal(hd_weights_update_open(&u, w->whole, &err), HD_OK);
    if (hd_weights_update_add(u, c, &rule, &err) != HD_OK) fail_msg("%s", err.msg);
    assert_int_equal(hd_weights_update_apply(u, w->whole, w->stream, &err), HD_OK);
    return u;
}

/* Every array on the device has the bytes that one has that was opened with these weights. */
static bool is_as_opened(const world *w, int32_t rank) {
    hd_weights *fresh = open_rank(w, rank);
    const hd_weights *is = w->rank[rank];
    bool same = true;
    assert_int_equal(is->n_moves, fresh->n_moves);
    for (size_t k = 0; k < is->n_moves; k++) {
        assert_int_equal(is->moves[k].bytes, fresh->moves[k].bytes);
        same &= memcmp(is->moves[k].to, fresh->moves[k].to, is->moves[k].bytes) == 0;
    }
    hd_weights_close(fresh);
    return same;
}

static void renew_ranks(const world *w, const hd_weights_update *u) {
    for (int32_t i = 0; i < w->n; i++) {
        hd_err err = {0};
        assert_false(is_as_opened(w, i));
        if (hd_weights_renew_shard(w->rank[i], w->whole, u, w->stream, &err) != HD_OK)
            fail_msg("%s", err.msg);
        assert_true(is_as_opened(w, i));
    }
}

static void every_shard_is_renewed(void **state) {
    (void)state;
    static const char *const dirs[] = {"tests/golden/v2_plain", "tests/golden/v3_small_mtp",
                                       "models/tiny-v3", "models/tiny-v4"};
    for (size_t k = 0; k < HD_LEN(dirs); k++) {
        world w = open_world(dirs[k], hd_parallel_tensor(2));
        hd_weights_update *u = update(&w, dirs[k], "");
        renew_ranks(&w, u);
        hd_weights_update_close(u);
        u = update(&w, dirs[k], "norm"); /* the others have their first signs again */
        renew_ranks(&w, u);
        hd_weights_update_close(u);
        for (int32_t i = 0; i < w.n; i++) { /* memory that was given back */
            size_t bytes = 0;
            assert_int_equal(hd_weights_discard(w.rank[i], &bytes, NULL), HD_OK);
            assert_true(bytes > 0 && !is_as_opened(&w, i));
            assert_int_equal(hd_weights_restore_shard(w.rank[i], w.whole, w.stream, NULL),
                             HD_OK);
            assert_true(is_as_opened(&w, i));
        }
        close_world(&w);
    }
}

/* Those that have come from another rank, too, and those that are staged. */
static void moved_experts_are_renewed(void **state) {
    (void)state;
    static const char dir[] = "models/tiny-v4";
    world w = open_world(dir, hd_parallel_expert(2, 4));
    const int32_t layer = w.spec->n_layers - 1;
    move_all(&w, layer, false);
    hd_weights_update *u = update(&w, dir, "experts");
    for (int32_t i = 0; i < w.n; i++) {
        assert_int_equal(hd_weights_renew_shard(w.rank[i], w.whole, u, w.stream, NULL), HD_OK);
    }
    check_layer(&w, layer);
    check_layer(&w, layer - 1);
    hd_weights_update_close(u);
    close_world(&w);
}

int test_device_shards(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(experts_move_for_ever),
        cmocka_unit_test(every_shard_is_renewed),
        cmocka_unit_test(moved_experts_are_renewed),
    };
    return cmocka_run_group_tests_name("device_shards", tests, NULL, NULL);
}
