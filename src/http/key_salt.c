/* key_salt.c - see key_salt.h. */
#include "http/key_salt.h"

#include <stdlib.h>
#include <string.h>

uint64_t http_key_salt(const uint8_t digest[HTTP_KEY_DIGEST]) {
    uint64_t salt;
    memcpy(&salt, digest, sizeof salt);
    return salt | 1;
}

uint64_t http_key_salt_of(const char *digest) {
    const size_t n = 2 * (size_t)HTTP_KEY_DIGEST;
    uint8_t bytes[HTTP_KEY_DIGEST];
    if (strlen(digest) != n || strspn(digest, "0123456789abcdefABCDEF") != n) return 0;
    for (size_t i = 0; i < HTTP_KEY_DIGEST; i++) {
        const char two[] = {digest[2 * i], digest[2 * i + 1], '\0'};
        bytes[i] = (uint8_t)strtoul(two, NULL, 16);
    }
    return http_key_salt(bytes);
}
