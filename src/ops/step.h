/* step.h - operators that make a decode step replayable as a CUDA graph; docs/graphs.md. */
#ifndef HD_OPS_STEP_H
#define HD_OPS_STEP_H

#include "ops/sampling.h"

HD_BEGIN_C

/* ---- steps of a fixed shape; docs/graphs.md ----
 *
 * Such a step has n sequences of 1 + n_drafts rows; those of sequence i start at row i * (1
 * + n_drafts). The operator calls follow from the shape alone; everything else is read from
 * device memory. Padding rows and padding sequences have token 0 at position 0 and up, in
 * the scratch page. */

/* The decode state of a request: the last sampled token, which is not computed yet, and
 * drafts that may follow it. */
typedef struct hd_cursor {
    int32_t position; /* of token */
    int32_t token;
    int32_t draft[HD_MAX_DRAFTS];
} hd_cursor;

/* One sequence of a step, as the host writes it. */
typedef struct hd_step_seq {
    int32_t slot;     /* index of its sampling parameters and its cursor */
    int32_t n_drafts; /* drafts to verify, at most the shape's */
    int32_t n_wanted; /* drafts to make, likewise */
    int32_t capacity; /* positions that have pages */
    /* 1: it begins at `at`. 0: it begins at its slot's cursor, and is padding if it could
     * exceed its capacity. */
    int32_t fresh;
    /* Of a prompt, which is fresh: so many known tokens come in rows before `at`. */
    int32_t n_before;
    /* 1 + the token after `at`, if it is known because the prompt goes on; 0: it is sampled */
    int32_t known;
    hd_cursor at;
} hd_step_seq;

/* Forced acceptance for benchmarks, whatever the model says: at least k + 1 drafts are
 * accepted with probability least[k], which never grows with k. least[0] 0: the model's own
 * verification. */
typedef struct hd_acceptance {
    float least[HD_MAX_DRAFTS];
} hd_acceptance;

/* Returns a forced acceptance with this mean: the integer below or above it. */
hd_acceptance hd_acceptance_of(float mean);

/* Computes the rows of the step from the cursors: of each sequence those before, then 1 + n_drafts
 * that sample. Rows of prompts that the shape has beyond those are padding, in a sequence n behind
 * the others. Forced acceptance is drawn by Philox (high word 2) at the position of the first token
 * to sample. */
typedef struct hd_prepare_step_args {
    int32_t *token, *pos, *seq; /* [rows] rows: n * (1 + n_drafts) + n_before */
    int32_t *phase; /* [rows] hd_row_phase; padding: also a draft that cannot be accepted */
    int32_t *next_token; /* [rows] written for rows before */
    int32_t *first_row;  /* [n + 1], or with rows before [n + 2] */
    /* [n, table_stride], or with rows before [n + 1, ...]; written for padding sequences */
    int32_t *table[2];
    /* [n, 1 + n_drafts] rows that sample, and what the sampler has of them */
    int32_t *logit_row, *slot, *position, *input, *n_drafted, *given;
    const int32_t *before;   /* [n_before] tokens, of the sequences in order */
    int32_t *verifiable;     /* [n] drafts that may be accepted; -1: padding */
    int32_t *parity;         /* [1] alternates between 0 and 1, step by step */
    hd_cursor *cursor;       /* [*] by slot; written if fresh */
    const hd_step_seq *seqs; /* [n] */
    const int32_t *n_live;   /* [1] number of real sequences, the first ones */
    const hd_sampling *params;
    int32_t scratch_page[2];
    /* n_before: of all sequences at most; idle_slot: the sampler's slot of padding rows */
    int32_t n, n_drafts, n_before, table_stride, idle_slot;
    hd_acceptance forced;
} hd_prepare_step_args;

#define HD_ROWS_prepare_step(T)

/* Verifies drafts and advances the cursors, and the counts of requests with penalties. */
typedef struct hd_commit_step_args {
    int32_t *accepted; /* [n] accepted drafts; -1: padding */
    /* [*] token after each row that samples, 0 after rejected drafts; by logit_row */
    int32_t *next_token;
    int32_t *wanted; /* [n] the row of the last accepted token */
    hd_cursor *cursor;
    uint16_t *counts; /* [*, vocab] of count_tokens */
    const hd_step_seq *seqs;
    const int32_t *verifiable;
    const int32_t *token, *input, *logit_row; /* [n, 1 + n_drafts] sampled; input; its row */
    const hd_sampling *params;
    int32_t n, n_drafts, vocab;
} hd_commit_step_args;

#define HD_ROWS_commit_step(T)

/* Writes draft `at` of every sequence to its cursor, and the rows that draft the next one. */
typedef struct hd_prepare_draft_args {
    int32_t *draft;                                      /* [n, n_drafts] written at `at` */
    int32_t *token, *next_token, *pos, *seq, *logit_row; /* [n] */
    int32_t *phase;     /* [n] padding: also a draft that the sequence does not want */
    int32_t *first_row; /* [n + 1] */
    hd_cursor *cursor;
    const hd_step_seq *seqs;
    const int32_t *verifiable;
    const int32_t *guess; /* [n] of argmax */
    int32_t n, n_drafts, at;
} hd_prepare_draft_args;

#define HD_ROWS_prepare_draft(T)

/* Computes the rows of a draft block of every sequence: its last token, then filler tokens. */
typedef struct hd_prepare_block_args {
    int32_t *token, *pos, *last, *seq; /* [n * block] */
    int32_t *logit_row;                /* [block, n] */
    int32_t *phase;     /* [n * block] padding: also of a sequence without drafts */
    int32_t *first_row; /* [n + 1] */
    int32_t *guess;     /* [n] the last token */
    const hd_cursor *cursor;
    const hd_step_seq *seqs;
    const int32_t *verifiable;
    int32_t n, block, filler;
} hd_prepare_block_args;

#define HD_ROWS_prepare_block(T)

/* Copies between device memory and host memory of hd_device_alloc_host(), which the device
 * can address: to[*parity] = from[*parity], the first `most` bytes, or *bytes of them.
 * Everything is aligned to 16 bytes. It makes small copies inside a step, where a queued
 * copy would cause a gap. */
typedef struct hd_mirror_args {
    void *to[2];
    const void *from[2];
    const int32_t *parity; /* [1] 0 or 1 */
    const int32_t *bytes;  /* [1] or NULL */
    int32_t most;
} hd_mirror_args;

#define HD_ROWS_mirror(T)

/* Writes the device's clock, in nanoseconds, when everything queued before is done. */
typedef struct hd_timestamp_args {
    int64_t *at;
} hd_timestamp_args;

#define HD_ROWS_timestamp(T)

#define HD_STEP_OPS(X) \
    X(prepare_step)    \
    X(commit_step) X(prepare_draft) X(prepare_block) X(mirror) X(timestamp)

HD_END_C

#endif
