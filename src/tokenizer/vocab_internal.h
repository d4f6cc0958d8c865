/* vocab_internal.h - the vocabulary: spelling, bytes and flags by id, and id by spelling. */
#ifndef HD_TOKENIZER_VOCAB_INTERNAL_H
#define HD_TOKENIZER_VOCAB_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum {
    TEXT_MAX_IDS = 1 << 22,
    TEXT_MAX_TOKEN_BYTES = 1 << 16,
    TEXT_MAX_VOCAB_BYTES = 1 << 28,
};

typedef enum text_token_flag {
    TEXT_USED = 1,    /* the id has a token */
    TEXT_ADDED = 2,   /* from added_tokens */
    TEXT_SPECIAL = 4, /* omitted when decoding without special tokens */
    TEXT_FOREIGN = 8, /* not spelled in the byte alphabet */
} text_token_flag;

typedef struct text_token {
    uint32_t at, n;             /* spelling, in vocab.spellings */
    uint32_t piece_at, piece_n; /* bytes, in vocab.pieces */
} text_token;

typedef struct text_vocab {
    text_token *tokens; /* [n_ids] */
    uint8_t *flags;     /* [n_ids] text_token_flag, or-ed */
    int32_t n_ids;      /* largest id + 1 */
    int32_t *slots;     /* [mask + 1] ids by hash of the spelling, -1 empty */
    uint32_t mask;
    char *spellings;
    uint8_t *pieces;
    size_t spellings_n, pieces_n, bytes_cap; /* both buffers have bytes_cap bytes */
} text_vocab;

/* Opens it for ids below n_ids, n_tokens tokens and n_bytes bytes of spelling in all. */
hd_status text_vocab_open(text_vocab *v, int32_t n_ids, size_t n_tokens, size_t n_bytes,
                          hd_err *err);
void text_vocab_close(text_vocab *v);

/* Adds a token within the sizes given at opening. Refuses a second token with the same id or
 * spelling. */
hd_status text_vocab_add(text_vocab *v, int64_t id, const char *token, size_t n, uint8_t flags,
                         hd_err *err);

/* Returns the id of a spelling, or -1. */
int32_t text_vocab_find(const text_vocab *v, const char *token, size_t n);

/* The same for the concatenation of two spellings. */
int32_t text_vocab_find_pair(const text_vocab *v, const char *a, size_t a_n, const char *b,
                             size_t b_n);

static inline uint8_t text_vocab_flags(const text_vocab *v, int32_t id) {
    return id >= 0 && id < v->n_ids ? v->flags[id] : 0;
}

/* The byte alphabet: the character that represents a byte, and the byte of a character or
 * -1. */
uint32_t text_byte_character(uint8_t byte);
int32_t text_character_byte(uint32_t cp);

#endif
