/* unicode.c - see unicode.h: categories by name and number, UTF-8 checked. */
#include "tokenizer/unicode.h"

#include <string.h>

static const char category_names[][3] = {
    "Cn", "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps",
    "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Co"};

uint32_t text_category_set(const char *name, size_t n) {
    uint32_t set = 0;
    if (n != 1 && n != 2) return 0;
    for (size_t i = 0; i < HD_LEN(category_names); i++) {
        if (memcmp(category_names[i], name, n) == 0) set |= 1u << i;
    }
    return set;
}

text_category text_category_of(uint32_t cp) {
    int32_t low = 0, high = text_unicode_n_ranges; /* the result is in [low, high) */
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2;
        if (text_unicode_ranges[middle] >> 5 <= cp) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return (text_category)(text_unicode_ranges[low] & 31);
}

bool text_is_space(uint32_t cp) {
    if (cp < 0x80) return cp == ' ' || (cp >= 9 && cp <= 13);
    return cp == 0x85 || cp == 0xa0 || cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200a) ||
           cp == 0x2028 || cp == 0x2029 || cp == 0x202f || cp == 0x205f || cp == 0x3000;
}

/* Alphabetic, marks, decimal digits, connectors, joiners. Alphabetic beyond the letter
 * categories is Nl, marks, and the enclosed letters among the symbols. */
bool text_is_word(uint32_t cp) {
    const uint32_t set = 1u << TEXT_LU | 1u << TEXT_LL | 1u << TEXT_LT | 1u << TEXT_LM |
                         1u << TEXT_LO | 1u << TEXT_MN | 1u << TEXT_MC | 1u << TEXT_ME |
                         1u << TEXT_ND | 1u << TEXT_NL | 1u << TEXT_PC;
    if (set >> text_category_of(cp) & 1) return true;
    return cp == 0x200c || cp == 0x200d || (cp >= 0x24b6 && cp <= 0x24e9) ||
           (cp >= 0x1f130 && cp <= 0x1f149) || (cp >= 0x1f150 && cp <= 0x1f169) ||
           (cp >= 0x1f170 && cp <= 0x1f189);
}

/* Returns the length of the well-formed character at p[n]; 0 if there is none (Unicode, table
 * 3-7). */
static size_t character_length(const uint8_t *p, size_t n) {
    uint8_t low = 0x80, high = 0xbf;
    size_t length = 2;
    if (p[0] >= 0xc2 && p[0] <= 0xdf) {
        length = 2;
    } else if (p[0] >= 0xe0 && p[0] <= 0xef) {
        length = 3;
        if (p[0] == 0xe0) low = 0xa0;
        if (p[0] == 0xed) high = 0x9f;
    } else if (p[0] >= 0xf0 && p[0] <= 0xf4) {
        length = 4;
        if (p[0] == 0xf0) low = 0x90;
        if (p[0] == 0xf4) high = 0x8f;
    } else {
        return 0;
    }
    if (n < length || p[1] < low || p[1] > high) return 0;
    for (size_t i = 2; i < length; i++) {
        if ((p[i] & 0xc0) != 0x80) return 0;
    }
    return length;
}

size_t text_utf8_valid(const char *text, size_t n) {
    const uint8_t *p = (const uint8_t *)text;
    const uint64_t high_bits = 0x8080808080808080u;
    size_t at = 0;
    while (at < n) {
        uint64_t word;
        if (n - at >= sizeof word) {
            memcpy(&word, p + at, sizeof word);
            if ((word & high_bits) == 0) {
                at += sizeof word;
                continue;
            }
        }
        if (p[at] < 0x80) {
            at++;
            continue;
        }
        size_t length = character_length(p + at, n - at);
        if (length == 0) return at;
        at += length;
    }
    return n;
}

size_t text_utf8_put(uint8_t *out, uint32_t cp) {
    if (cp < 0x80) {
        out[0] = (uint8_t)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (uint8_t)(0xc0 | cp >> 6);
        out[1] = (uint8_t)(0x80 | (cp & 0x3f));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (uint8_t)(0xe0 | cp >> 12);
        out[1] = (uint8_t)(0x80 | (cp >> 6 & 0x3f));
        out[2] = (uint8_t)(0x80 | (cp & 0x3f));
        return 3;
    }
    out[0] = (uint8_t)(0xf0 | cp >> 18);
    out[1] = (uint8_t)(0x80 | (cp >> 12 & 0x3f));
    out[2] = (uint8_t)(0x80 | (cp >> 6 & 0x3f));
    out[3] = (uint8_t)(0x80 | (cp & 0x3f));
    return 4;
}
