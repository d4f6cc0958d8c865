/* grammar.h - text that must have a form: JSON of a schema, a regular expression, one of a list,
 * calls of tools as a chat format writes them, or either such a text or calls.
 *
 * A grammar is compiled once into a byte-level automaton with a stack and never changes after,
 * so any number of threads may share one. A state says where a text stands in a grammar; it is
 * plain memory and may be copied, which is how drafts are tried and taken back. A mask says
 * which tokens may come next: exactly those whose bytes hd_grammar_advance() would accept, and
 * the end-of-sequence tokens exactly where hd_grammar_can_end() holds.
 *
 * Foreign schemas and patterns are bounded in time and memory. Errors begin with a word for
 * machines and a colon: schema_too_complex, schema_too_deep, schema_cycle, unsatisfiable,
 * invalid_schema, unsupported_schema, invalid_pattern, unsupported_pattern. docs/grammar.md
 * lists what is understood. */
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
    HD_GRAMMAR_MAX_THREADS = 16, /* readings of one text that are followed at once */
    HD_GRAMMAR_MAX_SPACE = 64,   /* white space in a row, where it is free */
    HD_GRAMMAR_MAX_DIGITS = 20,  /* of a number without bounds: before the point, and behind */
    HD_GRAMMAR_MARK = 0xf8,      /* bytes from here on, which no UTF-8 has: see below */
};

typedef struct hd_grammar hd_grammar;

typedef enum hd_grammar_kind {
    HD_GRAMMAR_JSON_OBJECT, /* any JSON object */
    HD_GRAMMAR_JSON_SCHEMA, /* text: the schema */
    HD_GRAMMAR_REGEX,       /* text: a pattern, which the whole answer matches */
    HD_GRAMMAR_CHOICE,      /* choices */
    HD_GRAMMAR_CALLS        /* no text: calls only */
} hd_grammar_kind;

/* Calls that may come instead of a text: one block of them, from its opening to its end. The name
 * of a call is one of tools. Arguments of a strict function are an object of its parameters'
 * schema; those of others any object, or with hold one of their schema as far as a grammar can
 * express it.
 *
 * A marker of the format that is one token, a control token, is one byte to the automaton:
 * HD_GRAMMAR_MARK and its number. Where it is none it is its text. */
typedef struct hd_grammar_calls {
    const char *tools; /* [n_tools] a JSON array of functions with name, strict, parameters; */
    size_t n_tools;    /* NULL: no calls */
    hd_reply_format format;
    uint32_t marks; /* which markers are tokens: hd_grammar_vocab_marks() */
    bool flagged;   /* a marker that is spelled in plain text is none, as in hd_reply_options */
    bool hold;      /* the arguments of functions that are not strict, too */
    int32_t most;   /* calls, at least one */
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
int32_t hd_grammar_n_states(const hd_grammar *g);

/* A frame of the stack: the place in the grammar that called, and how often it repeated. */
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
    /* Frames that live, and those that one byte may add. */
    HD_GRAMMAR_STEP_NODES = 512,
    HD_GRAMMAR_MAX_NODES =
        HD_GRAMMAR_MAX_DEPTH * HD_GRAMMAR_MAX_THREADS + HD_GRAMMAR_STEP_NODES + 1,
};

/* Where a text stands. Only the first n_nodes nodes mean something. */
typedef struct hd_grammar_state {
    uint32_t n_nodes;
    uint32_t n_threads; /* 0: the text has left the grammar */
    hd_grammar_thread threads[HD_GRAMMAR_MAX_THREADS];
    hd_grammar_node nodes[HD_GRAMMAR_MAX_NODES]; /* a parent comes before its children */
} hd_grammar_state;

void hd_grammar_start(const hd_grammar *g, hd_grammar_state *s);

/* Copies what means something, usually less than a kilobyte. */
void hd_grammar_copy(hd_grammar_state *to, const hd_grammar_state *from);

/* Moves past bytes[n]. False when they leave the grammar; then s has no threads, and only
 * start or copy bring it back. */
bool hd_grammar_advance(const hd_grammar *g, hd_grammar_state *s, const uint8_t *bytes,
                        size_t n);

/* Whether the text so far is whole. */
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

/* Of a tokenizer: all but its added tokens, of which only the markers of calls take part. */
hd_status hd_grammar_vocab_open_tokenizer(hd_grammar_vocab **out, const hd_tokenizer *t,
                                          int32_t n_rows, const int32_t *eos, int32_t n_eos,
                                          hd_err *err);
void hd_grammar_vocab_close(hd_grammar_vocab *v); /* NULL is fine */

uint32_t hd_grammar_vocab_marks(const hd_grammar_vocab *v); /* bits */

/* As hd_grammar_advance() by the bytes of a token; end-of-sequence tokens leave s as it is, and
 * ids that are never allowed leave the grammar. */
bool hd_grammar_advance_token(const hd_grammar_vocab *v, const hd_grammar *g,
                              hd_grammar_state *s, int32_t id);

/* A text that the grammar does not hold, reasoning or free content, in which calls may open. */
enum { HD_GRAMMAR_OPENINGS = 2 };
typedef struct hd_grammar_watch {
    uint8_t met[HD_GRAMMAR_OPENINGS]; /* bytes of each marker that opens calls */
} hd_grammar_watch;

/* Follows such a text by one token; *w is zero at its start. True when a marker that opens calls
 * of g ends in the token: then s stands behind the token, inside the calls. */
bool hd_grammar_watch_token(const hd_grammar_vocab *v, const hd_grammar *g, hd_grammar_watch *w,
                            hd_grammar_state *s, int32_t id);

/* Words of one mask: ceil(n_rows / 32). */
int32_t hd_grammar_vocab_words(const hd_grammar_vocab *v);

/* Masks already computed, for any number of grammars; owned by one thread. All memory is taken
 * at open; the least recently used mask makes room. */
typedef struct hd_grammar_masks hd_grammar_masks;

typedef struct hd_grammar_masks_stats {
    int64_t hits, misses, evictions;
} hd_grammar_masks_stats;

hd_status hd_grammar_masks_open(hd_grammar_masks **out, const hd_grammar_vocab *v,
                                size_t max_bytes, hd_err *err);
void hd_grammar_masks_close(hd_grammar_masks *m); /* NULL is fine */

/* Writes the mask [words] of what may follow s: bit id % 32 of word id / 32. */
void hd_grammar_mask(hd_grammar_masks *m, const hd_grammar *g, const hd_grammar_state *s,
                     uint32_t *mask);

/* Takes out of a mask of s the tokens after which fewer than least characters could come; nothing
 * where none would be left. For texts that must not end yet. */
void hd_grammar_mask_least(const hd_grammar_vocab *v, const hd_grammar *g,
                           const hd_grammar_state *s, uint32_t least, hd_grammar_state *scratch,
                           uint32_t *mask);
hd_grammar_masks_stats hd_grammar_masks_get_stats(const hd_grammar_masks *m);

#endif
