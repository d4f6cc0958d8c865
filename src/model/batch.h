/* batch.h - the batch of one forward pass: its rows as a struct of arrays, with block
 * tables.
 *
 * A batch is filled on the host in one contiguous block and uploaded in one copy. The device
 * computes everything else that a step needs from it. The same struct holds prefill chunks,
 * decode rows, mixed batches and drafts to verify. */
#ifndef HD_MODEL_BATCH_H
#define HD_MODEL_BATCH_H

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"
#include "kv/kv.h"

/* The arrays of a batch: one view on the host, one on the device. */
typedef struct hd_batch_view {
    int32_t *tokens;      /* [rows] */
    int32_t *next_tokens; /* [rows] the token after each row, for MTP layers; -1: unknown */
    int32_t *pos;         /* [rows] ascending within a sequence, with or without gaps */
    int32_t *seq;         /* [rows] index of the row's sequence in this step */
    int32_t *last;        /* [rows] of a draft block: its last position */
    int32_t *logit_rows;  /* [n_logits] rows that need logits */
    int32_t *first_row;   /* [n_seqs + 1] */
    int32_t *tables[HD_N_KV_GROUPS]; /* [n_seqs, table_stride] block tables */
    int32_t *phase; /* [rows] hd_row_phase, by which rows are counted as expert load */
    /* [HD_MAX_MICRO, limits.seqs + 1] first_row of each micro-batch */
    int32_t *micro_first_row;
    hd_kv_ends *ends; /* [n_seqs] read on the host; NULL: every layer computes every row */
    int32_t *rebuilt, *windows_from; /* [n_seqs] of ends, read on the device */
} hd_batch_view;

typedef struct hd_batch_limits {
    int32_t rows, seqs, table_stride;
} hd_batch_limits;

enum { HD_MAX_MICRO = 4 }; /* micro-batches of a step */

typedef struct hd_batch {
    hd_batch_limits limits;
    /* n_rows may be 0 if other attention groups have rows */
    int32_t n_rows, n_seqs, n_logits;
    int32_t most_rows; /* of one sequence */
    /* [dp] host memory: n_rows and n_logits of every attention group's batch; NULL if there is
     * one. They stay valid until the step is queued. */
    const int32_t *group_rows, *group_logits;
    /* Of ranks that share experts and have a stage: every rank fetches experts and computes its own rows, in
     * place of an exchange of rows. The same on all ranks. */
    bool fetches;
    /* Rows of a draft block, which all attend to each other; 0: rows attend to earlier
     * ones. */
    int32_t block;
    /* Micro-batches as which a step runs it: runs of neighboring rows that are as equal as they can
     * be, whatever sequences they cut; all attention groups have as many. 0 or 1: one. */
    int32_t n_micro;
    hd_batch_view host,
        device; /* no host view where the device alone knows the rows, as many of each sequence */
    hd_device *on; /* device that owns the blocks */
    void *host_block, *device_block;
    size_t bytes;
} hd_batch;

hd_status hd_batch_open(hd_batch *b, const hd_batch_limits *limits, hd_device *d, hd_err *err);
void hd_batch_close(hd_batch *b); /* an all-zero batch is allowed */

void hd_batch_reset(hd_batch *b);

/* Makes a batch of n_logits 0, whose sequences have `block` rows each, one of draft blocks.
 * All rows need logits, those of the first place of every sequence first. */
void hd_batch_make_block(hd_batch *b, int32_t block);

/* One sequence's rows: n tokens at positions start, start + 1, ... */
typedef struct hd_batch_seq {
    const int32_t *tokens; /* [n] */
    int32_t n, start;
    int32_t after;                        /* the token after the last one, or -1 */
    int32_t n_logits;                     /* number of last rows that need logits */
    int32_t phase;                        /* hd_row_phase of its rows */
    hd_kv_ends ends;                      /* what layers with tails compute it for */
    const int32_t *pages[HD_N_KV_GROUPS]; /* the sequence's block tables */
    int32_t n_pages;                      /* entries to copy from each table */
} hd_batch_seq;

/* Adds a sequence; the caller must keep within the limits. */
void hd_batch_add(hd_batch *b, const hd_batch_seq *seq);

/* Returns whether rows of the batch rebuild windows (hd_kv_ends.rebuilt). */
bool hd_batch_rebuilds(const hd_batch *b);

/* Returns the first row of micro-batch i, of `rows` rows of any attention group; the rows of
 * i == n_micro are those behind the last one. */
int32_t hd_batch_micro_row(const hd_batch *b, int32_t rows, int32_t i);

/* Returns micro-batch i of an uploaded batch, which needs no logits. It may have no rows, and
 * sequences without rows. */
hd_batch hd_batch_micro(const hd_batch *b, int32_t i);
/* Returns whether windows of its rows begin later than others do (hd_kv_ends.windows_from). */
bool hd_batch_cuts_windows(const hd_batch *b, int32_t window);

void hd_batch_upload(hd_batch *b, hd_stream *s);

#endif
