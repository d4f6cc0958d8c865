/* indexer_back_ref.c - reference gradients of the indexer's own loss, and of its keys' norm. */
#include <string.h>

#include "ops/backward/backward_internal.h"
#include "ops/ref/act_internal.h"
#include "ops/ref/ref_internal.h"

/* One row, and room for its selected keys. */
typedef struct indexer_row {
    const int32_t *selected;
    int32_t seq, row, n;
    double *share, *score; /* [top_k] of attention; of the indexer, then their difference */
    double *dq, *dkey;     /* [heads, width]; [width] what the row gives a key */
} indexer_row;

/* share = what attention gives each key, of all that it gives these. False: nothing. */
static bool find_shares(const hd_indexer_back_args *a, const indexer_row *t) {
    float room[HD_MAX_ENTRY_COLS];
    double total = 0.0;
    for (int32_t i = 0; i < t->n; i++) {
        const float *entry = ops_read_entry(&a->entries, t->seq, t->selected[i], room);
        t->share[i] = 0.0;
        for (int32_t h = 0; h < a->attention_heads; h++) {
            const int64_t at = (int64_t)t->row * a->attention_heads + h;
            const double score =
                ops_dot64(act_in(a->attention_q) + at * a->k_dim, entry, a->k_dim);
            t->share[i] += exp(score * (double)a->attention_scale - (double)a->lse[at]);
        }
        total += t->share[i];
    }
    for (int32_t i = 0; i < t->n; i++) t->share[i] /= total;
    return total > 0.0;
}

static void find_scores(const hd_indexer_back_args *a, const indexer_row *t) {
    const int32_t width = a->keys.width;
    float room[HD_MAX_ENTRY_COLS];
    for (int32_t i = 0; i < t->n; i++) {
        const float *key = ops_read_entry(&a->keys, t->seq, t->selected[i], room);
        t->score[i] = 0.0;
        for (int32_t h = 0; h < a->heads; h++) {
            const int64_t at = (int64_t)t->row * a->heads + h;
            const double along = ops_dot64(act_in(a->q) + at * width, key, width);
            t->score[i] += (double)a->weight[at] * (double)a->scale * fmax(0.0, along);
        }
    }
}

/* The scores become the loss's derivatives by them; returns the divergence. */
static double compare(const hd_indexer_back_args *a, const indexer_row *t) {
    double top = -(double)INFINITY, total = 0.0, divergence = 0.0;
    for (int32_t i = 0; i < t->n; i++) top = fmax(top, t->score[i]);
    for (int32_t i = 0; i < t->n; i++) total += exp(t->score[i] - top);
    for (int32_t i = 0; i < t->n; i++) {
        const double logp = t->score[i] - top - log(total), p = t->share[i];
        if (p > 0.0) divergence += p * (log(p) - logp);
        t->score[i] = (double)a->factor * (exp(logp) - p);
    }
    return divergence;
}

static void add_gradients(const hd_indexer_back_args *a, const indexer_row *t) {
    const int32_t width = a->keys.width;
    float room[HD_MAX_ENTRY_COLS];
    float *dweight = a->dweight + (int64_t)t->row * a->heads;
    for (int32_t i = 0; i < t->n; i++) {
        const int32_t e = t->selected[i];
        const float *key = ops_read_entry(&a->keys, t->seq, e, room);
        float *dkey = a->dkeys + (int64_t)(a->first_entry[t->seq] + e) * width;
        memset(t->dkey, 0, (size_t)width * sizeof *t->dkey);
        for (int32_t h = 0; h < a->heads; h++) {
            const int64_t at = (int64_t)t->row * a->heads + h;
            const float *q = act_in(a->q) + at * width;
            const double along = ops_dot64(q, key, width);
            if (along <= 0.0) continue;
            const double ds = t->score[i] * (double)a->scale;
            const double du = ds * (double)a->weight[at];
            dweight[h] += (float)(ds * along);
            for (int32_t c = 0; c < width; c++) {
                t->dq[h * width + c] += du * (double)key[c];
                t->dkey[c] += du * (double)q[c];
            }
        }
        for (int32_t c = 0; c < width; c++) dkey[c] += (float)t->dkey[c];
    }
}

static void row_back(const hd_indexer_back_args *a, indexer_row *t) {
    const int64_t wide = (int64_t)a->heads * a->keys.width;
    t->selected = a->selected + (int64_t)t->row * a->top_k;
    for (t->n = 0; t->n < a->top_k && t->selected[t->n] >= 0;) t->n++;
    memset(t->dq, 0, (size_t)wide * sizeof *t->dq);
    memset(a->dweight + (int64_t)t->row * a->heads, 0, (size_t)a->heads * sizeof *a->dweight);
    if (t->n > 0 && find_shares(a, t)) {
        find_scores(a, t);
        a->divergence[t->row] += (float)compare(a, t);
        add_gradients(a, t);
    }
    for (int64_t c = 0; c < wide; c++) a->dq[t->row * wide + c] = (float)t->dq[c];
}

void hd_indexer_back_ref(hd_stream *s, const hd_indexer_back_args *a) {
    const size_t width = (size_t)a->keys.width, top_k = (size_t)a->top_k;
    const size_t wide = (size_t)a->heads * width;
    double *scratch = hd_stream_scratch(s, 0, (2 * top_k + wide + width) * sizeof *scratch);
    indexer_row t = {.share = scratch,
                     .score = scratch + top_k,
                     .dq = scratch + 2 * top_k,
                     .dkey = scratch + 2 * top_k + wide};
    for (t.seq = 0; t.seq < a->seqs.n; t.seq++) {
        const int32_t first = a->seqs.first_row[t.seq], end = a->seqs.first_row[t.seq + 1];
        const size_t n_keys = (size_t)((end - first) / a->ratio);
        memset(a->dkeys + (int64_t)a->first_entry[t.seq] * a->keys.width, 0,
               n_keys * (size_t)a->keys.width * sizeof *a->dkeys);
        for (t.row = first; t.row < end; t.row++) row_back(a, &t);
    }
}

void hd_layer_norm_back_ref(hd_stream *s, const hd_layer_norm_back_args *a) {
    (void)s;
    for (int32_t r = 0; r < a->rows; r++) {
        const float *x = act_in(a->x) + r * stride_of(a->x, a->cols);
        float *g = act(a->g) + r * stride_of(a->g, a->cols);
        double mean = 0.0, square = 0.0, sum = 0.0, along = 0.0;
        for (int32_t c = 0; c < a->cols; c++) mean += (double)x[c] / a->cols;
        for (int32_t c = 0; c < a->cols; c++) {
            const double u = (double)g[c] * (double)a->weight[c], off = (double)x[c] - mean;
            square += off * off;
            sum += u;
            along += u * off;
        }
        const double inverse = 1.0 / sqrt(square / a->cols + (double)a->eps);
        for (int32_t c = 0; c < a->cols; c++) {
            const double off = ((double)x[c] - mean) * inverse, before = (double)g[c];
            if (a->dweight) a->dweight[c] += (float)(before * off);
            if (a->dbias) a->dbias[c] += g[c];
            g[c] = (float)(inverse * (before * (double)a->weight[c] - sum / a->cols -
                                      off * along * inverse / a->cols));
        }
    }
}
