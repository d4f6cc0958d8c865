/* compress_cpu.c - the KV compressors. V4's: entries of the blocks that end in this step, and the
 * state that later steps need, in one pass over the rows. V4.1's: a task runs the reference on a
 * sequence or on rows.
 *
 * An entry reads the rows before its own, of this step or, from the state, of earlier ones.
 * A row's state must not replace what an entry still reads. Without gaps between positions
 * that is only possible if a sequence continues within a page, and only within that page:
 * those rows are one task, entries first. All others may be computed in any order. All rows
 * of a sequence with gaps are one task. */
#include <string.h>

#include "base/checked.h"
#include "ops/cpu/cpu_internal.h"
#include "ops/ref/csa2_internal.h"
#include "ops/ref/ref_internal.h"

enum { CHANNELS = 128, TASK_ROWS = 16 };

static int32_t sequence_of(const hd_seqs *seqs, int32_t row) {
    int32_t low = 0, high = seqs->n - 1; /* the last sequence that starts at row or before */
    while (low < high) {
        const int32_t middle = low + (high - low + 1) / 2;
        if (seqs->first_row[middle] <= row) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

typedef struct place {
    int32_t seq, pos;
} place;

/* kv and gate of a position: rows of the step, to which the position bias must still be
 * added, or halves of a state row of an earlier step. */
typedef struct slot {
    const float *kv, *gate, *ape;
} slot;

static slot slot_at(const hd_compress_args *a, place p) {
    const int32_t wide = a->state.width / 2;
    const int64_t row = row_at(&a->seqs, p.seq, p.pos);
    if (row < 0) {
        const float *state = ring_row(&a->state, p.seq, p.pos);
        return (slot){state, state + wide, NULL};
    }
    return (slot){a->kv + row * wide, a->gate + row * wide,
                  a->ape + (int64_t)(p.pos % a->ratio) * wide};
}

/* Returns slot i of the block that begins at `block`, from channel c of the entry on. Slots
 * before the block (overlap) use their first half of channels, its own slots the second. */
static slot channels_at(const hd_compress_args *a, place block, int32_t i, int32_t c) {
    static const float unbiased[CHANNELS];
    const slot s = slot_at(a, (place){block.seq, block.pos + i});
    const int32_t at = a->overlap && i >= 0 ? a->entries.width + c : c;
    return (slot){s.kv + at, s.gate + at, s.ape ? s.ape + at : unbiased};
}

/* Computes n <= CHANNELS channels of an entry: softmax(gate) . kv over the slots, in their
 * order. */
static void mix_channels(const hd_compress_args *a, const ops_kernels *k, place block,
                         int32_t c, int32_t n, float *entry) {
    const int32_t earlier = a->overlap && block.pos > 0 ? a->ratio : 0;
    float top[CHANNELS], weight[CHANNELS], total[CHANNELS] = {0}, sum[CHANNELS] = {0};
    for (int32_t l = 0; l < n; l++) top[l] = -INFINITY;
    for (int32_t i = -earlier; i < a->ratio; i++) {
        const slot s = channels_at(a, block, i, c);
        for (int32_t l = 0; l < n; l++) {
            const float gate = s.gate[l] + s.ape[l];
            top[l] = gate > top[l] ? gate : top[l];
        }
    }
    for (int32_t i = -earlier; i < a->ratio; i++) {
        const slot s = channels_at(a, block, i, c);
        for (int32_t l = 0; l < n; l++) weight[l] = s.gate[l] + s.ape[l] - top[l];
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

/* Computes the entries of rows [first, end) of one sequence. */
static void form_entries(const hd_compress_args *a, const ops_kernels *k, int32_t seq,
                         int32_t first, int32_t end) {
    const int32_t width = a->entries.width;
    const int32_t from = a->entries_from ? a->entries_from[seq] : 0;
    for (int32_t r = first; r < end; r++) {
        const int32_t pos = a->seqs.pos[r];
        if ((pos + 1) % a->ratio != 0 || pos < from) continue;
        const place block = {seq, pos + 1 - a->ratio};
        float room[HD_MAX_ENTRY_COLS];
        float *entry = ops_entry_room(&a->entries, seq, pos / a->ratio, room);
        for (int32_t c = 0; c < width; c += CHANNELS) {
            mix_channels(a, k, block, c, hd_min_i32(CHANNELS, width - c), entry);
        }
        finish_entry(a, k, block.pos, entry);
        ops_write_entry(&a->entries, seq, pos / a->ratio, entry);
    }
}

/* Writes the rows' state in their order, but not where the row `ring` positions later, which
 * has the same place in the page's ring, is in the step. */
static void keep_state(const hd_compress_args *a, int32_t seq, int32_t first, int32_t end) {
    const int32_t wide = a->state.width / 2, page = a->state.page_tokens;
    for (int32_t r = first; r < end; r++) {
        const int32_t pos = a->seqs.pos[r], successor = pos + a->state.ring;
        if (successor / page == pos / page && row_at(&a->seqs, seq, successor) >= 0) continue;
        const float *gate = a->gate + (int64_t)r * wide;
        const float *ape = a->ape + (int64_t)(pos % a->ratio) * wide;
        float *state = ring_row(&a->state, seq, pos);
        memcpy(state, a->kv + (int64_t)r * wide, (size_t)wide * sizeof *state);
        for (int32_t c = 0; c < wide; c++) state[wide + c] = gate[c] + ape[c];
    }
}

/* Returns the end of the rows that are one task: a sequence's rows in a page that also
 * contains older rows, or all rows of a sequence with gaps. */
static int32_t end_of_one_task(const hd_compress_args *a, int32_t seq) {
    const int32_t first = a->seqs.first_row[seq], end = a->seqs.first_row[seq + 1];
    const int32_t page = a->state.page_tokens, in_page = a->seqs.pos[first] % page;
    if (a->seqs.pos[end - 1] - a->seqs.pos[first] != end - 1 - first) return end;
    return in_page == 0 ? first : hd_min_i32(first + page - in_page, end);
}

/* Those rows belong to the task that has the first of them. */
static void compress_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    const hd_compress_args *a = job->args;
    for (int32_t r = first, next; r < end; r = next) {
        const int32_t seq = sequence_of(&a->seqs, r), begun = end_of_one_task(a, seq);
        next = r < begun ? begun : hd_min_i32(end, a->seqs.first_row[seq + 1]);
        if (r < begun && r > a->seqs.first_row[seq]) continue;
        form_entries(a, job->k, seq, r, next);
        keep_state(a, seq, r, next);
    }
}

void ops_compress_cpu(hd_stream *s, const hd_compress_args *a, const ops_kernels *k) {
    if (a->seqs.n == 0) return;
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = compress_rows,
                            .rows = a->seqs.first_row[a->seqs.n],
                            .per_task = TASK_ROWS});
}

/* ---- V4.1 ---- */

static void group_seqs(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    for (int32_t q = first; q < end; q++) ops_group_latents_seq(job->args, q);
}

void ops_group_latents_cpu(hd_stream *s, const hd_group_latents_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){
        .stream = s, .k = k, .args = a, .fn = group_seqs, .rows = a->seqs.n, .per_task = 1});
}

static void store_rows(const ops_job *job, int32_t first, int32_t end, int32_t worker) {
    (void)worker;
    hd_store_groups_args part = *(const hd_store_groups_args *)job->args;
    part.x += (int64_t)first * part.entries.width;
    part.seq += first;
    part.pos += first;
    part.rows = end - first;
    hd_store_groups_ref(job->stream, &part);
}

void ops_store_groups_cpu(hd_stream *s, const hd_store_groups_args *a, const ops_kernels *k) {
    ops_run_rows(&(ops_job){.stream = s,
                            .k = k,
                            .args = a,
                            .fn = store_rows,
                            .rows = a->rows,
                            .per_task = ops_rows_per_task(4 * (int64_t)a->entries.width)});
}
