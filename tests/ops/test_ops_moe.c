/* test_ops_moe.c - router top-k, permutation by expert, weighted sum of the experts'
 * results. */
#include "ops/ops_fixture.h"

#include <string.h>

/* ---- route ---- */

static void run_route(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                      int32_t n, void *const *out) {
    hd_moe_topk_args a = *(const hd_moe_topk_args *)c->args;
    a.expert = out[0];
    a.weight = out[1];
    a.logits += (int64_t)first * a.rule.n_experts;
    if (a.table) a.tokens += first;
    a.rows = n;
    ops->moe_topk(s, &a);
}

typedef struct route_shape {
    const char *name;
    hd_router_rule rule;
    bool bias, table, ties;
} route_shape;

static void route_case(const route_shape *sh, int32_t rows) {
    enum { VOCAB = 11 };
    const int32_t n = sh->rule.n_experts, k = sh->rule.top_k;
    float *logits = take_random((int64_t)rows * n, 6.0f);
    for (int64_t i = 0; sh->ties && i < (int64_t)rows * n; i++) logits[i] = (float)(i * i % 3);
    int32_t *table = take_ints((int64_t)VOCAB * k), *tokens = take_ints(rows);
    for (int32_t i = 0; i < VOCAB * k; i++) table[i] = (i * 7 + i / k) % n;
    for (int32_t r = 0; r < rows; r++) tokens[r] = random_below(VOCAB);
    hd_moe_topk_args a = {.logits = logits,
                          .bias = sh->bias ? take_random(n, 0.5f) : NULL,
                          .table = sh->table ? table : NULL,
                          .tokens = tokens,
                          .rule = sh->rule};
    check_op(&(op_case){
        .name = sh->name,
        .rows = rows,
        .n_outs = 2,
        .width = {k,   k   },
        .tolerance = {0.0, 2e-6},
        .args = &a,
        .run = run_route
    });
}

void op_moe_topk(void **state) {
    (void)state;
    static const route_shape shapes[] = {
        {"softmax",
         {HD_SCORE_SOFTMAX, HD_GROUPS_NONE, 64, 6, 1, 1, false, 1.0f},
         false, false,
         false},
        {"softmax, best of a group",
         {HD_SCORE_SOFTMAX, HD_GROUPS_MAX, 24, 5, 8, 3, false, 16.0f},
         false, false,
         false},
        {"sigmoid, two best of a group",
         {HD_SCORE_SIGMOID, HD_GROUPS_TOP2SUM, 32, 6, 8, 4, true, 2.5f},
         true,  false,
         false},
        {"ties",
         {HD_SCORE_SIGMOID, HD_GROUPS_TOP2SUM, 30, 7, 5, 2, true, 2.5f},
         false, false,
         true },
        {"sqrt softplus",
         {HD_SCORE_SQRT_SOFTPLUS, HD_GROUPS_NONE, 37, 6, 1, 1, true, 1.5f},
         true,  false,
         false},
        {"sqrt softplus by table",
         {HD_SCORE_SQRT_SOFTPLUS, HD_GROUPS_NONE, 37, 6, 1, 1, true, 1.5f},
         false, true,
         false},
        {"all experts",
         {HD_SCORE_SOFTMAX, HD_GROUPS_NONE, 5, 5, 1, 1, true, 1.0f},
         false, false,
         true },
        {"one expert",
         {HD_SCORE_SIGMOID, HD_GROUPS_TOP2SUM, 1, 1, 1, 1, true, 1.0f},
         true,  false,
         false},
    };
    for (size_t i = 0; i < HD_LEN(shapes); i++) {
        route_case(&shapes[i], 33);
        route_case(&shapes[i], 0);
    }
}

/* ---- moe_permute ---- */

static void run_permute(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                        int32_t n, void *const *out) {
    hd_moe_permute_args a = *(const hd_moe_permute_args *)c->args;
    (void)first;
    (void)n;
    a.offset = out[0];
    a.assignment = out[1];
    a.place = out[2];
    a.load = out[3];
    for (int32_t i = 0; i < HD_N_ROW_PHASES * a.n_experts; i++) {
        a.load[i] = i * INT64_C(0x100000000);
    }
    ops->moe_permute(s, &a);
}

void op_moe_permute(void **state) {
    (void)state;
    static const int32_t n_rows[] = {0, 1, 14, 27, 40, 53, 4001, 9000}; /* up to many shares */
    for (int32_t kind = 0; kind < (int32_t)HD_LEN(n_rows); kind++) {
        const int32_t rows = n_rows[kind], top_k = 1 + kind % 3;
        int32_t *expert = take_ints((int64_t)rows * top_k); /* all to expert 0 */
        for (int32_t i = 0; kind != 4 && i < rows * top_k; i++) expert[i] = random_below(9);
        int32_t *phase = take_ints(rows), *slot = take_ints(30);
        const int32_t choices = kind % 4 == 3 ? 3 : 1;
        for (int32_t r = 0; r < rows; r++) phase[r] = random_below(HD_N_ROW_PHASES + 1) - 1;
        for (int32_t i = 0; i < 10 * choices; i++) slot[i] = (7 * i + 5) % 31;
        const bool placed = kind % 4 > 1;
        hd_moe_permute_args a = {.expert = expert,
                                 .slot = placed ? slot : NULL,
                                 .phase = kind % 2 ? phase : NULL,
                                 .load_stride = kind % 3 ? 10 : 0,
                                 .rows = rows,
                                 .top_k = top_k,
                                 .n_experts = 10,
                                 .n_slots = placed ? 31 : 10,
                                 .n_choices = choices};
        check_op(&(op_case){
            .name = "moe_permute",
            .rows = 1,
            .n_outs = 4,
            .width = {a.n_slots + 1, rows * top_k, rows * top_k, 2 * HD_N_ROW_PHASES * 10},
            .all_rows = true,
            .args = &a,
            .run = run_permute
        });
    }
}

/* ---- moe_combine ---- */

typedef struct combine_case {
    hd_moe_combine_args a;
    const float *shared;
    bool in_place;
} combine_case;

static void run_combine(const op_case *c, const hd_ops *ops, hd_stream *s, int32_t first,
                        int32_t n, void *const *out) {
    const combine_case *t = c->args;
    hd_moe_combine_args a = t->a;
    const float *shared = t->shared ? t->shared + (int64_t)first * a.cols : NULL;
    if (t->in_place) memcpy(out[0], shared, (size_t)n * (size_t)a.cols * sizeof *shared);
    a.out = hd_f32(out[0]);
    a.shared = t->in_place ? a.out : hd_f32(shared);
    if (a.weight) a.weight += (int64_t)first * a.top_k;
    a.expert += (int64_t)first * a.top_k;
    a.place += (int64_t)first * a.top_k;
    a.rows = n;
    ops->moe_combine(s, &a);
}

void op_moe_combine(void **state) {
    (void)state;
    for (int32_t kind = 0; kind < 18; kind++) {
        const int32_t rows = kind % 5 == 4 ? 0 : 33, cols = 1 + kind * 31;
        const int32_t top_k = kind == 7 ? 20 : 1 + kind % 9, n = rows * top_k;
        int32_t *place = take_ints(n), *expert = take_ints(n);
        for (int32_t i = 0; i < n; i++) expert[i] = (i % top_k * 8 + i / top_k) % 21;
        for (int32_t i = 0; i < n; i++) { /* a random order of all places */
            const int32_t j = random_below(i + 1);
            place[i] = place[j];
            place[j] = i;
        }
        const bool shared = kind % 3 != 0;
        combine_case t = {
            .a = {.y = hd_f32(take_random((int64_t)n * cols, 1.0f)),
                  .weight = kind % 2 ? take_random(n, 1.0f) : NULL,
                  .expert = expert,
                  .place = place,
                  .cols = cols,
                  .top_k = top_k},
            .shared = shared ? take_random((int64_t)rows * cols, 1.0f) : NULL,
            .in_place = kind % 3 == 2
        };
        check_op(&(op_case){.name = "moe_combine",
                            .rows = rows,
                            .n_outs = 1,
                            .width = {cols},
                            .tolerance = {1e-6},
                            .args = &t,
                            .run = run_combine});
    }
}
