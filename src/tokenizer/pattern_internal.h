/* pattern_internal.h - regular expressions by which a pre-tokenizer splits text, in the
 * syntax of the reference library (Oniguruma). Patterns made of runs of character classes,
 * as in real tokenizers, are matched by a scanner in linear time (scan.c). Others go to
 * PCRE2 (regex.c). What neither matches exactly is refused by name. Both use the character
 * classes of charset.c. */
#ifndef HD_TOKENIZER_PATTERN_INTERNAL_H
#define HD_TOKENIZER_PATTERN_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "tokenizer/unicode.h"

enum {
    TEXT_PATTERN_MAX_BYTES = 1 << 16,
    TEXT_SCAN_MAX_LEADING =
        4, /* branches that start with an unbounded run and may fail after */
};

/* A set of code points, one bit each; 136 KiB, so it lives on the heap. */
typedef struct text_charset {
    uint64_t bits[TEXT_UNICODE_END / 64];
} text_charset;

void text_charset_add(text_charset *s, uint32_t first, uint32_t last);
void text_charset_add_categories(text_charset *s, uint32_t set);

static inline bool text_charset_has(const text_charset *s, uint32_t cp) {
    return s->bits[cp / 64] >> cp % 64 & 1;
}

/* The position of a parser in a pattern. */
typedef struct text_reader {
    const char *source;
    size_t n, at;
} text_reader;

/* Parses one atom that matches one character: a literal, an escape, a bracket class or a dot.
 * *set receives its characters; *single the code point of a literal, or UINT32_MAX for a
 * class. */
hd_status text_atom_read(text_reader *r, text_charset *set, uint32_t *single, hd_err *err);

/* Parses {m,n}, ?, * or +; without one *min and *max are 1. *max is SIZE_MAX for no bound. The
 * caller parses a suffix that changes the kind of repetition. */
hd_status text_repeat_read(text_reader *r, size_t *min, size_t *max, hd_err *err);

hd_status text_pattern_refuse(const text_reader *r, const char *what, hd_err *err);

/* The scanner. *out is NULL without an error if the scanner does not support the pattern. */
typedef struct text_scan text_scan;
hd_status text_scan_open(text_scan **out, const char *source, size_t n, hd_err *err);
/* Opens a scanner for the longest runs of one class, which the Digits stage matches. */
hd_status text_scan_open_class(text_scan **out, const text_charset *set, bool single,
                               hd_err *err);
void text_scan_close(text_scan *s);

/* The regular expression engine. */
typedef struct text_regex text_regex;
typedef struct text_regex_scratch text_regex_scratch;
hd_status text_regex_open(text_regex **out, const char *source, size_t n, hd_err *err);
void text_regex_close(text_regex *x);
hd_status text_regex_scratch_open(text_regex_scratch **out, hd_err *err);
void text_regex_scratch_close(text_regex_scratch *x);

/* Exactly one of the two is set. */
typedef struct text_pattern {
    text_scan *scan;
    text_regex *regex;
} text_pattern;

/* A search in one piece, from left to right. Owned by one thread. */
typedef struct text_search {
    const text_pattern *pattern;
    text_regex_scratch *scratch; /* needed with a regex only */
    const uint8_t *text;
    size_t n, at;
    size_t last_end; /* of the last match, SIZE_MAX before the first */
    size_t dead[TEXT_SCAN_MAX_LEADING];
} text_search;

void text_search_start(text_search *s, const uint8_t *text, size_t n);

/* Returns the next match in *first and *end; *found is false if there is none. */
hd_status text_search_next(text_search *s, size_t *first, size_t *end, bool *found,
                           hd_err *err);

bool text_scan_next(const text_scan *scan, text_search *s, size_t *first, size_t *end);
hd_status text_regex_next(const text_regex *x, text_search *s, size_t *first, size_t *end,
                          bool *found, hd_err *err);

#endif
