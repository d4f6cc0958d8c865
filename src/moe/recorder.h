/* recorder.h - makes an expert record of a running model, as bytes of a file.
 *
 * One thread adds rows, the one that runs steps. Another takes the bytes and writes them, so that
 * no step waits for a disk. What is not taken in time is dropped and counted. */
#ifndef HD_MOE_RECORDER_H
#define HD_MOE_RECORDER_H

#include "moe/record.h"

typedef struct hd_recorder hd_recorder;

/* head: all but mode and rows; copied. The layers without experts are those whose slots are
 * empty. most_bytes: kept until they are taken. */
hd_status hd_recorder_open(hd_recorder **out, const hd_record_head *head, size_t most_bytes,
                           hd_err *err);
void hd_recorder_close(hd_recorder *r); /* NULL is fine */

/* ---- the thread that runs steps ---- */

/* Replaces the map [slots] of a layer with experts, before a record begins. */
void hd_recorder_set_map(hd_recorder *r, int32_t layer, const int32_t *slot_expert);

/* Begins a record; what was not taken of the one before is gone. */
void hd_recorder_begin(hd_recorder *r, hd_record_mode mode);

/* Adds a row of the pass, PER_PASS or PER_TOKEN: the experts that it chose, [top_k] in each layer
 * with experts, `stride` apart: of MTP layers for DRAFT, else of the others. A choice is the expert
 * plus experts * (slot + 1), where the slot that the row went to is known, else the expert alone. It
 * counts at this slot if the map of the record has the expert there, else at the expert's first. */
void hd_recorder_row(hd_recorder *r, hd_record_phase phase, int32_t token, int32_t position,
                     const int32_t *choices, int64_t stride);
void hd_recorder_end_pass(hd_recorder *r);

/* Adds the rows of STAT, of so many passes: counts [3][layers - n_mtp][experts] of PREFILL,
 * DECODE and VERIFY, then [n_mtp][experts] of DRAFT. Slots get equal parts of their experts' rows. */
void hd_recorder_stat(hd_recorder *r, const int64_t *counts, uint64_t passes);

/* Ends the record; nothing is added until the next begins. */
void hd_recorder_end(hd_recorder *r);

/* ---- rows of several attention groups ----
 *
 * Each has a recorder of its part, with the same head, whose bytes are rows without a head. What the
 * parts recorded of a pass is joined to the pass of a recorder of all. */

void hd_recorder_begin_part(hd_recorder *r, hd_record_mode mode);

/* Adds n bytes of a part. HD_EPEER: they cannot be rows of it. */
hd_status hd_recorder_join(hd_recorder *r, const uint8_t *rows, size_t n, hd_err *err);

/* ---- any thread ---- */

typedef struct hd_recorder_state {
    uint64_t begun;   /* records so far */
    bool ended;       /* this one, or there was none */
    uint64_t rows;    /* of it */
    uint64_t dropped; /* rows without room */
    size_t waiting;   /* bytes that were not taken */
} hd_recorder_state;

hd_recorder_state hd_recorder_read_state(hd_recorder *r);

/* Takes at most n bytes of record `begun`, in order; 0 if there are none now, or another record
 * has begun. */
size_t hd_recorder_take(hd_recorder *r, uint64_t begun, uint8_t *out, size_t n);

#endif
