/* grammar.h - grammars for structured output (guided decoding): JSON of a schema, a regular
 * expression, a choice of strings, tool calls in a chat format, or either such a text or
 * calls.
 *
 * A grammar is compiled once into a byte-level pushdown automaton. It is immutable, so
 * threads may share it. A state describes a position in the text; it is plain memory and may
 * be copied, which is how drafts are verified and undone. A mask has one bit per token. It
 * allows exactly the tokens whose bytes hd_grammar_advance() would accept, and the
 * end-of-sequence tokens exactly where hd_grammar_can_end() is true.
 *
 * Schemas and patterns are untrusted, so compiling is bounded in time and memory. Messages
 * begin with an error code and a colon: schema_too_complex, schema_too_deep, schema_cycle,
 * unsatisfiable, invalid_schema, unsupported_schema, invalid_pattern, unsupported_pattern.
 * docs/grammar.md lists what is supported. */
#ifndef HD_GRAMMAR_GRAMMAR_H
#define HD_GRAMMAR_GRAMMAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "chat/reply.h"
#include "tokenizer/tokenizer.h"

enum {
    HD_GRAMMAR_MAX_SCHEMA_BYTES = 256 * 1024,
    HD_GRAMMAR_MAX_PATTERN_BYTES = 4096,
    HD_GRAMMAR_MAX_CHOICES = 10000,
    HD_GRAMMAR_MAX_REPEAT = 65536,
    HD_GRAMMAR_MAX_STATES = 50000,
    HD_GRAMMAR_MAX_STEPS = 10 * 1000 * 1000, /* of one compilation */
    HD_GRAMMAR_MAX_BYTES = 16 * 1024 * 1024, /* of one automaton */
    HD_GRAMMAR_MAX_SCHEMA_DEPTH = 32,
    HD_GRAMMAR_MAX_DEPTH = 128,  /* frames of the stack */
    HD_GRAMMAR_MAX_THREADS = 16, /* parses of one text that are followed at once */
    HD_GRAMMAR_MAX_SPACE = 64,   /* white space in a row, where it is free */
    /* of a number without bounds: before the decimal point, and behind it */
    HD_GRAMMAR_MAX_DIGITS = 20,
    /* first of the bytes that stand for markers, which UTF-8 never contains: see below */
    HD_GRAMMAR_MARK = 0xf8,
};

typedef struct hd_grammar hd_grammar;

typedef enum hd_grammar_kind {
    HD_GRAMMAR_JSON_OBJECT, /* any JSON object */
    HD_GRAMMAR_JSON_SCHEMA, /* text: the schema */
    HD_GRAMMAR_REGEX,       /* text: a pattern that the whole content must match */
    HD_GRAMMAR_CHOICE,      /* choices */
    HD_GRAMMAR_CALLS        /* no text: calls only */
} hd_grammar_kind;

/* Tool calls that may come instead of a text: one block of them, from its opening to its
 * end. The name of a call is one of tools. Arguments of a strict function match the schema
 * of its parameters. Those of other functions are any object, or with hold match their
 * schema as far as a grammar can express it. A marker that is one special token is one byte
 * to the automaton: HD_GRAMMAR_MARK plus its number. Other markers are their text. */
typedef struct hd_grammar_calls {
    const char *tools; /* [n_tools] a JSON array of functions with name, strict, parameters; */
    size_t n_tools;    /* NULL: no calls */
    hd_reply_format format;
    uint32_t marks; /* which markers are tokens: hd_grammar_vocab_marks() */
    bool flagged;   /* as in hd_reply_options: markers spelled as plain text do not count */
    bool hold;      /* enforces the schemas of functions that are not strict, too */
    int32_t most;   /* most calls, at least one */
} hd_grammar_calls;

typedef struct hd_grammar_args {
    hd_grammar_kind kind;
    const char *text; /* [n] */
    size_t n;
    const char *const *choices; /* [n_choices] each of choice_bytes[i] bytes of UTF-8 */
    const size_t *choice_bytes;
    int32_t n_choices;
    int32_t free_space; /* JSON: white space in a row between tokens; 0: compact, see docs */
    hd_grammar_calls calls;
} hd_grammar_args;

hd_status hd_grammar_open(hd_grammar **out, const hd_grammar_args *args, hd_err *err);
void hd_grammar_close(hd_grammar *g); /* NULL is fine */

size_t hd_grammar_bytes(const hd_grammar *g); /* memory held, for a cache of grammars */

/* A frame of the stack: the place of the call in the grammar, and its number of repetitions. */
typedef struct hd_grammar_node {
    uint32_t parent;
    uint32_t count;
    uint16_t site;
    uint16_t depth;
} hd_grammar_node;

typedef struct hd_grammar_thread {
    uint32_t state, node;
} hd_grammar_thread;

enum {
    /* Living frames, and frames that one byte may add. */
    HD_GRAMMAR_STEP_NODES = 512,
    HD_GRAMMAR_MAX_NODES =
        HD_GRAMMAR_MAX_DEPTH * HD_GRAMMAR_MAX_THREADS + HD_GRAMMAR_STEP_NODES + 1,
};

/* A position in a text. Only the first n_nodes nodes are defined. */
typedef struct hd_grammar_state {
    uint32_t n_nodes;
    uint32_t n_threads; /* 0: the text does not match the grammar */
    hd_grammar_thread threads[HD_GRAMMAR_MAX_THREADS];
    hd_grammar_node nodes[HD_GRAMMAR_MAX_NODES]; /* a parent comes before its children */
} hd_grammar_state;

void hd_grammar_start(const hd_grammar *g, hd_grammar_state *s);

/* Copies the defined part, usually less than a kilobyte. */
void hd_grammar_copy(hd_grammar_state *to, const hd_grammar_state *from);

/* Advances by bytes[n]. Returns false if they do not match; then s has no threads, and only
 * hd_grammar_start() or a copy resets it. */
bool hd_grammar_advance(const hd_grammar *g, hd_grammar_state *s, const uint8_t *bytes,
                        size_t n);

/* Whether the text so far is complete. */
bool hd_grammar_can_end(const hd_grammar *g, const hd_grammar_state *s);

/* The tokens as a trie of their bytes; immutable, shared. */
typedef struct hd_grammar_vocab hd_grammar_vocab;

typedef struct hd_grammar_vocab_args {
    const uint8_t *const *pieces; /* [n_pieces] NULL: an id that is never allowed */
    const size_t *piece_bytes;
    int32_t n_pieces;
    int32_t n_rows;     /* of the logits, at least n_pieces */
    const int32_t *eos; /* [n_eos] */
    int32_t n_eos;
} hd_grammar_vocab_args;

hd_status hd_grammar_vocab_open(hd_grammar_vocab **out, const hd_grammar_vocab_args *args,
                                hd_err *err);

/* Of a tokenizer: all tokens but the added ones, of which only the markers of calls are
 * included. */
hd_status hd_grammar_vocab_open_tokenizer(hd_grammar_vocab **out, const hd_tokenizer *t,
                                          int32_t n_rows, const int32_t *eos, int32_t n_eos,
                                          hd_err *err);
void hd_grammar_vocab_close(hd_grammar_vocab *v); /* NULL is fine */

uint32_t hd_grammar_vocab_marks(const hd_grammar_vocab *v); /* bits */

/* Like hd_grammar_advance() with the bytes of a token. End-of-sequence tokens leave s
 * unchanged; ids that are never allowed do not match. */
bool hd_grammar_advance_token(const hd_grammar_vocab *v, const hd_grammar *g,
                              hd_grammar_state *s, int32_t id);

/* Follows a text outside the grammar (reasoning or free content) in which tool calls may
 * open. */
enum { HD_GRAMMAR_OPENINGS = 2 };
typedef struct hd_grammar_watch {
    uint8_t met[HD_GRAMMAR_OPENINGS]; /* bytes matched of each marker that opens calls */
} hd_grammar_watch;

/* Advances by one token; *w is zero at the start of the text. Returns true if a marker that
 * opens calls of g ends in the token. Then s is the state behind the token, inside the
 * calls. */
bool hd_grammar_watch_token(const hd_grammar_vocab *v, const hd_grammar *g, hd_grammar_watch *w,
                            hd_grammar_state *s, int32_t id);

/* Words of one mask: ceil(n_rows / 32). */
int32_t hd_grammar_vocab_words(const hd_grammar_vocab *v);

/* A cache of computed masks, for any number of grammars; one thread owns it. All memory is
 * allocated at open; the least recently used mask is evicted. */
typedef struct hd_grammar_masks hd_grammar_masks;

typedef struct hd_grammar_masks_stats {
    int64_t hits, misses, evictions;
} hd_grammar_masks_stats;

hd_status hd_grammar_masks_open(hd_grammar_masks **out, const hd_grammar_vocab *v,
                                size_t max_bytes, hd_err *err);
void hd_grammar_masks_close(hd_grammar_masks *m); /* NULL is fine */

/* Writes the mask [words] of the tokens that may follow s: bit id % 32 of word id / 32. */
void hd_grammar_mask(hd_grammar_masks *m, const hd_grammar *g, const hd_grammar_state *s,
                     uint32_t *mask);

/* Removes from a mask of s the tokens after which fewer than least characters could follow,
 * unless none would be left. For texts that must not end yet (min_tokens). */
void hd_grammar_mask_least(const hd_grammar_vocab *v, const hd_grammar *g,
                           const hd_grammar_state *s, uint32_t least, hd_grammar_state *scratch,
                           uint32_t *mask);
hd_grammar_masks_stats hd_grammar_masks_get_stats(const hd_grammar_masks *m);

#endif
