/* status.c - records the first failure as one printable sentence. */
#include "base/status.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Returns the number of bytes of the printable character at p: 0 for a control character (C1
 * too), and for bytes that are not UTF-8, which file names and truncated text may contain. */
static size_t printable(const unsigned char *p) {
    if (*p < 0x80) return *p >= 0x20 && *p != 0x7f;
    size_t n = *p >= 0xf0 ? 4 : *p >= 0xe0 ? 3 : 2;
    unsigned char low = *p == 0xc2 || *p == 0xe0 ? 0xa0 : *p == 0xf0 ? 0x90 : 0x80;
    unsigned char high = *p == 0xed ? 0x9f : *p == 0xf4 ? 0x8f : 0xbf;
    if (*p < 0xc2 || *p > 0xf4 || p[1] < low || p[1] > high) return 0;
    for (size_t i = 2; i < n; i++) {
        if ((p[i] & 0xc0) != 0x80) return 0;
    }
    return n;
}

/* Escapes unprintable bytes, so that a hostile tensor name cannot forge a log line or
 * control a terminal, and every sentence is UTF-8. */
static void escape(char *out, size_t cap, const char *text) {
    static const char hex[] = "0123456789abcdef";
    size_t n = 0;
    for (const unsigned char *p = (const unsigned char *)text; *p;) {
        size_t size = printable(p), need = size ? size : 4;
        if (n + need + 1 > cap) break;
        if (size) {
            memcpy(out + n, p, size);
        } else {
            out[n] = '\\';
            out[n + 1] = 'x';
            out[n + 2] = hex[*p >> 4];
            out[n + 3] = hex[*p & 15];
        }
        n += need;
        p += size ? size : 1;
    }
    out[n] = '\0';
}

enum { SHORTER = 1700, HEAD = 200 };

static bool begins_character(char c) {
    return ((unsigned char)c & 0xc0) != 0x80;
}

/* The beginning says where, the end says why: the middle is left out. */
static void shorten(char *out, size_t cap, const char *text) {
    static const char gap[] = "[...]";
    const size_t n = strlen(text);
    size_t head = HEAD, tail = n;
    if (n < cap) {
        memcpy(out, text, n + 1);
        return;
    }
    while (head > 0 && !begins_character(text[head])) head--;
    tail -= cap - sizeof gap - head;
    while (!begins_character(text[tail])) tail++;
    memcpy(out, text, head);
    memcpy(out + head, gap, sizeof gap - 1);
    memcpy(out + head + sizeof gap - 1, text + tail, n - tail + 1);
}

HD_PRINTF(4, 0)
static void record(hd_err *err, hd_status status, const char *where, const char *fmt,
                   va_list args) {
    char text[SHORTER] = "", shorter[SHORTER] = "", escaped[4 * SHORTER] = "", *whole = NULL;
    va_list again;
    va_copy(again, args);
    const int n = vsnprintf(text, sizeof text, fmt, args);
    if (n >= SHORTER) whole = malloc((size_t)n + 1); /* without memory the end is lost */
    if (whole) vsnprintf(whole, (size_t)n + 1, fmt, again);
    va_end(again);
    err->status = status;
    err->where = where;
    shorten(shorter, sizeof shorter, whole ? whole : text);
    free(whole);
    escape(escaped, sizeof escaped, shorter);
    shorten(err->msg, sizeof err->msg, escaped);
}

hd_status hd_fail(hd_err *err, hd_status status, const char *where, const char *fmt, ...) {
    va_list args;
    if (!err || err->status != HD_OK) return status;
    va_start(args, fmt);
    record(err, status, where, fmt, args);
    va_end(args);
    return status;
}

hd_status hd_refuse(hd_err *err, hd_status status, const char *where, const char *code,
                    const char *field, const char *fmt, ...) {
    va_list args;
    if (!err || err->status != HD_OK) return status;
    va_start(args, fmt);
    record(err, status, where, fmt, args);
    va_end(args);
    err->code = code;
    hd_err_set_field(err, field ? field : "");
    return status;
}

void hd_err_set_field(hd_err *err, const char *field) {
    if (!err || *err->field) return;
    snprintf(err->field, sizeof err->field, "%s", field);
}

hd_field hd_field_of(const char *fmt, ...) {
    hd_field field;
    va_list args;
    va_start(args, fmt);
    vsnprintf(field.path, sizeof field.path, fmt, args);
    va_end(args);
    return field;
}
