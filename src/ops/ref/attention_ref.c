/* attention_ref.c - reference attention over paged KV, naive MLA and indexer top-k, in plain
 * C. */
#include "ops/ref/act_internal.h"
#include "ops/ref/ref_internal.h"

/* The keys of one row, in the order of hd_attention_args. */
typedef struct key_list {
    const hd_attention_args *a;
    int32_t row, seq;
    int32_t first_recent, n_recent, n_entries;
} key_list;

static key_list list_keys(const hd_attention_args *a, int32_t row) {
    key_list k = {.a = a, .row = row, .seq = a->seq[row]};
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
    if (i < k->n_recent) return ops_read_entry(&a->recent, k->seq, k->first_recent + i, room);
    int32_t e = i - k->n_recent;
    if (a->selected) e = a->selected[(int64_t)k->row * a->n_selected + e];
    return ops_read_entry(&a->entries, k->seq, e, room);
}

/* score and sum: scratch for all keys, and for a value. */
static void attention_head(const key_list *k, int32_t head, float *score, double *sum) {
    const hd_attention_args *a = k->a;
    const float *q = act_in(a->q) + ((int64_t)k->row * a->heads + head) * a->k_dim;
    float *out = act(a->out) + ((int64_t)k->row * a->heads + head) * a->v_dim;
    float room[HD_MAX_ENTRY_COLS];
    const int32_t n = k->n_recent + k->n_entries;
    float top = a->sink ? a->sink[head] : -INFINITY;
    for (int32_t i = 0; i < n; i++) {
        score[i] = (float)(ops_dot64(q, key_at(k, i, room), a->k_dim) * (double)a->scale);
        top = fmaxf(top, score[i]);
    }
    double total = a->sink ? exp((double)(a->sink[head] - top)) : 0.0;
    for (int32_t c = 0; c < a->v_dim; c++) sum[c] = 0.0;
    for (int32_t i = 0; i < n; i++) {
        const float weight = expf(score[i] - top), *key = key_at(k, i, room);
        total += (double)weight;
        for (int32_t c = 0; c < a->v_dim; c++) sum[c] += (double)weight * (double)key[c];
    }
    for (int32_t c = 0; c < a->v_dim; c++) {
        out[c] = n ? (float)(sum[c] / total) : 0.0f; /* no visible key: zeros */
    }
}

void hd_attention_ref(hd_stream *s, const hd_attention_args *a) {
    for (int32_t r = 0; r < a->rows; r++) {
        const key_list k = list_keys(a, r);
        const size_t n = (size_t)(k.n_recent + k.n_entries), v = (size_t)a->v_dim;
        double *sum = hd_stream_scratch(s, 0, v * sizeof *sum + n * sizeof(float));
        float *score = (float *)(void *)(sum + v);
        for (int32_t h = 0; h < a->heads; h++) attention_head(&k, h, score, sum);
    }
}

/* ---- MLA, naive ---- */

/* out[i] = element first + i of W_h latent */
static void expand(const hd_attention_naive_args *a, const float *latent, int32_t head,
                   int32_t first, int32_t n, float *out) {
    const int32_t row = head * (a->nope_dim + a->v_dim) + first;
    for (int32_t i = 0; i < n; i++) {
        double sum = 0.0;
        for (int32_t c = 0; c < a->w->cols; c++) {
            sum += (double)hd_weight_at(a->w, row + i, c) * (double)latent[c];
        }
        out[i] = (float)sum;
    }
}

static void attention_naive_head(const hd_attention_naive_args *a, int32_t seq, int32_t row,
                                 int32_t head, float *scratch) {
    const int32_t n = a->seqs.pos[row] + 1;
    const int64_t at = (int64_t)row * a->heads + head;
    const float *q = act_in(a->q) + at * (a->nope_dim + a->rope_dim);
    float *out = act(a->out) + at * a->v_dim, *score = scratch, *made = scratch + n;
    float top = -INFINITY, room[HD_MAX_ENTRY_COLS];
    for (int32_t e = 0; e < n; e++) {
        const float *latent = ops_read_entry(&a->latents, seq, e, room);
        expand(a, latent, head, 0, a->nope_dim, made);
        const double hit = ops_dot64(q, made, a->nope_dim) +
                           ops_dot64(q + a->nope_dim, latent + a->w->cols, a->rope_dim);
        score[e] = (float)(hit * (double)a->scale);
        top = fmaxf(top, score[e]);
    }
    double total = 0.0, *sum = (double *)(void *)(made + a->nope_dim + a->nope_dim % 2 + n % 2);
    for (int32_t c = 0; c < a->v_dim; c++) sum[c] = 0.0;
    for (int32_t e = 0; e < n; e++) {
        const float weight = expf(score[e] - top);
        expand(a, ops_read_entry(&a->latents, seq, e, room), head, a->nope_dim, a->v_dim, out);
        for (int32_t c = 0; c < a->v_dim; c++) sum[c] += (double)weight * (double)out[c];
        total += (double)weight;
    }
    for (int32_t c = 0; c < a->v_dim; c++) out[c] = (float)(sum[c] / total);
}

void hd_attention_naive_ref(hd_stream *s, const hd_attention_naive_args *a) {
    for (int32_t seq = 0; seq < a->seqs.n; seq++) {
        for (int32_t r = a->seqs.first_row[seq]; r < a->seqs.first_row[seq + 1]; r++) {
            const int32_t n = a->seqs.pos[r] + 1;
            const size_t wide = (size_t)(n + a->nope_dim + 2) * sizeof(float);
            float *scratch = hd_stream_scratch(s, 0, wide + (size_t)a->v_dim * sizeof(double));
            for (int32_t h = 0; h < a->heads; h++) attention_naive_head(a, seq, r, h, scratch);
        }
    }
}

/* ---- the indexer ---- */

static void score_keys(const hd_indexer_topk_args *a, int32_t row, int32_t n, float *score) {
    const int32_t width = a->keys.width;
    for (int32_t u = 0; u < n; u++) {
        float room[HD_MAX_ENTRY_COLS];
        const float *key = ops_read_entry(&a->keys, a->seq[row], u, room);
        double sum = 0.0;
        for (int32_t h = 0; h < a->heads; h++) {
            const float *q = act_in(a->q) + ((int64_t)row * a->heads + h) * width;
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

void hd_indexer_topk_ref(hd_stream *s, const hd_indexer_topk_args *a) {
    for (int32_t r = 0; r < a->rows; r++) {
        int32_t *out = a->out + (int64_t)r * a->top_k, kept = 0;
        const int32_t n = visible_entries(a->pos[r], a->ratio);
        const bool all = n <= a->top_k;
        float *score = hd_stream_scratch(s, 0, (size_t)n * sizeof *score);
        if (!all) {
            score_keys(a, r, n, score);
            mark_best(score, n, a->top_k);
        }
        for (int32_t u = 0; u < n; u++) {
            if (all || isnan(score[u])) out[kept++] = u;
        }
        while (kept < a->top_k) out[kept++] = -1;
    }
}
