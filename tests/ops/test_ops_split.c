/* test_ops_split.c - rows of experts counted, divided over copies so that ranks have as equal sums as
 * possible, and placed accordingly: the same on all backends, no worse than in turn, and the
 * optimum, which the certificate of moe/split.h proves. */
#include "ops/ops_fixture.h"

#include <string.h>

#include "moe/eplb.h"

enum { MAX_RANKS = 72, MAX_SOURCES = 5 };

typedef enum route_kind { SKEWED, ALL_TO_ONE, EVEN } route_kind;

typedef struct split_shape {
    hd_split_shape n;
    int32_t gone;  /* ranks from 1 on without slots */
    bool flow;     /* a placement of the planner, which connects ranks; else drawn */
    int32_t top_k; /* at most n.experts */
    int32_t rows[MAX_SOURCES];
    int32_t n_sources;
    route_kind routes;
} split_shape;

typedef struct split_case {
    split_shape shape;
    int32_t rank0[MAX_RANKS + 1];
    int32_t *map;                 /* [slots] */
    int32_t *graph;               /* of it */
    int32_t *expert[MAX_SOURCES]; /* [rows, top_k] */
    int32_t *counts;              /* [n_sources, experts] */
} split_case;

/* ---- cases ---- */

static void plan_map(split_case *c) {
    const hd_split_shape n = c->shape.n;
    double *loads = take((size_t)n.experts * sizeof *loads);
    bool gone[MAX_RANKS] = {false};
    for (int32_t e = 0; e < n.experts; e++) loads[e] = 1 + random_below(1 << random_below(9));
    for (int32_t d = 1; d <= c->shape.gone; d++) gone[d] = true;
    const hd_eplb_args a = {.loads = loads,
                            .layers = 1,
                            .experts = n.experts,
                            .slots = n.slots,
                            .ranks = n.ranks,
                            .gone = gone,
                            .algorithm = HD_EPLB_FLOW};
    hd_eplb_map m;
    assert_int_equal(hd_eplb_plan(&m, &a, NULL), HD_OK);
    memcpy(c->map, m.slot_expert, (size_t)n.slots * sizeof *c->map);
    memcpy(c->rank0, m.rank_slot0, ((size_t)n.ranks + 1) * sizeof *c->rank0);
    hd_eplb_map_close(&m);
}

/* Every expert once, then any; slots in random order. */
static void draw_map(split_case *c) {
    const hd_split_shape n = c->shape.n;
    const int32_t gone_from = n.slots / n.ranks, gone_to = gone_from * (1 + c->shape.gone);
    for (int32_t d = 0; d <= n.ranks; d++) {
        c->rank0[d] = d * (n.slots / n.ranks) + (d < n.slots % n.ranks ? d : n.slots % n.ranks);
    }
    int32_t left = 0;
    for (int32_t i = 0; i < n.slots; i++) {
        const bool gone = c->shape.gone && i >= gone_from && i < gone_to;
        c->map[i] = gone ? -1 : left < n.experts ? left : random_below(n.experts);
        left += !gone;
    }
    assert_true(left >= n.experts);
    for (int32_t i = 0; i < n.slots; i++) {
        const int32_t k = random_below(i + 1), kept = c->map[i];
        if (kept < 0 || c->map[k] < 0) continue;
        c->map[i] = c->map[k];
        c->map[k] = kept;
    }
}

static int32_t draw_expert(const split_case *c) {
    const int32_t n = c->shape.n.experts;
    if (c->shape.routes == ALL_TO_ONE) return n / 2;
    const int32_t below = c->shape.routes == SKEWED ? 1 + random_below(n) : n;
    return random_below(below);
}

static void draw_rows(split_case *c) {
    const split_shape *s = &c->shape;
    c->counts = take_ints((int64_t)s->n_sources * s->n.experts);
    for (int32_t k = 0; k < s->n_sources; k++) {
        const int32_t n = s->rows[k] * s->top_k;
        c->expert[k] = take_ints(n);
        for (int32_t i = 0; i < n; i++) {
            c->expert[k][i] = draw_expert(c);
            c->counts[k * s->n.experts + c->expert[k][i]]++;
        }
    }
}

static void make_case(split_case *c, const split_shape *shape) {
    c->shape = *shape;
    c->map = take_ints(shape->n.slots);
    if (shape->flow) {
        plan_map(c);
    } else {
        draw_map(c);
    }
    c->graph = take_ints(hd_split_words(shape->n));
    const hd_split_graph g = hd_split_graph_in(c->graph, shape->n);
    hd_split_graph_make(&g, c->map, c->rank0);
    draw_rows(c);
}

static hd_moe_split_args split_args(const split_case *c, int32_t source, bool alone) {
    return (hd_moe_split_args){.graph = c->graph,
                               .expert = alone ? c->expert[source] : NULL,
                               .counts = alone ? NULL : c->counts,
                               .rows = c->shape.rows[source],
                               .top_k = c->shape.top_k,
                               .n_sources = c->shape.n_sources,
                               .source = source,
                               .shape = c->shape.n};
}

/* ---- properties ---- */

/* The largest sum of a rank; out [slots] of all sources if each row goes to the copy of its number
 * modulo their count. */
static int64_t most_in_turns(const split_case *c, int32_t source, int32_t end) {
    const split_shape *s = &c->shape;
    const hd_split_graph g = hd_split_graph_in(c->graph, s->n);
    int64_t sum[MAX_RANKS] = {0}, most = 0;
    for (int32_t k = source; k < end; k++) {
        for (int32_t i = 0; i < s->rows[k] * s->top_k; i++) {
            const int32_t e = c->expert[k][i], begin = g.holder0[e];
            const int32_t turn = (i / s->top_k + k) % (g.holder0[e + 1] - begin);
            const int32_t d = g.holder[begin + turn].rank;
            if (++sum[d] > most) most = sum[d];
        }
    }
    return most;
}

static int64_t most_of(const split_case *c, const int32_t *slots) {
    int64_t most = 0;
    for (int32_t d = 0; d < c->shape.n.ranks; d++) {
        int64_t sum = 0;
        for (int32_t i = c->rank0[d]; i < c->rank0[d + 1]; i++) sum += slots[i];
        most = sum > most ? sum : most;
    }
    return most;
}

/* The least that the busiest rank can have, which a certificate proves. */
static int64_t least_most(const split_case *c, const int32_t *rows) {
    const hd_split_shape n = c->shape.n;
    int32_t *out = take_ints(n.slots);
    bool proof[MAX_RANKS];
    hd_eplb_splitter *s;
    int64_t inside = 0, ranks = 0;
    assert_int_equal(hd_eplb_splitter_open(&s, c->map, c->rank0, n.experts, n.ranks, NULL),
                     HD_OK);
    const int64_t most = hd_eplb_split(s, rows, out, proof);
    const hd_split_graph g = hd_split_graph_in(c->graph, n);
    for (int32_t d = 0; d < n.ranks; d++) ranks += proof[d];
    for (int32_t e = 0; e < n.experts; e++) {
        bool only = true;
        for (int32_t k = g.holder0[e]; k < g.holder0[e + 1]; k++)
            only &= proof[g.holder[k].rank];
        inside += only ? rows[e] : 0;
    }
    assert_int_equal((inside + ranks - 1) / ranks, most);
    hd_eplb_splitter_close(s);
    return most;
}

/* Splits the rows of each source with the reference, alone or not. sum [slots] +=. */
static void add_split(const split_case *c, int32_t source, bool alone, int32_t *sum) {
    const hd_split_shape n = c->shape.n;
    const hd_split_graph g = hd_split_graph_in(c->graph, n);
    int32_t *offset = take_ints(n.slots + 1), *first = take_ints(n.slots);
    hd_moe_split_args a = split_args(c, source, alone);
    a.offset = offset;
    a.first = first;
    fix.table[0].moe_split(fix.stream[0], &a);
    finish("moe_split", fix.stream[0]);
    assert_int_equal(offset[0], 0);
    assert_int_equal(offset[n.slots], a.rows * a.top_k);
    for (int32_t e = 0; e < n.experts; e++) {
        int32_t number = 0;
        for (int32_t k = g.holder0[e]; k < g.holder0[e + 1]; k++) {
            const int32_t slot = g.holder[k].slot, here = offset[slot + 1] - offset[slot];
            assert_true(here >= 0);
            assert_int_equal(first[slot], number);
            number += here;
        }
        assert_int_equal(number, c->counts[source * n.experts + e]);
    }
    for (int32_t i = 0; i < n.slots; i++) sum[i] += offset[i + 1] - offset[i];
}

static void check_properties(const split_case *c) {
    const split_shape *s = &c->shape;
    int32_t *all = take_ints(s->n.experts), *sum = take_ints(s->n.slots);
    for (int32_t k = 0; k < s->n_sources; k++) {
        const int32_t *own = c->counts + k * s->n.experts;
        int32_t *alone = take_ints(s->n.slots);
        add_split(c, k, true, alone);
        assert_int_equal(most_of(c, alone), least_most(c, own));
        assert_true(most_of(c, alone) <= most_in_turns(c, k, k + 1));
        for (int32_t e = 0; e < s->n.experts; e++) all[e] += own[e];
        add_split(c, k, false, sum);
    }
    assert_int_equal(most_of(c, sum), least_most(c, all));
    assert_true(most_of(c, sum) <= most_in_turns(c, 0, s->n_sources));
}

static const split_shape shapes[] = {
    {{8, 12, 4},     0, true,  3, {9, 20},             2, SKEWED    },
    {{256, 288, 32}, 0, true,  8, {128, 5, 0, 64},     4, SKEWED    },
    {{256, 288, 72}, 0, true,  8, {40, 41, 42},        3, SKEWED    },
    {{256, 288, 72}, 3, true,  8, {90},                1, EVEN      },
    {{61, 97, 7},    0, true,  6, {33, 300, 1},        3, SKEWED    },
    {{61, 97, 7},    2, false, 6, {33, 300, 1},        3, SKEWED    },
    {{64, 64, 4},    0, false, 6, {100, 7},            2, SKEWED    }, /* no copies */
    {{16, 24, 1},    0, false, 2, {50, 2},             2, SKEWED    }, /* one rank */
    {{1, 5, 5},      0, false, 1, {7, 0, 23},          3, ALL_TO_ONE}, /* one expert everywhere */
    {{32, 44, 11},   0, false, 4, {0, 0},              2, EVEN      },
    {{32, 44, 11},   0, false, 4, {500, 31, 64, 2, 9}, 5, ALL_TO_ONE},
    {{5, 200, 3},    0, false, 1, {70, 71},            2, SKEWED    }, /* many times on a rank */
    {{40, 120, 40},  4, false, 3, {211, 1024},         2, EVEN      },
    {{128, 1400, 9}, 0, false, 8, {1200, 3},           2, SKEWED    },
};

/* ---- tests ---- */

static void run_count(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                      int32_t n, void *const *out) {
    hd_moe_count_args a = *(const hd_moe_count_args *)c->args;
    (void)first, (void)n;
    a.counts = out[0];
    ops->moe_count(s, &a);
}

void op_moe_count(void **state) {
    (void)state;
    static const int32_t n_rows[] = {0, 1, 37, 1300};
    for (size_t k = 0; k < HD_LEN(n_rows); k++) {
        const int32_t experts = k == 3 ? 1300 : 11, top_k = 1 + (int32_t)k;
        int32_t *expert = take_ints((int64_t)n_rows[k] * top_k);
        for (int32_t i = 0; i < n_rows[k] * top_k; i++) expert[i] = random_below(experts);
        const hd_moe_count_args a = {
            .expert = expert, .rows = n_rows[k], .top_k = top_k, .n_experts = experts};
        check_op(&(op_case){.name = "moe_count",
                            .rows = 1,
                            .n_outs = 1,
                            .width = {experts},
                            .all_rows = true,
                            .args = &a,
                            .run = run_count});
    }
}

static void run_split(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                      int32_t n, void *const *out) {
    hd_moe_split_args a = *(const hd_moe_split_args *)c->args;
    (void)first, (void)n;
    a.offset = out[0];
    a.first = out[1];
    ops->moe_split(s, &a);
}

static void run_placed(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                       int32_t n, void *const *out) {
    hd_moe_permute_args a = *(const hd_moe_permute_args *)c->args;
    (void)first, (void)n;
    a.assignment = out[0];
    a.place = out[1];
    a.load = out[2];
    memset(a.load, 0, (size_t)HD_N_ROW_PHASES * (size_t)a.n_experts * sizeof *a.load);
    ops->moe_permute(s, &a);
}

/* Each assignment lies in a slot of its expert, those of a slot in order. */
static void check_places(const split_case *c, hd_moe_permute_args a) {
    const int32_t n = a.rows * a.top_k;
    a.assignment = take_ints(n);
    a.place = take_ints(n);
    a.load = NULL;
    fix.table[0].moe_permute(fix.stream[0], &a);
    finish("moe_permute", fix.stream[0]);
    for (int32_t i = 0; i < n; i++) assert_int_equal(a.assignment[a.place[i]], i);
    for (int32_t slot = 0; slot < a.n_slots; slot++) {
        for (int32_t at = a.offset[slot]; at < a.offset[slot + 1]; at++) {
            assert_int_equal(a.expert[a.assignment[at]], c->map[slot]);
            if (at > a.offset[slot]) assert_true(a.assignment[at] > a.assignment[at - 1]);
        }
    }
}

static void check_placed(const split_case *c, int32_t source, bool alone) {
    const split_shape *s = &c->shape;
    hd_moe_split_args a = split_args(c, source, alone);
    int32_t *phase = take_ints(a.rows);
    for (int32_t r = 0; r < a.rows; r++) phase[r] = random_below(HD_N_ROW_PHASES + 1) - 1;
    a.offset = take_ints(s->n.slots + 1);
    a.first = take_ints(s->n.slots);
    fix.table[0].moe_split(fix.stream[0], &a);
    finish("moe_split", fix.stream[0]);
    const hd_moe_permute_args p = {.offset = a.offset,
                                   .expert = c->expert[source],
                                   .first = a.first,
                                   .graph = c->graph,
                                   .phase = phase,
                                   .load_stride = s->n.experts,
                                   .rows = a.rows,
                                   .top_k = a.top_k,
                                   .n_experts = s->n.experts,
                                   .n_slots = s->n.slots,
                                   .n_ranks = s->n.ranks};
    check_op(&(op_case){
        .name = "moe_permute of moe_split",
        .rows = 1,
        .n_outs = 3,
        .width = {a.rows * a.top_k, a.rows * a.top_k, 2 * HD_N_ROW_PHASES * s->n.experts},
        .all_rows = true,
        .args = &p,
        .run = run_placed
    });
    check_places(c, p);
}

void op_moe_split(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        split_case c;
        make_case(&c, &shapes[i]);
        for (int32_t k = 0; k < 2 * c.shape.n_sources; k++) {
            const bool alone = k % 2;
            const hd_moe_split_args a = split_args(&c, k / 2, alone);
            check_op(&(op_case){
                .name = "moe_split",
                .rows = 1,
                .n_outs = 2,
                .width = {a.shape.slots + 1, a.shape.slots},
                .all_rows = true,
                .args = &a,
                .run = run_split
            });
            check_placed(&c, k / 2, alone);
        }
        check_properties(&c);
    }
}
