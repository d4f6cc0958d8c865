/* attention_back_ref.c - reference gradients of attention and of V4's compressor in plain C. */
#include <string.h>

#include "ops/backward/backward_internal.h"
#include "ops/ref/act_internal.h"
#include "ops/ref/ref_internal.h"

/* ---- attention ---- */

/* One head of one row, and what its gradient needs. */
typedef struct query {
    const float *q, *g;
    double lse, delta; /* log of the softmax's denominator; <out, g> */
} query;

static query query_of(const hd_attention_back_args *a, int32_t row, int32_t head) {
    const int64_t at = (int64_t)row * a->heads + head;
    return (query){.q = act_in(a->q) + at * a->k_dim,
                   .g = act_in(a->g) + at * a->v_dim,
                   .lse = (double)a->lse[at],
                   .delta = (double)a->delta[at]};
}

/* The keys of a row: those of `recent` and `entries`, each with its gradient's row. */
typedef struct key {
    const float *k;
    float *dk;
} key;

static int32_t first_recent(const hd_attention_back_args *a, int32_t pos) {
    return pos + 1 > a->window ? pos + 1 - a->window : 0;
}

static int32_t n_entries_of(const hd_attention_back_args *a, int32_t row) {
    const int32_t seen = visible_entries(a->seqs.pos[row], a->ratio);
    if (!a->selected) return seen;
    const int32_t *selected = a->selected + (int64_t)row * a->n_selected;
    int32_t n = 0;
    while (n < a->n_selected && selected[n] >= 0) n++;
    return n;
}

/* Key i of a row, recent ones first; in room [k_dim] if it is not stored as float32. */
static key key_of(const hd_attention_back_args *a, int32_t seq, int32_t row, int32_t i,
                  float *room) {
    const int32_t pos = a->seqs.pos[row];
    const int32_t first = a->window ? first_recent(a, pos) : pos + 1,
                  n_recent = pos + 1 - first;
    if (i < n_recent) {
        const int64_t at = a->seqs.first_row[seq] + first + i;
        return (key){ops_read_entry(&a->recent, seq, first + i, room),
                     a->drecent + at * a->k_dim};
    }
    int32_t e = i - n_recent;
    if (a->selected) e = a->selected[(int64_t)row * a->n_selected + e];
    const int64_t at = a->first_entry[seq] + e;
    return (key){ops_read_entry(&a->entries, seq, e, room), a->dentries + at * a->k_dim};
}

static int32_t n_keys_of(const hd_attention_back_args *a, int32_t row) {
    const int32_t pos = a->seqs.pos[row];
    return (a->window ? pos + 1 - first_recent(a, pos) : 0) + n_entries_of(a, row);
}

static void find_denominator(const hd_attention_back_args *a, int32_t seq, int32_t row,
                             int32_t head) {
    const int64_t at = (int64_t)row * a->heads + head;
    const float *q = act_in(a->q) + at * a->k_dim;
    const int32_t n = n_keys_of(a, row);
    float room[HD_MAX_ENTRY_COLS];
    double top = a->sink ? (double)a->sink[head] : -(double)INFINITY, total = 0.0;
    for (int32_t i = 0; i < n; i++) {
        top = fmax(top,
                   ops_dot64(q, key_of(a, seq, row, i, room).k, a->k_dim) * (double)a->scale);
    }
    if (a->sink) total = exp((double)a->sink[head] - top);
    for (int32_t i = 0; i < n; i++) {
        total += exp(ops_dot64(q, key_of(a, seq, row, i, room).k, a->k_dim) * (double)a->scale -
                     top);
    }
    a->lse[at] = (float)(top + log(total));
    a->delta[at] = (float)ops_dot64(act_in(a->out) + at * a->v_dim,
                                    act_in(a->g) + at * a->v_dim, a->v_dim);
}

/* Adds what one head of one row gives to its keys, and computes its dq. */
static void query_back(const hd_attention_back_args *a, int32_t seq, int32_t row, int32_t head,
                       double *dq) {
    const query t = query_of(a, row, head);
    const int32_t n = n_keys_of(a, row);
    float room[HD_MAX_ENTRY_COLS];
    for (int32_t c = 0; c < a->k_dim; c++) dq[c] = 0.0;
    for (int32_t i = 0; i < n; i++) {
        const key at = key_of(a, seq, row, i, room);
        const double p = exp(ops_dot64(t.q, at.k, a->k_dim) * (double)a->scale - t.lse);
        const double ds = p * (ops_dot64(t.g, at.k, a->v_dim) - t.delta) * (double)a->scale;
        for (int32_t c = 0; c < a->k_dim; c++) {
            dq[c] += ds * (double)at.k[c];
            at.dk[c] +=
                (float)(ds * (double)t.q[c] + (c < a->v_dim ? p * (double)t.g[c] : 0.0));
        }
    }
    float *out = a->dq + ((int64_t)row * a->heads + head) * a->k_dim;
    for (int32_t c = 0; c < a->k_dim; c++) out[c] = (float)dq[c];
    if (a->dsink) {
        a->dsink[head] -= (float)(t.delta * exp((double)a->sink[head] - t.lse));
    }
}

/* The number of entries of sequence seq. */
static int32_t entries_of(const hd_seqs *s, int32_t seq, int32_t ratio) {
    return ratio ? (s->first_row[seq + 1] - s->first_row[seq]) / ratio : 0;
}

void hd_attention_back_ref(hd_stream *s, const hd_attention_back_args *a) {
    double *dq = hd_stream_scratch(s, 0, (size_t)a->k_dim * sizeof *dq);
    const size_t wide = (size_t)a->k_dim * sizeof(float);
    for (int32_t q = 0; q < a->seqs.n; q++) {
        const int32_t first = a->seqs.first_row[q], end = a->seqs.first_row[q + 1];
        if (a->window) {
            memset(a->drecent + (int64_t)first * a->k_dim, 0, (size_t)(end - first) * wide);
        }
        if (a->ratio) {
            memset(a->dentries + (int64_t)a->first_entry[q] * a->k_dim, 0,
                   (size_t)entries_of(&a->seqs, q, a->ratio) * wide);
        }
        for (int32_t r = first; r < end; r++) {
            for (int32_t h = 0; h < a->heads; h++) {
                find_denominator(a, q, r, h);
                query_back(a, q, r, h, dq);
            }
        }
    }
}

/* ---- the compressor ---- */

/* One block of a sequence: its slots are the `earlier` positions before it and its own. */
typedef struct block {
    int64_t row;     /* of its first position */
    int32_t earlier; /* slots before it */
    int64_t entry;
    int32_t pos;
} block;

/* Element of a [rows, coff * width] array: slot i (from -earlier) and channel c of a block. */
static int64_t slot_at(const hd_compress_back_args *a, const block *b, int32_t i, int32_t c) {
    const int32_t coff = a->overlap ? 2 : 1;
    const int32_t channel = a->overlap && i >= 0 ? a->width + c : c;
    return (b->row + i) * coff * a->width + channel;
}

/* The gate of slot i and channel c, position bias included. */
static double gate_at(const hd_compress_back_args *a, const block *b, int32_t i, int32_t c) {
    const int32_t wide = (a->overlap ? 2 : 1) * a->width;
    const int32_t channel = a->overlap && i >= 0 ? a->width + c : c;
    const float bias = a->ape[(i + a->ratio) % a->ratio * wide + channel];
    return (double)(a->gate[slot_at(a, b, i, c)] + bias);
}

/* weight[i + earlier] = the softmax over the block's slots; returns the entry's channel c. */
static double pool_channel(const hd_compress_back_args *a, const block *b, int32_t c,
                           double *weight) {
    double top = -(double)INFINITY, total = 0.0, sum = 0.0;
    for (int32_t i = -b->earlier; i < a->ratio; i++) {
        top = fmax(top, gate_at(a, b, i, c));
    }
    for (int32_t i = -b->earlier; i < a->ratio; i++) {
        const double p = exp(gate_at(a, b, i, c) - top);
        total += weight[i + b->earlier] = p;
        sum += p * (double)a->kv[slot_at(a, b, i, c)];
    }
    for (int32_t i = 0; i < b->earlier + a->ratio; i++) weight[i] /= total;
    return sum / total;
}

/* g[c] = the gradient of the entry before RoPE and norm; pooled: the entry there. */
static void entry_back(const hd_compress_back_args *a, const block *b, const double *pooled,
                       double *g) {
    double square = 0.0, along = 0.0;
    for (int32_t c = 0; c < a->width; c++) {
        g[c] = (double)a->g[b->entry * a->width + c];
        square += pooled[c] * pooled[c];
    }
    double *tail = g + a->width - 2 * a->pairs;
    for (int32_t i = 0; i < a->pairs; i++) {
        const double angle = (double)rope_angle(b->pos, a->freq[i]);
        const double x = tail[2 * i], y = tail[2 * i + 1];
        tail[2 * i] = x * cos(angle) + y * sin(angle);
        tail[2 * i + 1] = y * cos(angle) - x * sin(angle);
    }
    const double inverse = 1.0 / sqrt(square / a->width + (double)a->eps);
    for (int32_t c = 0; c < a->width; c++) along += g[c] * (double)a->norm[c] * pooled[c];
    const double pull = inverse * inverse * inverse * along / a->width;
    for (int32_t c = 0; c < a->width; c++) {
        if (a->dnorm) a->dnorm[c] += (float)(g[c] * pooled[c] * inverse);
        g[c] = inverse * g[c] * (double)a->norm[c] - pooled[c] * pull;
    }
}

static void block_back(const hd_compress_back_args *a, const block *b, double *scratch) {
    double *pooled = scratch, *g = pooled + a->width, *weight = g + a->width;
    for (int32_t c = 0; c < a->width; c++) pooled[c] = pool_channel(a, b, c, weight);
    entry_back(a, b, pooled, g);
    for (int32_t c = 0; c < a->width; c++) {
        pool_channel(a, b, c, weight);
        for (int32_t i = -b->earlier; i < a->ratio; i++) {
            const int64_t at = slot_at(a, b, i, c);
            const double share = weight[i + b->earlier] * g[c];
            a->dkv[at] = (float)share;
            a->dgate[at] = (float)(share * ((double)a->kv[at] - pooled[c]));
        }
    }
}

void hd_compress_back_ref(hd_stream *s, const hd_compress_back_args *a) {
    const int32_t wide = (a->overlap ? 2 : 1) * a->width;
    const size_t n = 2 * (size_t)a->width + 2 * (size_t)a->ratio;
    double *scratch = hd_stream_scratch(s, 0, n * sizeof *scratch);
    for (int32_t q = 0; q < a->seqs.n; q++) {
        const int64_t first = a->seqs.first_row[q], end = a->seqs.first_row[q + 1];
        const size_t bytes = (size_t)(end - first) * (size_t)wide * sizeof(float);
        memset(a->dkv + first * wide, 0, bytes);
        memset(a->dgate + first * wide, 0, bytes);
        for (int32_t e = 0; e < entries_of(&a->seqs, q, a->ratio); e++) {
            const block b = {.row = first + (int64_t)e * a->ratio,
                             .earlier = a->overlap && e > 0 ? a->ratio : 0,
                             .entry = a->first_entry[q] + e,
                             .pos = e * a->ratio};
            block_back(a, &b, scratch);
        }
        for (int64_t r = first; a->dape && r < end; r++) {
            float *dape = a->dape + (r - first) % a->ratio * wide;
            for (int32_t c = 0; c < wide; c++) dape[c] += a->dgate[r * wide + c];
        }
    }
}
