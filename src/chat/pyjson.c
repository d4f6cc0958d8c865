/* pyjson.c - JSON as Python's json module reads and writes it, because the models saw that.
 *
 * jansson parses; numbers it cannot hold (integers beyond 64 bits, the infinities, NaN) are
 * first rewritten as strings with a marker of two noncharacters, and the writer prints what
 * follows the marker bare. A text in which a string begins with the marker itself is refused,
 * however it spells it, so nobody else can make such a string. */
#include "chat/chat_internal.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"

/* U+FDD0 U+FDD1: valid UTF-8 that no text exchanges. */
#define MARKER "\xef\xb7\x90\xef\xb7\x91"

enum {
    MARKER_BYTES = sizeof MARKER - 1,
    MAX_DIGITS = 4300, /* of an integer; Python refuses more */
    MAX_DEPTH = 4096,
    FIRST_FRAMES = 32
};

bool pyjson_is_number(const json_t *value) {
    return json_is_string(value) && json_string_length(value) > MARKER_BYTES &&
           memcmp(json_string_value(value), MARKER, MARKER_BYTES) == 0;
}

/* --- writing --- */

static void put_text(chat_out *o, const char *text) {
    chat_content_bytes(o, text, strlen(text));
}

static void write_string(chat_out *o, const char *s, size_t n) {
    static const char shorts[] = "\b\f\n\r\t\"\\", letters[] = "bfnrt\"\\";
    size_t start = 0;
    put_text(o, "\"");
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c != '"' && c != '\\') continue;
        chat_content_bytes(o, s + start, i - start);
        start = i + 1;
        char escape[8] = {'\\', 0};
        const char *at = c ? strchr(shorts, c) : NULL;
        if (at) {
            escape[1] = letters[at - shorts];
        } else {
            snprintf(escape, sizeof escape, "\\u%04x", c);
        }
        put_text(o, escape);
    }
    chat_content_bytes(o, s + start, n - start);
    put_text(o, "\"");
}

/* The fewest digits that read back as d, as d.ddde+x. Just above a power of two the nearest
 * short decimal can lie outside while the next one up reads back, so that is tried too. */
static void shortest(char *out, size_t cap, double d) {
    for (int digits = 0; digits < 17; digits++) {
        snprintf(out, cap, "%.*e", digits, d);
        if (strtod(out, NULL) == d) return;
        char *last = strchr(out, 'e') - 1;
        if (*last < '0' || *last >= '9') continue;
        ++*last;
        if (strtod(out, NULL) == d) return;
    }
}

/* repr(float): positional from 1e-4 to below 1e16, exponent form elsewhere. */
static void write_real(chat_out *o, double d) {
    char sci[40], digits[24] = "", text[48];
    int n = 0;
    if (d == 0) {
        put_text(o, signbit(d) ? "-0.0" : "0.0");
        return;
    }
    shortest(sci, sizeof sci, fabs(d));
    const char *e = strchr(sci, 'e');
    int exponent = (int)strtol(e + 1, NULL, 10);
    for (const char *c = sci; c < e; c++) {
        if (*c != '.') digits[n++] = *c;
    }
    while (n > 1 && digits[n - 1] == '0') n--;
    const char *sign = d < 0 ? "-" : "";
    if (exponent < -4 || exponent >= 16) {
        snprintf(text, sizeof text, "%s%c%s%.*se%+03d", sign, digits[0], n > 1 ? "." : "",
                 n - 1, digits + 1, exponent);
    } else if (exponent < 0) {
        snprintf(text, sizeof text, "%s0.%.*s%.*s", sign, -exponent - 1, "0000", n, digits);
    } else if (n <= exponent + 1) {
        snprintf(text, sizeof text, "%s%.*s%.*s.0", sign, n, digits, exponent + 1 - n,
                 "0000000000000000");
    } else {
        snprintf(text, sizeof text, "%s%.*s.%.*s", sign, exponent + 1, digits, n - exponent - 1,
                 digits + exponent + 1);
    }
    put_text(o, text);
}

static void write_scalar(chat_out *o, json_t *v) {
    char text[32];
    switch (json_typeof(v)) {
    case JSON_STRING:
        if (pyjson_is_number(v)) {
            chat_content_bytes(o, json_string_value(v) + MARKER_BYTES,
                               json_string_length(v) - MARKER_BYTES);
        } else {
            write_string(o, json_string_value(v), json_string_length(v));
        }
        return;
    case JSON_INTEGER:
        snprintf(text, sizeof text, "%" JSON_INTEGER_FORMAT, json_integer_value(v));
        put_text(o, text);
        return;
    case JSON_REAL:
        write_real(o, json_real_value(v));
        return;
    case JSON_TRUE:
    case JSON_FALSE:
    case JSON_NULL:
        put_text(o, json_is_true(v) ? "true" : json_is_false(v) ? "false" : "null");
        return;
    case JSON_OBJECT: /* an empty one */
        put_text(o, "{}");
        return;
    case JSON_ARRAY:
        put_text(o, "[]");
        return;
    }
}

static bool push(chat_out *o, int32_t depth, json_t *container) {
    if (depth >= MAX_DEPTH) {
        o->status = HD_FAIL(o->err, HD_EINVAL, "JSON nested deeper than %d", MAX_DEPTH);
        return false;
    }
    if (depth == o->frame_cap) {
        int32_t cap = depth ? depth * 2 : FIRST_FRAMES;
        pyjson_frame *frames = realloc(o->frames, (size_t)cap * sizeof *frames);
        if (!frames) {
            o->status = HD_FAIL(o->err, HD_ENOMEM, "no memory for JSON nested %d deep", depth);
            return false;
        }
        o->frames = frames;
        o->frame_cap = cap;
    }
    o->frames[depth] =
        (pyjson_frame){.container = container, .member = json_object_iter(container)};
    return true;
}

static void new_line(chat_out *o, int spaces) {
    put_text(o, "\n");
    for (int i = 0; i < spaces; i++) chat_content_bytes(o, " ", 1);
}

/* The next member's separator and key; NULL at the end. */
static json_t *next_member(chat_out *o, pyjson_frame *f, int indent, int32_t depth) {
    bool object = json_is_object(f->container);
    if (object ? !f->member : f->next >= json_array_size(f->container)) return NULL;
    if (f->next > 0) put_text(o, indent ? "," : ", ");
    if (indent) new_line(o, indent * depth);
    size_t at = f->next++;
    if (!object) return json_array_get(f->container, at);
    json_t *value = json_object_iter_value(f->member);
    write_string(o, json_object_iter_key(f->member), strlen(json_object_iter_key(f->member)));
    put_text(o, ": ");
    f->member = json_object_iter_next(f->container, f->member);
    return value;
}

void pyjson_write(chat_out *o, json_t *value, int indent) {
    int32_t depth = 0;
    for (json_t *v = value; v && o->status == HD_OK;) {
        if (json_object_size(v) > 0 || json_array_size(v) > 0) {
            if (!push(o, depth, v)) return;
            depth++;
            put_text(o, json_is_object(v) ? "{" : "[");
        } else {
            write_scalar(o, v);
        }
        for (v = NULL; depth > 0 && !v;) {
            pyjson_frame *f = &o->frames[depth - 1];
            v = next_member(o, f, indent, depth);
            if (v) break;
            depth--;
            if (indent) new_line(o, indent * depth);
            put_text(o, json_is_object(f->container) ? "}" : "]");
        }
    }
}

/* --- reading --- */

/* How many bytes U+FDD0 + i has at text[at], as itself or as an escape; 0: something else is there. */
static size_t spelled(const char *text, size_t n, size_t at, char i) {
    const char raw[3] = {'\xef', '\xb7', (char)('\x90' + i)};
    if (n - at >= 3 && memcmp(text + at, raw, 3) == 0) return 3;
    const bool escape = n - at >= 6 && text[at] == '\\' && text[at + 1] == 'u' &&
                        (text[at + 2] | 32) == 'f' && (text[at + 3] | 32) == 'd' &&
                        (text[at + 4] | 32) == 'd' && text[at + 5] == '0' + i;
    return escape ? 6 : 0;
}

/* Whether the string whose quote is text[i] begins with the marker. */
static bool begins_with_marker(const char *text, size_t n, size_t i) {
    const size_t first = spelled(text, n, i + 1, 0);
    return first > 0 && spelled(text, n, i + 1 + first, 1) > 0;
}

static size_t skip_string(const char *text, size_t n, size_t i) {
    for (i++; i < n && text[i] != '"'; i++) {
        if (text[i] == '\\') i++;
    }
    return i < n ? i + 1 : n;
}

static size_t count_digits(const char *text, size_t n, size_t i) {
    size_t k = i;
    while (k < n && text[k] >= '0' && text[k] <= '9') k++;
    return k - i;
}

/* If text[i] begins a number that jansson cannot hold: its length, and how Python writes it
 * in out[cap] (NULL: as it stands). 0 for everything else. */
static size_t odd_number(const char *text, size_t n, size_t i, bool document,
                         const char **written) {
    size_t sign = text[i] == '-', at = i + sign;
    *written = NULL;
    if (!document) {
        if (n - at >= 8 && memcmp(text + at, "Infinity", 8) == 0) return sign + 8;
        if (!sign && n - at >= 3 && memcmp(text + at, "NaN", 3) == 0) return 3;
    }
    size_t digits = count_digits(text, n, at), end = at + digits;
    if (digits == 0 || (digits > 1 && text[at] == '0')) return 0;
    bool real = false;
    if (end < n && text[end] == '.') {
        size_t fraction = count_digits(text, n, end + 1);
        if (fraction == 0) return 0;
        end += 1 + fraction;
        real = true;
    }
    if (end < n && (text[end] == 'e' || text[end] == 'E')) {
        size_t mark = end + 1 + (end + 1 < n && (text[end + 1] == '+' || text[end + 1] == '-'));
        size_t power = count_digits(text, n, mark);
        if (power == 0) return 0;
        end = mark + power;
        real = true;
    }
    errno = 0; /* the text ends in NUL, so both calls stop */
    if (real) {
        if (!isinf(strtod(text + i, NULL))) return 0;
        *written = sign ? "-Infinity" : "Infinity";
    } else {
        if (digits < 18 || digits > MAX_DIGITS) return 0;
        strtoll(text + i, NULL, 10);
        if (errno != ERANGE) return 0;
    }
    return end - i;
}

/* A number cannot be a key, and must not become one by turning into a string. */
static bool before_colon(const char *text, size_t n, size_t i) {
    while (i < n && strchr(" \t\r\n", text[i]) && text[i]) i++;
    return i < n && text[i] == ':';
}

static void append(char *out, size_t *used, const char *data, size_t n) {
    memcpy(out + *used, data, n);
    *used += n;
}

typedef struct scan {
    size_t n_odd;  /* numbers that are marked */
    size_t forged; /* where a string begins with the marker; 0: nowhere */
} scan;

/* Copies text[n] with odd numbers marked; out has room (or is NULL: only look). The copy is at
 * most n + n_odd * (MARKER_BYTES + 2 + strlen("-Infinity")). */
static size_t mark_numbers(char *out, const char *text, size_t n, bool document, scan *found) {
    size_t used = 0, copied = 0;
    *found = (scan){0};
    for (size_t i = 0; i < n;) {
        char c = text[i];
        bool number = c == '-' || (c >= '0' && c <= '9') || c == 'I' || c == 'N';
        if (c == '"') {
            const size_t quote = i;
            i = skip_string(text, n, i);
            const bool forged = begins_with_marker(text, n, quote) && !before_colon(text, n, i);
            if (forged && !found->forged) found->forged = quote + 1;
            continue;
        }
        if (!number) {
            i++;
            continue;
        }
        const char *written;
        size_t length = odd_number(text, n, i, document, &written), rest = i;
        if (length > 0 && !before_colon(text, n, i + length)) {
            found->n_odd++;
            if (out) {
                append(out, &used, text + copied, i - copied);
                append(out, &used, "\"" MARKER, 1 + MARKER_BYTES);
                append(out, &used, written ? written : text + i,
                       written ? strlen(written) : length);
                append(out, &used, "\"", 1);
                copied = i + length;
            }
            i += length;
        } else { /* past the whole word, so that its tail is no number of its own */
            while (i < n && strchr("+-.0123456789eEINaftuy", text[i]) && text[i]) i++;
            if (i == rest) i++;
        }
    }
    if (out) append(out, &used, text + copied, n - copied);
    return used;
}

/* As the library says where something is wrong. */
static void explain_forged(json_error_t *why, const char *text, size_t at) {
    *why = (json_error_t){.line = 1};
    for (size_t i = 0; i < at; i++) {
        why->column++;
        if (text[i] != '\n') continue;
        why->line++;
        why->column = 0;
    }
    snprintf(why->text, sizeof why->text - 1, "a string begins with U+FDD0 U+FDD1");
}

json_t *pyjson_parse(const char *text, size_t n, bool document, json_error_t *why) {
    size_t flags = JSON_DECODE_ANY | JSON_ALLOW_NUL | (document ? JSON_REJECT_DUPLICATES : 0);
    scan found;
    json_error_t unread;
    if (!why) why = &unread;
    mark_numbers(NULL, text, n, document, &found);
    if (found.forged) {
        explain_forged(why, text, found.forged);
        return NULL;
    }
    if (found.n_odd == 0) return hd_json_read(text, n, flags, why);
    char *marked = malloc(n + found.n_odd * (MARKER_BYTES + 2 + sizeof "-Infinity"));
    if (!marked) {
        *why = (json_error_t){.line = 0}; /* as the library says it: not a word */
        return NULL;
    }
    size_t used = mark_numbers(marked, text, n, document, &found);
    json_t *value = hd_json_read(marked, used, flags, why);
    free(marked);
    return value;
}

size_t hd_chat_bare_numbers(char *text, size_t n) {
    size_t used = 0;
    for (size_t i = 0; i < n;) {
        if (text[i] != '"') {
            text[used++] = text[i++];
            continue;
        }
        const size_t end = skip_string(text, n, i);
        if (begins_with_marker(text, n, i) && !before_colon(text, n, end)) {
            const size_t at = i + 1 + MARKER_BYTES, sign = text[at] == '-';
            const bool finite = text[at + sign] != 'I';
            if (sign) append(text, &used, "-", 1);
            i = at + sign;
            if (finite) {
                memmove(text + used, text + i, end - 1 - i);
                used += end - 1 - i;
            } else {
                append(text, &used, "1e999", 5);
            }
        } else {
            memmove(text + used, text + i, end - i);
            used += end - i;
        }
        i = end;
    }
    return used;
}
