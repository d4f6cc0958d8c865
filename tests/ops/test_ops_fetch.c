/* test_ops_fetch.c - moe_fetch: which experts a round has, the slots that they take, what is copied,
 * and where the table says that it is. */
#include "ops/ops_fixture.h"

#include <string.h>

enum { USES = 4, MOST_ROUNDS = 12, ROLES = HD_EXPERT_MATRICES };

typedef struct fetch_case {
    const char *name;
    int32_t n_experts, n_slots, most;
    int32_t sparse; /* one expert in so many has rows; 99: none */
    int32_t shift;  /* bytes by which sources are not aligned */
    int32_t bytes;  /* of a matrix */
} fetch_case;

static const fetch_case cases[] = {
    {"one slot",                1,    1,   1,  1,  0, 16   },
    {"a slot for all",          7,    1,   1,  1,  0, 35   },
    {"one round",               40,   12,  12, 5,  0, 4097 },
    {"rounds of one",           23,   9,   1,  2,  8, 50   },
    {"rounds of a quarter",     66,   17,  4,  1,  4, 333  },
    {"rounds of all slots",     66,   17,  17, 1,  1, 333  },
    {"all have slots",          30,   30,  30, 1,  0, 64   },
    {"nothing is selected",     30,   4,   4,  99, 0, 64   },
    {"as many as there may be", 1024, 150, 30, 7,  2, 17   },
    {"large matrices",          6,    3,   3,  2,  0, 70001},
};

/* What a case reads and writes beside its outputs. */
typedef struct fetch_job {
    const fetch_case *c;
    hd_moe_fetch_args a;
    int32_t *offset[USES];
    int32_t rounds[USES];
} fetch_job;

static int64_t aligned(int64_t n) {
    return (n + 255) / 256 * 256;
}

static void *take_aligned_bytes(int64_t n) {
    uint8_t *p = take((size_t)n + 256);
    return p + (256 - (uintptr_t)p % 256) % 256;
}

static void take_sources(fetch_job *j) {
    const fetch_case *c = j->c;
    hd_weight *from = take((size_t)(ROLES * c->n_experts) * sizeof *from);
    int64_t at = 0;
    for (int32_t m = 0; m < ROLES; m++) {
        const int64_t data = c->bytes + m, scale = m == 1 ? 0 : c->bytes / 7 + 1;
        j->a.layout.data_at[m] = at;
        j->a.layout.data_bytes[m] = data;
        j->a.layout.scale_at[m] = at += aligned(data);
        j->a.layout.scale_bytes[m] = scale;
        at += aligned(scale);
        for (int32_t e = 0; e < c->n_experts; e++) {
            uint8_t *bytes = (uint8_t *)take_aligned_bytes(data + scale + 64) + c->shift;
            for (int64_t i = 0; i < data + scale; i++) bytes[i] = (uint8_t)random_below(256);
            from[m * c->n_experts + e] = (hd_weight){.data = bytes,
                                                     .scale = scale ? bytes + data : NULL,
                                                     .rows = m + 1,
                                                     .cols = 5,
                                                     .global = (float)(e + 1)};
        }
    }
    j->a.from = from;
    j->a.slots.slot_bytes = at;
}

/* Use u chooses every `sparse`th expert, from another one on; the third one those of the second. */
static void take_offsets(fetch_job *j) {
    const fetch_case *c = j->c;
    for (int32_t u = 0; u < USES; u++) {
        int32_t selected = 0;
        j->offset[u] = take_ints(c->n_experts + 1);
        for (int32_t e = 0; e < c->n_experts; e++) {
            const bool has = (e + (u == 2 ? 1 : u)) % c->sparse == c->sparse / 2;
            selected += has;
            j->offset[u][e + 1] = j->offset[u][e] + (has && c->sparse < 99 ? 1 + e % 3 : 0);
        }
        j->rounds[u] = (selected + c->most - 1) / c->most;
        if (j->rounds[u] < 1) j->rounds[u] = 1;
        if (j->rounds[u] > MOST_ROUNDS) j->rounds[u] = MOST_ROUNDS; /* an end in the middle */
    }
}

static int32_t all_rounds(const fetch_job *j) {
    int32_t n = 0;
    for (int32_t u = 0; u < USES; u++) n += j->rounds[u];
    return n;
}

static void open_job(fetch_job *j, const fetch_case *c) {
    *j = (fetch_job){
        .c = c, .a = {.n_experts = c->n_experts, .most = c->most}
    };
    j->a.slots.n_slots = c->n_slots;
    take_sources(j);
    take_offsets(j);
    j->a.slots.memory = take_aligned_bytes(c->n_slots * j->a.slots.slot_bytes);
    j->a.table = take((size_t)(ROLES * c->n_experts) * sizeof *j->a.table);
    j->a.todo = take_ints(1 + 2 * c->n_experts);
    j->a.seen = take(sizeof *j->a.seen);
}

static void run_fetch(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                      int32_t n, void *const *out) {
    const fetch_job *j = c->args;
    hd_moe_fetch_args a = j->a;
    int32_t *ints = out[1];
    int64_t *longs = out[2];
    (void)first;
    (void)n;
    a.slots.slot = ints;
    a.slots.holder = ints + a.n_experts;
    a.end = a.slots.holder + a.slots.n_slots;
    a.slots.used = longs;
    a.slots.clock = longs + a.slots.n_slots;
    a.counts = (hd_fetch_counts *)(a.slots.clock + 1);
    for (int32_t i = 0; i < a.n_experts + a.slots.n_slots; i++) ints[i] = -1;
    for (int32_t i = 0; i < a.slots.n_slots + 5; i++) longs[i] = 0;
    a.round_offset = out[0];
    for (int32_t u = 0; u < USES; u++) {
        a.offset = j->offset[u];
        for (int32_t r = 0; r < j->rounds[u]; r++) {
            a.first = r == 0;
            ops->moe_fetch(s, &a);
            a.round_offset += a.n_experts + 1;
        }
    }
}

static void check_array(const void *have, const uint8_t *slot, int64_t at, const void *want,
                        int64_t bytes) {
    if (bytes == 0) return;
    assert_ptr_equal(have, slot + at);
    assert_memory_equal(have, want, (size_t)bytes);
}

/* Every slot has its holder's arrays, and the table has those of the last round with rows. */
static void check_slots(const fetch_job *j, const int32_t *slot, const int32_t *last) {
    const hd_moe_fetch_args *a = &j->a;
    for (int32_t e = 0; e < a->n_experts; e++) {
        const bool in_round = last[e + 1] > last[e];
        if (in_round) assert_true(slot[e] >= 0);
        if (slot[e] < 0) continue;
        const uint8_t *at = a->slots.memory + slot[e] * a->slots.slot_bytes;
        for (int32_t m = 0; m < ROLES; m++) {
            const hd_weight *from = &a->from[m * a->n_experts + e];
            const hd_weight *have = &a->table[m * a->n_experts + e];
            assert_memory_equal(at + a->layout.data_at[m], from->data,
                                (size_t)a->layout.data_bytes[m]);
            if (!in_round) continue;
            check_array(have->data, at, a->layout.data_at[m], from->data,
                        a->layout.data_bytes[m]);
            check_array(have->scale, at, a->layout.scale_at[m], from->scale,
                        a->layout.scale_bytes[m]);
            assert_true(have->global == from->global && have->rows == from->rows);
            assert_true(!have->scale == !from->scale);
        }
    }
}

/* Two slots for four experts, a use of each expert in turn; and a use of 0, 1 and 3 in rounds of one
 * miss, where 0 takes the slot of 2, for 3 waits for its turn. */
static void slots_go_in_order(const hd_ops *ops) {
    static const fetch_case c = {"order", 4, 2, 1, 1, 0, 40};
    static const int32_t uses[] = {2, 3, 2, 1, 2, 3};
    static const int32_t held[][2] = {
        {2, -1},
        {2, 3 },
        {2, 3 },
        {2, 1 },
        {2, 1 },
        {2, 3 }
    };
    static const int32_t rounds[][3] = {
        {0, 3, 1},
        {1, 3, 4},
        {1, 3, 4}
    }; /* both slots, and the end, of each; the last is empty */
    hd_stream *s = stream_for(ops, fix.stream[0]);
    fetch_job j;
    open_job(&j, &c);
    hd_moe_fetch_args a = j.a;
    int32_t *offset = take_ints(5);
    a.slots.slot = take_ints(4);
    a.slots.holder = take_ints(2);
    a.slots.used = take(2 * sizeof *a.slots.used);
    a.slots.clock = take(sizeof *a.slots.clock);
    a.counts = take(sizeof *a.counts);
    a.round_offset = take_ints(5);
    a.end = take_ints(1);
    a.offset = offset;
    for (int32_t e = 0; e < 4; e++) a.slots.slot[e] = -1;
    for (int32_t i = 0; i < 2; i++) a.slots.holder[i] = -1, a.slots.used[i] = 0;
    *a.slots.clock = 0;
    *a.counts = (hd_fetch_counts){0};
    a.first = true;
    for (size_t u = 0; u < HD_LEN(uses); u++) {
        for (int32_t e = 0; e < 4; e++) offset[e + 1] = e >= uses[u];
        ops->moe_fetch(s, &a);
        finish("moe_fetch", s);
        assert_memory_equal(a.slots.holder, held[u], sizeof held[u]);
    }
    assert_int_equal(a.seen->used, 6);
    assert_int_equal(a.seen->staged, 2);
    for (int32_t e = 0; e < 4; e++) offset[e + 1] = offset[e] + (e != 2);
    for (size_t r = 0; r < HD_LEN(rounds); r++) {
        a.first = r == 0;
        ops->moe_fetch(s, &a);
        finish("moe_fetch", s);
        assert_memory_equal(a.slots.holder, rounds[r], 2 * sizeof(int32_t));
        assert_int_equal(*a.end, rounds[r][2]);
    }
    assert_int_equal(a.seen->fetched, 4 + 2);
}

void op_moe_fetch(void **state) {
    (void)state;
    for (int32_t t = 0; t < fix.n_tables; t++) slots_go_in_order(&fix.table[t]);
    forget_all(NULL);
    for (size_t i = 0; i < HD_LEN(cases); i++) {
        fetch_job j;
        open_job(&j, &cases[i]);
        const int32_t n = j.a.n_experts, n_rounds = all_rounds(&j);
        const op_case c = {
            .name = cases[i].name,
            .rows = 1,
            .n_outs = 3,
            .width = {n_rounds * (n + 1), n + j.a.slots.n_slots + 1,
                      2 * (j.a.slots.n_slots + 5)},
            .all_rows = true,
            .args = &j,
            .run = run_fetch
        };
        check_op(&c);
        for (int32_t t = 0; t < fix.n_tables; t++) {
            void *out[MAX_OUTS];
            hd_stream *s = stream_for(&fix.table[t], fix.stream[0]);
            for (int32_t k = 0; k < 3; k++) out[k] = take((size_t)c.width[k] * 4 + 8);
            memset(j.a.slots.memory, 0xee, (size_t)(j.a.slots.n_slots * j.a.slots.slot_bytes));
            run_fetch(&c, &fix.table[t], s, 0, 1, out);
            finish("moe_fetch", s);
            check_slots(&j, out[1], (int32_t *)out[0] + (int64_t)(n_rounds - 1) * (n + 1));
            const int64_t *longs = out[2];
            assert_memory_equal(j.a.seen, longs + j.a.slots.n_slots + 1, sizeof *j.a.seen);
        }
        forget_all(NULL);
    }
}
