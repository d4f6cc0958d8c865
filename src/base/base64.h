/* base64.h - base64 with padding (RFC 4648), as JSON bodies carry bytes. */
#ifndef HD_BASE_BASE64_H
#define HD_BASE_BASE64_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes that text[n] decodes to at most. */
static inline size_t hd_base64_room(size_t n) {
    return n / 4 * 3;
}

/* Decodes text[n] to out, of hd_base64_room(n) bytes. Returns false unless it is groups of four
 * characters of the standard alphabet, only the last padded and without stray bits. */
bool hd_base64_decode(uint8_t *out, size_t *n_out, const char *text, size_t n);

/* Characters that n bytes encode to. */
static inline size_t hd_base64_length(size_t n) {
    return (n + 2) / 3 * 4;
}

/* Encodes bytes[n] to out, of hd_base64_length(n) characters and no NUL. */
void hd_base64_encode(char *out, const uint8_t *bytes, size_t n);

#endif
