/* base64.c - decodes base64, four characters at a time. */
#include "base/base64.h"

static int value_of(char c) {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Returns how many of the last four characters are padding, 0 to 2; -1: no base64. */
static int padding_of(const char *text, size_t n) {
    if (n == 0) return 0;
    if (n % 4) return -1;
    if (text[n - 1] != '=') return 0;
    return text[n - 2] == '=' ? 2 : 1;
}

bool hd_base64_decode(uint8_t *out, size_t *n_out, const char *text, size_t n) {
    const int padding = padding_of(text, n);
    *n_out = 0;
    if (padding < 0) return false;
    for (size_t i = 0; i < n; i += 4) {
        const int here = i + 4 == n ? padding : 0;
        uint32_t word = 0;
        for (int k = 0; k < 4; k++) {
            const int v = k >= 4 - here ? 0 : value_of(text[i + (size_t)k]);
            if (v < 0) return false;
            word = word << 6 | (uint32_t)v;
        }
        if (word & ((1u << 8 * here) - 1)) return false;
        for (int k = 0; k < 3 - here; k++) out[(*n_out)++] = (uint8_t)(word >> (16 - 8 * k));
    }
    return true;
}

void hd_base64_encode(char *out, const uint8_t *bytes, size_t n) {
    static const char alphabet[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        const size_t some = n - i < 3 ? n - i : 3;
        uint32_t word = (uint32_t)bytes[i] << 16;
        if (some > 1) word |= (uint32_t)bytes[i + 1] << 8;
        if (some > 2) word |= bytes[i + 2];
        for (size_t k = 0; k < 4; k++) {
            *out++ = k <= some ? alphabet[word >> (18 - 6 * k) & 63] : '=';
        }
    }
}
