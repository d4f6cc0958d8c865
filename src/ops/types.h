/* types.h - types shared by all operators: rows of elements, paged KV, ring buffers,
 * sequences of a step. */
#ifndef HD_OPS_TYPES_H
#define HD_OPS_TYPES_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "device/device.h"
#include "ops/group_format.h"

HD_BEGIN_C

/* What a row of a step is for: the counters of expert load that count it. */
typedef enum hd_row_phase {
    HD_ROW_PADDING = -1, /* not counted */
    HD_ROW_PREFILL,
    HD_ROW_DECODE, /* the one row of a sequence */
    HD_ROW_VERIFY, /* a row of a sequence with drafts */
    HD_N_ROW_PHASES
} hd_row_phase;

/* Rows of activations or of cached entries. HD_ROWS_op, behind an operator's arguments, lists
 * those that it has, each with its kind. */
typedef struct hd_rows {
    void *data;        /* NULL: there is none */
    const void *scale; /* of a type with scales */
    int64_t stride;    /* elements between rows; 0: contiguous */
    hd_dtype type;
} hd_rows;

typedef enum hd_rows_kind {
    HD_ROWS_PLAIN,   /* activations, contiguous */
    HD_ROWS_STRIDED, /* activations with a stride */
    HD_ROWS_POOL,    /* cached entries that attention reads */
    HD_ROWS_KEYS,    /* cached keys of the indexer */
    HD_ROWS_STATE    /* cached, float32 in every backend */
} hd_rows_kind;

/* Returns contiguous rows of float32. */
static inline hd_rows hd_f32(const float *x) {
    const hd_rows rows = {(void *)(uintptr_t)x, NULL, 0, HD_F32};
    return rows;
}

/* Returns x from element `at` on, with the same stride; x has no scales. */
static inline hd_rows hd_rows_at(hd_rows x, int64_t at) {
    assert(!x.scale);
    x.data = (uint8_t *)x.data + at * hd_dtype_bits(x.type) / 8;
    return x;
}

static inline hd_rows hd_rows_strided(hd_rows x, int64_t stride) {
    x.stride = stride;
    return x;
}

enum { HD_MAX_ENTRY_COLS = 1024 }; /* of types that are not float32 */

/* Whether entries of a type lie as hd_group_format says. */
static inline bool hd_is_packed(hd_dtype type) {
    return type == HD_E4M3 || type == HD_E2M1;
}

static inline size_t hd_entry_bytes(hd_dtype type, int32_t width, hd_group_format format) {
    return hd_is_packed(type) ? hd_group_bytes(format, width) : hd_dtype_bytes(type, width);
}

/* Paged entries of many sequences in one KV pool. Those of a packed type lie in their format; of another
 * type, what is written is rounded to the format, if there is one. Entry e of sequence s is row table[s *
 * table_stride + e / page_entries] * page_entries + e % page_entries. */
typedef struct hd_paged {
    hd_rows rows;         /* [n_pages * page_entries, width] */
    const int32_t *table; /* [n_seqs, table_stride] block table; only live entries need one */
    int32_t table_stride;
    int32_t page_entries;
    int32_t width;
    hd_group_format format; /* its code is the type, if that is packed */
} hd_paged;

static inline size_t hd_paged_entry_bytes(const hd_paged *p) {
    return hd_entry_bytes(p->rows.type, p->width, p->format);
}

/* A ring buffer per page: the last `ring` positions of every page of page_tokens positions.
 * Position p of sequence s is row table[s * table_stride + p / page_tokens] * ring + p %
 * ring; ring divides page_tokens. */
typedef struct hd_ring {
    hd_rows rows; /* [n_pages * ring, width] */
    const int32_t *table;
    int32_t table_stride;
    int32_t page_tokens;
    int32_t ring;
    int32_t width;
} hd_ring;

/* The sequences of a step: sequence s owns rows first_row[s] .. first_row[s + 1] - 1. Its
 * positions ascend with the rows; positions may be missing between them. */
typedef struct hd_seqs {
    int32_t n;
    const int32_t *first_row; /* [n + 1] */
    const int32_t *pos;       /* [rows] */
    int32_t most_rows;        /* of one sequence, at most; 0: not known */
} hd_seqs;

HD_END_C

#endif
