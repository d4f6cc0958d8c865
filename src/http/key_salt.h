/* key_salt.h - the salt of an API key in the prefix cache: the beginning of its digest, so that it is
 * the same after a restart. */
#ifndef HD_HTTP_KEY_SALT_H
#define HD_HTTP_KEY_SALT_H

#include <stdint.h>

enum { HTTP_KEY_DIGEST = 32 }; /* bytes of SHA-256 */

/* Never 0. */
uint64_t http_key_salt(const uint8_t digest[HTTP_KEY_DIGEST]);

/* Of a digest in hexadecimal; 0: it is none. */
uint64_t http_key_salt_of(const char *digest);

#endif
