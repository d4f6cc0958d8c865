/* test_backward_attention.c - gradients of attention, the compressor and hyper-connections. */
#include <math.h>

#include "ops/backward_fixture.h"
#include "ops/ops_fixture.h"

/* ---- attention ---- */

typedef struct attention_case {
    const char *name;
    int32_t k_dim, v_dim, heads, window, ratio, n_selected;
    float sink; /* every head's; NaN: no sink */
} attention_case;

static const attention_case attention_cases[] = {
    {"MLA",                      13,  9,   3, 0, 1, 0, NAN      },
    {"window alone",             8,   8,   2, 5, 0, 0, 0.3f     },
    {"window and entries",       8,   8,   2, 5, 4, 0, 0.3f     },
    {"window and selected",      8,   8,   3, 4, 2, 3, -0.5f    },
    {"MLA, selected",            13,  9,   2, 0, 1, 4, NAN      },
    {"a sink of minus infinity", 8,   8,   2, 3, 4, 0, -INFINITY},
    {"a sink of 80",             8,   8,   2, 3, 4, 0, 80.0f    },
    {"MLA, wide",                150, 100, 5, 0, 1, 0, NAN      },
    {"MLA, wide, selected",      150, 100, 5, 0, 1, 4, NAN      },
    {"wide, window and entries", 150, 150, 7, 5, 2, 3, 0.3f     },
};

enum { N_SEQS = 3 };
static const int32_t lengths[N_SEQS] = {1, 45, 9};

typedef struct attention_world {
    hd_attention_back_args a;
    const int32_t *seq;
    int32_t rows, n_entries;
} attention_world;

/* in: q, recent [rows, k_dim], entries [n, k_dim], sink */
static double attention_loss(const void *args, double *const *in) {
    const attention_world *w = args;
    const hd_attention_back_args *a = &w->a;
    double loss = 0.0;
    for (int32_t r = 0; r < w->rows; r++) {
        const int32_t seq = w->seq[r], pos = a->seqs.pos[r];
        const double *keys[64];
        int32_t n = 0;
        for (int32_t p = pos - a->window + 1; p <= pos; p++) {
            if (p >= 0) keys[n++] = in[1] + (int64_t)(a->seqs.first_row[seq] + p) * a->k_dim;
        }
        const int32_t seen = a->ratio ? (pos + 1) / a->ratio : 0;
        for (int32_t i = 0; i < (a->selected ? a->n_selected : seen); i++) {
            const int32_t e = a->selected ? a->selected[r * a->n_selected + i] : i;
            if (e >= 0) keys[n++] = in[2] + (int64_t)(a->first_entry[seq] + e) * a->k_dim;
        }
        for (int32_t h = 0; h < a->heads; h++) {
            const double *q = in[0] + ((int64_t)r * a->heads + h) * a->k_dim;
            const float *g = (const float *)a->g.data + ((int64_t)r * a->heads + h) * a->v_dim;
            double score[64], top = a->sink ? in[3][h] : -(double)INFINITY, total, sum = 0.0;
            for (int32_t i = 0; i < n; i++) {
                score[i] = 0.0;
                for (int32_t c = 0; c < a->k_dim; c++) score[i] += q[c] * keys[i][c];
                score[i] *= (double)a->scale;
                top = fmax(top, score[i]);
            }
            total = a->sink ? exp(in[3][h] - top) : 0.0;
            for (int32_t i = 0; i < n; i++) {
                double along = 0.0;
                for (int32_t c = 0; c < a->v_dim; c++) along += (double)g[c] * keys[i][c];
                total += exp(score[i] - top);
                sum += exp(score[i] - top) * along;
            }
            if (n) loss += sum / total;
        }
    }
    return loss;
}

/* Fills the positions, pages and selected entries; the float64 program reads plain arrays of the
 * same keys. */
static attention_world make_world(const attention_case *t, float **recent, float **entries) {
    int32_t *first_row = take_ints(N_SEQS + 1), *first_entry = take_ints(N_SEQS);
    int32_t n_entries[N_SEQS], total = 0;
    for (int32_t s = 0; s < N_SEQS; s++) {
        n_entries[s] = t->ratio ? lengths[s] / t->ratio : 0;
        first_entry[s] = total;
        total += n_entries[s];
        first_row[s + 1] = first_row[s] + lengths[s];
    }
    const int32_t rows = first_row[N_SEQS];
    int32_t *pos = take_ints(rows), *seq = take_ints(rows);
    const hd_paged window_pages = take_pages(N_SEQS, lengths, 4, t->k_dim, 1.0f);
    const hd_paged entry_pages = take_pages(N_SEQS, n_entries, 4, t->k_dim, 1.0f);
    *recent = take_zeros((int64_t)rows * t->k_dim);
    *entries = take_zeros((int64_t)total * t->k_dim);
    for (int32_t s = 0; s < N_SEQS; s++) {
        for (int32_t p = 0; p < lengths[s]; p++) {
            const int32_t r = first_row[s] + p;
            pos[r] = p;
            seq[r] = s;
            memcpy(*recent + (int64_t)r * t->k_dim, page_entry(&window_pages, s, p),
                   (size_t)t->k_dim * sizeof(float));
        }
        for (int32_t e = 0; e < n_entries[s]; e++) {
            memcpy(*entries + (int64_t)(first_entry[s] + e) * t->k_dim,
                   page_entry(&entry_pages, s, e), (size_t)t->k_dim * sizeof(float));
        }
    }
    int32_t *selected = t->n_selected ? take_ints((int64_t)rows * t->n_selected) : NULL;
    for (int32_t r = 0; r < rows && selected; r++) { /* the last entries that a row sees */
        const int32_t seen = (pos[r] + 1) / t->ratio;
        const int32_t first = seen > t->n_selected ? seen - t->n_selected : 0;
        for (int32_t i = 0; i < t->n_selected; i++) {
            selected[r * t->n_selected + i] = first + i < seen ? first + i : -1;
        }
    }
    return (attention_world){
        .a = {.recent = window_pages,
              .entries = entry_pages,
              .selected = selected,
              .first_entry = first_entry,
              .seqs = {N_SEQS, first_row, pos, 45},
              .rows = rows,
              .heads = t->heads,
              .k_dim = t->k_dim,
              .v_dim = t->v_dim,
              .window = t->window,
              .ratio = t->ratio,
              .n_selected = t->n_selected,
              .scale = 0.4f},
        .seq = seq,
        .rows = rows,
        .n_entries = total
    };
}

static void check_attention(const attention_case *t) {
    float *recent, *entries;
    attention_world w = make_world(t, &recent, &entries);
    const int64_t wide = (int64_t)w.rows * t->heads, n_q = wide * t->k_dim;
    const int64_t n_recent = t->window ? (int64_t)w.rows * t->k_dim : 0;
    const int64_t n_entries = (int64_t)w.n_entries * t->k_dim;
    float *q = take_random(n_q, 1.5f), *out = take_nan(wide * t->v_dim), *sink = NULL;
    float *dq = take_nan(n_q), *dsink = take_zeros(t->heads);
    float *drecent = take_nan(n_recent), *dentries = take_nan(n_entries);
    if (!isnan(t->sink)) {
        sink = take_random(t->heads, 0.1f);
        for (int32_t h = 0; h < t->heads; h++) sink[h] += t->sink;
    }
    fix.table[0].attention(fix.stream[0], &(hd_attention_args){.out = hd_f32(out),
                                                               .q = hd_f32(q),
                                                               .recent = w.a.recent,
                                                               .entries = w.a.entries,
                                                               .selected = w.a.selected,
                                                               .sink = sink,
                                                               .seq = w.seq,
                                                               .pos = w.a.seqs.pos,
                                                               .rows = w.rows,
                                                               .heads = t->heads,
                                                               .k_dim = t->k_dim,
                                                               .v_dim = t->v_dim,
                                                               .window = t->window,
                                                               .ratio = t->ratio,
                                                               .n_selected = t->n_selected,
                                                               .scale = w.a.scale});
    finish("attention", fix.stream[0]);
    w.a.g = hd_f32(take_random(wide * t->v_dim, 1.0f));
    w.a.out = hd_f32(out);
    w.a.q = hd_f32(q);
    w.a.dq = dq;
    w.a.drecent = drecent;
    w.a.dentries = dentries;
    w.a.dsink = sink ? dsink : NULL;
    w.a.sink = sink;
    w.a.lse = take_nan(wide);
    w.a.delta = take_nan(wide);
    backward_ops()->attention_back(backward_stream(), &w.a);
    if (sink && isinf(t->sink)) {
        for (int32_t h = 0; h < t->heads; h++) assert_true(dsink[h] == 0.0f);
    }
    gradient_case c = {
        .op = t->name,
        .in = {{"q", q, dq, n_q},
               {"recent", recent, drecent, n_recent},
               {"entries", entries, dentries, n_entries},
               {sink && isfinite(t->sink) ? "sink" : NULL, sink, dsink, t->heads}},
        .args = &w,
        .loss = attention_loss
    };
    if (sink && !isfinite(t->sink)) w.a.sink = NULL; /* it weighs nothing */
    check_gradient(&c);
}

void attention_gradients(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(attention_cases); i++) check_attention(&attention_cases[i]);
}

/* ---- the indexer's own loss ---- */

static double *take_doubles(const float *x, int64_t n) {
    double *to = take((size_t)n * sizeof *to);
    for (int64_t i = 0; i < n; i++) to[i] = (double)x[i];
    return to;
}

typedef struct indexer_case {
    const char *name;
    int32_t ratio, top_k, heads, width, attention_heads;
} indexer_case;

static const indexer_case indexer_cases[] = {
    {"indexer of tokens",             1, 5,  3,  6,   2 },
    {"indexer, every key selected",   1, 45, 2,  8,   1 },
    {"indexer of compressed entries", 4, 3,  4,  10,  3 },
    {"indexer, one key of each row",  2, 1,  2,  4,   2 },
    {"indexer, wide",                 1, 45, 19, 128, 17},
};

typedef struct indexer_world {
    hd_indexer_back_args a;
    const int32_t *seq;
    const double *share; /* [rows, top_k] what attention gives, summed over heads, normalized */
    double *divergence;  /* [rows] of the last call */
    int32_t rows;
} indexer_world;

/* in: q, weight, keys [n, width] */
static double indexer_loss(const void *args, double *const *in) {
    const indexer_world *w = args;
    const hd_indexer_back_args *a = &w->a;
    const int32_t width = a->keys.width;
    double loss = 0.0;
    for (int32_t r = 0; r < w->rows; r++) {
        const int32_t *selected = a->selected + r * a->top_k;
        double score[64], total = 0.0, sum = 0.0;
        int32_t n = 0;
        for (; n < a->top_k && selected[n] >= 0; n++) {
            const double *key = in[2] + (a->first_entry[w->seq[r]] + selected[n]) * width;
            score[n] = 0.0;
            for (int32_t h = 0; h < a->heads; h++) {
                const double *q = in[0] + (r * a->heads + h) * width;
                double along = 0.0;
                for (int32_t c = 0; c < width; c++) along += q[c] * key[c];
                if (along > 0.0) score[n] += in[1][r * a->heads + h] * along;
            }
            score[n] *= (double)a->scale;
            total += exp(score[n]);
        }
        for (int32_t i = 0; i < n; i++) {
            const double p = w->share[r * a->top_k + i];
            sum += p * (log(p) - score[i] + log(total));
        }
        w->divergence[r] = sum;
        loss += (double)a->factor * sum;
    }
    return loss;
}

/* What attention gives the selected entries, and lse of these and of a window that has as much again. */
static void set_shares(indexer_world *w, const float *q, const float *entries, float *lse) {
    const hd_indexer_back_args *a = &w->a;
    double *share = take((size_t)w->rows * (size_t)a->top_k * sizeof *share);
    for (int32_t r = 0; r < w->rows; r++) {
        const int32_t *selected = a->selected + r * a->top_k;
        double all = 0.0, weight[64];
        for (int32_t i = 0; i < a->top_k; i++) share[r * a->top_k + i] = 0.0;
        for (int32_t h = 0; h < a->attention_heads; h++) {
            double total = 1.0;
            for (int32_t i = 0; i < a->top_k && selected[i] >= 0; i++) {
                const float *entry =
                    entries + (a->first_entry[w->seq[r]] + selected[i]) * a->k_dim;
                double along = 0.0;
                for (int32_t c = 0; c < a->k_dim; c++) {
                    along += (double)q[(r * a->attention_heads + h) * a->k_dim + c] *
                             (double)entry[c];
                }
                weight[i] = exp(along * (double)a->attention_scale);
                total += weight[i];
            }
            for (int32_t i = 0; i < a->top_k && selected[i] >= 0; i++) {
                share[r * a->top_k + i] += weight[i] / total;
                all += weight[i] / total;
            }
            lse[r * a->attention_heads + h] = (float)log(total);
        }
        for (int32_t i = 0; i < a->top_k; i++) share[r * a->top_k + i] /= all;
    }
    w->share = share;
}

static void check_indexer(const indexer_case *t) {
    const attention_case attention = {t->name, 7,        7,        t->attention_heads,
                                      0,       t->ratio, t->top_k, NAN};
    float *recent, *entries;
    const attention_world world = make_world(&attention, &recent, &entries);
    int32_t n_keys[N_SEQS];
    for (int32_t s = 0; s < N_SEQS; s++) n_keys[s] = lengths[s] / t->ratio;
    const hd_paged pages = take_pages(N_SEQS, n_keys, 4, t->width, 1.0f);
    const int64_t wide = (int64_t)world.rows * t->heads, n_q = wide * t->width;
    const int64_t n_all = (int64_t)world.n_entries * t->width;
    const int64_t n_lse = (int64_t)world.rows * t->attention_heads;
    float *keys = take_zeros(n_all), *lse = take_nan(n_lse);
    float *q = take_random(n_q, 1.0f), *weight = take_random(wide, 1.0f);
    float *dq = take_nan(n_q), *dweight = take_nan(wide), *dkeys = take_nan(n_all);
    float *attention_q = take_random(n_lse * attention.k_dim, 1.5f);
    float *divergence = take_zeros(world.rows);
    for (int32_t s = 0; s < N_SEQS; s++) {
        for (int32_t e = 0; e < n_keys[s]; e++) {
            memcpy(keys + (int64_t)(world.a.first_entry[s] + e) * t->width,
                   page_entry(&pages, s, e), (size_t)t->width * sizeof *keys);
        }
    }
    indexer_world w = {
        .a = {.dq = dq,
              .dweight = dweight,
              .dkeys = dkeys,
              .divergence = divergence,
              .q = hd_f32(q),
              .weight = weight,
              .keys = pages,
              .selected = world.a.selected,
              .attention_q = hd_f32(attention_q),
              .entries = world.a.entries,
              .lse = lse,
              .first_entry = world.a.first_entry,
              .seqs = world.a.seqs,
              .shares = take_nan((int64_t)world.rows * t->top_k),
              .slopes = take_nan((int64_t)world.rows * t->top_k),
              .rows = world.rows,
              .heads = t->heads,
              .ratio = t->ratio,
              .top_k = t->top_k,
              .attention_heads = t->attention_heads,
              .k_dim = attention.k_dim,
              .scale = 0.7f,
              .attention_scale = 0.4f,
              .factor = 0.3f},
        .seq = world.seq,
        .divergence = take((size_t)world.rows * sizeof(double)),
        .rows = world.rows
    };
    set_shares(&w, attention_q, entries, lse);
    backward_ops()->indexer_back(backward_stream(), &w.a);
    check_gradient(&(gradient_case){
        .op = t->name,
        .in = {{"q", q, dq, n_q},
               {"weight", weight, dweight, wide},
               {"keys", keys, dkeys, n_all}},
        .args = &w,
        .loss = indexer_loss
    });
    indexer_loss(&w, (double *const[]){take_doubles(q, n_q), take_doubles(weight, wide),
                                       take_doubles(keys, n_all)});
    for (int32_t r = 0; r < w.rows; r++) {
        assert_true(fabs((double)divergence[r] - w.divergence[r]) < 1e-5);
        if (w.a.seqs.pos[r] + 1 >= t->ratio) continue;
        assert_true(divergence[r] == 0.0f); /* it sees no key */
        for (int32_t c = 0; c < t->heads * t->width; c++)
            assert_true(dq[r * t->heads * t->width + c] == 0.0f);
    }
}

void indexer_gradients(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(indexer_cases); i++) check_indexer(&indexer_cases[i]);
}

/* ---- layer norm ---- */

typedef struct layer_norm_case {
    int32_t rows, cols;
    const float *g;
} layer_norm_case;

/* in: x, weight, bias */
static double layer_norm_loss(const void *args, double *const *in) {
    const layer_norm_case *t = args;
    double loss = 0.0;
    for (int32_t r = 0; r < t->rows; r++) {
        const double *x = in[0] + r * t->cols;
        double mean = 0.0, square = 0.0;
        for (int32_t c = 0; c < t->cols; c++) mean += x[c] / t->cols;
        for (int32_t c = 0; c < t->cols; c++) square += (x[c] - mean) * (x[c] - mean) / t->cols;
        for (int32_t c = 0; c < t->cols; c++) {
            const double y = (x[c] - mean) / sqrt(square + (double)1e-3f) * in[1][c] + in[2][c];
            loss += (double)t->g[r * t->cols + c] * y;
        }
    }
    return loss;
}

void layer_norm_gradients(void **state) {
    static const int32_t sizes[][2] = {
        {1,   2  },
        {3,   7  },
        {129, 16 },
        {130, 300}
    };
    (void)state;
    for (size_t i = 0; i < HD_LEN(sizes); i++) {
        const int32_t rows = sizes[i][0], cols = sizes[i][1];
        const int64_t n = (int64_t)rows * cols;
        const layer_norm_case t = {rows, cols, take_random(n, 1.0f)};
        const float *x = take_random(n, 2.0f), *weight = take_random(cols, 1.0f);
        float *dx = take_zeros(n), *dweight = take_zeros(cols), *dbias = take_zeros(cols);
        memcpy(dx, t.g, (size_t)n * sizeof *dx);
        backward_ops()->layer_norm_back(
            backward_stream(),
            &(hd_layer_norm_back_args){.g = hd_f32(dx),
                                       .dweight = dweight,
                                       .dbias = dbias,
                                       .x = hd_f32(x),
                                       .weight = weight,
                                       .stats = take(2 * (size_t)rows * sizeof(double)),
                                       .rows = rows,
                                       .cols = cols,
                                       .eps = 1e-3f});
        check_gradient(&(gradient_case){
            .op = "layer_norm",
            .in = {{"x", x, dx, n},
                   {"weight", weight, dweight, cols},
                   {"bias", take_zeros(cols), dbias, cols}},
            .args = &t,
            .loss = layer_norm_loss
        });
    }
}

/* ---- naive MLA ---- */

enum { NAIVE_SEQS = 4, NAIVE_HEADS = 3, NOPE = 5, ROPE = 4, VALUE = 7 };
enum { NAIVE_K = NOPE + ROPE, MADE = NOPE + VALUE };

/* Sequences of a few rows, of complete tiles, and of one row more or less. */
static const int32_t naive_lengths[][NAIVE_SEQS] = {
    {1, 3,   4,   31},
    {1, 128, 127, 2 },
    {5, 129, 131, 64},
    {1, 257, 1,   33},
};

typedef struct naive_case {
    const int32_t *first_row;
    const float *g;
} naive_case;

/* One head of a row: <out, g>, and out if it is not NULL. in: q, made, rotated */
static double naive_row(double *const *in, const float *g, int32_t first, int32_t row,
                        int32_t head, float *out) {
    const double *q = in[0] + (row * NAIVE_HEADS + head) * NAIVE_K;
    double score[512], top = -INFINITY, total = 0.0, loss = 0.0;
    for (int32_t j = first; j <= row; j++) {
        double sum = 0.0;
        for (int c = 0; c < NOPE; c++) sum += q[c] * in[1][(j * NAIVE_HEADS + head) * MADE + c];
        for (int c = 0; c < ROPE; c++) sum += q[NOPE + c] * in[2][j * ROPE + c];
        score[j - first] = sum * (double)0.4f;
        top = fmax(top, score[j - first]);
    }
    for (int32_t j = first; j <= row; j++) total += exp(score[j - first] - top);
    for (int c = 0; c < VALUE; c++) {
        double sum = 0.0;
        for (int32_t j = first; j <= row; j++) {
            sum += exp(score[j - first] - top) / total *
                   in[1][(j * NAIVE_HEADS + head) * MADE + NOPE + c];
        }
        loss += sum * (double)g[(row * NAIVE_HEADS + head) * VALUE + c];
        if (out) out[(row * NAIVE_HEADS + head) * VALUE + c] = (float)sum;
    }
    return loss;
}

static double naive_rows(const naive_case *t, double *const *in, float *out) {
    double loss = 0.0;
    for (int32_t s = 0; s < NAIVE_SEQS; s++) {
        for (int32_t r = t->first_row[s]; r < t->first_row[s + 1]; r++) {
            for (int32_t h = 0; h < NAIVE_HEADS; h++)
                loss += naive_row(in, t->g, t->first_row[s], r, h, out);
        }
    }
    return loss;
}

static double naive_loss(const void *args, double *const *in) {
    return naive_rows(args, in, NULL);
}

static void check_naive(const int32_t *length) {
    int32_t *first_row = take_ints(NAIVE_SEQS + 1);
    for (int s = 0; s < NAIVE_SEQS; s++) first_row[s + 1] = first_row[s] + length[s];
    const int64_t rows = first_row[NAIVE_SEQS], wide = rows * NAIVE_HEADS;
    const naive_case t = {first_row, take_random(wide * VALUE, 1.0f)};
    const float *q = take_random(wide * NAIVE_K, 1.5f), *made = take_random(wide * MADE, 1.0f);
    const float *rotated = take_random(rows * ROPE, 1.0f);
    float *dq = take_nan(wide * NAIVE_K), *dmade = take_nan(wide * MADE);
    float *drotated = take_nan(rows * ROPE), *out = take_nan(wide * VALUE);
    naive_rows(&t,
               (double *const[]){take_doubles(q, wide * NAIVE_K),
                                 take_doubles(made, wide * MADE),
                                 take_doubles(rotated, rows * ROPE)},
               out);
    backward_ops()->attention_naive_back(backward_stream(),
                                         &(hd_attention_naive_back_args){
                                             .dq = dq,
                                             .dmade = dmade,
                                             .drotated = hd_f32(drotated),
                                             .part = take_nan(wide * ROPE),
                                             .lse = take_nan(wide),
                                             .delta = take_nan(wide),
                                             .g = hd_f32(t.g),
                                             .out = hd_f32(out),
                                             .q = hd_f32(q),
                                             .made = made,
                                             .rotated = hd_f32(rotated),
                                             .seqs = {NAIVE_SEQS, first_row, NULL, 0},
                                             .rows = (int32_t)rows,
                                             .heads = NAIVE_HEADS,
                                             .nope_dim = NOPE,
                                             .rope_dim = ROPE,
                                             .v_dim = VALUE,
                                             .scale = 0.4f
    });
    check_gradient(&(gradient_case){
        .op = "attention_naive",
        .in = {{"q", q, dq, wide * NAIVE_K},
               {"made", made, dmade, wide * MADE},
               {"rotated", rotated, drotated, rows * ROPE}},
        .args = &t,
        .loss = naive_loss
    });
}

void naive_attention_gradients(void **state) {
    (void)state;
    for (size_t i = 0; i < HD_LEN(naive_lengths); i++) check_naive(naive_lengths[i]);
}

/* ---- the compressor ---- */

typedef struct compress_case {
    hd_compress_back_args a;
    int32_t n_entries;
} compress_case;

/* Channel c of a block: the softmax of the gates over its slots, times kv. */
static double pooled(const hd_compress_back_args *a, double *const *in, int32_t first,
                     int32_t block, int32_t c) {
    const int32_t coff = a->overlap ? 2 : 1, wide = coff * a->width;
    double total = 0.0, sum = 0.0;
    for (int32_t i = a->overlap && block > 0 ? -a->ratio : 0; i < a->ratio; i++) {
        const int32_t pos = block * a->ratio + i;
        const int32_t channel = a->overlap && i >= 0 ? a->width + c : c;
        const int64_t at = (int64_t)(first + pos) * wide + channel;
        const double p = exp(in[1][at] + in[2][pos % a->ratio * wide + channel]);
        total += p;
        sum += p * in[0][at];
    }
    return sum / total;
}

/* in: kv, gate without ape, ape, norm */
static double compress_loss(const void *args, double *const *in) {
    const compress_case *t = args;
    const hd_compress_back_args *a = &t->a;
    double loss = 0.0, entry[64];
    for (int32_t s = 0; s < a->seqs.n; s++) {
        const int32_t first = a->seqs.first_row[s];
        for (int32_t b = 0; b < (a->seqs.first_row[s + 1] - first) / a->ratio; b++) {
            double square = 0.0;
            for (int32_t c = 0; c < a->width; c++) {
                entry[c] = pooled(a, in, first, b, c);
                square += entry[c] * entry[c];
            }
            const double inverse = 1.0 / sqrt(square / a->width + (double)a->eps);
            for (int32_t c = 0; c < a->width; c++) entry[c] *= inverse * in[3][c];
            double *tail = entry + a->width - 2 * a->pairs;
            for (int32_t i = 0; i < a->pairs; i++) {
                const double angle = (double)((float)(b * a->ratio) * a->freq[i]);
                const double x = tail[2 * i], y = tail[2 * i + 1];
                tail[2 * i] = x * cos(angle) - y * sin(angle);
                tail[2 * i + 1] = x * sin(angle) + y * cos(angle);
            }
            for (int32_t c = 0; c < a->width; c++) {
                loss +=
                    entry[c] * (double)a->g[(int64_t)(a->first_entry[s] + b) * a->width + c];
            }
        }
    }
    return loss;
}

static void check_compress(int32_t ratio, bool overlap) {
    enum { WIDTH = 10, PAIRS = 3 };
    const int32_t wide = (overlap ? 2 : 1) * WIDTH;
    int32_t *first_row = take_ints(N_SEQS + 1), *first_entry = take_ints(N_SEQS), total = 0;
    for (int32_t s = 0; s < N_SEQS; s++) {
        first_entry[s] = total;
        total += lengths[s] / ratio;
        first_row[s + 1] = first_row[s] + lengths[s];
    }
    const int64_t n = (int64_t)first_row[N_SEQS] * wide, n_ape = (int64_t)ratio * wide;
    const float *kv = take_random(n, 1.0f), *gate = take_random(n, 2.0f);
    const float *ape = take_random(n_ape, 1.0f), *norm = take_random(WIDTH, 1.5f);
    float *dkv = take_nan(n), *dgate = take_nan(n);
    float *dape = take_zeros(n_ape), *dnorm = take_zeros(WIDTH);
    compress_case t = {
        .a = {.dkv = dkv,
              .dgate = dgate,
              .dape = dape,
              .dnorm = dnorm,
              .g = take_random((int64_t)total * WIDTH, 1.0f),
              .kv = kv,
              .gate = gate,
              .ape = ape,
              .norm = norm,
              .freq = take_random(PAIRS, 1.0f),
              .first_entry = first_entry,
              .seqs = {N_SEQS, first_row, NULL, 17},
              .rows = first_row[N_SEQS],
              .width = WIDTH,
              .ratio = ratio,
              .pairs = PAIRS,
              .overlap = overlap,
              .eps = 1e-6f},
        .n_entries = total
    };
    const float *g = take_copy(t.a.g, sizeof(float) * (size_t)total * WIDTH);
    backward_ops()->compress_back(backward_stream(), &t.a);
    memcpy(t.a.g, g, sizeof(float) * (size_t)total * WIDTH);
    check_gradient(&(gradient_case){
        .op = overlap ? "compress with overlap" : "compress",
        .in = {{"kv", kv, dkv, n},
               {"gate", gate, dgate, n},
               {"ape", ape, dape, n_ape},
               {"norm", norm, dnorm, WIDTH}},
        .args = &t,
        .loss = compress_loss
    });
}

void compress_gradients(void **state) {
    (void)state;
    check_compress(4, true);
    check_compress(4, false);
    check_compress(8, false);
    check_compress(3, true);
}

/* ---- hyper-connections ---- */

typedef struct hc_case {
    const float *g, *dpost, *dcomb;
    int32_t rows, hc, cols, iters;
} hc_case;

/* in: x, y, post, comb */
static double hc_post_loss(const void *args, double *const *in) {
    const hc_case *t = args;
    double sum = 0.0;
    for (int32_t r = 0; r < t->rows; r++) {
        for (int32_t j = 0; j < t->hc; j++) {
            for (int32_t c = 0; c < t->cols; c++) {
                double v = in[2][r * t->hc + j] * in[1][(int64_t)r * t->cols + c];
                for (int32_t i = 0; i < t->hc; i++) {
                    v += in[3][(r * t->hc + i) * t->hc + j] *
                         in[0][((int64_t)r * t->hc + i) * t->cols + c];
                }
                sum += v * (double)t->g[((int64_t)r * t->hc + j) * t->cols + c];
            }
        }
    }
    return sum;
}

void hc_post_gradients(void **state) {
    (void)state;
    for (int32_t hc = 1; hc <= 5; hc++) {
        enum { ROWS = 6, COLS = 13 };
        const int64_t n = (int64_t)ROWS * hc * COLS;
        const hc_case t = {take_random(n, 1.0f), NULL, NULL, ROWS, hc, COLS, 0};
        const float *x = take_random(n, 1.0f), *y = take_random(ROWS * COLS, 1.0f);
        const float *post = take_random(ROWS * hc, 1.0f),
                    *comb = take_random(ROWS * hc * hc, 1.0f);
        float *dx = take_nan(n), *dy = take_nan(ROWS * COLS);
        float *dpost = take_nan(ROWS * hc), *dcomb = take_nan(ROWS * hc * hc);
        backward_ops()->hc_post_back(backward_stream(),
                                     &(hd_hc_post_back_args){.dx = dx,
                                                             .dy = dy,
                                                             .dpost = dpost,
                                                             .dcomb = dcomb,
                                                             .g = hd_f32(t.g),
                                                             .x = hd_f32(x),
                                                             .y = hd_f32(y),
                                                             .post = post,
                                                             .comb = comb,
                                                             .rows = ROWS,
                                                             .cols = COLS,
                                                             .hc = hc});
        check_gradient(&(gradient_case){
            .op = "hc_post",
            .in = {{"x", x, dx, n},
                   {"y", y, dy, ROWS * COLS},
                   {"post", post, dpost, ROWS * hc},
                   {"comb", comb, dcomb, (int64_t)ROWS * hc * hc}},
            .args = &t,
            .loss = hc_post_loss
        });
    }
}

/* in: x, fn, scale, base. mix[i] = fn x / rms(x) of a row */
static void mix_row(const hc_case *t, double *const *in, int32_t r, int32_t n, double *mix) {
    const int64_t wide = (int64_t)t->hc * t->cols;
    const double *x = in[0] + r * wide;
    double square = 0.0;
    for (int64_t c = 0; c < wide; c++) square += x[c] * x[c];
    for (int32_t i = 0; i < n; i++) {
        mix[i] = 0.0;
        for (int64_t c = 0; c < wide; c++) mix[i] += in[1][i * wide + c] * x[c];
        mix[i] /= sqrt(square / (double)wide + (double)1e-6f);
    }
}

static double weighed_loss(const hc_case *t, const double *x, const double *weight, int32_t r) {
    double sum = 0.0;
    for (int32_t i = 0; i < t->hc; i++) {
        for (int32_t c = 0; c < t->cols; c++) {
            sum += (double)t->g[(int64_t)r * t->cols + c] * weight[i] *
                   x[((int64_t)r * t->hc + i) * t->cols + c];
        }
    }
    return sum;
}

static void scale_lines(double *m, int32_t hc, bool rows) {
    for (int32_t line = 0; line < hc; line++) {
        double sum = (double)1e-6f;
        for (int32_t k = 0; k < hc; k++) sum += m[rows ? line * hc + k : k * hc + line];
        for (int32_t k = 0; k < hc; k++) m[rows ? line * hc + k : k * hc + line] /= sum;
    }
}

static double sigmoid64(double x) {
    return 1.0 / (1.0 + exp(-x));
}

static double hc_pre_loss(const void *args, double *const *in) {
    const hc_case *t = args;
    const int32_t hc = t->hc, n = 2 * hc + hc * hc;
    double loss = 0.0;
    for (int32_t r = 0; r < t->rows; r++) {
        double mix[48], pre[8], *m = mix + 2 * hc;
        mix_row(t, in, r, n, mix);
        for (int32_t i = 0; i < hc; i++) {
            pre[i] = sigmoid64(mix[i] * in[2][0] + in[3][i]) + (double)1e-6f;
            loss += (double)t->dpost[r * hc + i] * 2.0 *
                    sigmoid64(mix[hc + i] * in[2][1] + in[3][hc + i]);
        }
        for (int32_t i = 0; i < hc; i++) {
            double sum = 0.0;
            for (int32_t j = 0; j < hc; j++) {
                m[i * hc + j] = exp(m[i * hc + j] * in[2][2] + in[3][2 * hc + i * hc + j]);
                sum += m[i * hc + j];
            }
            for (int32_t j = 0; j < hc; j++)
                m[i * hc + j] = m[i * hc + j] / sum + (double)1e-6f;
        }
        for (int32_t k = 0; k < t->iters; k++) {
            if (k > 0) scale_lines(m, hc, true);
            scale_lines(m, hc, false);
        }
        for (int32_t k = 0; k < hc * hc; k++) loss += (double)t->dcomb[r * hc * hc + k] * m[k];
        loss += weighed_loss(t, in[0], pre, r);
    }
    return loss;
}

static double hc_head_loss(const void *args, double *const *in) {
    const hc_case *t = args;
    double loss = 0.0;
    for (int32_t r = 0; r < t->rows; r++) {
        double mix[8];
        mix_row(t, in, r, t->hc, mix);
        for (int32_t i = 0; i < t->hc; i++) {
            mix[i] = sigmoid64(mix[i] * in[2][0] + in[3][i]) + (double)1e-6f;
        }
        loss += weighed_loss(t, in[0], mix, r);
    }
    return loss;
}

/* Computes the gradients of hc_pre, or of hc_head, and compares them. */
static void check_mixing(int32_t hc, int32_t iters, float spread, bool head) {
    enum { ROWS = 5, COLS = 9 };
    const int32_t n = head ? hc : 2 * hc + hc * hc, n_scale = head ? 1 : 3, wide = hc * COLS;
    float *part = take_nan(ROWS * (n_scale + n));
    const int64_t n_x = (int64_t)ROWS * wide, n_fn = (int64_t)n * wide;
    const hc_case t = {take_random(ROWS * COLS, 1.0f),
                       take_random(ROWS * hc, 1.0f),
                       take_random(ROWS * hc * hc, 1.0f),
                       ROWS,
                       hc,
                       COLS,
                       iters};
    const float *x = take_random(n_x, 1.0f), *fn = take_random(n_fn, 0.3f);
    const float *scale = take_random(n_scale, spread), *base = take_random(n, spread);
    float *dx = take_zeros(n_x), *dmix = take_nan(ROWS * n), *dfn = take_zeros(n_fn);
    float *dscale = take_zeros(n_scale), *dbase = take_zeros(n);
    if (head) {
        backward_ops()->hc_head_back(backward_stream(), &(hd_hc_head_back_args){
                                                            dx,
                                                            dmix,
                                                            dscale,
                                                            dbase,
                                                            part,
                                                            hd_f32(t.g),
                                                            hd_f32(x),
                                                            fn,
                                                            scale,
                                                            base,
                                                            ROWS,
                                                            COLS,
                                                            hc,
                                                            1e-6f,
                                                            1e-6f,
                                                            {{0}, NULL, 0}
        });
    } else {
        backward_ops()->hc_pre_back(backward_stream(), &(hd_hc_pre_back_args){
                                                           dx,
                                                           dmix,
                                                           dscale,
                                                           dbase,
                                                           part,
                                                           hd_f32(t.g),
                                                           t.dpost,
                                                           t.dcomb,
                                                           hd_f32(x),
                                                           fn,
                                                           scale,
                                                           base,
                                                           ROWS,
                                                           COLS,
                                                           hc,
                                                           iters,
                                                           1e-6f,
                                                           1e-6f,
                                                           {{0}, NULL, 0}
        });
    }
    backward_ops()->weight_grad(backward_stream(), &(hd_weight_grad_args){.dw = dfn,
                                                                          .left = hd_f32(dmix),
                                                                          .right = hd_f32(x),
                                                                          .rows = ROWS,
                                                                          .heads = 1,
                                                                          .n_rows = n,
                                                                          .cols = wide,
                                                                          .left_head = n,
                                                                          .right_head = wide});
    check_gradient(&(gradient_case){
        .op = head ? "hc_head" : "hc_pre",
        .in = {{"x", x, dx, n_x},
               {"fn", fn, dfn, n_fn},
               {"scale", scale, dscale, n_scale},
               {"base", base, dbase, n}},
        .args = &t,
        .loss = head ? hc_head_loss : hc_pre_loss
    });
}

void hc_pre_gradients(void **state) {
    (void)state;
    check_mixing(4, 20, 1.0f, false);
    check_mixing(4, 1, 1.0f, false);
    check_mixing(3, 2, 2.0f, false);
    check_mixing(6, 30, 1.0f, false); /* more normalizations than are kept at once */
    check_mixing(2, 20, 4.0f, false);
    check_mixing(4, 20, 80.0f, false); /* logits of 80 */
    check_mixing(1, 3, 1.0f, false);
}

void hc_head_gradients(void **state) {
    (void)state;
    for (int32_t hc = 1; hc <= 5; hc++) check_mixing(hc, 0, 1.0f, true);
}
