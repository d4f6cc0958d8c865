/* attention_ref.c - reference attention over paged KV, naive MLA and indexer top-k, in plain
 * C. */
#include "ops/ref/act_internal.h"
#include "ops/ref/ref_internal.h"

/* The keys of one row, in the order of hd_attention_args. */
typedef struct key_list {
    const hd_attention_args *a;
    int32_t row, seq;
    int32_t first_recent, n_recent, n_entries;
    bool narrows; /* queries, keys and weights to bfloat16 */
} key_list;

static key_list list_keys(const hd_attention_args *a, int32_t row, bool narrows) {
    key_list k = {.a = a, .row = row, .seq = a->seq[row], .narrows = narrows};
    int32_t pos = a->pos[row];
    if (a->window) {
        k.first_recent = pos + 1 > a->window ? pos + 1 - a->window : 0;
        if (a->window_from && a->window_from[k.seq] > k.first_recent) {
            k.first_recent = a->window_from[k.seq];
        }
        k.n_recent = pos + 1 - k.first_recent;
    }
    k.n_entries = visible_entries(pos, a->ratio);
    if (a->selected) {
        const int32_t *selected_keys = a->selected + (int64_t)row * a->n_selected;
        k.n_entries = 0;
        while (k.n_entries < a->n_selected && selected_keys[k.n_entries] >= 0) k.n_entries++;
    }
    return k;
}

static const float *key_at(const key_list *k, int32_t i, float *room) {
    const hd_attention_args *a = k->a;
    const bool recent = i < k->n_recent;
    const hd_paged *pool = recent ? &a->recent : &a->entries;
    int32_t e = recent ? k->first_recent + i : i - k->n_recent;
    if (!recent && a->selected) e = a->selected[(int64_t)k->row * a->n_selected + e];
    return ops_narrowed(ops_read_entry(pool, k->seq, e, room), pool->width, k->narrows, room);
}

/* score and sum: scratch for all keys, and for a value. Weights that are narrowed are so relative to the
 * largest of the keys, without the sink, as on a GPU; the total is that of weights before that. */
static void attention_head(const key_list *k, int32_t head, float *score, double *sum) {
    const hd_attention_args *a = k->a;
    const float *q = act_in(a->q) + ((int64_t)k->row * a->heads + head) * a->k_dim;
    float *out = act(a->out) + ((int64_t)k->row * a->heads + head) * a->v_dim;
    float room[HD_MAX_ENTRY_COLS], narrow_q[HD_MAX_ENTRY_COLS];
    const int32_t n = k->n_recent + k->n_entries;
    float top = a->sink && !k->narrows ? a->sink[head] : -INFINITY;
    q = ops_narrowed(q, a->k_dim, k->narrows, narrow_q);
    for (int32_t i = 0; i < n; i++) {
        score[i] = (float)(ops_dot64(q, key_at(k, i, room), a->k_dim) * (double)a->scale);
        top = fmaxf(top, score[i]);
    }
    if (a->sink && top == -INFINITY) top = a->sink[head];
    double total = a->sink ? exp((double)(a->sink[head] - top)) : 0.0;
    for (int32_t c = 0; c < a->v_dim; c++) sum[c] = 0.0;
    for (int32_t i = 0; i < n; i++) {
        float weight = expf(score[i] - top);
        const float *key = key_at(k, i, room);
        total += (double)weight;
        if (k->narrows) weight = ops_bf16(weight);
        for (int32_t c = 0; c < a->v_dim; c++) sum[c] += (double)weight * (double)key[c];
    }
    for (int32_t c = 0; c < a->v_dim; c++) {
        out[c] = n ? (float)(sum[c] / total) : 0.0f; /* no visible key: zeros */
    }
}

/* Whether ops_narrowed() has room for n columns; fails s if not. */
static bool has_room(hd_stream *s, int32_t n) {
    if (n <= HD_MAX_ENTRY_COLS) return true;
    hd_stream_fail(s, HD_EUNSUPPORTED, "precision official: entries of more than 1024 columns");
    return false;
}

static void attention(hd_stream *s, const hd_attention_args *a, bool narrows) {
    if (narrows && !has_room(s, a->k_dim > a->v_dim ? a->k_dim : a->v_dim)) return;
    for (int32_t r = 0; r < a->rows; r++) {
        const key_list k = list_keys(a, r, narrows);
        const size_t n = (size_t)(k.n_recent + k.n_entries), v = (size_t)a->v_dim;
        double *sum = hd_stream_scratch(s, 0, v * sizeof *sum + n * sizeof(float));
        float *score = (float *)(void *)(sum + v);
        for (int32_t h = 0; h < a->heads; h++) attention_head(&k, h, score, sum);
    }
}

void hd_attention_ref(hd_stream *s, const hd_attention_args *a) {
    attention(s, a, false);
}

void hd_attention_ref_official(hd_stream *s, const hd_attention_args *a) {
    attention(s, a, true);
}

/* ---- MLA, naive ---- */

/* A row's call: its sequence, and whether queries, latents, elements of W, keys, values and weights become
 * bfloat16. */
typedef struct naive_row {
    const hd_attention_naive_args *a;
    int32_t seq, row;
    bool narrows;
} naive_row;

/* out[i] = element first + i of W_h latent */
static void expand(const naive_row *r, const float *latent, int32_t head, int32_t first,
                   int32_t n, float *out) {
    const hd_attention_naive_args *a = r->a;
    const int32_t row = head * (a->nope_dim + a->v_dim) + first;
    for (int32_t i = 0; i < n; i++) {
        double sum = 0.0;
        for (int32_t c = 0; c < a->w->cols; c++) {
            const float w = hd_weight_at(a->w, row + i, c);
            sum += (double)(r->narrows ? ops_bf16(w) : w) * (double)latent[c];
        }
        out[i] = r->narrows ? ops_bf16((float)sum) : (float)sum;
    }
}

static const float *latent_at(const naive_row *r, int32_t e, float *room) {
    const hd_paged *p = &r->a->latents;
    return ops_narrowed(ops_read_entry(p, r->seq, e, room), p->width, r->narrows, room);
}

static void attention_naive_head(const naive_row *r, int32_t head, float *scratch) {
    const hd_attention_naive_args *a = r->a;
    const int32_t row = r->row;
    const int32_t n = a->seqs.pos[row] + 1;
    const int64_t at = (int64_t)row * a->heads + head;
    const float *q = act_in(a->q) + at * (a->nope_dim + a->rope_dim);
    float *out = act(a->out) + at * a->v_dim, *score = scratch, *made = scratch + n;
    float top = -INFINITY, room[HD_MAX_ENTRY_COLS], narrow_q[HD_MAX_ENTRY_COLS];
    q = ops_narrowed(q, a->nope_dim + a->rope_dim, r->narrows, narrow_q);
    for (int32_t e = 0; e < n; e++) {
        const float *latent = latent_at(r, e, room);
        expand(r, latent, head, 0, a->nope_dim, made);
        const double hit = ops_dot64(q, made, a->nope_dim) +
                           ops_dot64(q + a->nope_dim, latent + a->w->cols, a->rope_dim);
        score[e] = (float)(hit * (double)a->scale);
        top = fmaxf(top, score[e]);
    }
    double total = 0.0, *sum = (double *)(void *)(made + a->nope_dim + a->nope_dim % 2 + n % 2);
    for (int32_t c = 0; c < a->v_dim; c++) sum[c] = 0.0;
    for (int32_t e = 0; e < n; e++) {
        float weight = expf(score[e] - top);
        total += (double)weight;
        if (r->narrows) weight = ops_bf16(weight);
        expand(r, latent_at(r, e, room), head, a->nope_dim, a->v_dim, out);
        for (int32_t c = 0; c < a->v_dim; c++) sum[c] += (double)weight * (double)out[c];
    }
    for (int32_t c = 0; c < a->v_dim; c++) out[c] = (float)(sum[c] / total);
}

static void attention_naive(hd_stream *s, const hd_attention_naive_args *a, bool narrows) {
    if (narrows && !has_room(s, a->latents.width)) return;
    for (int32_t seq = 0; seq < a->seqs.n; seq++) {
        for (int32_t r = a->seqs.first_row[seq]; r < a->seqs.first_row[seq + 1]; r++) {
            const naive_row row = {a, seq, r, narrows};
            const int32_t n = a->seqs.pos[r] + 1;
            const size_t wide = (size_t)(n + a->nope_dim + 2) * sizeof(float);
            float *scratch = hd_stream_scratch(s, 0, wide + (size_t)a->v_dim * sizeof(double));
            for (int32_t h = 0; h < a->heads; h++) attention_naive_head(&row, h, scratch);
        }
    }
}

void hd_attention_naive_ref(hd_stream *s, const hd_attention_naive_args *a) {
    attention_naive(s, a, false);
}

void hd_attention_naive_ref_official(hd_stream *s, const hd_attention_naive_args *a) {
    attention_naive(s, a, true);
}

/* ---- the indexer ---- */

static void score_keys(const hd_indexer_topk_args *a, int32_t row, int32_t n, bool narrows,
                       float *score) {
    const int32_t width = a->keys.width;
    for (int32_t u = 0; u < n; u++) {
        float room[HD_MAX_ENTRY_COLS], narrow_q[HD_MAX_ENTRY_COLS];
        const float *key =
            ops_narrowed(ops_read_entry(&a->keys, a->seq[row], u, room), width, narrows, room);
        double sum = 0.0;
        for (int32_t h = 0; h < a->heads; h++) {
            const float *q = act_in(a->q) + ((int64_t)row * a->heads + h) * width;
            q = ops_narrowed(q, width, narrows, narrow_q);
            double hit = ops_dot64(q, key, width);
            if (hit > 0.0) {
                sum += hit * (double)(a->weight[(int64_t)row * a->heads + h] * a->scale);
            }
        }
        score[u] = isnan(sum) ? -INFINITY : (float)sum; /* a NaN score is chosen last */
    }
}

/* Marks the top_k best keys, one by one, by setting their scores to NaN. */
static void mark_best(float *score, int32_t n, int32_t top_k) {
    for (int32_t k = 0; k < top_k; k++) {
        int32_t best = -1;
        for (int32_t u = 0; u < n; u++) {
            if (!isnan(score[u]) && (best < 0 || score[u] > score[best])) best = u;
        }
        score[best] = NAN;
    }
}

static void indexer_topk(hd_stream *s, const hd_indexer_topk_args *a, bool narrows) {
    if (narrows && !has_room(s, a->keys.width)) return;
    for (int32_t r = 0; r < a->rows; r++) {
        int32_t *out = a->out + (int64_t)r * a->top_k, kept = 0;
        const int32_t n = visible_entries(a->pos[r], a->ratio);
        const bool all = n <= a->top_k;
        float *score = hd_stream_scratch(s, 0, (size_t)n * sizeof *score);
        if (!all) {
            score_keys(a, r, n, narrows, score);
            mark_best(score, n, a->top_k);
        }
        for (int32_t u = 0; u < n; u++) {
            if (all || isnan(score[u])) out[kept++] = u;
        }
        while (kept < a->top_k) out[kept++] = -1;
    }
}

void hd_indexer_topk_ref(hd_stream *s, const hd_indexer_topk_args *a) {
    indexer_topk(s, a, false);
}

void hd_indexer_topk_ref_official(hd_stream *s, const hd_indexer_topk_args *a) {
    indexer_topk(s, a, true);
}
