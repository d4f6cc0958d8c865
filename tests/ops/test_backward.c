/* test_backward.c - gradients of GEMMs, rows, MoE and the loss. */
#include <math.h>
#include <stdio.h>

#include "base/cpu.h"
#include "ops/backward_fixture.h"
#include "ops/ops_fixture.h"

/* ---- the fixture ---- */

enum { THE_GPU = -1 }; /* its stream */

static const struct {
    const char *name;
    uint32_t flags;
    bool ref;
    double tolerance; /* the others sum activations' gradients in float32 */
    int stream;
} tables[] = {
    {"ref",    0,                           true,  1e-6, 0      },
    {"plain",  0,                           false, 1e-5, 1      },
    {"avx2",   HD_CPU_AVX2,                 false, 1e-5, 2      },
    {"avx512", HD_CPU_AVX2 | HD_CPU_AVX512, false, 1e-5, 1      },
    {"cuda",   0,                           false, 1e-5, THE_GPU},
};

static size_t tested; /* index of the table in use */

static bool on_gpu(void) {
    return tables[tested].stream == THE_GPU;
}

#ifdef HD_CUDA

/* Operators of the GPU, which are done when they return, as on a CPU. */
static hd_backward_ops gpu_ops;

#define X(op)                                                          \
    static void wait_for_##op(hd_stream *s, const hd_##op##_args *a) { \
        gpu_ops.op(s, a);                                              \
        finish(#op, s);                                                \
    }
HD_BACKWARD_OP_LIST(X)
#undef X

static void init_gpu(hd_backward_ops *t) {
    hd_backward_init_cuda(&gpu_ops);
    *t = (hd_backward_ops){
#define X(op) .op = wait_for_##op,
        HD_BACKWARD_OP_LIST(X)
#undef X
            .linear_back = gpu_ops.linear_back};
}

#else

static void init_gpu(hd_backward_ops *t) {
    hd_backward_init_ref(t);
}

#endif

const hd_backward_ops *backward_ops(void) {
    static hd_backward_ops t;
    if (on_gpu()) {
        init_gpu(&t);
    } else if (tables[tested].ref) {
        hd_backward_init_ref(&t);
    } else {
        hd_backward_init_cpu(&t, tables[tested].flags);
    }
    return &t;
}

hd_stream *backward_stream(void) {
    return on_gpu() ? fix.gpu_stream : fix.stream[tables[tested].stream];
}

float *take_zeros(int64_t n) {
    float *x = take((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = 0.0f;
    return x;
}

static double *take_doubles(const float *x, int64_t n) {
    double *out = take((size_t)n * sizeof *out);
    for (int64_t i = 0; i < n; i++) out[i] = (double)x[i];
    return out;
}

/* The loss when input k has moved by `step` along v. */
static double loss_at(const gradient_case *c, double *const *in, int k, const float *v,
                      double step) {
    for (int64_t i = 0; i < c->in[k].n; i++) {
        in[k][i] = (double)c->in[k].value[i] + step * (double)v[i];
    }
    return c->loss(c->args, in);
}

static void check_input(const gradient_case *c, double *const *in, int k) {
    enum { DIRECTIONS = 5 };
    const double step = 1e-5;
    const gradient_input *x = &c->in[k];
    for (int t = 0; t < DIRECTIONS; t++) {
        const float *v = take_random(x->n, 1.0f);
        /* the error of a five-point difference falls with step^4 */
        const double near = loss_at(c, in, k, v, step) - loss_at(c, in, k, v, -step);
        const double far = loss_at(c, in, k, v, 2 * step) - loss_at(c, in, k, v, -2 * step);
        const double want = (8 * near - far) / (12 * step);
        double got = 0.0, square = 0.0, length = 0.0;
        for (int64_t i = 0; i < x->n; i++) {
            got += (double)x->grad[i] * (double)v[i];
            square += (double)x->grad[i] * (double)x->grad[i];
            length += (double)v[i] * (double)v[i];
        }
        const double scale = sqrt(square * length / (double)(x->n ? x->n : 1));
        if (!(fabs(got - want) <= tables[tested].tolerance * (scale + 0.1))) {
            fail_msg("%s %s: gradient of %s along direction %d is %.9g, not %.9g (scale %.3g)",
                     tables[tested].name, c->op, x->name, t, got, want, scale);
        }
    }
    loss_at(c, in, k, x->value, 0.0);
}

void check_gradient(const gradient_case *c) {
    double *in[MAX_INPUTS] = {0};
    for (int k = 0; k < MAX_INPUTS && c->in[k].name; k++) {
        in[k] = take_doubles(c->in[k].value, c->in[k].n);
    }
    for (int k = 0; k < MAX_INPUTS && c->in[k].name; k++) check_input(c, in, k);
}

/* ---- GEMMs ---- */

typedef struct product_case {
    hd_weight_grad_args a;
} product_case;

static double product_loss(const void *args, double *const *in) {
    const hd_weight_grad_args *a = args;
    double sum = 0.0;
    for (int32_t r = 0; r < a->rows; r++) {
        for (int32_t h = 0; h < a->heads; h++) {
            const float *left =
                (const float *)a->left.data + r * a->left.stride + (int64_t)h * a->left_head;
            const float *right =
                (const float *)a->right.data + r * a->right.stride + (int64_t)h * a->right_head;
            for (int32_t i = 0; i < a->n_rows; i++) {
                const int64_t row = a->first_row + h * a->head_rows + i;
                for (int32_t c = 0; c < a->cols; c++) {
                    sum += (double)left[i] * in[0][row * a->cols + c] * (double)right[c];
                }
            }
        }
    }
    return sum;
}

static const int32_t odd_rows[] = {1, 3, 4, 33, 127, 129};

void weight_grad_sums_products(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(odd_rows); i++) {
        const int32_t rows = odd_rows[i], heads = i % 2 ? 3 : 1, cols = 13;
        const int32_t n_rows = i % 3 == 2 ? 150 : 7, wide = heads * (n_rows + 2) + 13;
        const int32_t head_rows = n_rows + 2, first = 4, left_head = n_rows + 2,
                      right_head = 15;
        const int64_t all = (int64_t)(first + heads * head_rows) * cols;
        float *dw = take_zeros(all);
        hd_weight_grad_args a = {.dw = dw,
                                 .left = hd_f32(take_random((int64_t)rows * wide, 1.0f)),
                                 .right = hd_f32(take_random((int64_t)rows * 50, 1.0f)),
                                 .rows = rows,
                                 .heads = heads,
                                 .n_rows = n_rows,
                                 .cols = cols,
                                 .first_row = first,
                                 .head_rows = head_rows,
                                 .left_head = left_head,
                                 .right_head = right_head};
        a.left.stride = wide;
        a.right.stride = 50;
        backward_ops()->weight_grad(backward_stream(), &a);
        check_gradient(&(gradient_case){.op = "weight_grad",
                                        .in = {{"w", take_random(all, 1.0f), dw, all}},
                                        .args = &a,
                                        .loss = product_loss});
    }
}

/* Rows of experts: one has none, one has most. */
typedef struct groups {
    int32_t *offset, *assignment, *expert, *place;
    int32_t rows, top_k, n;
} groups;

static groups take_groups(int32_t rows, int32_t top_k, int32_t n) {
    groups g = {take_ints(n + 1),
                take_ints(rows * top_k),
                take_ints(rows * top_k),
                take_ints(rows * top_k),
                rows,
                top_k,
                n};
    for (int32_t t = 0; t < rows; t++) {
        for (int32_t j = 0; j < top_k; j++) { /* expert 1 has no rows, expert 0 has all */
            const int32_t others = n - 2 - (top_k - 2);
            g.expert[t * top_k + j] =
                j == 0 ? 0 : j + 1 + (j == top_k - 1 ? random_below(others) : 0);
        }
    }
    fix.table[0].moe_permute(fix.stream[0], &(hd_moe_permute_args){.offset = g.offset,
                                                                   .assignment = g.assignment,
                                                                   .place = g.place,
                                                                   .expert = g.expert,
                                                                   .rows = rows,
                                                                   .top_k = top_k,
                                                                   .n_experts = n,
                                                                   .n_slots = n});
    finish("moe_permute", fix.stream[0]);
    return g;
}

typedef struct grouped_case {
    const groups *m;
    const float *g;
    int32_t n_rows, cols;
} grouped_case;

/* in: w [n, n_rows, cols], x [rows, cols] */
static double grouped_loss(const void *args, double *const *in) {
    const grouped_case *t = args;
    double sum = 0.0;
    for (int32_t e = 0; e < t->m->n; e++) {
        for (int32_t p = t->m->offset[e]; p < t->m->offset[e + 1]; p++) {
            const int64_t row = t->m->assignment[p] / t->m->top_k;
            for (int32_t i = 0; i < t->n_rows; i++) {
                for (int32_t c = 0; c < t->cols; c++) {
                    sum += (double)t->g[(int64_t)p * t->n_rows + i] *
                           in[0][((int64_t)e * t->n_rows + i) * t->cols + c] *
                           in[1][row * t->cols + c];
                }
            }
        }
    }
    return sum;
}

void grouped_gradients(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(odd_rows); i++) {
        enum { N = 6, TOP = 3, ROWS = 8, COLS = 12 };
        const int32_t rows = odd_rows[i], places = rows * TOP;
        const groups m = take_groups(rows, TOP, N);
        const weight_format *f = weight_format_of(F32_PLAIN);
        hd_weight *w = take(N * sizeof *w);
        float *flat = take(sizeof(float) * N * ROWS * COLS), *dw = take_zeros(N * ROWS * COLS);
        for (int32_t e = 0; e < N; e++) {
            w[e] = *take_weight(f, ROWS, COLS, false);
            memcpy(flat + e * ROWS * COLS, w[e].data, sizeof(float) * ROWS * COLS);
        }
        hd_expert_table table;
        hd_expert_table_init(&table, w, N);
        const grouped_case t = {&m, take_random((int64_t)places * ROWS, 1.0f), ROWS, COLS};
        const float *x = take_random((int64_t)rows * COLS, 1.0f);
        float *by_place = take_nan((int64_t)places * COLS);
        float *dx = take_nan((int64_t)rows * COLS);
        backward_ops()->grouped_weight_grad(
            backward_stream(), &(hd_grouped_weight_grad_args){.dw = dw,
                                                              .g = hd_f32(t.g),
                                                              .x = hd_f32(x),
                                                              .offset = m.offset,
                                                              .assignment = m.assignment,
                                                              .n_slots = N,
                                                              .n_rows = ROWS,
                                                              .cols = COLS,
                                                              .top_k = TOP,
                                                              .rows = rows,
                                                              .choice = m.assignment});
        backward_ops()->grouped_gemm_back(backward_stream(),
                                          &(hd_grouped_gemm_back_args){.dx = by_place,
                                                                       .g = hd_f32(t.g),
                                                                       .w = &table,
                                                                       .offset = m.offset,
                                                                       .n_places = places});
        fix.table[0].moe_combine(fix.stream[0], &(hd_moe_combine_args){.out = hd_f32(dx),
                                                                       .y = hd_f32(by_place),
                                                                       .expert = m.expert,
                                                                       .place = m.place,
                                                                       .rows = rows,
                                                                       .cols = COLS,
                                                                       .top_k = TOP});
        check_gradient(&(gradient_case){
            .op = "grouped_gemm",
            .in = {{"w", flat, dw, N * ROWS * COLS}, {"x", x, dx, (int64_t)rows * COLS}},
            .args = &t,
            .loss = grouped_loss
        });
    }
}

/* ---- rows ---- */

typedef struct norm_case {
    const float *g;
    int32_t rows, cols;
} norm_case;

static double norm_loss(const void *args, double *const *in) {
    const norm_case *t = args;
    double sum = 0.0;
    for (int32_t r = 0; r < t->rows; r++) {
        const double *x = in[0] + (int64_t)r * t->cols;
        double square = 0.0;
        for (int32_t c = 0; c < t->cols; c++) square += x[c] * x[c];
        const double inverse = 1.0 / sqrt(square / t->cols + (double)1e-6f);
        for (int32_t c = 0; c < t->cols; c++) {
            sum += (double)t->g[(int64_t)r * t->cols + c] * in[1][c] * x[c] * inverse;
        }
    }
    return sum;
}

void rms_norm_gradients(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(odd_rows); i++) {
        const norm_case t = {take_random((int64_t)odd_rows[i] * 37, 1.0f), odd_rows[i], 37};
        const int64_t n = (int64_t)t.rows * t.cols;
        const float *x = take_random(n, 2.0f), *weight = take_random(t.cols, 1.5f);
        float *dx = take_nan(n), *dweight = take_zeros(t.cols);
        backward_ops()->rms_norm_back(
            backward_stream(),
            &(hd_rms_norm_back_args){.dx = hd_f32(dx),
                                     .dweight = dweight,
                                     .g = hd_f32(t.g),
                                     .x = hd_f32(x),
                                     .weight = weight,
                                     .scale = take(sizeof(double) * (size_t)t.rows),
                                     .rows = t.rows,
                                     .cols = t.cols,
                                     .eps = 1e-6f});
        check_gradient(&(gradient_case){
            .op = "rms_norm",
            .in = {{"x", x, dx, n}, {"weight", weight, dweight, t.cols}},
            .args = &t,
            .loss = norm_loss
        });
    }
}

void rows_go_back(void **state) {
    (void)state;
    const int32_t token[] = {2, 0, 2}, places[] = {4, 1, 0};
    const float numbers[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    const int32_t *tokens = take_copy(token, sizeof token);
    const int32_t *index = take_copy(places, sizeof places);
    const float *g = take_copy(numbers, sizeof numbers);
    float *table = take_zeros(3 * 2), *dx = take_nan(5 * 4);
    table[4] = 100.0f;
    backward_ops()->embed_back(backward_stream(), &(hd_embed_back_args){.dtable = table,
                                                                        .g = hd_f32(g),
                                                                        .tokens = tokens,
                                                                        .rows = 3,
                                                                        .copies = 2,
                                                                        .cols = 2});
    const float want[] = {12, 14, 0, 0, 124, 28};
    check_bits("embed_back", table, want, 6);
    backward_ops()->gather_back(
        backward_stream(),
        &(hd_gather_back_args){
            .dx = dx, .g = hd_f32(g), .index = index, .rows = 3, .x_rows = 5, .cols = 4});
    const float back[] = {9, 10, 11, 12, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4};
    check_bits("gather_back", dx, back, 20);
}

/* ---- MoE ---- */

typedef struct swiglu_case {
    const float *g;
    const int32_t *assignment;
    int32_t rows, cols;
    float limit;
} swiglu_case;

/* in: gate, up, weight */
static double swiglu_loss(const void *args, double *const *in) {
    const swiglu_case *t = args;
    double sum = 0.0;
    for (int32_t r = 0; r < t->rows; r++) {
        const double weight = in[2] ? in[2][t->assignment[r]] : 1.0;
        for (int32_t c = 0; c < t->cols; c++) {
            const int64_t at = (int64_t)r * t->cols + c;
            double x = in[0][at], u = in[1][at];
            if (t->limit > 0.0f) {
                x = fmin(x, (double)t->limit);
                u = fmax(-(double)t->limit, fmin(u, (double)t->limit));
            }
            sum += (double)t->g[at] * weight * u * x / (1.0 + exp(-x));
        }
    }
    return sum;
}

void swiglu_gradients(void **state) {
    (void)state;
    for (int k = 0; k < 4; k++) {
        enum { ROWS = 33, COLS = 17 };
        const bool weighted = k % 2 == 1;
        const int64_t n = ROWS * COLS;
        int32_t *assignment = take_ints(ROWS);
        for (int32_t r = 0; r < ROWS; r++) assignment[r] = ROWS - 1 - r;
        const swiglu_case t = {take_random(n, 1.0f), assignment, ROWS, COLS,
                               k < 2 ? 0.0f : 1.5f};
        const float *gate = take_random(n, 3.0f), *up = take_random(n, 3.0f);
        const float *weight = take_random(ROWS, 1.0f);
        float *dgate = take_nan(n), *dup = take_nan(n), *dweight = take_nan(ROWS);
        backward_ops()->swiglu_back(backward_stream(),
                                    &(hd_swiglu_back_args){.dgate = dgate,
                                                           .dup = dup,
                                                           .dweight = weighted ? dweight : NULL,
                                                           .g = hd_f32(t.g),
                                                           .gate = hd_f32(gate),
                                                           .up = hd_f32(up),
                                                           .weight = weighted ? weight : NULL,
                                                           .assignment = assignment,
                                                           .rows = ROWS,
                                                           .cols = COLS,
                                                           .limit = t.limit});
        check_gradient(&(gradient_case){
            .op = "swiglu",
            .in = {{"gate", gate, dgate, n},
                   {"up", up, dup, n},
                   {weighted ? "weight" : NULL, weight, dweight, ROWS}},
            .args = &t,
            .loss = swiglu_loss
        });
    }
}

typedef struct router_case {
    hd_router_rule rule;
    const float *g;
    const int32_t *expert;
    int32_t rows;
} router_case;

static double score_of(hd_score score, const double *l, int32_t n, int32_t e) {
    if (score == HD_SCORE_SIGMOID) return 1.0 / (1.0 + exp(-l[e]));
    if (score == HD_SCORE_SQRT_SOFTPLUS) return sqrt(log1p(exp(l[e])));
    double total = 0.0;
    for (int32_t i = 0; i < n; i++) total += exp(l[i]);
    return exp(l[e]) / total;
}

static double router_loss(const void *args, double *const *in) {
    const router_case *t = args;
    const int32_t n = t->rule.n_experts, k = t->rule.top_k;
    double sum = 0.0;
    for (int32_t r = 0; r < t->rows; r++) {
        double total = 0.0;
        for (int32_t j = 0; j < k; j++) {
            total += score_of(t->rule.score, in[0] + r * n, n, t->expert[r * k + j]);
        }
        for (int32_t j = 0; j < k; j++) {
            double s = score_of(t->rule.score, in[0] + r * n, n, t->expert[r * k + j]);
            if (t->rule.normalize) s /= total;
            sum += (double)t->g[r * k + j] * (double)t->rule.scale * s;
        }
    }
    return sum;
}

void router_gradients(void **state) {
    (void)state;
    const hd_score scores[] = {HD_SCORE_SOFTMAX, HD_SCORE_SIGMOID, HD_SCORE_SQRT_SOFTPLUS};
    for (int k = 0; k < 6; k++) {
        enum { ROWS = 5, N = 9, TOP = 4 };
        router_case t = {
            .rule = {scores[k % 3], HD_GROUPS_NONE, N, TOP, 1, 1, k < 3, 1.5f},
            .g = take_random(ROWS * TOP, 1.0f),
            .rows = ROWS
        };
        const float *logits = take_random(ROWS * N, 4.0f);
        int32_t *expert = take_ints(ROWS * TOP);
        float *weight = take_nan(ROWS * TOP), *dlogits = take_nan(ROWS * N);
        fix.table[0].moe_topk(fix.stream[0], &(hd_moe_topk_args){.expert = expert,
                                                                 .weight = weight,
                                                                 .logits = logits,
                                                                 .rows = ROWS,
                                                                 .rule = t.rule});
        finish("moe_topk", fix.stream[0]);
        t.expert = expert;
        backward_ops()->moe_topk_back(backward_stream(),
                                      &(hd_moe_topk_back_args){.dlogits = dlogits,
                                                               .dweight = t.g,
                                                               .logits = logits,
                                                               .expert = expert,
                                                               .rows = ROWS,
                                                               .rule = t.rule});
        check_gradient(&(gradient_case){.op = "moe_topk",
                                        .in = {{"logits", logits, dlogits, ROWS * N}},
                                        .args = &t,
                                        .loss = router_loss});
    }
}

/* in: y by place, weight by choice */
static double combine_loss(const void *args, double *const *in) {
    const grouped_case *t = args;
    double sum = 0.0;
    for (int32_t i = 0; i < t->m->rows * t->m->top_k; i++) {
        for (int32_t c = 0; c < t->cols; c++) {
            sum += (double)t->g[(int64_t)(i / t->m->top_k) * t->cols + c] *
                   (in[1] ? in[1][i] : 1.0) * in[0][(int64_t)t->m->place[i] * t->cols + c];
        }
    }
    return sum;
}

void combine_gradients(void **state) {
    (void)state;
    for (int k = 0; k < 2; k++) {
        enum { ROWS = 7, TOP = 3, COLS = 11 };
        const groups m = take_groups(ROWS, TOP, 6);
        const grouped_case t = {&m, take_random(ROWS * COLS, 1.0f), 0, COLS};
        const int64_t n = ROWS * TOP * COLS;
        const float *y = take_random(n, 1.0f), *weight = take_random(ROWS * TOP, 1.0f);
        float *dy = take_nan(n), *dweight = take_nan(ROWS * TOP);
        backward_ops()->moe_combine_back(
            backward_stream(), &(hd_moe_combine_back_args){.dy = dy,
                                                           .dweight = k ? dweight : NULL,
                                                           .g = hd_f32(t.g),
                                                           .y = hd_f32(y),
                                                           .weight = k ? weight : NULL,
                                                           .place = m.place,
                                                           .rows = ROWS,
                                                           .cols = COLS,
                                                           .top_k = TOP});
        check_gradient(&(gradient_case){
            .op = "moe_combine",
            .in = {{"y", y, dy, n}, {k ? "weight" : NULL, weight, dweight, ROWS * TOP}},
            .args = &t,
            .loss = combine_loss
        });
    }
}

/* ---- the loss ---- */

static double cross_entropy_loss(const void *args, double *const *in) {
    const hd_cross_entropy_args *a = args;
    double sum = 0.0;
    for (int32_t r = 0; r < a->rows; r++) {
        double top = -INFINITY, total = 0.0, entropy = 0.0;
        const double *l = in[0] + (int64_t)r * a->vocab, t = (double)a->temperature[r];
        for (int32_t v = 0; v < a->vocab; v++) top = fmax(top, l[v] / t);
        for (int32_t v = 0; v < a->vocab; v++) total += exp(l[v] / t - top);
        for (int32_t v = 0; v < a->vocab; v++) {
            const double logp = l[v] / t - top - log(total);
            entropy -= exp(logp) * logp;
        }
        sum -= (double)a->factor[r] * (l[a->target[r]] / t - top - log(total));
        sum -= (double)a->entropy_factor[r] * entropy;
    }
    return sum;
}

void loss_gradients(void **state) {
    (void)state;
    enum { ROWS = 5 };
    const float spreads[] = {0.0f, 3.0f, 80.0f, 0.0f, 3.0f, 80.0f};
    for (size_t i = 0; i < HD_LEN(spreads); i++) {
        const int32_t vocab = i < 3 ? 101 : 1037;
        float *logits = take_random(ROWS * vocab, spreads[i]);
        float *temperature = take_random(ROWS, 0.5f), *logprob = take_nan(ROWS);
        int32_t *target = take_ints(ROWS);
        for (int32_t r = 0; r < ROWS; r++) {
            target[r] = random_below(vocab);
            temperature[r] += 1.0f;
        }
        const float *before = take_copy(logits, sizeof(float) * (size_t)(ROWS * vocab));
        const hd_cross_entropy_args a = {.logits = logits,
                                         .logprob = logprob,
                                         .entropy = take_nan(ROWS),
                                         .target = target,
                                         .factor = take_random(ROWS, 1.0f),
                                         .entropy_factor = take_random(ROWS, 0.3f),
                                         .temperature = temperature,
                                         .rows = ROWS,
                                         .vocab = vocab};
        backward_ops()->cross_entropy(backward_stream(), &a);
        for (int32_t r = 0; r < ROWS; r++) assert_true(logprob[r] <= 0.0f);
        check_gradient(&(gradient_case){.op = "cross_entropy",
                                        .in = {{"logits", before, logits, ROWS * vocab}},
                                        .args = &a,
                                        .loss = cross_entropy_loss});
    }
}

/* ---- order ---- */

/* Parameter gradients of all rows at once have the bits of those of pieces, one after another. For a GPU
 * a piece is a sequence. */
void pieces_give_the_same_bits(void **state) {
    (void)state;
    enum { ROWS = 29, N = 9, COLS = 31, PIECE = 5 };
    const float *g = take_random(ROWS * N, 1.0f), *x = take_random(ROWS * COLS, 1.0f);
    float *whole = take_zeros(N * COLS), *pieces = take_zeros(N * COLS);
    float *norm_whole = take_zeros(COLS), *norm_pieces = take_zeros(COLS);
    float *dx = take_nan(ROWS * COLS);
    int32_t *all = take_ints(ROWS / PIECE + 2), *one = take_ints(2);
    for (int32_t i = 1; i <= ROWS / PIECE + 1; i++)
        all[i] = PIECE * i < ROWS ? PIECE * i : ROWS;
    for (int pass = 0; pass < 2; pass++) {
        for (int32_t first = 0, n = 0; first < ROWS; first += n) {
            n = pass == 0 ? ROWS : first + PIECE > ROWS ? ROWS - first : PIECE;
            one[1] = n;
            const hd_row_sums sums = {
                .seqs = {.n = pass ? 1 : ROWS / PIECE + 1, .first_row = pass ? one : all}
            };
            backward_ops()->weight_grad(
                backward_stream(), &(hd_weight_grad_args){.dw = pass ? pieces : whole,
                                                          .left = hd_f32(g + first * N),
                                                          .right = hd_f32(x + first * COLS),
                                                          .rows = n,
                                                          .heads = 1,
                                                          .n_rows = N,
                                                          .cols = COLS,
                                                          .left_head = N,
                                                          .right_head = COLS,
                                                          .sums = sums});
            backward_ops()->rms_norm_back(
                backward_stream(),
                &(hd_rms_norm_back_args){.dx = hd_f32(dx),
                                         .dweight = pass ? norm_pieces : norm_whole,
                                         .g = hd_f32(x + first * COLS),
                                         .x = hd_f32(x + first * COLS),
                                         .scale = take(sizeof(double) * ROWS),
                                         .rows = n,
                                         .cols = COLS,
                                         .eps = 1e-6f,
                                         .sums = sums});
        }
    }
    check_bits("weight_grad in pieces", pieces, whole, N * COLS);
    check_bits("rms_norm_back in pieces", norm_pieces, norm_whole, COLS);
}

int test_backward(void) {
    const struct CMUnitTest tests[] = {
#define X(test) cmocka_unit_test_teardown(test, forget_all),
        BACKWARD_TESTS_LIST(X)
#undef X
    };
    int failed = 0;
    for (tested = 0; tested < HD_LEN(tables); tested++) {
        char name[32];
        if (tables[tested].flags & ~hd_cpu_features()) continue;
        if (on_gpu() && hd_device_count_gpus() == 0) continue;
        snprintf(name, sizeof name, "backward %s", tables[tested].name);
        failed += cmocka_run_group_tests_name(name, tests, open_fixture, close_fixture);
    }
    return failed;
}
