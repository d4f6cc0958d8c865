/* status.c - records the first failure as one printable sentence. */
#include "base/status.h"

#include <stdio.h>
#include <string.h>

/* The bytes of the printable character at p: 0 for a control character (C1 too) and for bytes
 * that are not UTF-8, of which file names and cut sentences may consist. */
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

/* Escapes what is not printable in place of its bytes, so that a hostile tensor name cannot
 * forge a log line or drive a terminal, and every sentence is UTF-8. */
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

hd_status hd_fail(hd_err *err, hd_status code, const char *where, const char *fmt, ...) {
    if (!err || err->code != HD_OK) return code;
    char text[sizeof err->msg];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    err->code = code;
    err->where = where;
    escape(err->msg, sizeof err->msg, text);
    return code;
}
