/* bpe_internal.h - byte-pair encoding (BPE) of one piece of text. It starts with one token
 * per byte. While two neighbors are the two sides of a known merge, it applies the merge of
 * lowest rank, leftmost first. The tables are immutable; scratch memory and a cache of seen
 * words belong to one encoding call. */
#ifndef HD_TOKENIZER_BPE_INTERNAL_H
#define HD_TOKENIZER_BPE_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "tokenizer/tokenizer.h"

enum { TEXT_NO_ID = -1 };

typedef struct text_merge {
    int32_t left, right; /* left is TEXT_NO_ID: an empty slot */
    uint32_t rank;
} text_merge;

typedef struct text_bpe {
    int32_t byte_id[256]; /* the token of each single byte */
    text_merge *slots;    /* [n_slots], open addressing by (left, right) */
    uint32_t mask;        /* n_slots - 1 */
    int32_t *result;      /* [n_merges] token made by the merge of that rank */
    int32_t *made_by;     /* [n_ids] slot of the first merge that makes this token, or -1 */
    int32_t n_merges, n_ids;
    uint32_t *byte_pair_rank; /* [256 * 256] rank of the merge of two bytes, or UINT32_MAX */
} text_bpe;

/* byte_id must be set. n_ids bounds every id that text_bpe_add will see. */
hd_status text_bpe_open(text_bpe *b, int32_t n_merges, int32_t n_ids, hd_err *err);
void text_bpe_close(text_bpe *b);

/* Adds the merge of the next rank; false if the pair is known already. */
bool text_bpe_add(text_bpe *b, int32_t left, int32_t right, int32_t result);

/* Call it after the last text_bpe_add. */
void text_bpe_finish(text_bpe *b);

typedef struct text_bpe_scratch text_bpe_scratch;

/* text_bytes: the text of this call, which determines the cache's size. */
hd_status text_bpe_scratch_open(text_bpe_scratch **out, size_t text_bytes, hd_err *err);
void text_bpe_scratch_close(text_bpe_scratch *s);

/* Appends the tokens of piece[n], n > 0. */
hd_status text_bpe_encode(const text_bpe *b, text_bpe_scratch *s, const uint8_t *piece,
                          size_t n, hd_ids *out, hd_err *err);

#endif
