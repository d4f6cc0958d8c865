/* csa2_ref.c - reference of V4.1's shared entries in plain C: groups, their entries, and the
 * indexer with a pool of candidates; models.md 2.18 and 2.19. */
#include <stdlib.h>
#include <string.h>

#include "ops/ref/act_internal.h"
#include "ops/ref/csa2_internal.h"
#include "ops/ref/ref_internal.h"

/* ---- groups ---- */

/* Returns kv and, behind it or in its own array, the gate of a position. */
static const float *values_at(const hd_group_latents_args *a, int32_t seq, int32_t pos,
                              const float **gate) {
    const int32_t width = a->state.width / 2;
    const int64_t row = row_at(&a->seqs, seq, pos);
    const float *state = row < 0 ? ring_row(&a->state, seq, pos) : NULL;
    *gate = state ? state + width : a->gate + row * width;
    return state ? state : a->kv + row * width;
}

static float mix_channel(const hd_group_latents_args *a, int32_t seq, int32_t first,
                         int32_t c) {
    double top = -(double)INFINITY, total = 0.0, sum = 0.0;
    const float *gate;
    for (int32_t i = 0; i < a->ratio; i++) {
        values_at(a, seq, first + i, &gate);
        top = fmax(top, (double)gate[c]);
    }
    for (int32_t i = 0; i < a->ratio; i++) {
        const float *kv = values_at(a, seq, first + i, &gate);
        const double p = exp((double)gate[c] - top);
        total += p;
        sum += p * (double)kv[c];
    }
    return (float)(sum / total);
}

void ops_group_latents_seq(const hd_group_latents_args *a, int32_t seq) {
    const int32_t width = a->state.width / 2;
    const int32_t first = a->seqs.first_row[seq], end = a->seqs.first_row[seq + 1];
    for (int64_t r = first; r < end; r++) {
        const int32_t pos = a->seqs.pos[r];
        float *out = a->out + r * width;
        const bool ends = (pos + 1) % a->ratio == 0;
        for (int32_t c = 0; c < width; c++) {
            out[c] = ends ? mix_channel(a, seq, pos + 1 - a->ratio, c) : 0.0f;
        }
    }
    for (int64_t r = first; r < end; r++) {
        float *state = ring_row(&a->state, seq, a->seqs.pos[r]);
        memcpy(state, a->kv + r * width, (size_t)width * sizeof *state);
        memcpy(state + width, a->gate + r * width, (size_t)width * sizeof *state);
    }
}

void ops_keep_words(const hd_keep_rows_args *a, int32_t first, int32_t end) {
    uint32_t *x = a->x;
    for (int64_t i = 0; i < a->rows; i++) {
        if (a->kept[i] == i) continue;
        memcpy(x + i * a->words + first, x + (int64_t)a->kept[i] * a->words + first,
               (size_t)(end - first) * sizeof *x);
    }
}

void hd_keep_rows_ref(hd_stream *s, const hd_keep_rows_args *a) {
    (void)s;
    ops_keep_words(a, 0, a->words);
}

void hd_group_latents_ref(hd_stream *s, const hd_group_latents_args *a) {
    (void)s;
    for (int32_t q = 0; q < a->seqs.n; q++) ops_group_latents_seq(a, q);
}

void hd_store_groups_ref(hd_stream *s, const hd_store_groups_args *a) {
    const int32_t width = a->entries.width;
    (void)s;
    for (int64_t r = 0; r < a->rows; r++) {
        const int32_t pos = a->pos[r], first = pos + 1 - a->ratio;
        if ((pos + 1) % a->ratio != 0) continue;
        float room[HD_MAX_ENTRY_COLS];
        float *entry = ops_entry_room(&a->entries, a->seq[r], pos / a->ratio, room);
        float *tail = entry + width - 2 * a->pairs;
        memcpy(entry, a->x + r * width, (size_t)width * sizeof *entry);
        for (int32_t i = 0; i < a->pairs; i++) {
            const float angle = rope_angle(first, a->freq[i]);
            rotate_pair(tail, tail, 2 * i, 2 * i + 1, cosf(angle), sinf(angle));
        }
        ops_write_entry(&a->entries, a->seq[r], pos / a->ratio, entry);
    }
}

/* ---- the indexer with a pool ---- */

static float score_key(const hd_pool_topk_args *a, int32_t row, int32_t u) {
    const int32_t width = a->keys.width;
    float room[HD_MAX_ENTRY_COLS];
    const float *key = ops_read_entry(&a->keys, a->seq[row], u, room);
    double sum = 0.0;
    for (int32_t h = 0; h < a->heads; h++) {
        const float *q = act_in(a->q) + ((int64_t)row * a->heads + h) * width;
        double hit = 0.0;
        for (int32_t c = 0; c < width; c++) hit += (double)q[c] * (double)key[c];
        if (hit > 0.0) {
            sum += hit * (double)(a->weight[(int64_t)row * a->heads + h] * a->scale);
        }
    }
    return isnan(sum) ? -INFINITY : (float)sum; /* a NaN score is chosen last */
}

/* Whether score u is before score v: it is larger, or the same and u is lower. */
static bool is_before(const float *score, int32_t u, int32_t v) {
    return score[u] > score[v] || (!(score[u] < score[v]) && u < v);
}

/* Moves the place at `at` down a heap of n whose top is its last one in order. */
static void sift(const float *score, int32_t *heap, int32_t n, int32_t at) {
    for (int32_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && is_before(score, heap[child], heap[child + 1])) child++;
        if (!is_before(score, heap[at], heap[child])) return;
        const int32_t up = heap[child];
        heap[child] = heap[at];
        heap[at] = up;
    }
}

static int ascending(const void *a, const void *b) {
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* out = the k best of n scores, the lower one on a tie, ascending and then -1. Scores of
 * -INFINITY that are `absent` are no candidates. */
static void choose(const float *score, const bool *absent, int32_t n, int32_t k, int32_t *out) {
    int32_t kept = 0;
    for (int32_t u = 0; u < n; u++) {
        if (absent && absent[u]) continue;
        if (kept < k) {
            out[kept++] = u;
            if (kept == k) {
                for (int32_t i = k / 2 - 1; i >= 0; i--) sift(score, out, k, i);
            }
        } else if (is_before(score, u, out[0])) {
            out[0] = u;
            sift(score, out, k, 0);
        }
    }
    qsort(out, (size_t)kept, sizeof *out, ascending);
    while (kept < k) out[kept++] = -1;
}

/* Chooses the blocks of a row's pool from the scores of its n keys. */
static void make_pool(const hd_pool_topk_args *a, const float *score, int32_t n, float *best,
                      int32_t *out) {
    const int32_t n_blocks = (n + a->block - 1) / a->block;
    for (int32_t b = 0; b < n_blocks; b++) {
        best[b] = -INFINITY;
        for (int32_t u = b * a->block; u < n && u < (b + 1) * a->block; u++) {
            best[b] = fmaxf(best[b], score[u]);
        }
    }
    if (n_blocks > 0) best[n_blocks - 1] = INFINITY;
    choose(best, NULL, n_blocks, a->n_blocks, out);
}

size_t ops_pool_topk_scratch(int32_t keys) {
    return (size_t)keys * (2 * sizeof(float) + sizeof(bool));
}

void ops_pool_topk_row(const hd_pool_topk_args *a, int32_t row, void *scratch) {
    const int32_t n = visible_entries(a->pos[row], a->ratio);
    int32_t *blocks = a->blocks + (int64_t)row * a->n_blocks;
    float *score = scratch, *best = score + n;
    void *flags = best + n;
    bool *absent = flags;
    for (int32_t u = 0; u < n; u++) absent[u] = !a->makes_pool;
    for (int32_t i = 0; !a->makes_pool && i < a->n_blocks && blocks[i] >= 0; i++) {
        const int32_t first = blocks[i] * a->block;
        for (int32_t u = first; u < n && u < first + a->block; u++) absent[u] = false;
    }
    for (int32_t u = 0; u < n; u++) score[u] = absent[u] ? -INFINITY : score_key(a, row, u);
    if (a->makes_pool) make_pool(a, score, n, best, blocks);
    choose(score, absent, n, a->top_k, a->out + (int64_t)row * a->top_k);
}

void hd_pool_topk_ref(hd_stream *s, const hd_pool_topk_args *a) {
    for (int32_t r = 0; r < a->rows; r++) {
        const int32_t n = visible_entries(a->pos[r], a->ratio);
        ops_pool_topk_row(a, r, hd_stream_scratch(s, 0, ops_pool_topk_scratch(n)));
    }
}
