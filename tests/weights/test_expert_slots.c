/* test_expert_slots.c - which expert each slot holds: as opened, and as placed later. */
#include "check.h"

#include <stdlib.h>
#include <string.h>

#include "weights/configs.h"
#include "weights/experts/expert_moves.h"

enum { MAX_SLOTS = 96 };

/* A copy of the experts in a layer's slots. */
static void read_slots(const hd_expert_map *map, int32_t *expert) {
    assert_true(map->n_slots <= MAX_SLOTS);
    memcpy(expert, map->expert, (size_t)map->n_slots * sizeof *expert);
}

static hd_weights *open_rank(const hd_model_spec *spec, const hd_parallel_config *parallel,
                             int32_t rank) {
    hd_weights *w;
    const hd_dummy_options o = {.parallel = *parallel, .rank = rank};
    assert_int_equal(hd_weights_open_dummy(&w, spec, &o, NULL), HD_OK);
    return w;
}

/* Slot s holds expert s % n; the rows of a rank take the copies of an expert in turn. */
static void check_opened(const char *name, const hd_parallel_config *parallel) {
    hd_model_spec *spec = config_open(name);
    const int32_t n = spec->route.n_experts;
    for (int32_t rank = 0; rank < hd_parallel_world(parallel); rank++) {
        hd_weights *w = open_rank(spec, parallel, rank);
        for (int32_t l = 0; l < spec->n_layers + spec->n_mtp; l++) {
            const hd_expert_map *map = hd_weights_expert_map(w, l);
            assert_int_equal(map != NULL, spec->layers[l].mlp != HD_MLP_DENSE);
            if (!map) continue;
            assert_int_equal(map->n_slots, n + parallel->redundant);
            assert_int_equal(map->version, 0);
            for (int32_t s = 0; s < map->n_slots; s++) {
                assert_int_equal(map->expert[s], s % n);
            }
            for (int32_t e = 0; e < n; e++) {
                const int32_t copies = (map->n_slots - 1 - e) / n + 1;
                const int32_t ep = hd_parallel_coords(parallel, rank).ep;
                assert_int_equal(map->n_choices % copies, 0); /* in equal parts */
                for (int32_t k = 0; k < map->n_choices; k++) {
                    assert_int_equal(map->slot[e * map->n_choices + k],
                                     e + (ep + k) % copies * n);
                }
            }
        }
        hd_weights_close(w);
    }
    hd_model_spec_close(spec);
}

static void slots_are_opened_in_order(void **state) {
    (void)state;
    const hd_parallel_config configs[] = {hd_parallel_single(), hd_parallel_tensor(2),
                                          hd_parallel_expert(4, 0), hd_parallel_expert(3, 2)};
    for (size_t i = 0; i < HD_LEN(configs); i++) check_opened("tiny_v3", &configs[i]);
    const hd_parallel_config copies = hd_parallel_expert(3, 6);
    check_opened("tiny_v4", &copies);
}

static int32_t moe_layer(const hd_model_spec *spec) {
    int32_t l = 0;
    while (spec->layers[l].mlp == HD_MLP_DENSE) l++;
    return l;
}

/* Two slots exchange their experts: the map, and the matrices of all three roles. */
static void slots_exchange_experts(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("tiny_v3");
    const hd_parallel_config single = hd_parallel_single();
    hd_weights *w = open_rank(spec, &single, 0);
    const int32_t l = moe_layer(spec);
    const hd_expert_map *map = hd_weights_expert_map(w, l);
    const hd_expert_table *table[3];
    const void *data[3][2];
    int32_t expert[MAX_SLOTS];
    for (int r = 0; r < 3; r++) {
        table[r] = hd_weights_experts(w, l, HD_EXPERT_GATE + r);
        data[r][0] = table[r]->slots[1].data;
        data[r][1] = table[r]->slots[5].data;
        assert_ptr_not_equal(data[r][0], data[r][1]);
    }
    read_slots(map, expert);
    expert[1] = 5;
    expert[5] = 1;
    assert_int_equal(hd_weights_place_experts(w, l, expert, NULL, NULL), HD_OK);
    assert_ptr_equal(hd_weights_expert_map(w, l), map);
    assert_int_equal(map->version, 1);
    for (int32_t e = 0; e < spec->route.n_experts; e++) {
        assert_int_equal(map->slot[e], e == 1 ? 5 : e == 5 ? 1 : e);
        assert_int_equal(map->expert[map->slot[e]], e);
    }
    for (int r = 0; r < 3; r++) {
        assert_ptr_equal(hd_weights_experts(w, l, HD_EXPERT_GATE + r), table[r]);
        assert_ptr_equal(table[r]->slots[1].data, data[r][1]);
        assert_ptr_equal(table[r]->slots[5].data, data[r][0]);
    }
    assert_int_equal(hd_weights_expert_map(w, l + 1)->version, 0);
    hd_weights_close(w);
    hd_model_spec_close(spec);
}

static void wrong_places_are_refused(void **state) {
    (void)state;
    hd_model_spec *spec = config_open("tiny_v3");
    const hd_parallel_config spread = hd_parallel_expert(2, 0);
    hd_weights *w = open_rank(spec, &spread, 1);
    const int32_t l = moe_layer(spec), n = spec->route.n_experts;
    const hd_expert_map *map = hd_weights_expert_map(w, l);
    const struct {
        int32_t slot, expert;
        const char *why;
    } wrong[] = {
        {0,     n,  "must be below"                  },
        {0,     -1, "must be below"                  },
        {n - 1, 0,  "expert 0, which rank 1 does not"},
        {0,     1,  "no slot for expert 0"           },
    };
    int32_t expert[MAX_SLOTS];
    for (size_t i = 0; i < HD_LEN(wrong); i++) {
        hd_err err = {0};
        read_slots(map, expert);
        expert[wrong[i].slot] = wrong[i].expert;
        assert_int_equal(hd_weights_place_experts(w, l, expert, NULL, &err), HD_EINVAL);
        if (!strstr(err.msg, wrong[i].why)) fail_msg("%s", err.msg);
        assert_int_equal(map->version, 0);
        for (int32_t e = 0; e < n; e++) assert_int_equal(map->slot[e], e);
    }
    hd_err err = {0};
    assert_int_equal(hd_weights_place_experts(w, 0, expert, NULL, &err), HD_EINVAL);
    assert_non_null(strstr(err.msg, "layer 0 has no experts"));
    hd_weights_close(w);
    hd_model_spec_close(spec);
}

/* What a table says of all its slots: range, worst alignment, format, global scale. */
static void tables_describe_all_slots(void **state) {
    (void)state;
    _Alignas(HD_EXPERT_ALIGN) static uint8_t bytes[1024];
    hd_weight w[3] = {
        {.data = bytes + 512, .scale = bytes + 256, .type = HD_E4M3, .scale_type = HD_F32},
        {.data = bytes + 128, .scale = bytes + 384, .type = HD_E4M3, .scale_type = HD_F32},
        {.data = bytes + 768, .scale = bytes + 384, .type = HD_E4M3, .scale_type = HD_F32},
    };
    hd_expert_table t;
    for (int i = 0; i < 3; i++) w[i].global = 1.0f;
    hd_expert_table_init(&t, w, 3);
    assert_ptr_equal(t.slots, w);
    assert_int_equal(t.n, 3);
    assert_ptr_equal(t.shape.data, bytes + 128);
    assert_ptr_equal(t.shape.scale, bytes + 256);
    assert_int_equal(t.data_range, 640);
    assert_true(t.one_format && t.one_global);
    hd_expert_table_extend(&t, &(hd_weight){.data = bytes});
    assert_ptr_equal(t.shape.data, bytes);
    assert_int_equal(t.data_range, 768);
    hd_expert_table_extend(&t, &(hd_weight){.data = bytes + 896});
    assert_ptr_equal(t.shape.data, bytes);
    assert_int_equal(t.data_range, 896);
    w[2].data = bytes + 770;
    w[1].scale = bytes + 388;
    w[1].global = 0.5f;
    w[0].type = HD_E2M1;
    hd_expert_table_init(&t, w, 3);
    assert_int_equal((uintptr_t)t.shape.data % HD_EXPERT_ALIGN, 2);
    assert_int_equal((uintptr_t)t.shape.scale % HD_EXPERT_ALIGN, 4);
    assert_false(t.one_format || t.one_global);
    w[0] = w[1] = (hd_weight){0};
    w[2].scale = NULL;
    hd_expert_table_init(&t, w, 3); /* two that are missing */
    assert_null(t.shape.scale);
    assert_true(t.one_format && t.one_global);
    assert_ptr_equal(t.shape.data, bytes + 770);
}

/* ---- experts from other ranks ---- */

typedef struct pair {
    hd_model_spec *spec;
    hd_weights *whole, *from, *to;
    int32_t layer, expert; /* that `from` has and `to` has not */
    uint8_t *packed;
    size_t bytes;
} pair;

static pair open_pair(const char *dir) {
    pair p = {0};
    const hd_parallel_config two = hd_parallel_expert(2, 0);
    assert_int_equal(hd_model_spec_open(&p.spec, dir, NULL), HD_OK);
    assert_int_equal(hd_weights_open(&p.whole, dir, p.spec, NULL), HD_OK);
    assert_int_equal(hd_weights_open_shards(&p.from, p.whole, &two, 0, NULL), HD_OK);
    assert_int_equal(hd_weights_open_shards(&p.to, p.whole, &two, 1, NULL), HD_OK);
    p.layer = moe_layer(p.spec);
    p.expert = 1;
    p.bytes = hd_weights_packed_bytes(p.from, p.layer);
    assert_true(p.bytes > 0);
    assert_int_equal(hd_weights_packed_bytes(p.to, p.layer), p.bytes);
    p.packed = malloc(p.bytes);
    assert_non_null(p.packed);
    assert_int_equal(hd_weights_pack_expert(p.from, p.layer, p.expert, p.packed, NULL), HD_OK);
    return p;
}

static void close_pair(pair *p) {
    free(p->packed);
    hd_weights_close(p->to);
    hd_weights_close(p->from);
    hd_weights_close(p->whole);
    hd_model_spec_close(p->spec);
}

/* The map with the expert in the last slot. */
static const int32_t *moved_map(const pair *p) {
    static int32_t map[MAX_SLOTS];
    read_slots(hd_weights_expert_map(p->to, p->layer), map);
    const int32_t n = hd_weights_expert_map(p->to, p->layer)->n_slots, last = map[n - 1];
    map[n - 1] = p->expert;
    map[p->expert] = last;
    return map;
}

static void check_same(const hd_weight *a, const hd_weight *b) {
    const hd_stored_format f = hd_weight_format(a);
    assert_int_equal(a->rows, b->rows);
    assert_int_equal(a->cols, b->cols);
    assert_memory_equal(a->data, b->data, hd_stored_data_bytes(&f, a->rows, a->cols));
    if (a->scale) {
        assert_memory_equal(a->scale, b->scale, hd_stored_scale_bytes(&f, a->rows, a->cols));
    }
}

/* All matrices with their scales arrive, are used by the next map and freed by the one after. */
static void experts_arrive_whole(void **state) {
    (void)state;
    static const char *const dirs[] = {"models/tiny-v4", "models/tiny-v3"};
    for (size_t i = 0; i < HD_LEN(dirs); i++) {
        pair p = open_pair(dirs[i]);
        const int32_t *map = moved_map(&p);
        int32_t first[MAX_SLOTS];
        read_slots(hd_weights_expert_map(p.to, p.layer), first);
        assert_int_equal(hd_weights_check_map(p.to, p.layer, map, NULL), HD_EINVAL);
        for (int32_t k = 0; k < 2; k++) { /* the second time it is there */
            assert_int_equal(
                hd_weights_stage_expert(p.to, p.layer, p.expert, p.packed, NULL, NULL), HD_OK);
        }
        assert_int_equal(hd_weights_place_experts(p.to, p.layer, map, NULL, NULL), HD_OK);
        for (int r = 0; r < 3; r++) {
            const hd_expert_table *a = hd_weights_experts(p.from, p.layer, HD_EXPERT_GATE + r);
            const hd_expert_table *b = hd_weights_experts(p.to, p.layer, HD_EXPERT_GATE + r);
            const int32_t own = hd_weights_shard(p.to)->n_experts;
            check_same(&a->slots[p.expert], &b->slots[own - 1]);
        }
        assert_int_equal(hd_weights_place_experts(p.to, p.layer, first, NULL, NULL), HD_OK);
        assert_int_equal(hd_weights_check_map(p.to, p.layer, map, NULL), HD_EINVAL);
        close_pair(&p);
    }
}

/* Whatever byte of a packed expert is another, it is not kept. */
static void damaged_experts_are_refused(void **state) {
    (void)state;
    pair p = open_pair("models/tiny-v4");
    const size_t stride = p.bytes / 300;
    hd_err err = {0};
    for (size_t at = 0; at < p.bytes; at += at < 128 ? 1 : stride) {
        p.packed[at] ^= 1;
        assert_int_equal(hd_weights_stage_expert(p.to, p.layer, p.expert, p.packed, NULL, NULL),
                         HD_EFORMAT);
        p.packed[at] ^= 1;
    }
    assert_int_equal(hd_weights_stage_expert(p.to, p.layer, p.expert + 1, p.packed, NULL, &err),
                     HD_EFORMAT);
    assert_int_equal(hd_weights_check_map(p.to, p.layer, moved_map(&p), NULL), HD_EINVAL);
    int32_t map[MAX_SLOTS]; /* the same places, another version */
    read_slots(hd_weights_expert_map(p.to, p.layer), map);
    assert_int_equal(hd_weights_place_experts(p.to, p.layer, map, NULL, NULL), HD_OK);
    err = (hd_err){0};
    assert_int_equal(hd_weights_stage_expert(p.to, p.layer, p.expert, p.packed, NULL, &err),
                     HD_EFORMAT);
    assert_non_null(strstr(err.msg, "version"));
    assert_int_equal(hd_weights_pack_expert(p.to, p.layer, p.expert, p.packed, NULL),
                     HD_EINVAL);
    close_pair(&p);
}

/* Staged experts that no map uses are freed; the sanitizer looks for what is left. */
static void staged_experts_can_be_dropped(void **state) {
    (void)state;
    pair p = open_pair("models/tiny-v3");
    for (int k = 0; k < 2; k++) {
        assert_int_equal(hd_weights_stage_expert(p.to, p.layer, p.expert, p.packed, NULL, NULL),
                         HD_OK);
        assert_int_equal(hd_weights_check_map(p.to, p.layer, moved_map(&p), NULL), HD_OK);
        if (k == 0) hd_weights_drop_staged(p.to);
        if (k == 0) {
            assert_int_equal(hd_weights_check_map(p.to, p.layer, moved_map(&p), NULL),
                             HD_EINVAL);
        }
    }
    close_pair(&p);
}

int test_expert_slots(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_are_opened_in_order),
        cmocka_unit_test(slots_exchange_experts),
        cmocka_unit_test(wrong_places_are_refused),
        cmocka_unit_test(tables_describe_all_slots),
        cmocka_unit_test(experts_arrive_whole),
        cmocka_unit_test(damaged_experts_are_refused),
        cmocka_unit_test(staged_experts_can_be_dropped),
    };
    return cmocka_run_group_tests_name("expert_slots", tests, NULL, NULL);
}
