/* added_internal.h - finds added tokens (special tokens) in a text by the rules of the
 * `tokenizers` package: leftmost, then longest. Tokens marked `normalized` are searched only in
 * text that the others did not match. There is no normalizer, but the order matters if
 * spellings overlap. */
#ifndef HD_TOKENIZER_ADDED_INTERNAL_H
#define HD_TOKENIZER_ADDED_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "tokenizer/span.h"

enum { TEXT_MAX_ADDED = 65536 };

typedef struct text_added_token {
    int32_t id;
    bool single_word; /* not next to a word character */
    bool lstrip;      /* takes the white space before it */
    bool rstrip;      /* and after it */
    bool normalized;
} text_added_token;

/* A trie over bytes: an edge (node, byte) leads to a node; edges are in a hash table. */
typedef struct text_edge {
    uint32_t node; /* UINT32_MAX: empty */
    uint32_t byte;
    uint32_t to;
} text_edge;

typedef struct text_added {
    text_added_token *tokens; /* [n_tokens] */
    int32_t n_tokens;
    text_edge *edges; /* [mask + 1] */
    uint32_t mask;
    int32_t *token_at; /* [n_nodes] index of the token that ends here, -1 for none */
    uint32_t n_nodes;
    bool starts[256]; /* first bytes */
} text_added;

/* Opens a trie for n_tokens tokens of n_bytes bytes in all. */
hd_status text_added_open(text_added *a, int32_t n_tokens, size_t n_bytes, hd_err *err);
void text_added_close(text_added *a);
void text_added_add(text_added *a, const char *content, size_t n, text_added_token token);

/* Where in a text added tokens may be matched: completely inside a control span. */
typedef struct text_controls {
    const uint8_t *text; /* the position from which the spans' starts count */
    const hd_text_span *spans;
    size_t n;
} text_controls;

/* One walk over a text. */
typedef struct text_added_walk {
    const text_added *added;
    const text_controls *controls; /* NULL: everywhere */
    const uint8_t *text;
    size_t n;
    size_t searched; /* the next match begins here or later */
    size_t done;     /* end of the last returned part */
    bool holds;      /* a token found after the returned text */
    size_t held_end;
    int32_t held_id;
} text_added_walk;

/* controls may be NULL; text lies inside their range. */
void text_added_start(text_added_walk *w, const text_added *a, const text_controls *controls,
                      const uint8_t *text, size_t n);

/* Returns the next part: a token (*id >= 0), or plain text (*id -1, at *part). False at the
 * end. */
bool text_added_next(text_added_walk *w, int32_t *id, const uint8_t **part, size_t *n);

#endif
