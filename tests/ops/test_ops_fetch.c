/* test_ops_fetch.c - moe_fetch: which experts a round has, the slots that they take, what is copied,
 * and where the table says that it is; which rows are the host's; moe_round and moe_join. */
#include "ops/ops_fixture.h"

#include <string.h>

enum { USES = 4, MOST_ROUNDS = 12, ROLES = HD_EXPERT_MATRICES };

typedef struct fetch_case {
    const char *name;
    int32_t n_experts, n_slots, most;
    int32_t sparse;                    /* one expert in so many has rows; 99: none */
    int32_t shift;                     /* bytes by which sources are not aligned */
    int32_t bytes;                     /* of a matrix */
    enum { SLOTS, SET, SET_AHEAD } to; /* AHEAD: before rows have chosen */
} fetch_case;

static const fetch_case cases[] = {
    {"one slot",                1,    1,   1,  1,  0, 16,    SLOTS    },
    {"a slot for all",          7,    1,   1,  1,  0, 35,    SLOTS    },
    {"one round",               40,   12,  12, 5,  0, 4097,  SLOTS    },
    {"rounds of one",           23,   9,   1,  2,  8, 50,    SLOTS    },
    {"rounds of a quarter",     66,   17,  4,  1,  4, 333,   SLOTS    },
    {"rounds of all slots",     66,   17,  17, 1,  1, 333,   SLOTS    },
    {"all have slots",          30,   30,  30, 1,  0, 64,    SLOTS    },
    {"nothing is selected",     30,   4,   4,  99, 0, 64,    SLOTS    },
    {"as many as there may be", 1024, 150, 30, 7,  2, 17,    SLOTS    },
    {"large matrices",          6,    3,   3,  2,  0, 70001, SLOTS    },
    {"a set of one",            5,    2,   1,  1,  0, 48,    SET      },
    {"a set, some chosen",      40,   12,  5,  3,  4, 333,   SET      },
    {"a set before rows chose", 66,   17,  7,  2,  1, 333,   SET_AHEAD},
    {"a set larger than slots", 9,    1,   16, 1,  0, 64,    SET_AHEAD},
    {"a set and many experts",  1024, 600, 61, 7,  2, 17,    SET_AHEAD},
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
        if (c->to == SET_AHEAD) selected = c->n_experts - c->n_slots;
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
    if (c->to != SLOTS) j->a.set = take_aligned_bytes(c->most * j->a.slots.slot_bytes);
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
    a.range = a.slots.holder + a.slots.n_slots;
    a.slots.used = longs;
    a.slots.clock = longs + a.slots.n_slots;
    a.counts = (hd_fetch_counts *)(a.slots.clock + 1);
    for (int32_t i = 0; i < a.n_experts + a.slots.n_slots; i++) ints[i] = -1;
    for (int32_t i = 0; i < a.slots.n_slots + 9; i++) longs[i] = 0;
    a.round_offset = out[0];
    for (int32_t u = 0; u < USES; u++) {
        for (int32_t r = 0; r < j->rounds[u]; r++) {
            const hd_moe_round_args rows = {.round_offset = a.round_offset,
                                            .offset = j->offset[u],
                                            .range = a.range,
                                            .n_experts = a.n_experts};
            hd_moe_fetch_args own = a;
            own.before = r ? a.range : NULL;
            own.offset = j->c->to == SET_AHEAD ? NULL : j->offset[u];
            if (j->c->to == SET_AHEAD) own.round_offset = NULL;
            ops->moe_fetch(s, &own);
            if (j->c->to == SET_AHEAD) ops->moe_round(s, &rows);
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

/* Every slot has its holder's arrays, and the table has those of the last round with rows, in slots or in
 * the set. */
static void check_slots(const fetch_job *j, const int32_t *slot, const int32_t *last) {
    const hd_moe_fetch_args *a = &j->a;
    int32_t placed = 0;
    for (int32_t e = 0; e < a->n_experts; e++) {
        const bool in_round = last[e + 1] > last[e];
        if (in_round && !a->set) assert_true(slot[e] >= 0);
        if (slot[e] < 0 && !(in_round && a->set)) continue;
        const uint8_t *at = a->slots.memory + slot[e] * a->slots.slot_bytes;
        if (slot[e] < 0) {
            at = j->c->to == SET ? a->set + placed++ * a->slots.slot_bytes
                                 : (const uint8_t *)a->table[e].data - a->layout.data_at[0];
            assert_true(at >= a->set && at < a->set + a->most * a->slots.slot_bytes);
        }
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
    static const fetch_case c = {"order", 4, 2, 1, 1, 0, 40, SLOTS};
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
    a.range = take_ints(2);
    a.offset = offset;
    for (int32_t e = 0; e < 4; e++) a.slots.slot[e] = -1;
    for (int32_t i = 0; i < 2; i++) a.slots.holder[i] = -1, a.slots.used[i] = 0;
    *a.slots.clock = 0;
    *a.counts = (hd_fetch_counts){0};
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
        a.before = r ? a.range : NULL;
        ops->moe_fetch(s, &a);
        finish("moe_fetch", s);
        assert_memory_equal(a.slots.holder, rounds[r], 2 * sizeof(int32_t));
        assert_int_equal(a.range[1], rounds[r][2]);
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
            .width = {n_rounds * (n + 1), n + j.a.slots.n_slots + 2,
                      2 * (j.a.slots.n_slots + 9)},
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

/* ---- rows that the host computes ---- */

enum { SHARED = 11, SHARED_COLS = 24, SHARED_K = 2, MOST_SHARED = 20 };

/* Rows of each expert, what the host and the bus take, and how many experts the host shall get: by hand. */
typedef struct share_case {
    const char *name;
    int32_t rows[SHARED];
    int32_t expert_ns, row_ns, fetch_ns, most;
    bool always;
    int32_t sent;
} share_case;

static const share_case shares[] = {
  /* six are missing: 3 x 100 + 3 x 10 beside 3 x 100 */
    {"both alike",          {1, 1, 1, 1, 1, 1},          100, 10,  100,  20, false, 3},
    {"a slow host",         {1, 1, 1, 1, 1, 1},          900, 10,  100,  20, false, 0},
    {"a fast host",         {1, 1, 1, 1, 1, 1},          10,  1,   900,  20, false, 6},
    {"few rows go first",   {9, 1, 8, 1, 7},             10,  100, 1000, 20, false, 4},
    {"rows without room",   {2, 2, 2, 2},                10,  1,   900,  5,  false, 2},
    {"nothing is measured", {1, 1, 1, 1},                0,   0,   900,  20, false, 0},
    {"nothing was fetched", {1, 1, 1, 1},                10,  1,   0,    20, false, 0},
    {"all that has room",   {3, 3, 3, 3, 3, 3, 3, 3, 3}, 999, 99,  1,    20, true,  6},
    {"none is missing",     {0},                         10,  1,   900,  20, true,  0},
};

typedef struct share_job {
    hd_moe_fetch_args a;
    int32_t *offset;
    hd_host_mail *mail;
    hd_host_desk *desk;
    const float *x;
    float *y;
    int32_t n_places;
} share_job;

static void open_share(share_job *j, const share_case *c) {
    static const fetch_case like = {"shared", SHARED, SHARED, SHARED, 1, 0, 48, SLOTS};
    fetch_job f;
    open_job(&f, &like);
    int32_t *assignment;
    float *weight;
    *j = (share_job){.a = f.a};
    j->offset = take_ints(SHARED + 1);
    for (int32_t e = 0; e < SHARED; e++) j->offset[e + 1] = j->offset[e] + c->rows[e];
    j->n_places = j->offset[SHARED];
    j->x = take_random((int64_t)(j->n_places + 1) * SHARED_COLS, 1.0f);
    j->y = take_random((int64_t)(j->n_places + 1) * SHARED_COLS, 1.0f);
    assignment = take_ints(j->n_places + 1);
    weight = take_random(j->n_places + 1, 1.0f);
    for (int32_t p = 0; p < j->n_places; p++) assignment[p] = (p * 7 + 3) % j->n_places;
    j->mail = take(sizeof *j->mail);
    j->desk = take(sizeof *j->desk);
    *j->mail = (hd_host_mail){.expert_ns = c->expert_ns, .row_ns = c->row_ns};
    *j->desk = (hd_host_desk){.fetch_ns = c->fetch_ns};
    j->a.slots.slot = take_ints(SHARED);
    j->a.slots.holder = take_ints(SHARED);
    j->a.slots.used = take(SHARED * sizeof *j->a.slots.used);
    j->a.slots.clock = take(sizeof *j->a.slots.clock);
    j->a.counts = take(sizeof *j->a.counts);
    for (int32_t e = 0; e < SHARED; e++) j->a.slots.slot[e] = -1;
    for (int32_t i = 0; i < SHARED; i++) j->a.slots.holder[i] = -1, j->a.slots.used[i] = 0;
    *j->a.slots.clock = 0;
    *j->a.counts = (hd_fetch_counts){0};
    j->a.round_offset = take_ints(SHARED + 1);
    j->a.range = take_ints(2);
    j->a.offset = j->offset;
    j->a.host = (hd_host_rows){.mail = j->mail,
                               .desk = j->desk,
                               .x = take((size_t)MOST_SHARED * SHARED_COLS * sizeof(float)),
                               .weight = take((size_t)MOST_SHARED * sizeof(float)),
                               .y = take_random((int64_t)MOST_SHARED * SHARED_COLS, 1.0f),
                               .most = c->most,
                               .cols = SHARED_COLS,
                               .always = c->always};
    j->a.x = hd_f32(j->x);
    j->a.assignment = assignment;
    j->a.weight = weight;
    j->a.top_k = SHARED_K;
    j->a.layer = 5;
}

/* Whether x goes to the host before y in the layer's use number `now`. */
static bool precedes(const share_case *c, int32_t now, int32_t x, int32_t y) {
    if (c->rows[x] != c->rows[y]) return c->rows[x] < c->rows[y];
    return (x + now) % SHARED < (y + now) % SHARED;
}

/* The mail has the `sent` experts that go first, and their rows. */
static void check_mail(const share_job *j, const share_case *c, int32_t now, int32_t sent) {
    const hd_host_rows *h = &j->a.host;
    const hd_host_mail *m = j->mail;
    assert_int_equal(m->n, sent);
    assert_int_equal(m->layer, 5);
    int32_t row = 0;
    for (int32_t i = 0; i < sent; i++) {
        const int32_t e = m->expert[i];
        if (i) assert_true(precedes(c, now, m->expert[i - 1], e));
        assert_int_equal(m->first[i], row);
        for (int32_t p = j->offset[e]; p < j->offset[e + 1]; p++, row++) {
            const int32_t from = j->a.assignment[p];
            assert_memory_equal(h->x + (int64_t)row * SHARED_COLS,
                                j->x + (int64_t)(from / SHARED_K) * SHARED_COLS,
                                SHARED_COLS * sizeof(float));
            assert_true(h->weight[row] == j->a.weight[from]);
        }
    }
    assert_int_equal(m->first[sent], row);
}

/* Joins: rows of sent experts are the host's, all others as before. */
static void check_join(const hd_ops *ops, hd_stream *s, const share_job *j, int32_t sent) {
    float *want = take_copy(j->y, (size_t)(j->n_places + 1) * SHARED_COLS * sizeof *want);
    for (int32_t i = 0; i < sent; i++) {
        const int32_t e = j->mail->expert[i], at = j->offset[e], n = j->offset[e + 1] - at;
        memcpy(want + (int64_t)at * SHARED_COLS,
               j->a.host.y + (int64_t)j->mail->first[i] * SHARED_COLS,
               (size_t)n * SHARED_COLS * sizeof *want);
    }
    j->mail->done = j->mail->asked;
    ops->moe_join(s, &(hd_moe_join_args){.y = hd_f32(j->y),
                                         .offset = j->offset,
                                         .host = j->a.host,
                                         .counts = j->a.counts});
    finish("moe_join", s);
    check_bits("joined rows", j->y, want, (int64_t)(j->n_places + 1) * SHARED_COLS);
    assert_true(sent ? j->a.counts->taken_ns > 0 : j->a.counts->taken_ns == 0);
}

static void check_share(const hd_ops *ops, const share_case *c) {
    hd_stream *s = stream_for(ops, fix.stream[0]);
    share_job j;
    int32_t missing = 0;
    open_share(&j, c);
    for (int32_t e = 0; e < SHARED; e++) missing += c->rows[e] > 0;
    ops->moe_fetch(s, &j.a);
    finish("moe_fetch", s);
    if (j.desk->n != c->sent) {
        fail_msg("%s, %s: %d experts for the host, want %d", ops->name, c->name, j.desk->n,
                 c->sent);
    }
    assert_int_equal(j.mail->asked, c->sent > 0);
    assert_int_equal(j.a.counts->sent, c->sent);
    assert_int_equal(j.a.counts->fetched, missing - c->sent);
    assert_int_equal(j.a.counts->sent_rows, j.desk->rows);
    assert_true(missing == c->sent || j.desk->fetch_ns > 0);
    if (c->sent) check_mail(&j, c, 1, c->sent);
    check_join(ops, s, &j, c->sent);
}

/* The uses of a layer that leave all to the device; a host that gave up, and experts in turn. */
static void check_turns(const hd_ops *ops) {
    static const share_case c = {
        "turns", {1, 1, 1},
         10, 1, 10, 20, false, 2
    };
    hd_stream *s = stream_for(ops, fix.stream[0]);
    share_job j;
    int32_t sent[SHARED] = {0};
    open_share(&j, &c);
    for (int32_t use = 1; use <= 2 * HD_HOST_PAUSE; use++) {
        for (int32_t e = 0; e < SHARED; e++) j.a.slots.slot[e] = -1;
        for (int32_t i = 0; i < SHARED; i++) j.a.slots.holder[i] = -1;
        j.desk->fetch_ns = c.fetch_ns;
        ops->moe_fetch(s, &j.a);
        finish("moe_fetch", s);
        assert_int_equal(j.desk->n, use % HD_HOST_PAUSE ? 1 : 0);
        if (j.desk->n) sent[j.desk->expert[0]]++;
        j.mail->done = j.mail->asked;
    }
    assert_true(sent[0] > 0 && sent[2] > 0);
    if (j.desk->n == 0) ops->moe_fetch(s, &j.a);
    j.mail->done = j.mail->asked - 1;
    j.mail->ended = 1;
    ops->moe_join(
        s, &(hd_moe_join_args){
               .y = hd_f32(j.y), .offset = j.offset, .host = j.a.host, .counts = j.a.counts});
    finish("moe_join", s);
    assert_int_equal(j.mail->late, 0);
}

void op_moe_join(void **state) {
    (void)state;
    for (int32_t t = 0; t < fix.n_tables; t++) {
        for (size_t i = 0; i < HD_LEN(shares); i++) {
            check_share(&fix.table[t], &shares[i]);
            forget_all(NULL);
        }
        check_turns(&fix.table[t]);
        forget_all(NULL);
    }
}

/* ---- rounds ---- */

static void run_round(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                      int32_t n, void *const *out) {
    hd_moe_round_args a = *(const hd_moe_round_args *)c->args;
    (void)first;
    (void)n;
    a.round_offset = out[0];
    ops->moe_round(s, &a);
}

void op_moe_round(void **state) {
    (void)state;
    static const int32_t ranges[][3] = {
        {1,    0,   1   },
        {8,    2,   5   },
        {8,    8,   8   },
        {600,  0,   600 },
        {1024, 700, 1024}
    }; /* experts, and the range */
    for (size_t i = 0; i < HD_LEN(ranges); i++) {
        const int32_t n = ranges[i][0];
        int32_t *offset = take_ints(n + 1), *range = take_ints(2);
        for (int32_t e = 0; e < n; e++) offset[e + 1] = offset[e] + random_below(4);
        range[0] = ranges[i][1];
        range[1] = ranges[i][2];
        const hd_moe_round_args a = {.offset = offset, .range = range, .n_experts = n};
        check_op(&(op_case){.name = "moe_round",
                            .rows = 1,
                            .n_outs = 1,
                            .width = {n + 1},
                            .all_rows = true,
                            .args = &a,
                            .run = run_round});
        forget_all(NULL);
    }
}
