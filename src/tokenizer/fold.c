/* fold.c - what a character becomes when texts are compared loosely. */
#include "tokenizer/unicode.h"

enum {
    HANGUL = 0xac00, /* syllables: leading * 588 + vowel * 28 + trailing, 0 for none */
    HANGUL_END = 0xd7a4,
    LEADING = 0x1100,
    VOWEL = 0x1161,
    TRAILING = 0x11a7
};

static int32_t fold_hangul(uint32_t cp, uint32_t *out) {
    const uint32_t at = cp - HANGUL, trailing = at % 28;
    out[0] = LEADING + at / 588;
    out[1] = VOWEL + at % 588 / 28;
    out[2] = TRAILING + trailing;
    return trailing ? 3 : 2;
}

static bool is_mark(uint32_t cp) {
    const text_category c = text_category_of(cp);
    return c == TEXT_MN || c == TEXT_MC || c == TEXT_ME;
}

int32_t text_fold(uint32_t cp, uint32_t out[TEXT_MAX_FOLD]) {
    int32_t low = 0, high = text_fold_n_chars;
    if (cp >= HANGUL && cp < HANGUL_END) return fold_hangul(cp, out);
    if (is_mark(cp)) return 0;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (text_fold_chars[middle] < cp) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    out[0] = cp;
    if (low == text_fold_n_chars || text_fold_chars[low] != cp) return 1;
    const int32_t first = low ? text_fold_ends[low - 1] : 0, n = text_fold_ends[low] - first;
    for (int32_t i = 0; i < n; i++) out[i] = text_fold_pool[first + i];
    return n;
}
