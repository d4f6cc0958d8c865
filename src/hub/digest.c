/* digest.c - the two digests by which the hub identifies files, computed as the bytes
 * arrive. */
#include <stdio.h>
#include <string.h>

#include "hub/hub_internal.h"

enum { SHA1_DIGITS = 40, SHA256_DIGITS = 64, MAX_RAW_BYTES = 32 };

hub_digest_kind hub_digest_kind_of(const char *text) {
    if (hub_is_hex(text, SHA256_DIGITS)) return HUB_SHA256;
    return hub_is_hex(text, SHA1_DIGITS) ? HUB_GIT_SHA1 : HUB_NO_DIGEST;
}

static gnutls_digest_algorithm_t algorithm_of(hub_digest_kind kind) {
    return kind == HUB_SHA256 ? GNUTLS_DIG_SHA256 : GNUTLS_DIG_SHA1;
}

hd_status hub_digest_begin(hub_digest *d, hub_digest_kind kind, int64_t bytes, hd_err *err) {
    char header[40];
    hub_digest_deinit(d);
    if (gnutls_hash_init(&d->state, algorithm_of(kind)) != 0) {
        d->state = NULL;
        return HD_FAIL(err, HD_ENOMEM, "no memory for a digest");
    }
    if (kind != HUB_GIT_SHA1) return HD_OK;
    const int n = snprintf(header, sizeof header, "blob %lld", (long long)bytes);
    return hub_digest_add(d, header, (size_t)n + 1, err); /* with its NUL */
}

hd_status hub_digest_add(hub_digest *d, const void *bytes, size_t n, hd_err *err) {
    if (gnutls_hash(d->state, bytes, n) == 0) return HD_OK;
    return HD_FAIL(err, HD_EIO, "the library of digests failed");
}

void hub_digest_end(hub_digest *d, hub_digest_kind kind, char hex[HUB_HEX_BYTES]) {
    unsigned char raw[MAX_RAW_BYTES];
    const size_t n = gnutls_hash_get_len(algorithm_of(kind));
    gnutls_hash_deinit(d->state, raw);
    d->state = NULL;
    for (size_t i = 0; i < n; i++) snprintf(hex + 2 * i, 3, "%02x", raw[i]);
}

void hub_digest_deinit(hub_digest *d) {
    if (d->state) gnutls_hash_deinit(d->state, NULL);
    d->state = NULL;
}
