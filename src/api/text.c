/* text.c - a growing text buffer that writes escaped JSON strings and numbers. */
#include "api/text.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chat/chat.h"

enum { FIRST_BYTES = 512 };

void api_text_deinit(api_text *t) {
    free(t->data);
    *t = (api_text){0};
}

void api_text_clear(api_text *t) {
    t->n = 0;
}

static bool make_room(api_text *t, size_t n) {
    if (t->failed) return false;
    if (n <= t->cap - t->n) return true;
    if (n > API_TEXT_MAX - t->n) {
        t->failed = true;
        return false;
    }
    size_t cap = t->cap ? t->cap : FIRST_BYTES;
    while (cap < t->n + n) cap *= 2;
    char *data = realloc(t->data, cap);
    if (!data) {
        t->failed = true;
        return false;
    }
    t->data = data;
    t->cap = cap;
    return true;
}

void api_put(api_text *t, const char *bytes, size_t n) {
    if (n == 0 || !make_room(t, n)) return;
    memcpy(t->data + t->n, bytes, n);
    t->n += n;
}

void api_repeat(api_text *t, size_t start, size_t n) {
    if (n == 0 || !make_room(t, n)) return;
    memcpy(t->data + t->n, t->data + start, n);
    t->n += n;
}

void api_puts(api_text *t, const char *text) {
    api_put(t, text, strlen(text));
}

static void put_escape(api_text *t, unsigned char c) {
    static const char from[] = "\b\f\n\r\t\"\\", to[] = "bfnrt\"\\";
    const char *at = c ? strchr(from, c) : NULL;
    char escape[8] = {'\\', 0};
    if (at) {
        escape[1] = to[at - from];
    } else {
        snprintf(escape, sizeof escape, "\\u%04x", c);
    }
    api_puts(t, escape);
}

void api_put_escaped(api_text *t, const char *utf8, size_t n) {
    size_t start = 0;
    if (n == 0) return; /* utf8 may be NULL then */
    for (size_t i = 0; i < n; i++) {
        const unsigned char c = (unsigned char)utf8[i];
        if (c >= 0x20 && c != '"' && c != '\\') continue;
        api_put(t, utf8 + start, i - start);
        put_escape(t, c);
        start = i + 1;
    }
    api_put(t, utf8 + start, n - start);
}

void api_put_string(api_text *t, const char *utf8, size_t n) {
    api_put(t, "\"", 1);
    api_put_escaped(t, utf8, n);
    api_put(t, "\"", 1);
}

void api_put_int(api_text *t, long long v) {
    char digits[24], *p = digits + sizeof digits;
    unsigned long long rest = v < 0 ? 0ULL - (unsigned long long)v : (unsigned long long)v;
    do {
        *--p = (char)('0' + rest % 10);
        rest /= 10;
    } while (rest);
    if (v < 0) *--p = '-';
    api_put(t, p, (size_t)(digits + sizeof digits - p));
}

void api_put_real(api_text *t, double v) {
    char digits[32];
    if (!isfinite(v)) v = -9999.0;
    snprintf(digits, sizeof digits, "%.9g", v);
    api_puts(t, digits);
    if (!strpbrk(digits, ".e")) api_puts(t, ".0");
}

static int put_dumped(const char *bytes, size_t n, void *text) {
    api_put(text, bytes, n);
    return ((api_text *)text)->failed ? -1 : 0;
}

void api_put_json(api_text *t, const json_t *v) {
    const size_t at = t->n;
    if (!v) {
        api_puts(t, "null");
    } else if (json_dump_callback(v, put_dumped, t, JSON_ENCODE_ANY | JSON_COMPACT) != 0) {
        t->failed = true;
    }
    if (!t->failed) t->n = at + hd_chat_bare_numbers(t->data + at, t->n - at);
}

json_t *api_parse(api_text *t) {
    json_t *v = NULL;
    api_put(t, "", 1); /* the parser needs a NUL */
    if (t->failed) return NULL;
    t->n--;
    return hd_chat_parse_json(&v, t->data, t->n, "a text", NULL) == HD_OK ? v : NULL;
}

void api_comma(api_text *t) {
    if (t->n > 0 && !strchr("[{,", t->data[t->n - 1])) api_put(t, ",", 1);
}

static void put_argument(api_text *t, const char **format, va_list *args) {
    const char *f = *format;
    if (*f == 's') {
        const char *s = va_arg(*args, const char *);
        s ? api_put_string(t, s, strlen(s)) : api_puts(t, "null");
    } else if (*f == '.') { /* .*s */
        const int n = va_arg(*args, int);
        api_put_string(t, va_arg(*args, const char *), (size_t)n);
        f += 2;
    } else if (*f == 'd') {
        api_put_int(t, va_arg(*args, int));
    } else if (*f == 'l') { /* lld */
        api_put_int(t, va_arg(*args, long long));
        f += 2;
    } else if (*f == 'g') {
        api_put_real(t, va_arg(*args, double));
    } else { /* i */
        api_puts(t, va_arg(*args, int) ? "true" : "false");
    }
    *format = f + 1;
}

void api_write(api_text *t, const char *format, ...) {
    va_list args;
    va_start(args, format);
    for (const char *f = format; *f;) {
        const size_t plain = strcspn(f, "%'");
        api_put(t, f, plain);
        f += plain;
        if (*f == '\'') {
            api_put(t, "\"", 1);
            f++;
        } else if (*f == '%') {
            f++;
            put_argument(t, &f, &args);
        }
    }
    va_end(args);
}
