/* status.c - records the first failure as one printable sentence. */
#include "base/status.h"

#include <stdio.h>

/* Escapes control characters in place of their bytes, so that a hostile tensor name cannot
 * forge a log line or drive a terminal. UTF-8 passes through. */
static void escape(char *out, size_t cap, const char *text) {
    static const char hex[] = "0123456789abcdef";
    size_t n = 0;
    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        size_t need = *p < 0x20 || *p == 0x7f ? 4 : 1;
        if (n + need + 1 > cap) break;
        if (need == 1) {
            out[n++] = (char)*p;
        } else {
            out[n++] = '\\';
            out[n++] = 'x';
            out[n++] = hex[*p >> 4];
            out[n++] = hex[*p & 15];
        }
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
