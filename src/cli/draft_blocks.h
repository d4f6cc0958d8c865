/* draft_blocks.h - logits of DSpark's drafts after every token, for `hadal logits --mtp`. */
#ifndef HD_CLI_DRAFT_BLOCKS_H
#define HD_CLI_DRAFT_BLOCKS_H

#include "cli/npy.h"
#include "model/model.h"

typedef struct draft_blocks {
    const hd_model_spec *spec; /* all of these are the caller's */
    hd_device *device;
    hd_stream *stream;
    hd_model *model;
    hd_kv *kv;
    float *rows;                 /* [seqs, vocab] host memory */
    hd_npy *logits, *confidence; /* [tokens, block, vocab], [tokens, block] */
    hd_batch batch;              /* one block for each sequence */
    int32_t *before;             /* [seqs] device memory: the tokens before a draft */
    int32_t *token;              /* [seqs] the same on the host */
    float *got, *certain;        /* confidences: [seqs] of a place, [seqs, block] */
} draft_blocks;

/* Opens what a step needs that has at most so many sequences, each with one row. The caller has set the
 * first fields, and closes it after a failure too. */
hd_status draft_blocks_open(draft_blocks *d, int32_t seqs, int32_t table_stride, hd_err *err);
void draft_blocks_close(draft_blocks *d); /* an all-zero one is fine */

/* Drafts a block after the row of every sequence of a step, which hd_model_step() has just computed, and
 * whose next token is known. Each draft follows the greedy choice of the one before. Writes the logits of
 * a sequence's drafts, and their confidences, at the row of its token in the files: at[s] of sequence s.
 * Their tables must reach a block behind the row. */
hd_status draft_blocks_run(draft_blocks *d, hd_batch *step, const int64_t *at, hd_err *err);

/* Returns the largest of n numbers, the first of equal ones. */
int32_t draft_argmax(const float *x, int32_t n);

#endif
