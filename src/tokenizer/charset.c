/* charset.c - parses characters and character classes of a pattern into sets of code points.
 * The syntax is Oniguruma's. What it interprets differently from other engines (\h, nested
 * classes, &&, POSIX brackets) is refused. */
#include "tokenizer/pattern_internal.h"

#include <stdlib.h>
#include <string.h>

void text_charset_add(text_charset *s, uint32_t first, uint32_t last) {
    for (uint32_t c = first; c <= last;) {
        if (c % 64 == 0 && last - c >= 63) {
            s->bits[c / 64] = UINT64_MAX;
            c += 64;
        } else {
            s->bits[c / 64] |= (uint64_t)1 << c % 64;
            c++;
        }
    }
}

void text_charset_add_categories(text_charset *s, uint32_t set) {
    for (int32_t i = 0; i < text_unicode_n_ranges; i++) {
        if (!(set >> (text_unicode_ranges[i] & 31) & 1)) continue;
        uint32_t end = i + 1 < text_unicode_n_ranges ? text_unicode_ranges[i + 1] >> 5
                                                     : (uint32_t)TEXT_UNICODE_END;
        text_charset_add(s, text_unicode_ranges[i] >> 5, end - 1);
    }
}

static void add_space(text_charset *s) {
    for (uint32_t c = 0; c <= 0x3000; c++) {
        if (text_is_space(c)) text_charset_add(s, c, c);
    }
}

static void invert(text_charset *s) {
    for (size_t i = 0; i < HD_LEN(s->bits); i++) s->bits[i] = ~s->bits[i];
    for (size_t i = 0xd800 / 64; i < 0xe000 / 64; i++) s->bits[i] = 0; /* no characters */
}

hd_status text_pattern_refuse(const text_reader *r, const char *what, hd_err *err) {
    return HD_FAIL(err, HD_EUNSUPPORTED,
                   "unsupported pre-tokenizer pattern: %s at byte %zu of it", what, r->at);
}

static bool starts(const text_reader *r, const char *word) {
    size_t n = strlen(word);
    return r->n - r->at >= n && memcmp(r->source + r->at, word, n) == 0;
}

/* Parses \p{Name}, \P{Name}, \p{^Name}; r is after the p. */
static hd_status read_property(text_reader *r, text_charset *set, bool negated, hd_err *err) {
    if (!starts(r, "{")) return text_pattern_refuse(r, "property", err);
    size_t at = r->at + 1;
    if (at < r->n && r->source[at] == '^') {
        negated = !negated;
        at++;
    }
    const char *close = memchr(r->source + at, '}', r->n - at);
    size_t length = close ? (size_t)(close - r->source) - at : 0;
    uint32_t categories = close ? text_category_set(r->source + at, length) : 0;
    if (categories == 0) return text_pattern_refuse(r, "property", err);
    text_charset_add_categories(set, negated ? ~categories : categories);
    for (size_t i = 0xd800 / 64; i < 0xe000 / 64; i++) set->bits[i] = 0;
    r->at = at + length + 1;
    return HD_OK;
}

/* Parses digits in base 16, at least min and at most max of them. */
static bool read_hex(text_reader *r, size_t min, size_t max, uint32_t *out) {
    uint32_t v = 0;
    size_t n = 0;
    for (; n < max && r->at < r->n; n++, r->at++) {
        char c = r->source[r->at];
        uint32_t digit;
        if (c >= '0' && c <= '9') {
            digit = (uint32_t)(c - '0');
        } else if ((c | 32) >= 'a' && (c | 32) <= 'f') {
            digit = (uint32_t)((c | 32) - 'a' + 10);
        } else {
            break;
        }
        v = v << 4 | digit;
    }
    *out = v;
    return n >= min && v < TEXT_UNICODE_END && !(v >= 0xd800 && v < 0xe000);
}

/* Parses \xHH below 0x80 (above, Oniguruma means a byte), \x{H...}, \uHHHH; r is after the
 * letter. */
static hd_status read_code(text_reader *r, char letter, uint32_t *cp, hd_err *err) {
    bool fine;
    if (letter == 'u') {
        fine = read_hex(r, 4, 4, cp);
    } else if (starts(r, "{")) {
        r->at++;
        fine = read_hex(r, 1, 6, cp) && starts(r, "}");
        r->at += fine;
    } else {
        fine = read_hex(r, 1, 2, cp) && *cp < 0x80;
    }
    return fine ? HD_OK : text_pattern_refuse(r, "character code", err);
}

/* Parses the character after a backslash, at r. */
static hd_status read_escape(text_reader *r, text_charset *set, uint32_t *single, hd_err *err) {
    static const char names[] = "nrtfvae", codes[] = "\n\r\t\f\v\a\x1b";
    if (r->n - r->at < 2) return text_pattern_refuse(r, "backslash at the end", err);
    char c = r->source[r->at + 1];
    const char *known = c ? strchr(names, c) : NULL;
    *single = UINT32_MAX;
    if (c == 's' || c == 'S') {
        r->at += 2;
        text_charset *space = calloc(1, sizeof *space);
        if (!space) return HD_FAIL(err, HD_ENOMEM, "no memory for a character class");
        add_space(space);
        if (c == 'S') invert(space);
        for (size_t i = 0; i < HD_LEN(set->bits); i++) set->bits[i] |= space->bits[i];
        free(space);
    } else if (c == 'd') {
        r->at += 2;
        text_charset_add_categories(set, 1u << TEXT_ND);
    } else if (c == 'p' || c == 'P') {
        r->at += 2;
        return read_property(r, set, c == 'P', err);
    } else if (c == 'x' || c == 'u') {
        r->at += 2;
        HD_TRY(read_code(r, c, single, err));
    } else if (known) {
        r->at += 2;
        *single = (uint8_t)codes[known - names];
    } else if (c > ' ' && c < 0x7f && !((c | 32) >= 'a' && (c | 32) <= 'z') &&
               !(c >= '0' && c <= '9') && c != '<' && c != '>') {
        r->at += 2;
        *single = (uint8_t)c;
    } else {
        return text_pattern_refuse(r, "escape", err);
    }
    if (*single != UINT32_MAX) text_charset_add(set, *single, *single);
    return HD_OK;
}

static uint32_t read_character(text_reader *r) {
    return text_utf8_next((const uint8_t *)r->source, &r->at);
}

/* Parses one member of a bracket class: a character, a range or a class escape. */
static hd_status read_member(text_reader *r, text_charset *set, hd_err *err) {
    uint32_t first, last;
    if (r->source[r->at] == '\\') {
        HD_TRY(read_escape(r, set, &first, err));
    } else if (starts(r, "[") || starts(r, "&&")) {
        return text_pattern_refuse(r, "class inside a class", err);
    } else {
        first = read_character(r);
        text_charset_add(set, first, first);
    }
    bool range = starts(r, "-") && r->n - r->at >= 2 && r->source[r->at + 1] != ']';
    if (!range) return HD_OK;
    if (first == UINT32_MAX || first == '-') return text_pattern_refuse(r, "range", err);
    r->at++;
    if (r->source[r->at] == '\\') {
        HD_TRY(read_escape(r, set, &last, err));
    } else if (starts(r, "[") || starts(r, "&&")) {
        return text_pattern_refuse(r, "class inside a class", err);
    } else {
        last = read_character(r);
    }
    if (last == UINT32_MAX || last < first) return text_pattern_refuse(r, "range", err);
    text_charset_add(set, first, last);
    return HD_OK;
}

static hd_status read_bracket(text_reader *r, text_charset *set, hd_err *err) {
    text_reader start = *r;
    r->at++;
    bool negated = starts(r, "^");
    r->at += negated;
    if (starts(r, "]")) return text_pattern_refuse(&start, "empty class", err);
    while (r->at < r->n && r->source[r->at] != ']') HD_TRY(read_member(r, set, err));
    if (r->at >= r->n) return text_pattern_refuse(&start, "class without an end", err);
    r->at++;
    if (negated) invert(set);
    return HD_OK;
}

hd_status text_atom_read(text_reader *r, text_charset *set, uint32_t *single, hd_err *err) {
    char c = r->source[r->at];
    *set = (text_charset){0};
    *single = UINT32_MAX;
    if (c == '[') return read_bracket(r, set, err);
    if (c == '\\') return read_escape(r, set, single, err);
    if (c == '.') {
        r->at++;
        text_charset_add(set, '\n', '\n');
        invert(set);
        return HD_OK;
    }
    if (c && strchr("()?*+{}^$|]", c)) return text_pattern_refuse(r, "construct", err);
    *single = read_character(r);
    text_charset_add(set, *single, *single);
    return HD_OK;
}

/* Parses a decimal number; false if there is none or it exceeds 1000. */
static bool read_count(text_reader *r, size_t *out) {
    size_t v = 0, digits = 0;
    for (; r->at < r->n && r->source[r->at] >= '0' && r->source[r->at] <= '9'; r->at++) {
        v = v * 10 + (size_t)(r->source[r->at] - '0');
        if (++digits > 4 || v > 1000) return false;
    }
    *out = v;
    return digits > 0;
}

hd_status text_repeat_read(text_reader *r, size_t *min, size_t *max, hd_err *err) {
    *min = *max = 1;
    if (r->at >= r->n) return HD_OK;
    text_reader start = *r;
    switch (r->source[r->at]) {
    case '?':
        *min = 0;
        break;
    case '*':
        *min = 0;
        *max = SIZE_MAX;
        break;
    case '+':
        *max = SIZE_MAX;
        break;
    case '{':
        r->at++;
        if (!read_count(r, min)) return text_pattern_refuse(&start, "repetition", err);
        *max = *min;
        if (starts(r, ",")) {
            r->at++;
            if (starts(r, "}")) {
                *max = SIZE_MAX;
            } else if (!read_count(r, max)) {
                return text_pattern_refuse(&start, "repetition", err);
            }
        }
        if (!starts(r, "}") || *max < *min || *max == 0) {
            return text_pattern_refuse(&start, "repetition", err);
        }
        break;
    default:
        return HD_OK;
    }
    r->at++;
    return HD_OK;
}
