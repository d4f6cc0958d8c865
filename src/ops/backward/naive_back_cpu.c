/* naive_back_cpu.c - gradients of naive MLA attention over the kernels of an instruction set. A task is
 * one head of a sequence, whose gradients it owns. It walks through tiles of keys, in ascending order,
 * and for each through tiles of the queries that see it: once for the softmax's denominators, then for
 * the gradients. All products are mixes; keys and values are transposed for those that sum over
 * their elements. */
#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "ops/backward/backward_cpu_internal.h"

enum {
    KEYS = 2 * OPS_TRANSPOSE_KEYS, /* of a tile */
    QUERIES = OPS_TRANSPOSE_KEYS,
    SUM_ROWS = 64,  /* of a task that sums heads */
    MOST_COLS = 512 /* of a key and a value together */
};

/* Scratch of a worker: a tile. */
typedef struct space {
    float transposed[MOST_COLS * KEYS]; /* [k_dim, KEYS], then [v_dim, KEYS] */
    float half[MOST_COLS * OPS_TRANSPOSE_KEYS];
    float p[QUERIES * KEYS], ds[QUERIES * KEYS];
    float by_key[KEYS * QUERIES];
    const float *row[MOST_COLS];                       /* of transposed */
    const float *nope[KEYS], *rotated[KEYS], *v[KEYS]; /* of the tile's keys */
} space;
_Static_assert(sizeof(space) <= OPS_STATE_BYTES, "it is a worker's scratch");

typedef struct naive_job {
    const hd_attention_naive_back_args *a;
    const ops_kernels *k;
    hd_stream *s;
} naive_job;

/* One head of the rows [first, end) of a sequence. */
typedef struct head_task {
    const hd_attention_naive_back_args *a;
    const ops_kernels *k;
    space *at;
    int32_t head, first, end;
    int32_t k_dim, made; /* elements of a key; elements made of a latent */
} head_task;

/* A tile: keys of rows [key, key + n_keys), queries of rows [query, query + n_queries). */
typedef struct tile {
    int32_t key, n_keys, query, n_queries;
} tile;

static int64_t at_head(const head_task *t, int32_t row) {
    return (int64_t)row * t->a->heads + t->head;
}

/* The keys of a tile that query i sees. */
static int32_t seen_by(const tile *x, int32_t i) {
    return hd_min_i32(x->n_keys, x->query + i - x->key + 1);
}

/* out[i, c] += sum over n_rows of coef[i, :] row[:][c] */
static void mix(const head_task *t, float *out, int64_t out_stride, int32_t n_out,
                const float *coef, int64_t coef_stride, const float *const *row, int32_t n_rows,
                int32_t cols) {
    t->k->mix(&(ops_mix){.out = out,
                         .coef = coef,
                         .row = row,
                         .out_stride = out_stride,
                         .coef_stride = coef_stride,
                         .n_out = n_out,
                         .n_rows = n_rows,
                         .cols = cols});
}

/* ---- keys ---- */

/* to[c, u] = row[u][c] for KEYS rows */
static void transpose(const head_task *t, float *to, const float *const *row, int32_t cols) {
    for (int32_t half = 0; half < KEYS; half += OPS_TRANSPOSE_KEYS) {
        t->k->transpose(t->at->half, row + half, cols);
        for (int32_t c = 0; c < cols; c++) {
            memcpy(to + c * KEYS + half, t->at->half + c * OPS_TRANSPOSE_KEYS,
                   OPS_TRANSPOSE_KEYS * sizeof(float));
        }
    }
}

/* Takes the keys of a tile, the last one again for those that are missing. */
static void take_keys(const head_task *t, const tile *x, bool with_values) {
    const hd_attention_naive_back_args *a = t->a;
    space *at = t->at;
    for (int32_t u = 0; u < KEYS; u++) {
        const int32_t row = x->key + hd_min_i32(u, x->n_keys - 1);
        at->nope[u] = a->made + at_head(t, row) * t->made;
        at->v[u] = at->nope[u] + a->nope_dim;
        at->rotated[u] = act_in(a->rotated) + row * stride_of(a->rotated, a->rope_dim);
    }
    transpose(t, at->transposed, at->nope, a->nope_dim);
    transpose(t, at->transposed + a->nope_dim * KEYS, at->rotated, a->rope_dim);
    if (with_values) transpose(t, at->transposed + t->k_dim * KEYS, at->v, a->v_dim);
}

/* score = q K^T, not yet scaled */
static void score(const head_task *t, const tile *x, float *out) {
    memset(out, 0, (size_t)(x->n_queries * KEYS) * sizeof *out);
    mix(t, out, KEYS, x->n_queries, act_in(t->a->q) + at_head(t, x->query) * t->k_dim,
        (int64_t)t->a->heads * t->k_dim, t->at->row, t->k_dim, x->n_keys);
}

/* ---- denominators ---- */

/* lse is the largest score and delta the sum of exp(score - lse) until all keys were seen. */
static void sum_tile(const head_task *t, const tile *x) {
    const hd_attention_naive_back_args *a = t->a;
    score(t, x, t->at->p);
    for (int32_t i = 0; i < x->n_queries; i++) {
        const int64_t at = at_head(t, x->query + i);
        ops_soften(t->k, t->at->p + i * KEYS, seen_by(x, i), a->scale, &a->lse[at],
                   &a->delta[at]);
    }
}

static void begin_rows(const head_task *t) {
    for (int32_t r = t->first; r < t->end; r++) {
        t->a->lse[at_head(t, r)] = -INFINITY;
        t->a->delta[at_head(t, r)] = 0.0f;
    }
}

static void end_rows(const head_task *t) {
    const hd_attention_naive_back_args *a = t->a;
    for (int32_t r = t->first; r < t->end; r++) {
        const int64_t at = at_head(t, r);
        a->lse[at] = (float)((double)a->lse[at] + log((double)a->delta[at]));
        a->delta[at] =
            back_dot(act_in(a->out) + at * a->v_dim, act_in(a->g) + at * a->v_dim, a->v_dim);
    }
}

/* ---- gradients ---- */

/* p, ds: softmax and the gradient of scores, scaled; 0 of keys that a query does not see */
static void differentiate(const head_task *t, const tile *x) {
    const hd_attention_naive_back_args *a = t->a;
    for (int32_t i = 0; i < x->n_queries; i++) {
        const int64_t at = at_head(t, x->query + i);
        const int32_t n = seen_by(x, i);
        float *restrict p = t->at->p + i * KEYS, *restrict ds = t->at->ds + i * KEYS;
        for (int32_t u = 0; u < n; u++) p[u] *= a->scale;
        t->k->exp_sum(p, n, a->lse[at]);
        for (int32_t u = 0; u < n; u++) ds[u] = p[u] * (ds[u] - a->delta[at]) * a->scale;
        for (int32_t u = n; u < KEYS; u++) p[u] = ds[u] = 0.0f;
    }
}

/* by_key[u, i] = x[i, u] of a tile */
static void transpose_queries(const head_task *t, const float *x, int32_t n) {
    const float *row[QUERIES];
    for (int32_t i = 0; i < QUERIES; i++) row[i] = x + hd_min_i32(i, n - 1) * KEYS;
    t->k->transpose(t->at->by_key, row, KEYS);
}

static void add_tile(const head_task *t, const tile *x) {
    const hd_attention_naive_back_args *a = t->a;
    space *at = t->at;
    const int64_t q_row = (int64_t)a->heads * t->k_dim, made_row = (int64_t)a->heads * t->made;
    const int64_t g_row = (int64_t)a->heads * a->v_dim;
    float *dq = a->dq + at_head(t, x->query) * t->k_dim;
    float *dmade = a->dmade + at_head(t, x->key) * t->made;
    float *drotated = a->part + at_head(t, x->key) * a->rope_dim;
    const float *first_g = act_in(a->g) + at_head(t, x->query) * a->v_dim;
    const float *q_nope[QUERIES], *q_rotated[QUERIES], *g[QUERIES];
    for (int32_t i = 0; i < x->n_queries; i++) {
        q_nope[i] = act_in(a->q) + at_head(t, x->query + i) * t->k_dim;
        q_rotated[i] = q_nope[i] + a->nope_dim;
        g[i] = first_g + i * g_row;
    }
    score(t, x, at->p);
    memset(at->ds, 0, (size_t)(x->n_queries * KEYS) * sizeof *at->ds);
    mix(t, at->ds, KEYS, x->n_queries, first_g, g_row, at->row + t->k_dim, a->v_dim, x->n_keys);
    differentiate(t, x);
    mix(t, dq, q_row, x->n_queries, at->ds, KEYS, at->nope, x->n_keys, a->nope_dim);
    mix(t, dq + a->nope_dim, q_row, x->n_queries, at->ds, KEYS, at->rotated, x->n_keys,
        a->rope_dim);
    transpose_queries(t, at->ds, x->n_queries);
    mix(t, dmade, made_row, x->n_keys, at->by_key, QUERIES, q_nope, x->n_queries, a->nope_dim);
    mix(t, drotated, (int64_t)a->heads * a->rope_dim, x->n_keys, at->by_key, QUERIES, q_rotated,
        x->n_queries, a->rope_dim);
    transpose_queries(t, at->p, x->n_queries);
    mix(t, dmade + a->nope_dim, made_row, x->n_keys, at->by_key, QUERIES, g, x->n_queries,
        a->v_dim);
}

/* ---- tasks ---- */

static void each_tile(const head_task *t, bool with_values,
                      void (*fn)(const head_task *t, const tile *x)) {
    for (int32_t key = t->first; key < t->end; key += KEYS) {
        tile x = {.key = key, .n_keys = hd_min_i32(KEYS, t->end - key)};
        take_keys(t, &x, with_values);
        for (x.query = key; x.query < t->end; x.query += QUERIES) {
            x.n_queries = hd_min_i32(QUERIES, t->end - x.query);
            fn(t, &x);
        }
    }
}

static void head_rows(const void *arg, int32_t task, int32_t worker) {
    const naive_job *job = arg;
    const hd_attention_naive_back_args *a = job->a;
    const int32_t seq = task / a->heads;
    const head_task t = {.a = a,
                         .k = job->k,
                         .at = hd_stream_scratch(job->s, worker, sizeof(space)),
                         .head = task % a->heads,
                         .first = a->seqs.first_row[seq],
                         .end = a->seqs.first_row[seq + 1],
                         .k_dim = a->nope_dim + a->rope_dim,
                         .made = a->nope_dim + a->v_dim};
    for (int32_t c = 0; c < t.k_dim + a->v_dim; c++) t.at->row[c] = t.at->transposed + c * KEYS;
    for (int32_t r = t.first; r < t.end; r++) {
        const int64_t at = at_head(&t, r);
        memset(a->dq + at * t.k_dim, 0, (size_t)t.k_dim * sizeof *a->dq);
        memset(a->dmade + at * t.made, 0, (size_t)t.made * sizeof *a->dmade);
        memset(a->part + at * a->rope_dim, 0, (size_t)a->rope_dim * sizeof *a->part);
    }
    begin_rows(&t);
    each_tile(&t, false, sum_tile);
    end_rows(&t);
    each_tile(&t, true, add_tile);
}

/* Sums the heads' gradients of what they share. */
static void sum_heads(const void *arg, int32_t task, int32_t worker) {
    const hd_attention_naive_back_args *a = ((const naive_job *)arg)->a;
    const int32_t first = a->seqs.first_row[0] + task * SUM_ROWS;
    const int32_t end = hd_min_i32(first + SUM_ROWS, a->seqs.first_row[a->seqs.n]);
    (void)worker;
    for (int32_t r = first; r < end; r++) {
        float *restrict to = act(a->drotated) + r * stride_of(a->drotated, a->rope_dim);
        const float *restrict part = a->part + (int64_t)r * a->heads * a->rope_dim;
        memcpy(to, part, (size_t)a->rope_dim * sizeof *to);
        for (int32_t h = 1; h < a->heads; h++) {
            part += a->rope_dim;
            for (int32_t c = 0; c < a->rope_dim; c++) to[c] += part[c];
        }
    }
}

void back_attention_naive_back_cpu(hd_stream *s, const hd_attention_naive_back_args *a,
                                   const ops_kernels *k) {
    const naive_job job = {a, k, s};
    if (a->nope_dim + a->rope_dim + a->v_dim > MOST_COLS) {
        hd_attention_naive_back_ref(s, a);
        return;
    }
    hd_stream_tasks(s, a->seqs.n * a->heads, head_rows, &job);
    const int32_t rows = a->seqs.first_row[a->seqs.n] - a->seqs.first_row[0];
    hd_stream_tasks(s, (int32_t)hd_ceil_div(rows, SUM_ROWS), sum_heads, &job);
}
