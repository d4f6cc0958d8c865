/* batch.c - a batch's memory: one layout, walked to measure it, on the host and on the
 * device. */
#include "model/batch.h"

#include <assert.h>
#include <string.h>

#include "base/arena.h"

static int32_t *take(hd_arena *a, int64_t n) {
    return hd_arena_take(a, (size_t)n * sizeof(int32_t), 64);
}

static void place(hd_batch_view *v, hd_arena *a, const hd_batch_limits *limits) {
    v->tokens = take(a, limits->rows);
    v->next_tokens = take(a, limits->rows);
    v->pos = take(a, limits->rows);
    v->seq = take(a, limits->rows);
    v->last = take(a, limits->rows);
    v->phase = take(a, limits->rows);
    v->logit_rows = take(a, limits->rows);
    v->first_row = take(a, limits->seqs + 1);
    v->micro_first_row = take(a, HD_MAX_MICRO * ((int64_t)limits->seqs + 1));
    v->ends = hd_arena_take(a, (size_t)limits->seqs * sizeof *v->ends, 64);
    v->rebuilt = take(a, limits->seqs);
    v->windows_from = take(a, limits->seqs);
    for (int i = 0; i < HD_N_KV_GROUPS; i++) {
        v->tables[i] = take(a, (int64_t)limits->seqs * limits->table_stride);
    }
}

hd_status hd_batch_open(hd_batch *b, const hd_batch_limits *limits, hd_device *d, hd_err *err) {
    *b = (hd_batch){.limits = *limits, .on = d};
    hd_arena a = hd_arena_measure();
    place(&b->host, &a, limits);
    b->bytes = a.peak;
    hd_status st = hd_device_alloc(d, &b->device_block, b->bytes, "batch", err);
    if (st == HD_OK) st = hd_device_alloc_host(d, &b->host_block, b->bytes, "batch", err);
    if (st != HD_OK) {
        hd_batch_close(b);
        return st;
    }
    a = hd_arena_over(b->host_block, b->bytes);
    place(&b->host, &a, limits);
    a = hd_arena_over(b->device_block, b->bytes);
    place(&b->device, &a, limits);
    return HD_OK;
}

void hd_batch_close(hd_batch *b) {
    if (!b->on) return;
    hd_device_release(b->on, b->host_block);
    hd_device_release(b->on, b->device_block);
    *b = (hd_batch){0};
}

void hd_batch_reset(hd_batch *b) {
    b->n_rows = b->n_seqs = b->n_logits = b->most_rows = b->block = b->n_micro = 0;
    b->host.first_row[0] = 0;
}

void hd_batch_add(hd_batch *b, const hd_batch_seq *q) {
    assert(q->n > 0 && b->n_rows + q->n <= b->limits.rows && b->n_seqs < b->limits.seqs);
    assert(q->n_logits >= 0 && q->n_logits <= q->n && q->n_pages <= b->limits.table_stride);
    hd_batch_view *v = &b->host;
    const int32_t seq = b->n_seqs++;
    for (int32_t i = 0; i < q->n; i++) {
        int32_t r = b->n_rows + i;
        v->tokens[r] = q->tokens[i];
        v->next_tokens[r] = i + 1 < q->n ? q->tokens[i + 1] : q->after;
        v->pos[r] = q->start + i;
        v->seq[r] = seq;
        v->phase[r] = q->phase;
        if (i >= q->n - q->n_logits) v->logit_rows[b->n_logits++] = r;
    }
    v->ends[seq] = q->ends;
    v->rebuilt[seq] = q->ends.rebuilt;
    v->windows_from[seq] = q->ends.windows_from;
    b->n_rows += q->n;
    if (q->n > b->most_rows) b->most_rows = q->n;
    v->first_row[seq + 1] = b->n_rows;
    for (int group = 0; group < HD_N_KV_GROUPS; group++) {
        memcpy(v->tables[group] + (int64_t)seq * b->limits.table_stride, q->pages[group],
               (size_t)q->n_pages * sizeof(int32_t));
    }
}

void hd_batch_make_block(hd_batch *b, int32_t block) {
    assert(b->n_logits == 0 && b->n_rows == b->n_seqs * block);
    b->block = block;
    b->n_logits = b->n_rows;
    for (int32_t r = 0; r < b->n_rows; r++) {
        const int32_t place = r % block;
        b->host.last[r] = b->host.pos[r] + block - 1 - place;
        b->host.logit_rows[place * b->n_seqs + r / block] = r;
    }
}

bool hd_batch_cuts_windows(const hd_batch *b, int32_t window) {
    const hd_batch_view *v = &b->host;
    for (int32_t i = 0; v->ends && i < b->n_seqs; i++) {
        const int32_t from = v->ends[i].windows_from;
        if (from > 0 && v->pos[v->first_row[i]] - window + 1 < from) return true;
    }
    return false;
}

bool hd_batch_rebuilds(const hd_batch *b) {
    const hd_batch_view *v = &b->host;
    for (int32_t i = 0; v->ends && i < b->n_seqs; i++) {
        if (v->pos[v->first_row[i]] < v->ends[i].rebuilt) return true;
    }
    return false;
}

/* ---- micro-batches ---- */

/* Rows of a draft block attend to each other, and stay together. Where only the device knows the
 * rows, each sequence stays whole: its micro-batch has the first rows' arrays and later tables. */
static int32_t rows_together(const hd_batch *b) {
    return b->block ? b->block : b->host.first_row ? 1 : b->most_rows;
}

int32_t hd_batch_micro_row(const hd_batch *b, int32_t rows, int32_t i) {
    const int32_t together = rows_together(b);
    if (b->n_micro <= 1) return i ? rows : 0;
    return (int32_t)((int64_t)(rows / together) * i / b->n_micro) * together;
}

/* Sequences keep their numbers. */
static void write_first_rows(const hd_batch *b, int32_t i) {
    const int32_t row = hd_batch_micro_row(b, b->n_rows, i);
    const int32_t end = hd_batch_micro_row(b, b->n_rows, i + 1);
    const int32_t *all = b->host.first_row;
    int32_t *out = b->host.micro_first_row + (int64_t)i * (b->limits.seqs + 1);
    for (int32_t q = 0; q <= b->n_seqs; q++) {
        out[q] = all[q] < row ? 0 : (all[q] < end ? all[q] : end) - row;
    }
}

static int32_t most_rows(const int32_t *first_row, int32_t n_seqs) {
    int32_t most = 0;
    for (int32_t q = 0; q < n_seqs; q++) {
        const int32_t rows = first_row[q + 1] - first_row[q];
        if (rows > most) most = rows;
    }
    return most;
}

static void move(int32_t **array, int64_t elements) {
    if (*array) *array += elements;
}

static void move_rows(hd_batch_view *v, int32_t row) {
    int32_t **const of_rows[] = {&v->tokens, &v->next_tokens, &v->pos, &v->last, &v->phase};
    for (size_t i = 0; i < sizeof of_rows / sizeof *of_rows; i++) move(of_rows[i], row);
    v->logit_rows = NULL;
}

hd_batch hd_batch_micro(const hd_batch *b, int32_t i) {
    const int32_t row = hd_batch_micro_row(b, b->n_rows, i), together = rows_together(b);
    const int64_t first_rows = (int64_t)i * (b->limits.seqs + 1);
    hd_batch m = *b;
    m.n_rows = hd_batch_micro_row(b, b->n_rows, i + 1) - row;
    m.n_logits = m.n_micro = 0;
    m.group_rows = m.group_logits = NULL;
    move_rows(&m.device, row);
    if (!b->host.first_row) {
        m.n_seqs = m.n_rows / together;
        for (int group = 0; group < HD_N_KV_GROUPS; group++) {
            move(&m.device.tables[group], (int64_t)(row / together) * b->limits.table_stride);
        }
        return m;
    }
    move_rows(&m.host, row);
    m.host.seq += row;
    m.device.seq += row;
    m.host.first_row = m.host.micro_first_row + first_rows;
    m.device.first_row = m.device.micro_first_row + first_rows;
    m.most_rows = most_rows(m.host.first_row, m.n_seqs);
    return m;
}

void hd_batch_upload(hd_batch *b, hd_stream *s) {
    for (int32_t i = 0; b->n_micro > 1 && i < b->n_micro; i++) write_first_rows(b, i);
    hd_stream_upload(s, b->device_block, b->host_block, b->bytes);
}
