/* step.h - steps of a fixed shape, which a CUDA graph can replay; docs/graphs.md. */
#ifndef HD_OPS_STEP_H
#define HD_OPS_STEP_H

#include "ops/sampling.h"

HD_BEGIN_C

/* ---- steps of a fixed shape; docs/graphs.md ----
 *
 * Such a step has n sequences of 1 + n_drafts rows, those of sequence i from row
 * i * (1 + n_drafts) on, whoever runs: calls follow from the shape alone, everything else is
 * read from device memory. A row or a sequence that is nobody's has token 0 at position 0 and
 * up, in the scratch page. */

/* Where a request stands: the token chosen last, which is not computed yet, and what may
 * follow it. */
typedef struct hd_cursor {
    int32_t position; /* of token */
    int32_t token;
    int32_t draft[HD_MAX_DRAFTED];
} hd_cursor;

/* One sequence of a step, as the host tells it. */
typedef struct hd_step_seq {
    int32_t slot;     /* of its parameters and its cursor */
    int32_t n_drafts; /* that may stand, at most the shape's */
    int32_t capacity; /* positions that have pages */
    int32_t fresh; /* it begins at `at`; otherwise at its slot's cursor, and is nobody's if it
                         could leave the room */
    hd_cursor at;
} hd_step_seq;

/* How drafts stand in benchmarks, whatever the model says: at least k + 1 of them with
 * probability least[k], which never grows with k. least[0] 0: the model's own verdict. */
typedef struct hd_acceptance {
    float least[HD_MAX_DRAFTED];
} hd_acceptance;

/* So many drafts on average: the whole number below or above it. */
hd_acceptance hd_acceptance_of(float mean);

/* Rows from cursors. Forced acceptance is drawn by Philox (high word 2) at the position of the
 * first token to choose. */
typedef struct hd_prepare_step_args {
    int32_t *token, *pos, *seq, *logit_row; /* [rows] */
    int32_t *live;              /* [rows] 0: nobody's, or a draft that cannot stand */
    int32_t *first_row, *start; /* [n + 1], [n] */
    int32_t *table[2];          /* [n, table_stride] written where nobody's */
    int32_t *slot, *position, *n_drafted, *given; /* [rows] of the sampler */
    int32_t *verifiable;                          /* [n] drafts that may stand; -1: nobody's */
    int32_t *parity;                              /* [1] 0 and 1 in turn, step by step */
    hd_cursor *cursor;                            /* [*] by slot; fresh ones are written */
    const hd_step_seq *seqs;                      /* [n] */
    const int32_t *n_live;                        /* [1] the first so many are somebody's */
    const hd_sampling *params;
    int32_t scratch_page[2];
    int32_t n, n_drafts, table_stride, idle_slot; /* idle_slot: the sampler's, where nobody's */
    hd_acceptance forced;
} hd_prepare_step_args;

/* Which drafts stand; cursors and counts of those with penalties move past them. */
typedef struct hd_commit_step_args {
    int32_t *accepted;   /* [n] drafts that stand; -1: nobody's */
    int32_t *next_token; /* [rows] after each row, 0 behind refused drafts */
    int32_t *wanted;     /* [n] the row of the last token that stands */
    hd_cursor *cursor;
    uint16_t *counts; /* [*, vocab] of count_tokens */
    const hd_step_seq *seqs;
    const int32_t *verifiable;
    const int32_t *token, *input; /* [rows] chosen by sample; computed */
    const hd_sampling *params;
    int32_t n, n_drafts, vocab;
} hd_commit_step_args;

/* Draft `at` of every sequence into its cursor, and the rows that guess the next one. */
typedef struct hd_prepare_draft_args {
    int32_t *draft;                                      /* [n, n_drafts] written at `at` */
    int32_t *token, *next_token, *pos, *seq, *logit_row; /* [n] */
    int32_t *first_row, *start;                          /* [n + 1], [n] */
    hd_cursor *cursor;
    const hd_step_seq *seqs;
    const int32_t *verifiable;
    const int32_t *guess; /* [n] of argmax */
    int32_t n, n_drafts, at;
} hd_prepare_draft_args;

/* Copies between the device and host memory of hd_device_alloc_host(), which the device
 * reaches: to[*turn] = from[*turn], the first `most` bytes, or *bytes of them. Everything is
 * aligned to 16 bytes. A small copy inside a step, where a queued one would cost a pause. */
typedef struct hd_mirror_args {
    void *to[2];
    const void *from[2];
    const int32_t *parity; /* [1] 0 or 1 */
    const int32_t *bytes;  /* [1] or NULL */
    int32_t most;
} hd_mirror_args;

/* The device's clock in nanoseconds, when everything before is done. */
typedef struct hd_timestamp_args {
    int64_t *at;
} hd_timestamp_args;

HD_END_C

#endif
