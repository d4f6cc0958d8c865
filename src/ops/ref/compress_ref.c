/* compress_ref.c - reference of V4's KV compressor in plain C; models.md 2.10, state as in
 * 2.15. */
#include <string.h>

#include "ops/ref/act_internal.h"
#include "ops/ref/ref_internal.h"

/* Position p of a sequence: its kv row and its gate row (ape included). */
typedef struct token_row {
    const float *kv, *gate;
} token_row;

static token_row token_at(const hd_compress_args *a, int32_t seq, int32_t pos) {
    const int32_t wide = a->state.width / 2;
    const int64_t row = row_at(&a->seqs, seq, pos);
    if (row >= 0) return (token_row){a->kv + row * wide, a->gate + row * wide};
    const float *state = ring_row(&a->state, seq, pos);
    return (token_row){state, state + wide};
}

/* Channel c of the entry of one block: softmax(gate) . kv over its slots. */
static float mix_channel(const hd_compress_args *a, int32_t seq, int32_t block, int32_t c) {
    const int32_t width = a->entries.width, first = block * a->ratio;
    const int32_t earlier = a->overlap && block > 0 ? a->ratio : 0;
    double top = -(double)INFINITY, total = 0.0, sum = 0.0;
    for (int pass = 0; pass < 2; pass++) {
        for (int32_t i = -earlier; i < a->ratio; i++) {
            token_row t = token_at(a, seq, first + i);
            int32_t channel = a->overlap && i >= 0 ? width + c : c;
            double gate = (double)t.gate[channel];
            if (pass == 0) {
                top = fmax(top, gate);
            } else {
                double p = exp(gate - top);
                total += p;
                sum += p * (double)t.kv[channel];
            }
        }
    }
    return (float)(sum / total);
}

static void finish_entry(const hd_compress_args *a, int32_t pos, float *entry) {
    const int32_t width = a->entries.width;
    double sum = 0.0;
    for (int32_t c = 0; c < width; c++) sum += (double)entry[c] * (double)entry[c];
    float scale = (float)(1.0 / sqrt(sum / width + (double)a->eps));
    for (int32_t c = 0; c < width; c++) entry[c] = entry[c] * scale * a->norm[c];
    float *tail = entry + width - 2 * a->pairs;
    for (int32_t i = 0; i < a->pairs; i++) {
        float angle = rope_angle(pos, a->freq[i]);
        rotate_pair(tail, tail, 2 * i, 2 * i + 1, cosf(angle), sinf(angle));
    }
}

static void add_position_bias(const hd_compress_args *a, int32_t seq) {
    const int32_t wide = a->state.width / 2;
    for (int32_t r = a->seqs.first_row[seq]; r < a->seqs.first_row[seq + 1]; r++) {
        const float *ape = a->ape + (int64_t)(a->seqs.pos[r] % a->ratio) * wide;
        float *gate = a->gate + (int64_t)r * wide;
        for (int32_t c = 0; c < wide; c++) gate[c] += ape[c];
    }
}

/* Saves every position for later steps; of those with one place in a page's ring the last
 * stays. */
static void save_state(const hd_compress_args *a, int32_t seq) {
    const int32_t wide = a->state.width / 2;
    for (int64_t r = a->seqs.first_row[seq]; r < a->seqs.first_row[seq + 1]; r++) {
        float *state = ring_row(&a->state, seq, a->seqs.pos[r]);
        memcpy(state, a->kv + r * wide, (size_t)wide * sizeof *state);
        memcpy(state + wide, a->gate + r * wide, (size_t)wide * sizeof *state);
    }
}

void hd_compress_ref(hd_stream *s, const hd_compress_args *a) {
    (void)s;
    for (int32_t q = 0; q < a->seqs.n; q++) {
        const int32_t from = a->entries_from ? a->entries_from[q] : 0;
        add_position_bias(a, q);
        for (int32_t r = a->seqs.first_row[q]; r < a->seqs.first_row[q + 1]; r++) {
            const int32_t b = a->seqs.pos[r] / a->ratio;
            if ((a->seqs.pos[r] + 1) % a->ratio != 0 || a->seqs.pos[r] < from) continue;
            float room[HD_MAX_ENTRY_COLS], *entry = ops_entry_room(&a->entries, q, b, room);
            for (int32_t c = 0; c < a->entries.width; c++) entry[c] = mix_channel(a, q, b, c);
            finish_entry(a, b * a->ratio, entry);
            ops_write_entry(&a->entries, q, b, entry);
        }
        save_state(a, q);
    }
}
