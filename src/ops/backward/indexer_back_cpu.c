/* indexer_back_cpu.c - gradients of the indexer's own loss over the kernels of an instruction set. A task is
 * a sequence, whose keys' gradients it owns. Of each row it takes a few heads and blocks of keys: first what
 * attention gives the keys, then their scores, then products again, with which `mix` adds up dq and the
 * keys' gradients. */
#include <string.h>

#include "base/checked.h"
#include "ops/backward/backward_cpu_internal.h"

enum { HEADS = 16, KEYS = 32 };

/* Scratch of a worker: some heads of a row with a block of keys. */
typedef struct space {
    float acc[HEADS * OPS_TILE_ROWS * OPS_LANES];
    float along[HEADS * KEYS], of_head[HEADS * KEYS], of_key[KEYS * HEADS];
    const float *key[KEYS];
    float decoded[KEYS * HD_MAX_ENTRY_COLS]; /* keys that are not stored as float32 */
} space;
_Static_assert(sizeof(space) <= OPS_STATE_BYTES, "it is a worker's scratch");

typedef struct indexer_job {
    const hd_indexer_back_args *a;
    const ops_kernels *k;
    hd_stream *s;
} indexer_job;

/* One row, some heads of it, and some of its keys. */
typedef struct part {
    const indexer_job *job;
    space *at;
    const int32_t *selected;
    float *share,
        *slope; /* [n] what attention gives a key; its score, then the loss's derivative */
    int32_t seq, row, n, head, n_heads, first, n_keys;
    const float *q[HEADS];
} part;

typedef void part_fn(part *t);

/* Runs fn for all heads and keys; along: <q, key>. */
static void for_parts(part *t, const hd_rows *q, int32_t heads, const hd_paged *keys,
                      int32_t width, part_fn *fn) {
    const ops_kernels *k = t->job->k;
    for (t->first = 0; t->first < t->n; t->first += KEYS) {
        t->n_keys = hd_min_i32(KEYS, t->n - t->first);
        for (int32_t i = 0; i < t->n_keys; i++) {
            t->at->key[i] = ops_entry_cpu(k, keys, t->seq, t->selected[t->first + i],
                                          t->at->decoded + i * HD_MAX_ENTRY_COLS);
        }
        for (t->head = 0; t->head < heads; t->head += HEADS) {
            t->n_heads = hd_min_i32(HEADS, heads - t->head);
            for (int32_t h = 0; h < t->n_heads; h++) {
                t->q[h] = act_in(*q) + ((int64_t)t->row * heads + t->head + h) * width;
            }
            for (int32_t i = 0; i < t->n_keys; i += OPS_TILE_ROWS) {
                const int32_t n_w = hd_min_i32(OPS_TILE_ROWS, t->n_keys - i);
                const float *w[OPS_TILE_ROWS];
                for (int32_t j = 0; j < OPS_TILE_ROWS; j++)
                    w[j] = t->at->key[j < n_w ? i + j : i];
                memset(t->at->acc, 0, sizeof t->at->acc);
                k->dots(t->at->acc, t->q, t->n_heads, 0, w, width);
                k->reduce(t->at->along + i, KEYS, t->at->acc, t->n_heads, n_w);
            }
            fn(t);
        }
    }
}

static void add_shares(part *t) {
    const hd_indexer_back_args *a = t->job->a;
    for (int32_t h = 0; h < t->n_heads; h++) {
        float *p = t->at->along + h * KEYS;
        for (int32_t i = 0; i < t->n_keys; i++) p[i] *= a->attention_scale;
        t->job->k->exp_sum(p, t->n_keys,
                           a->lse[(int64_t)t->row * a->attention_heads + t->head + h]);
        for (int32_t i = 0; i < t->n_keys; i++) t->share[t->first + i] += p[i];
    }
}

static float weight_of(const part *t, int32_t h) {
    const hd_indexer_back_args *a = t->job->a;
    return a->weight[(int64_t)t->row * a->heads + t->head + h] * a->scale;
}

static void add_scores(part *t) {
    for (int32_t h = 0; h < t->n_heads; h++) {
        const float *along = t->at->along + h * KEYS, weight = weight_of(t, h);
        for (int32_t i = 0; i < t->n_keys; i++) {
            t->slope[t->first + i] += along[i] > 0.0f ? weight * along[i] : 0.0f;
        }
    }
}

/* Scores become derivatives; returns the divergence. False: attention gives these keys nothing. */
static bool compare(const part *t, double *divergence) {
    double top = -(double)INFINITY, all = 0.0, total = 0.0;
    for (int32_t i = 0; i < t->n; i++) {
        all += (double)t->share[i];
        top = fmax(top, (double)t->slope[i]);
    }
    if (!(all > 0.0)) return false;
    for (int32_t i = 0; i < t->n; i++) total += exp((double)t->slope[i] - top);
    *divergence = 0.0;
    for (int32_t i = 0; i < t->n; i++) {
        const double logp = (double)t->slope[i] - top - log(total);
        const double p = (double)t->share[i] / all;
        if (p > 0.0) *divergence += p * (log(p) - logp);
        t->slope[i] = (float)((double)t->job->a->factor * (exp(logp) - p));
    }
    return true;
}

/* dq of the heads, and what they give the keys, which lie one behind another where indices do. */
static void add_products(const part *t) {
    const hd_indexer_back_args *a = t->job->a;
    const int32_t width = a->keys.width;
    const int32_t *selected = t->selected + t->first;
    t->job->k->mix(&(ops_mix){.out = a->dq + ((int64_t)t->row * a->heads + t->head) * width,
                              .coef = t->at->of_head,
                              .row = t->at->key,
                              .out_stride = width,
                              .coef_stride = KEYS,
                              .n_out = t->n_heads,
                              .n_rows = t->n_keys,
                              .cols = width});
    for (int32_t i = 0, end; i < t->n_keys; i = end) {
        for (end = i + 1; end < t->n_keys && selected[end] == selected[end - 1] + 1;) end++;
        t->job->k->mix(&(ops_mix){
            .out = a->dkeys + ((int64_t)a->first_entry[t->seq] + selected[i]) * width,
            .coef = t->at->of_key + i * HEADS,
            .row = t->q,
            .out_stride = width,
            .coef_stride = HEADS,
            .n_out = end - i,
            .n_rows = t->n_heads,
            .cols = width});
    }
}

static void add_gradients(part *t) {
    const hd_indexer_back_args *a = t->job->a;
    for (int32_t h = 0; h < t->n_heads; h++) {
        const float *along = t->at->along + h * KEYS, weight = weight_of(t, h);
        double dweight = 0.0;
        for (int32_t i = 0; i < t->n_keys; i++) {
            const float ds = along[i] > 0.0f ? t->slope[t->first + i] : 0.0f;
            dweight += (double)ds * (double)along[i];
            t->at->of_head[h * KEYS + i] = t->at->of_key[i * HEADS + h] = ds * weight;
        }
        a->dweight[(int64_t)t->row * a->heads + t->head + h] +=
            (float)(dweight * (double)a->scale);
    }
    add_products(t);
}

static void row_back(part *t) {
    const hd_indexer_back_args *a = t->job->a;
    const int64_t at = t->row, wide = (int64_t)a->heads * a->keys.width;
    double divergence;
    t->selected = a->selected + at * a->top_k;
    t->share = a->shares + at * a->top_k;
    t->slope = a->slopes + at * a->top_k;
    for (t->n = 0; t->n < a->top_k && t->selected[t->n] >= 0;) t->n++;
    memset(a->dq + at * wide, 0, (size_t)wide * sizeof *a->dq);
    memset(a->dweight + at * a->heads, 0, (size_t)a->heads * sizeof *a->dweight);
    memset(t->share, 0, (size_t)t->n * sizeof *t->share);
    memset(t->slope, 0, (size_t)t->n * sizeof *t->slope);
    for_parts(t, &a->attention_q, a->attention_heads, &a->entries, a->k_dim, add_shares);
    for_parts(t, &a->q, a->heads, &a->keys, a->keys.width, add_scores);
    if (!compare(t, &divergence)) return;
    a->divergence[at] += (float)divergence;
    for_parts(t, &a->q, a->heads, &a->keys, a->keys.width, add_gradients);
}

static void sequence_task(const void *arg, int32_t seq, int32_t worker) {
    const indexer_job *job = arg;
    const hd_indexer_back_args *a = job->a;
    const int32_t first = a->seqs.first_row[seq], end = a->seqs.first_row[seq + 1];
    part t = {.job = job, .at = hd_stream_scratch(job->s, worker, sizeof *t.at), .seq = seq};
    memset(a->dkeys + (int64_t)a->first_entry[seq] * a->keys.width, 0,
           (size_t)((end - first) / a->ratio) * (size_t)a->keys.width * sizeof *a->dkeys);
    for (t.row = first; t.row < end; t.row++) row_back(&t);
}

void back_indexer_back_cpu(hd_stream *s, const hd_indexer_back_args *a, const ops_kernels *k) {
    const indexer_job job = {a, k, s};
    hd_stream_tasks(s, a->seqs.n, sequence_task, &job);
}
