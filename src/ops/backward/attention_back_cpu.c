/* attention_back_cpu.c - gradients of attention over the kernels of an instruction set. A task
 * is a sequence, whose keys' gradients it owns. Of each row it takes a few heads and blocks of
 * keys: first all scores for the softmax's denominator, then blocks of scores again, with which
 * `mix` adds up dq and dk. */
#include <string.h>

#include "base/checked.h"
#include "ops/backward/backward_cpu_internal.h"

enum { HEADS = 16, KEYS = 64 };

/* Scratch of a worker: some heads of a row with a block of keys. */
typedef struct space {
    float acc[HEADS * OPS_TILE_ROWS * OPS_LANES];
    float score[HEADS * KEYS], slope[HEADS * KEYS];
    float coef[KEYS * HEADS], p[KEYS * HEADS]; /* dS and P by key */
    const float *key[KEYS];
    float *dkey[KEYS];
    float decoded[KEYS * HD_MAX_ENTRY_COLS]; /* keys that are not stored as float32 */
} space;
_Static_assert(sizeof(space) <= OPS_STATE_BYTES, "it is a worker's scratch");

typedef struct attention_job {
    const hd_attention_back_args *a;
    const ops_kernels *k;
    hd_stream *s;
} attention_job;

/* Some heads of one row. */
typedef struct part {
    const attention_job *job;
    space *at;
    int32_t seq, row, pos, head, n_heads, n_recent, n_keys;
    const float *q[HEADS], *g[HEADS];
} part;

/* ---- keys ---- */

static int32_t n_entries_of(const hd_attention_back_args *a, int32_t row) {
    const int32_t seen = visible_entries(a->seqs.pos[row], a->ratio);
    if (!a->selected) return seen;
    const int32_t *selected = a->selected + (int64_t)row * a->n_selected;
    int32_t n = 0;
    while (n < a->n_selected && selected[n] >= 0) n++;
    return n;
}

/* Lists keys [first, first + n) of the row, recent ones first. */
static void list_keys(const part *t, int32_t first, int32_t n) {
    const hd_attention_back_args *a = t->job->a;
    for (int32_t i = 0; i < n; i++) {
        const int32_t at = first + i;
        float *room = t->at->decoded + i * HD_MAX_ENTRY_COLS;
        if (at < t->n_recent) {
            const int32_t pos = t->pos + 1 - t->n_recent + at;
            t->at->key[i] = ops_entry_cpu(t->job->k, &a->recent, t->seq, pos, room);
            t->at->dkey[i] = a->drecent + ((int64_t)a->seqs.first_row[t->seq] + pos) * a->k_dim;
            continue;
        }
        int32_t e = at - t->n_recent;
        if (a->selected) e = a->selected[(int64_t)t->row * a->n_selected + e];
        t->at->key[i] = ops_entry_cpu(t->job->k, &a->entries, t->seq, e, room);
        t->at->dkey[i] = a->dentries + ((int64_t)a->first_entry[t->seq] + e) * a->k_dim;
    }
}

/* out[head, key] = <x[head], key> over the first `dim` elements */
static void score(const part *t, float *out, const float *const *x, int32_t n, int32_t dim) {
    const ops_kernels *k = t->job->k;
    for (int32_t i = 0; i < n; i += OPS_TILE_ROWS) {
        const int32_t n_w = hd_min_i32(OPS_TILE_ROWS, n - i);
        const float *w[OPS_TILE_ROWS];
        for (int32_t j = 0; j < OPS_TILE_ROWS; j++) w[j] = t->at->key[j < n_w ? i + j : i];
        memset(t->at->acc, 0, sizeof t->at->acc);
        k->dots(t->at->acc, x, t->n_heads, 0, w, dim);
        k->reduce(out + i, KEYS, t->at->acc, t->n_heads, n_w);
    }
}

/* ---- one row ---- */

static float dot(const float *a, const float *b, int32_t n) {
    double sum = 0.0;
    for (int32_t i = 0; i < n; i++) sum += (double)a[i] * (double)b[i];
    return (float)sum;
}

static void find_denominators(const part *t) {
    const hd_attention_back_args *a = t->job->a;
    float top[HEADS], total[HEADS];
    for (int32_t h = 0; h < t->n_heads; h++) {
        top[h] = a->sink ? a->sink[t->head + h] : -INFINITY;
        total[h] = top[h] > -INFINITY ? 1.0f : 0.0f;
    }
    for (int32_t first = 0; first < t->n_keys; first += KEYS) {
        const int32_t n = hd_min_i32(KEYS, t->n_keys - first);
        list_keys(t, first, n);
        score(t, t->at->score, t->q, n, a->k_dim);
        for (int32_t h = 0; h < t->n_heads; h++) {
            ops_soften(t->job->k, t->at->score + h * KEYS, n, a->scale, &top[h], &total[h]);
        }
    }
    for (int32_t h = 0; h < t->n_heads; h++) {
        const int64_t at = (int64_t)t->row * a->heads + t->head + h;
        a->lse[at] = (float)((double)top[h] + log((double)total[h]));
        a->delta[at] = dot(act_in(a->out) + at * a->v_dim, t->g[h], a->v_dim);
    }
}

/* score, slope -> P and dS of n keys, as coefficients of dq (by head) and of dk (by key) */
static void differentiate(const part *t, int32_t n) {
    const hd_attention_back_args *a = t->job->a;
    space *at = t->at;
    for (int32_t h = 0; h < t->n_heads; h++) {
        const int64_t row = (int64_t)t->row * a->heads + t->head + h;
        float *p = at->score + h * KEYS, *ds = at->slope + h * KEYS;
        for (int32_t i = 0; i < n; i++) p[i] *= a->scale;
        t->job->k->exp_sum(p, n, a->lse[row]);
        for (int32_t i = 0; i < n; i++) {
            ds[i] = p[i] * (ds[i] - a->delta[row]) * a->scale;
            at->coef[i * HEADS + h] = ds[i];
            at->p[i * HEADS + h] = p[i];
        }
    }
}

/* dk of key i += sum over heads of dS q + P g */
static void add_to_keys(const part *t, int32_t n) {
    const hd_attention_back_args *a = t->job->a;
    for (int32_t i = 0; i < n;) { /* neighbours in memory together */
        int32_t end = i + 1;
        while (end < n && t->at->dkey[end] == t->at->dkey[end - 1] + a->k_dim) end++;
        ops_mix m = {.out = t->at->dkey[i],
                     .coef = t->at->coef + i * HEADS,
                     .row = t->q,
                     .out_stride = a->k_dim,
                     .coef_stride = HEADS,
                     .n_out = end - i,
                     .n_rows = t->n_heads,
                     .cols = a->k_dim};
        t->job->k->mix(&m);
        m.coef = t->at->p + i * HEADS;
        m.row = t->g;
        m.cols = a->v_dim;
        t->job->k->mix(&m);
        i = end;
    }
}

static void part_back(const part *t) {
    const hd_attention_back_args *a = t->job->a;
    float *dq = a->dq + ((int64_t)t->row * a->heads + t->head) * a->k_dim;
    find_denominators(t);
    memset(dq, 0, (size_t)t->n_heads * (size_t)a->k_dim * sizeof *dq);
    for (int32_t first = 0; first < t->n_keys; first += KEYS) {
        const int32_t n = hd_min_i32(KEYS, t->n_keys - first);
        list_keys(t, first, n);
        score(t, t->at->score, t->q, n, a->k_dim);
        score(t, t->at->slope, t->g, n, a->v_dim);
        differentiate(t, n);
        t->job->k->mix(&(ops_mix){.out = dq,
                                  .coef = t->at->slope,
                                  .row = t->at->key,
                                  .out_stride = a->k_dim,
                                  .coef_stride = KEYS,
                                  .n_out = t->n_heads,
                                  .n_rows = n,
                                  .cols = a->k_dim});
        add_to_keys(t, n);
    }
}

static void row_back(const attention_job *job, space *at, int32_t seq, int32_t row) {
    const hd_attention_back_args *a = job->a;
    const int32_t pos = a->seqs.pos[row];
    part t = {.job = job,
              .at = at,
              .seq = seq,
              .row = row,
              .pos = pos,
              .n_recent = a->window ? hd_min_i32(a->window, pos + 1) : 0};
    t.n_keys = t.n_recent + n_entries_of(a, row);
    for (t.head = 0; t.head < a->heads; t.head += HEADS) {
        t.n_heads = hd_min_i32(HEADS, a->heads - t.head);
        for (int32_t h = 0; h < t.n_heads; h++) {
            const int64_t i = (int64_t)row * a->heads + t.head + h;
            t.q[h] = act_in(a->q) + i * a->k_dim;
            t.g[h] = act_in(a->g) + i * a->v_dim;
        }
        part_back(&t);
    }
}

/* ---- sequences ---- */

static void sequence_task(const void *arg, int32_t seq, int32_t worker) {
    const attention_job *job = arg;
    const hd_attention_back_args *a = job->a;
    space *at = hd_stream_scratch(job->s, worker, sizeof *at);
    const int32_t first = a->seqs.first_row[seq], end = a->seqs.first_row[seq + 1];
    const size_t wide = (size_t)a->k_dim * sizeof(float);
    if (a->window)
        memset(a->drecent + (int64_t)first * a->k_dim, 0, (size_t)(end - first) * wide);
    if (a->ratio) {
        memset(a->dentries + (int64_t)a->first_entry[seq] * a->k_dim, 0,
               (size_t)((end - first) / a->ratio) * wide);
    }
    for (int32_t row = first; row < end; row++) row_back(job, at, seq, row);
}

void back_attention_back_cpu(hd_stream *s, const hd_attention_back_args *a,
                             const ops_kernels *k) {
    const attention_job job = {a, k, s};
    hd_stream_tasks(s, a->seqs.n, sequence_task, &job);
    if (!a->dsink) return;
    for (int32_t row = a->seqs.first_row[0]; row < a->seqs.first_row[a->seqs.n]; row++) {
        for (int32_t h = 0; h < a->heads; h++) {
            const int64_t at = (int64_t)row * a->heads + h;
            a->dsink[h] -=
                (float)((double)a->delta[at] * exp((double)a->sink[h] - (double)a->lse[at]));
        }
    }
}
