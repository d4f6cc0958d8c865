/* pretokenize_internal.h - pre-tokenizer: splits text into the pieces that byte-pair merges
 * may not cross. It is a list of stages; each splits every piece of the previous stage and
 * sees nothing beyond that piece. The last stage is always ByteLevel. Immutable once open. */
#ifndef HD_TOKENIZER_PRETOKENIZE_INTERNAL_H
#define HD_TOKENIZER_PRETOKENIZE_INTERNAL_H

#include <jansson.h>

#include "tokenizer/pattern_internal.h"

enum { TEXT_MAX_STAGES = 16 };

typedef enum text_behavior {
    TEXT_ISOLATED, /* matches and gaps are pieces */
    TEXT_REMOVED,
    TEXT_MERGED_WITH_PREVIOUS,
    TEXT_MERGED_WITH_NEXT,
    TEXT_CONTIGUOUS, /* adjacent matches are one piece */
} text_behavior;

typedef struct text_stage {
    text_pattern pattern;
    text_behavior behavior;
    bool invert; /* gaps count as matches, and matches as gaps */
} text_stage;

typedef struct text_pretokenizer {
    text_stage stages[TEXT_MAX_STAGES];
    int32_t n_stages;
    bool add_prefix_space; /* a piece entering stage `prefix_stage` gets a space in front */
    int32_t prefix_stage;  /* where ByteLevel begins: 0..n_stages */
    bool needs_regex;
} text_pretokenizer;

/* Reads the pre_tokenizer object of a tokenizer.json. */
hd_status text_pretokenizer_open(text_pretokenizer *out, const json_t *object, hd_err *err);
void text_pretokenizer_close(text_pretokenizer *p);

typedef struct text_event {
    size_t first, end;
    bool match;
} text_event;

/* The state of one stage over one piece. */
typedef struct text_cutter {
    text_search search;
    text_event ahead[2]; /* events found but not yet used */
    int32_t n_ahead;
    size_t covered;  /* end of the last event */
    text_event held; /* a match found after the gap */
    bool holds, done;
} text_cutter;

/* An iterator over the pieces of one text. Owned by one thread. */
typedef struct text_pieces {
    const text_pretokenizer *p;
    text_regex_scratch *scratch; /* opened on first need */
    uint8_t *prefixed;           /* a piece with a space in front */
    size_t prefixed_cap;
    const uint8_t *text; /* not returned yet, if there are no stages */
    size_t n;
    int32_t level; /* the last stage with a piece, -1 at the end */
    text_cutter cutters[TEXT_MAX_STAGES];
} text_pieces;

hd_status text_pieces_init(text_pieces *it, const text_pretokenizer *p, hd_err *err);
void text_pieces_deinit(text_pieces *it);
hd_status text_pieces_start(text_pieces *it, const uint8_t *text, size_t n, hd_err *err);

/* Returns the next piece, never empty; *n is 0 at the end. It is valid until the next call. */
hd_status text_pieces_next(text_pieces *it, const uint8_t **piece, size_t *n, hd_err *err);

#endif
