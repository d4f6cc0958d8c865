/* draft_blocks.c - see draft_blocks.h. */
#include "cli/draft_blocks.h"

#include <stdlib.h>
#include <string.h>

hd_status draft_blocks_open(draft_blocks *d, int32_t seqs, int32_t table_stride, hd_err *err) {
    const hd_batch_limits limits = {seqs * d->spec->dspark.block, seqs, table_stride};
    void *before;
    HD_TRY(hd_batch_open(&d->batch, &limits, d->device, err));
    d->token = calloc((size_t)seqs, sizeof *d->token);
    d->got = calloc((size_t)seqs, sizeof *d->got);
    d->certain = calloc((size_t)limits.rows, sizeof *d->certain);
    if (!d->got || !d->token || !d->certain)
        return HD_FAIL(err, HD_ENOMEM, "no memory for drafts");
    HD_TRY(hd_device_alloc(d->device, &before, (size_t)seqs * sizeof *d->before,
                           "tokens before drafts", err));
    d->before = before;
    return HD_OK;
}

void draft_blocks_close(draft_blocks *d) {
    hd_batch_close(&d->batch);
    if (d->device) hd_device_release(d->device, d->before);
    free(d->token);
    free(d->got);
    free(d->certain);
}

int32_t draft_argmax(const float *x, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++) {
        if (x[i] > x[best]) best = i;
    }
    return best;
}

/* A block after every row of a step: the next token, then filler. */
static void fill(const draft_blocks *d, hd_batch *to, const hd_batch *step) {
    const hd_dspark_spec *s = &d->spec->dspark;
    const int32_t stride = step->limits.table_stride;
    int32_t tokens[HD_MAX_DRAFTS];
    for (int32_t k = 1; k < s->block; k++) tokens[k] = s->filler;
    hd_batch_reset(to);
    for (int32_t q = 0; q < step->n_seqs; q++) {
        const int32_t row = step->host.first_row[q];
        const hd_batch_seq seq = {
            .tokens = tokens,
            .n = s->block,
            .start = step->host.pos[row] + 1,
            .after = -1,
            .phase = HD_ROW_DECODE,
            .pages = {step->host.tables[0] + (size_t)q * (size_t)stride,
                      step->host.tables[1] + (size_t)q * (size_t)stride},
            .n_pages = stride
        };
        tokens[0] = step->host.next_tokens[row];
        hd_batch_add(to, &seq);
    }
    hd_batch_make_block(to, s->block);
    to->n_micro = hd_model_n_micro(d->model, to);
    hd_batch_upload(to, d->stream);
}

static hd_status write_place(draft_blocks *d, const hd_draft_logits *got, int32_t n,
                             const int64_t *at, int32_t place, hd_err *err) {
    const size_t vocab = (size_t)d->spec->vocab;
    const int32_t block = d->spec->dspark.block;
    hd_stream_download(d->stream, d->rows, got->logits, (size_t)n * vocab * sizeof *d->rows);
    hd_stream_download(d->stream, d->got, got->confidence, (size_t)n * sizeof *d->got);
    HD_TRY(hd_stream_sync(d->stream, err));
    for (int32_t q = 0; q < n; q++) {
        const float *logits = d->rows + (size_t)q * vocab;
        HD_TRY(hd_npy_write(d->logits, at[q] * block + place, logits, 1, err));
        d->certain[q * block + place] = d->got[q];
        d->token[q] = draft_argmax(logits, d->spec->vocab);
    }
    return HD_OK;
}

hd_status draft_blocks_run(draft_blocks *d, hd_batch *step, const int64_t *at, hd_err *err) {
    const int32_t n = step->n_seqs, block = d->spec->dspark.block;
    hd_model_absorb(d->model, d->kv, step);
    fill(d, &d->batch, step);
    hd_model_draft_block(d->model, d->kv, &d->batch);
    for (int32_t q = 0; q < n; q++) {
        d->token[q] = step->host.next_tokens[step->host.first_row[q]];
    }
    for (int32_t k = 0; k < block && n > 0; k++) {
        hd_stream_upload(d->stream, d->before, d->token, (size_t)n * sizeof *d->token);
        const hd_draft_logits got = hd_model_draft_place(d->model, k, d->before, n, n);
        HD_TRY(write_place(d, &got, n, at, k, err));
    }
    for (int32_t q = 0; q < n; q++) {
        HD_TRY(hd_npy_write(d->confidence, at[q], d->certain + q * block, 1, err));
    }
    return hd_stream_sync(d->stream, err);
}
