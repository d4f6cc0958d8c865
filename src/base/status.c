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

hd_status hd_fail(hd_err *err, hd_status code, const char *where, const char *fmt, ...) {
    if (!err || err->code != HD_OK) return code;
    char text[SHORTER] = "", shorter[SHORTER] = "", escaped[4 * SHORTER] = "", *whole = NULL;
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    const int n = vsnprintf(text, sizeof text, fmt, args);
    if (n >= SHORTER) whole = malloc((size_t)n + 1); /* without memory the end is lost */
    if (whole) vsnprintf(whole, (size_t)n + 1, fmt, again);
    va_end(again);
    va_end(args);
    err->code = code;
    err->where = where;
    shorten(shorter, sizeof shorter, whole ? whole : text);
    free(whole);
    escape(escaped, sizeof escaped, shorter);
    shorten(err->msg, sizeof err->msg, escaped);
    return code;
}
