/* cpu_compress.c - V4's compressor in three passes over the rows: add the position bias, form
 * the entries of the blocks that end at a row, keep what later steps need. The passes are
 * apart because entries read the rows before them, and old state that the last pass
 * replaces. */
#include <string.h>

#include "base/checked.h"
#include "ops/cpu_internal.h"

enum { CHANNELS = 128, TASK_ROWS = 16 };

/* A row of the step: which sequence, and which position there. */
typedef struct place {
    int32_t seq, pos;
} place;

static place place_of(const hd_seqs *seqs, int32_t row) {
    int32_t low = 0, high = seqs->n - 1; /* the last sequence that starts at row or before */
    while (low < high) {
        const int32_t middle = low + (high - low + 1) / 2;
        if (seqs->first_row[middle] <= row) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return (place){low, seqs->start[low] + row - seqs->first_row[low]};
}

static void bias_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    const hd_compress_args *a = job->args;
    const int32_t wide = a->state.width / 2;
    for (int32_t r = first; r < end; r++) {
        const float *ape = a->ape + (int64_t)(place_of(&a->seqs, r).pos % a->ratio) * wide;
        float *gate = a->gate + (int64_t)r * wide;
        for (int32_t c = 0; c < wide; c++) gate[c] += ape[c];
    }
}

/* kv and gate of a position: rows of the step, or halves of a state row from before it. */
typedef struct slot {
    const float *kv, *gate;
} slot;

static slot slot_at(const hd_compress_args *a, place p) {
    const int32_t wide = a->state.width / 2;
    const int32_t back = p.pos - a->seqs.start[p.seq];
    if (back < 0) {
        const float *state = ring_row(&a->state, p.seq, p.pos);
        return (slot){state, state + wide};
    }
    const int64_t row = a->seqs.first_row[p.seq] + back;
    return (slot){a->kv + row * wide, a->gate + row * wide};
}

/* Slot i of the block that begins at `block`, from channel c of the entry on. Slots before the
 * block (overlap) speak with their first half of channels, its own with the second. */
static slot channels_at(const hd_compress_args *a, place block, int32_t i, int32_t c) {
    slot s = slot_at(a, (place){block.seq, block.pos + i});
    const int32_t at = a->overlap && i >= 0 ? a->entries.width + c : c;
    return (slot){s.kv + at, s.gate + at};
}

/* n <= CHANNELS channels of an entry: softmax(gate) . kv over the slots, in their order. */
static void mix_channels(const hd_compress_args *a, const ops_kernels *k, place block,
                         int32_t c, int32_t n, float *entry) {
    const int32_t earlier = a->overlap && block.pos > 0 ? a->ratio : 0;
    float top[CHANNELS], weight[CHANNELS], total[CHANNELS] = {0}, sum[CHANNELS] = {0};
    for (int32_t l = 0; l < n; l++) top[l] = -INFINITY;
    for (int32_t i = -earlier; i < a->ratio; i++) {
        const slot s = channels_at(a, block, i, c);
        for (int32_t l = 0; l < n; l++) top[l] = s.gate[l] > top[l] ? s.gate[l] : top[l];
    }
    for (int32_t i = -earlier; i < a->ratio; i++) {
        const slot s = channels_at(a, block, i, c);
        for (int32_t l = 0; l < n; l++) weight[l] = s.gate[l] - top[l];
        k->exp_sum(weight, n, 0.0f);
        for (int32_t l = 0; l < n; l++) {
            total[l] += weight[l];
            sum[l] += weight[l] * s.kv[l];
        }
    }
    for (int32_t l = 0; l < n; l++) entry[c + l] = sum[l] / total[l];
}

static void finish_entry(const hd_compress_args *a, const ops_kernels *k, int32_t pos,
                         float *entry) {
    const int32_t width = a->entries.width;
    const float scale = ops_inverse_rms(k, entry, width, a->eps);
    for (int32_t c = 0; c < width; c++) entry[c] = entry[c] * scale * a->norm[c];
    float *tail = entry + width - 2 * a->pairs;
    for (int32_t i = 0; i < a->pairs; i++) {
        const float angle = rope_angle(pos, a->freq[i]);
        rotate_pair(tail, tail, 2 * i, 2 * i + 1, cosf(angle), sinf(angle));
    }
}

static void entry_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    const hd_compress_args *a = job->args;
    const int32_t width = a->entries.width;
    for (int32_t r = first; r < end; r++) {
        const place last = place_of(&a->seqs, r);
        if ((last.pos + 1) % a->ratio != 0) continue;
        const place block = {last.seq, last.pos + 1 - a->ratio};
        float *entry = paged_entry(&a->entries, last.seq, last.pos / a->ratio);
        for (int32_t c = 0; c < width; c += CHANNELS) {
            mix_channels(a, job->k, block, c, hd_min_i32(CHANNELS, width - c), entry);
        }
        finish_entry(a, job->k, block.pos, entry);
    }
}

/* Writes a row's state unless a later row of this step has the same place in the ring. */
static void state_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    const hd_compress_args *a = job->args;
    const int32_t wide = a->state.width / 2, page = a->state.page_tokens;
    const size_t bytes = (size_t)wide * sizeof(float);
    for (int32_t r = first; r < end; r++) {
        const place p = place_of(&a->seqs, r);
        const int32_t successor = p.pos + a->state.ring;
        const bool in_step = r + a->state.ring < a->seqs.first_row[p.seq + 1];
        if (in_step && successor / page == p.pos / page) continue;
        const slot s = slot_at(a, p);
        float *state = ring_row(&a->state, p.seq, p.pos);
        memcpy(state, s.kv, bytes);
        memcpy(state + wide, s.gate, bytes);
    }
}

void ops_compress_cpu(hd_stream *s, const hd_compress_args *a, const ops_kernels *k) {
    if (a->seqs.n == 0) return;
    ops_rows_fn *const passes[] = {bias_rows, entry_rows, state_rows};
    for (size_t i = 0; i < HD_LEN(passes); i++) {
        ops_run_rows(&(ops_job){.stream = s,
                                .k = k,
                                .args = a,
                                .fn = passes[i],
                                .rows = a->seqs.first_row[a->seqs.n],
                                .per_task = TASK_ROWS});
    }
}
