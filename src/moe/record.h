/* record.h - files of which experts the rows of a server chose: expert records.
 *
 * A record has a head and rows of one size. Its mode says what a row is: the counts of a whole
 * recording, those of one pass, or the choices of one token. Rows count experts by their own
 * numbers, and slots by the map of the head. A file may end without its last row, and may still
 * be written: docs/eplb.md has the layout. */
#ifndef HD_MOE_RECORD_H
#define HD_MOE_RECORD_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/status.h"

typedef enum hd_record_mode {
    HD_RECORD_STAT,      /* a row per phase */
    HD_RECORD_PER_PASS,  /* a row per phase that a pass has */
    HD_RECORD_PER_TOKEN, /* a row per token of a pass */
    HD_N_RECORD_MODES
} hd_record_mode;

/* What rows were computed for. Drafts are rows of MTP layers, all others of the other layers. */
typedef enum hd_record_phase {
    HD_RECORD_PREFILL,
    HD_RECORD_DECODE,
    HD_RECORD_VERIFY,
    HD_RECORD_DRAFT,
    HD_N_RECORD_PHASES
} hd_record_phase;

enum { HD_RECORD_MAX_TOP_K = 64 };

#define HD_RECORD_OPEN_END UINT64_MAX /* rows of a record that is being written */

typedef struct hd_record_head {
    hd_record_mode mode;
    int32_t layers, n_mtp; /* n_mtp: the last ones are MTP layers */
    int32_t experts, top_k, slots, ranks, nodes;
    uint64_t rows;
    int32_t *slot_expert; /* [layers][slots]; -1: empty, or a layer without experts */
} hd_record_head;

/* HD_EINVAL with a sentence if a number is out of range. */
hd_status hd_record_head_check(const hd_record_head *h, hd_err *err);

size_t hd_record_head_bytes(const hd_record_head *h);
void hd_record_head_write(const hd_record_head *h, uint8_t *out);
/* Writes the number of rows into the file of a record. */
enum { HD_RECORD_ROWS_AT = 48 };

typedef struct hd_record_row {
    uint64_t pass;
    int32_t tokens;
    hd_record_phase phase;
    int64_t *logical;        /* [layers][experts] rows of each expert */
    int64_t *physical;       /* [layers][slots] rows of each slot */
    int32_t token, position; /* PER_TOKEN */
    int32_t *choices;        /* PER_TOKEN [layers][top_k]; 0 where the row has none */
} hd_record_row;

/* Whether rows of a phase are computed by a layer. */
bool hd_record_has(const hd_record_head *h, hd_record_phase phase, int32_t layer);

size_t hd_record_row_bytes(const hd_record_head *h);
/* Writes what the mode keeps of a row. */
void hd_record_row_write(const hd_record_head *h, const hd_record_row *row, uint8_t *out);

/* Reads what the mode keeps of a row into its arrays. Returns what is wrong with it, or NULL. */
const char *hd_record_row_read(const hd_record_head *h, const uint8_t *bytes,
                               hd_record_row *row);

/* ---- reading ---- */

typedef struct hd_record_reader {
    hd_record_head head;
    hd_record_row row; /* the last one that was read */
    bool ended, cut;   /* no more rows; the file ends inside a row */
    uint64_t n_read;
    FILE *in;
    uint8_t *bytes;      /* of a row */
    int32_t *first_slot; /* [layers][experts] */
    const char *name;
} hd_record_reader;

/* Reads the head. `in` stays the caller's; name is that of the file, for errors. Close it after a
 * failure too. */
hd_status hd_record_open(hd_record_reader *r, FILE *in, const char *name, hd_err *err);
void hd_record_close(hd_record_reader *r);

/* Reads the next row into r->row, or sets r->ended. HD_EFORMAT for a row that cannot be. */
hd_status hd_record_next(hd_record_reader *r, hd_err *err);

#endif
