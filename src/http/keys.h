/* keys.h - authentication: API keys and the admin key, stored as digests. Keys come from a
 * file or the environment, never from the command line. A comparison takes the same time for
 * every wrong key. A reload replaces all keys at once. */
#ifndef HD_HTTP_KEYS_H
#define HD_HTTP_KEYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { HD_KEY_MIN_BYTES = 16, HD_KEY_MAX_BYTES = 512, HD_KEYS_MAX = 1024 };

typedef struct hd_keys hd_keys;

typedef struct hd_key_sources {
    const char *file, *admin_file; /* one key per line, # begins a comment; NULL: none */
    const char *text, *admin_text; /* one key each, from the environment; NULL: none */
} hd_key_sources;

hd_status hd_keys_open(hd_keys **out, const hd_key_sources *sources, hd_err *err);
void hd_keys_close(hd_keys *k); /* NULL is fine */

/* Reads the files again. On failure the old keys stay. Any thread may call. */
hd_status hd_keys_reload(hd_keys *k, hd_err *err);

typedef enum hd_right { HD_RIGHT_NONE, HD_RIGHT_USER, HD_RIGHT_ADMIN } hd_right;

/* Returns the rights of a key. *salt differs for each known key and is never 0. key may be
 * NULL. */
hd_right hd_keys_check(hd_keys *k, const char *key, uint64_t *salt);

bool hd_keys_user_set(hd_keys *k);  /* API keys are set: requests without one are refused */
bool hd_keys_admin_set(hd_keys *k); /* an admin key is set */

#endif
