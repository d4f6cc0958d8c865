/* batch.h - a step is data: the rows of one forward pass as a struct of arrays.
 *
 * A batch is filled on the host in one contiguous block and goes to the device in one copy;
 * everything else a step needs is computed from it there. The same struct carries prefill
 * chunks, decode rows, mixed batches and rows to be verified. */
#ifndef HD_MODEL_BATCH_H
#define HD_MODEL_BATCH_H

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"
#include "kv/kv.h"

/* Where the arrays of a batch lie: once on the host, once on the device. */
typedef struct hd_batch_view {
    int32_t *tokens;      /* [rows] */
    int32_t *next_tokens; /* [rows] the token after each row, for MTP layers; -1 unknown */
    int32_t *pos;         /* [rows] */
    int32_t *seq;         /* [rows] index of the row's sequence in this step */
    int32_t *logit_rows;  /* [n_logits] rows whose logits are wanted */
    int32_t *first_row;   /* [n_seqs + 1] */
    int32_t *start;       /* [n_seqs] position of each sequence's first row */
    int32_t *tables[HD_N_KV_GROUPS]; /* [n_seqs, table_stride] pages */
    int32_t *live; /* [rows] 0: a row that is nobody's and no expert's load; NULL: all are live,
                      as in every batch that the host fills */
} hd_batch_view;

typedef struct hd_batch_limits {
    int32_t rows, seqs, table_stride;
} hd_batch_limits;

typedef struct hd_batch {
    hd_batch_limits limits;
    int32_t n_rows, n_seqs, n_logits;
    int32_t most_rows; /* of one sequence */
    hd_batch_view host, device;
    hd_device *on; /* owns the device block */
    void *host_block, *device_block;
    size_t bytes;
} hd_batch;

hd_status hd_batch_open(hd_batch *b, const hd_batch_limits *limits, hd_device *d, hd_err *err);
void hd_batch_close(hd_batch *b); /* an all-zero batch is fine */

void hd_batch_reset(hd_batch *b);

/* One sequence's rows: n tokens at positions start, start + 1, ... */
typedef struct hd_batch_seq {
    const int32_t *tokens; /* [n] */
    int32_t n, start;
    int32_t after;                        /* the token behind the last one, or -1 */
    int32_t n_logits;                     /* how many of the last rows want logits */
    const int32_t *pages[HD_N_KV_GROUPS]; /* the sequence's page tables */
    int32_t n_pages;                      /* entries to take from each */
} hd_batch_seq;

/* Adds a sequence; the caller keeps within the limits. */
void hd_batch_add(hd_batch *b, const hd_batch_seq *seq);

void hd_batch_upload(hd_batch *b, hd_stream *s);

#endif
