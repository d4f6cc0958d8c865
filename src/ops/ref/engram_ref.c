/* engram_ref.c - reference of V4.1's Engram in plain C; models.md 2.20. */
#include "ops/ref/act_internal.h"
#include "ops/ref/csa2_internal.h"
#include "ops/ref/ref_internal.h"

/* ---- classes of the last tokens ---- */

static int32_t *token_place(const hd_paged *p, int32_t seq, int32_t pos) {
    const int64_t page = p->table[(int64_t)seq * p->table_stride + pos / p->page_entries];
    return (int32_t *)p->rows.data + page * p->page_entries + pos % p->page_entries;
}

static int32_t token_at(const hd_ngram_classes_args *a, int32_t seq, int32_t pos) {
    if (pos < 0) return a->pad;
    const int32_t row = row_at(&a->seqs, seq, pos);
    return row >= 0 ? a->tokens[row] : *token_place(&a->history, seq, pos);
}

void ops_ngram_classes_seq(const hd_ngram_classes_args *a, int32_t seq) {
    const int32_t first = a->seqs.first_row[seq], end = a->seqs.first_row[seq + 1];
    for (int32_t r = first; r < end; r++) {
        int32_t *out = a->out + (int64_t)r * a->n;
        for (int32_t i = 0; i < a->n; i++) {
            out[i] = a->class_of[token_at(a, seq, a->seqs.pos[r] - i)];
        }
    }
    for (int32_t r = first; r < end; r++) {
        *token_place(&a->history, seq, a->seqs.pos[r]) = a->tokens[r];
    }
}

void hd_ngram_classes_ref(hd_stream *s, const hd_ngram_classes_args *a) {
    (void)s;
    for (int32_t q = 0; q < a->seqs.n; q++) ops_ngram_classes_seq(a, q);
}

/* ---- rows of the table ---- */

void hd_engram_embed_ref(hd_stream *s, const hd_engram_embed_args *a) {
    const int32_t columns = a->heads * (a->max_ngram - 1), cols = a->table->cols;
    (void)s;
    for (int64_t r = 0; r < a->rows; r++) {
        for (int32_t c = 0; c < columns; c++) {
            const int32_t row = hd_engram_row(a, a->classes + r * a->max_ngram, c);
            float *out = a->out + (r * columns + c) * cols;
            for (int32_t i = 0; i < cols; i++) out[i] = hd_weight_at(a->table, row, i);
        }
    }
}

/* ---- the gate ---- */

static double inverse_rms(const float *x, int32_t n, float eps) {
    double sum = 0.0;
    for (int32_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return 1.0 / sqrt(sum / n + (double)eps);
}

/* How much of the value stream i of a row takes. */
static double gate_of(const hd_engram_gate_args *a, const float *x, const float *key,
                      int32_t i) {
    const float *q = a->q_weight + (int64_t)i * a->cols,
                *k = a->k_weight + (int64_t)i * a->cols;
    double sum = 0.0;
    for (int32_t c = 0; c < a->cols; c++) {
        sum += (double)x[c] * (double)q[c] * (double)k[c] * (double)key[c];
    }
    sum *= inverse_rms(x, a->cols, a->eps) * inverse_rms(key, a->cols, a->eps) / sqrt(a->cols);
    const double root = copysign(sqrt(fmax(fabs(sum), 1e-6)), sum);
    return 1.0 / (1.0 + exp(-root));
}

void hd_engram_gate_ref(hd_stream *s, const hd_engram_gate_args *a) {
    (void)s;
    for (int64_t r = 0; r < a->rows; r++) {
        const float *kv = a->kv + r * (a->hc + 1) * a->cols, *value = kv + a->hc * a->cols;
        for (int32_t i = 0; i < a->hc; i++) {
            float *x = act(a->x) + (r * a->hc + i) * a->cols;
            const double gate = gate_of(a, x, kv + (int64_t)i * a->cols, i);
            for (int32_t c = 0; c < a->cols; c++) {
                x[c] = (float)((double)x[c] + gate * (double)value[c]);
            }
        }
    }
}
