/* types.h - types shared by all operators: activations, paged KV, ring buffers, sequences of
 * a step. */
#ifndef HD_OPS_TYPES_H
#define HD_OPS_TYPES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "device/device.h"

HD_BEGIN_C

typedef struct hd_act hd_act;

/* Paged entries of many sequences in one KV pool. Entry e of sequence s is row table[s *
 * table_stride + e / page_entries] * page_entries + e % page_entries. */
typedef struct hd_paged {
    hd_act *data;         /* [n_pages * page_entries, width] */
    const int32_t *table; /* [n_seqs, table_stride] block table; only live entries need one */
    int32_t table_stride;
    int32_t page_entries;
    int32_t width;
} hd_paged;

/* A ring buffer per page: the last `ring` positions of every page of page_tokens positions.
 * Position p of sequence s is row table[s * table_stride + p / page_tokens] * ring + p %
 * ring; ring divides page_tokens. */
typedef struct hd_ring {
    float *data; /* [n_pages * ring, width] */
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
