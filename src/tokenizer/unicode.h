/* unicode.h - UTF-8 and the character classes that pre-tokenizers use. Categories are those
 * of the reference library's Unicode version, not of this computer's libraries, so that the
 * same text always has the same tokens. */
#ifndef HD_TOKENIZER_UNICODE_H
#define HD_TOKENIZER_UNICODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { TEXT_UNICODE_END = 0x110000 };

/* In the order of the table's numbers; a set of categories has bit 1 << category. */
typedef enum text_category {
    TEXT_CN,
    TEXT_LU,
    TEXT_LL,
    TEXT_LT,
    TEXT_LM,
    TEXT_LO,
    TEXT_MN,
    TEXT_MC,
    TEXT_ME,
    TEXT_ND,
    TEXT_NL,
    TEXT_NO,
    TEXT_PC,
    TEXT_PD,
    TEXT_PS,
    TEXT_PE,
    TEXT_PI,
    TEXT_PF,
    TEXT_PO,
    TEXT_SM,
    TEXT_SC,
    TEXT_SK,
    TEXT_SO,
    TEXT_ZS,
    TEXT_ZL,
    TEXT_ZP,
    TEXT_CC,
    TEXT_CF,
    TEXT_CO,
} text_category;

extern const uint32_t text_unicode_ranges[];
extern const int32_t text_unicode_n_ranges;

extern const uint32_t text_fold_chars[], text_fold_pool[];
extern const uint16_t text_fold_ends[];
extern const int32_t text_fold_n_chars;

/* Returns the categories of a name of one or two letters ("L", "Nd"); 0 if there is none. */
uint32_t text_category_set(const char *name, size_t n);

text_category text_category_of(uint32_t cp);

/* Return White_Space, and the word characters of the added tokens' single_word rule. */
bool text_is_space(uint32_t cp);
bool text_is_word(uint32_t cp);

/* Writes what a character becomes when texts are compared loosely: compatibility decomposition
 * (NFKD) without combining marks, in lower case. At most TEXT_MAX_FOLD characters; returns how
 * many. */
enum { TEXT_MAX_FOLD = 18 };
int32_t text_fold(uint32_t cp, uint32_t out[TEXT_MAX_FOLD]);

/* Returns the offset of the first byte that is not valid UTF-8; n if all bytes are valid. */
size_t text_utf8_valid(const char *text, size_t n);

/* Writes 1 to 4 bytes, returns how many. cp is a scalar value. */
size_t text_utf8_put(uint8_t *out, uint32_t cp);

/* Decodes the character at text[*at] of valid UTF-8 and advances past it. */
static inline uint32_t text_utf8_next(const uint8_t *text, size_t *at) {
    const uint8_t *p = text + *at;
    if (p[0] < 0x80) {
        *at += 1;
        return p[0];
    }
    if (p[0] < 0xe0) {
        *at += 2;
        return (uint32_t)(p[0] & 0x1f) << 6 | (p[1] & 0x3f);
    }
    if (p[0] < 0xf0) {
        *at += 3;
        return (uint32_t)(p[0] & 0x0f) << 12 | (uint32_t)(p[1] & 0x3f) << 6 | (p[2] & 0x3f);
    }
    *at += 4;
    return (uint32_t)(p[0] & 0x07) << 18 | (uint32_t)(p[1] & 0x3f) << 12 |
           (uint32_t)(p[2] & 0x3f) << 6 | (p[3] & 0x3f);
}

/* Returns the start of the character that ends at text[at], at > 0, in valid UTF-8. */
static inline size_t text_utf8_back(const uint8_t *text, size_t at) {
    do {
        at--;
    } while (at > 0 && (text[at] & 0xc0) == 0x80);
    return at;
}

#endif
